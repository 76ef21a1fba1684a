"""Hold the service's transactions at chosen points, from inside the database. Must not need a hook in the service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from secrets import randbelow
from typing import TypeAlias

import asyncpg

from app.domain.model import EntryKind
from tests.factories import owner_connection

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

PATIENCE = "20s"  # for what should happen within a second on a free machine
GATE_FUNCTION = """
CREATE OR REPLACE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock_shared(TG_ARGV[0]::bigint);
  RETURN NULL;
END $$
"""


WAITERS = "SELECT {what} FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
LOCK_SQL = "SELECT FROM sessions WHERE session_id = ANY ($1::text[]) FOR UPDATE"


class Place(StrEnum):
    """Where a transaction that writes what a gate stands in the way of is held.

    `statement`: it has not been told to commit; killing its client undoes it. `commit`: it has, and will, whatever becomes of its client.
    """

    STATEMENT = "IMMEDIATE"
    COMMIT = "DEFERRED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A shut gate; `open` lets through whoever waits there, and everybody after."""

    connection: Connection
    key: int

    async def is_reached(self) -> None:
        """Return once a transaction waits here."""
        await wait_until(
            self.connection,
            f"EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = {self.key} AND NOT granted "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))",
        )

    async def end_who_waits(self) -> None:
        """End the backends that wait here: what they were about to commit is undone."""
        await self.connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_locks "
            f"WHERE locktype = 'advisory' AND objid = {self.key} AND NOT granted "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )

    async def open(self) -> None:
        """Let them through."""
        await self.connection.execute(f"SELECT pg_advisory_unlock({self.key})")


@asynccontextmanager
async def shut_gate(database_url: str, session_id: str, kind: EntryKind, step: int | None, place: Place) -> AsyncIterator[Gate]:
    """Shut a gate in the way of one kind of journal entry of one session; it is open for good at the end."""
    condition = f"NEW.session_id = '{session_id}' AND NEW.kind = '{kind}' AND NEW.step IS NOT DISTINCT FROM {step or 'NULL'}"
    async with _shut(database_url, "INSERT ON journal", condition, place) as gate:
        yield gate


@asynccontextmanager
async def shut_attempt_gate(database_url: str, session_id: str, place: Place) -> AsyncIterator[Gate]:
    """Shut a gate in the way of the count of an attempt, which is no journal entry; it is open for good at the end."""
    condition = f"NEW.session_id = '{session_id}' AND NEW.is_attempt_open AND NOT OLD.is_attempt_open"
    async with _shut(database_url, "UPDATE ON outgoing_calls", condition, place) as gate:
        yield gate


@asynccontextmanager
async def _shut(database_url: str, event: str, condition: str, place: Place) -> AsyncIterator[Gate]:
    key = 1 + randbelow(2**31 - 1)
    async with owner_connection(database_url) as connection:
        await connection.execute(GATE_FUNCTION)
        await connection.execute(f"SELECT pg_advisory_lock({key})")
        await connection.execute(
            f"CREATE CONSTRAINT TRIGGER gate_{key} AFTER {event} DEFERRABLE INITIALLY {place} FOR EACH ROW "
            f"WHEN ({condition}) EXECUTE FUNCTION wait_at_gate({key})"
        )
        yield Gate(connection=connection, key=key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Sessions whose rows are locked by `connection`, in its transaction; `watcher` is another one, to look from."""

    connection: Connection
    watcher: Connection

    async def until_waiting(self, count: int) -> None:
        """Return once so many transactions wait for a lock."""
        await wait_until(self.watcher, f"({WAITERS.format(what='count(*)')}) >= {count}")


@asynccontextmanager
async def hold_sessions(database_url: str, *session_ids: str) -> AsyncIterator[Hold]:
    """Hold sessions' locks as a stuck client of the database would; they are free, and what was written is committed, at the end."""
    async with owner_connection(database_url) as watcher, owner_connection(database_url) as connection, connection.transaction():
        await connection.execute(LOCK_SQL, list(session_ids))
        yield Hold(connection=connection, watcher=watcher)


async def wait_until(connection: Connection, condition: str) -> None:
    """Return once a SQL condition holds; the server looks every two milliseconds, and gives up after 20 s."""
    await connection.execute(f"SET statement_timeout = '{PATIENCE}'")
    await connection.execute(
        f"DO $$ BEGIN WHILE NOT ({condition}) LOOP PERFORM pg_sleep(0.002), pg_stat_clear_snapshot(); END LOOP; END $$"
    )
