"""What people pause: nothing is begun, what is in flight ends, and it goes on where it was. Must not test who may: see the API's tests."""

import asyncio
from urllib.parse import urlsplit

import pytest
import structlog

from app.cli import pausing
from app.domain.model import Role
from tests.conftest import StartService
from tests.factories import ORG, Service, do_step, open_service
from tests.fakes import FakeEndpoint, Reply
from tests.probes import fetch, rest


def destination(endpoint: FakeEndpoint) -> str:
    """Return host:port."""
    return urlsplit(endpoint.url()).netloc


async def failed(service: Service, name: str, url: str) -> None:
    """Do an undoable step and fail the run."""
    await do_step(service.agent, name, 1, url)
    (await service.agent.fail(name)).raise_for_status()


@pytest.mark.parametrize("scope", ["destination", "org", "everything"])
async def test_nothing_is_begun_when_it_is_paused(scope: str, services: StartService, endpoint: FakeEndpoint, database_url: str) -> None:
    """What it is about waits, in every process, also in one that starts then; a late session is halted meanwhile."""
    service = await services()
    path = {"destination": f"/destinations/{destination(endpoint)}", "org": "", "everything": None}[scope]
    if path is None:
        said = await asyncio.to_thread(pausing.pause, database_url, org=None, destination=None, reason="planned")
        assert said == "everything is paused"
    else:
        answer = await service.operator.post(f"{path}/pause", {"reason": "planned"})
        assert answer.json()["paused"]["scope"] == scope
    await services(has_api=False)
    await failed(service, "s", endpoint.url("/undo"))
    await failed(service, "late", endpoint.url("/undo"))
    await fetch(database_url, "UPDATE outgoing_calls SET deadline_at = clock_timestamp() WHERE session_id = 'late'")
    assert (await rest(service.agent, "late"))["halt_reason"] == "deadline_exceeded"
    async with FakeEndpoint() as elsewhere:
        if scope == "destination":
            await failed(service, "marker", elsewhere.url("/marker"))
            assert (await rest(service.agent, "marker"))["state"] == "compensated"
        elif scope == "org":
            other = await service.client(Role.AGENT, "robot-2", "beta")
            await do_step(other, "marker", 1, endpoint.url("/marker"))
            (await other.fail("marker")).raise_for_status()
            assert (await rest(other, "marker"))["state"] == "compensated"
    assert endpoint.requests("/undo") == []
    assert [(await service.agent.session(name))["held_by"] for name in ("s", "late")] == ["pause", None]
    with structlog.testing.capture_logs() as logs:
        if path is None:
            await asyncio.to_thread(pausing.resume, database_url, org=None, destination=None, reason="done")
        else:
            assert (await service.operator.post(f"{path}/resume", {"reason": "done"})).json()["paused"] is None
        assert (await rest(service.agent, "s"))["state"] == "compensated"
    assert len(endpoint.requests("/undo")) == 1
    (told,) = (event for event in logs if event["event"] == "resumed")
    assert (told["log_level"], told["org"], told["reason"]) == ("info", None if path is None else ORG, "done")


async def test_attempt_in_flight_ends_and_the_next_waits_when_its_org_is_paused(
    services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """The answer is written down as ever; a worker in mid-session begins nothing more."""
    gate = asyncio.Event()
    endpoint.script("/2", Reply(gate=gate))
    service = await services(attempt_timeout_ms=60_000)
    for step in (1, 2):
        await do_step(service.agent, "s", step, endpoint.url(f"/{step}"))
    (await service.agent.fail("s")).raise_for_status()
    await endpoint.wait_for_requests(1)
    (await service.operator.post("/pause", {"reason": "planned"})).raise_for_status()
    gate.set()
    waiting = "SELECT FROM outgoing_calls WHERE due_at IS NOT NULL AND step_index = 1 AND leased_by IS NULL AND attempts = 0"
    async with asyncio.timeout(30):
        while not await fetch(database_url, waiting):
            pass  # every look is a round trip
    session = await service.agent.session("s")
    assert [entry["state"] for entry in session["undo_stack"]] == ["compensated", "pending"]
    assert [request.path for request in endpoint.received] == ["/2"]
    (await service.operator.post("/resume", {"reason": "done"})).raise_for_status()
    assert (await rest(service.agent, "s"))["state"] == "compensated"


async def test_retry_waits_when_the_destination_is_paused_between_two_tries(
    services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """A short wait is slept where it is: who wakes from it looks again before sending."""
    gate = asyncio.Event()
    endpoint.script("/undo", Reply(status=500, gate=gate), Reply())
    service = await services(retry_initial_interval_ms=1_500, retry_max_interval_ms=1_500, attempt_timeout_ms=60_000)
    await failed(service, "s", endpoint.url("/undo"))
    await endpoint.wait_for_requests(1)
    (await service.operator.post(f"/destinations/{destination(endpoint)}/pause", {"reason": "planned"})).raise_for_status()
    gate.set()
    async with asyncio.timeout(30):
        while not await fetch(database_url, "SELECT FROM outgoing_calls WHERE failures = 1 AND leased_by IS NULL"):
            pass  # every look is a round trip
    assert len(endpoint.received) == 1
    (await service.operator.post(f"/destinations/{destination(endpoint)}/resume", {"reason": "done"})).raise_for_status()
    assert (await rest(service.agent, "s"))["state"] == "compensated"


async def test_operators_halt_takes_effect_when_the_session_is_held(services: StartService, endpoint: FakeEndpoint) -> None:
    """An order does not wait for a call that nobody may begin."""
    service = await services()
    (await service.operator.post("/pause", {"reason": "planned"})).raise_for_status()
    await failed(service, "s", endpoint.url("/undo"))
    answer = await service.operator.post("/sessions/s/halt", {"reason": "let me look"})
    assert (answer.json()["state"], answer.json()["halt_reason"]) == ("halted", "operator")
    assert endpoint.received == []


async def test_pause_outlives_the_service_when_it_is_started_anew(
    services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """It is a row: a deploy does not lift it."""
    async with open_service(database_url) as first:
        (await first.operator.post("/pause", {"reason": "planned"})).raise_for_status()
        await failed(first, "s", endpoint.url("/undo"))
    second = await services()
    await failed(second, "late", endpoint.url("/undo"))
    await fetch(database_url, "UPDATE outgoing_calls SET deadline_at = clock_timestamp() WHERE session_id = 'late'")
    assert (await rest(second.agent, "late"))["halt_reason"] == "deadline_exceeded"
    assert endpoint.received == []
