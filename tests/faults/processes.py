"""The service as real processes that can be killed, stopped and continued. Must not know anything of what they do but their log."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Self

import httpx

from app.domain.model import Role
from app.engine.clock import SystemClock
from tests.factories import QUICK, Client, JsonObject, make_principal_key

REPOSITORY = Path(__file__).resolve().parent.parent.parent
# For a start, in seconds: two of CPU time for imports, on cores that other tests use as well.
START_SECONDS = 60.0
END_SECONDS = 30.0
PROBE_SECONDS = 0.02
LEASE_SECONDS = 1.0  # the shortest there may be: what a killed worker's call waits for
CRASHES = frozenset({"call_crashed", "request_crashed", "timeout_crashed"})
# Imports ahead, everything else when told to: so that a start again costs a tenth of a second, not two.
WARM = "import sys; from app.cli import main; sys.argv = ['countermand', *sys.argv[1:]]; sys.stdin.readline() or sys.exit(); main()"

Keys = Mapping[Role, str]


class ServiceProcess:
    """`python -m app serve` on a port of its own; killed at the end if it still runs, and when the test process dies.

    `settings` are those of app.settings by name, quick and permissive by default, with the shortest lease. With `is_warm` it imports when
    it is spawned and starts when `serve` is called.
    """

    def __init__(self, database_url: str, keys: Keys, directory: Path, *flags: str, is_warm: bool = False, **settings: object) -> None:
        """Keep the command; `async with` spawns it."""
        self.events: list[JsonObject] = []
        self.agent: Client
        self.operator: Client
        self.auditor: Client
        self.admin: Client
        self._keys = keys
        self._directory = directory
        self._is_warm = is_warm
        program = ["-c", WARM] if is_warm else ["-m", "app"]
        self._command = [*_ends_with_this_process(), sys.executable, *program, "serve", *flags]
        chosen = {**QUICK, "lease_seconds": LEASE_SECONDS, "port": 0, "database_url": database_url, **settings}
        self._settings = {f"COUNTERMAND_{name.upper()}": str(value) for name, value in chosen.items()}
        self._changed = asyncio.Condition()
        self._has_ended = False
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._clients: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> Self:
        """Spawn the process."""
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._command, cwd=self._directory, env=_environment(self._directory) | self._settings, stdin=pipe, stderr=pipe
        )
        self._reading = asyncio.create_task(self._read_log(self._process))
        return self

    async def __aexit__(self, *_error: object) -> None:
        """End what still runs, the hard way."""
        self.kill()
        assert self._process is not None
        assert self._reading is not None
        await self._process.wait()
        await self._reading
        for client in self._clients:
            await client.aclose()

    async def serve(self) -> Self:
        """Wait until the process answers requests, telling a warm one to start first."""
        assert self._process is not None
        assert self._process.stdin is not None
        if self._is_warm:
            self._process.stdin.write(b"\n")
        serving = await self.wait_for_event("serving", START_SECONDS)
        for role in Role:
            http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{serving['port']}", trust_env=False, timeout=END_SECONDS)
            self._clients.append(http)
            setattr(self, role.value, Client(http=http, key=self._keys[role]))
        return self

    @property
    def pid(self) -> int:
        """The number by which its leases and the kernel know it."""
        assert self._process is not None
        return self._process.pid

    @property
    def crashes(self) -> list[JsonObject]:
        """What it logged of its own faults."""
        return [event for event in self.events if event.get("event") in CRASHES]

    def kill(self) -> None:
        """Kill -9, at once."""
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
        assert self._process is not None
        async with asyncio.timeout(END_SECONDS):
            return await self._process.wait()

    async def wait_for_event(self, name: str, seconds: float = END_SECONDS) -> JsonObject:
        """Return the first event of that name in its log; fail at once when it ends without one."""
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(lambda: self._find(name) is not None or self._has_ended)
        found = self._find(name)
        assert found is not None, f"it ended without {name}: {self.events[-5:]}"
        return found

    async def wait_for_readiness(self, status: int) -> None:
        """Return once /readyz answers so; there is nothing to wait on, so it asks again and again, as any prober does."""
        async with asyncio.timeout(END_SECONDS):
            while (await self.agent.request("GET", "/readyz")).status_code != status:
                await SystemClock().sleep(PROBE_SECONDS)

    def _find(self, name: str) -> JsonObject | None:
        return next((event for event in self.events if event.get("event") == name), None)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while line := await process.stderr.readline():
            try:
                event = json.loads(line)
            except ValueError:
                event = {"text": line.decode("utf-8", "replace")}
            self.events.append(event)
            await self._announce()
        self._has_ended = True
        await self._announce()

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class Relay:
    """Service processes one after another on one database: when the current one is killed, the next starts, its imports done before."""

    def __init__(self, spawn: Callable[[], Awaitable[ServiceProcess]]) -> None:
        """Keep how a warm process is spawned; `begin` starts the first."""
        self.current: ServiceProcess
        self.all: list[ServiceProcess] = []
        self._spawn = spawn
        self._next: ServiceProcess

    async def begin(self) -> None:
        """Start the first process, and warm up the second."""
        self._next = await self._spawn()
        await self.go_on()

    async def go_on(self) -> ServiceProcess:
        """Start the next process, however the current one ended, and warm up the one after it."""
        self.current = await self._next.serve()
        self.all.append(self.current)
        self._next = await self._spawn()
        return self.current


async def make_keys(database_url: str) -> Keys:
    """Make one key per role for the processes of one database."""
    return {role: await make_principal_key(database_url, role, f"{role}-1") for role in Role}


def _ends_with_this_process() -> list[str]:
    """Return a prefix that has the kernel kill the command when this process is gone; nothing where there is no such thing."""
    setpriv = shutil.which("setpriv") if sys.platform == "linux" else None
    return [] if setpriv is None else [setpriv, "--pdeathsig", "KILL"]


def _environment(directory: Path) -> dict[str, str]:
    """Keep this process's variables but settings of the service; where bytecode may not lie beside the sources, it goes to the side."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COUNTERMAND_")}
    if kept.pop("PYTHONDONTWRITEBYTECODE", None):
        kept.setdefault("PYTHONPYCACHEPREFIX", str(directory.parent / "bytecode"))
    return kept | {"PYTHONPATH": str(REPOSITORY)}
