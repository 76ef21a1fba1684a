"""Kill -9 the database under load, right after an answer: nothing acknowledged is lost. Must not touch a cluster that is not its own."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.conftest import migrate_into, with_database
from tests.factories import Client, JsonObject, owner_connection, undo_at
from tests.fakes import FakeEndpoint, Reply
from tests.faults.gates import wait_until
from tests.faults.judgement import assert_undone, do_steps
from tests.faults.nursery import Nursery
from tests.faults.processes import Cluster, ServiceProcess, make_keys, open_cluster

pytestmark = pytest.mark.database

DATABASE = "killed"
WRITERS = 4
OUTAGES = 2
ANSWERS_BEFORE_KILL = 15  # 2xx to intercepts and commits of all writers together
MAX_WAIT_SECONDS = 60


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Run a cluster with a migrated database."""
    with open_cluster(tmp_path / "pg") as cluster:
        migrate_into(cluster.url, DATABASE)
        yield cluster


@dataclass(slots=True, kw_only=True)
class Acknowledged:
    """What the writers were told: per session and step the intercept's ids, and whether the commit was answered; and every refusal."""

    intercepts: dict[tuple[str, int], JsonObject] = field(default_factory=dict)
    commits: set[tuple[str, int]] = field(default_factory=set)
    refusals: list[httpx.Response] = field(default_factory=list)
    on_answer: Callable[[], None] = lambda: None


async def write_until(stopping: asyncio.Event, agent: Client, session_id: str, told: Acknowledged) -> None:
    """Take step after step; what is refused for the moment is asked again under the same key, as an agent should."""
    step = 1
    while not stopping.is_set():
        answer = await agent.intercept(
            session_id, step_index=step, idempotency_key=f"step-{step}", compensation=undo_at("http://127.0.0.1:9/undo")
        )
        if answer.status_code != 201:
            told.refusals.append(answer)
            await _pause(stopping)
            continue
        told.intercepts[session_id, step] = answer.json()
        told.on_answer()
        while not stopping.is_set():
            answer = await agent.commit(session_id, step, {"credit_id": step})
            if answer.status_code == 200:
                told.commits.add((session_id, step))
                told.on_answer()
                break
            told.refusals.append(answer)
            await _pause(stopping)
        step += 1


async def _pause(stopping: asyncio.Event) -> None:
    """Be a client with a little patience, less than it is asked for."""
    try:
        async with asyncio.timeout(0.05):
            await stopping.wait()
    except TimeoutError:
        return


async def _kill_after_answers(cluster: Cluster, told: Acknowledged) -> None:
    """Kill the postmaster in the same breath in which a writer gets its answer, and return once a writer was refused."""
    killed, left = asyncio.Event(), ANSWERS_BEFORE_KILL
    told.refusals.clear()

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            cluster.kill()
            killed.set()

    told.on_answer = count
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        await killed.wait()


async def _assert_waiting(service: ServiceProcess, told: Acknowledged) -> None:
    """Expect a service that lives, is not ready, and asks its callers to come back."""
    await service.wait_for_readiness(503)
    assert (await service.agent.request("GET", "/livez")).status_code == 200
    not_ready = await service.agent.request("GET", "/readyz")
    refused = await service.agent.intercept("meanwhile", step_index=1, reversibility="read_only")
    for answer in (not_ready, refused, *told.refusals):
        assert (answer.status_code, answer.headers["Content-Type"]) == (503, "application/problem+json")
        assert int(answer.headers["Retry-After"]) >= 1
    assert refused.json()["code"] == "storage_unavailable"


async def _assert_all_found(service: ServiceProcess, told: Acknowledged) -> None:
    assert len(told.intercepts) + len(told.commits) >= OUTAGES * ANSWERS_BEFORE_KILL
    for session_id in {session_id for session_id, _ in told.intercepts}:
        session = await service.operator.session(session_id)
        effects = {effect["step_index"]: effect for effect in session["effects"]}
        for (_, step), answer in ((key, answer) for key, answer in told.intercepts.items() if key[0] == session_id):
            found = {name: effects[step][name] for name in ("effect_id", "undo_id", "forward_key")}
            assert found == {name: answer[name] for name in found}
            if (session_id, step) in told.commits:
                assert (effects[step]["state"], effects[step]["result"]) == ("committed", {"credit_id": step})
        verified = await service.auditor.get(f"/sessions/{session_id}/journal/verify")
        assert verified.json()["valid"] is True


async def test_nothing_acknowledged_is_lost_when_postgres_is_killed(nursery: Nursery, cluster: Cluster, tmp_path: Path) -> None:
    """Four writers and an unwind; the postmaster is killed right after a 2xx, twice: all is found, and all goes on without a restart."""
    url = with_database(cluster.url, DATABASE)
    held, stopping, told = asyncio.Event(), asyncio.Event(), Acknowledged()
    async with (
        FakeEndpoint({"/undo/2": [Reply(gate=held), Reply()]}) as endpoint,
        ServiceProcess(nursery, url, await make_keys(url), tmp_path, lease_seconds=3.0) as service,
        asyncio.TaskGroup() as writers,
    ):
        keys = await do_steps(service.agent, endpoint, "unwinding", 2)
        await service.agent.fail("unwinding")
        await endpoint.wait_for_requests(1)
        for number in range(WRITERS):
            writers.create_task(write_until(stopping, service.agent, f"writer-{number}", told))
        for _ in range(OUTAGES):
            await _kill_after_answers(cluster, told)
            await _assert_waiting(service, told)
            held.set()  # an answer that comes during an outage is worth as much as any other
            cluster.stop()
            cluster.start()
            await service.wait_for_readiness(200)
        stopping.set()
        await assert_undone(service.agent, service.auditor, endpoint, "unwinding", keys)
        async with owner_connection(url) as connection:
            await wait_until(connection, "EXISTS (SELECT FROM pg_stat_activity WHERE query ILIKE 'LISTEN%countermand%')")
        later = await do_steps(service.agent, endpoint, "later", 2)
        await assert_undone(service.agent, service.auditor, endpoint, "later", later)
        await _assert_all_found(service, told)
        assert service.crashes == []
