"""Keys and orgs: make a key, find one by its public id. Must not hold a secret."""

from dataclasses import dataclass

from app.domain.model import OrgName, Principal, Role
from app.storage.database import Connection, Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptKey:
    """A key that is not revoked: whose it is, and the digest its secret must have."""

    principal: Principal
    secret_digest: bytes


FIND_KEY_SQL = """
SELECT org, key_id, secret_sha256, role::text, subject
FROM keys
WHERE key_id = $1 AND revoked_at IS NULL
LIMIT 1
"""


async def find_key(connection: Connection, key_id: str) -> KeptKey | None:
    """Find a key in any org. Needs a dispatcher's connection."""
    row = await connection.fetchrow(FIND_KEY_SQL, key_id)
    if row is None:
        return None
    principal = Principal(org=OrgName(row["org"]), role=Role(row["role"]), subject=row["subject"], key_id=row["key_id"])
    return KeptKey(principal=principal, secret_digest=row["secret_sha256"])


CREATE_KEY_SQL = """
WITH tenant AS (
  INSERT INTO orgs (org) VALUES ($1) ON CONFLICT (org) DO NOTHING
)
INSERT INTO keys (org, key_id, secret_sha256, role, subject)
VALUES ($1, $2, $3, $4::text::key_role, $5)
RETURNING key_id
"""


async def create_key(tx: Transaction, kept: KeptKey) -> None:
    """Keep a new key, and make its org if it is the first."""
    principal = kept.principal
    await tx.connection.fetchval(CREATE_KEY_SQL, tx.org, principal.key_id, kept.secret_digest, principal.role, principal.subject)
