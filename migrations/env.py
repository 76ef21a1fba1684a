"""Alembic's entry: one asynchronous connection, one transaction for all pending revisions. Must not read settings: the URL is handed in."""

import asyncio

from alembic import context
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

LOCK_KEY = 8_420_001  # any constant: two `migrate` at once wait for one another


def migrate(connection: Connection) -> None:
    """Run the pending revisions under an advisory lock that ends with the transaction."""
    context.configure(connection=connection, transaction_per_migration=False)
    with context.begin_transaction():
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
        context.run_migrations()


async def main() -> None:
    """Connect with the caller's `connect` coroutine function and migrate."""
    engine = create_async_engine(
        "postgresql+asyncpg://",
        async_creator=context.config.attributes["connect"],
        poolclass=NullPool,
    )
    try:
        async with engine.connect() as connection:
            await connection.run_sync(migrate)
            await connection.commit()
    finally:
        await engine.dispose()


asyncio.run(main())
