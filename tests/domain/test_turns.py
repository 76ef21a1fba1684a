"""Whose calls are begun next: fair between orgs, within bounds, oldest first, past what is held. Must not claim anything."""

from collections import Counter
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import turns
from app.domain.circuits import Place
from app.domain.model import OrgName
from app.domain.turns import Bounds, Queue
from tests.domain.world import START

ORGS = ("acme", "beta", "cobra")
DESTINATIONS = ("a:443", "b:443", "c:443")
BOUNDS = Bounds(free=6, per_destination=4, per_org=5)


def at(org: str, destination: str = "a:443") -> Place:
    """Return a place."""
    return Place(org=OrgName(org), destination=destination)


def queue(place: Place, waiting: int, *, since: int = 0) -> Queue:
    """Return a line that nothing holds; `since`: seconds after the start."""
    oldest = START + timedelta(seconds=since) if waiting else None
    return Queue(place=place, waiting=waiting, oldest_due_at=oldest, is_open=False, probes=0, is_probe_due=False)


A, B = at("acme"), at("beta")
A2, B2 = at("acme", "b:443"), at("beta", "b:443")
# What waits, what is in flight, the bounds of places that are just back -> what is begun.
ALLOTTED: list[tuple[str, list[Queue], dict[Place, int], dict[Place, int], dict[Place, int]]] = [
    ("nothing is due", [], {}, {}, {}),
    ("all fits", [queue(A, 2), queue(B2, 1)], {}, {}, {A: 2, B2: 1}),
    ("one destination has room for four", [queue(A, 9)], {}, {}, {A: 4}),
    ("it has them already", [queue(A, 9)], {A: 3, B: 1}, {}, {}),
    ("one org has room for five", [queue(A, 9), queue(A2, 9)], {}, {}, {A: 3, A2: 2}),
    ("it has them already", [queue(A, 9), queue(A2, 9)], {at("acme", "c:443"): 5}, {}, {}),
    ("a herd of one org leaves half to another", [queue(A, 9), queue(B2, 9, since=60)], {}, {}, {A: 3, B2: 3}),
    ("where both go to one destination too", [queue(A, 9), queue(B, 9, since=60)], {}, {}, {A: 2, B: 2}),
    ("who has more in flight comes later", [queue(A, 9), queue(B, 9, since=60)], {A: 3}, {}, {B: 1}),
    ("a place that is just back is tried with one", [queue(A, 9), queue(A2, 1)], {}, {A: 1}, {A: 1, A2: 1}),
    ("and not with another one meanwhile", [queue(A, 9)], {A: 1}, {A: 1}, {}),
    ("its limit is no other org's", [queue(A, 9), queue(B, 9)], {}, {A: 1}, {A: 1, B: 3}),
    ("what is held is passed over", [queue(A, 0), queue(B, 1)], {}, {}, {B: 1}),
]


@pytest.mark.parametrize(("waiting", "in_flight", "limits", "expected"), [pytest.param(*row[1:], id=row[0]) for row in ALLOTTED])
def test_calls_are_allotted_fairly_when_not_all_can_be_begun(
    waiting: list[Queue], in_flight: dict[Place, int], limits: dict[Place, int], expected: dict[Place, int]
) -> None:
    """The org with the fewest in flight comes first, within all three bounds."""
    assert turns.allot(waiting, in_flight, limits, BOUNDS) == expected


def test_oldest_comes_first_when_all_else_is_equal() -> None:
    """Nobody waits for ever: of two orgs with as many in flight, whoever waits longer is next."""
    lines = [queue(A, 3, since=2), queue(B, 3, since=1)]
    assert turns.allot(lines, {}, {}, Bounds(free=1, per_destination=9, per_org=9)) == {B: 1}
    assert turns.allot(lines, {B: 1}, {}, Bounds(free=1, per_destination=9, per_org=9)) == {A: 1}


places = st.builds(at, st.sampled_from(ORGS), st.sampled_from(DESTINATIONS))
counts = st.dictionaries(places, st.integers(1, 6), max_size=9)
bounds = st.builds(Bounds, free=st.integers(0, 20), per_destination=st.integers(1, 8), per_org=st.integers(1, 12))


@given(waiting=counts, in_flight=counts, limits=st.dictionaries(places, st.integers(1, 3), max_size=4), bound=bounds)
def test_bounds_hold_and_no_slot_is_wasted_when_anything_waits(
    waiting: dict[Place, int], in_flight: dict[Place, int], limits: dict[Place, int], bound: Bounds
) -> None:
    """Never more than fits, never more than waits; what is left waiting has a reason."""
    lines = [queue(place, count, since=number) for number, (place, count) in enumerate(waiting.items())]
    taken = turns.allot(lines, in_flight, limits, bound)
    total = Counter(in_flight) + Counter(taken)
    assert sum(taken.values()) <= bound.free
    for place, count in taken.items():
        assert 0 < count <= waiting[place]
        assert total[place] <= limits.get(place, bound.per_destination)
        assert sum(total[other] for other in total if other.destination == place.destination) <= bound.per_destination
        assert sum(total[other] for other in total if other.org == place.org) <= bound.per_org
    if sum(taken.values()) < bound.free:
        for place, count in waiting.items():
            is_full = (
                total[place] >= limits.get(place, bound.per_destination)
                or sum(total[other] for other in total if other.destination == place.destination) >= bound.per_destination
                or sum(total[other] for other in total if other.org == place.org) >= bound.per_org
            )
            assert is_full or taken.get(place, 0) == count


def test_worker_moves_on_when_there_is_room_though_its_org_has_its_share() -> None:
    """It has a slot of its org's already; the destination's room, and that of a place just back, still count."""
    bound = Bounds(free=0, per_destination=2, per_org=1)
    assert turns.has_room(A2, {A: 1}, {}, bound)
    assert not turns.has_room(A2, {A: 1, B2: 2}, {}, bound)
    assert not turns.has_room(A2, {A: 1, A2: 1}, {A2: 1}, bound)
