"""Fixtures of storage's tests. Must not share a database between tests."""

from collections.abc import AsyncIterator

import pytest

from app.storage.database import Database, open_database

APPLICATION = "tests storage"


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """Open a pool with the runtime role on the test's own database."""
    async with open_database(database_url, size=4, application_name=APPLICATION) as opened:
        yield opened
