"""Make bearer keys. Must not print or keep a secret anywhere but in what it returns."""

import asyncio
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from app.cli.manners import SetupError
from app.domain.errors import Unauthenticated
from app.domain.keys import KEY_ID_BYTES, SECRET_BYTES, make_key
from app.domain.model import OrgName, Principal, Role
from app.engine.authentication import Authenticator
from app.engine.clock import SystemClock
from app.storage.database import is_org_name, open_database
from app.storage.keys import KeptKey, create_key

MAX_SUBJECT_CHARACTERS = 200
PATIENCE_SECONDS = 10.0  # a person or a script waits here, not an agent that asks again


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeKey:
    """A new key, to be shown once."""

    key: str
    key_id: str
    org: str
    role: str
    subject: str

    def as_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))


def create(database_url: str, *, org: str, role: Role, subject: str) -> MadeKey:
    """Make a key and keep its digest.

    Raises:
        SetupError: an org or subject that cannot be one. StorageUnavailable: the database cannot be reached.
    """
    if not is_org_name(org):
        raise SetupError(f"{org!r} is no org name: expected 1 to 63 of a-z, 0-9 and hyphens inside")
    if not 1 <= len(subject) <= MAX_SUBJECT_CHARACTERS or not subject.isprintable():
        raise SetupError(f"expected a subject of 1 to {MAX_SUBJECT_CHARACTERS} printable characters")
    return asyncio.run(_create(database_url, OrgName(org), role, subject))


async def _create(database_url: str, org: OrgName, role: Role, subject: str) -> MadeKey:
    text, kept = make_key(secrets.token_bytes(KEY_ID_BYTES), secrets.token_bytes(SECRET_BYTES))
    principal = Principal(org=org, role=role, subject=subject, key_id=kept.key_id)
    async with (
        open_database(
            database_url, size=1, application_name="countermand keys", acquire_seconds=PATIENCE_SECONDS, keeps_statements=False
        ) as database,
        database.transaction(org) as tx,
    ):
        await create_key(tx, KeptKey(principal=principal, secret_digest=kept.secret_digest))
    return MadeKey(key=text, key_id=kept.key_id, org=org, role=role.value, subject=subject)


def are_known(database_url: str, texts: Sequence[str]) -> bool:
    """Tell whether the database knows every one of these keys."""
    return asyncio.run(_are_known(database_url, texts))


async def _are_known(database_url: str, texts: Sequence[str]) -> bool:
    async with open_database(
        database_url, size=1, application_name="countermand keys", acquire_seconds=PATIENCE_SECONDS, keeps_statements=False
    ) as database:
        authenticator = Authenticator(database=database, clock=SystemClock())
        try:
            for text in texts:
                await authenticator.principal(text)
        except Unauthenticated:
            return False
    return True
