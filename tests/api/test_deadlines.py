"""Sessions whose agent fell silent or ran out of time fail, once and only then; a sign of life keeps them. Rows are aged, nobody waits."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import TypeVar

import httpx
import pytest

from app.domain.draft import Draft, Surroundings
from app.domain.model import HaltReason, SessionState
from app.domain.outcomes import AGENT_TIMEOUT, time_out
from app.engine.clock import SystemClock
from app.engine.deadlines import SESSIONS_PER_SWEEP
from tests.conftest import StartService
from tests.domain.world import START, new_session
from tests.factories import JsonObject, Service, deadlines_of, do_step, owner_connection, undo_at
from tests.fakes import FakeEndpoint
from tests.probes import fetch, rest, spoil

Result = TypeVar("Result")

IDLE_SECONDS = 1_000
NEVER = {"sweep_seconds": 3_600}  # the service's own sweep happens once, at its start
PATIENCE_SECONDS = 20.0
AT_ONCE = 10  # requests in flight: more would wait for connections longer than the service lets them

LET_BE_SILENT_SQL = """
UPDATE sessions
SET active_at = active_at - make_interval(secs => idle_seconds)
WHERE session_id = ANY ($1::text[])
"""
LET_BE_OVER_SQL = """
UPDATE sessions
SET deadline_at = clock_timestamp()
WHERE session_id = ANY ($1::text[])
"""
# How far from now, in seconds, the idle deadline of each session is.
LET_BE_ALMOST_SILENT_SQL = """
UPDATE sessions AS s
SET active_at = clock_timestamp() + make_interval(secs => near.seconds - s.idle_seconds)
FROM unnest($1::text[], $2::float8[]) AS near (session_id, seconds)
WHERE s.session_id = near.session_id
"""


def code(response: httpx.Response) -> tuple[int, str]:
    """Return status and code of a refusal."""
    return response.status_code, response.json()["code"]


async def begin(service: Service, endpoint: FakeEndpoint, *names: str) -> None:
    """Open sessions that may be silent for a while, each with one call done."""
    for name in names:
        (await service.agent.put(f"/sessions/{name}", {"idle_seconds": IDLE_SECONDS})).raise_for_status()
        await do_step(service.agent, name, 1, endpoint.url(f"/{name}"))


async def all_of(acts: Iterable[Awaitable[Result]]) -> list[Result]:
    """Let acts happen together, a bounded number at once, and return their results in order."""
    free = asyncio.Semaphore(AT_ONCE)

    async def one(act: Awaitable[Result]) -> Result:
        async with free:
            return await act

    return list(await asyncio.gather(*map(one, acts)))


@asynccontextmanager
async def sweeping(*services: Service) -> AsyncIterator[None]:
    """Sweep without a pause on every service."""
    sweepers = [asyncio.create_task(deadlines_of(service).run()) for service in services]
    try:
        yield
    finally:
        for sweeper in sweepers:
            sweeper.cancel()
        ended = await asyncio.gather(*sweepers, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended


@pytest.mark.parametrize(
    ("state", "idle_after", "ends_after", "is_failed"),
    [
        (SessionState.ACTIVE, 10, None, True),
        (SessionState.ACTIVE, 11, None, False),
        (SessionState.ACTIVE, None, 10, True),
        (SessionState.ACTIVE, None, 11, False),
        (SessionState.ACTIVE, 11, 10, True),
        (SessionState.ACTIVE, None, None, False),
        *((state, 1, 1, False) for state in SessionState if state is not SessionState.ACTIVE),
    ],
)
def test_session_is_out_of_time_from_the_very_moment_on(
    state: SessionState,
    idle_after: int | None,
    ends_after: int | None,
    is_failed: bool,
) -> None:
    """Ten seconds after its last sign of life: the boundary belongs to the deadline, and only an active session has one."""
    halted = {"halt_reason": HaltReason.OPERATOR} if state is SessionState.HALTED else {}
    ends_at = None if ends_after is None else START + timedelta(seconds=ends_after)
    session = new_session(state, idle_seconds=idle_after, deadline_at=ends_at, **halted)
    draft = Draft(session, Surroundings(now=START + timedelta(seconds=10), actor="orchestrator", random_bytes=bytes))
    time_out(draft, [])
    assert draft.is_empty is not is_failed
    if is_failed:
        (failed, *_) = draft.changes().entries
        assert (failed.kind, json.loads(failed.body)["error"]) == ("SESSION_FAILED", AGENT_TIMEOUT)


@pytest.mark.parametrize("sql", [LET_BE_SILENT_SQL, LET_BE_OVER_SQL])
async def test_session_fails_and_is_undone_when_its_time_is_up(services: StartService, endpoint: FakeEndpoint, sql: str) -> None:
    """Silence and the deadline are one failure, `agent_timeout`, told in the journal; what was under way is undone as unknown."""
    service = await services(**NEVER)
    await begin(service, endpoint, "s", "other")
    await service.agent.intercept("s", step_index=2, compensation=undo_at(endpoint.url("/s2")))
    await deadlines_of(service).sweep()
    assert (await service.agent.session("s"))["state"] == "active"
    await fetch(service.database_url, sql, ["s"])
    await deadlines_of(service).sweep()
    await deadlines_of(service).sweep()
    assert (await service.agent.session("other"))["state"] == "active"

    ended: JsonObject = await rest(service.agent, "s")
    assert (ended["state"], ended["clean"]) == ("compensated", True)
    assert [(request.path, request.header("Countermand-Outcome")) for request in endpoint.received] == [
        ("/s2", "unknown"),
        ("/s", "committed"),
    ]
    failures = [entry for entry in await service.operator.journal("s") if entry["kind"] == "SESSION_FAILED"]
    assert [(entry["actor"], json.loads(entry["body"])) for entry in failures] == [
        ("orchestrator", {"error": "agent_timeout", "unknown_steps": [2], "not_applied_steps": [], "in_flight_steps": []})
    ]
    assert (await service.auditor.get("/sessions/s/journal/verify")).json()["valid"]
    assert code(await service.agent.complete("s")) == (409, "session_not_active")


async def test_running_service_finds_dead_agents_by_itself(services: StartService, endpoint: FakeEndpoint) -> None:
    """Nobody has to ask: two services sweep, and each session fails once."""
    service, _ = await services(sweep_seconds=0.05), await services(sweep_seconds=0.05)
    names = [f"s{number}" for number in range(6)]
    await begin(service, endpoint, *names)
    await fetch(service.database_url, LET_BE_SILENT_SQL, names)
    for request in await endpoint.wait_for_answers(len(names), PATIENCE_SECONDS):
        assert request.header("Countermand-Attempt") == "1"
    for name in names:
        assert (await rest(service.agent, name))["state"] == "compensated"
        assert (await service.operator.kinds(name)).count("SESSION_FAILED") == 1
    assert len(endpoint.received) == len(names)


async def test_default_idleness_holds_when_an_agent_says_nothing(services: StartService, endpoint: FakeEndpoint) -> None:
    """A session that an intercept opened has the deployment's patience; one that names its own keeps it; the deadline may be past."""
    service = await services(**NEVER, session_idle_seconds=77)
    await do_step(service.agent, "plain", 1, endpoint.url("/undo"))
    (await service.agent.put("/sessions/own", {"idle_seconds": 5_000})).raise_for_status()
    assert (await service.agent.session("plain"))["idle_seconds"] == 77
    await fetch(service.database_url, "UPDATE sessions SET active_at = active_at - interval '78 s'")
    await deadlines_of(service).sweep()
    states = {name: (await service.agent.session(name))["state"] for name in ("plain", "own")}
    assert (states["plain"] != "active", states["own"]) == (True, "active")
    past = await service.agent.put("/sessions/past", {"deadline_at": "2020-01-01T00:00:00+02:00"})
    assert (past.status_code, past.json()["deadline_at"]) == (201, "2019-12-31T22:00:00.000000Z")
    await deadlines_of(service).sweep()
    assert (await service.agent.session("past"))["state"] == "compensated"


async def test_session_stays_when_it_waits_for_a_person_or_has_ended(services: StartService, endpoint: FakeEndpoint) -> None:
    """Waiting for approval is no idleness, however long; what has ended does not end again."""
    service = await services(**NEVER)
    await begin(service, endpoint, "waiting", "completed", "undone")
    await service.agent.intercept("waiting", step_index=2, reversibility="irreversible")
    await service.agent.complete("completed")
    await rest(service.agent, "undone")
    names = ["waiting", "completed", "undone"]
    before = {name: (await service.agent.get(f"/sessions/{name}")).text for name in names}
    await fetch(service.database_url, "UPDATE sessions SET active_at = active_at - interval '10 years', idle_seconds = 1")
    await fetch(service.database_url, "UPDATE sessions SET idle_seconds = $1", IDLE_SECONDS)
    await fetch(service.database_url, "UPDATE sessions SET active_at = active_at - interval '1 hour'")
    await deadlines_of(service).sweep()
    assert {name: (await service.agent.get(f"/sessions/{name}")).text for name in names} == before
    assert len(endpoint.received) == 1


async def test_session_is_halted_when_its_time_is_up_past_the_pivot(services: StartService, endpoint: FakeEndpoint) -> None:
    """A dead agent's failure is judged like any other: nothing is undone behind an irreversible effect."""
    service = await services(**NEVER)
    await begin(service, endpoint, "s")
    await service.admin.register("mail", reversibility="irreversible", approval={"required": False})
    (await service.agent.intercept("s", tool="mail", step_index=2)).raise_for_status()
    await fetch(service.database_url, LET_BE_SILENT_SQL, ["s"])
    await deadlines_of(service).sweep()
    session = await service.agent.session("s")
    assert (session["state"], session["halt_reason"], session["pivoted"]) == ("halted", "failed_after_pivot", True)
    assert endpoint.received == []


async def test_touch_moves_the_idle_deadline_and_nothing_else(services: StartService, endpoint: FakeEndpoint) -> None:
    """No journal entry, no new version, no other time; it also counts while a person is asked; after the end it is refused."""
    service = await services(**NEVER)
    await begin(service, endpoint, "s")
    before = await service.agent.get("/sessions/s")
    journal = await service.operator.journal("s")
    await fetch(service.database_url, LET_BE_SILENT_SQL, ["s"])
    (silent,) = await fetch(service.database_url, "SELECT active_at FROM sessions")
    touched = await service.agent.touch("s")
    assert touched.status_code == 200
    steps = {"effects", "undo_stack", "unreadable_steps", "held_by"}
    assert touched.json() == {name: value for name, value in before.json().items() if name not in steps}
    after = await service.agent.get("/sessions/s")
    assert (after.text, after.headers["ETag"]) == (before.text, before.headers["ETag"])
    assert await service.operator.journal("s") == journal
    (alive,) = await fetch(service.database_url, "SELECT active_at, clock_timestamp() AS now FROM sessions")
    assert alive["active_at"] > silent["active_at"]
    assert alive["now"] - alive["active_at"] < timedelta(seconds=60)
    await deadlines_of(service).sweep()
    assert (await service.agent.session("s"))["state"] == "active"

    await service.agent.intercept("s", step_index=2, reversibility="irreversible")
    assert (await service.agent.touch("s")).json()["state"] == "awaiting_approval"
    assert code(await service.operator.touch("s")) == (403, "role_not_allowed")
    assert code(await service.agent.touch("none")) == (404, "session_not_found")
    await rest(service.agent, "s")
    late = await service.agent.touch("s")
    assert (code(late), late.json()["state"]) == ((409, "session_not_active"), "compensated")


async def test_every_write_counts_as_a_sign_of_life(services: StartService, endpoint: FakeEndpoint) -> None:
    """An agent that works does not have to touch."""
    service = await services(**NEVER)
    await begin(service, endpoint, "s")
    undo = undo_at(endpoint.url("/s"))
    acts: list[Callable[[], Awaitable[httpx.Response]]] = [
        lambda: service.agent.intercept("s", step_index=2, compensation=undo),
        lambda: service.agent.fail_effect("s", 2, "unknown"),
        lambda: service.agent.commit("s", 2, {}),
        lambda: service.agent.touch("s"),
    ]
    for act in acts:
        await fetch(service.database_url, LET_BE_SILENT_SQL, ["s"])
        (await act()).raise_for_status()
        await deadlines_of(service).sweep()
        assert (await service.agent.session("s"))["state"] == "active"


async def test_session_stays_when_it_moves_between_the_sweeps_look_and_its_lock(services: StartService, endpoint: FakeEndpoint) -> None:
    """What seemed overdue is judged again under the lock, by the moment after the wait."""
    service = await services(**NEVER)
    await begin(service, endpoint, "s")
    await fetch(service.database_url, LET_BE_SILENT_SQL, ["s"])
    waiting_sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%FOR NO KEY UPDATE%'"
    async with owner_connection(service.database_url) as connection, owner_connection(service.database_url) as watcher:
        async with connection.transaction():
            await connection.execute("UPDATE sessions SET active_at = clock_timestamp(), revision = revision + 1")
            sweep = asyncio.create_task(deadlines_of(service).sweep())
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not await watcher.fetchval(waiting_sql):
                    await SystemClock().sleep(0.01)
        await sweep
    assert (await service.agent.session("s"))["state"] == "active"
    assert endpoint.received == []


async def test_session_fails_as_others_do_when_its_undo_cannot_be_read(services: StartService, endpoint: FakeEndpoint) -> None:
    """A row that cannot be read stops neither the sweep nor the service, and its own session not before a person is called."""
    service = await services(**NEVER)
    await begin(service, endpoint, "a", "bad", "c")
    await fetch(service.database_url, LET_BE_SILENT_SQL, ["a", "bad", "c"])
    await spoil(service.database_url, "UPDATE undo_stack SET compensation = 'nonsense'::bytea WHERE session_id = 'bad'")
    await deadlines_of(service).sweep()
    for name in ("a", "c"):
        assert (await rest(service.agent, name))["state"] == "compensated"
    bad = await rest(service.agent, "bad")
    assert (bad["state"], bad["halt_reason"]) == ("halted", "poison")


async def test_a_herd_is_failed_in_several_sweeps(services: StartService) -> None:
    """More dead agents than one sweep takes: none is forgotten."""
    service = await services(**NEVER)
    names = [f"s{number}" for number in range(SESSIONS_PER_SWEEP + 5)]
    await all_of(service.agent.put(f"/sessions/{name}", {"idle_seconds": IDLE_SECONDS}) for name in names)
    await fetch(service.database_url, LET_BE_SILENT_SQL, names)
    for expected in (5, 0):
        await deadlines_of(service).sweep()
        (left,) = await fetch(service.database_url, "SELECT count(*) AS n FROM sessions WHERE state = 'active'")
        assert left["n"] == expected


ROUNDS_PER_BATCH = 50
# Batches of each, 500 rounds in all, and about what a batch takes, seconds: the agents' acts fall before and after their deadlines.
RACES = [("complete", 5, 0.05), ("commit", 3, 0.05), ("touch", 2, 0.2)]


async def race(service: Service, verb: str, name: str) -> int:
    """Let the agent act once and return the status it got."""
    match verb:
        case "complete":
            return (await service.agent.complete(name)).status_code
        case "commit":
            return (await service.agent.commit(name, 1, {})).status_code
        case _:
            return (await service.agent.touch(name)).status_code


@pytest.mark.parametrize(("verb", "batches", "spread_seconds"), RACES)
async def test_session_ends_one_way_when_the_sweep_meets_its_agent_at_the_deadline(
    services: StartService, endpoint: FakeEndpoint, verb: str, batches: int, spread_seconds: float
) -> None:
    """Taken in time: it stands and nothing is ever undone. Refused: it failed and its undo is made once. Never both, on two services."""
    settings = {**NEVER, "session_idle_seconds": IDLE_SECONDS, "database_connections": 10}
    first, second = await services(**settings), await services(**settings)
    dice = random.Random(verb)
    seen: Counter[tuple[bool, str, int]] = Counter()
    async with sweeping(first, second):
        for batch in range(batches):
            names = [f"{verb}-{batch}-{number}" for number in range(ROUNDS_PER_BATCH)]
            await all_of(open_round(first, endpoint, verb, name) for name in names)
            nearness = [dice.uniform(0, spread_seconds) for _ in names]
            await fetch(first.database_url, LET_BE_ALMOST_SILENT_SQL, names, nearness)
            statuses = await all_of(race(dice.choice((first, second)), verb, name) for name in names)
            states = await at_rest(first, names)
            undos = [len(endpoint.requests(f"/{name}")) for name in names]
            seen.update(zip((status == 200 for status in statuses), states, undos, strict=True))
    stands = (True, "completed" if verb == "complete" else "active", 0)
    undone = (False, "compensated", 1)
    late = (False, "halted", 1)  # the commit came when its undo was on its way: a person is told
    assert set(seen) <= {stands, undone} | ({late} if verb == "commit" else set()), seen
    assert seen[stands] > 0
    assert sum(seen.values()) - seen[stands] > 0
    for path, requests in Counter(request.path for request in endpoint.received).items():
        assert requests == 1, path


async def open_round(service: Service, endpoint: FakeEndpoint, verb: str, name: str) -> None:
    """Open one session with one undoable call, done unless the race is about its commit."""
    (await service.agent.intercept(name, step_index=1, compensation=undo_at(endpoint.url(f"/{name}")))).raise_for_status()
    if verb != "commit":
        (await service.agent.commit(name, 1, {})).raise_for_status()


async def at_rest(service: Service, names: list[str]) -> list[str]:
    """Return where sessions stand, once those that failed are at rest."""
    sql = "SELECT session_id, state::text FROM sessions WHERE session_id = ANY ($1::text[])"
    unwinding = [row["session_id"] for row in await fetch(service.database_url, sql, names) if row["state"] in {"failed", "compensating"}]
    await all_of(rest(service.agent, name) for name in unwinding)
    states = {row["session_id"]: row["state"] for row in await fetch(service.database_url, sql, names)}
    return [states[name] for name in names]


async def test_deadline_holds_when_the_agent_is_busy(services: StartService, endpoint: FakeEndpoint) -> None:
    """`deadline_at` is no idleness: a session that works past it fails all the same."""
    service = await services(**NEVER)
    await begin(service, endpoint, "s")
    await fetch(service.database_url, LET_BE_OVER_SQL, ["s"])
    (await service.agent.touch("s")).raise_for_status()
    await deadlines_of(service).sweep()
    ended: JsonObject = await rest(service.agent, "s")
    assert ended["state"] == "compensated"
    assert datetime.fromisoformat(ended["deadline_at"]) <= datetime.fromisoformat(ended["updated_at"])


async def test_nothing_new_is_begun_or_completed_when_the_deadline_is_over_and_nobody_sweeps(
    services: StartService, endpoint: FakeEndpoint
) -> None:
    """A replica without an orchestrator keeps the deadline too; what happened may still be reported, and a sweep fails the session."""
    service = await services(**NEVER, has_orchestrator=False)
    await begin(service, endpoint, "s")
    (await service.agent.intercept("s", step_index=2, compensation=undo_at(endpoint.url("/s")))).raise_for_status()
    await fetch(service.database_url, LET_BE_OVER_SQL, ["s"])

    refused = await service.agent.intercept("s", step_index=3, compensation=undo_at(endpoint.url("/s")))
    assert code(refused) == (409, "session_past_deadline")
    assert (await service.agent.commit("s", 2)).status_code == 200
    assert code(await service.agent.complete("s")) == (409, "session_past_deadline")

    await deadlines_of(service).sweep()
    assert (await service.agent.session("s"))["state"] == "failed"


async def test_execute_told_again_counts_as_a_sign_of_life(services: StartService, endpoint: FakeEndpoint) -> None:
    """An agent that is told to run its tool again is not failed a moment later for its silence."""
    service = await services(**NEVER, has_orchestrator=False)
    (await service.agent.put("/sessions/s", {"idle_seconds": IDLE_SECONDS})).raise_for_status()
    asked: JsonObject = {"idempotency_key": "k", "step_index": 1, "compensation": undo_at(endpoint.url("/s"))}
    first = await service.agent.intercept("s", **asked)
    await fetch(service.database_url, LET_BE_SILENT_SQL, ["s"])
    again = await service.agent.intercept("s", **asked)
    assert (again.status_code, again.json()) == (201, first.json())

    await deadlines_of(service).sweep()
    assert (await service.agent.session("s"))["state"] == "active"
