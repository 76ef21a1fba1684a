"""What a run of the bench works with: a Postgres of its own, databases, real processes of the service. Must not outlive the run.

Postgres is as it comes: fsync and synchronous_commit on. Whatever is started is ended by its number, also after a failure or Ctrl-C.
"""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit, urlunsplit

import asyncpg
import httpx

from app.cli import keys
from app.cli.embedded_postgres import embedded_postgres, find_binaries
from app.cli.migrating import migrate
from app.domain.model import Role
from bench import cpu
from bench.environment import Comparison
from bench.figures import Reading
from bench.lines import CLONE, Fault, Process

ORG = "acme"
AGENT = "agent-1"
START_SECONDS = 60.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.02
SHOWN_LINES = 20  # of the log of a service that failed
SERVING = re.compile(r'"port": ?(\d+)[^\n]*"event": ?"serving"|"event": ?"serving"[^\n]*"port": ?(\d+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How often, how long, and on which share of the data it is measured."""

    rounds: int
    seconds: float
    share: float

    def size(self, whole: int) -> int:
        """Return how many to use where `whole` are meant."""
        return max(1, round(whole * self.share))

    @property
    def warm_seconds(self) -> float:
        """How long to run before measuring."""
        return min(1.0, self.seconds)


Thing = TypeVar("Thing")

# Settings that are not as they come: a port of its own, the endpoint on loopback, and no 503 for who waits longer than a second for a
# connection, since an answer that has to be asked for again is none that can be counted.
SETTINGS: Mapping[str, object] = {"port": 0, "egress_allow": "127.0.0.0/8", "database_wait_seconds": 30}


class Service:
    """`countermand serve` as a process, with its settings as they come but for `SETTINGS` and those that are named."""

    def __init__(self, database_url: str, log: Path, arguments: Sequence[str], settings: Mapping[str, object]) -> None:
        """Start it; `port` waits until it serves."""
        chosen = {**SETTINGS, "database_url": database_url, **settings}
        mine = {name: value for name, value in os.environ.items() if not name.startswith("COUNTERMAND_")}
        self._log = log
        self.started_at = monotonic()
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "app", "serve", *arguments],
                cwd=CLONE,
                env=mine | {f"COUNTERMAND_{name.upper()}": str(value) for name, value in chosen.items()},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.database_url = database_url
        self._port = 0

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def port(self) -> int:
        """Where it serves, once it does.

        Raises:
            Fault: it ended, or took too long.
        """
        deadline = monotonic() + START_SECONDS
        while not self._port:
            told = SERVING.search(self._log.read_text(encoding="utf-8", errors="replace"))
            if told:
                self._port = int(told[1] or told[2])
            elif self._process.poll() is not None or monotonic() > deadline:
                raise Fault(f"the service does not serve: {self.last_words()}")
            else:
                time.sleep(POLL_SECONDS)
        return self._port

    def last_words(self) -> str:
        """Return the end of its log."""
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:])

    def stop(self) -> None:
        """End it as a deployment does, and the hard way when it does not end."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A migrated database and the keys that open it."""

    database_url: str
    agent_key: str
    admin_key: str


class Stage:
    """What scenarios start and ask. One for the whole run; `part` gives each scenario a life of its own."""

    def __init__(self, *, options: Options, directory: Path, cluster_url: str, comparison: Comparison) -> None:
        """Keep what is there: a running cluster, what to compare with."""
        self.options = options
        self.comparison = comparison
        self.cluster_url = cluster_url
        self.directory = directory
        cluster = Path(self.value(cluster_url, "SHOW data_directory"))
        self._postmaster = int((cluster / "postmaster.pid").read_text(encoding="utf-8").partition("\n")[0])
        self._stack = ExitStack()
        self._number = 0

    @contextmanager
    def part(self) -> Iterator["Stage"]:
        """End what the block starts when it ends."""
        with ExitStack() as stack:
            outer, self._stack = self._stack, stack
            try:
                yield self
            finally:
                self._stack = outer

    def database(self) -> str:
        """Make an empty database, dropped with the part."""
        self._number += 1
        name = f"bench_{self._number}"
        self.execute(self.cluster_url, f'CREATE DATABASE "{name}"')
        self._stack.callback(self.execute, self.cluster_url, f'DROP DATABASE "{name}" WITH (FORCE)')
        return urlunsplit(urlsplit(self.cluster_url)._replace(path=f"/{name}"))

    def tenant(self) -> Tenant:
        """Make a migrated database with keys of one org."""
        url = self.database()
        migrate(url)
        agent, admin = (
            keys.create(url, org=ORG, role=role, subject=subject).key for role, subject in ((Role.AGENT, AGENT), (Role.ADMIN, "admin-1"))
        )
        return Tenant(database_url=url, agent_key=agent, admin_key=admin)

    def service(self, tenant: Tenant, *arguments: str, **settings: object) -> Service:
        """Start a service."""
        self._number += 1
        started = Service(tenant.database_url, self.directory / f"service-{self._number}.log", arguments, settings)
        self._stack.callback(started.stop)
        return started

    def enter(self, context: AbstractContextManager[Thing]) -> Thing:
        """Keep something open until the part ends."""
        return self._stack.enter_context(context)

    def process(self, module: str, *arguments: str) -> Process:
        """Start a module of the bench that does as it is told."""
        return self.enter(Process(self.comparison.python, module, *arguments))

    def endpoint(self) -> "Endpoint":
        """Start the endpoint of the tools and their undos."""
        return Endpoint(self.process("bench.endpoint"))

    def agents(self, service: Service, tenant: Tenant, endpoint: "Endpoint", prefix: str = "run") -> Process:
        """Start agents on a service, whose sessions are called `<prefix>-<number>`, and see that their tools are registered."""
        register(service, tenant, endpoint)
        return self.process("bench.agents", str(service.port), tenant.agent_key, str(endpoint.port), prefix)

    def meters(self, **pids: Sequence[int]) -> dict[str, cpu.Meter]:
        """Return meters of Postgres and of the processes named, those of one part together."""
        return {part: partial(cpu.seconds_of, numbers) for part, numbers in {**pids, "postgres": [self._postmaster]}.items()}

    def execute(self, url: str, sql: str) -> None:
        """Run statements as the superuser."""
        asyncio.run(_execute(url, sql))

    def value(self, url: str, sql: str) -> Any:  # noqa: ANN401 - whatever the statement returns
        """Run one statement as the superuser and return its first value."""
        return asyncio.run(_value(url, sql))

    def libpq(self, url: str) -> list[str]:
        """Return a database's URL as options of Postgres's own programs."""
        parts = urlsplit(url)
        return ["-h", parse_qs(parts.query)["host"][0], "-p", parse_qs(parts.query)["port"][0], "-U", str(parts.username), parts.path[1:]]

    def program(self, name: str) -> Path:
        """Return one of the programs that come with this Postgres."""
        return find_binaries() / name


class Endpoint:
    """The endpoint, as the bench asks about it."""

    def __init__(self, process: Process) -> None:
        """Wait until it listens."""
        self._process = process
        self.port: int = process.ask("port")
        self.pid = process.pid

    def clear(self) -> None:
        """Forget what arrived."""
        self._process.ask("clear")

    def count(self) -> int:
        """Return how many calls arrived that were not refused."""
        number: int = self._process.ask("count")
        return number

    def arrivals(self) -> list[float]:
        """Return when each arrived, by the clock that all processes of a machine share."""
        moments: list[float] = self._process.ask("arrivals")
        return moments

    def newest(self) -> dict[str, Any]:
        """Return the headers and the body of the newest."""
        request: dict[str, Any] = self._process.ask("newest")
        return request


def register(service: Service, tenant: Tenant, endpoint: Endpoint) -> None:
    """Register the tools: `pay`, whose undo takes a reference into the result and one into the payload, and `wire`, which has none."""
    undo = {
        "url": f"http://127.0.0.1:{endpoint.port}/refund",
        "args": {"charge": {"$ref": "result#/charge"}, "amount": {"$ref": "payload#/amount"}},
    }
    tools = {"pay": {"reversibility": "compensatable", "compensation": undo}, "wire": {"reversibility": "irreversible"}}
    headers = {"Authorization": f"Bearer {tenant.admin_key}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{service.port}", headers=headers, trust_env=False, timeout=START_SECONDS) as client:
        for name, definition in tools.items():
            client.put(f"/v1/tools/{name}", json=definition).raise_for_status()


def metered(meters: Mapping[str, cpu.Meter], measure: Callable[[], Mapping[str, float]]) -> Reading:
    """Take one reading: `measure` says how many units there were in how many seconds."""
    before = cpu.used(meters)
    measured = measure()
    return Reading(units=int(measured["units"]), seconds=measured["seconds"], cpu_seconds=cpu.since(meters, before))


def alternate(rounds: int, sides: Mapping[str, Callable[[], Reading]]) -> dict[str, list[Reading]]:
    """Measure the sides in turn, A B A B, so that what the machine does meanwhile meets all of them."""
    readings: dict[str, list[Reading]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, measure in sides.items():
            readings[side].append(measure())
    return readings


@contextmanager
def open_stage(options: Options, directory: Path, comparison: Comparison) -> Iterator[Stage]:
    """Run a Postgres under `directory` until the end of the block."""
    with embedded_postgres(directory / "postgres") as cluster_url:
        yield Stage(options=options, directory=directory, cluster_url=cluster_url, comparison=comparison)


async def _execute(url: str, sql: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


async def _value(url: str, sql: str) -> object:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(sql)
    finally:
        await connection.close()
