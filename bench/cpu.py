"""CPU time and memory of processes, from /proc. Must not guess: elsewhere than on Linux it says that it does not know."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

IS_KNOWN = sys.platform == "linux"
TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Meter = Callable[[], float]
"""Tells the CPU seconds that something has used so far."""


def seconds_of(pids: Sequence[int]) -> float:
    """Return the CPU seconds of processes, of their living children and of those that they have buried; 0 of one that is gone."""
    return sum(sum(_ticks(pid)) + sum(sum(_ticks(child)[:2]) for child in _children(pid)) for pid in pids) / TICKS


def resident_bytes(pid: int) -> int:
    """Return how much memory a process and its children hold."""
    return sum(_resident(each) for each in (pid, *_children(pid)))


def used(meters: Mapping[str, Meter]) -> dict[str, float]:
    """Read every meter; empty where nothing can be known."""
    return {part: meter() for part, meter in meters.items()} if IS_KNOWN else {}


def since(meters: Mapping[str, Meter], before: Mapping[str, float]) -> dict[str, float]:
    """Return what each part has used since `before`."""
    return {part: now - before[part] for part, now in used(meters).items()}


def _ticks(pid: int) -> list[int]:
    """Return utime, stime, cutime and cstime of /proc/PID/stat; the name before them may hold anything, parentheses included."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return [0, 0, 0, 0]
    return [int(word) for word in text.rpartition(")")[2].split()[11:15]]


def _children(pid: int) -> list[int]:
    """Return the children of every thread of a process."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, listed.read_text(encoding="ascii").split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES
    except (FileNotFoundError, ProcessLookupError):
        return 0
