"""Whether the schema that the database has serves this code (docs/decisions/0023). Must not change it."""

from dataclasses import dataclass
from typing import Final

import structlog

from app.engine.clock import Clock
from app.storage.database import Database, read_oldest_revision, read_revision

FRESH_SECONDS: Final = 5.0

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class Schema:
    """Compares the database's schema with what this code was written for, `revision`."""

    database: Database
    revision: str
    clock: Clock
    _asked_at: float | None = None
    _refusal: str | None = None

    async def refusal(self) -> str | None:
        """Say why the schema does not serve this code; None where it does: its own, or a newer one that still serves older code.

        Raises:
            StorageUnavailable: the database cannot be reached.
        """
        found = await read_revision(self.database)
        if found is None or found < self.revision:
            return f"schema revision is {found}, expected {self.revision}: run `countermand migrate`"
        oldest = self.revision if found == self.revision else await read_oldest_revision(self.database)
        if oldest is None or oldest > self.revision:
            served = f"code of revision {oldest or found} and newer"
            return f"schema revision is {found}, which serves {served}; this is {self.revision}: upgrade it"
        return None

    def is_known_to_serve(self) -> bool:
        """Tell whether the schema was found to serve this code a few seconds ago at most; False: ask `serves`."""
        return self._asked_at is not None and self._refusal is None and self.clock.monotonic() - self._asked_at < FRESH_SECONDS

    async def serves(self) -> bool:
        """Tell whoever works on it whether they may, from what was found a few seconds ago at most.

        Raises:
            StorageUnavailable: the database cannot be reached.
        """
        before, now = self._asked_at, self.clock.monotonic()
        if before is None or now - before >= FRESH_SECONDS:
            self._asked_at = (
                None if before is None else now
            )  # one asks; who comes meanwhile takes the answer from before, once there is one
            try:
                found = await self.refusal()
            except BaseException:
                self._asked_at = before
                raise
            if found is not None and found != self._refusal:
                _log.warning("schema_refused", reason=found)
            self._asked_at, self._refusal = now, found
        return self._refusal is None
