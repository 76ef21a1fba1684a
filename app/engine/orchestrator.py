"""The loop that finds due calls and keeps a bounded number of them going, and stops cleanly. Must not know what a call is about."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog

from app.domain import circuits, turns
from app.domain.circuits import Change, Place
from app.domain.model import OrgName
from app.domain.turns import Bounds, Queue
from app.engine.clock import Clock
from app.engine.poison import Poison
from app.engine.schema import Schema
from app.engine.unwind import Holding, LeaseLost, Unwind
from app.storage import circuits as storage_circuits
from app.storage import claims
from app.storage.claims import Claim
from app.storage.database import Connection, Database, StorageUnavailable
from app.telemetry import Telemetry

STALE_AFTER_TURNS = 5
STALE_AFTER_SECONDS = 10.0  # a claim may wait this long for a database that is coming back
RENEWALS_PER_LEASE = 3  # two renewals may be lost before the lease is
PLACES_PER_LOOK: Final = 200  # some milliseconds of the database's time; where more have something due, the look goes on from there

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much goes on at once in this process, and how long the end of it may take (seconds)."""

    max_calls: int
    max_calls_per_destination: int
    max_calls_per_org: int
    poll_seconds: float
    grace_seconds: float


@dataclass(slots=True, kw_only=True)
class Orchestrator:
    """Claims what is due, runs it, renews its leases. `wake()` from anywhere in the loop's thread; `run()` once; `stop()` to end it."""

    database: Database
    unwind: Unwind
    poison: Poison
    schema: Schema
    clock: Clock
    limits: Limits
    telemetry: Telemetry
    _running: dict[asyncio.Task[None], Holding] = field(default_factory=dict)
    _coming: Counter[Place] = field(default_factory=Counter)  # what is being claimed: workers that move on meanwhile must know of it
    _looked_at: Place | None = None
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _last_turn_at: float = field(init=False)

    def __post_init__(self) -> None:
        """Count the time until the first turn from here."""
        self._last_turn_at = self.clock.monotonic()

    def is_turning(self) -> bool:
        """Tell whether the loop runs and has looked for due calls lately."""
        if self._stopping.is_set():
            return False
        return self.clock.monotonic() - self._last_turn_at < STALE_AFTER_TURNS * self.limits.poll_seconds + STALE_AFTER_SECONDS

    def wake(self, _payload: str = "") -> None:
        """Look for due calls now rather than at the next tick."""
        self._wake.set()

    def stop(self) -> None:
        """Claim nothing more; let attempts in flight end within the grace period, then hand everything back."""
        self._stopping.set()
        for holding in self._running.values():
            holding.is_stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Work until `stop()`; a database that is away is waited for."""
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(self._keep_house())
            writing = group.create_task(self.unwind.write_together())
            while not self._stopping.is_set():
                self._wake.clear()
                await self._turn(group)
                self._last_turn_at = self.clock.monotonic()
                await self._pause()
            await self._drain()
            keeping.cancel()
            writing.cancel()

    async def _turn(self, group: asyncio.TaskGroup) -> None:
        free = self.limits.max_calls - len(self._running)
        if free <= 0:
            return
        try:
            if not await self.schema.serves():
                return
            async with self.database.dispatch() as connection:
                claimed = await self._claim(connection, free)
            if self._stopping.is_set():  # the stop may have come while the claim was under way
                async with self.database.dispatch() as connection:
                    await claims.release(connection, claimed)
                return
            for claim in claimed:
                self._start(group, claim)
        except StorageUnavailable as error:
            _log.warning("storage_unavailable", where="claim", cause=error.cause)
        finally:
            self._coming.clear()

    async def _claim(self, connection: Connection, free: int) -> list[Claim]:
        """Claim up to `free` calls: some past their deadline, then what is due, place after place until there is enough of it."""
        claimed = await claims.claim_late(connection, self.unwind.lease, (free + 1) // 2)
        self._coming.update(claim.place for claim in claimed)
        while len(claimed) < free:
            queues = await claims.look(connection, self._looked_at, PLACES_PER_LOOK, min(free, self.limits.max_calls_per_destination))
            for queue in queues:
                self.unwind.circuits.look(queue.place, is_open=queue.is_open)
            claimed += await self._take(connection, queues, free - len(claimed))
            if len(queues) < PLACES_PER_LOOK:
                self._looked_at = None
                break
            self._looked_at = queues[-1].place
        return claimed

    async def _take(self, connection: Connection, queues: Sequence[Queue], free: int) -> list[Claim]:
        """Claim a fair share of what waits in these queues, and a probe of each open circuit that is due for one."""
        probed = [queue for queue in queues if queue.is_probe_due][:free]
        self._coming.update(queue.place for queue in probed)
        allotted = turns.allot(queues, self._in_flight(), self.unwind.circuits.limits(), self._bounds(free - len(probed)))
        self._coming.update(allotted)
        taken: list[Claim] = []
        if probed:
            seconds = [circuits.probe_seconds(queue.probes + 1, self.unwind.random_unit()) for queue in probed]
            taken += await claims.claim_probes(connection, self.unwind.lease, list(zip(probed, seconds, strict=True)))
        if allotted:
            taken += await claims.claim(connection, self.unwind.lease, allotted)
        return taken

    def _bounds(self, free: int) -> Bounds:
        return Bounds(free=free, per_destination=self.limits.max_calls_per_destination, per_org=self.limits.max_calls_per_org)

    def _in_flight(self) -> Counter[Place]:
        """Count the calls that are under way, or about to be, per place."""
        found = self._coming + Counter(holding.claim.place for holding in self._running.values())
        for holding in self._running.values():
            if holding.reserved is not None:
                found[Place(org=holding.claim.org, destination=holding.reserved)] += 1
        return found

    def _has_room(self, org: OrgName, destination: str) -> bool:
        place = Place(org=org, destination=destination)
        return turns.has_room(place, self._in_flight(), self.unwind.circuits.limits(), self._bounds(0))

    def _start(self, group: asyncio.TaskGroup, claim: Claim) -> None:
        holding = Holding(claim=claim, has_room=partial(self._has_room, claim.org))
        task = group.create_task(self._work(holding))
        self._running[task] = holding
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._running.pop(task, None)
        self._wake.set()

    async def _work(self, holding: Holding) -> None:
        try:
            await self.unwind.run(holding)
        except LeaseLost:
            self._tell_lost(holding.claim)
            await self._give_back(holding)
        except StorageUnavailable as error:
            _log.warning("storage_unavailable", where="call", cause=error.cause, **_names(holding.claim))
            await self._give_back(holding)
        except Exception as error:  # noqa: BLE001 - the loop's edge
            # One call that cannot be worked on must not take the others along.
            _log.exception("call_crashed", **_names(holding.claim))
            await self._count_crash(holding.claim, error)

    async def _count_crash(self, claim: Claim, error: Exception) -> None:
        try:
            await self.poison.count_crash(claim, error)
        except StorageUnavailable as away:
            _log.warning("storage_unavailable", where="count_crash", cause=away.cause, **_names(claim))
        except Exception:  # noqa: BLE001 - the loop's edge, still: the lease runs out by itself
            _log.exception("call_crashed", **_names(claim))

    def _tell_lost(self, claim: Claim) -> None:
        _log.warning("lease_lost", **_names(claim))
        self.telemetry.count_lease_lost()

    async def _give_back(self, holding: Holding) -> None:
        try:
            await self.unwind.give_back(holding.claim)
        except StorageUnavailable as error:
            _log.warning("storage_unavailable", where="give_back", cause=error.cause, **_names(holding.claim))

    async def _pause(self) -> None:
        """Sleep until woken, or until the next tick, which is jittered: replicas that started together do not step together."""
        seconds = self.limits.poll_seconds * (0.75 + self.unwind.random_unit() / 2)
        async with asyncio.TaskGroup() as group:
            tick = group.create_task(self.clock.sleep(seconds))
            woken = group.create_task(self._wake.wait())
            await asyncio.wait({tick, woken}, return_when=asyncio.FIRST_COMPLETED)
            tick.cancel()
            woken.cancel()

    async def _keep_house(self) -> None:
        """Renew the leases in time, and close circuits on which nothing waits."""
        while True:
            await self.clock.sleep(self.unwind.lease.seconds / RENEWALS_PER_LEASE)
            try:
                await self._renew_leases()
                await self.drop_idle_circuits()
            except StorageUnavailable as error:
                _log.warning("storage_unavailable", where="renew", cause=error.cause)

    async def _renew_leases(self) -> None:
        held = {task: holding.claim for task, holding in self._running.items()}
        if not held:
            return
        async with self.database.dispatch() as connection:
            kept = await claims.renew(connection, list(held.values()), self.unwind.lease.seconds)
        for task, claim in held.items():
            holding = self._running.get(task)
            if holding is not None and holding.claim == claim and claim not in kept:
                self._tell_lost(claim)
                task.cancel()

    async def drop_idle_circuits(self) -> None:
        """Close the circuits of destinations for which no call waits any more.

        Raises:
            StorageUnavailable: the database is away; they are closed another time.
        """
        async with self.database.dispatch() as connection:
            dropped = await storage_circuits.drop_idle(connection)
        for place in dropped:
            self.unwind.events.announce_circuit(place, Change.CLOSE)

    async def _drain(self) -> None:
        """Wait for attempts in flight, then cut off and hand back what is left: its attempts count as interrupted."""
        if not self._running:
            return
        _, late = await asyncio.wait(set(self._running), timeout=self.limits.grace_seconds)
        if not late:
            return
        cut_off = [self._running[task].claim for task in late]
        for task in late:
            task.cancel()
        await asyncio.wait(late)
        try:
            async with self.database.dispatch() as connection:
                await claims.release(connection, cut_off)
        except StorageUnavailable as error:
            _log.warning("storage_unavailable", where="hand_back", cause=error.cause)


def _names(claim: Claim) -> dict[str, str]:
    return {"org": claim.org, "session_id": claim.session_id, "call_id": str(claim.call_id)}
