"""Kill -9 the service around a release and during an action: it is seen what became of it, and nothing is done twice.

Must not need a hook in the service: the endpoint and the database decide when.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import httpx
import pytest

from app.domain.model import EntryKind
from tests.factories import Client, do_step, owner_connection, park
from tests.fakes import FakeEndpoint, Reply
from tests.faults.gates import Gate, Place, shut_attempt_gate, shut_gate, wait_until
from tests.faults.judgement import PATIENCE_SECONDS
from tests.faults.processes import Relay, ServiceProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAYLOAD = '{ "amount":100.00, "to":"alice"}'
DONE = Reply(body=b'{"id":"t-1"}')
STATEMENT, COMMIT = Place.STATEMENT, Place.COMMIT
STORY = ["AWAITING_APPROVAL", "APPROVED", "INTENT", "EXECUTED", "PIVOT"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One session whose call at step 1 is approved and about to be released; `held` holds an answer of the endpoint."""

    service: ServiceProcess
    endpoint: FakeEndpoint
    database_url: str
    session_id: str
    held: asyncio.Event = field(default_factory=asyncio.Event)

    async def resume(self) -> None:
        """Release the call, and have that acknowledged."""
        answer = await resume(self.service.operator, self.session_id)
        assert answer.is_success, answer.text


Moment: TypeAlias = Callable[[Scene], "contextlib.AbstractAsyncContextManager[None]"]
Shut: TypeAlias = Callable[[Scene], "contextlib.AbstractAsyncContextManager[Gate]"]


async def resume(client: Client, session_id: str, **options: Any) -> httpx.Response:
    """Release the call, under the one key that its operator uses for that."""
    return await client.resume(session_id, 1, PAYLOAD, idempotency_key="resume-1", **options)


def at_entry(kind: EntryKind, place: Place) -> Shut:
    """Return what shuts a gate in the way of this entry of step 1."""
    return lambda scene: shut_gate(scene.database_url, scene.session_id, kind, 1, place)


def at_attempt(place: Place) -> Shut:
    """Return what shuts a gate in the way of the count of the first attempt."""
    return lambda scene: shut_attempt_gate(scene.database_url, scene.session_id, place)


def gated(shut: Shut, *, is_acknowledged: bool = True) -> Moment:
    """Return the moment when the transaction that a gate stands in the way of waits there; it opens after the kill."""

    @contextlib.asynccontextmanager
    async def moment(scene: Scene) -> AsyncIterator[None]:
        async with shut(scene) as gate:
            resuming = asyncio.create_task(scene.resume())
            if is_acknowledged:
                await resuming
            await gate.is_reached()
            yield
            await gate.open()
            if not is_acknowledged:
                with pytest.raises(httpx.TransportError):
                    await resuming
        # A backend that waited at a gate finds out only afterwards that its client has gone.
        async with owner_connection(scene.database_url) as connection:
            await wait_until(connection, "NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory')")

    return moment


@contextlib.asynccontextmanager
async def acknowledged(scene: Scene) -> AsyncIterator[None]:
    """Pass when the release was answered."""
    await scene.resume()
    yield


@contextlib.asynccontextmanager
async def held_by_endpoint(scene: Scene) -> AsyncIterator[None]:
    """Pass when the endpoint has done what it was asked, and has not answered."""
    scene.endpoint.script("/wire", Reply(gate=scene.held), DONE)
    await scene.resume()
    await scene.endpoint.wait_for_requests(1)
    yield
    scene.held.set()


@contextlib.asynccontextmanager
async def waiting_to_retry(scene: Scene) -> AsyncIterator[None]:
    """Pass when the call was put off by a second, and that is on record."""
    scene.endpoint.script("/wire", Reply(status=503, headers={"Retry-After": "1"}), DONE)
    await scene.resume()
    async with owner_connection(scene.database_url) as connection:
        await wait_until(
            connection,
            f"EXISTS (SELECT FROM outgoing_calls WHERE session_id = '{scene.session_id}' AND attempts = 1 AND NOT is_attempt_open)",
        )
    yield


class Boundary(NamedTuple):
    """Moment of the kill, where the effect may stand when the next process looks, and the attempts that the endpoint hears of."""

    moment: Moment
    states: set[str]
    attempts: list[str]


UNDER_WAY = {"executing", "committed"}
BOUNDARIES: dict[str, Boundary] = {
    "release_not_durable": Boundary(gated(at_entry(EntryKind.INTENT, STATEMENT), is_acknowledged=False), {"approved"}, ["1"]),
    "release_durable_and_not_answered": Boundary(gated(at_entry(EntryKind.INTENT, COMMIT), is_acknowledged=False), UNDER_WAY, ["1"]),
    "claimed_and_not_counted": Boundary(gated(at_attempt(STATEMENT)), UNDER_WAY, ["1"]),
    "counted_and_not_sent": Boundary(gated(at_attempt(COMMIT)), UNDER_WAY, ["2"]),
    "held_by_endpoint": Boundary(held_by_endpoint, UNDER_WAY, ["1", "2"]),
    "waiting_to_retry": Boundary(waiting_to_retry, UNDER_WAY, ["1", "2"]),
    "answered_and_not_recorded": Boundary(gated(at_entry(EntryKind.EXECUTED, STATEMENT)), UNDER_WAY, ["1", "2"]),
    "recorded": Boundary(gated(at_entry(EntryKind.EXECUTED, COMMIT)), {"committed"}, ["1"]),
}


@contextlib.asynccontextmanager
async def opened(relay: Relay, database_url: str, session_id: str, *, is_action: bool) -> AsyncIterator[Scene]:
    """Have a call at step 1 of a session approved; the service executes it itself at an endpoint of its own, or its caller does."""
    service = relay.current
    async with FakeEndpoint({"/wire": [DONE]}) as endpoint:
        action = {"action": {"url": endpoint.url("/wire"), "timeout_ms": 60_000}} if is_action else {}
        (await service.admin.register(session_id, reversibility="irreversible", **action)).raise_for_status()
        await park(service.agent, session_id, 1, PAYLOAD, tool=session_id)
        (await service.operator.approve(session_id, 1)).raise_for_status()
        yield Scene(service=service, endpoint=endpoint, database_url=database_url, session_id=session_id)


async def kill(relay: Relay, scene: Scene, moment: Moment) -> ServiceProcess:
    """Kill the service at that moment and return the next one."""
    async with moment(scene):
        relay.current.kill()
        assert await relay.current.exit_code() == -9
    return await relay.go_on()


async def told(service: ServiceProcess, session_id: str) -> list[str]:
    """Return the kinds of step 1's entries of a journal that verifies."""
    verified = (await service.auditor.get(f"/sessions/{session_id}/journal/verify")).json()
    assert verified["valid"] is True, verified
    return [entry["kind"] for entry in await service.auditor.journal(session_id) if entry["step"] == 1]


async def assert_seen(service: ServiceProcess, session_id: str, states: set[str]) -> None:
    """Hold what an operator finds against where the call may stand: nowhere among what waits for a decision."""
    effect = await service.operator.effect(session_id, 1)
    assert effect["state"] in states
    assert (effect["approval"]["state"], effect["released_to"]) == (
        ("approved", None) if effect["state"] == "approved" else ("released", "operator-1")
    )
    for state, is_listed in (("pending", False), (effect["approval"]["state"], True)):
        items = (await service.operator.get("/approvals", params={"state": state, "limit": 200})).json()["items"]
        assert (session_id in {item["session_id"] for item in items}) is is_listed


@pytest.mark.parametrize("name", BOUNDARIES)
async def test_action_takes_place_once_when_the_service_is_killed(name: str, relay: Relay, relay_url: str) -> None:
    """At each boundary of a release and its action: the next process shows it and ends it, same key, same bytes, applied once."""
    boundary = BOUNDARIES[name]
    async with opened(relay, relay_url, name, is_action=True) as scene:
        service = await kill(relay, scene, boundary.moment)
        await assert_seen(service, name, boundary.states)
        done = await resume(service.operator, name, wait_s=PATIENCE_SECONDS)
        requests = scene.endpoint.received
        applications = scene.endpoint.applications_of(requests[0].key)
    assert (done.status_code, done.json()["decision"], done.json()["result"]) == (200, "executed", {"id": "t-1"})
    effect = await service.agent.effect(name, 1)
    assert {(request.key, request.body) for request in requests} == {(effect["forward_key"], PAYLOAD.encode())}
    assert ([request.header("Countermand-Attempt") for request in requests], applications) == (boundary.attempts, 1)
    assert await told(service, name) == STORY
    assert (await service.agent.session(name))["state"] == "active"
    for client in (service.admin, service.agent):
        assert (await resume(client, name)).json()["code"] == "already_released"


# Moment of the kill, and where the effect stands for the next process.
RELEASES: dict[str, tuple[Moment, str]] = {
    "run_not_durable": (gated(at_entry(EntryKind.INTENT, STATEMENT), is_acknowledged=False), "approved"),
    "run_durable_and_not_answered": (gated(at_entry(EntryKind.INTENT, COMMIT), is_acknowledged=False), "executing"),
    "run_answered": (acknowledged, "executing"),
}


@pytest.mark.parametrize("name", RELEASES)
async def test_permission_to_execute_is_given_once_when_the_service_is_killed(name: str, relay: Relay, relay_url: str) -> None:
    """Who was released to is on record; that principal gets its answer again under its key, nobody else, and reports the result."""
    moment, state = RELEASES[name]
    async with opened(relay, relay_url, name, is_action=False) as scene:
        service = await kill(relay, scene, moment)
    await assert_seen(service, name, {state})
    if state == "executing":
        assert (await resume(service.admin, name)).json()["code"] == "already_released"
    answers = [await resume(service.operator, name) for _ in range(2)]
    assert [(answer.status_code, answer.json()["decision"]) for answer in answers] == [(200, "execute")] * 2
    assert answers[0].text == answers[1].text
    assert (await service.agent.effect(name, 1))["released_to"] == "operator-1"
    (await service.operator.commit(name, 1, {"id": "t-1"})).raise_for_status()
    late = await resume(service.operator, name)
    assert (late.status_code, late.json()["code"], late.json()["state"]) == (409, "already_released", "committed")
    assert await told(service, name) == STORY


async def test_nothing_is_sent_again_when_the_run_had_failed_before_the_kill(relay: Relay, relay_url: str) -> None:
    """In flight when the run failed and the service died: nobody knows, so it is the pivot, a person is told, nothing is undone."""
    async with opened(relay, relay_url, "failed", is_action=True) as scene:

        @contextlib.asynccontextmanager
        async def failed_in_flight(scene: Scene) -> AsyncIterator[None]:
            async with held_by_endpoint(scene):
                (await do_step(scene.service.agent, "failed", 2, scene.endpoint.url("/undo")))
                assert (await scene.service.agent.fail("failed")).json()["state"] == "failed"
                yield

        service = await kill(relay, scene, failed_in_flight)
        session = (await service.agent.fail("failed", wait_s=PATIENCE_SECONDS)).json()
        paths = [request.path for request in scene.endpoint.received]
    assert (session["state"], session["halt_reason"], session["effects"][0]["state"]) == ("halted", "failed_after_pivot", "unknown")
    assert paths == ["/wire"]
    assert await told(service, "failed") == ["AWAITING_APPROVAL", "APPROVED", "INTENT", "FAILED", "PIVOT"]
