"""What is open in all orgs together: counts, ages, how soon a question expires. Must not name an org, a session or a call."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from app.domain.model import SessionState
from app.storage.database import Connection

MAX_DESTINATIONS: Final = 20
OPEN_STATES: Final = (
    SessionState.ACTIVE,
    SessionState.AWAITING_APPROVAL,
    SessionState.FAILED,
    SessionState.COMPENSATING,
    SessionState.HALTED,
)
OTHER: Final = "other"  # no destination: those are host:port


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Sessions that have not ended, by state, with the age of the oldest; calls by destination; seconds until a question expires.

    `circuits`: for how many orgs a destination is held to be away. `pauses`: how many there are by scope.
    """

    sessions: Mapping[str, int]
    oldest_seconds: Mapping[str, float]
    due: Mapping[str, int]
    in_flight: Mapping[str, int]
    circuits: Mapping[str, int]
    pauses: Mapping[str, int]
    first_expiry_seconds: float | None


# The condition is that of the index `sessions_open`, which holds every column that is read: ended sessions cost nothing.
OPEN_SESSIONS_SQL = """
SELECT
  state::text,
  count(*) AS sessions,
  extract(epoch FROM statement_timestamp() - min(
    CASE
      WHEN state = 'halted' THEN halted_at
      WHEN state IN ('failed', 'compensating') THEN coalesce(failed_at, created_at)
      ELSE created_at
    END
  ))::float8 AS oldest_seconds
FROM sessions
WHERE state IN ('active', 'awaiting_approval', 'failed', 'compensating', 'halted')
GROUP BY state
"""

# A call under a living lease is in flight whatever its due time; whoever holds it moves that.
OPEN_CALLS_SQL = """
WITH held AS (
  SELECT
    destination,
    count(*) FILTER (
      WHERE due_at <= statement_timestamp() AND (leased_until IS NULL OR leased_until <= statement_timestamp())
    ) AS due,
    count(*) FILTER (WHERE leased_until > statement_timestamp()) AS in_flight
  FROM outgoing_calls
  WHERE due_at IS NOT NULL
  GROUP BY destination
),
ranked AS (
  SELECT destination, due, in_flight, row_number() OVER (ORDER BY due + in_flight DESC, destination) AS place
  FROM held
  WHERE due + in_flight > 0
)
SELECT CASE WHEN place <= $1 THEN destination ELSE $2 END AS destination, sum(due)::bigint AS due, sum(in_flight)::bigint AS in_flight
FROM ranked
GROUP BY 1
"""

OPEN_CIRCUITS_SQL = """
WITH ranked AS (
  SELECT destination, count(*) AS circuits, row_number() OVER (ORDER BY count(*) DESC, destination) AS place
  FROM circuits
  GROUP BY destination
)
SELECT CASE WHEN place <= $1 THEN destination ELSE $2 END AS destination, sum(circuits)::bigint AS circuits
FROM ranked
GROUP BY 1
"""

PAUSES_SQL = """
SELECT
  CASE WHEN org IS NULL THEN 'everything' WHEN destination IS NULL THEN 'org' ELSE 'destination' END AS scope,
  count(*) AS pauses
FROM pauses
GROUP BY 1
"""

FIRST_EXPIRY_SQL = """
SELECT extract(epoch FROM expires_at - statement_timestamp())::float8 AS seconds
FROM approvals
WHERE state IN ('pending', 'approved')
ORDER BY expires_at
LIMIT 1
"""


async def read(connection: Connection) -> Backlog:
    """Read the backlog. Needs a dispatcher's connection; costs as much as is open, however much has ended."""
    sessions = await connection.fetch(OPEN_SESSIONS_SQL)
    calls = await connection.fetch(OPEN_CALLS_SQL, MAX_DESTINATIONS, OTHER)
    circuits = await connection.fetch(OPEN_CIRCUITS_SQL, MAX_DESTINATIONS, OTHER)
    pauses = await connection.fetch(PAUSES_SQL)
    return Backlog(
        sessions={row["state"]: row["sessions"] for row in sessions},
        oldest_seconds={row["state"]: row["oldest_seconds"] for row in sessions},
        due={row["destination"]: row["due"] for row in calls},
        in_flight={row["destination"]: row["in_flight"] for row in calls},
        circuits={row["destination"]: row["circuits"] for row in circuits},
        pauses={row["scope"]: row["pauses"] for row in pauses},
        first_expiry_seconds=await connection.fetchval(FIRST_EXPIRY_SQL),
    )
