"""Undos of many sessions that are counted and recorded together: each as if it were alone. Must not measure how fast that is."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

import structlog

from app.domain.egress import EgressPolicy
from app.engine.clock import SystemClock
from app.engine.group import GroupCommit
from app.engine.outbound import Outbound
from app.engine.unwind import Holding, LeaseLost, Unwind
from app.storage import calls
from app.storage.changes import Lease
from app.storage.claims import Claim
from app.storage.database import open_database
from tests.conftest import StartService
from tests.factories import Service, do_step, new_events
from tests.fakes import FakeEndpoint
from tests.faults.gates import Place, hold_sessions, shut_attempt_gate
from tests.probes import call_of, claim_due, fetch, rest, take_lease_away

NAMES = ("a", "b", "c")
TRANSACTIONS_SQL = "SELECT count(DISTINCT xmin::text) AS transactions FROM journal WHERE kind = 'COMPENSATED'"


@asynccontextmanager
async def worker(database_url: str, name: str = "worker") -> AsyncIterator[Unwind]:
    """Open a runner of attempts that writes, one transaction at a time, what is asked at the same time."""
    clock, lease, events = SystemClock(), Lease(worker=name, seconds=30.0), new_events()
    async with (
        open_database(database_url, size=4, application_name=name) as database,
        Outbound(EgressPolicy.parse("127.0.0.0/8"), clock=clock) as outbound,
        asyncio.TaskGroup() as tasks,
    ):
        group = GroupCommit(database=database, events=events, lock=calls.lock_undos, lease=lease, lanes=1)
        unwind = Unwind(database=database, outbound=outbound, clock=clock, lease=lease, events=events, group=group)
        writing = tasks.create_task(unwind.write_together())
        yield unwind
        writing.cancel()


async def failed_runs(services: StartService, endpoint: FakeEndpoint) -> Service:
    """Fail a run of two steps under each name, whose undos nobody works on yet."""
    service = await services(has_orchestrator=False)
    for name in NAMES:
        for step in (1, 2):
            await do_step(service.agent, name, step, endpoint.url(f"/{name}/{step}"))
        (await service.agent.fail(name)).raise_for_status()
    return service


async def claimed(unwind: Unwind) -> Sequence[Claim]:
    """Claim what is due, in the order of the sessions."""
    async with unwind.database.dispatch() as connection:
        return sorted(await claim_due(connection, unwind.lease), key=lambda claim: claim.session_id)


def holding(claim: Claim) -> Holding:
    """Hold a claim, with room for more everywhere."""
    return Holding(claim=claim, has_room=lambda _: True)


async def test_order_is_kept_within_each_session_when_many_are_recorded_together(services: StartService, endpoint: FakeEndpoint) -> None:
    """Sessions share transactions, and still each is undone newest first, every undo once, none before the one above it is done."""
    service = await services(max_calls_per_destination=32)
    names, steps = [f"run-{number:02}" for number in range(24)], 4
    for name in names:
        for step in range(1, steps + 1):
            await do_step(service.agent, name, step, endpoint.url("/undo"))
    ended = await asyncio.gather(*(rest(service.agent, name) for name in names))
    assert {session["state"] for session in ended} == {"compensated"}
    seen = defaultdict(list)
    for request in endpoint.received:
        seen[request.header("Countermand-Session")].append(request)
    assert set(seen) == set(names)
    for requests in seen.values():
        assert [request.header("Countermand-Step") for request in requests] == ["4", "3", "2", "1"]
        assert all(earlier.ended_at is not None and earlier.ended_at <= later.started_at for earlier, later in pairwise(requests))
    (row,) = await fetch(service.database_url, TRANSACTIONS_SQL)
    assert row["transactions"] < len(names) * steps, "none was recorded with another"


async def test_others_are_recorded_when_one_of_them_has_lost_its_lease(
    services: StartService, database_url: str, endpoint: FakeEndpoint
) -> None:
    """One conflict spoils the statement that all share: each goes on by itself then, and only the one that lost is lost."""
    service = await failed_runs(services, endpoint)
    async with worker(database_url) as unwind:
        claims = await claimed(unwind)
        await fetch(database_url, "UPDATE outgoing_calls SET epoch = epoch + 1 WHERE session_id = 'b'")
        with structlog.testing.capture_logs() as logs:
            ends = await asyncio.gather(*(unwind.run(holding(claim)) for claim in claims), return_exceptions=True)
    assert [type(end) for end in ends] == [type(None), LeaseLost, type(None)]
    undone = [event["parts"] for event in logs if event["event"] == "batch_undone"]
    assert undone == [len(NAMES)], "they were to be written together"
    assert sorted(request.path for request in endpoint.received) == ["/a/1", "/a/2", "/c/1", "/c/2"]
    states = [(await service.agent.get(f"/sessions/{name}")).json()["state"] for name in NAMES]
    assert states == ["compensated", "failed", "compensated"]


async def test_others_go_on_when_somebody_holds_one_of_their_sessions(
    services: StartService, database_url: str, endpoint: FakeEndpoint
) -> None:
    """A session that cannot be locked at once waits alone, and is undone when its lock is free."""
    service = await failed_runs(services, endpoint)
    async with worker(database_url) as unwind, asyncio.TaskGroup() as tasks:
        claims = await claimed(unwind)
        async with hold_sessions(database_url, "a") as hold:
            held, *free = [tasks.create_task(unwind.run(holding(claim))) for claim in claims]
            await asyncio.wait(free)
            await hold.until_waiting(1)
            assert not held.done()
            assert {request.path[:2] for request in endpoint.received} == {"/b", "/c"}
    assert {(await rest(service.agent, name))["state"] for name in NAMES} == {"compensated"}


async def test_only_its_own_call_is_interrupted_when_a_worker_ends_while_its_count_is_written(
    services: StartService, database_url: str, endpoint: FakeEndpoint
) -> None:
    """What was counted with others stands when nobody is left to send it: the next worker sends it under the next number."""
    service = await failed_runs(services, endpoint)
    async with worker(database_url) as unwind, shut_attempt_gate(database_url, "a", Place.STATEMENT) as gate:
        lost, *others = [asyncio.ensure_future(unwind.run(holding(claim))) for claim in await claimed(unwind)]
        await gate.is_reached()
        lost.cancel()
        await gate.open()
        await asyncio.gather(*others)
        await asyncio.wait({lost})
        assert lost.cancelled()
    assert sorted(request.path for request in endpoint.received) == ["/b/1", "/b/2", "/c/1", "/c/2"]
    counted = await call_of(database_url, "a", 2)
    assert (counted["is_attempt_open"], counted["attempts"]) == (True, 1)
    await take_lease_away(database_url, "a")
    async with worker(database_url, "next") as unwind:
        (claim,) = await claimed(unwind)
        await unwind.run(holding(claim))
    assert [(request.path, request.header("Countermand-Attempt")) for request in endpoint.requests("/a/2")] == [("/a/2", "2")]
    assert {(await rest(service.agent, name))["state"] for name in NAMES} == {"compensated"}


async def test_nothing_is_sent_when_the_count_of_all_was_never_committed(
    services: StartService, database_url: str, endpoint: FakeEndpoint
) -> None:
    """A crash in the middle of a shared write leaves nothing of it: the next worker's are the first attempts of all."""
    service = await failed_runs(services, endpoint)
    async with worker(database_url) as unwind, shut_attempt_gate(database_url, "b", Place.COMMIT) as gate:
        running = [asyncio.ensure_future(unwind.run(holding(claim))) for claim in await claimed(unwind)]
        await gate.is_reached()
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await gate.end_who_waits()
        await gate.open()
    assert endpoint.received == []
    for name in NAMES:
        assert (await call_of(database_url, name, 2))["attempts"] == 0
        await take_lease_away(database_url, name)
    async with worker(database_url, "next") as unwind:
        await asyncio.gather(*(unwind.run(holding(claim)) for claim in await claimed(unwind)))
    assert {request.header("Countermand-Attempt") for request in endpoint.received} == {"1"}
    assert {(await rest(service.agent, name))["state"] for name in NAMES} == {"compensated"}
