"""What requests with an Idempotency-Key were answered. Must not be touched without the session's lock, so that twins wait."""

from dataclasses import dataclass

from app.domain.model import SessionId
from app.storage.database import Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatableRequest:
    """A request that names itself: who asks, method and path, its key, its fingerprint."""

    subject: str
    request: str
    key: str
    sha256: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedAnswer:
    """A 2xx that was given, and to which request."""

    request_sha256: bytes
    status: int
    body: bytes


FIND_ANSWER_SQL = """
SELECT request_sha256, status, body
FROM remembered_answers
WHERE org = $1 AND session_id = $2 AND subject = $3 AND request = $4 AND request_key = $5
LIMIT 1
"""


async def find(tx: Transaction, session_id: SessionId, request: RepeatableRequest) -> RememberedAnswer | None:
    """Return what was answered under this key, if anything was."""
    row = await tx.connection.fetchrow(FIND_ANSWER_SQL, tx.org, session_id, request.subject, request.request, request.key)
    return None if row is None else RememberedAnswer(request_sha256=row["request_sha256"], status=row["status"], body=row["body"])


KEEP_ANSWER_SQL = """
INSERT INTO remembered_answers (org, session_id, subject, request, request_key, request_sha256, status, body)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
RETURNING request_key
"""


async def keep(tx: Transaction, session_id: SessionId, request: RepeatableRequest, status: int, body: bytes) -> None:
    """Remember an answer, with the change that it tells of."""
    await tx.connection.fetchval(
        KEEP_ANSWER_SQL, tx.org, session_id, request.subject, request.request, request.key, request.sha256, status, body
    )
