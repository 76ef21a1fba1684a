"""Tell whose key a caller presents. Must not say why a key is refused, nor take less time for one that nobody has."""

import asyncio
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

from app.domain.errors import Unauthenticated
from app.domain.keys import is_genuine, read_key
from app.domain.model import Principal
from app.engine.clock import Clock
from app.storage import keys
from app.storage.database import Database

# A key that is not even shaped like one takes the same way as any other that is unknown.
_NOBODYS_KEY = f"cm_{'0' * 12}_{'0' * 64}"

FRESH_SECONDS: Final = 3.0
"""How long the database's word on a key is taken: a revoked key is good for no longer than this."""
RENEW_SECONDS: Final = FRESH_SECONDS / 2  # from then on one caller asks again, and the others need not wait for it
MAX_KNOWN: Final = 10_000  # keys; some 300 bytes each


@dataclass(slots=True)
class _Known:
    principal: Principal
    asked_at: float


@dataclass(frozen=True, slots=True)
class _Asking:
    asked_at: float
    answer: asyncio.Task[Principal]


@dataclass(slots=True, kw_only=True)
class Authenticator:
    """Finds principals by their keys, and remembers for a moment whom it found: digests, no keys.

    The database is asked once for all who present the same key meanwhile, however many they are.
    """

    database: Database
    clock: Clock
    _known: dict[bytes, _Known] = field(default_factory=dict)
    _asking: dict[bytes, _Asking] = field(default_factory=dict)

    def known(self, presented_text: str) -> Principal | None:
        """Return who holds the key if the database has said so a moment ago; None: it has to be asked."""
        digest = _digest(presented_text)
        found = self._known.get(digest)
        if found is None:
            return None
        age = self.clock.monotonic() - found.asked_at
        if age >= FRESH_SECONDS:
            return None
        if age >= RENEW_SECONDS and digest not in self._asking:
            return None
        return found.principal

    async def principal(self, presented_text: str) -> Principal:
        """Return who holds the key.

        Raises:
            Unauthenticated: nobody, or it is revoked. StorageUnavailable: cannot be told now.
        """
        known = self.known(presented_text)
        if known is not None:
            return known
        digest, now = _digest(presented_text), self.clock.monotonic()
        asking = self._asking.get(digest)
        if asking is None or now - asking.asked_at >= FRESH_SECONDS:  # the answer to an older question may be too old
            asking = _Asking(now, asyncio.create_task(self._ask(presented_text, digest, now)))
            self._asking[digest] = asking
            asking.answer.add_done_callback(lambda _: self._end(digest, asking))
        return await asyncio.shield(asking.answer)  # whoever leaves takes the answer from nobody

    async def _ask(self, presented_text: str, digest: bytes, asked_at: float) -> Principal:
        presented = read_key(presented_text) or read_key(_NOBODYS_KEY)
        if presented is None:
            raise AssertionError("the stand-in key is well-formed")
        async with self.database.dispatch() as connection:
            kept = await keys.find_key(connection, presented.key_id)
        if not is_genuine(presented, kept.secret_digest if kept else None) or kept is None:
            self._known.pop(digest, None)
            raise Unauthenticated("unauthenticated", "expected `Authorization: Bearer <key>` with a valid key")
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        known = self._known.get(digest)
        if known is None or known.asked_at < asked_at:  # of two questions the older may be answered last
            self._known[digest] = _Known(kept.principal, asked_at)
        return kept.principal

    def _end(self, digest: bytes, asking: _Asking) -> None:
        if self._asking.get(digest) is asking:
            del self._asking[digest]
        if not asking.answer.cancelled():
            asking.answer.exception()  # is looked at, even where everybody who asked has left


def _digest(presented_text: str) -> bytes:
    return sha256(presented_text.encode("utf-8", "surrogateescape")).digest()
