"""Read a session's journal in order, a page at a time. Must not write: entries are written with the change they tell of."""

from collections.abc import AsyncIterator

from app.domain.journal import Sealed
from app.domain.model import SessionId
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
    rows = await tx.connection.fetch(READ_JOURNAL_SQL, tx.org, session_id, after_seq, limit)
    return [
        Sealed(
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
        for row in rows
    ]


async def read_all(tx: Transaction, session_id: SessionId) -> AsyncIterator[Sealed]:
    """Yield every entry in order, holding one page in memory."""
    after_seq = 0
    while page := await read_page(tx, session_id, after_seq, PAGE_ENTRIES):
        for entry in page:
            yield entry
        after_seq = page[-1].seq
