"""Bring what is measured by looking up to date before it is fetched, at most once in a while. Must not let a scrape fail."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from app.engine.clock import Clock
from app.storage import backlog
from app.storage.backlog import Backlog
from app.storage.database import Database, StorageUnavailable
from app.storage.pauses import Scope
from app.telemetry import Telemetry

FRESH_SECONDS: Final = 5.0  # however many scrapers there are, the database is asked once in this time
PATIENCE_SECONDS: Final = 3.0  # below the time that a scraper commonly waits, which is 10 s

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class Gauges:
    """Looks at the pools, and asks the database through one of them."""

    database: Database
    pools: Mapping[str, Database]
    clock: Clock
    telemetry: Telemetry
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _asked_at: float | None = None

    async def refresh(self) -> None:
        """Bring all gauges up to date; scrapes that come while the database is asked wait for that answer."""
        async with self._asking:
            if self._asked_at is None or self.clock.monotonic() - self._asked_at >= FRESH_SECONDS:
                self._show(await self._ask())
                self._asked_at = self.clock.monotonic()
        self.look_at_pools()

    def look_at_pools(self) -> None:
        """Show the connections of this process's pools as they are now; another process may be the one that is scraped."""
        for name, pool in self.pools.items():
            self.telemetry.show_connections(name, pool.connections())

    async def _ask(self) -> Backlog | None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS), self.database.dispatch() as connection:
                return await backlog.read(connection)
        except TimeoutError:
            _log.warning("storage_unavailable", where="metrics", cause=f"no answer within {PATIENCE_SECONDS:g} s")
        except StorageUnavailable as error:
            _log.warning("storage_unavailable", where="metrics", cause=error.cause)
        except Exception:  # noqa: BLE001 - the edge of a scrape
            # What cannot be asked, as in a schema that is not migrated yet, must not take the counters along.
            _log.exception("metrics_crashed")
        return None

    def _show(self, found: Backlog | None) -> None:
        self.telemetry.show_database(is_up=found is not None)
        if found is None:
            return
        self.telemetry.show_sessions(
            {state.value: found.sessions.get(state, 0) for state in backlog.OPEN_STATES},
            {state.value: found.oldest_seconds.get(state, 0.0) for state in backlog.OPEN_STATES},
        )
        self.telemetry.show_calls(found.due, found.in_flight)
        self.telemetry.show_holds(found.circuits, {scope.value: found.pauses.get(scope, 0) for scope in Scope})
        if found.first_expiry_seconds is not None:
            self.telemetry.show_first_expiry(found.first_expiry_seconds)
