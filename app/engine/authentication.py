"""Tell whose key a caller presents. Must not say why a key is refused, nor take less time for one that nobody has."""

from dataclasses import dataclass

from app.domain.errors import Unauthenticated
from app.domain.keys import is_genuine, read_key
from app.domain.model import Principal
from app.storage import keys
from app.storage.database import Database

# A key that is not even shaped like one takes the same way as any other that is unknown.
_NOBODYS_KEY = f"cm_{'0' * 12}_{'0' * 64}"


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Finds principals by their keys."""

    database: Database

    async def principal(self, presented_text: str) -> Principal:
        """Return who holds the key.

        Raises:
            Unauthenticated: nobody, or it is revoked. StorageUnavailable: cannot be told now.
        """
        presented = read_key(presented_text) or read_key(_NOBODYS_KEY)
        if presented is None:
            raise AssertionError("the stand-in key is well-formed")
        async with self.database.dispatch() as connection:
            kept = await keys.find_key(connection, presented.key_id)
        if not is_genuine(presented, kept.secret_digest if kept else None) or kept is None:
            raise Unauthenticated("unauthenticated", "expected `Authorization: Bearer <key>` with a valid key")
        return kept.principal
