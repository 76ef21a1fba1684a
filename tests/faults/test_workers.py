"""`serve --workers`: several processes on one port, of which any may be killed, and which end together. Must not test one worker alone."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx

from app.engine.clock import SystemClock
from tests.factories import Client, owner_connection
from tests.fakes import FakeEndpoint, Reply
from tests.faults.conftest import StartProcess
from tests.faults.gates import hold_sessions
from tests.faults.judgement import assert_undone, do_steps, requests_of
from tests.faults.processes import END_SECONDS, PROBE_SECONDS, UNHURRIED_MS, ServiceProcess
from tests.scraping import Scrape, parsed

WORKERS = 2
TWO = ("--workers", str(WORKERS))
CONNECTIONS = 12  # so many that all of them at one worker is a chance of one in two thousand
CONNECTIONS_EACH = 5  # of the pool for requests
KILLED = -signal.SIGKILL


async def workers_of(service: ServiceProcess, count: int = WORKERS) -> list[int]:
    """Return the process numbers of the newest workers, once so many in all have begun to serve."""
    await service.wait_for_events("serving", count)
    return [event["pid"] for event in await service.wait_for_events("worker_started", count)][-WORKERS:]


async def holder_of_the_call(database_url: str, workers: list[int]) -> int:
    """Return the worker that holds the call in flight."""
    async with owner_connection(database_url) as connection:
        name = await connection.fetchval("SELECT leased_by FROM outgoing_calls WHERE is_attempt_open")
    (pid,) = (pid for pid in workers if f":{pid}:" in name)
    return pid


@asynccontextmanager
async def connections(service: ServiceProcess) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Open clients with a kept-alive connection each."""
    async with AsyncExitStack() as stack:
        clients = [httpx.AsyncClient(base_url=service.base_url, trust_env=False, timeout=END_SECONDS) for _ in range(CONNECTIONS)]
        yield [await stack.enter_async_context(client) for client in clients]


async def scrapes(service: ServiceProcess) -> list[Scrape]:
    """Fetch the metrics by as many connections."""
    async with connections(service) as clients:
        return [parsed((await client.get("/metrics")).text) for client in clients]


async def test_either_worker_answers_when_the_other_stands_still(processes: StartProcess) -> None:
    """One port for both: whoever can takes a new connection, and nobody waits for one that cannot."""
    service = await processes(*TWO)
    for still in await workers_of(service):
        os.kill(still, signal.SIGSTOP)
        async with connections(service) as clients:
            answers = await asyncio.gather(*(client.get("/readyz") for client in clients))
        assert [answer.status_code for answer in answers] == [200] * CONNECTIONS
        os.kill(still, signal.SIGCONT)


async def test_all_workers_end_when_the_service_is_told_to_stop(processes: StartProcess) -> None:
    """SIGTERM in mid-unwind: exit code 0, nobody is left, and the next service goes on with what was acknowledged, under the same key."""
    service = await processes(*TWO, grace_seconds=1.0)
    held = asyncio.Event()
    async with FakeEndpoint({"/undo/3": [Reply(gate=held), Reply()]}) as endpoint:
        keys = await do_steps(service.agent, endpoint, "run", 3)
        await service.agent.fail("run")
        await endpoint.wait_for_requests(1)
        service.terminate()
        assert await service.exit_code() == 0  # the log has ended, so that nobody has it open
        following = await processes()
        await assert_undone(following.agent, following.auditor, endpoint, "run", keys)
        held.set()
    assert len([event for event in service.events if event.get("event") == "engine_stopped"]) == WORKERS
    assert service.crashes == []


async def test_requests_may_end_when_every_process_of_the_group_is_told_to_stop(processes: StartProcess, database_url: str) -> None:
    """As a supervisor of services does it, or Ctrl-C: a worker that hears it from two sides is not thereby told to hurry."""
    service = await processes(*TWO, grace_seconds=1.0)
    workers = await workers_of(service)
    async with FakeEndpoint() as endpoint:
        await do_steps(service.agent, endpoint, "run", 1)
        async with hold_sessions(database_url, "run") as hold:
            asking = asyncio.create_task(service.agent.fail("run"))
            await hold.until_waiting(1)
            for pid in workers:
                os.kill(pid, signal.SIGTERM)
            service.terminate()
            answer = await asking
            assert await service.exit_code() == 0
    assert (answer.status_code, answer.json()["code"]) == (503, "stopping")
    assert len([event for event in service.events if event.get("event") == "engine_stopped"]) == WORKERS


async def test_undo_goes_on_and_a_new_worker_comes_when_one_is_killed(processes: StartProcess, database_url: str) -> None:
    """Kill -9 in mid-unwind: the other takes the call over, same key and bytes; the place of the dead one is taken soon."""
    service = await processes(*TWO, attempt_timeout_ms=UNHURRIED_MS)
    workers = await workers_of(service)
    held = asyncio.Event()
    async with FakeEndpoint({"/undo/3": [Reply(gate=held), Reply()]}) as endpoint:
        keys = await do_steps(service.agent, endpoint, "run", 3)
        await service.agent.fail("run")
        await endpoint.wait_for_requests(1)
        killed = await holder_of_the_call(database_url, workers)
        os.kill(killed, signal.SIGKILL)
        died = await service.wait_for_event("worker_died")
        (newest,) = set(await workers_of(service, WORKERS + 1)) - set(workers)
        async with connections(service) as clients:
            agent = Client(http=clients[0], key=service.agent.key)
            auditor = Client(http=clients[1], key=service.auditor.key)
            await assert_undone(agent, auditor, endpoint, "run", keys)
        held.set()
        assert len(requests_of(endpoint, keys)) == 4
    assert (died["pid"], died["exit_code"], died["number"]) == (killed, KILLED, workers.index(killed))
    os.kill(newest, 0)


async def test_no_process_stays_when_the_supervisor_is_killed(processes: StartProcess) -> None:
    """Kill -9: it can tell nobody, and its workers end all the same, in order."""
    service = await processes(*TWO)
    await workers_of(service)
    service.kill()
    assert await service.exit_code() == KILLED  # which is known when the last process has closed the log
    assert len([event for event in service.events if event.get("event") == "engine_stopped"]) == WORKERS


async def test_counts_are_those_of_all_workers_when_any_is_scraped(processes: StartProcess) -> None:
    """Whoever answers tells the same numbers, none is lost with a worker that is killed, and they go on from there."""
    service = await processes(*TWO)
    workers = await workers_of(service)
    told = "countermand_verb_seconds_count"
    names = {"verb": "getSession", "outcome": "4xx"}

    async def ask_all() -> None:
        async with connections(service) as clients:
            for client in clients:
                agent = Client(http=client, key=service.agent.key)
                assert (await agent.get("/sessions/nobody")).status_code == 404

    await ask_all()
    assert [scrape.value(told, **names) for scrape in await scrapes(service)] == [CONNECTIONS] * CONNECTIONS
    os.kill(workers[0], signal.SIGKILL)
    await workers_of(service, WORKERS + 1)
    assert [scrape.value(told, **names) for scrape in await scrapes(service)] == [CONNECTIONS] * CONNECTIONS
    await ask_all()
    found = await scrapes(service)
    assert [scrape.value(told, **names) for scrape in found] == [2 * CONNECTIONS] * CONNECTIONS
    assert {scrape.value("countermand_sessions", state="active") for scrape in found} == {0}
    assert {scrape.value("countermand_transitions_total", kind="opened") for scrape in found} == {0}


async def test_connections_of_all_workers_are_told_when_one_is_scraped(processes: StartProcess) -> None:
    """A pool that is used up in a worker that nobody scrapes is seen: each looks at its own once in a second."""
    service = await processes(*TWO, database_connections=CONNECTIONS_EACH)
    await workers_of(service)
    async with asyncio.timeout(END_SECONDS):
        while await _api_connections(service.agent.http) != CONNECTIONS_EACH * WORKERS:
            await SystemClock().sleep(PROBE_SECONDS)


async def _api_connections(kept_alive: httpx.AsyncClient) -> float:
    scrape = parsed((await kept_alive.get("/metrics")).text)
    return sum(count for labels, count in scrape.series("countermand_database_connections") if labels["pool"] == "api")
