"""A small herd, by the code that `make herd` runs with a large one. Must not ask how long anything took: the machine decides that."""

from pathlib import Path
from typing import Any

import pytest

from tests.fakes import Received
from tests.faults.herd import drive, herd_of
from tests.faults.herd_figures import AFTER, max_in_flight, out_of_order, violations
from tests.faults.nursery import Nursery


def undo(step: int, started_at: float, ended_at: float, **members: Any) -> Received:
    """Make up a request of one session that was answered 200."""
    headers = ((b"Countermand-Session", b"run-1"), (b"Countermand-Step", b"%d" % step), (b"Idempotency-Key", b"undo-%d" % step))
    place = {"number": step, "connection": 1, "method": "POST", "target": "/undo", "headers": headers, "body": b""}
    return Received(**{**place, "started_at": started_at, "ended_at": ended_at, "is_applied": True, **members})


@pytest.mark.parametrize(
    ("requests", "late", "most"),
    [
        ([undo(3, 0, 1), undo(2, 1, 2), undo(1, 2, 3)], 0, 1),
        ([undo(3, 0, 1), undo(2, 0.5, 2), undo(1, 2, 3)], 1, 2),
        ([undo(2, 0, 1), undo(3, 1, 2), undo(1, 2, 3)], 1, 1),
        ([undo(3, 0, 1, is_applied=False, status=503), undo(2, 1, 2), undo(1, 2, 3)], 2, 1),
        ([undo(3, 0, 9, is_applied=False, status=503), undo(3, 1, 9), undo(2, 2, 9)], 1, 3),
    ],
)
def test_order_and_number_are_counted_when_requests_overlap(requests: list[Received], late: int, most: int) -> None:
    """What a herd is judged by sees a request that comes too early, and all that are at the endpoint at once."""
    assert (out_of_order(requests), max_in_flight(requests)) == (late, most)


@pytest.mark.timeout(300)
async def test_herd_is_undone_within_the_bounds_when_its_destination_goes_away(nursery: Nursery, cluster_url: str, tmp_path: Path) -> None:
    """Nothing is halted, doubled or out of order, one incident is shown, few requests are sent, and another org goes on meanwhile."""
    seen = await drive(herd_of(200, outage_seconds=2.0, calm_seconds=0.5, runs_per_second=2.0), cluster_url, nursery, tmp_path)
    assert violations(seen) == []
    assert len(seen.accepted) == seen.herd.sessions
    assert any(request.status == 503 for request in seen.undos)
    assert set(seen.bystander.undone) >= {AFTER}
