"""Two replicas behind proxies on one Postgres, and an endpoint, all of which can be broken and mended. Must not know what clients do."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import asyncpg

from app.engine.clock import SystemClock
from app.storage.database import UNREACHABLE_ERRORS
from tests.conftest import execute, migrate_into, with_database
from tests.factories import owner_connection
from tests.faults.endpoint import EndpointProcess
from tests.faults.evidence import Inflicted
from tests.faults.gates import wait_until
from tests.faults.nursery import Nursery
from tests.faults.plans import ATTEMPT_SECONDS, Fault, FaultPlan
from tests.faults.processes import Cluster, ServiceProcess
from tests.faults.proxy import Cut, Proxy, open_proxy

REPLICAS = 2
TEMPLATE = "fault_template"
OUTAGE_SECONDS = 0.3  # how long Postgres stays away
DELAY_SECONDS = 0.002  # of one message, where every message is delayed
AIM_SECONDS = 5.0  # how long a fault waits for something to hit
STOP_SECONDS = 15.0  # a stop that takes longer is a fault of ours
SETTINGS = {
    "sweep_seconds": 0.2,
    "grace_seconds": 2.0,
    "database_wait_seconds": 1.0,
    "attempt_timeout_ms": round(ATTEMPT_SECONDS * 1_000),
}
AIMED = frozenset({Fault.KILL, Fault.STOP, Fault.FREEZE})
COMMIT_CUTS = {
    Fault.KILL_BEFORE_COMMIT: Cut.BEFORE,
    Fault.KILL_AFTER_COMMIT: Cut.AFTER,
    Fault.CUT_BEFORE_COMMIT: Cut.BEFORE,
    Fault.CUT_AFTER_COMMIT: Cut.AFTER,
}


@dataclass(slots=True, kw_only=True, eq=False)
class Replica:
    """One place where the service runs, process after process; `turn` lets one fault at a time change that."""

    proxy: Proxy
    start: Callable[[Proxy], ServiceProcess]
    process: ServiceProcess
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def begin_again(self) -> None:
        """Start the next process; however the last one ended, it is buried."""
        await self.process.__aexit__()
        process = self.start(self.proxy)
        await process.__aenter__()
        self.process = process  # until here its callers find nobody where the last one was


@dataclass(slots=True, kw_only=True)
class World:
    """Everything that a run happens in."""

    cluster: Cluster
    endpoint: EndpointProcess
    database_url: str
    replicas: list[Replica]
    problems: list[str] = field(default_factory=list)
    inflicted: list[Inflicted] = field(default_factory=list)
    _postgres: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def base_urls(self) -> list[str]:
        """Where the replicas answer, or did before they ended."""
        return [replica.process.base_url for replica in self.replicas]

    async def inflict(self, fault: FaultPlan) -> None:
        """Break something, and mend what does not mend itself."""
        replica = self.replicas[fault.replica]
        if fault.is_aimed and fault.kind in AIMED:
            replica = await self._aim() or replica
        match fault.kind:
            case Fault.POSTGRES:
                await self._restart_postgres()
            case Fault.RESET:
                self._note(fault.kind, replica)
                replica.proxy.reset()
            case Fault.STALL:
                self._note(fault.kind, replica)
                replica.proxy.stall()
                await SystemClock().sleep(fault.seconds)
                replica.proxy.flow()
            case Fault.SLOW:
                self._note(fault.kind, replica)
                replica.proxy.delay_seconds = DELAY_SECONDS
                await SystemClock().sleep(fault.seconds)
                replica.proxy.delay_seconds = 0.0
            case Fault.CUT_BEFORE_COMMIT | Fault.CUT_AFTER_COMMIT:
                replica.proxy.arm(COMMIT_CUTS[fault.kind], fault.count, begun=fault.begun, first=lambda: self._note(fault.kind, replica))
            case _:
                async with replica.turn:
                    await self._stop_and_start(replica, fault)

    async def mend(self) -> None:
        """Let everything run that can, and wait until it does."""
        for replica in self.replicas:
            replica.proxy.disarm()
            replica.proxy.flow()
            replica.proxy.delay_seconds = 0.0
        async with self._postgres:
            for replica in self.replicas:
                async with replica.turn:
                    replica.process.thaw()
                    if not replica.process.is_running():
                        self.problems.append(f"a process ended by itself: {replica.process.events[-3:]}")
                        await replica.begin_again()

    def take_problems(self) -> list[str]:
        """Return what the service logged of its own faults since it was asked last, and what went wrong with processes."""
        found, self.problems = self.problems, []
        for replica in self.replicas:
            found += [str(crash) for crash in replica.process.crashes]
            replica.process.events.clear()
        return found

    def _note(self, kind: Fault, replica: Replica | None = None) -> None:
        number = None if replica is None else self.replicas.index(replica)
        self.inflicted.append(Inflicted(kind=kind.value, at=monotonic(), replica=number))

    async def _restart_postgres(self) -> None:
        async with self._postgres:
            self._note(Fault.POSTGRES)
            self.cluster.crash()
            await SystemClock().sleep(OUTAGE_SECONDS)
            self.cluster.stop()
            self.cluster.start()

    async def _aim(self) -> Replica | None:
        """Wait until an undo is under way somewhere, and return where; None when there is none for long."""
        under_way = "FROM outgoing_calls WHERE is_attempt_open AND kind = 'undo' AND leased_until > clock_timestamp()"
        with suppress(TimeoutError, *UNREACHABLE_ERRORS, asyncpg.PostgresError):
            async with asyncio.timeout(AIM_SECONDS), owner_connection(self.database_url) as connection:
                await wait_until(connection, f"EXISTS (SELECT {under_way})")
                worker = str(await connection.fetchval(f"SELECT leased_by {under_way} LIMIT 1"))
                return next((replica for replica in self.replicas if f":{replica.process.pid}:" in worker), None)
        return None

    async def _stop_and_start(self, replica: Replica, fault: FaultPlan) -> None:
        process = replica.process
        if not process.is_running():
            return
        match fault.kind:
            case Fault.FREEZE:
                self._note(fault.kind, replica)
                process.freeze()
                await SystemClock().sleep(fault.seconds)
                process.thaw()
                return
            case Fault.STOP:
                self._note(fault.kind, replica)
                process.terminate()
            case Fault.KILL:
                self._kill(replica, fault.kind)
            case _:
                replica.proxy.arm(COMMIT_CUTS[fault.kind], begun=fault.begun, first=lambda: self._kill(replica, fault.kind))
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS if fault.kind is Fault.STOP else fault.seconds):
                code = await process.exit_code()
                if fault.kind is Fault.STOP and code != 0:
                    self.problems.append(f"exit code {code} after SIGTERM: {process.events[-3:]}")
        replica.proxy.disarm()
        if process.is_running() and fault.kind is Fault.STOP:
            self.problems.append(f"still there {STOP_SECONDS} s after SIGTERM: {process.events[-3:]}")
        elif process.is_running() and not process.was_killed:
            return  # no COMMIT came by in that time
        self.problems += [str(crash) for crash in process.crashes]
        await replica.begin_again()

    def _kill(self, replica: Replica, kind: Fault) -> None:
        if replica.process.is_running():
            self._note(kind, replica)
            replica.process.kill()


@dataclass(slots=True, kw_only=True)
class Grounds:
    """What worlds are made on: a Postgres, an endpoint and the service's imports are started once for all of them."""

    cluster: Cluster
    endpoint: EndpointProcess
    nursery: Nursery
    directory: Path
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def prepare(self) -> None:
        """Make the database that every world's is a copy of."""
        await asyncio.to_thread(migrate_into, self.cluster.url, TEMPLATE)

    @asynccontextmanager
    async def open_world(self) -> AsyncIterator[World]:
        """Run two replicas on a fresh database until the end of the block."""
        name = f"world_{next(self._numbers)}"
        await execute(self.cluster.url, f'CREATE DATABASE "{name}" TEMPLATE "{TEMPLATE}"')
        database_url = with_database(self.cluster.url, name)

        def start(proxy: Proxy) -> ServiceProcess:
            return ServiceProcess(self.nursery, proxy.url, {}, self.directory, **SETTINGS)

        async with AsyncExitStack() as stack:
            replicas = []
            for _ in range(REPLICAS):
                proxy = await stack.enter_async_context(open_proxy(database_url))
                process = start(proxy)
                await process.__aenter__()
                replica = Replica(proxy=proxy, start=start, process=process)
                stack.push_async_callback(_bury, replica)
                replicas.append(replica)
            yield World(cluster=self.cluster, endpoint=self.endpoint, database_url=database_url, replicas=replicas)
        await execute(self.cluster.url, f'DROP DATABASE "{name}" WITH (FORCE)')


async def _bury(replica: Replica) -> None:
    await replica.process.__aexit__()
