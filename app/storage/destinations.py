"""The destinations of an org: what holds each, and what waits for it. Must not change anything."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from asyncpg import Record

from app.domain.circuits import Held
from app.storage.database import Transaction
from app.storage.pauses import Pause, pause_in

# As calls.LOCK_CALL_SQL reads it along with everything else that an undo's next move needs.
HELD_SQL = """
SELECT
  ARRAY(SELECT destination FROM circuits WHERE org = $1) AS circuits,
  ARRAY(SELECT coalesce(destination, '') FROM pauses WHERE org = $1 OR org IS NULL) AS pauses
"""


async def held(tx: Transaction) -> Held:
    """Return which of the org's destinations take nothing now."""
    row = await tx.connection.fetchrow(HELD_SQL, tx.org)
    if row is None:
        raise AssertionError("a SELECT without FROM returns one row")
    return held_in(row)


def held_in(row: Record) -> Held:
    """Return what a row with `circuits` and `pauses` holds; a pause of no destination is one of all."""
    pauses = frozenset(row["pauses"])
    return Held(circuits=frozenset(row["circuits"]), pauses=pauses, is_all_paused="" in pauses)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCircuit:
    """A destination that is held to be away."""

    opened_at: datetime
    probe_at: datetime
    last_error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationView:
    """A destination with the calls that are due there, in a worker's hands, or wait for their own time, and what holds it."""

    destination: str
    due: int
    in_flight: int
    later: int
    oldest_due_at: datetime | None
    circuit: OpenCircuit | None
    pause: Pause | None


# As in claims.LOOK_SQL, within one org.
DESTINATIONS_SQL = """
WITH RECURSIVE busy AS (
  (
    SELECT destination
    FROM outgoing_calls
    WHERE due_at IS NOT NULL AND org = $1 AND destination > $2
    ORDER BY destination
    LIMIT 1
  )
  UNION ALL
  SELECT next.destination
  FROM busy AS b
  CROSS JOIN LATERAL (
    SELECT destination
    FROM outgoing_calls
    WHERE due_at IS NOT NULL AND org = $1 AND destination > b.destination
    ORDER BY destination
    LIMIT 1
  ) AS next
),
named AS (
  (SELECT destination FROM busy LIMIT $3)
  UNION
  SELECT destination FROM circuits WHERE org = $1 AND destination > $2
  UNION
  SELECT destination FROM pauses WHERE org = $1 AND destination > $2
  ORDER BY destination
  LIMIT $3
)
SELECT
  n.destination, calls.due, calls.in_flight, calls.later, calls.oldest_due_at, c.opened_at, c.probe_at, c.last_error,
  p.scope, p.paused_at, p.paused_by, p.reason
FROM named AS n
LEFT JOIN circuits AS c ON c.org = $1 AND c.destination = n.destination
LEFT JOIN LATERAL (
  SELECT
    CASE WHEN org IS NULL THEN 'everything' WHEN destination IS NULL THEN 'org' ELSE 'destination' END AS scope,
    paused_at, CASE WHEN org IS NOT NULL THEN paused_by END AS paused_by, reason
  FROM pauses
  WHERE (org IS NULL OR org = $1) AND (destination IS NULL OR destination = n.destination)
  ORDER BY org IS NOT NULL, destination IS NOT NULL
  LIMIT 1
) AS p ON true
CROSS JOIN LATERAL (
  SELECT
    count(*) FILTER (WHERE o.is_due AND NOT o.is_held) AS due,
    count(*) FILTER (WHERE o.is_held) AS in_flight,
    count(*) FILTER (WHERE NOT o.is_due AND NOT o.is_held) AS later,
    min(o.due_at) FILTER (WHERE o.is_due AND NOT o.is_held) AS oldest_due_at
  FROM (
    SELECT due_at, due_at <= statement_timestamp() AS is_due, coalesce(leased_until > statement_timestamp(), false) AS is_held
    FROM outgoing_calls
    WHERE org = $1 AND destination = n.destination AND due_at IS NOT NULL
  ) AS o
) AS calls
ORDER BY n.destination
"""


async def page(tx: Transaction, after: str, limit: int) -> Sequence[DestinationView]:
    """Return up to `limit` destinations by name, after the given one: those where calls wait, and those that something holds."""
    return [
        DestinationView(
            destination=row["destination"],
            due=row["due"],
            in_flight=row["in_flight"],
            later=row["later"],
            oldest_due_at=row["oldest_due_at"],
            circuit=_circuit_in(row),
            pause=None if row["scope"] is None else pause_in(row),
        )
        for row in await tx.connection.fetch(DESTINATIONS_SQL, tx.org, after, limit)
    ]


def _circuit_in(row: Record) -> OpenCircuit | None:
    if row["opened_at"] is None:
        return None
    return OpenCircuit(opened_at=row["opened_at"], probe_at=row["probe_at"], last_error=row["last_error"])
