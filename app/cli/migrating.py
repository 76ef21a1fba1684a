"""Bring a database's schema to a revision. Must not know what is in a revision."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg

from app.cli.manners import SetupError
from app.storage.database import StorageUnavailable

if TYPE_CHECKING:
    from alembic.config import Config

MIGRATIONS = Path(__file__).resolve().parent.parent.parent / "migrations"
CONNECT_TIMEOUT_SECONDS = 10.0


def migrate(database_url: str, revision: str = "head") -> str | None:
    """Move the schema up to `revision` in one transaction; two at once wait for one another.

    Returns the revision of a schema that is newer than this program and serves it: nothing is changed then.

    Raises:
        StorageUnavailable: the database cannot be reached. SetupError: the schema is newer, and no longer serves this program.
    """
    from alembic import command

    try:
        newer = asyncio.run(_newer_revision(database_url))
        if newer is None:
            command.upgrade(_config(database_url), revision)
    except (OSError, TimeoutError, asyncpg.InternalClientError) as error:
        raise StorageUnavailable("storage_unavailable", f"the database cannot be reached: {error}") from error
    return newer


async def _newer_revision(database_url: str) -> str | None:
    """Return the schema's revision where this program's migrations do not lead to it.

    Raises:
        SetupError: that schema no longer serves this program's code.
    """
    mine = _newest_known()
    connection = await asyncpg.connect(database_url, timeout=CONNECT_TIMEOUT_SECONDS)
    try:
        if await connection.fetchval("SELECT to_regclass('alembic_version')") is None:
            return None
        found: str | None = await connection.fetchval("SELECT version_num FROM alembic_version")
        if found is None or found <= mine:
            return None
        oldest = await connection.fetchval("SELECT oldest_revision FROM schema_support")
    finally:
        await connection.close()
    if oldest > mine:
        raise SetupError(
            f"the schema is at revision {found} and serves programs of revision {oldest} and newer; this one is of {mine}. "
            "Nothing was changed: use a newer program"
        )
    return found


def _newest_known() -> str:
    """Return the newest revision that this program's migrations lead to."""
    return max(path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*_*.py"))


def downgrade(database_url: str, revision: str) -> None:
    """Move the schema back to `revision`."""
    from alembic import command

    command.downgrade(_config(database_url), revision)


def _config(database_url: str) -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))

    async def connect() -> "asyncpg.Connection[asyncpg.Record]":
        try:
            return await asyncpg.connect(database_url, timeout=CONNECT_TIMEOUT_SECONDS)
        except asyncpg.InternalClientError as error:  # here, since SQLAlchemy makes it one of its own: no host can be written to now
            raise StorageUnavailable("storage_unavailable", f"the database cannot be reached: {error}") from error

    config.attributes["connect"] = connect
    return config
