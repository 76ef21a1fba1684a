"""Fixtures: one Postgres per test process, a database per test cloned from a migrated template, a service in the test's own loop."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import pytest

from app.cli.embedded_postgres import embedded_postgres
from app.cli.migrating import migrate
from tests.factories import Service, open_service
from tests.fakes import FakeEndpoint

TEMPLATE = "countermand_template"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs Postgres, so that it can be run again on another version."""
    for item in items:
        if {"cluster_url", "database_url"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.database)


def with_database(cluster_url: str, name: str) -> str:
    """Return the URL of another database of the same cluster."""
    return urlunsplit(urlsplit(cluster_url)._replace(path=f"/{name}"))


@pytest.fixture(scope="session")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a Postgres of this test process's own: the packaged one, or the one whose directory is named."""
    named = os.environ.get("COUNTERMAND_TEST_POSTGRES_BIN_DIR")
    with embedded_postgres(tmp_path_factory.mktemp("postgres") / "data", bin_dir=Path(named) if named else None) as url:
        yield url


@pytest.fixture(scope="session")
def template(cluster_url: str) -> str:
    """Make and name a migrated database that nobody is connected to."""
    migrate_into(cluster_url, TEMPLATE)
    return TEMPLATE


def migrate_into(cluster_url: str, name: str) -> None:
    """Make a database and bring it to head."""
    asyncio.run(execute(cluster_url, f'CREATE DATABASE "{name}"'))
    migrate(with_database(cluster_url, name))


async def execute(url: str, sql: str) -> None:
    """Run one statement as the owner, outside any transaction."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


@pytest.fixture
async def database_url(cluster_url: str, template: str) -> AsyncIterator[str]:
    """Make a database of the test's own."""
    name = f"test_{uuid4().hex}"
    await execute(cluster_url, f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    yield with_database(cluster_url, name)
    await execute(cluster_url, f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture
async def endpoint() -> AsyncIterator[FakeEndpoint]:
    """Run an undo endpoint that keeps a log of its own."""
    async with FakeEndpoint() as fake:
        yield fake


StartService = Callable[..., Awaitable[Service]]


@pytest.fixture
async def services(database_url: str) -> AsyncIterator[StartService]:
    """Return what starts a service on the test's database, given settings by name; all are stopped at the end."""
    async with AsyncExitStack() as stack:

        async def start(**settings: Any) -> Service:
            return await stack.enter_async_context(open_service(database_url, **settings))

        yield start


@pytest.fixture
async def service(services: StartService) -> Service:
    """Run one service with API and orchestrator, quick retries, inline tools and loopback endpoints allowed."""
    return await services()
