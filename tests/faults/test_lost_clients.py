"""Clients that leave before their answer. Must not ask again on their behalf before the undos have been seen."""

import asyncio
import json
import random
import time

import pytest

from tests.conftest import StartService
from tests.factories import Service, owner_connection, undo_at
from tests.fakes import FakeEndpoint, Reply
from tests.faults.conftest import StartProcess
from tests.faults.gates import wait_until
from tests.faults.judgement import assert_undone, do_steps
from tests.faults.processes import ServiceProcess


async def send(service: ServiceProcess, session_id: str, query: str) -> asyncio.StreamWriter:
    """Send a `fail` whole, and read nothing of its answer."""
    url = service.agent.http.base_url
    body = json.dumps({"error": "the agent is gone"}).encode()
    head = (
        f"POST /v1/sessions/{session_id}/fail{query} HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: Bearer {service.agent.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(head.encode() + body)
    await writer.drain()
    return writer


@pytest.mark.parametrize("query", ["", "?wait_s=20"])
async def test_everything_is_undone_when_the_client_hangs_up_right_after_fail(processes: StartProcess, query: str) -> None:
    """The unwind belongs to the orchestrator, not to the request that ordered it, answered at once or held."""
    service = await processes()
    is_gone = asyncio.Event()
    async with FakeEndpoint({"/undo/3": [Reply(gate=is_gone)]}) as endpoint:
        keys = await do_steps(service.agent, endpoint, "run", 3)
        writer = await send(service, "run", query)
        await endpoint.wait_for_requests(1)
        writer.transport.abort()
        is_gone.set()
        await endpoint.wait_for_answers(3)
        await assert_undone(service.agent, service.auditor, endpoint, "run", keys)
    assert service.crashes == []


ROUNDS = 60
LEFT_OPEN = "EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%')"


async def live(service: Service, session_id: str) -> None:
    """Go through the verbs of a run from its first call to its end."""
    agent = service.agent
    await agent.intercept(session_id, step_index=1, idempotency_key="one", compensation=undo_at("http://127.0.0.1:9/undo"))
    await agent.commit(session_id, 1, {"credit_id": "cr_1"})
    await agent.session(session_id)
    await agent.fail(session_id)


async def test_no_connection_stays_in_a_transaction_when_callers_are_cancelled_anywhere(services: StartService, database_url: str) -> None:
    """A pool of two and many callers that give up at any await: each run is where one of its answers left it, and the pool serves on."""
    service = await services(has_orchestrator=False, database_connections=2)
    started = time.perf_counter()
    await live(service, "whole")
    longest = 1.2 * (time.perf_counter() - started)
    dice = random.Random(8)
    for number in range(ROUNDS):
        living = [asyncio.create_task(live(service, f"run-{number}-{twin}")) for twin in range(2)]
        await asyncio.wait(living, timeout=dice.uniform(0, longest))
        for task in living:
            task.cancel()
        await asyncio.wait(living)
    async with owner_connection(database_url) as connection:
        await wait_until(connection, f"NOT {LEFT_OPEN}")
    whole = await service.auditor.kinds("whole")
    seen = {item["session_id"] for item in (await service.auditor.get("/sessions", params={"limit": 200})).json()["items"]}
    assert len(seen) > 1, "some of them came far enough to be cancelled in the middle"
    for session_id in seen:
        kinds = await service.auditor.kinds(session_id)
        assert kinds == whole[: len(kinds)]
        assert (await service.auditor.get(f"/sessions/{session_id}/journal/verify")).json()["valid"] is True
    await asyncio.gather(*(live(service, f"after-{number}") for number in range(2)))
    assert [await service.auditor.kinds(f"after-{number}") for number in range(2)] == [whole] * 2, "the pool serves on"
