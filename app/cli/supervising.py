"""Keep a number of workers running, each forked from this process. Must not serve, connect to a database, or know what a worker does.

A pipe ties them: no one ever writes to it, and a worker stops when its other end is closed. That end is this process's alone, so the
kernel closes it when this process is killed. Signals are not passed on: who sends them to a whole group would be heard twice.
"""

import mmap
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from time import monotonic

import structlog

from app.cli.manners import SetupError

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
CLEAN_ENDS = frozenset({0, -signal.SIGTERM})  # the latter when it was told to stop before it could listen to that
# Until a worker that died is started anew: doubled each time, from the first to the longest, until one has lived for a while.
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 10.0
LONG_LIFE_SECONDS = 60.0

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """What a worker is given: its number from 0, and a descriptor that can be read once it has to stop."""

    number: int
    lifeline: int
    has_served: mmap.mmap

    def tell_serving(self) -> None:
        """Tell that this worker serves: what it was started with is good."""
        self.has_served[0] = 1


@dataclass(slots=True, kw_only=True)
class _Place:
    """A worker's place, which outlives it."""

    number: int
    process: ForkProcess | None = None
    started_at: float = 0.0
    due_at: float = 0.0
    deaths: int = 0


class Supervisor:
    """Runs `work` in so many processes; `let_go` gives up what only they may hold from when they stop, such as what they listen on."""

    def __init__(self, workers: int, work: Callable[[Post], None], let_go: Callable[[], None]) -> None:
        """Start nothing yet."""
        self._places = [_Place(number=number) for number in range(workers)]
        self._work = work
        self._let_go = let_go
        self._has_served = mmap.mmap(-1, 1)  # shared with whoever is forked
        self._lifeline, self._own_end = os.pipe()

    def run(self) -> bool:
        """Keep the workers running until a signal comes, and tell whether all ended cleanly; a second signal kills them.

        Raises:
            SetupError: a worker has ended before any has served, so that the next one would do no better.
        """
        with _told() as told:
            try:
                while not _has_come(told, self._ends(), self._seconds_until_next()):
                    self._keep()
            finally:
                self._let_go()
                os.close(self._own_end)
                self._await_end(told)
        return all(place.process is None or place.process.exitcode in CLEAN_ENDS for place in self._places)

    def _keep(self) -> None:
        for place in self._places:
            if place.process is not None and place.process.exitcode is not None:
                self._bury(place, place.process)
            if place.process is None and place.due_at <= monotonic():
                self._start(place)

    def _start(self, place: _Place) -> None:
        place.process = multiprocessing.get_context("fork").Process(target=self._become, args=(place.number,))
        place.started_at = monotonic()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the worker no longer has our way to hear them
        try:
            place.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        _log.info("worker_started", number=place.number, pid=place.process.pid)

    def _become(self, number: int) -> None:
        """Be a worker from here on."""
        signal.set_wakeup_fd(-1)
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        os.close(self._own_end)
        self._work(Post(number=number, lifeline=self._lifeline, has_served=self._has_served))

    def _bury(self, place: _Place, process: ForkProcess) -> None:
        if not self._has_served[0]:
            raise SetupError(f"a worker ended with exit code {process.exitcode} before any could serve: the lines above say why")
        place.process = None
        place.deaths = 1 if monotonic() - place.started_at >= LONG_LIFE_SECONDS else place.deaths + 1
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(place.deaths - 1, 10))
        place.due_at = monotonic() + pause
        _log.error("worker_died", number=place.number, pid=process.pid, exit_code=process.exitcode, pause_seconds=pause)

    def _ends(self) -> list[int]:
        return [place.process.sentinel for place in self._places if place.process is not None]

    def _seconds_until_next(self) -> float | None:
        due = [place.due_at - monotonic() for place in self._places if place.process is None]
        return max(0.0, min(due)) if due else None

    def _await_end(self, told: int) -> None:
        processes = [place.process for place in self._places if place.process is not None]
        while running := [process for process in processes if process.exitcode is None]:
            if _has_come(told, [process.sentinel for process in running], None):
                for process in running:
                    process.kill()


def _has_come(told: int, ends: list[int], seconds: float | None) -> bool:
    """Wait for a signal until a process ends, or so many seconds are over, and tell whether one came."""
    if told not in wait([told, *ends], seconds):
        return False
    os.read(told, 64)
    return True


@contextmanager
def _told() -> Iterator[int]:
    """Yield a descriptor that can be read when a signal has come."""
    told, teller = os.pipe()
    os.set_blocking(teller, False)
    before = {each: signal.signal(each, lambda *_: None) for each in STOP_SIGNALS}
    signal.set_wakeup_fd(teller)
    try:
        yield told
    finally:
        signal.set_wakeup_fd(-1)
        for each, handler in before.items():
            signal.signal(each, handler)
        os.close(told)
        os.close(teller)
