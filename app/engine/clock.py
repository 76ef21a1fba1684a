"""In-process time behind a protocol, so that tests can hold it. Must not be used for anything persisted: that is the database's time."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock and the only way to sleep."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary point; never runs backwards."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task for `seconds`."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Suspend with `asyncio.sleep`."""
        await asyncio.sleep(seconds)
