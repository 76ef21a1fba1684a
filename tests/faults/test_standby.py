"""A primary is lost under load and its synchronous standby takes over. Must not test asynchronous replication, which promises nothing."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli.embedded_postgres import find_binaries
from tests.faults.standby import Pair, Way, fail_over

pytestmark = pytest.mark.database

NAMED = os.environ.get("COUNTERMAND_TEST_POSTGRES_BIN_DIR")
BIN_DIR = Path(NAMED) if NAMED else None


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Run a primary and its standby."""
    if not (find_binaries(BIN_DIR) / "pg_basebackup").exists():
        pytest.skip("this Postgres comes without pg_basebackup")
    with Pair(tmp_path, BIN_DIR).running() as running:
        yield running


async def test_nothing_acknowledged_is_lost_when_a_synchronous_standby_takes_over(pair: Pair) -> None:
    """Kill -9 the primary, promote: every answered intercept and commit is there, and every failed run is undone, by the same service."""
    figures = await asyncio.wait_for(fail_over(pair, Way(name="synchronous", is_synchronous=True)), timeout=100)
    assert figures.lost == 0
    assert figures.acknowledged > 0
