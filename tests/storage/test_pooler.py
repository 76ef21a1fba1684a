"""The service behind PgBouncer in transaction mode, where a connection to Postgres changes hands after every transaction.

Must not need PgBouncer: where it is not installed, these tests are skipped.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from app.domain.model import OrgName, Role
from app.storage.database import Database, StorageUnavailable, open_database
from tests.factories import ORG, Client, Service, do_step, make_principal_key, open_service
from tests.fakes import FakeEndpoint
from tests.probes import rest
from tests.storage.acts import ACME, BETA, RUN, do_steps
from tests.storage.interruptions import cancel_anywhere, orgs_seen
from tests.storage.pooler import PGBOUNCER, pooler

LONG_SECONDS = 60.0  # a poll that no test waits for
ROUNDS = 30
LEFT_BEHIND_SQL = """
SELECT current_user::text, coalesce(current_setting('app.org', true), ''), current_setting('lock_timeout'),
  current_setting('statement_timeout'), current_setting('idle_in_transaction_session_timeout'), pg_backend_pid()
"""

pytestmark = pytest.mark.skipif(PGBOUNCER is None, reason="PgBouncer is not installed (Debian: apt install pgbouncer)")


@pytest.fixture
async def pooled_url(database_url: str, tmp_path: Path) -> AsyncIterator[str]:
    """Run a pooler before the test's database and return the URL there."""
    async with pooler(database_url, tmp_path / "pooler") as url:
        yield url


@asynccontextmanager
async def pooled(url: str, size: int = 3) -> AsyncIterator[Database]:
    """Open a pool of the service's behind a pooler."""
    async with open_database(url, size=size, application_name="tests pooled", keeps_statements=False) as database:
        yield database


async def _other_agent(service: Service, database_url: str, org: str) -> Client:
    key = await make_principal_key(database_url, Role.AGENT, "agent-1", org)
    return Client(http=service.agent.http, key=key)


async def test_sessions_of_two_orgs_are_unwound_when_a_pooler_stands_before_the_database(pooled_url: str, database_url: str) -> None:
    """From intercept to compensated with more clients than connections, by polling alone; and each org sees its own run and no other."""
    async with FakeEndpoint() as endpoint, open_service(pooled_url, database_pooler="transaction") as service:
        agents = {ORG: service.agent, "globex": await _other_agent(service, database_url, "globex")}
        runs = [(agent, f"{org}-{number}") for org, agent in agents.items() for number in range(6)]

        async def unwind(agent: Client, session_id: str) -> None:
            for step in (1, 2):
                await do_step(agent, session_id, step, endpoint.url(f"/{session_id}/{step}"))
            assert (await rest(agent, session_id))["state"] == "compensated"

        await asyncio.gather(*(unwind(agent, session_id) for agent, session_id in runs))
        for agent, session_id in runs:
            assert [request.path for request in endpoint.received if session_id in request.path] == [f"/{session_id}/2", f"/{session_id}/1"]
            other = agents["globex" if agent is service.agent else ORG]
            assert (await other.get(f"/sessions/{session_id}")).status_code == 404


async def test_undo_is_sent_at_once_when_notifications_come_from_postgres_itself(pooled_url: str, database_url: str) -> None:
    """With an address to listen at, nobody waits for the next poll."""
    settings: dict[str, Any] = {"database_pooler": "transaction", "listen_database_url": database_url, "poll_seconds": LONG_SECONDS}
    async with FakeEndpoint() as endpoint, open_service(pooled_url, **settings) as service:
        await do_step(service.agent, RUN, 1, endpoint.url("/undo"))
        assert (await rest(service.agent, RUN))["state"] == "compensated"


async def test_nobody_listens_when_a_pooler_would_swallow_it(database_url: str, tmp_path: Path) -> None:
    """LISTEN on a connection that is somebody else's a moment later is heard by nobody, and stays there."""
    async with (
        pooler(database_url, tmp_path / "pooler", size=1) as url,
        FakeEndpoint() as endpoint,
        open_service(url, database_pooler="transaction") as service,
    ):
        await do_step(service.agent, RUN, 1, endpoint.url("/undo"))
        assert (await rest(service.agent, RUN))["state"] == "compensated"
        stranger = await asyncpg.connect(url, statement_cache_size=0)
        assert await stranger.fetch("SELECT pg_listening_channels()") == []
        await stranger.close()


async def test_nothing_is_left_behind_when_the_connection_goes_to_another_client(database_url: str, tmp_path: Path) -> None:
    """Role, org and bounds end with their transaction: the next user of the very connection finds what was there before."""
    async with pooler(database_url, tmp_path / "pooler", size=1) as url, pooled(url) as database:
        stranger = await asyncpg.connect(url, statement_cache_size=0)
        before = await stranger.fetchrow(LEFT_BEHIND_SQL)
        for org in (ACME, BETA):
            await do_steps(database, RUN, 1, org)
            async with database.dispatch() as connection:
                assert await connection.fetchval("SELECT current_user::text") == "countermand_dispatcher"
            with pytest.raises(LookupError):
                await _raise_within(database, org)
            assert await stranger.fetchrow(LEFT_BEHIND_SQL) == before
        await stranger.close()


async def _raise_within(database: Database, org: OrgName) -> None:
    async with database.transaction(org):
        raise LookupError


async def test_transaction_is_its_orgs_when_another_client_left_its_state_behind(database_url: str, tmp_path: Path) -> None:
    """What some other program set for good on a shared connection neither shows another org's rows nor lifts a bound."""
    async with pooler(database_url, tmp_path / "pooler", size=1) as url, pooled(url) as database:
        for org in (ACME, BETA):
            await do_steps(database, RUN, 1, org)
        stranger = await asyncpg.connect(url, statement_cache_size=0)
        await stranger.execute("SET app.org = 'beta'; SET lock_timeout = 0; SET statement_timeout = 0")
        assert await orgs_seen(database, ACME) == {ACME}
        async with database.outside_orgs() as connection:
            assert await connection.fetchval("SELECT current_setting('app.org')") == ""
            assert await connection.fetchval("SELECT current_setting('lock_timeout')") == "5s"
        with pytest.raises(asyncpg.CheckViolationError):
            await _look_without_an_org(database)
        await stranger.close()


async def _look_without_an_org(database: Database) -> None:
    async with database.outside_orgs() as connection:
        await connection.fetchval("SELECT count(*) FROM sessions")


async def test_next_transaction_is_clean_when_one_was_cancelled_behind_a_pooler(pooled_url: str, database_url: str) -> None:
    """Cancelled anywhere: half of nothing is kept, and no connection to Postgres stays in a transaction."""
    async with pooled(pooled_url, size=2) as database:
        await cancel_anywhere(database, database_url, random.Random(7), rounds=ROUNDS)


async def test_caller_is_told_which_setting_is_missing_when_a_pooler_is_not_known(pooled_url: str) -> None:
    """Statements that were prepared on another connection: unavailable with the remedy, and not a fault without a name."""
    async with open_database(pooled_url, size=1, application_name="tests") as database:
        await _look(database)
        holder = await asyncpg.connect(pooled_url, statement_cache_size=0)
        async with holder.transaction():  # on the one connection there is
            await holder.execute("SELECT 1")
            with pytest.raises(StorageUnavailable, match="COUNTERMAND_DATABASE_POOLER"):
                await _look(database)
        await holder.close()


async def _look(database: Database) -> None:
    async with database.transaction(ACME) as tx:
        await tx.connection.fetchval("SELECT count(*) FROM sessions")
