"""Fixtures of the tests that kill things: processes on the test's database, and a relay of them for a whole file."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from tests.conftest import execute, with_database
from tests.faults.processes import Relay, ServiceProcess, make_keys

StartProcess = Callable[..., Awaitable[ServiceProcess]]


@pytest.fixture
async def processes(database_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StartProcess]:
    """Return what starts a service process on the test's database, given flags and settings by name; all are gone at the end."""
    keys = await make_keys(database_url)
    directory = tmp_path_factory.mktemp("service")
    async with AsyncExitStack() as stack:

        async def start(*flags: str, **settings: Any) -> ServiceProcess:
            spawned = await stack.enter_async_context(ServiceProcess(database_url, keys, directory, *flags, **settings))
            return await spawned.serve()

        yield start


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def relay_url(cluster_url: str, template: str) -> AsyncIterator[str]:
    """Make a database for the relay of one file; each of its tests has sessions of its own."""
    name = f"test_{uuid4().hex}"
    await execute(cluster_url, f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    yield with_database(cluster_url, name)
    await execute(cluster_url, f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def relay(relay_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Relay]:
    """Run a service process that may be killed, with the next one warmed up."""
    keys = await make_keys(relay_url)
    directory = tmp_path_factory.mktemp("service")
    async with AsyncExitStack() as stack:

        async def spawn() -> ServiceProcess:
            return await stack.enter_async_context(ServiceProcess(relay_url, keys, directory, is_warm=True))

        relay = Relay(spawn)
        await relay.begin()
        yield relay
        assert [crash for process in relay.all for crash in process.crashes] == []
