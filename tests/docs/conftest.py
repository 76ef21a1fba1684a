"""Fixtures: one `dev` per module, on a database of its own; a reader's variables, with keys of an org of the test's own."""

from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
import pytest_asyncio

from tests.conftest import execute, with_database
from tests.docs.playing import Development, developing


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def development(cluster_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Development]:
    """Run `dev`."""
    name = f"test_{uuid4().hex}"
    await execute(cluster_url, f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    url = with_database(cluster_url, name)
    async with developing(url, tmp_path_factory.mktemp("dev")) as exports:
        yield Development(exports=exports, database_url=url)
    await execute(cluster_url, f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture
async def variables(development: Development) -> dict[str, str]:
    """Return what a reader has pasted before a document begins."""
    return await development.variables(f"reader-{uuid4().hex}")
