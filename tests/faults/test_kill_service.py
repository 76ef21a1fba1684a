"""Kill -9 the service at every boundary of an unwind and of the forward path: nothing acknowledged is lost.

Must not need a hook in the service: the endpoint and the database decide when.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx
import pytest

from app.domain.model import EntryKind
from tests.factories import owner_connection, undo_at
from tests.fakes import FakeEndpoint, Reply
from tests.faults.gates import Place, shut_gate, wait_until
from tests.faults.judgement import assert_undone, do_steps, requests_of
from tests.faults.processes import Relay, ServiceProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One session of three steps, about to fail; `held` holds an answer of the endpoint."""

    service: ServiceProcess
    endpoint: FakeEndpoint
    database_url: str
    session_id: str
    held: asyncio.Event = field(default_factory=asyncio.Event)

    async def fail(self) -> None:
        """Say that the run failed, and have it acknowledged."""
        answer = await self.service.agent.fail(self.session_id)
        assert answer.status_code == 202


Moment: TypeAlias = Callable[[Scene], "contextlib.AbstractAsyncContextManager[None]"]


def gated(kind: EntryKind, step: int | None, place: Place, *, is_acknowledged: bool = True) -> Moment:
    """Return the moment when the transaction that writes this entry waits, told to commit or not; the gate opens after the kill."""

    @contextlib.asynccontextmanager
    async def moment(scene: Scene) -> AsyncIterator[None]:
        async with shut_gate(scene.database_url, scene.session_id, kind, step, place) as gate:
            failing = asyncio.create_task(scene.service.agent.fail(scene.session_id))
            if is_acknowledged:
                await failing
            await gate.is_reached()
            yield
            await gate.open()
            if not is_acknowledged:
                with pytest.raises(httpx.TransportError):
                    await failing

    return moment


@contextlib.asynccontextmanager
async def held_by_endpoint(scene: Scene) -> AsyncIterator[None]:
    """Pass when the endpoint has done the newest undo and has not answered."""
    scene.endpoint.script("/undo/3", Reply(gate=scene.held), Reply())
    await scene.fail()
    await scene.endpoint.wait_for_requests(1)
    yield
    scene.held.set()


@contextlib.asynccontextmanager
async def waiting_to_retry(scene: Scene) -> AsyncIterator[None]:
    """Pass when the newest undo was put off by a second, and that is on record."""
    scene.endpoint.script("/undo/3", Reply(status=503, headers={"Retry-After": "1"}), Reply())
    await scene.fail()
    async with owner_connection(scene.database_url) as connection:
        await wait_until(
            connection,
            f"EXISTS (SELECT FROM outgoing_calls WHERE session_id = '{scene.session_id}' AND attempts = 1 AND NOT is_attempt_open)",
        )
    yield


STATEMENT, COMMIT = Place.STATEMENT, Place.COMMIT
# Moment of the kill, and the requests that steps 3, 2 and 1 get in all.
BOUNDARIES: dict[str, tuple[Moment, list[int]]] = {
    "fail_durable_and_not_answered": (gated(EntryKind.SESSION_FAILED, None, COMMIT, is_acknowledged=False), [1, 1, 1]),
    "claimed_and_not_counted": (gated(EntryKind.COMPENSATING, 3, STATEMENT), [1, 1, 1]),
    "counted_and_not_sent": (gated(EntryKind.COMPENSATING, 3, COMMIT), [1, 1, 1]),
    "held_by_endpoint": (held_by_endpoint, [2, 1, 1]),
    "waiting_to_retry": (waiting_to_retry, [2, 1, 1]),
    "answered_and_not_recorded": (gated(EntryKind.COMPENSATED, 3, STATEMENT), [2, 1, 1]),
    "between_two_undos": (gated(EntryKind.COMPENSATED, 3, COMMIT), [1, 1, 1]),
    "last_answered_and_not_recorded": (gated(EntryKind.COMPENSATED, 1, STATEMENT), [1, 1, 2]),
    "last_recorded": (gated(EntryKind.UNWOUND, None, COMMIT), [1, 1, 1]),
}


@pytest.mark.parametrize("boundary", BOUNDARIES)
async def test_every_undo_happens_once_when_the_service_is_killed(boundary: str, relay: Relay, relay_url: str) -> None:
    """At each boundary of an unwind: the next process finishes it, newest first, same keys, same bytes, each undo applied once."""
    moment, expected = BOUNDARIES[boundary]
    async with FakeEndpoint() as endpoint:
        keys = await do_steps(relay.current.agent, endpoint, boundary, STEPS)
        scene = Scene(service=relay.current, endpoint=endpoint, database_url=relay_url, session_id=boundary)
        async with moment(scene):
            relay.current.kill()
            assert await relay.current.exit_code() == -9
        service = await relay.go_on()
        await assert_undone(service.agent, service.auditor, endpoint, boundary, keys)
        requests = requests_of(endpoint, keys)
    assert [sum(request.key == key for request in requests) for key in keys] == expected
    if boundary == "counted_and_not_sent":
        assert requests[0].header("Countermand-Attempt") == "2", "the attempt was counted before it was sent"
    if boundary == "waiting_to_retry":
        assert requests[0].ended_at is not None
        assert requests[1].started_at - requests[0].ended_at >= 0.95, "no start again may cut a Retry-After short"


async def test_every_undo_happens_once_when_a_crowd_is_killed_again_and_again(relay: Relay) -> None:
    """Sixteen undos of different sessions in flight at once, two kills right after an answer: each undo once, in order."""
    all_failed = asyncio.Event()
    async with FakeEndpoint(default=Reply(gate=all_failed)) as endpoint:
        crowd = {f"crowd-{number}": await do_steps(relay.current.agent, endpoint, f"crowd-{number}", 2) for number in range(20)}
        for session_id in crowd:
            assert (await relay.current.agent.fail(session_id)).status_code == 202
        all_failed.set()
        for answers in (5, 27):
            await endpoint.wait_for_answers(answers)
            relay.current.kill()
            await relay.current.exit_code()
            await relay.go_on()
        for session_id, keys in crowd.items():
            await assert_undone(relay.current.agent, relay.current.auditor, endpoint, session_id, keys)


async def test_acknowledged_calls_stand_when_the_service_is_killed(relay: Relay) -> None:
    """An intercept that was answered repeats its ids under its key; a commit that was answered is still committed."""
    async with FakeEndpoint() as endpoint:
        calls: list[dict[str, Any]] = [
            {"step_index": step, "idempotency_key": f"call-{step}", "compensation": undo_at(endpoint.url("/undo"))} for step in (1, 2)
        ]
        told = [await relay.current.agent.intercept("forward", **call) for call in calls]
        committed = await relay.current.agent.commit("forward", 1, {"credit_id": "cr_1"})
        relay.current.kill()
        service = await relay.go_on()
        replayed, told_again = [await service.agent.intercept("forward", **call) for call in calls]
        committed_again = await service.agent.commit("forward", 1, {"credit_id": "cr_1"})
        kinds = await service.auditor.kinds("forward")
    assert [answer.status_code for answer in (*told, committed, told_again, committed_again)] == [201, 201, 200, 201, 200]
    assert told_again.json() == told[1].json()
    assert committed_again.json() == committed.json()
    assert (replayed.json()["decision"], replayed.json()["result"]) == ("replay", {"credit_id": "cr_1"})
    assert kinds == ["OPENED", "INTENT", "INTENT", "EXECUTED"]


async def test_a_call_is_registered_once_when_its_answer_was_lost(relay: Relay, relay_url: str) -> None:
    """Killed before one intercept and after another became durable: the agent asks again, and there is one effect of each."""
    async with FakeEndpoint() as endpoint, owner_connection(relay_url) as connection, AsyncExitStack() as stack:
        call: dict[str, Any] = {"step_index": 1, "idempotency_key": "call-1", "compensation": undo_at(endpoint.url("/undo/1"))}
        gates = {
            session_id: await stack.enter_async_context(shut_gate(relay_url, session_id, EntryKind.INTENT, 1, place))
            for session_id, place in {"not-durable": STATEMENT, "durable": COMMIT}.items()
        }
        asking = [asyncio.create_task(relay.current.agent.intercept(session_id, **call)) for session_id in gates]
        for gate in gates.values():
            await gate.is_reached()
        relay.current.kill()
        for asked in asking:
            with pytest.raises(httpx.TransportError):
                await asked
        for gate in gates.values():
            await gate.open()
        # A backend that waited at a gate finds out only afterwards that its client has gone.
        await wait_until(connection, "NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory')")
        kept = await connection.fetch("SELECT session_id, effect_id::text FROM effect_log WHERE session_id = ANY ($1)", list(gates))
        service = await relay.go_on()
        told = {session_id: (await service.agent.intercept(session_id, **call)).json() for session_id in gates}
    assert {answer["decision"] for answer in told.values()} == {"execute"}
    assert [tuple(row) for row in kept] == [("durable", told["durable"]["effect_id"])]
    for session_id in gates:
        assert await service.auditor.kinds(session_id) == ["OPENED", "INTENT"]
