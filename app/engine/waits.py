"""Callers that wait for a session to come to rest. Must not poll the database for each of them: notifications wake them."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

from app.domain.model import OrgName, SessionId
from app.engine.clock import Clock

Seen = TypeVar("Seen")

LOOK_SECONDS = 1.0  # how often a waiter looks by itself: what a lost notification may cost


@dataclass(slots=True, kw_only=True)
class Waits:
    """Wakes those who wait for one session whenever its state has moved."""

    clock: Clock
    _is_closing: bool = False
    _waiting: defaultdict[str, set[asyncio.Event]] = field(default_factory=lambda: defaultdict(set))

    def moved(self, payload: str) -> None:
        """Take a notification: `<org>/<session_id>` has moved; empty: any may have."""
        events = self._waiting.get(payload, ()) if payload else chain.from_iterable(self._waiting.values())
        for event in events:
            event.set()

    def close(self) -> None:
        """Let everybody go on with what they see now: the process is stopping."""
        self._is_closing = True
        self.moved("")

    async def until(
        self, org: OrgName, session_id: SessionId, look: Callable[[], Awaitable[Seen]], is_enough: Callable[[Seen], bool], seconds: float
    ) -> Seen:
        """Look until what is seen is enough, or `seconds` are over; return what was seen last. Holds no connection while waiting."""
        name = f"{org}/{session_id}"
        moved = asyncio.Event()
        self._waiting[name].add(moved)
        ends_at = self.clock.monotonic() + seconds
        try:
            seen = await look()
            while not (is_enough(seen) or self._is_closing) and (left := ends_at - self.clock.monotonic()) > 0:
                await _wait(moved, min(left, LOOK_SECONDS))
                moved.clear()
                seen = await look()
            return seen
        finally:
            self._waiting[name].discard(moved)
            if not self._waiting[name]:
                del self._waiting[name]


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
