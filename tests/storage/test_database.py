"""A transaction commits whole or leaves nothing, whatever interrupts it, and never hands on what it saw. Must not test statements."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import asyncpg
import pytest

from app.domain.model import OrgName
from app.storage.database import (
    MILLISECOND_BOUNDS,
    Database,
    StorageUnavailable,
    is_org_name,
    open_database,
    read_revision,
)
from tests.factories import owner_connection
from tests.storage.acts import ACME, BETA, RUN, do_steps
from tests.storage.interruptions import cancel_anywhere, orgs_seen

APPLICATION = "tests cancelled"
ROUNDS = 60


@asynccontextmanager
async def pool(database_url: str, size: int) -> AsyncIterator[Database]:
    """Open a small pool under a name of its own."""
    async with open_database(database_url, size=size, application_name=APPLICATION) as opened:
        yield opened


@pytest.mark.parametrize("size", [1, 2])
async def test_next_transaction_is_clean_when_one_was_cancelled_anywhere(database_url: str, size: int) -> None:
    """Cancelled while connecting, beginning, working or committing: the next org sees its own rows, and no transaction is left open."""
    async with pool(database_url, size) as database:
        await cancel_anywhere(database, database_url, random.Random(size), rounds=ROUNDS)


async def test_nothing_is_kept_when_the_block_raises(database: Database, database_url: str) -> None:
    """Any exception rolls back, and comes out as it was."""
    with pytest.raises(LookupError, match="changed my mind"):
        await write_and_raise(database)
    async with owner_connection(database_url) as owner:
        assert await owner.fetchval("SELECT count(*) FROM orgs") == 0


async def write_and_raise(database: Database) -> None:
    """Insert a row and raise."""
    async with database.transaction(ACME) as tx:
        await tx.connection.execute("INSERT INTO orgs (org) VALUES ('acme')")
        raise LookupError("changed my mind")


async def test_transaction_is_committed_when_its_block_is_left(database: Database, database_url: str) -> None:
    """Whoever answers after the block answers what is durable: another connection sees it already."""
    async with database.transaction(ACME) as tx:
        await tx.connection.execute("INSERT INTO orgs (org) VALUES ('acme')")
        async with owner_connection(database_url) as owner:
            assert await owner.fetchval("SELECT count(*) FROM orgs") == 0
    async with owner_connection(database_url) as owner:
        assert await owner.fetchval("SELECT count(*) FROM orgs") == 1


async def test_snapshot_sees_one_moment_and_writes_nothing(database: Database) -> None:
    """A reader's statements agree with one another, and cannot change what they read."""
    await do_steps(database, RUN, 1)
    async with database.snapshot(ACME) as tx:
        first = await tx.connection.fetchval("SELECT count(*) FROM effect_log")
        async with database.transaction(ACME) as other:
            await other.connection.execute("UPDATE effect_log SET attempt = 2")
        assert await tx.connection.fetchval("SELECT max(attempt) FROM effect_log") == first == 1
    with pytest.raises((asyncpg.ReadOnlySQLTransactionError, StorageUnavailable)):
        await write_in_snapshot(database)


async def write_in_snapshot(database: Database) -> None:
    """Try to write where only reading is meant."""
    async with database.snapshot(ACME) as tx:
        await tx.connection.execute("UPDATE effect_log SET attempt = 2")


async def test_caller_is_told_soon_when_every_connection_is_busy(database_url: str) -> None:
    """A pool that is used up answers `unavailable` rather than making a queue."""
    async with pool(database_url, 1) as database, database.transaction(ACME):
        with pytest.raises(StorageUnavailable):
            await orgs_seen(database, ACME)


async def test_caller_is_told_when_the_connection_breaks_and_served_after(database: Database, database_url: str) -> None:
    """A backend that dies takes its transaction along and nothing else."""
    with pytest.raises(StorageUnavailable):
        await lose_connection(database, database_url)
    assert await orgs_seen(database, ACME) == set()


async def lose_connection(database: Database, database_url: str) -> None:
    """Have the backend of an open transaction ended, and go on."""
    async with database.transaction(ACME) as tx:
        backend = await tx.connection.fetchval("SELECT pg_backend_pid()")
        async with owner_connection(database_url) as owner:
            assert await owner.fetchval("SELECT pg_terminate_backend($1, 5000)", backend)
        await tx.connection.fetchval("SELECT 1")


@asynccontextmanager
async def pool_without_reset(database_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Database]:
    """Open a pool of one connection whose reset never ends, as on a network that has gone silent just after the commit."""

    async def hang(_connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("app.storage.database.RESET_TIMEOUT_SECONDS", 0.05)
    async with asyncpg.create_pool(
        database_url, min_size=0, max_size=1, reset=hang, server_settings={"application_name": APPLICATION}
    ) as opened:
        yield Database(opened)


async def make_org(database: Database, org: OrgName) -> int:
    """Insert an org, and return the number of the backend that did it."""
    async with database.transaction(org) as tx:
        await tx.connection.execute("INSERT INTO orgs (org) VALUES ($1)", org)
        backend: int = await tx.connection.fetchval("SELECT pg_backend_pid()")
    return backend


async def test_commit_stands_when_its_connection_cannot_be_reset(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who committed is not told `unavailable` for what became of the connection afterwards; the next one gets a fresh one."""
    async with pool_without_reset(database_url, monkeypatch) as database:
        backends = [await make_org(database, org) for org in (ACME, BETA)]
    assert len(set(backends)) == 2
    async with owner_connection(database_url) as owner:
        assert await owner.fetchval("SELECT array_agg(org::text ORDER BY org) FROM orgs") == [ACME, BETA]


async def test_exception_comes_out_as_it_was_when_its_connection_cannot_be_reset(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal stays the refusal, and is rolled back; the pool goes on."""
    async with pool_without_reset(database_url, monkeypatch) as database:
        with pytest.raises(LookupError, match="changed my mind"):
            await write_and_raise(database)
        await make_org(database, ACME)


async def test_exception_comes_out_as_it_was_when_its_connection_is_gone(database: Database, database_url: str) -> None:
    """Cancellation above all: who is told to stop must not go on because there was nothing left to roll back."""
    with pytest.raises(LookupError, match="changed my mind"):
        await lose_connection_and_raise(database, database_url)
    assert await orgs_seen(database, ACME) == set()


async def lose_connection_and_raise(database: Database, database_url: str) -> None:
    """Raise after the backend of the transaction was ended and its client has noticed."""
    async with database.transaction(ACME) as tx:
        with suppress(asyncpg.PostgresError, asyncpg.InterfaceError):
            backend = await tx.connection.fetchval("SELECT pg_backend_pid()")
            async with owner_connection(database_url) as owner:
                await owner.fetchval("SELECT pg_terminate_backend($1, 5000)", backend)
            await tx.connection.fetchval("SELECT 1")
        raise LookupError("changed my mind")


async def test_connections_are_bounded_when_they_hold_locks(database: Database) -> None:
    """Nobody waits for a lock, runs, or sits in a transaction without end."""
    async with database.outside_orgs() as connection:
        for name, milliseconds in MILLISECOND_BOUNDS.items():
            assert await connection.fetchval("SELECT setting FROM pg_settings WHERE name = $1", name) == milliseconds


async def test_revision_is_none_when_there_is_no_schema(database: Database, database_url: str) -> None:
    """A service on an unmigrated database says that it is not ready, instead of failing at the first request."""
    assert await read_revision(database) is not None
    async with owner_connection(database_url) as owner:
        await owner.execute("DROP TABLE alembic_version")
    assert await read_revision(database) is None


@pytest.mark.parametrize("text", ["a", "0", "acme", "a-b", "a" * 63])
async def test_org_name_is_the_same_for_code_and_schema_when_it_is_one(database_url: str, text: str) -> None:
    """Both sides of the one rule take what is a name; what is none is refused by both, elsewhere in this folder."""
    assert is_org_name(text)
    async with owner_connection(database_url) as owner:
        assert await owner.fetchval("SELECT $1::text::org_name", text) == text
