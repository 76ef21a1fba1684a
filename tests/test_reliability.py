"""docs/reliability.md names the checker's invariants, all faults, and tests that exist. Must not test the service."""

import re

from tests.faults.checker import INVARIANTS
from tests.faults.plans import Fault
from tests.golden import REPOSITORY

RELIABILITY = (REPOSITORY / "docs" / "reliability.md").read_text(encoding="utf-8")
FAULTS = 37


def test_invariants_are_the_checkers_when_compared() -> None:
    """What is said to hold is what is looked at."""
    assert re.findall(r"^\| (I\d+ [^|]+?) \|", RELIABILITY, re.MULTILINE) == list(INVARIANTS)


def test_every_fault_names_tests_that_exist_or_why_there_is_none() -> None:
    """A test that is renamed or removed takes its line here along; an empty place is said to be one."""
    sources = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests").rglob("test_*.py"))
    existing = set(re.findall(r"^(?:async )?def (test_\w+)\(", sources, re.MULTILINE))
    rows = re.findall(r"^\| (X\d+) \|.*\| ([^|]+) \|$", RELIABILITY, re.MULTILINE)
    assert [number for number, _ in rows] == [f"X{number}" for number in range(1, FAULTS + 1)]
    for number, shown_by in rows:
        named = set(re.findall(r"`(test_\w+)`", shown_by))
        assert named or shown_by.startswith("not tested: "), number
        assert named <= existing, (number, named - existing)


def test_figures_count_every_kind_of_fault_when_they_are_filled_in() -> None:
    """A kind of fault that is new, or never happened, does not go unseen in what is published."""
    figures = RELIABILITY.partition("## Figures")[2]
    counted = dict(re.findall(r"^\| fault: ([^|]+?) \| (\d+) \|$", figures, re.MULTILINE))
    assert list(counted) == [kind.value for kind in Fault]
    assert all(int(count) for count in counted.values()), counted
    violated = dict(re.findall(r"^\| violations of ([^|]+?) \| (\d+) \|$", figures, re.MULTILINE))
    assert violated == dict.fromkeys(INVARIANTS, "0")
