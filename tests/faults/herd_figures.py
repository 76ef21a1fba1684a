"""What is seen of a herd, what it comes to, and whether the bounds were kept. Must not run anything, nor ask the service."""

import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from os import cpu_count

from tests.factories import JsonObject
from tests.fakes import Received
from tests.faults.bystander import Bystander
from tests.faults.quantiles import quantile

BEFORE, FAILING, DRAINING, AWAY, AFTER = PHASES = ("before", "failing", "draining", "away", "after")
STEPS = 3  # of each session
HERD_PATH, OTHER_PATH = "/undo", "/other"  # of one endpoint: one destination for both orgs
MEGABYTE = 1024 * 1024
MAX_GROWTH_BYTES = 32 * MEGABYTE  # of a replica: its pools' connections and what they have prepared; the herd's payloads alone are 60 MB
PACE_SECONDS = 5.0  # over which undos a second are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Herd:
    """What is done, and the bounds that follow from the service's settings, for all replicas together.

    `outage_seconds`: for how long the endpoint says 503 once a quarter is undone; `calm_seconds`: before and after it all.
    `runs_per_second`: what the other org begins meanwhile. `max_in_flight`: requests at one destination at once. `max_unaware`: requests
    that may find an outage before it is known for one; from then on there are probes.
    """

    sessions: int
    outage_seconds: float
    calm_seconds: float
    runs_per_second: float
    max_in_flight: int
    max_unaware: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at the whole: resident bytes by replica, sessions of the herd by state."""

    at: float
    resident: Sequence[int]
    states: Mapping[str, int]


@dataclass(slots=True, kw_only=True)
class Outage:
    """When it was, and what an operator was shown before its end: destinations with a circuit, escalations; and probes so far."""

    began_at: float
    ended_at: float = 0.0
    circuits: int = 0
    escalations: int = 0
    probes: int = 0


@dataclass(slots=True, kw_only=True)
class Seen:
    """Everything that was seen. `accepted`: when each failure was answered 202; `refusals`: 503s before that; `load`: before and after."""

    herd: Herd
    bystander: Bystander
    began_at: float = 0.0
    ended_at: float = 0.0
    outage: Outage | None = None
    refusals: int = 0
    load: tuple[float, float] = (0.0, 0.0)
    accepted: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    requests: list[Received] = field(default_factory=list)
    events: list[JsonObject] = field(default_factory=list)

    @property
    def undos(self) -> list[Received]:
        """The herd's own requests, by the time that they came."""
        return sorted((request for request in self.requests if request.path == HERD_PATH), key=lambda request: request.started_at)

    @property
    def halted(self) -> int:
        """How many sessions of the herd are halted at the end."""
        return self.samples[-1].states.get("halted", 0)


def violations(seen: Seen) -> list[str]:
    """Name every bound that was not kept."""
    undos = seen.undos
    keys, applied = _keys_by_step(undos), Counter(request.key for request in undos if request.is_applied)
    crashes = [event for event in seen.events if event.get("event") in {"call_crashed", "request_crashed", "engine_died"}]
    found = {
        "sessions halted": seen.halted,
        "undos missing": STEPS * seen.herd.sessions - len(applied),
        "undos done twice": sum(count > 1 for count in applied.values()),
        "undos under a second key": sum(len(found) > 1 for found in keys.values()),
        "undos out of order": out_of_order(undos),
        "requests in flight above the bound": max(0, max_in_flight(seen.requests) - seen.herd.max_in_flight),
        "bytes of growth above the bound": max(0, max(map(_growth, _resident(seen))) - MAX_GROWTH_BYTES),
        "crashes": len(crashes),
    }
    if seen.outage is not None:
        found["incidents shown that are not the one"] = abs(seen.outage.circuits - 1) + seen.outage.escalations
        # The last probe may have begun after they were counted, and before the endpoint was back.
        found["requests into the outage above the bound"] = max(0, _refused(seen) - seen.outage.probes - 1 - seen.herd.max_unaware)
    return [f"{name}: {count}" for name, count in found.items() if count]


def figures(seen: Seen) -> JsonObject:
    """Return what it came to, by name."""
    undos = seen.undos
    told = {
        "sessions": seen.herd.sessions,
        "undos": STEPS * seen.herd.sessions,
        "failures accepted (202) per second": round(len(seen.accepted) / (seen.accepted[-1] - seen.began_at), 1),
        "failures refused (503) and reported again": seen.refusals,
        "time from the first failure to the last undo": f"{seen.ended_at - seen.began_at:.0f} s",
        "undos per second, median / most, over 5 s": _pace(undos),
        "requests in flight at the destination, most / bound": f"{max_in_flight(seen.requests)} / {seen.herd.max_in_flight}",
        "undos out of order": out_of_order(undos),
        "requests": len(undos),
        "undos delivered twice with the same key": _delivered_again(undos),
        "undos delivered under another key": sum(len(found) > 1 for found in _keys_by_step(undos).values()),
        "sessions halted": seen.halted,
        "circuits opened": sum(event.get("event") == "circuit_opened" for event in seen.events),
        **_outage_figures(seen),
        **_bystander_figures(seen.bystander),
    }
    for number, resident in enumerate(_resident(seen), 1):
        start, most, end = (round(value / MEGABYTE) for value in (resident[0], max(resident), resident[-1]))
        told[f"resident memory of replica {number}, start / most / end"] = f"{start} / {most} / {end} MB"
    told["load average of a minute, before / at the end"] = f"{seen.load[0]:.1f} / {seen.load[1]:.1f}"
    told["machine"] = f"{platform.machine()}, {cpu_count()} cores for everything, Python {platform.python_version()}"
    return told


def table(columns: Sequence[JsonObject]) -> str:
    """Return figures beside one another for a reader, as lines of a Markdown table."""
    names = dict.fromkeys(name for told in columns for name in told)
    lines = [[name, *(str(told.get(name, "")) for told in columns)] for name in names]
    head = ["figure", *("without an outage" if "length of the outage" not in told else "with an outage" for told in columns)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *lines])


def max_in_flight(requests: Iterable[Received]) -> int:
    """Return how many requests were at the endpoint at once, at most."""
    ends = [(request.ended_at, -1) for request in requests if request.ended_at is not None]
    now = most = 0
    for _, change in sorted([*ends, *((request.started_at, 1) for request in requests)]):  # at one moment, ends come first
        now += change
        most = max(most, now)
    return most


def out_of_order(undos: Iterable[Received]) -> int:
    """Count the requests that came before every undo above theirs was done."""
    done: dict[tuple[str | None, int], float] = {}
    for request in undos:
        if request.is_applied and request.ended_at is not None:
            done.setdefault(_place(request), request.ended_at)
    return sum(
        any(done.get((session, above), inf) > request.started_at for above in range(step + 1, STEPS + 1))
        for request in undos
        for session, step in [_place(request)]
    )


def _place(request: Received) -> tuple[str | None, int]:
    return request.header("Countermand-Session"), int(request.header("Countermand-Step") or 0)


def _keys_by_step(undos: Iterable[Received]) -> dict[tuple[str | None, int], set[str | None]]:
    keys: dict[tuple[str | None, int], set[str | None]] = {}
    for request in undos:
        keys.setdefault(_place(request), set()).add(request.key)
    return keys


def _delivered_again(undos: Iterable[Received]) -> int:
    answered = [request.key for request in undos if request.status < 300]
    return len(answered) - len(set(answered))


def _pace(undos: Iterable[Received]) -> str:
    done = [request.started_at for request in undos if request.is_applied]
    counted = Counter(int((moment - done[0]) / PACE_SECONDS) for moment in done)
    paces = [count / PACE_SECONDS for count in counted.values()]
    return f"{quantile(paces, 0.5)} / {max(paces)}"


def _refused(seen: Seen) -> int:
    return sum(request.status >= 300 for request in seen.undos)


def _outage_figures(seen: Seen) -> JsonObject:
    outage = seen.outage
    if outage is None:
        return {}
    back = next(request.started_at for request in seen.undos if request.started_at > outage.ended_at and request.is_applied)
    return {
        "length of the outage": f"{outage.ended_at - outage.began_at:.0f} s",
        "requests while it lasted, probes among them": f"{_refused(seen)}, {outage.probes}",
        "destinations shown as away / escalations, before its end": f"{outage.circuits} / {outage.escalations}",
        "its end to the first undo / to the last": f"{back - outage.ended_at:.1f} s / {seen.ended_at - outage.ended_at:.0f} s",
    }


def _bystander_figures(bystander: Bystander) -> JsonObject:
    told: JsonObject = {}
    for phase in PHASES:
        if answers := bystander.answers[phase]:
            median, most = (round(1_000 * (quantile(answers, share) or 0)) for share in (0.5, 0.99))
            told[f"other org, {phase}: answers, p50 / p99"] = f"{median} / {most} ms ({len(answers)}, {bystander.refusals[phase]} refused)"
        if undone := bystander.undone[phase]:
            p50, p99 = quantile(undone, 0.5), quantile(undone, 0.99)
            told[f"other org, {phase}: failure to undone, p50 / p99"] = f"{p50} / {p99} s ({len(undone)})"
    return told


def _resident(seen: Seen) -> list[list[int]]:
    """Return the resident bytes of each replica over time, from when the herd began."""
    return [list(column) for column in zip(*(sample.resident for sample in seen.samples if sample.at >= seen.began_at), strict=True)]


def _growth(resident: Sequence[int]) -> int:
    return max(resident) - resident[0]
