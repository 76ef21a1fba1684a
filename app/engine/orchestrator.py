"""The loop that finds due calls and keeps a bounded number of them going, and stops cleanly. Must not know what a call is about."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import structlog

from app.engine.clock import Clock
from app.engine.unwind import Holding, LeaseLost, Unwind
from app.storage import calls
from app.storage.calls import Claim
from app.storage.database import Database, StorageUnavailable
from app.telemetry import Telemetry

STALE_AFTER_TURNS = 5
STALE_AFTER_SECONDS = 10.0  # a claim may wait this long for a database that is coming back
RENEWALS_PER_LEASE = 3  # two renewals may be lost before the lease is

_log = structlog.stdlib.get_logger("countermand")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much goes on at once in this process, and how long the end of it may take (seconds)."""

    max_calls: int
    max_calls_per_destination: int
    poll_seconds: float
    grace_seconds: float


@dataclass(slots=True, kw_only=True)
class Orchestrator:
    """Claims what is due, runs it, renews its leases. `wake()` from anywhere in the loop's thread; `run()` once; `stop()` to end it."""

    database: Database
    unwind: Unwind
    clock: Clock
    limits: Limits
    telemetry: Telemetry
    _running: dict[asyncio.Task[None], Holding] = field(default_factory=dict)
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
            renewing = group.create_task(self._renew_leases())
            while not self._stopping.is_set():
                self._wake.clear()
                await self._turn(group)
                self._last_turn_at = self.clock.monotonic()
                await self._pause()
            await self._drain()
            renewing.cancel()

    async def _turn(self, group: asyncio.TaskGroup) -> None:
        free = self.limits.max_calls - len(self._running)
        if free <= 0:
            return
        in_flight = self._in_flight()
        saturated = [destination for destination, count in in_flight.items() if count >= self.limits.max_calls_per_destination]
        try:
            async with self.database.dispatch() as connection:
                claimed = await calls.claim(connection, self.unwind.lease, free, saturated)
            surplus = []
            for claim in claimed:
                is_full = in_flight[claim.destination] >= self.limits.max_calls_per_destination
                if is_full or self._stopping.is_set():  # the stop may have come while the claim was under way
                    surplus.append(claim)
                    continue
                in_flight[claim.destination] += 1
                self._start(group, claim)
            if surplus:
                async with self.database.dispatch() as connection:
                    await calls.release(connection, surplus)
        except StorageUnavailable as error:
            _log.warning("storage_unavailable", where="claim", cause=error.cause)

    def _in_flight(self) -> Counter[str]:
        """Count the calls that are under way, or about to be, per destination."""
        places = [holding.claim.destination for holding in self._running.values()]
        return Counter([*places, *(holding.reserved for holding in self._running.values() if holding.reserved is not None)])

    def _has_room(self, destination: str) -> bool:
        return self._in_flight()[destination] < self.limits.max_calls_per_destination

    def _start(self, group: asyncio.TaskGroup, claim: Claim) -> None:
        holding = Holding(claim=claim, has_room=self._has_room)
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
        except Exception:  # noqa: BLE001 - the loop's edge
            # One call that cannot be worked on must not take the others along; its lease runs out by itself.
            _log.exception("call_crashed", **_names(holding.claim))

    def _tell_lost(self, claim: Claim) -> None:
        _log.warning("lease_lost", **_names(claim))
        self.telemetry.count_lease_lost()

    async def _give_back(self, holding: Holding) -> None:
        try:
            await self.unwind.give_back(holding.claim)
        except StorageUnavailable as error:
            _log.warning("storage_unavailable", where="give_back", cause=error.cause, **_names(holding.claim))

    async def _pause(self) -> None:
        """Sleep until woken, or until the next tick."""
        async with asyncio.TaskGroup() as group:
            tick = group.create_task(self.clock.sleep(self.limits.poll_seconds))
            woken = group.create_task(self._wake.wait())
            await asyncio.wait({tick, woken}, return_when=asyncio.FIRST_COMPLETED)
            tick.cancel()
            woken.cancel()

    async def _renew_leases(self) -> None:
        while True:
            await self.clock.sleep(self.unwind.lease.seconds / RENEWALS_PER_LEASE)
            held = {task: holding.claim for task, holding in self._running.items()}
            if not held:
                continue
            try:
                async with self.database.dispatch() as connection:
                    kept = await calls.renew(connection, list(held.values()), self.unwind.lease.seconds)
            except StorageUnavailable as error:
                _log.warning("storage_unavailable", where="renew", cause=error.cause)
                continue
            for task, claim in held.items():
                holding = self._running.get(task)
                if holding is not None and holding.claim == claim and claim.call_id not in kept:
                    self._tell_lost(claim)
                    task.cancel()

    async def _drain(self) -> None:
        """Wait for attempts in flight, then cut off and hand back what is left: its attempts count as interrupted."""
        if not self._running:
            return
        _, late = await asyncio.wait(set(self._running), timeout=self.limits.grace_seconds)
        if not late:
            return
        claims = [self._running[task].claim for task in late]
        for task in late:
            task.cancel()
        await asyncio.wait(late)
        try:
            async with self.database.dispatch() as connection:
                await calls.release(connection, claims)
        except StorageUnavailable as error:
            _log.warning("storage_unavailable", where="hand_back", cause=error.cause)


def _names(claim: Claim) -> dict[str, str]:
    return {"org": claim.org, "session_id": claim.session_id, "call_id": str(claim.call_id)}
