"""PgBouncer in transaction mode before a test's database; `python -m tests.storage.pooler` prints what it costs. Must not need root."""

import asyncio
import logging
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from os import getpid
from pathlib import Path
from time import perf_counter
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

import asyncpg
import structlog

from app.cli.embedded_postgres import CHILD, PORT, embedded_postgres
from app.cli.migrating import migrate
from app.engine.clock import SystemClock
from tests.factories import do_step, open_service

PGBOUNCER = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
START_SECONDS = 10.0
PROBE_SECONDS = 0.02
CALLS = 200  # an intercept and a commit each, one after another
# Two connections to Postgres for all clients of a database; another client gets the one that was last used.
CONFIGURATION = """
[databases]
* = host={sockets} port={port}
[pgbouncer]
listen_addr =
unix_socket_dir = {directory}
listen_port = {port}
auth_type = trust
auth_file = {directory}/users
pool_mode = transaction
default_pool_size = {size}
logfile = {directory}/log
"""


@asynccontextmanager
async def pooler(database_url: str, directory: Path, size: int = 2) -> AsyncIterator[str]:
    """Run PgBouncer before a database, with `size` connections to it, and yield the database's URL there."""
    process = _start(parse_qs(urlsplit(database_url).query)["host"][0], directory, size)
    url = urlunsplit(urlsplit(database_url)._replace(query=f"host={quote(str(directory))}&port={PORT}"))
    try:
        async with asyncio.timeout(START_SECONDS):
            while not await _lets_in(url):
                await SystemClock().sleep(PROBE_SECONDS)
        yield url
    finally:
        process.terminate()
        process.wait(START_SECONDS)


def _start(sockets: str, directory: Path, size: int) -> subprocess.Popen[bytes]:
    directory.mkdir(mode=0o700)
    (directory / "users").write_text('"postgres" ""\n', encoding="utf-8")
    configured = CONFIGURATION.format(sockets=sockets, port=PORT, directory=directory, size=size)
    (directory / "configuration").write_text(configured, encoding="utf-8")
    # It refuses root and has to reach Postgres's socket, so it becomes whoever that became, and ends with this process.
    before = [sys.executable, "-I", "-S", str(CHILD), str(getpid()), str(int(signal.SIGTERM)), str(directory), str(directory), "--"]
    return subprocess.Popen([*before, str(PGBOUNCER), "--quiet", str(directory / "configuration")])


async def _lets_in(url: str) -> bool:
    try:
        connection = await asyncpg.connect(url)
    except OSError:
        return False
    await connection.close()
    return True


async def _cost(database_url: str, directory: Path) -> None:
    """Print the median of what an intercept and its commit take, straight and through the pooler, taking turns."""
    took: dict[str, list[float]] = {"straight": [], "pooled": []}
    async with (
        pooler(database_url, directory / "pooler", size=5) as url,
        open_service(database_url) as straight,
        open_service(url, database_pooler="transaction") as pooled,
    ):
        for number in range(1, CALLS + 1):
            for name, service in (("straight", straight), ("pooled", pooled)):
                began = perf_counter()
                await do_step(service.agent, name, number, "http://127.0.0.1:9/undo")
                took[name].append(perf_counter() - began)
    for name, seconds in took.items():
        sys.stdout.write(f"{name}: {1_000 * statistics.median(seconds):.1f} ms for an intercept and its commit, median of {CALLS}\n")


def main() -> None:
    """Measure on a Postgres of its own."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory(prefix="countermand-pooler-") as home, embedded_postgres(Path(home) / "postgres") as database_url:
        migrate(database_url)
        asyncio.run(_cost(database_url, Path(home)))


if __name__ == "__main__":
    main()
