"""Operators' orders that meet the worker, a late report and one another: whatever comes first, nothing breaks and nothing is sent twice.

Must not look into the order of things: it holds what everybody saw against what the endpoint and the journal say.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import httpx
import pytest

from app.domain.model import UndoState
from tests.conftest import StartService
from tests.domain.world import AGREEMENT
from tests.factories import Client, JsonObject, Service
from tests.fakes import FakeEndpoint, Received, Reply
from tests.halts import REFUSED, Night
from tests.operators import order, requests_of, settled, steps_of, undo_ids
from tests.probes import fetch

ROUNDS = 8
CHAOS_ROUNDS = 24
AT_ONCE = 4  # sessions that are raced at the same time

Verb = Callable[[Client, Client, str, dict[int, str]], Awaitable[httpx.Response]]


def undo(step: int, verb: str, **body: Any) -> Verb:
    """Return an order about one step's undo."""

    async def give(operator: Client, agent: Client, name: str, ids: dict[int, str]) -> httpx.Response:
        return await order(operator, name, f"undo/{ids[step]}/{verb}", **body)

    return give


def about(path: str, **body: Any) -> Verb:
    """Return an order about the session, or a call of it."""

    async def give(operator: Client, agent: Client, name: str, ids: dict[int, str]) -> httpx.Response:
        return await order(operator, name, path, **body)

    return give


async def commit_late(operator: Client, agent: Client, name: str, ids: dict[int, str]) -> httpx.Response:
    """Have the agent report step 2, long after its run was over."""
    return await agent.commit(name, 2, {"id": "late"})


VERBS: dict[str, Verb] = {
    "retry": undo(2, "retry"),
    "retry below": undo(1, "retry"),
    "skip": undo(2, "skip"),
    "by hand": undo(2, "skip", by_hand=True),
    "skip below": undo(1, "skip"),
    "unwind": about("unwind"),
    "halt": about("halt"),
    "resolve": about("resolve"),
    "happened": about("effects/2/settle", outcome="committed", result={"id": "seen"}),
    "did nothing": about("effects/2/settle", outcome="not_applied"),
    "late": commit_late,
}


async def refused(night: Night, name: str, random: Random) -> None:
    """Halt a session because the undo of its second step, of which nobody knows whether it happened, is refused once."""
    night.endpoint.script(f"/{name}/2", REFUSED, Reply())
    await night.run(name, 1)
    await night.open_step(name, 2)
    await night.failed(name)


async def unknown(night: Night, name: str, random: Random) -> None:
    """Halt a session because a person has to find out about its second step."""
    await night.run(name, 1)
    await night.open_step(name, 2, on_unknown="escalate")
    await night.failed(name)


async def begun(night: Night, name: str, random: Random) -> None:
    """Fail a session, and leave it to the worker, who tries each undo twice and has got somewhere with it when this returns."""
    for step in (1, 2):
        night.endpoint.script(f"/{name}/{step}", Reply(status=503), Reply())
    await night.run(name, 1)
    await night.open_step(name, 2)
    (await night.service.agent.fail(name)).raise_for_status()
    await night.reached(name, random.randrange(5))


BRING = {"refused": refused, "unknown": unknown, "begun": begun}


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """From where which verbs meet, and how it may end: state, halt reason and whose undos were sent, with the statuses in order."""

    bring: str
    verbs: tuple[str, ...]
    ends: tuple[tuple[str, str | None, list[int], list[int]], ...]


RACES = {
    "retry-retry": Race(
        bring="refused",
        verbs=("retry",) * 4,
        ends=(("compensated", None, [2, 2, 1], [202] * 4),),
    ),
    "skip-unwind": Race(
        bring="refused",
        verbs=("by hand", "unwind"),
        ends=(
            ("compensated", None, [2, 1], [200, 202]),
            ("compensated", None, [2, 2, 1], [409, 202]),
        ),
    ),
    "retry-resolve": Race(
        bring="refused",
        verbs=("retry", "resolve"),
        ends=(
            ("resolved", "compensation_failed", [2], [409, 200]),
            ("compensated", None, [2, 2, 1], [202, 409]),
        ),
    ),
    "unwind-unwind": Race(
        bring="refused",
        verbs=("unwind",) * 4,
        ends=(("compensated", None, [2, 2, 1], [202] * 4),),
    ),
    "resolve-late": Race(
        bring="refused",
        verbs=("resolve", "late"),
        ends=(("resolved", "compensation_failed", [2], [200, 409]),),
    ),
    "unwind-late": Race(
        bring="refused",
        verbs=("unwind", "late"),
        ends=(
            # Recorded for the person, who then orders the unwind; or it meets an undo that was sent, and that person looks again.
            ("compensated", None, [2, 2, 1], [202, 409]),
            ("halted", "late_effect", [2], [202, 409]),
            ("halted", "late_effect", [2, 2], [202, 409]),
            ("halted", "late_effect", [2, 2, 1], [202, 409]),
        ),
    ),
    "settle-unwind": Race(
        bring="unknown",
        verbs=("did nothing", "unwind"),
        ends=(
            ("compensated", None, [1], [200, 202]),
            ("halted", "unknown_outcome", [], [409, 202]),
            ("halted", "unknown_outcome", [], [200, 202]),  # it halts again, and then it is settled
        ),
    ),
    "halt-worker": Race(
        bring="begun",
        verbs=("halt",),
        ends=(
            ("halted", "operator", [], [202]),
            ("halted", "operator", [2], [202]),
            ("halted", "operator", [2, 2], [202]),
            ("halted", "operator", [2, 2, 1], [202]),
            ("compensated", None, [2, 2, 1, 1], [202]),
            ("compensated", None, [2, 2, 1, 1], [409]),
        ),
    ),
    "halt-halt": Race(
        bring="begun",
        verbs=("halt", "halt"),
        ends=(
            ("halted", "operator", [], [202, 202]),
            ("halted", "operator", [2], [202, 202]),
            ("halted", "operator", [2, 2], [202, 202]),
            ("halted", "operator", [2, 2, 1], [202, 202]),
            ("compensated", None, [2, 2, 1, 1], [202, 202]),
            ("compensated", None, [2, 2, 1, 1], [409, 202]),
            ("compensated", None, [2, 2, 1, 1], [202, 409]),
            ("compensated", None, [2, 2, 1, 1], [409, 409]),
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """Two replicas on one database, and the endpoint that both send to."""

    replicas: Sequence[Service]
    night: Night
    random: Random

    async def race(self, name: str, bring: str, verbs: Sequence[str]) -> tuple[JsonObject, list[int]]:
        """Let verbs meet, each through either replica; return the session at rest and the verbs' statuses."""
        await BRING[bring](self.night, name, self.random)
        operator = self.night.service.operator
        ids = await undo_ids(operator, name)
        chosen = [(verb, self.random.choice(self.replicas)) for verb in verbs]
        answers = await asyncio.gather(*(VERBS[verb](replica.operator, replica.agent, name, ids) for verb, replica in chosen))
        return await settled(operator, name), [answer.status_code for answer in answers]


@pytest.fixture
async def arena(services: StartService, endpoint: FakeEndpoint) -> Arena:
    """Return two replicas with connections enough that nobody has to wait for one."""
    replicas = [await services(database_connections=10, circuit_calls=0) for _ in range(2)]  # endpoints are away on purpose
    return Arena(replicas=replicas, night=Night(service=replicas[0], endpoint=endpoint), random=Random(4921))


@pytest.mark.parametrize("name", RACES)
async def test_one_order_wins_and_the_session_is_whole_when_orders_meet(name: str, arena: Arena) -> None:
    """Each round ends in one of the ways that some order of the verbs allows, and nothing else has left a trace."""
    race = RACES[name]
    rounds = [f"{name}-{number}" for number in range(ROUNDS)]
    for first in range(0, ROUNDS, AT_ONCE):
        batch = rounds[first : first + AT_ONCE]
        ends = await asyncio.gather(*(arena.race(one, race.bring, race.verbs) for one in batch))
        for one, (session, statuses) in zip(batch, ends, strict=True):
            assert (session["state"], session["halt_reason"], steps_of(arena.night.endpoint, one), statuses) in race.ends
    await expect_whole(arena, rounds)


async def test_nothing_breaks_when_many_orders_meet_in_any_order(arena: Arena) -> None:
    """Any five of the verbs at once, on sessions that are halted or just being unwound: no crash, and every trace agrees."""
    rounds = [f"chaos-{number}" for number in range(CHAOS_ROUNDS)]
    seen: Counter[int] = Counter()
    for first in range(0, CHAOS_ROUNDS, AT_ONCE):
        batch = rounds[first : first + AT_ONCE]
        picked = [(one, arena.random.choice([*BRING]), arena.random.choices([*VERBS], k=5)) for one in batch]
        for _, statuses in await asyncio.gather(*(arena.race(*one) for one in picked)):
            seen.update(statuses)
    assert set(seen) == {200, 202, 409}
    await expect_whole(arena, rounds)


async def expect_whole(arena: Arena, names: Sequence[str]) -> None:
    """Hold sessions at rest against the endpoint's log and the journal."""
    night = arena.night
    for name in names:
        session = await night.service.operator.session(name)
        states = {effect["step_index"]: effect["state"] for effect in session["effects"]}
        for entry in session["undo_stack"]:
            assert states[entry["step_index"]] in AGREEMENT[UndoState(entry["state"])], (name, entry["step_index"])
        await expect_told(arena, name, session)
        expect_one_sender(requests_of(night.endpoint, name))
    due = await fetch(night.service.database_url, "SELECT session_id FROM outgoing_calls WHERE due_at IS NOT NULL")
    assert due == []


async def expect_told(arena: Arena, name: str, session: JsonObject) -> None:
    """Find one entry in the journal for each undo that is settled, and the chain unbroken."""
    client = arena.replicas[-1].auditor
    settled_steps = Counter(entry["step"] for entry in await client.journal(name) if entry["kind"] in {"COMPENSATED", "SKIPPED"})
    assert settled_steps == Counter(
        entry["step_index"] for entry in session["undo_stack"] if entry["state"] in {"compensated", "skipped"}
    ), name
    assert (await client.get(f"/sessions/{name}/journal/verify")).json()["valid"], name


def expect_one_sender(requests: Sequence[Received]) -> None:
    """Find each request begun after the one before had ended, newest step first, and one key with one body for each step."""
    for before, after in pairwise(requests):
        assert before.ended_at is not None
        assert before.ended_at <= after.started_at
        assert before.path >= after.path
    assert len({(request.path, request.key, request.body) for request in requests}) == len({request.path for request in requests})
    assert all(count == 1 for count in Counter(request.path for request in requests if request.is_applied).values())
