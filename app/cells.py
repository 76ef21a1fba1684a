"""Numbers that each process of a service writes for itself and all of them can read. Must not know what is counted.

The memory is anonymous and shared by who forks from the process that made it; each process writes a share of its own. What a process
has written stays when it is killed, and the next one with its share goes on from there: a sum over the shares never goes backwards.
"""

import mmap
from collections.abc import Iterator
from typing import Final, Self, TypeAlias

Series: TypeAlias = tuple[str, ...]

# A record is a key with its length before it, and its numbers. Memory that nobody has written to costs nothing.
KEY_BYTES: Final = 128
NUMBERS: Final = 16  # a histogram's buckets and its sum
DOUBLE_BYTES: Final = 8  # written at once: a reader sees the number before or the one after
RECORD_BYTES: Final = KEY_BYTES + NUMBERS * DOUBLE_BYTES
RECORDS: Final = 1_024  # per process; a service has some 250 series
SHARE_BYTES: Final = RECORDS * RECORD_BYTES
SEPARATOR: Final = "\0"


class Cells:
    """One process's share of the memory, with a view of the others'."""

    def __init__(self, memory: mmap.mmap, share: int) -> None:
        """Take a share over, with what an earlier process has counted in it."""
        self._memory = memory
        self._doubles = memoryview(memory).cast("d")
        self._end = self._start = share * SHARE_BYTES
        self._mine: dict[Series, memoryview[float]] = {}
        for at, series in self._records(share):
            self._mine[series] = self._numbers(at)
            self._end = at + RECORD_BYTES

    @classmethod
    def alone(cls) -> Self:
        """Return the cells of a process that shares with nobody."""
        return cls(shared_memory(1), 0)

    def mine(self, series: Series) -> "memoryview[float]":
        """Return this process's numbers of a series, to be read and written; all 0 at first."""
        found = self._mine.get(series)
        return self._begin(series) if found is None else found

    def sums(self) -> dict[Series, list[float]]:
        """Return the numbers of every series, added up over all processes."""
        found: dict[Series, list[float]] = {}
        for share in range(len(self._memory) // SHARE_BYTES):
            for at, series in self._records(share):
                before = found.get(series, [0.0] * NUMBERS)
                found[series] = [one + other for one, other in zip(before, self._numbers(at), strict=True)]
        return found

    def _begin(self, series: Series) -> "memoryview[float]":
        key = SEPARATOR.join(series).encode("ascii")
        if len(key) >= KEY_BYTES or self._end == self._start + SHARE_BYTES:
            raise ValueError(f"no room for {series}")
        at, self._end = self._end, self._end + RECORD_BYTES
        self._memory[at + 1 : at + 1 + len(key)] = key
        self._memory[at] = len(key)  # last: a reader stops where there is none
        self._mine[series] = self._numbers(at)
        return self._mine[series]

    def _records(self, share: int) -> Iterator[tuple[int, Series]]:
        start = share * SHARE_BYTES
        for at in range(start, start + SHARE_BYTES, RECORD_BYTES):
            length = self._memory[at]
            if not length:
                return
            yield at, tuple(self._memory[at + 1 : at + 1 + length].decode("ascii").split(SEPARATOR))

    def _numbers(self, at: int) -> "memoryview[float]":
        first = (at + KEY_BYTES) // DOUBLE_BYTES
        return self._doubles[first : first + NUMBERS]


def shared_memory(processes: int) -> mmap.mmap:
    """Return memory with a share for each of so many processes, which have to be forked from this one."""
    return mmap.mmap(-1, processes * SHARE_BYTES)
