"""When a destination counts as away, what that spares the calls to it, and how it is tried again. Must not count, keep or send anything."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, assert_never

from app.domain.model import CallId, OrgName, OutgoingCall, RetryPolicy
from app.domain.retry import Attempt, Failure
from app.domain.sending import destination_of

AWAY_STATUSES: Final = frozenset({502, 503, 504})
"""What a gateway says for a destination that it does not reach, or a destination of itself. A 500 is an answer about one call."""

AWAY_FAILURES: Final = frozenset({Failure.DNS, Failure.CONNECT, Failure.TLS, Failure.TIMEOUT, Failure.RESET})

FIRST_PROBE_SECONDS: Final = 1.0
MAX_PROBE_SECONDS: Final = 60.0  # what an outage may last longer for us than for everybody else
PROBE_MULTIPLIER: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Place:
    """One destination of one org: what a circuit is about. One tenant's calls tell nothing of another's."""

    org: OrgName
    destination: str


class Sight(StrEnum):
    """What one request tells of its destination."""

    ANSWER = "answer"
    OUTAGE = "outage"
    NOTHING = "nothing"


class Change(StrEnum):
    """What a sight changes of a circuit."""

    OPEN = "open"
    CLOSE = "close"
    NOTE = "note"  # it is open already: the newest error is kept for people
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """`calls`: distinct calls in a row that open a circuit, 0 = never. `limit`: calls in flight to a destination that is well."""

    calls: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What one process knows of a place.

    `outages`: the calls that found it away since anything else was answered. `is_open`: its circuit was open when last looked at.
    `limit`: how many calls may be in flight there while it is still being tried; None: as many as to any other.
    """

    outages: frozenset[CallId] = frozenset()
    is_open: bool = False
    limit: int | None = None


class Hold(StrEnum):
    """What keeps a call that is due from being sent."""

    CIRCUIT = "circuit"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Which destinations of one org take nothing now: those whose circuit is open, and those that a person has paused."""

    circuits: frozenset[str] = frozenset()
    pauses: frozenset[str] = frozenset()
    is_all_paused: bool = False

    def holds(self, destination: str, *, is_probe: bool = False) -> bool:
        """Tell whether nothing may be sent there; a probe passes an open circuit, and no pause."""
        hold = self.by(destination)
        return hold is Hold.PAUSE or (hold is Hold.CIRCUIT and not is_probe)

    def by(self, destination: str) -> Hold | None:
        """Say what holds a destination; people's pauses come first, since nothing but people ends them."""
        if self.is_all_paused or destination in self.pauses:
            return Hold.PAUSE
        return Hold.CIRCUIT if destination in self.circuits else None


NOTHING_HELD: Final = Held()


def sight(call: OutgoingCall, policy: RetryPolicy, attempt: Attempt) -> Sight:
    """Say what an attempt, or a poll, tells of its call's destination.

    Nothing where nothing was asked of it: an address that may not be connected to, a poll that goes elsewhere. What a descriptor takes
    for done is an answer.
    """
    if attempt.failure is Failure.EGRESS_DENIED or _asks_elsewhere(call):
        return Sight.NOTHING
    if attempt.failure in AWAY_FAILURES:
        return Sight.OUTAGE
    if attempt.status in AWAY_STATUSES and (call.poll_url is not None or attempt.status not in policy.compensated_on):
        return Sight.OUTAGE
    return Sight.ANSWER


def see(standing: Standing, call_id: CallId, seen: Sight, rules: Rules) -> Standing:
    """Take what a request told. An answer begins anew: after a closed circuit with one call, then twice as many with each answer."""
    match seen:
        case Sight.NOTHING:
            return standing
        case Sight.OUTAGE:
            is_enough = len(standing.outages) >= rules.calls
            return standing if is_enough else replace(standing, outages=standing.outages | {call_id})
        case Sight.ANSWER if standing.is_open or is_away(standing, rules):
            return Standing(limit=1)
        case Sight.ANSWER:
            limit = None if standing.limit is None else 2 * standing.limit
            return Standing(limit=None if limit is None or limit >= rules.limit else limit)
        case _:
            assert_never(seen)


def look(standing: Standing, *, is_open: bool) -> Standing:
    """Take what the database says of a place's circuit; one that somebody else has closed is tried with one call at first."""
    if is_open:
        return replace(standing, is_open=True)
    return Standing(limit=1) if standing.is_open else standing


def is_away(standing: Standing, rules: Rules) -> bool:
    """Tell whether this process alone has seen enough to hold a place for away."""
    return 0 < rules.calls <= len(standing.outages)


def change(seen: Sight, standing: Standing, rules: Rules, *, is_open: bool, is_probe: bool) -> Change:
    """Say what a sight changes of the circuit, which the database says `is_open` or not."""
    match seen:
        case Sight.ANSWER if is_open:
            return Change.CLOSE
        case Sight.OUTAGE if is_open and is_probe:
            return Change.NOTE
        case Sight.OUTAGE if not is_open and is_away(standing, rules):
            return Change.OPEN
        case _:
            return Change.NONE


def is_charged(seen: Sight, standing: Standing, rules: Rules, *, is_open: bool) -> bool:
    """Tell whether a failed attempt uses up retry budget: not where it is the destination that is away, and known to be."""
    return not (seen is Sight.OUTAGE and (is_open or standing.is_open or is_away(standing, rules)))


def probe_seconds(probes: int, unit: float) -> float:
    """Return how long after a circuit's n-th probe (0: its opening) the next one may come; `unit` in [0, 1) is the jitter's die.

    Half of the interval is fixed, so that an outage is not probed at once again, and half is jittered, so that circuits which opened
    together are not probed together.
    """
    ceiling = min(MAX_PROBE_SECONDS, FIRST_PROBE_SECONDS * PROBE_MULTIPLIER ** min(probes, 30))
    return ceiling * (1 + unit) / 2


def _asks_elsewhere(call: OutgoingCall) -> bool:
    return call.poll_url is not None and destination_of(call.poll_url) != call.destination
