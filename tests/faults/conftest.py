"""Fixtures of the tests that kill things: processes on the test's database, and a relay of them for a whole file."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from tests.conftest import execute, with_database
from tests.faults.nursery import Nursery
from tests.faults.processes import UNHURRIED_MS, Relay, ServiceProcess, make_keys

StartProcess = Callable[..., Awaitable[ServiceProcess]]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Run one process that forks services for all tests of this one."""
    with Nursery() as nursery:
        yield nursery


@pytest.fixture
async def processes(nursery: Nursery, database_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StartProcess]:
    """Return what starts a service process on the test's database, given flags and settings by name; all are gone at the end."""
    keys = await make_keys(database_url)
    directory = tmp_path_factory.mktemp("service")
    async with AsyncExitStack() as stack:

        async def start(*flags: str, nursery: Nursery = nursery, database_url: str = database_url, **settings: Any) -> ServiceProcess:
            return await stack.enter_async_context(ServiceProcess(nursery, database_url, keys, directory, *flags, **settings))

        yield start


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def relay_url(cluster_url: str, template: str) -> AsyncIterator[str]:
    """Make a database for the relay of one file; each of its tests has sessions of its own."""
    name = f"test_{uuid4().hex}"
    await execute(cluster_url, f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    yield with_database(cluster_url, name)
    await execute(cluster_url, f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def relay(nursery: Nursery, relay_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Relay]:
    """Run a service process that may be killed."""
    keys = await make_keys(relay_url)
    directory = tmp_path_factory.mktemp("service")
    async with AsyncExitStack() as stack:

        async def start() -> ServiceProcess:
            return await stack.enter_async_context(ServiceProcess(nursery, relay_url, keys, directory, attempt_timeout_ms=UNHURRIED_MS))

        relay = Relay(start)
        await relay.go_on()
        yield relay
        assert [crash for process in relay.all for crash in process.crashes] == []
