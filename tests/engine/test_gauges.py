"""What is measured by looking is looked at seldom, and a look that fails is no scrape that fails. Must not test the values."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from app.cells import Cells
from app.engine.gauges import FRESH_SECONDS, Gauges
from app.storage.database import open_database
from app.telemetry import Telemetry
from tests.conftest import execute
from tests.engine.test_retries import ImpatientClock
from tests.probes import fetch
from tests.scraping import Scrape, parsed


@dataclass(slots=True)
class HeldClock(ImpatientClock):
    """Stands still until it is moved."""

    now: float = 0.0

    def monotonic(self) -> float:
        """Return what it was moved to."""
        return self.now


@dataclass(frozen=True, slots=True)
class Looked:
    """Gauges under a held clock."""

    gauges: Gauges
    clock: HeldClock

    async def told(self) -> Scrape:
        """Refresh and read."""
        await self.gauges.refresh()
        return parsed(self.gauges.telemetry.exposition().decode())


@asynccontextmanager
async def looking(url: str) -> AsyncIterator[Looked]:
    """Open a pool of one connection, and look at it."""
    async with open_database(url, size=1, application_name="tests", acquire_seconds=5.0) as database:
        clock = HeldClock()
        telemetry = Telemetry(version="0", schema_revision="0", cells=Cells.alone())
        yield Looked(Gauges(database=database, pools={"api": database}, clock=clock, telemetry=telemetry), clock)


OPEN_SQL = """
INSERT INTO sessions (
  org, session_id, owner, agent, metadata, state, clean, pivoted, late_effect, last_step, halt_ordered, created_at, updated_at, active_at,
  version, revision, journal_seq, journal_hash, journal_at
)
SELECT 'acme', gen_random_uuid()::text, 'r', 'r', '{}', 'active', true, false, false, 0, false, now(), now(), now(), 1, 1, 1,
  decode(repeat('00', 32), 'hex'), now()
"""


async def test_database_is_asked_once_in_a_while_when_it_is_scraped_often(database_url: str) -> None:
    """However many scrapers there are, together or one after the other: the answer may be as old as that, and no older."""
    async with looking(database_url) as looked:
        assert (await looked.told()).value("countermand_sessions", state="active") == 0
        await fetch(database_url, OPEN_SQL)
        looked.clock.now = FRESH_SECONDS - 0.1
        assert (await looked.told()).value("countermand_sessions", state="active") == 0
        looked.clock.now = FRESH_SECONDS
        both = await asyncio.gather(looked.told(), looked.told())
        assert [told.value("countermand_sessions", state="active") for told in both] == [1, 1]


async def test_backlog_is_gone_and_back_when_the_database_was_away(database_url: str) -> None:
    """An old number is worse than none: nobody is told that all is well by a look from before."""
    async with looking(database_url) as looked:
        assert (await looked.told()).value("countermand_database_up") == 1
        await looked.gauges.database.close()
        looked.clock.now += FRESH_SECONDS
        away = await looked.told()
        assert (away.value("countermand_database_up"), away.series("countermand_sessions")) == (0, [])
    async with looking(database_url) as again:
        back = await again.told()
        assert (back.value("countermand_database_up"), len(back.series("countermand_sessions"))) == (1, 5)


async def test_scrape_is_answered_when_the_schema_is_not_migrated_yet(database_url: str) -> None:
    """A new service on an old schema is not ready, and still tells what it counts."""
    await execute(database_url, "REVOKE SELECT (halted_at) ON sessions FROM countermand_dispatcher")
    async with looking(database_url) as looked:
        with structlog.testing.capture_logs() as logs:
            told = await looked.told()
    assert told.value("countermand_database_up") == 0
    assert [event["event"] for event in logs] == ["metrics_crashed"]


async def test_pool_shows_its_connections_when_one_is_in_use(database_url: str) -> None:
    """A pool without room is seen before its callers are refused."""
    async with looking(database_url) as looked:
        told = await looked.told()
        assert connections(told) == {"in_use": 0, "idle": 1, "unopened": 0}
        async with looked.gauges.database.dispatch():
            assert connections(await looked.told()) == {"in_use": 1, "idle": 0, "unopened": 0}


def connections(told: Scrape) -> dict[str, float]:
    """Return a scrape's connections by state."""
    return {labels["state"]: value for labels, value in told.series("countermand_database_connections")}
