"""More callers than connections: everybody is answered soon, and undos go on. Must not measure how many a machine can serve."""

import asyncio
from collections import Counter
from time import monotonic

import httpx
import structlog

from tests.conftest import StartService
from tests.factories import Client, do_step, park, undo_at
from tests.fakes import FakeEndpoint
from tests.faults.gates import hold_sessions
from tests.probes import rest

POOL = 2
CROWD = 200
WAIT_SECONDS = 1.0
# What 200 refusals may take beyond the wait, on cores that other tests use as well.
SLACK_SECONDS = 10.0
PATIENCE_SECONDS = 60.0


def _assert_polite(answer: httpx.Response, done: int = 201) -> None:
    """Expect success, or a refusal that says when to come again."""
    if answer.status_code != done:
        assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable"), answer.text
        assert int(answer.headers["Retry-After"]) >= 1


async def _read(client: Client, session_id: str) -> httpx.Response:
    return await client.intercept(session_id, step_index=1, reversibility="read_only")


async def test_everybody_is_told_soon_and_undos_go_on_when_every_connection_is_held(
    services: StartService, database_url: str, endpoint: FakeEndpoint
) -> None:
    """Two callers wait for a lock on both connections: 200 others are refused within the wait, and a run is unwound meanwhile."""
    service = await services(database_connections=POOL, database_wait_seconds=WAIT_SECONDS)
    held = [f"held-{number}" for number in range(POOL)]
    for session_id in held:
        (await _read(service.agent, session_id)).raise_for_status()
    await do_step(service.agent, "run", 1, endpoint.url("/undo"))
    # Its undo is due, and nobody has claimed it yet or somebody has: the orchestrator has connections of its own either way.
    async with asyncio.TaskGroup() as group, hold_sessions(database_url, *held) as hold:
        await service.agent.fail("run")
        waiting = [group.create_task(service.agent.touch(session_id)) for session_id in held]
        await hold.until_waiting(POOL)
        began = monotonic()
        with structlog.testing.capture_logs() as logs:
            answers = await asyncio.gather(*(_read(service.agent, f"crowd-{number}") for number in range(CROWD)))
        assert monotonic() - began < WAIT_SECONDS + SLACK_SECONDS
        assert {answer.status_code for answer in answers} == {503}
        for answer in answers:
            _assert_polite(answer)
        told = [event["cause"] for event in logs if event["event"] == "storage_unavailable" and event["where"] == "request"]
        assert len(told) == CROWD, "the log says why, to whoever is not the caller"
        assert all("TimeoutError" in cause for cause in told)
        await endpoint.wait_for_answers(1)
    for task in waiting:
        _assert_polite(task.result(), done=200)
    assert (await rest(service.agent, "run"))["state"] == "compensated"


async def test_everybody_is_answered_and_nothing_is_lost_when_a_crowd_comes_at_once(services: StartService, endpoint: FakeEndpoint) -> None:
    """200 at once on two connections: done or told to come again; who comes again is served, nobody twice, and no connection is lost."""
    service = await services(database_connections=POOL, database_wait_seconds=WAIT_SECONDS)

    async def register(number: int) -> int:
        undo = undo_at(endpoint.url(f"/{number}"))
        answer = await service.agent.intercept(f"run-{number}", step_index=1, idempotency_key="once", compensation=undo)
        _assert_polite(answer)
        return answer.status_code

    async with asyncio.timeout(PATIENCE_SECONDS):
        told = await asyncio.gather(*(register(number) for number in range(CROWD)))
        for number in (number for number, status in enumerate(told) if status == 503):
            assert await register(number) == 201, "one alone is not refused"
    ended = await asyncio.gather(*(service.agent.fail(f"run-{number}", wait_s=30) for number in range(POOL)))
    assert [answer.json()["state"] for answer in ended] == ["compensated"] * POOL
    assert Counter(request.path for request in endpoint.received) == Counter(f"/{number}" for number in range(POOL))
    assert service.app.state.engine.database.connections()["in_use"] == 0


async def test_callers_are_served_when_many_others_wait_long(services: StartService) -> None:
    """Who waits for a decision holds no connection: ten times as many waiters as connections change nothing for anybody else."""
    service = await services(database_connections=POOL, database_wait_seconds=WAIT_SECONDS)
    await park(service.agent, "parked", 1, "{}")
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(service.agent.effect("parked", 1, wait_s=55)) for _ in range(10 * POOL)]
        for number in range(10):
            (await _read(service.agent, f"run-{number}")).raise_for_status()
        assert not any(task.done() for task in waiting)
        (await service.operator.approve("parked", 1)).raise_for_status()
    assert {task.result()["state"] for task in waiting} == {"approved"}
