"""`python -m tests.faults.standby`: kill a primary under load, promote its standby, and count what was acknowledged and is gone.

Prints a line for each way to replicate, and exits with 1 if a synchronous one lost anything. Must not judge asynchronous replication:
that it may lose what was acknowledged last is what the figures are for.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from urllib.parse import parse_qs, urlsplit, urlunsplit

import structlog

from app.cli.embedded_postgres import embedded_postgres, find_binaries
from app.cli.migrating import migrate
from tests.conftest import execute, with_database
from tests.factories import open_service, owner_connection
from tests.fakes import FakeEndpoint
from tests.faults.agents import Agents
from tests.faults.gates import wait_until

DATABASE = "replicated"
WRITERS, FAILING = 4, 2
ANSWERS = 60  # before the primary is killed
BEHIND = 25  # what is acknowledged while the standby hears nothing
AFTERWARDS = 15
PATIENCE_SECONDS = 30
STREAMING = "EXISTS (SELECT FROM pg_stat_replication WHERE state = 'streaming')"
SYNCHRONOUS = "EXISTS (SELECT FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum'))"
PROMOTED = "NOT pg_is_in_recovery()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the standby follows; `behind`: how many answers are given, before the kill, of which it hears nothing."""

    name: str
    is_synchronous: bool
    behind: int = 0


WAYS = (
    Way(name="synchronous", is_synchronous=True),
    Way(name="asynchronous", is_synchronous=False),
    Way(name=f"asynchronous, {BEHIND} answers behind", is_synchronous=False, behind=BEHIND),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one promotion came to: steps acknowledged before the kill, those gone, runs undone, and how long nobody was served."""

    acknowledged: int
    lost: int
    undone: int
    refused: int
    seconds_to_promote: float
    seconds_to_serve: float


class Pair:
    """A primary and a standby made from it, each a Postgres of this process's own."""

    def __init__(self, home: Path, bin_dir: Path | None = None) -> None:
        """Keep where they lie; `running` starts them."""
        self.primary_url = self.standby_url = ""
        self._home = home
        self._binaries = find_binaries(bin_dir)

    @contextmanager
    def running(self) -> Iterator["Pair"]:
        """Run both, the database migrated, until the block ends."""
        with ExitStack() as stack:
            self.primary_url = self._start(stack, "primary")
            made = with_database(self.primary_url, DATABASE)
            asyncio.run(execute(self.primary_url, f'CREATE DATABASE "{DATABASE}"'))
            migrate(made)
            (self._home / "standby").mkdir(mode=0o700)
            backup = [str(self._binaries / "pg_basebackup"), "--write-recovery-conf", "--checkpoint=fast", "--no-password"]
            where = [f"--dbname={self.primary_url}", f"--pgdata={self._home / 'standby/cluster'}"]
            subprocess.run([*backup, *where], check=True, capture_output=True)
            self.standby_url = self._start(stack, "standby")
            yield self

    def _start(self, stack: ExitStack, name: str) -> str:
        return stack.enter_context(embedded_postgres(self._home / name, bin_dir=self._binaries))

    @property
    def url(self) -> str:
        """Return the database's URL that names both servers and takes the one that can be written to."""
        hosts = [parse_qs(urlsplit(url).query)["host"][0] for url in (self.primary_url, self.standby_url)]
        parts = urlsplit(with_database(self.primary_url, DATABASE))
        port = parse_qs(parts.query)["port"][0]
        return urlunsplit(parts._replace(query=f"host={','.join(hosts)}&port={port}&target_session_attrs=read-write"))

    async def follow(self, way: Way) -> None:
        """Return once the standby follows in that way."""
        async with owner_connection(self.primary_url) as connection:
            await wait_until(connection, STREAMING)
            if way.is_synchronous:
                await connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
                await connection.execute("SELECT pg_reload_conf()")
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while not await connection.fetchval(f"SELECT {SYNCHRONOUS}"):
                        pass  # a backend takes notice of a setting between statements only; each is a round trip

    async def fall_silent(self) -> None:
        """Let nothing more leave the primary for the standby."""
        async with owner_connection(self.primary_url) as connection:
            for row in await connection.fetch("SELECT pid FROM pg_stat_replication"):
                os.kill(row["pid"], signal.SIGSTOP)

    def kill_primary(self) -> None:
        """Kill -9 the primary with all its processes, as the loss of its machine would."""
        postmaster = int((self._home / "primary/cluster/postmaster.pid").read_text(encoding="utf-8").partition("\n")[0])
        children = subprocess.run(["/bin/ps", "-o", "pid=", "--ppid", str(postmaster)], check=True, capture_output=True, text=True)
        for pid in (postmaster, *map(int, children.stdout.split())):
            os.kill(pid, signal.SIGKILL)

    async def promote(self) -> None:
        """Make the standby the primary, and return once it is."""
        async with owner_connection(self.standby_url) as connection:
            await connection.execute("SELECT pg_promote(wait => false)")
            await wait_until(connection, PROMOTED)


async def fail_over(pair: Pair, way: Way) -> Figures:
    """Lose a primary under load, and go on with its standby; assert that what the service did before and does afterwards is whole."""
    await pair.follow(way)
    async with FakeEndpoint() as endpoint, open_service(pair.url) as service:
        agents = Agents(agent=service.agent, endpoint=endpoint)
        async with agents.at_work(WRITERS, FAILING):
            await agents.wait_for(answers=ANSWERS, failed=1)
            if way.behind:
                await pair.fall_silent()
                await agents.wait_for(answers=way.behind)
            killed_at = monotonic()
            pair.kill_primary()
            acknowledged = len(agents.intercepts)
            await agents.wait_for(refusals=1)
            await pair.promote()
            promoted_at = monotonic()
            later = Agents(agent=service.agent, endpoint=endpoint, prefix="later-")
            async with later.at_work(1, 1):
                await later.wait_for(answers=1)
                served_at = monotonic()
                await later.wait_for(answers=AFTERWARDS, failed=1)
        later.assert_polite()
        database_url = with_database(pair.standby_url, DATABASE)
        await later.assert_undone(database_url)
        lost = await agents.lost(service.operator)
        if not lost:
            agents.assert_polite()
            await agents.assert_undone(database_url)
        return Figures(
            acknowledged=acknowledged,
            lost=len(lost),
            undone=len(later.failed) + (len(agents.failed) if not lost else 0),
            refused=len(agents.refusals),
            seconds_to_promote=round(promoted_at - killed_at, 2),
            seconds_to_serve=round(served_at - killed_at, 2),
        )


def main() -> int:
    """Fail over once in every way; return the exit code."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    is_good = True
    for way in WAYS:
        with tempfile.TemporaryDirectory(prefix="countermand-standby-") as home, Pair(Path(home)).running() as pair:
            figures = asyncio.run(fail_over(pair, way))
        told = ", ".join(f"{name} {value}" for name, value in asdict(figures).items())
        sys.stdout.write(f"{way.name}: {told}\n")
        sys.stdout.flush()
        is_good = is_good and not (way.is_synchronous and figures.lost)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
