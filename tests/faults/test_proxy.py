"""The proxy does to a commit what it says, and nothing to what it was not told about. Must not test the service."""

import asyncio

import asyncpg
import pytest

from tests.factories import owner_connection
from tests.faults.gates import wait_until
from tests.faults.proxy import Cut, open_proxy


async def write(url: str, word: str) -> None:
    """Write one row in a transaction that ends as the service's do, over a connection of its own."""
    async with owner_connection(url) as connection:
        await connection.execute("BEGIN")
        await connection.execute("INSERT INTO words VALUES ($1)", word)
        await connection.execute("COMMIT")


async def words(url: str) -> list[str]:
    """Return what was written."""
    async with owner_connection(url) as connection:
        return [row["word"] for row in await connection.fetch("SELECT word FROM words ORDER BY word")]


async def make_table(url: str) -> None:
    """Make a place to write to."""
    async with owner_connection(url) as connection:
        await connection.execute("CREATE TABLE words (word text)")


@pytest.mark.parametrize(("cut", "kept"), [(Cut.BEFORE, ["first", "third"]), (Cut.AFTER, ["first", "second", "third"])])
async def test_commit_is_undone_or_unheard_when_its_connection_is_cut(database_url: str, cut: Cut, kept: list[str]) -> None:
    """One COMMIT runs into the trap, its neighbours do not; the client cannot tell the two cuts apart."""
    await make_table(database_url)
    heard = []
    async with open_proxy(database_url) as proxy:
        await write(proxy.url, "first")
        proxy.arm(cut, first=lambda: heard.append("before the client"))
        with pytest.raises((OSError, asyncpg.PostgresConnectionError)):
            await write(proxy.url, "second")
        await write(proxy.url, "third")
        assert proxy.done == {cut.value: 1}
    assert (await words(database_url), heard) == (kept, ["before the client"])


async def test_statement_goes_through_when_its_client_is_cut_off_while_it_waits(database_url: str) -> None:
    """The server was told and is held up; its client is gone long before it can hear."""
    await make_table(database_url)
    async with (
        open_proxy(database_url) as proxy,
        owner_connection(database_url) as holder,
        owner_connection(database_url) as watcher,
        owner_connection(proxy.url) as connection,
    ):
        await holder.execute("BEGIN; LOCK TABLE words")
        writing = asyncio.create_task(connection.execute("INSERT INTO words VALUES ('unheard')"))
        await wait_until(watcher, "EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')")
        proxy.leave()
        with pytest.raises((OSError, asyncpg.PostgresConnectionError)):
            await writing
        await holder.execute("COMMIT")
        await wait_until(watcher, "EXISTS (SELECT FROM words)")
    assert await words(database_url) == ["unheard"]


async def test_everything_waits_when_the_proxy_stalls(database_url: str) -> None:
    """Nothing is lost by a stall, and nothing passes during one; what is armed and disarmed does nothing."""
    await make_table(database_url)
    async with open_proxy(database_url) as proxy:
        proxy.arm(Cut.BEFORE, 3)
        proxy.disarm()
        proxy.stall()
        writing = asyncio.create_task(write(proxy.url, "late"))
        done, _ = await asyncio.wait({writing}, timeout=0.2)
        assert not done
        proxy.flow()
        await writing
        proxy.reset()
    assert await words(database_url) == ["late"]
