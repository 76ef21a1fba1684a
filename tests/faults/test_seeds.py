"""A few seeds of the whole harness, and a rolling restart: nothing is violated. Must not choose its seeds by what they show.

`make faults` runs hundreds; docs/reliability.md says what they are held against.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.checker import check
from tests.faults.driver import drive
from tests.faults.endpoint import EndpointProcess
from tests.faults.nursery import Nursery
from tests.faults.plans import Fault, FaultPlan, plan_of
from tests.faults.processes import open_cluster
from tests.faults.proxy import ANY
from tests.faults.world import Grounds, World

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.database, pytest.mark.timeout(300)]

SEEDS = (1, 2, 3, 4)
SECONDS = 1.0  # within which the sessions of a seed begin
RESTARTS = 6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Run two replicas, on a Postgres and beside an endpoint that are theirs alone."""
    directory: Path = tmp_path_factory.mktemp("world")
    with open_cluster(directory / "postgres") as cluster:
        async with EndpointProcess(directory / "endpoint.jsonl") as endpoint:
            grounds = Grounds(cluster=cluster, endpoint=endpoint, nursery=nursery, directory=directory)
            await grounds.prepare()
            async with grounds.open_world() as world:
                yield world


@pytest.mark.parametrize("seed", SEEDS)
async def test_nothing_is_violated_when_a_seed_runs(seed: int, world: World) -> None:
    """Kills, pauses, cut commits and restarts under a dozen sessions; the endpoint, the clients and the journals are the witnesses."""
    evidence = await drive(world, plan_of(seed, SECONDS))
    assert check(evidence) == []
    assert evidence.exports
    assert evidence.requests


async def test_no_client_meets_more_than_a_pause_when_replicas_are_restarted_one_after_another(world: World) -> None:
    """SIGTERM to one replica, then to the other, again and again under load: every call is answered in the end, and nothing is lost."""
    plan = plan_of(17, SECONDS)
    restarts = tuple(
        FaultPlan(
            kind=Fault.STOP, session=2 * at, is_at_failure=True, after=0.1, replica=at % 2, seconds=1.0, count=1, begun=ANY, is_aimed=False
        )
        for at in range(RESTARTS)
    )
    evidence = await drive(world, replace(plan, faults=restarts))
    assert check(evidence) == []
    assert [fault.kind for fault in evidence.faults] == [Fault.STOP.value] * RESTARTS
    assert {call.status for call in evidence.calls if call.status is not None and call.status >= 500} <= {503}
