"""What is counted and measured, for Prometheus to fetch. Must not know a floor, nor keep anything that tells one tenant's doings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
INTERRUPTED: Final = "interrupted"

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
    help="Calls that this process worked on and found to be another worker's, or recorded already.",
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
    help="Connections of this process's pools: in_use, idle, or unopened (it may still open so many).",
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
    TRANSITIONS, HALTS, VERB_SECONDS, ATTEMPTS, ATTEMPT_SECONDS, LEASES_LOST, SESSIONS, OLDEST_SESSION, FIRST_EXPIRY, CALLS_DUE,
    CALLS_IN_FLIGHT, CIRCUITS_OPEN, PAUSED, CONNECTIONS, DATABASE_UP, BUILD_INFO,
)  # fmt: skip


class Telemetry:
    """The metrics of one application, on a registry of their own. All calls come from one thread: the loop's."""

    def __init__(self, *, version: str, schema_revision: str) -> None:
        """Register every metric; those with labels have no series yet."""
        self._registry = CollectorRegistry()
        self._transitions = self._counter(TRANSITIONS)
        self._halts = self._counter(HALTS)
        self._verb_seconds = self._histogram(VERB_SECONDS)
        self._attempts = self._counter(ATTEMPTS)
        self._attempt_seconds = self._histogram(ATTEMPT_SECONDS)
        self._leases_lost = self._counter(LEASES_LOST)
        self._sessions = self._gauge(SESSIONS)
        self._oldest_session = self._gauge(OLDEST_SESSION)
        self._first_expiry = self._gauge(FIRST_EXPIRY)
        self._calls_due = self._gauge(CALLS_DUE)
        self._calls_in_flight = self._gauge(CALLS_IN_FLIGHT)
        self._circuits_open = self._gauge(CIRCUITS_OPEN)
        self._paused = self._gauge(PAUSED)
        self._connections = self._gauge(CONNECTIONS)
        self._database_up = self._gauge(DATABASE_UP)
        self._has_first_expiry = False
        self._gauge(BUILD_INFO).labels(version=version, schema_revision=schema_revision).set(1)

    def begin_at_zero(self, *, kinds: Iterator[str], reasons: Iterator[str]) -> None:
        """Show these transitions and halts as 0, so that the first one is seen as an increase."""
        for kind in kinds:
            self._transitions.labels(kind=kind)
        for reason in reasons:
            self._halts.labels(reason=reason)

    def count_transition(self, kind: str) -> None:
        """Count one journal entry."""
        self._transitions.labels(kind=kind).inc()

    def count_halt(self, reason: str) -> None:
        """Count one session handed to a person."""
        self._halts.labels(reason=reason).inc()

    def observe_verb(self, verb: str, outcome: str, seconds: float) -> None:
        """Take how long one request took."""
        self._verb_seconds.labels(verb=verb, outcome=outcome).observe(seconds)

    def observe_attempt(self, call: str, result: str, seconds: float) -> None:
        """Take how one request to an endpoint ended, and how long it took."""
        self._attempts.labels(call=call, result=result).inc()
        self._attempt_seconds.labels(call=call).observe(seconds)

    def count_interrupted(self, call: str) -> None:
        """Count an attempt whose end nobody has seen."""
        self._attempts.labels(call=call, result=INTERRUPTED).inc()

    def count_lease_lost(self) -> None:
        """Count a call that turned out to be somebody else's."""
        self._leases_lost.inc()

    def show_sessions(self, counts: Mapping[str, int], ages_seconds: Mapping[str, float]) -> None:
        """Show how many sessions there are by state, and how old the oldest is."""
        for state, count in counts.items():
            self._sessions.labels(state=state).set(count)
        for state, seconds in ages_seconds.items():
            self._oldest_session.labels(state=state).set(seconds)

    def show_calls(self, due: Mapping[str, int], in_flight: Mapping[str, int]) -> None:
        """Show what waits and what is under way by destination."""
        for destination, count in due.items():
            self._calls_due.labels(destination=destination).set(count)
        for destination, count in in_flight.items():
            self._calls_in_flight.labels(destination=destination).set(count)

    def show_holds(self, circuits: Mapping[str, int], pauses: Mapping[str, int]) -> None:
        """Show where circuits are open, by destination, and what people have paused, by scope."""
        for destination, count in circuits.items():
            self._circuits_open.labels(destination=destination).set(count)
        for scope, count in pauses.items():
            self._paused.labels(scope=scope).set(count)

    def show_first_expiry(self, seconds: float) -> None:
        """Show how soon a question to a person expires."""
        self._first_expiry.set(seconds)
        self._has_first_expiry = True

    def show_connections(self, pool: str, counts: Mapping[str, int]) -> None:
        """Show a pool's connections by state."""
        for state, count in counts.items():
            self._connections.labels(pool=pool, state=state).set(count)

    def show_database(self, *, is_up: bool) -> None:
        """Forget the backlog that was shown, and say whether a new one could be had."""
        for gauge in (
            self._sessions, self._oldest_session, self._calls_due, self._calls_in_flight, self._circuits_open, self._paused,
        ):  # fmt: skip
            gauge.clear()
        self._has_first_expiry = False
        self._database_up.set(is_up)

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield what is exposed: not when a series was made, which the client adds and nobody asks, nor an expiry that there is not."""
        for metric in self._registry.collect():
            if metric.name == FIRST_EXPIRY.name and not self._has_first_expiry:
                continue
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric

    def _counter(self, family: Family) -> Counter:
        return Counter(family.name, family.help, family.labels, registry=self._registry)

    def _gauge(self, family: Family) -> Gauge:
        return Gauge(family.name, family.help, family.labels, registry=self._registry)

    def _histogram(self, family: Family) -> Histogram:
        return Histogram(family.name, family.help, family.labels, registry=self._registry, buckets=family.buckets)
