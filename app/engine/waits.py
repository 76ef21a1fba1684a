"""Callers that wait for a session to come to rest. Must not poll the database for each of them: notifications wake them."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

from app.domain.model import OrgName, SessionId
from app.engine.clock import Clock
from app.storage.database import StorageUnavailable

Seen = TypeVar("Seen")

# When a waiter looks by itself; then after twice as long each time. A lost notification costs as long again as was waited, and a thousand
# who wait for an hour's work cost the database next to nothing.
LOOK_SECONDS = 1.0


@dataclass(slots=True, kw_only=True)
class Waits:
    """Wakes those who wait for one session when it comes to rest, a question of it is answered, or an action of it ends."""

    clock: Clock
    _is_closing: bool = False
    _waiting: defaultdict[str, set[asyncio.Event]] = field(default_factory=lambda: defaultdict(set))

    def moved(self, payload: str) -> None:
        """Take a notification: that has come about for `<org>/<session_id>`; empty: it may have for any."""
        events = self._waiting.get(payload, ()) if payload else chain.from_iterable(self._waiting.values())
        for event in events:
            event.set()

    def close(self) -> None:
        """Let everybody go on with what they see now: the process is stopping."""
        self._is_closing = True
        self.moved("")

    @contextmanager
    def watch(self, org: OrgName, session_id: SessionId) -> Iterator["Watch"]:
        """Notice every move of a session from now on: what is done meanwhile cannot be missed."""
        name, moved = f"{org}/{session_id}", asyncio.Event()
        self._waiting[name].add(moved)
        try:
            yield Watch(self, moved)
        finally:
            self._waiting[name].discard(moved)
            if not self._waiting[name]:
                del self._waiting[name]

    async def until(
        self, org: OrgName, session_id: SessionId, look: Callable[[], Awaitable[Seen]], is_enough: Callable[[Seen], bool], seconds: float
    ) -> Seen:
        """Look until what is seen is enough, or `seconds` are over; return what was seen last. Holds no connection while waiting."""
        with self.watch(org, session_id) as watch:
            return await watch.until(await look(), look, is_enough, seconds)

    @property
    def is_closing(self) -> bool:
        """Tell whether nobody may be kept waiting any more."""
        return self._is_closing


@dataclass(frozen=True, slots=True)
class Watch:
    """One caller's eye on one session."""

    waits: Waits
    moved: asyncio.Event

    async def until(self, seen: Seen, look: Callable[[], Awaitable[Seen]], is_enough: Callable[[Seen], bool], seconds: float) -> Seen:
        """Look again whenever the session has moved, until what is seen is enough, or `seconds` are over; return what was seen last."""
        ends_at, patience = self.waits.clock.monotonic() + seconds, LOOK_SECONDS
        while not (is_enough(seen) or self.waits.is_closing) and (left := ends_at - self.waits.clock.monotonic()) > 0:
            await _wait(self.moved, min(left, patience))
            patience *= 2
            self.moved.clear()
            with suppress(StorageUnavailable):  # nothing was seen: that is no reason to wait no longer
                seen = await look()
        return seen


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
