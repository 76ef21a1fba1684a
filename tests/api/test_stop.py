"""What becomes of callers who are kept waiting when the service is told to stop. Must not test what becomes of attempts in flight."""

import asyncio

import pytest

from tests.factories import Service, do_step
from tests.fakes import FakeEndpoint, Reply

LONG_WAIT_SECONDS = 55
AT_ONCE_SECONDS = 10.0  # beside the wait that was asked for, and generous beside what it takes


async def test_waiting_callers_are_answered_when_the_service_is_told_to_stop(
    service: Service, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for a session or a decision is told what is so now, with the status it would have had; nobody is cut off."""
    monkeypatch.setattr("app.engine.waits.LOOK_SECONDS", LONG_WAIT_SECONDS)  # nobody may find out by looking again
    held = asyncio.Event()
    endpoint.script("/undo", Reply(gate=held))
    await do_step(service.agent, "unwinds", 1, endpoint.url("/undo"))
    parked = await service.agent.intercept("asks", tool="send_email", step_index=1, reversibility="irreversible")
    assert parked.status_code == 202
    async with asyncio.TaskGroup() as group:
        failing = [group.create_task(service.agent.fail("unwinds", wait_s=LONG_WAIT_SECONDS)) for _ in range(2)]
        asking = group.create_task(service.agent.get("/sessions/asks/effects/1", params={"wait_s": LONG_WAIT_SECONDS}))
        await endpoint.wait_for_requests(1)
        assert (await service.agent.session("unwinds"))["state"] == "compensating"
        assert not any(task.done() for task in (*failing, asking))
        service.app.state.engine.stop()
        async with asyncio.timeout(AT_ONCE_SECONDS):
            answers = await asyncio.gather(*failing)
            effect = await asking
    assert [(answer.status_code, answer.json()["state"]) for answer in answers] == [(202, "compensating")] * 2
    assert (effect.status_code, effect.json()["state"]) == (200, "awaiting_approval")
    held.set()


async def test_nobody_is_kept_waiting_when_the_service_is_stopping(service: Service, endpoint: FakeEndpoint) -> None:
    """Requests that come after the stop are answered as without `wait_s`: what they say is taken, what they wait for is not awaited."""
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    parked = await service.agent.intercept("asks", tool="send_email", step_index=1, reversibility="irreversible")
    assert parked.status_code == 202
    service.app.state.engine.stop()
    async with asyncio.timeout(AT_ONCE_SECONDS):
        failed = await service.agent.fail("s", wait_s=LONG_WAIT_SECONDS)
        effect = await service.agent.get("/sessions/asks/effects/1", params={"wait_s": LONG_WAIT_SECONDS})
    assert (failed.status_code, failed.json()["state"]) == (202, "failed")
    assert (effect.status_code, effect.json()["state"]) == (200, "awaiting_approval")
    assert endpoint.received == []
