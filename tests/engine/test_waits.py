"""Waiting for a session: who is woken, and how often anybody looks by themselves. Must not wait in real time."""

import asyncio
from dataclasses import dataclass, field

import pytest

from app.domain.model import OrgName, SessionId
from app.engine import waits
from app.engine.clock import SystemClock
from app.engine.waits import Waits
from app.storage.database import StorageUnavailable

ORG, SESSION = OrgName("acme"), SessionId("s")


@dataclass(slots=True)
class PassingClock(SystemClock):
    """A clock that stands still but for what is waited."""

    seconds: float = 0.0
    looks: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        """Return what was waited so far."""
        return self.seconds

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Let the time pass, unless something has happened."""
        if not event.is_set():
            self.seconds += seconds

    async def look(self) -> int:
        """Note when it was looked, and return how often."""
        self.looks.append(self.seconds)
        return len(self.looks)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> PassingClock:
    """Let nobody wait in real time."""
    passing = PassingClock()
    monkeypatch.setattr(waits, "_wait", passing.wait)
    return passing


async def test_waiter_looks_less_and_less_often_when_nothing_is_heard(clock: PassingClock) -> None:
    """After a second, then after twice as long each time, and at the end."""
    seen = await Waits(clock=clock).until(ORG, SESSION, clock.look, lambda _: False, 55)
    assert (clock.looks, seen) == ([0, 1, 3, 7, 15, 31, 55], 7)


async def test_waiter_waits_on_when_it_cannot_look(clock: PassingClock) -> None:
    """A database that is away for a moment ends nobody's wait, and what was seen before stands."""

    async def look() -> int:
        if await clock.look() in {2, 3}:
            raise StorageUnavailable("storage_unavailable", "away")
        return len(clock.looks)

    assert await Waits(clock=clock).until(ORG, SESSION, look, lambda seen: seen > 1, 55) == 4
    assert clock.looks == [0, 1, 3, 7]
    clock.looks.clear()
    assert await Waits(clock=clock).until(ORG, SESSION, look, lambda seen: seen > 3, 2) == 1


async def test_waiter_looks_at_once_when_told(clock: PassingClock) -> None:
    """What is told of another session, or of another org's, is nothing to it; an empty message is for all."""
    waiting = Waits(clock=clock)
    for payload, looks in (("acme/s", [0, 0]), ("", [0, 0]), ("acme/other", [0, 1]), ("beta/s", [0, 1])):
        clock.seconds, clock.looks = 0.0, []
        with waiting.watch(ORG, SESSION) as watch:
            waiting.moved(payload)
            await watch.until(await clock.look(), clock.look, lambda seen: seen == 2, 55)
        assert clock.looks == looks, payload
