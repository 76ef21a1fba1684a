"""Transactions that are cancelled anywhere, and what must be true afterwards. Must not know how their connections are made."""

import asyncio
import random
import time

from app.domain.model import OrgName
from app.storage.database import Database
from tests.factories import owner_connection
from tests.storage.acts import ACME, BETA, RUN, do_steps

PATIENCE_SECONDS = 10.0
LEFT_OPEN_SQL = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND (state LIKE 'idle in transaction%' OR state = 'active')
"""
INSERT_SQL = """
INSERT INTO keys (org, key_id, secret_sha256, role, subject)
VALUES ('acme', $1, decode(repeat('00', 32), 'hex'), 'agent', $2)
"""


async def make_two_keys(database: Database, count: int) -> None:
    """Insert two rows in one transaction, with some work between: both stand or neither does."""
    async with database.transaction(ACME) as tx:
        await tx.connection.execute(INSERT_SQL, f"{count:011}a", str(count))
        await tx.connection.execute("SELECT pg_sleep(0.002)")
        await tx.connection.execute(INSERT_SQL, f"{count:011}b", str(count))


async def orgs_seen(database: Database, org: OrgName) -> set[str]:
    """Return the orgs whose sessions a transaction sees, and check that it is the only thing going on in its connection."""
    async with database.transaction(org) as tx:
        assert await tx.connection.fetchval("SELECT current_setting('app.org')") == org
        assert await tx.connection.fetchval("SELECT current_user::text") == "countermand_runtime"
        return {row["org"] for row in await tx.connection.fetch("SELECT org FROM sessions")}


async def cancel_anywhere(database: Database, database_url: str, dice: random.Random, *, rounds: int) -> None:
    """Cancel a transaction `rounds` times while connecting, beginning, working or committing, and assert that nothing comes of it."""
    for org in (ACME, BETA):
        await do_steps(database, RUN, 1, org)
    async with owner_connection(database_url) as owner:
        await owner.execute("INSERT INTO orgs (org) VALUES ('acme')")
    started = time.perf_counter()
    await make_two_keys(database, 0)
    longest = 1.5 * (time.perf_counter() - started)
    for count in range(1, rounds + 1):
        task = asyncio.create_task(make_two_keys(database, count))
        await asyncio.wait({task}, timeout=dice.uniform(0, longest))
        task.cancel()
        await asyncio.wait({task}, timeout=PATIENCE_SECONDS)
        assert task.done()
        assert await orgs_seen(database, BETA) == {BETA}
    await asyncio.gather(*(orgs_seen(database, ACME) for _ in range(2)))
    async with owner_connection(database_url) as owner:
        assert await owner.fetchval(LEFT_OPEN_SQL) == 0
        halves = await owner.fetch("SELECT subject FROM keys GROUP BY subject HAVING count(*) <> 2")
    assert halves == [], "a cancelled transaction left half of its rows"
