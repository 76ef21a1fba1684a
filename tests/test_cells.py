"""Numbers that several processes write and each can read: no loss, no confusion, no way back. Must not test what is counted."""

import os
from collections.abc import Callable

import pytest

from app.cells import KEY_BYTES, NUMBERS, RECORDS, Cells, shared_memory

A, B = ("a", "x"), ("b",)


def in_a_process(work: Callable[[], object]) -> None:
    """Do something in a process of its own that is killed right after."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)


def first_numbers(cells: Cells) -> dict[tuple[str, ...], float]:
    """Return the first number of each series."""
    return {series: numbers[0] for series, numbers in cells.sums().items()}


def test_numbers_are_added_up_when_two_processes_write_them() -> None:
    """Each in its own share, in its own order; any of them reads the sum."""
    memory = shared_memory(3)

    def write(share: int, amounts: dict[tuple[str, ...], float]) -> None:
        cells = Cells(memory, share)
        for series, amount in amounts.items():
            cells.mine(series)[0] += amount
            cells.mine(series)[NUMBERS - 1] += 10 * amount

    in_a_process(lambda: write(0, {A: 1, B: 2}))
    in_a_process(lambda: write(1, {B: 0.5, A: 4}))
    reader = Cells(memory, 2)
    assert first_numbers(reader) == {A: 5, B: 2.5}
    assert [numbers[1:] for numbers in reader.sums().values()] == [[0] * (NUMBERS - 2) + [50], [0] * (NUMBERS - 2) + [25]]


def test_numbers_go_on_when_a_share_has_a_new_holder() -> None:
    """A process that was killed leaves what it counted, and the next one counts on, in the same place."""
    memory = shared_memory(1)

    def count() -> None:
        Cells(memory, 0).mine(A)[0] += 1

    for _ in range(3):
        in_a_process(count)
    for _ in range(RECORDS):
        count()
    cells = Cells(memory, 0)
    cells.mine(B)[0] += 1
    assert first_numbers(cells) == {A: 3 + RECORDS, B: 1}


def test_series_is_refused_when_there_is_no_room() -> None:
    """Nothing is written over another share, nor into the numbers of a record."""
    memory = shared_memory(2)
    other = Cells(memory, 1)
    other.mine(A)[0] = 1
    cells = Cells(memory, 0)
    with pytest.raises(ValueError, match="no room"):
        cells.mine(("k" * KEY_BYTES,))
    for number in range(RECORDS):
        cells.mine((str(number),))
    with pytest.raises(ValueError, match="no room"):
        cells.mine(("one more",))
    assert other.mine(A)[0] == 1
