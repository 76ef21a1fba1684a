"""The how-to leads to every class there is. Must not test the members of a registration: see `test_tools_reference`."""

import re

from app.domain.model import RetryPolicy, Reversibility
from tests.docs.documents import read
from tests.golden import REPOSITORY

DOCUMENT = read(REPOSITORY / "docs/how-to/choose-reversibility.md")
DEFAULTS = RetryPolicy()


def decisions() -> list[list[str]]:
    """Return the rows of the first table by column, without its head."""
    table = re.findall(r"(?:^\|.*\n)+", DOCUMENT.prose, re.MULTILINE)[0]
    return [[column.strip() for column in line.strip().strip("|").split(" | ")] for line in table.splitlines()[2:]]


def test_decision_leads_to_every_class_in_the_order_of_caution() -> None:
    """No class is forgotten, and the first yes is the least careful one that will do."""
    assert [row[2].strip("`") for row in decisions()] == [str(each) for each in Reversibility]
    assert re.findall(r"\d", " ".join(row[1] for row in decisions())) == ["1", "2", "3", "4", "5"], "the five classes of the pattern"


def test_defaults_are_as_hasty_as_is_said() -> None:
    """Whoever leaves the retries out knows what they are good for."""
    assert DEFAULTS.max_retries == 3
    assert sum(DEFAULTS.initial_interval_ms * DEFAULTS.multiplier**number for number in range(DEFAULTS.max_retries)) < 1_000
    text = " ".join(DOCUMENT.prose.split())
    assert "three retries with pauses that add up to less than a second" in text
