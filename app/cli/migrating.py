"""Bring a database's schema to a revision. Must not know what is in a revision."""

from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg

from app.storage.database import StorageUnavailable

if TYPE_CHECKING:
    from alembic.config import Config

MIGRATIONS = Path(__file__).resolve().parent.parent.parent / "migrations"
CONNECT_TIMEOUT_SECONDS = 10.0


def migrate(database_url: str, revision: str = "head") -> None:
    """Move the schema up to `revision` in one transaction; two at once wait for one another.

    Raises:
        StorageUnavailable: the database cannot be reached.
    """
    from alembic import command

    try:
        command.upgrade(_config(database_url), revision)
    except (OSError, TimeoutError) as error:
        raise StorageUnavailable("storage_unavailable", f"the database cannot be reached: {error}") from error


def downgrade(database_url: str, revision: str) -> None:
    """Move the schema back to `revision`."""
    from alembic import command

    command.downgrade(_config(database_url), revision)


def _config(database_url: str) -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))

    async def connect() -> "asyncpg.Connection[asyncpg.Record]":
        return await asyncpg.connect(database_url, timeout=CONNECT_TIMEOUT_SECONDS)

    config.attributes["connect"] = connect
    return config
