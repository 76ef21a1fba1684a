"""Look into a test's database as its owner, and age rows instead of waiting. Must not assert anything."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import httpx
from starlette.types import ASGIApp

from app.storage import claims
from app.storage.changes import Lease
from app.storage.claims import Claim
from app.storage.database import Connection
from tests.factories import Client, owner_connection

TABLES = ("sessions", "effect_log", "approvals", "undo_stack", "outgoing_calls", "journal")
PATIENCE_SECONDS = 30.0  # for what should take a moment, on shared cores


async def fetch(database_url: str, sql: str, *arguments: object) -> list[asyncpg.Record]:
    """Return the rows of one statement, past row-level security."""
    async with owner_connection(database_url) as connection:
        rows: list[asyncpg.Record] = await connection.fetch(sql, *arguments)
        return rows


async def call_of(database_url: str, session_id: str, step: int) -> asyncpg.Record:
    """Return the outgoing call of one step, which must be there."""
    sql = "SELECT * FROM outgoing_calls WHERE session_id = $1 AND step_index = $2"
    return (await fetch(database_url, sql, session_id, step))[0]


async def spoil(database_url: str, sql: str, *arguments: object) -> None:
    """Run one statement as somebody who owns the database and switches its triggers off."""
    async with owner_connection(database_url) as connection, connection.transaction():
        await connection.execute("SET LOCAL session_replication_role = replica")
        await connection.execute(sql, *arguments)


async def make_due(database_url: str, session_id: str) -> None:
    """Let the long wait of a session's call be over, once its worker has handed it back; nobody is told."""
    handed_back = "SELECT FROM outgoing_calls WHERE session_id = $1 AND due_at IS NOT NULL AND leased_by IS NULL AND attempts > 0"
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await fetch(database_url, handed_back, session_id):
            pass  # every look is a round trip
    await fetch(
        database_url, "UPDATE outgoing_calls SET due_at = clock_timestamp() WHERE session_id = $1 AND due_at IS NOT NULL", session_id
    )


async def claim_due(connection: Connection, lease: Lease, limit: int = 10) -> list[Claim]:
    """Claim up to so many calls wherever any are due, whatever an orchestrator would find fair; needs a dispatcher's connection."""
    queues = await claims.look(connection, None, 100, limit)
    return await claims.claim(connection, lease, {queue.place: limit for queue in queues})


async def take_lease_away(database_url: str, session_id: str) -> None:
    """Let the lease of a session's call have run out."""
    sql = "UPDATE outgoing_calls SET leased_until = clock_timestamp() - interval '1 s' WHERE session_id = $1 AND leased_until IS NOT NULL"
    await fetch(database_url, sql, session_id)


async def row_counts(database_url: str) -> dict[str, int]:
    """Count the rows of every table that requests write to."""
    async with owner_connection(database_url) as connection:
        return {table: await connection.fetchval(f"SELECT count(*) FROM {table}") for table in TABLES}


@asynccontextmanager
async def no_claims(database_url: str) -> AsyncIterator[None]:
    """Hold the table of calls, so that whoever claims has to wait until the block ends."""
    async with owner_connection(database_url) as connection, connection.transaction():
        await connection.execute("LOCK TABLE outgoing_calls IN ACCESS EXCLUSIVE MODE")
        yield


def through(app: ASGIApp, client: Client) -> Client:
    """Return the client with its key, speaking to another ASGI application."""
    return Client(http=httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://countermand.test"), key=client.key)


async def rest(client: Client, session_id: str) -> dict[str, object]:
    """Fail a session, or ask again, and return it once it is at rest."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        response = await client.fail(session_id, wait_s=25)
    response.raise_for_status()
    found: dict[str, object] = response.json()
    return found
