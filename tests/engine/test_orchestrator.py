"""The loop that unwinds: bounds, leases, a stop, lost notifications and connections; the endpoint's log and the database are witnesses."""

import asyncio
from contextlib import AsyncExitStack
from uuid import UUID

import pytest

from app.domain.model import CallId, CallKind, OrgName, SessionId
from app.engine.unwind import Holding
from app.storage.claims import Claim
from tests.conftest import StartService
from tests.factories import JsonObject, do_step, open_service
from tests.fakes import FakeEndpoint, Reply
from tests.probes import PATIENCE_SECONDS, call_of, fetch, make_due, no_claims, rest, take_lease_away

TERMINATE_SQL = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE $1 AND datname = current_database()"
# Due, and in nobody's hands: what workers without room have left.
LEFT_SQL = "SELECT count(*) AS left FROM outgoing_calls WHERE due_at IS NOT NULL AND leased_by IS NULL AND step_index = 1"
WAITING_SQL = "SELECT count(*) AS waiting FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


async def test_destination_is_spared_when_many_sessions_unwind(services: StartService, endpoint: FakeEndpoint) -> None:
    """No more than the bound is in flight to one host and port, and another destination does not wait for it."""
    service = await services(max_calls=6, max_calls_per_destination=2)
    gate = asyncio.Event()
    endpoint.script("/slow", Reply(gate=gate))
    names = [f"s{number}" for number in range(8)]
    for name in names:
        await do_step(service.agent, name, 1, endpoint.url("/slow"))
    for name in names:
        (await service.agent.fail(name)).raise_for_status()
    await endpoint.wait_for_requests(2)
    async with FakeEndpoint() as elsewhere:
        await do_step(service.agent, "elsewhere", 1, elsewhere.url("/undo"))
        assert (await rest(service.agent, "elsewhere"))["state"] == "compensated"
    assert (len(endpoint.received), endpoint.max_concurrency) == (2, 2)
    gate.set()
    found = await asyncio.gather(*(rest(service.agent, name) for name in names))
    assert {session["state"] for session in found} == {"compensated"}
    assert (len(endpoint.received), endpoint.max_concurrency) == (8, 2)


async def test_destination_is_spared_when_sessions_move_on_to_it(services: StartService, endpoint: FakeEndpoint) -> None:
    """Workers from elsewhere find no more room than claims do, even all at once; without room they leave the call, and their slot."""
    service = await services(max_calls=6, max_calls_per_destination=2)
    hung, answering = asyncio.Event(), asyncio.Event()
    endpoint.script("/hangs", Reply(gate=hung))
    names = [f"s{number}" for number in range(6)]
    async with AsyncExitStack() as stack:
        tops = [await stack.enter_async_context(FakeEndpoint(default=Reply(gate=answering))) for _ in range(3)]
        for number, name in enumerate(names):
            await do_step(service.agent, name, 1, endpoint.url("/hangs"))
            await do_step(service.agent, name, 2, tops[number % 3].url("/top"))
        for name in names:
            (await service.agent.fail(name)).raise_for_status()
        for top in tops:
            await top.wait_for_requests(2)
        answering.set()
        await endpoint.wait_for_requests(2)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await fetch(service.database_url, LEFT_SQL))[0]["left"] < 4:
                pass  # every look is a round trip
        assert [len(top.received) for top in tops] == [2, 2, 2]
        await do_step(service.agent, "innocent", 1, tops[0].url("/innocent"))
        assert (await rest(service.agent, "innocent"))["state"] == "compensated"
    assert (len(endpoint.received), endpoint.max_concurrency) == (2, 2)
    hung.set()
    found = await asyncio.gather(*(rest(service.agent, name) for name in names))
    assert {session["state"] for session in found} == {"compensated"}
    assert (len(endpoint.received), endpoint.max_concurrency) == (6, 2)
    assert {request.header("Countermand-Attempt") for request in endpoint.received} == {"1"}


# Whether the worker is stopping, where its session's next call goes, whether there is room -> whether it goes on, what place it keeps.
NEXT_CALLS: list[tuple[bool, str | None, bool, bool, str | None]] = [
    (False, "elsewhere:443", True, True, "elsewhere:443"),
    (False, "elsewhere:443", False, False, None),
    (False, "here:443", False, True, None),
    (False, None, False, True, None),
    (True, "elsewhere:443", True, False, None),
    (True, "here:443", True, False, None),
    (True, None, True, False, None),
]


@pytest.mark.parametrize(("is_stopping", "destination", "has_room", "goes_on", "reserved"), NEXT_CALLS)
def test_worker_goes_on_when_there_is_room(
    *, is_stopping: bool, destination: str | None, has_room: bool, goes_on: bool, reserved: str | None
) -> None:
    """At the same destination its own place becomes free; elsewhere it keeps one before anybody else can."""
    claim = Claim(
        org=OrgName("acme"),
        session_id=SessionId("s"),
        call_id=CallId(UUID(int=1)),
        kind=CallKind.UNDO,
        destination="here:443",
        epoch=1,
    )
    holding = Holding(claim=claim, has_room=lambda _: has_room, is_stopping=is_stopping)
    assert holding.may_go_on(destination) is goes_on
    assert holding.reserved == reserved


async def test_process_is_spared_when_many_sessions_unwind(services: StartService, endpoint: FakeEndpoint) -> None:
    """No more than `max_calls` are in flight at once in one process, whatever is due."""
    service = await services(max_calls=3)
    names = [f"s{number}" for number in range(9)]
    for name in names:
        await do_step(service.agent, name, 1, endpoint.url("/undo"))
    endpoint.script("/undo", Reply(delay_seconds=0.02))
    found = await asyncio.gather(*(rest(service.agent, name) for name in names))
    assert {session["state"] for session in found} == {"compensated"}
    assert endpoint.max_concurrency <= 3
    assert len(endpoint.received) == 9


async def test_attempt_in_flight_ends_when_the_orchestrator_is_stopped(
    services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """A stop lets the attempt finish and records it, begins nothing more and hands every lease back; the next process goes on."""
    gate = asyncio.Event()
    endpoint.script("/2", Reply(gate=gate))
    api = await services(has_orchestrator=False)
    for step in (1, 2):
        await do_step(api.agent, "s", step, endpoint.url(f"/{step}"))
    async with open_service(database_url, has_api=False) as stopping:
        orchestrator = stopping.app.state.engine.orchestrator
        (await api.agent.fail("s")).raise_for_status()
        await endpoint.wait_for_requests(1)
        orchestrator.stop()
        assert not orchestrator.is_turning()
        await do_step(api.agent, "never-claimed", 1, endpoint.url("/never"))
        (await api.agent.fail("never-claimed")).raise_for_status()
        gate.set()

    assert [request.path for request in endpoint.received] == ["/2"]
    session = await api.agent.session("s")
    assert (session["state"], [entry["state"] for entry in session["undo_stack"]]) == ("compensating", ["compensated", "pending"])
    calls = await fetch(database_url, "SELECT leased_by, due_at, attempts, is_attempt_open FROM outgoing_calls WHERE due_at IS NOT NULL")
    assert [(call["leased_by"], call["attempts"], call["is_attempt_open"]) for call in calls] == [(None, 0, False)] * 2

    await services(has_api=False)
    assert (await rest(api.agent, "s"))["state"] == "compensated"
    assert (await rest(api.agent, "never-claimed"))["state"] == "compensated"
    assert sorted(request.path for request in endpoint.received) == ["/1", "/2", "/never"]


async def test_nothing_is_begun_when_the_stop_comes_during_a_claim(
    services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """What a claim brings after the stop is handed back unsent."""
    api = await services(has_orchestrator=False)
    await do_step(api.agent, "s", 1, endpoint.url("/1"))
    (await api.agent.fail("s")).raise_for_status()
    async with AsyncExitStack() as stopping, no_claims(database_url):
        service = await stopping.enter_async_context(open_service(database_url, has_api=False))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await fetch(database_url, WAITING_SQL))[0]["waiting"] == 0:
                pass  # every look is a round trip
        service.app.state.engine.orchestrator.stop()
    call = await call_of(database_url, "s", 1)
    assert (call["leased_by"], call["attempts"], call["is_attempt_open"]) == (None, 0, False)
    assert endpoint.received == []
    await services(has_api=False)
    assert (await rest(api.agent, "s"))["state"] == "compensated"


async def test_late_answer_changes_nothing_when_the_lease_was_taken_over(
    services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """A worker whose call was claimed by another records nothing any more: only the newer one's answer counts, to the same bytes."""
    slow, newer = asyncio.Event(), asyncio.Event()
    endpoint.script("/top", Reply(status=400, gate=slow), Reply(status=200, gate=newer))
    api = await services(has_orchestrator=False, attempt_timeout_ms=60_000)
    await do_step(api.agent, "s", 1, endpoint.url("/below"))
    await do_step(api.agent, "s", 2, endpoint.url("/top"), args={"n": 1})
    async with open_service(database_url, has_api=False, max_calls=1):  # so that it cannot take its own call over
        (await api.agent.fail("s")).raise_for_status()
        await endpoint.wait_for_requests(1)
        await take_lease_away(database_url, "s")
        second = await services(has_api=False)
        await endpoint.wait_for_requests(2)
        slow.set()
        await endpoint.wait_for_answers(1)
    # The first worker has ended, and with it whatever it could have done with its 400.
    session: JsonObject = await api.agent.session("s")
    assert (session["state"], session["halt_reason"]) == ("compensating", None)
    assert (session["undo_stack"][0]["state"], session["undo_stack"][0]["last_status"]) == ("running", None)
    assert "COMPENSATION_FAILED" not in await api.operator.kinds("s")
    call = await call_of(database_url, "s", 2)
    assert (call["attempts"], call["interrupted"], call["is_attempt_open"], call["epoch"]) == (2, 1, True, 2)
    newer.set()
    assert (await rest(api.agent, "s"))["state"] == "compensated"
    first, again = endpoint.requests("/top")
    assert (first.key, first.body) == (again.key, again.body)
    assert endpoint.applications_of(first.key) == 1
    assert len(endpoint.requests("/below")) == 1
    assert second.app.state.engine.orchestrator is not None


async def test_lease_is_renewed_when_an_attempt_takes_longer(services: StartService, endpoint: FakeEndpoint) -> None:
    """An attempt may outlast its lease: nobody else takes the call while its worker lives."""
    endpoint.script("/slow", Reply(delay_seconds=2.0))
    first = await services(lease_seconds=1, attempt_timeout_ms=10_000)
    await services(has_api=False, lease_seconds=1)
    await do_step(first.agent, "s", 1, endpoint.url("/slow"))
    assert (await rest(first.agent, "s"))["state"] == "compensated"
    assert len(endpoint.received) == 1


async def test_call_is_made_at_the_next_tick_when_its_notification_is_lost(services: StartService, endpoint: FakeEndpoint) -> None:
    """A call that becomes due without anybody being told is found by looking."""
    service = await services(poll_seconds=0.2)
    endpoint.script("/undo", Reply(status=503, headers={"Retry-After": "3600"}), Reply())
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    await service.agent.fail("s")
    await endpoint.wait_for_answers(1)
    await make_due(service.database_url, "s")
    await endpoint.wait_for_requests(2, timeout_seconds=5)
    assert (await rest(service.agent, "s"))["state"] == "compensated"


async def test_unwind_starts_at_once_when_it_is_notified(services: StartService, endpoint: FakeEndpoint) -> None:
    """A fail wakes the orchestrator of another process long before its next tick."""
    api = await services(has_orchestrator=False)
    await services(has_api=False, poll_seconds=60)
    await do_step(api.agent, "s", 1, endpoint.url("/undo"))
    assert (await rest(api.agent, "s"))["state"] == "compensated"


async def test_answer_is_recorded_when_the_database_comes_back(services: StartService, endpoint: FakeEndpoint) -> None:
    """Connections that break while an attempt is in flight cost neither the answer nor a second request; listening goes on too."""
    service = await services()
    gate = asyncio.Event()
    endpoint.script("/top", Reply(gate=gate))
    await do_step(service.agent, "s", 1, endpoint.url("/below"))
    await do_step(service.agent, "s", 2, endpoint.url("/top"))
    await service.agent.fail("s")
    await endpoint.wait_for_requests(1)
    await fetch(service.database_url, TERMINATE_SQL, "countermand%")
    gate.set()
    await endpoint.wait_for_requests(2)
    while (answer := await service.agent.fail("s", wait_s=20)).status_code == 503:
        pass  # the pool finds out about each of its broken connections once
    assert answer.json()["state"] == "compensated"
    assert [request.path for request in endpoint.received] == ["/top", "/below"]
    assert [entry["attempts"] for entry in answer.json()["undo_stack"]] == [1, 1]
