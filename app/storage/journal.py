"""Read a session's journal in order, a page at a time. Must not write: entries are written with the change they tell of."""

from collections.abc import AsyncIterator

from asyncpg import Record

from app.domain.approval import Evidence
from app.domain.journal import Sealed
from app.domain.model import EntryKind, SessionId, StepIndex
from app.storage.database import Transaction

PAGE_ENTRIES = 500  # bounds memory however long a session is

READ_JOURNAL_SQL = """
SELECT seq, kind::text, step, actor, at, body, content, prev_hash, hash
FROM journal
WHERE org = $1 AND session_id = $2 AND seq > $3
ORDER BY seq
LIMIT $4
"""


async def read_page(tx: Transaction, session_id: SessionId, after_seq: int, limit: int) -> list[Sealed]:
    """Return up to `limit` entries that come after `after_seq`."""
    return [_sealed(row) for row in await tx.connection.fetch(READ_JOURNAL_SQL, tx.org, session_id, after_seq, limit)]


def _sealed(row: Record) -> Sealed:
    return Sealed(
        seq=row["seq"],
        kind=row["kind"],
        step=row["step"],
        actor=row["actor"],
        at=row["at"],
        body=row["body"],
        content=row["content"],
        prev_hash=row["prev_hash"],
        digest=row["hash"],
    )


async def read_all(tx: Transaction, session_id: SessionId) -> AsyncIterator[Sealed]:
    """Yield every entry in order, holding one page in memory."""
    after_seq = 0
    while page := await read_page(tx, session_id, after_seq, PAGE_ENTRIES):
        for entry in page:
            yield entry
        after_seq = page[-1].seq


# What links an entry is its successor, or, for the newest one, the head that stands on the session's row. Rows are found by their full key:
# see calls.LOCK_CALL_SQL.
APPROVED_SQL = """
SELECT
  j.seq, j.kind::text, j.step, j.actor, j.at, j.body, j.content, j.prev_hash, j.hash,
  coalesce(successor.prev_hash, s.journal_hash) AS linked_by
FROM journal AS j
JOIN sessions AS s ON s.org = j.org AND s.session_id = j.session_id
LEFT JOIN LATERAL (
  SELECT prev_hash
  FROM journal
  WHERE org = $1 AND session_id = $2 AND seq = j.seq + 1
  LIMIT 1
) AS successor ON true
WHERE j.org = $1 AND j.session_id = $2 AND j.step = $3 AND j.kind = 'APPROVED'
LIMIT 1
"""


async def find_approved(tx: Transaction, session_id: SessionId, step: StepIndex) -> Evidence | None:
    """Return the APPROVED entry of a step, of which there is one at most, with what links it to the chain; the session is locked."""
    row = await tx.connection.fetchrow(APPROVED_SQL, tx.org, session_id, step)
    return None if row is None else Evidence(entry=_sealed(row), linked_by=row["linked_by"])


# What people have decided, and what they have to know of a session: the transitions that automation made by itself are left out.
DECISIONS_SQL = """
SELECT seq, kind::text, step, actor, at, body, content, prev_hash, hash
FROM journal
WHERE org = $1 AND session_id = $2
  AND (
    kind = ANY ($3::entry_kind[])
    OR (kind IN ('SKIPPED', 'COMPENSATED') AND actor <> 'orchestrator' AND actor NOT LIKE 'agent:%')
  )
ORDER BY seq DESC
LIMIT $4
"""
MAX_DECISIONS = 500  # the newest; the rest is in the journal

TELLING = (
    EntryKind.APPROVED,
    EntryKind.REJECTED,
    EntryKind.EXPIRED,
    EntryKind.PAYLOAD_MISMATCH,
    EntryKind.PIVOT,
    EntryKind.SESSION_FAILED,
    EntryKind.LATE_COMMIT,
    EntryKind.LATE_FAIL,
    EntryKind.COMPENSATION_FAILED,
    EntryKind.HALTED,
    EntryKind.RETRIED,
    EntryKind.UNWIND_ORDERED,
    EntryKind.HALT_ORDERED,
    EntryKind.SETTLED,
    EntryKind.RESOLVED,
)


async def decisions(tx: Transaction, session_id: SessionId) -> list[Sealed]:
    """Return who decided what, and what went wrong, oldest first."""
    rows = await tx.connection.fetch(DECISIONS_SQL, tx.org, session_id, [kind.value for kind in TELLING], MAX_DECISIONS)
    return [_sealed(row) for row in reversed(rows)]
