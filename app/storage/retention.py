"""Delete sessions that ended long ago, each wholly or not at all. Must not take one that a person may still have to look at."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncpg import Record

from app.domain.model import OrgName, SessionId
from app.storage.database import Connection

MAX_SESSIONS = 100
MAX_STEPS = 10_000
"""What one transaction deletes at most, however long the sessions are: whoever meets one of them waits that long. One is always deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """How many sessions of an org are past a bound: those that may go, and those that stay because a person had a hand in them."""

    prunable: int
    kept: int


ORGS_SQL = """
SELECT org
FROM orgs
ORDER BY org
"""


async def orgs(connection: Connection) -> list[OrgName]:
    """Return every org. Needs a pruner's connection."""
    return [OrgName(row["org"]) for row in await connection.fetch(ORGS_SQL)]


# Every write moves `active_at`, and an answer may be remembered without one: nothing of such a session is younger than the bound.
# The condition on the state is that of the index `sessions_prunable`. Whoever works on a session holds its lock, and is left alone.
PRUNABLE_SQL = """
SELECT s.session_id, s.last_step
FROM sessions AS s
WHERE s.org = $1
  AND (s.state = 'completed' OR (s.state = 'compensated' AND s.clean))
  AND s.active_at <= statement_timestamp() - make_interval(days => $2)
  AND NOT EXISTS (
    SELECT FROM remembered_answers AS a
    WHERE a.org = $1 AND a.session_id = s.session_id AND a.answered_at > statement_timestamp() - make_interval(days => $2)
  )
ORDER BY s.active_at, s.session_id
LIMIT $3
FOR UPDATE OF s SKIP LOCKED
"""

# Effects, questions, undo entries, calls and remembered answers go with their session, by foreign key.
DELETE_SESSIONS_SQL = """
DELETE FROM sessions
WHERE org = $1 AND session_id = ANY ($2::text[])
RETURNING session_id
"""

# The journal outlives its session as far as foreign keys go; the trigger lets it go only after that.
DELETE_JOURNAL_SQL = """
DELETE FROM journal
WHERE org = $1 AND session_id = ANY ($2::text[])
"""


async def prune(connection: Connection, org: OrgName, days: int) -> int:
    """Delete the oldest prunable sessions of an org, as many as one transaction should, and return how many; 0: none is left.

    Needs a pruner's connection of that org.
    """
    rows = await connection.fetch(PRUNABLE_SQL, org, days, MAX_SESSIONS)
    chosen = list(_batch(rows))
    if chosen:
        deleted = await connection.fetch(DELETE_SESSIONS_SQL, org, chosen)
        await connection.execute(DELETE_JOURNAL_SQL, org, [row["session_id"] for row in deleted])
    return len(chosen)


def _batch(rows: Sequence[Record]) -> Iterator[SessionId]:
    steps = 0
    for row in rows:
        steps += row["last_step"]
        if steps > MAX_STEPS and row is not rows[0]:
            return
        yield SessionId(row["session_id"])


COUNT_PAST_SQL = """
SELECT
  count(*) FILTER (WHERE s.state = 'completed' OR (s.state = 'compensated' AND s.clean)) AS prunable,
  count(*) FILTER (WHERE s.state = 'resolved' OR (s.state = 'compensated' AND NOT s.clean)) AS kept
FROM sessions AS s
WHERE s.org = $1
  AND s.created_at <= statement_timestamp() - make_interval(days => $2)
  AND s.active_at <= statement_timestamp() - make_interval(days => $2)
  AND NOT EXISTS (
    SELECT FROM remembered_answers AS a
    WHERE a.org = $1 AND a.session_id = s.session_id AND a.answered_at > statement_timestamp() - make_interval(days => $2)
  )
"""


async def count_past(connection: Connection, org: OrgName, days: int) -> Past:
    """Count an org's sessions past the bound. Needs a pruner's connection of that org."""
    row = await connection.fetchrow(COUNT_PAST_SQL, org, days)
    if row is None:
        raise AssertionError("an aggregate returns one row")
    return Past(prunable=row["prunable"], kept=row["kept"])
