"""Circuits: open, close, probe at once, keep the newest error, drop those on which nothing waits. Must not decide that one is to move."""

from collections.abc import Sequence

from app.domain.circuits import Place
from app.domain.model import OrgName
from app.storage.database import Connection, Transaction

OPEN_CIRCUIT_SQL = """
INSERT INTO circuits (org, destination, probe_at, last_error)
VALUES ($1, $2, clock_timestamp() + make_interval(secs => $3), $4)
ON CONFLICT (org, destination) DO NOTHING
RETURNING true
"""


async def open_circuit(tx: Transaction, destination: str, probe_seconds: float, error: str) -> bool:
    """Hold a destination for away, and let it be probed after so many seconds; return False where it is open already."""
    return bool(await tx.connection.fetchval(OPEN_CIRCUIT_SQL, tx.org, destination, probe_seconds, error))


CLOSE_CIRCUIT_SQL = """
WITH closed AS (
  DELETE FROM circuits
  WHERE org = $1 AND destination = $2
  RETURNING org
)
SELECT pg_notify('countermand_due', '') IS NOT NULL
FROM closed
"""


async def close(tx: Transaction, destination: str) -> bool:
    """Let calls go there again, and wake every orchestrator; return False where it is closed already."""
    return bool(await tx.connection.fetchval(CLOSE_CIRCUIT_SQL, tx.org, destination))


NOTE_PROBE_SQL = """
UPDATE circuits
SET last_error = $3
WHERE org = $1 AND destination = $2
RETURNING true
"""


async def note(tx: Transaction, destination: str, error: str) -> None:
    """Keep what the newest probe came to."""
    await tx.connection.fetchval(NOTE_PROBE_SQL, tx.org, destination, error)


PROBE_NOW_SQL = """
WITH asked AS (
  UPDATE circuits
  SET probe_at = clock_timestamp()
  WHERE org = $1 AND ($2::text IS NULL OR destination = $2)
  RETURNING org
)
SELECT count(*) AS circuits, pg_notify('countermand_due', '') IS NOT NULL AS woken
FROM asked
"""


async def probe_now(tx: Transaction, destination: str | None) -> None:
    """Let one destination, or all of the org's, be probed at once where the circuit is open, and wake every orchestrator."""
    await tx.connection.fetchrow(PROBE_NOW_SQL, tx.org, destination)


# The last of its calls was given up, or sent elsewhere: nobody would ever probe it, and it would be shown as away for ever.
DROP_IDLE_SQL = """
DELETE FROM circuits AS c
WHERE NOT EXISTS (
  SELECT FROM outgoing_calls AS o
  WHERE o.org = c.org AND o.destination = c.destination AND o.due_at IS NOT NULL
)
RETURNING c.org, c.destination
"""


async def drop_idle(connection: Connection) -> Sequence[Place]:
    """Close the circuits, in every org, for which no call waits any more. Needs a dispatcher's connection."""
    return [Place(org=OrgName(row["org"]), destination=row["destination"]) for row in await connection.fetch(DROP_IDLE_SQL)]
