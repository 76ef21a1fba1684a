"""What is counted and measured, for Prometheus to fetch. Must not know a floor, nor keep anything that tells one tenant's doings."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal, assert_never

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from app.cells import NUMBERS, Cells, Series

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
INTERRUPTED: Final = "interrupted"
SUM: Final = NUMBERS - 1  # where a histogram has the sum of what it was shown; before it, how many fell into each bucket

# From a look-up by key to a caller that waits half a minute for its session's end.
VERB_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# Up to the longest deadline that an attempt commonly has, and one beyond.
ATTEMPT_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric: its name as it is exposed, what kind it is, by what it is told apart, and what it says."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...] = ()
    help: str
    buckets: tuple[float, ...] = ()


TRANSITIONS: Final = Family(
    name="countermand_transitions_total",
    kind="counter",
    labels=("kind",),
    help="Committed transitions, by the journal entry's kind in lower case; each is exactly one append to a journal.",
)
HALTS: Final = Family(
    name="countermand_halts_total", kind="counter", labels=("reason",), help="Sessions handed to a person, by why automation stopped."
)
VERB_SECONDS: Final = Family(
    name="countermand_verb_seconds",
    kind="histogram",
    labels=("verb", "outcome"),
    help="Time to answer a request under /v1, by operationId and class of status; what a caller asked to wait (wait_s) is in it.",
    buckets=VERB_BUCKETS,
)
ATTEMPTS: Final = Family(
    name="countermand_attempts_total",
    kind="counter",
    labels=("call", "result"),
    help="Requests to endpoints whose end is known, polls of a 202 included, and attempts found interrupted, by class of result.",
)
ATTEMPT_SECONDS: Final = Family(
    name="countermand_attempt_seconds",
    kind="histogram",
    labels=("call",),
    help="Time from the beginning of a request to an endpoint to its answer or failure.",
    buckets=ATTEMPT_BUCKETS,
)
LEASES_LOST: Final = Family(
    name="countermand_leases_lost_total",
    kind="counter",
    help="Calls that an orchestrator worked on and found to be another's, or recorded already.",
)
BUSY: Final = Family(
    name="countermand_busy_total",
    kind="counter",
    help="Requests that were refused, 503 busy, since more waited to be written than could be written soon.",
)
SESSIONS: Final = Family(
    name="countermand_sessions",
    kind="gauge",
    labels=("state",),
    help="Sessions that have not ended, in all orgs; the same on every replica.",
)
OLDEST_SESSION: Final = Family(
    name="countermand_oldest_session_age_seconds",
    kind="gauge",
    labels=("state",),
    help="How long ago the oldest such session was handed to a person (halted), failed (failed, compensating) or was opened (the others); "
    "0 where there is none.",
)
FIRST_EXPIRY: Final = Family(
    name="countermand_first_approval_expiry_seconds",
    kind="gauge",
    help="Time until the first open question to a person, or approval nobody has used, expires; absent where there is none.",
)
CALLS_DUE: Final = Family(
    name="countermand_calls_due",
    kind="gauge",
    labels=("destination",),
    help="Undos and actions that are due and that no worker holds, by host:port: the 20 busiest, all others as other; the same on every "
    "replica.",
)
CALLS_IN_FLIGHT: Final = Family(
    name="countermand_calls_in_flight",
    kind="gauge",
    labels=("destination",),
    help="Undos and actions that a worker holds under a lease, of all replicas, by the same destinations as those due.",
)
CIRCUITS_OPEN: Final = Family(
    name="countermand_circuits_open",
    kind="gauge",
    labels=("destination",),
    help="Orgs for which a destination is held to be away, by host:port: the 20 with the most, all others as other; the same on every "
    "replica.",
)
PAUSED: Final = Family(
    name="countermand_paused",
    kind="gauge",
    labels=("scope",),
    help="Pauses that people have ordered, in all orgs, by how much they hold; the same on every replica.",
)
CONNECTIONS: Final = Family(
    name="countermand_database_connections",
    kind="gauge",
    labels=("pool", "state"),
    help="Connections of the pools, of all workers together: in_use, idle, or unopened (so many may still be opened).",
)
DATABASE_UP: Final = Family(
    name="countermand_database_up",
    kind="gauge",
    help="1 if the database told the backlog when it was last asked for this scrape; 0 if not, and then those gauges are absent.",
)
BUILD_INFO: Final = Family(
    name="countermand_build_info",
    kind="gauge",
    labels=("version", "schema_revision"),
    help="Always 1: which version runs, and for which schema revision it was written.",
)

FAMILIES: Final = (
    TRANSITIONS, HALTS, VERB_SECONDS, ATTEMPTS, ATTEMPT_SECONDS, LEASES_LOST, BUSY, SESSIONS, OLDEST_SESSION, FIRST_EXPIRY,
    CALLS_DUE, CALLS_IN_FLIGHT, CIRCUITS_OPEN, PAUSED, CONNECTIONS, DATABASE_UP, BUILD_INFO,
)  # fmt: skip


class Telemetry(Collector):
    """The metrics of one application. All calls come from one thread: the loop's.

    What a process counts, and its connections, are in cells, and are told added up over the processes of the service. What the database
    was asked is told as this process has it.
    """

    def __init__(self, *, version: str, schema_revision: str, cells: Cells) -> None:
        """Begin with no series but those without labels."""
        self._cells = cells
        for counter in (LEASES_LOST, BUSY):
            self._cells.mine((counter.name,))
        self._asked: dict[Series, float] = {(DATABASE_UP.name,): 0}
        self._build_info: Series = (BUILD_INFO.name, version, schema_revision)

    def begin_at_zero(self, *, kinds: Iterable[str], reasons: Iterable[str]) -> None:
        """Show these transitions and halts as 0, so that the first one is seen as an increase."""
        for kind in kinds:
            self._cells.mine((TRANSITIONS.name, kind))
        for reason in reasons:
            self._cells.mine((HALTS.name, reason))

    def count_transition(self, kind: str) -> None:
        """Count one journal entry."""
        self._cells.mine((TRANSITIONS.name, kind))[0] += 1

    def count_halt(self, reason: str) -> None:
        """Count one session handed to a person."""
        self._cells.mine((HALTS.name, reason))[0] += 1

    def observe_verb(self, verb: str, outcome: str, seconds: float) -> None:
        """Take how long one request took."""
        self._observe(VERB_SECONDS, (VERB_SECONDS.name, verb, outcome), seconds)

    def observe_attempt(self, call: str, result: str, seconds: float) -> None:
        """Take how one request to an endpoint ended, and how long it took."""
        self._cells.mine((ATTEMPTS.name, call, result))[0] += 1
        self._observe(ATTEMPT_SECONDS, (ATTEMPT_SECONDS.name, call), seconds)

    def count_interrupted(self, call: str) -> None:
        """Count an attempt whose end nobody has seen."""
        self._cells.mine((ATTEMPTS.name, call, INTERRUPTED))[0] += 1

    def count_lease_lost(self) -> None:
        """Count a call that turned out to be somebody else's."""
        self._cells.mine((LEASES_LOST.name,))[0] += 1

    def count_busy(self) -> None:
        """Count a request for which there was no room in the queue."""
        self._cells.mine((BUSY.name,))[0] += 1

    def show_connections(self, pool: str, counts: Mapping[str, int]) -> None:
        """Show a pool's connections by state."""
        for state, count in counts.items():
            self._cells.mine((CONNECTIONS.name, pool, state))[0] = count

    def show_sessions(self, counts: Mapping[str, int], ages_seconds: Mapping[str, float]) -> None:
        """Show how many sessions there are by state, and how old the oldest is."""
        self._show(SESSIONS, counts)
        self._show(OLDEST_SESSION, ages_seconds)

    def show_calls(self, due: Mapping[str, int], in_flight: Mapping[str, int]) -> None:
        """Show what waits and what is under way by destination."""
        self._show(CALLS_DUE, due)
        self._show(CALLS_IN_FLIGHT, in_flight)

    def show_holds(self, circuits: Mapping[str, int], pauses: Mapping[str, int]) -> None:
        """Show where circuits are open, by destination, and what people have paused, by scope."""
        self._show(CIRCUITS_OPEN, circuits)
        self._show(PAUSED, pauses)

    def show_first_expiry(self, seconds: float) -> None:
        """Show how soon a question to a person expires."""
        self._asked[FIRST_EXPIRY.name,] = seconds

    def show_database(self, *, is_up: bool) -> None:
        """Forget the backlog that was shown, and say whether a new one could be had."""
        self._asked = {(DATABASE_UP.name,): is_up}

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield every family; not that of the first expiry where there is none, which would be told as a family without a number."""
        told: dict[str, list[tuple[Series, list[float]]]] = {family.name: [] for family in FAMILIES}
        single = {series: [value] for series, value in {**self._asked, self._build_info: 1}.items()}
        for (name, *labels), numbers in {**self._cells.sums(), **single}.items():
            told[name].append((tuple(labels), numbers))
        for family in FAMILIES:
            if told[family.name] or family is not FIRST_EXPIRY:
                yield _metric(family, told[family.name])

    def _observe(self, family: Family, series: Series, seconds: float) -> None:
        numbers = self._cells.mine(series)
        numbers[bisect_left(family.buckets, seconds)] += 1
        numbers[SUM] += seconds

    def _show(self, family: Family, counts: Mapping[str, float]) -> None:
        for label, count in counts.items():
            self._asked[family.name, label] = count


def _metric(family: Family, told: Iterable[tuple[Series, list[float]]]) -> Metric:
    match family.kind:
        case "counter":
            counter = CounterMetricFamily(family.name, family.help, labels=family.labels)
            for labels, numbers in told:
                counter.add_metric(labels, numbers[0])
            return counter
        case "gauge":
            gauge = GaugeMetricFamily(family.name, family.help, labels=family.labels)
            for labels, numbers in told:
                gauge.add_metric(labels, numbers[0])
            return gauge
        case "histogram":
            histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
            bounds = [*map(str, family.buckets), "+Inf"]
            for labels, numbers in told:
                histogram.add_metric(labels, list(zip(bounds, accumulate(numbers[: len(bounds)]), strict=True)), numbers[SUM])
            return histogram
        case _:
            assert_never(family.kind)
