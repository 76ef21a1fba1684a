"""The service and its database as real processes that can be killed, stopped and continued. Must not know anything of what they do."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import httpx

from app.cli.embedded_postgres import embedded_postgres
from app.domain.model import Role
from app.engine.clock import SystemClock
from tests.factories import ORG, QUICK, Client, JsonObject, make_principal_key
from tests.faults.nursery import Nursery

# For a start, in seconds: the nursery's imports may come before it, on cores that other tests use as well.
START_SECONDS = 60.0
END_SECONDS = 30.0
PROBE_SECONDS = 0.02
UNHURRIED_MS = 30_000  # for an attempt that is held and must not be over before a process has ended, however busy the machine
LEASE_SECONDS = 1.0  # the shortest there may be: what a killed worker's call waits for
CRASHES = frozenset({"call_crashed", "request_crashed", "timeout_crashed", "engine_died"})

Keys = Mapping[Role, str]


class ServiceProcess:
    """`countermand serve` on a port of its own; killed at the end if it still runs, and when the test process dies.

    `settings` are those of app.settings by name, quick and permissive by default, with the shortest lease.
    """

    def __init__(self, nursery: Nursery, database_url: str, keys: Keys, directory: Path, *flags: str, **settings: object) -> None:
        """Keep the command; `async with` starts it."""
        self.events: list[JsonObject] = []
        self.pid = 0
        self.base_url = ""
        self.was_killed = False
        self.agent: Client
        self.operator: Client
        self.auditor: Client
        self.admin: Client
        self._nursery = nursery
        self._keys = keys
        self._directory = directory
        self._arguments = ["serve", *flags]
        chosen = {**QUICK, "lease_seconds": LEASE_SECONDS, "port": 0, "database_url": database_url, **settings}
        self._settings = {f"COUNTERMAND_{name.upper()}": str(value) for name, value in chosen.items()}
        self._changed = asyncio.Condition()
        self._exit_code: int | None = None
        self._reading: asyncio.Task[None] | None = None
        self._clients: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> Self:
        """Start the process, and return once it answers requests."""
        log, far_end = os.pipe()
        self.pid = self._nursery.fork(self._arguments, self._settings, self._directory, far_end)
        os.close(far_end)
        self._reading = asyncio.create_task(self._read_log(log))
        try:
            serving = await self.wait_for_event("serving", START_SECONDS)
        except BaseException:
            await self.__aexit__()
            raise
        self.base_url = f"http://127.0.0.1:{serving['port']}"
        for role, key in self._keys.items():
            http = httpx.AsyncClient(base_url=self.base_url, trust_env=False, timeout=END_SECONDS)
            self._clients.append(http)
            setattr(self, role.value, Client(http=http, key=key))
        return self

    async def __aexit__(self, *_error: object) -> None:
        """End what still runs, the hard way."""
        self.kill()
        await self.exit_code()
        assert self._reading is not None
        await self._reading
        for client in self._clients:
            await client.aclose()

    @property
    def crashes(self) -> list[JsonObject]:
        """What it logged of its own faults."""
        return [event for event in self.events if event.get("event") in CRASHES or "Traceback" in event.get("text", "")]

    def is_running(self) -> bool:
        """Tell whether it has not ended yet, as far as is known here."""
        return self._exit_code is None

    def kill(self) -> None:
        """Kill -9, at once."""
        self.was_killed = True
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to stop, as a deployment does."""
        self._signal(signal.SIGTERM)

    def freeze(self) -> None:
        """Stop it in the middle of whatever it does, as a long pause of the machine would."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen one go on."""
        self._signal(signal.SIGCONT)

    async def exit_code(self) -> int:
        """Return its exit code (minus the signal that ended it) once it has ended."""
        async with asyncio.timeout(END_SECONDS), self._changed:
            await self._changed.wait_for(lambda: self._exit_code is not None)
        assert self._exit_code is not None
        return self._exit_code

    async def wait_for_event(self, name: str, seconds: float = END_SECONDS) -> JsonObject:
        """Return the first event of that name in its log; fail at once when it ends without one."""
        return (await self.wait_for_events(name, 1, seconds))[0]

    async def wait_for_events(self, name: str, count: int, seconds: float = END_SECONDS) -> list[JsonObject]:
        """Return the events of that name in its log once there are so many; fail at once when it ends without them."""
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(lambda: len(self._all(name)) >= count or self._exit_code is not None)
        found = self._all(name)
        assert len(found) >= count, f"it ended without {name}: {self.events[-5:]}"
        return found

    async def wait_for_readiness(self, status: int) -> None:
        """Return once /readyz answers so; there is nothing to wait on, so it asks again and again, as any prober does."""
        async with asyncio.timeout(END_SECONDS):
            while (await self.agent.request("GET", "/readyz")).status_code != status:
                await SystemClock().sleep(PROBE_SECONDS)

    def _all(self, name: str) -> list[JsonObject]:
        return [event for event in self.events if event.get("event") == name]

    def _signal(self, number: signal.Signals) -> None:
        if self._exit_code is None:  # once it is buried, its number may be somebody else's
            os.kill(self.pid, number)

    async def _read_log(self, log: int) -> None:
        """Take its log in until it ends, which is when nobody can write there any more, and bury it."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(log, "rb")
        )
        while line := await reader.readline():
            try:
                event = json.loads(line)
            except ValueError:
                event = {"text": line.decode("utf-8", "replace")}
            self.events.append(event)
            await self._announce()
        transport.close()
        self._exit_code = self._nursery.exit_code(self.pid)
        await self._announce()

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class Relay:
    """Service processes one after another on one database: whatever became of the current one, `go_on` starts the next."""

    def __init__(self, start: Callable[[], Awaitable[ServiceProcess]]) -> None:
        """Keep how a process is started."""
        self.current: ServiceProcess
        self.all: list[ServiceProcess] = []
        self._start = start

    async def go_on(self) -> ServiceProcess:
        """Start the next process."""
        self.current = await self._start()
        self.all.append(self.current)
        return self.current


class Cluster:
    """A Postgres of one's own that can be killed and started again on its data."""

    def __init__(self, home: Path) -> None:
        """Keep where its data lies; `start` it."""
        named = os.environ.get("COUNTERMAND_TEST_POSTGRES_BIN_DIR")
        self._bin_dir = Path(named) if named else None
        self._home = home
        self._running = ExitStack()
        self.url = ""

    def start(self) -> str:
        """Start, recovering what a killed one left, and return the URL, always the same."""
        self.url = self._running.enter_context(embedded_postgres(self._home, bin_dir=self._bin_dir))
        return self.url

    def kill(self) -> None:
        """Kill -9 the postmaster, at once; its children find out by themselves."""
        self._signal(signal.SIGKILL)

    def crash(self) -> None:
        """Have every process of it quit at once, without a checkpoint (`pg_ctl stop -m immediate`)."""
        self._signal(signal.SIGQUIT)

    def _signal(self, number: signal.Signals) -> None:
        pid = (self._home / "cluster" / "postmaster.pid").read_text(encoding="utf-8").partition("\n")[0]
        os.kill(int(pid), number)

    def stop(self) -> None:
        """Take away what is left of it."""
        self._running.close()


@contextlib.contextmanager
def open_cluster(home: Path) -> Iterator[Cluster]:
    """Run a cluster until the end of the block."""
    cluster = Cluster(home)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


async def make_keys(database_url: str, org: str = ORG) -> Keys:
    """Make one key per role for the processes of one database."""
    return {role: await make_principal_key(database_url, role, f"{role}-1", org) for role in Role}
