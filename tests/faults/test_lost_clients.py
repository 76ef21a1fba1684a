"""Clients that leave before their answer. Must not ask again on their behalf before the undos have been seen."""

import asyncio
import json

import pytest

from tests.fakes import FakeEndpoint, Reply
from tests.faults.conftest import StartProcess
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
