"""A replica whose clock is an hour off decides as the others do: persisted time is the database's. Must not fake the database's clock.

Needs Debian's libfaketime (package `libfaketime`), or another one that COUNTERMAND_TEST_LIBFAKETIME names; without it the test is skipped.
"""

import os
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.factories import park
from tests.fakes import FakeEndpoint, Reply
from tests.faults.conftest import StartProcess
from tests.faults.judgement import assert_undone, do_steps
from tests.faults.nursery import Nursery

LEASES = 2.5  # how many leases an attempt is in flight for: whoever takes a lease for run out takes it then
LEASE_SECONDS = 1.0
TTL_SECONDS = 600  # an hour off is far beyond it, this test far within


def libfaketime() -> Path | None:
    """Return the library that fakes a process's clock, if there is one here."""
    named = os.environ.get("COUNTERMAND_TEST_LIBFAKETIME")
    found = [Path(named)] if named else sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    return next((path for path in found if path.exists()), None)


@pytest.fixture(params=["+1h", "-1h"])
def skewed_nursery(request: pytest.FixtureRequest) -> Iterator[Nursery]:
    """Fork services whose clock is an hour off; only the one that shows the time of day, not the one that measures spans."""
    library = libfaketime()
    if library is None:
        pytest.skip("no libfaketime here: install Debian's package, or name one in COUNTERMAND_TEST_LIBFAKETIME")
    with Nursery({"LD_PRELOAD": str(library), "FAKETIME": request.param, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}) as nursery:
        yield nursery


async def test_nothing_comes_early_or_late_when_a_replicas_clock_is_an_hour_off(skewed_nursery: Nursery, processes: StartProcess) -> None:
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
    for decider, name in ((skewed, "asked"), (right, "asked-there")):
        (await decider.operator.approve(name, 1)).raise_for_status()
        (await decider.agent.resume(name, 1, "{}")).raise_for_status()
        dates = [datetime.fromisoformat(entry["at"]) for entry in await right.auditor.journal(name)]
        assert max(dates) - min(dates) < timedelta(seconds=TTL_SECONDS), "an entry bears the time of a replica's own clock"
    assert (await skewed.agent.session("quiet"))["state"] == "active"
    assert right.crashes + skewed.crashes == []
