"""A replica whose clock is an hour off decides as the others do: persisted time is the database's. Must not fake the database's clock."""

from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest

from tests.factories import park
from tests.fakes import FakeEndpoint, Reply
from tests.faults.conftest import StartProcess
from tests.faults.judgement import assert_undone, do_steps
from tests.faults.nursery import SKEW, Nursery
from tests.probes import fetch

LEASES = 2.5  # how many leases an attempt is in flight for: whoever takes a lease for run out takes it then
LEASE_SECONDS = 1.0
TTL_SECONDS = 600  # an hour off is far beyond it, this test far within


@pytest.fixture(params=[3_600, -3_600])
def skewed_nursery(request: pytest.FixtureRequest) -> Iterator[Nursery]:
    """Fork services whose clock is an hour off; only the one that shows the time of day, not the one that measures spans."""
    with Nursery({SKEW: str(request.param)}) as nursery:
        yield nursery


async def test_nothing_comes_early_or_late_when_a_replicas_clock_is_an_hour_off(
    skewed_nursery: Nursery, processes: StartProcess, database_url: str
) -> None:
    """It steals no lease, fails no session for silence, lets no question expire, and dates its entries as the others do."""
    settings = {"lease_seconds": LEASE_SECONDS, "sweep_seconds": 0.1, "approval_ttl_seconds": TTL_SECONDS, "attempt_timeout_ms": 30_000}
    right = await processes(**settings)
    async with FakeEndpoint({"/undo/2": [Reply(delay_seconds=LEASES * LEASE_SECONDS)]}) as endpoint:
        keys = await do_steps(right.agent, endpoint, "run", 2)
        (await right.agent.put("/sessions/quiet", {"idle_seconds": TTL_SECONDS})).raise_for_status()
        await park(right.agent, "asked", 1, "{}")
        (await right.agent.fail("run")).raise_for_status()
        await endpoint.wait_for_requests(1)
        skewed = await processes(nursery=skewed_nursery, **settings)
        await park(skewed.agent, "asked-there", 1, "{}")
        await assert_undone(skewed.agent, skewed.auditor, endpoint, "run", keys)
        assert [request.header("Countermand-Attempt") for request in endpoint.received] == ["1", "1"], "a living worker's lease was taken"
    dated = datetime.fromisoformat(skewed.events[-1]["timestamp"])
    (now,) = await fetch(database_url, "SELECT clock_timestamp() AS now")
    assert abs(dated - now["now"]) > timedelta(seconds=3_000), "its clock is off, as its log shows"
    for decider, name in ((skewed, "asked"), (right, "asked-there")):
        (await decider.operator.approve(name, 1)).raise_for_status()
        (await decider.agent.resume(name, 1, "{}")).raise_for_status()
        dates = [datetime.fromisoformat(entry["at"]) for entry in await right.auditor.journal(name)]
        assert max(dates) - min(dates) < timedelta(seconds=TTL_SECONDS), "an entry bears the time of a replica's own clock"
    assert (await skewed.agent.session("quiet"))["state"] == "active"
    assert right.crashes + skewed.crashes == []
