"""Whose due calls are begun next: fair between orgs, within the bounds, past what is held. Must not look for calls, nor begin one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from heapq import heapify, heappop, heappush

from app.domain.circuits import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """What is due at a place and in nobody's hands; `waiting` counts it up to a bound, and only where nothing holds it.

    `is_open`: its circuit is; `probes`: how often it was probed; `is_probe_due`: it may be probed now, and nobody is at it.
    """

    place: Place
    waiting: int
    oldest_due_at: datetime | None
    is_open: bool
    probes: int
    is_probe_due: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many calls one process has in flight at once: to one host and port, and of one org. `free`: how many more altogether now."""

    free: int
    per_destination: int
    per_org: int


def allot(queues: Sequence[Queue], in_flight: Mapping[Place, int], limits: Mapping[Place, int], bounds: Bounds) -> dict[Place, int]:
    """Return how many calls to begin at each place.

    One after the other goes to the org that has the fewest in flight, there to the place that has, there to what is due longest: an org
    with ten thousand due calls takes what nobody else wants. `limits` has the places with a bound of their own.
    """
    taken: Counter[Place] = Counter()
    busy = _Busy(in_flight)
    line = [
        (busy.rank(queue.place), queue.oldest_due_at, number)
        for number, queue in enumerate(queues)
        if queue.waiting > 0 and queue.oldest_due_at is not None
    ]
    heapify(line)
    while line and taken.total() < bounds.free:
        rank, due_at, number = heappop(line)
        queue = queues[number]
        if rank != busy.rank(queue.place):  # somebody before it was of the same org
            heappush(line, (busy.rank(queue.place), due_at, number))
            continue
        if not busy.has_room(queue.place, limits, bounds):
            continue
        taken[queue.place] += 1
        busy.add(queue.place)
        if taken[queue.place] < queue.waiting:
            heappush(line, (busy.rank(queue.place), due_at, number))
    return dict(taken)


def has_room(place: Place, in_flight: Mapping[Place, int], limits: Mapping[Place, int], bounds: Bounds) -> bool:
    """Tell whether one more call may go to a place of an org that has its share already: a worker moves on there."""
    return _Busy(in_flight).has_room_there(place, limits, bounds)


class _Busy:
    """Calls in flight by place, by org and by destination."""

    def __init__(self, in_flight: Mapping[Place, int]) -> None:
        self._places = Counter(in_flight)
        self._orgs: Counter[str] = Counter()
        self._destinations: Counter[str] = Counter()
        for place, count in in_flight.items():
            self._orgs[place.org] += count
            self._destinations[place.destination] += count

    def add(self, place: Place) -> None:
        self._places[place] += 1
        self._orgs[place.org] += 1
        self._destinations[place.destination] += 1

    def rank(self, place: Place) -> tuple[int, int]:
        return self._orgs[place.org], self._places[place]

    def has_room(self, place: Place, limits: Mapping[Place, int], bounds: Bounds) -> bool:
        return self._orgs[place.org] < bounds.per_org and self.has_room_there(place, limits, bounds)

    def has_room_there(self, place: Place, limits: Mapping[Place, int], bounds: Bounds) -> bool:
        is_within_own = self._places[place] < limits.get(place, bounds.per_destination)
        return is_within_own and self._destinations[place.destination] < bounds.per_destination
