"""The disk fills up under the database, its tables alone or its log as well: refused politely, nothing false said or sent, and it heals.

Must not fill a disk that is anybody else's: it mounts small ones in memory, for which it has to be root.
"""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest

from app.cli.embedded_postgres import embedded_postgres
from tests.conftest import execute, migrate_into, with_database
from tests.factories import open_service
from tests.fakes import FakeEndpoint
from tests.faults.agents import Agents
from tests.probes import fetch

pytestmark = pytest.mark.database

WRITERS, FAILING = 4, 2
ANSWERS = 15
REFUSALS = 20
BLOCK_BYTES = 4_096
CHUNK_BYTES = 1 << 20
TABLES_MEGABYTES = 48  # a migrated database is about 10
CLUSTER_MEGABYTES = 200  # an empty cluster is about 40, its log 16 or 32
MOST_SWITCHES = 8  # of the log to its next file, which may have been made ahead


@contextmanager
def small_disk(directory: Path, megabytes: int) -> Iterator[Path]:
    """Mount a file system of its own on a directory; skip the test where that is not allowed."""
    directory.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root on Linux")
    mounted = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(directory)], check=False, capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["/bin/umount", "--lazy", str(directory)], check=True)


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Leave no block free until the end of the block."""
    ballast = disk / "ballast"
    with ballast.open("wb") as file:
        size = 0
        for step in (CHUNK_BYTES, BLOCK_BYTES):
            while _grow(file.fileno(), size, step):
                size += step
    try:
        yield
    finally:
        ballast.unlink()


def _grow(descriptor: int, size: int, step: int) -> bool:
    try:
        os.posix_fallocate(descriptor, size, step)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


@pytest.fixture
def tables_disk(cluster_url: str, tmp_path: Path) -> Iterator[Path]:
    """Mount a small disk that the suite's Postgres may use for a tablespace."""
    with small_disk(tmp_path / "disk", TABLES_MEGABYTES) as disk:
        place = disk / "tables"
        place.mkdir(mode=0o700)
        sockets = Path(parse_qs(urlsplit(cluster_url).query)["host"][0])
        os.chown(place, sockets.stat().st_uid, sockets.stat().st_gid)
        yield disk


async def test_nothing_false_is_said_or_sent_when_there_is_no_room_for_the_tables(
    cluster_url: str, template: str, tables_disk: Path
) -> None:
    """Statements fail one by one, the server lives: 503 as long as it lasts, and everything goes on by itself when there is room."""
    await execute(cluster_url, f"CREATE TABLESPACE small LOCATION '{tables_disk / 'tables'}'")
    await execute(cluster_url, f'CREATE DATABASE full_tables TEMPLATE "{template}" TABLESPACE small')
    url = with_database(cluster_url, "full_tables")
    try:
        async with FakeEndpoint() as endpoint, open_service(url) as service:
            agents = Agents(agent=service.agent, endpoint=endpoint)
            async with agents.at_work(WRITERS, FAILING):
                await agents.wait_for(answers=ANSWERS, failed=1)
                with filled(tables_disk):
                    await agents.wait_for(refusals=REFUSALS)
                await agents.wait_for(answers=ANSWERS, failed=1)
            agents.assert_polite()
            assert await agents.lost(service.operator) == []
            await agents.assert_undone(url)
    finally:
        await execute(cluster_url, "DROP DATABASE full_tables WITH (FORCE)")
        await execute(cluster_url, "DROP TABLESPACE small")


class SmallCluster:
    """A migrated Postgres whose every file lies on a small disk, and its supervisor."""

    def __init__(self, disk: Path) -> None:
        """Keep where; `start` it."""
        self.disk = disk
        self.url = ""
        self._running = ExitStack()

    def start(self) -> str:
        """Start it, recovering what it left, and return the cluster's URL, always the same."""
        named = os.environ.get("COUNTERMAND_TEST_POSTGRES_BIN_DIR")
        cluster = embedded_postgres(self.disk / "postgres", bin_dir=Path(named) if named else None)
        cluster_url = self._running.enter_context(cluster)
        self.url = with_database(cluster_url, "full_log")
        return cluster_url

    def stop(self) -> None:
        """Take away what is left of it."""
        self._running.close()


@pytest.fixture
def small_cluster(tmp_path: Path) -> Iterator[SmallCluster]:
    """Run a Postgres on a small disk of its own."""
    with small_disk(tmp_path / "disk", CLUSTER_MEGABYTES) as disk:
        cluster = SmallCluster(disk)
        try:
            migrate_into(cluster.start(), "full_log")
            yield cluster
        finally:
            cluster.stop()


async def _run_out_of_log(url: str) -> None:
    """Have the log go on to a file that there is no room for: Postgres stops with PANIC, as it does when a busy one gets there."""
    for _ in range(MOST_SWITCHES):
        try:
            await fetch(url, "SELECT pg_switch_wal(), pg_logical_emit_message(true, 'tests', 'x')")
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return
    raise AssertionError("there was room for the log")


async def test_nothing_false_is_said_or_sent_when_there_is_no_room_for_the_log(small_cluster: SmallCluster) -> None:
    """Postgres itself goes down: 503 until its supervisor has started it again with room, and then all goes on without a restart."""
    url = small_cluster.url
    async with FakeEndpoint() as endpoint, open_service(url) as service:
        agents = Agents(agent=service.agent, endpoint=endpoint)
        async with agents.at_work(WRITERS, FAILING):
            await agents.wait_for(answers=ANSWERS, failed=1)
            with filled(small_cluster.disk):
                await _run_out_of_log(url)
                await agents.wait_for(refusals=REFUSALS)
                told = len(agents.intercepts)
                await agents.wait_for(refusals=REFUSALS)
                assert len(agents.intercepts) == told, "without a database nothing can be registered"
                small_cluster.stop()
            small_cluster.start()
            await agents.wait_for(answers=ANSWERS, failed=1)
        agents.assert_polite()
        assert await agents.lost(service.operator) == []
        await agents.assert_undone(url)
