"""Find sessions whose agent fell silent or ran out of time, and have each judged again under its lock. Must not fail one itself."""

from collections import Counter
from dataclasses import dataclass, field

import structlog

from app.domain import poison as rules
from app.domain.model import OrgName, SessionId
from app.engine.clock import Clock
from app.engine.forward import Forward
from app.engine.poison import Poison
from app.engine.schema import Schema
from app.storage import sessions
from app.storage.database import Database, StorageUnavailable

SESSIONS_PER_SWEEP = 100  # one after the other, so that a herd of dead agents does not crowd out living ones

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Sweeps every `sweep_seconds` until cancelled. A session that cannot be judged time after time is put down."""

    database: Database
    forward: Forward
    poison: Poison
    schema: Schema
    clock: Clock
    sweep_seconds: float
    _crashes: Counter[tuple[OrgName, SessionId]] = field(default_factory=Counter)

    async def run(self) -> None:
        """Sweep, wait, sweep again; a database that is away is waited for."""
        while True:
            try:
                if await self.schema.serves():
                    await self.sweep()
            except StorageUnavailable as error:
                _log.warning("storage_unavailable", where="deadlines", cause=error.cause)
            await self.clock.sleep(self.sweep_seconds)

    async def sweep(self) -> None:
        """Have every session judged that seems overdue now."""
        async with self.database.dispatch() as connection:
            overdue = await sessions.overdue(connection, SESSIONS_PER_SWEEP)
        for org, session_id in overdue:
            await self._judge(org, session_id)

    async def _judge(self, org: OrgName, session_id: SessionId) -> None:
        try:
            if rules.is_poison(self._crashes[org, session_id]):
                await self.poison.put_down(org, session_id)
            else:
                await self.forward.time_out(org, session_id)
            self._crashes.pop((org, session_id), None)
        except StorageUnavailable:
            raise
        except Exception:  # noqa: BLE001 - the loop's edge
            # One session that cannot be judged must not take the others along, nor the service.
            _log.exception("timeout_crashed", org=org, session_id=session_id)
            self._crashes[org, session_id] += 1
