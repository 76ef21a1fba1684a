"""Stay subscribed to the database's notifications across its outages. Must not act on one: callbacks are handed in."""

from collections.abc import Callable, Mapping

import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from app.engine.clock import Clock
from app.storage.database import StorageUnavailable, listen

MAX_RECONNECT_SECONDS = 5.0  # the poll tick covers for what is missed meanwhile

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


async def keep_listening(dsn: str, callbacks: Mapping[str, Callable[[str], None]], clock: Clock) -> None:
    """Listen until cancelled; a lost connection is made again, with growing, jittered pauses. Every callback is called after each start."""
    while True:
        async for trial in AsyncRetrying(
            retry=retry_if_exception_type(StorageUnavailable),
            wait=wait_random_exponential(multiplier=0.1, max=MAX_RECONNECT_SECONDS),
            sleep=clock.sleep,
        ):
            with trial:
                await _listen_once(dsn, callbacks)
        _log.warning("storage_unavailable", where="listen")
        await clock.sleep(0.1)


async def _listen_once(dsn: str, callbacks: Mapping[str, Callable[[str], None]]) -> None:
    async with listen(dsn, callbacks) as gone:
        for callback in callbacks.values():
            callback("")  # whatever happened before is told to nobody
        await gone.wait()
