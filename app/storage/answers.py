"""What requests with an Idempotency-Key were answered. Must not be touched without the session's lock, so that twins wait."""

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAnswer:
    """A 2xx that is to be remembered, with the session that it is about."""

    session_id: SessionId
    request: RepeatableRequest
    status: int
    body: bytes


# Each is found by its full key: LIMIT 1 keeps the look-up apart from any plan around it.
FIND_ANSWERS_SQL = """
SELECT asked.session_id, found.request_sha256, found.status, found.body
FROM unnest($2::text[], $3::text[], $4::text[], $5::text[]) AS asked (session_id, subject, request, request_key)
CROSS JOIN LATERAL (
  SELECT request_sha256, status, body
  FROM remembered_answers
  WHERE org = $1 AND session_id = asked.session_id AND subject = asked.subject AND request = asked.request
    AND request_key = asked.request_key
  LIMIT 1
) AS found
"""


async def find_many(tx: Transaction, asked: Sequence[tuple[SessionId, RepeatableRequest]]) -> dict[SessionId, RememberedAnswer]:
    """Return what was answered to requests, of which each session has one, where anything was."""
    columns = (
        [session_id for session_id, _ in asked],
        [request.subject for _, request in asked],
        [request.request for _, request in asked],
        [request.key for _, request in asked],
    )
    return {
        SessionId(row["session_id"]): RememberedAnswer(request_sha256=row["request_sha256"], status=row["status"], body=row["body"])
        for row in await tx.connection.fetch(FIND_ANSWERS_SQL, tx.org, *columns)
    }


KEEP_ANSWERS_SQL = """
INSERT INTO remembered_answers (org, session_id, subject, request, request_key, request_sha256, status, body)
SELECT $1::org_name, session_id, subject, request, request_key, request_sha256, status, body
FROM unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::bytea[], $7::integer[], $8::bytea[])
  AS kept (session_id, subject, request, request_key, request_sha256, status, body)
RETURNING request_key
"""


async def keep_many(tx: Transaction, kept: Sequence[KeptAnswer]) -> None:
    """Remember answers, with the changes that they tell of."""
    columns = (
        [answer.session_id for answer in kept],
        [answer.request.subject for answer in kept],
        [answer.request.request for answer in kept],
        [answer.request.key for answer in kept],
        [answer.request.sha256 for answer in kept],
        [answer.status for answer in kept],
        [answer.body for answer in kept],
    )
    await tx.connection.fetch(KEEP_ANSWERS_SQL, tx.org, *columns)
