"""The undo of a call that may still be running is held back as long as its descriptor says. Must not test the arithmetic."""

from datetime import timedelta

import pytest

from tests.conftest import StartService
from tests.engine.test_retries import ImpatientClock, run_due_call, worker
from tests.factories import Service, do_step, undo_at
from tests.fakes import FakeEndpoint
from tests.probes import call_of, fetch, rest

SETTLE_MS = 600_000
LATER_SQL = "UPDATE sessions SET failed_at = failed_at - make_interval(secs => $2) WHERE session_id = $1"
DUE_SQL = "UPDATE outgoing_calls SET due_at = clock_timestamp() WHERE session_id = $1 AND due_at IS NOT NULL"


async def begun(service: Service, endpoint: FakeEndpoint, name: str = "s") -> None:
    """Fail a run of two steps, of the second of which nobody knows whether it happened, or is happening still."""
    await do_step(service.agent, name, 1, endpoint.url("/1"))
    asked = await service.agent.intercept(name, step_index=2, compensation=undo_at(endpoint.url("/2"), settle_ms=SETTLE_MS))
    asked.raise_for_status()
    (await service.agent.fail(name)).raise_for_status()


async def test_undo_and_those_below_wait_when_the_call_may_still_be_running(
    services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:  # fmt: skip
    """Nothing is sent before the time has passed since the failure, whoever asks; then the stack goes newest first."""
    service = await services(has_orchestrator=False)
    await begun(service, endpoint)
    clock = ImpatientClock()
    async with worker(database_url, clock, 0.5) as unwind:
        waiting = await call_of(database_url, "s", 2)
        (failed,) = await fetch(database_url, "SELECT failed_at FROM sessions")
        assert waiting["due_at"] - failed["failed_at"] == timedelta(milliseconds=SETTLE_MS)
        assert waiting["deadline_at"] > waiting["due_at"], "a pause meanwhile takes nothing of its own time"
        await fetch(database_url, DUE_SQL, "s")
        await run_due_call(unwind)
        assert endpoint.received == []
        call = await call_of(database_url, "s", 2)
        assert (call["attempts"], call["leased_by"], call["due_at"] > call["deadline_at"]) == (0, None, False)
        session = await service.agent.session("s")
        assert (session["state"], session["undo_stack"][0]["state"]) == ("failed", "pending")
        assert session["undo_stack"][0]["next_attempt_at"] is not None
        await fetch(database_url, LATER_SQL, "s", SETTLE_MS / 1_000 - 60)
        await fetch(database_url, DUE_SQL, "s")
        await run_due_call(unwind)
        assert endpoint.received == [], "a minute is left"
        await fetch(database_url, LATER_SQL, "s", 60.0)
        await fetch(database_url, DUE_SQL, "s")
        await run_due_call(unwind)
    assert [request.path for request in endpoint.received] == ["/2", "/1"]
    assert endpoint.received[0].header("Countermand-Outcome") == "unknown"
    assert (await service.agent.session("s"))["state"] == "compensated"
    assert clock.slept == []


async def test_undo_is_sent_at_once_when_the_call_is_known_to_have_happened(service: Service, endpoint: FakeEndpoint) -> None:
    """Only what nobody knows is waited for."""
    await do_step(service.agent, "s", 1, endpoint.url("/1"), settle_ms=SETTLE_MS)
    assert (await rest(service.agent, "s"))["state"] == "compensated"


async def test_result_is_used_when_it_comes_while_the_undo_waits(services: StartService, endpoint: FakeEndpoint) -> None:
    """What the waiting is for: a late commit binds the references, and the endpoint is told that the call happened."""
    service = await services()
    args = {"id": {"$ref": "result#/id"}}
    asked = await service.agent.intercept("s", step_index=1, compensation=undo_at(endpoint.url("/1"), args=args, settle_ms=SETTLE_MS))
    asked.raise_for_status()
    (await service.agent.fail("s")).raise_for_status()
    assert (await service.agent.commit("s", 1, {"id": "late"})).status_code == 409
    await fetch(service.database_url, DUE_SQL, "s")
    assert (await rest(service.agent, "s"))["state"] == "compensated"
    (request,) = endpoint.received
    assert (request.body, request.header("Countermand-Outcome")) == (b'{"id":"late"}', "committed")


@pytest.mark.parametrize(("value", "status"), [(0, 201), (86_400_000, 201), (86_400_001, 422), (-1, 422), ("1", 422), (1.5, 422)])
async def test_settle_delay_is_refused_when_it_is_longer_than_a_day(
    service: Service, endpoint: FakeEndpoint, value: object, status: int
) -> None:
    """An undo that is held back for ever would be one that silently never comes."""
    asked = await service.agent.intercept("s", step_index=1, compensation=undo_at(endpoint.url("/1"), settle_ms=value))
    assert asked.status_code == status
