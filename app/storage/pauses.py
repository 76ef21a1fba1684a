"""What people have paused: one destination of an org, all of an org, everything. Must not know who may."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from asyncpg import Record

from app.storage.database import Connection, Transaction


class Scope(StrEnum):
    """How much a pause holds, the most first."""

    EVERYTHING = "everything"
    ORG = "org"
    DESTINATION = "destination"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """What holds an org's calls, or those to one destination; `by` None: whoever paused everything is not told to an org."""

    scope: Scope
    at: datetime
    by: str | None
    reason: str


PAUSE_SQL = """
INSERT INTO pauses (org, destination, paused_by, reason)
VALUES ($1, $2, $3, $4)
ON CONFLICT (org, destination) DO NOTHING
RETURNING true
"""


async def pause(tx: Transaction, destination: str | None, by: str, reason: str) -> bool:
    """Hold a destination, or all of the org; return False where it is paused already, which stays as it was."""
    return bool(await tx.connection.fetchval(PAUSE_SQL, tx.org, destination, by, reason))


RESUME_SQL = """
DELETE FROM pauses
WHERE org = $1 AND destination IS NOT DISTINCT FROM $2
RETURNING true
"""


async def resume(tx: Transaction, destination: str | None) -> bool:
    """Take such a pause away; return False where there is none."""
    return bool(await tx.connection.fetchval(RESUME_SQL, tx.org, destination))


PAUSE_EVERYTHING_SQL = """
INSERT INTO pauses (org, destination, paused_by, reason)
VALUES (NULL, NULL, $1, $2)
ON CONFLICT (org, destination) DO NOTHING
RETURNING true
"""


async def pause_everything(connection: Connection, by: str, reason: str) -> bool:
    """Hold every org; return False where everything is paused already. Needs a dispatcher's connection."""
    return bool(await connection.fetchval(PAUSE_EVERYTHING_SQL, by, reason))


RESUME_EVERYTHING_SQL = """
WITH resumed AS (
  DELETE FROM pauses
  WHERE org IS NULL
  RETURNING true
)
SELECT pg_notify('countermand_due', '') IS NOT NULL
FROM resumed
"""


async def resume_everything(connection: Connection) -> bool:
    """Take the pause of everything away and wake every orchestrator; return False where there is none. Needs a dispatcher's connection."""
    return bool(await connection.fetchval(RESUME_EVERYTHING_SQL))


WIDEST_PAUSE_SQL = """
SELECT
  CASE WHEN org IS NULL THEN 'everything' WHEN destination IS NULL THEN 'org' ELSE 'destination' END AS scope,
  paused_at, CASE WHEN org IS NOT NULL THEN paused_by END AS paused_by, reason
FROM pauses
WHERE (org IS NULL OR org = $1) AND (destination IS NULL OR destination = $2)
ORDER BY org IS NOT NULL, destination IS NOT NULL
LIMIT 1
"""


async def widest(tx: Transaction, destination: str | None) -> Pause | None:
    """Return what holds a destination, or (None) the whole org: of several pauses the widest, since that is the last to be taken away."""
    row = await tx.connection.fetchrow(WIDEST_PAUSE_SQL, tx.org, destination)
    return None if row is None else pause_in(row)


def pause_in(row: Record) -> Pause:
    """Return the pause of a row with `scope`, `paused_at`, `paused_by` and `reason`."""
    return Pause(scope=Scope(row["scope"]), at=row["paused_at"], by=row["paused_by"], reason=row["reason"])
