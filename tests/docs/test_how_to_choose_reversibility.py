"""The how-to names every member of a registration, with the default it has. Must not test what they do: see tests/domain."""

import re

from app.api import bodies
from app.domain.model import RetryPolicy, Reversibility
from tests.docs.documents import read
from tests.golden import REPOSITORY

DOCUMENT = read(REPOSITORY / "docs/how-to/choose-reversibility.md")
DEFAULTS = RetryPolicy()


def tables() -> list[list[list[str]]]:
    """Return the document's tables, each as its rows by column, without their heads."""
    found = re.findall(r"(?:^\|.*\n)+", DOCUMENT.prose, re.MULTILINE)
    return [[[column.strip() for column in line.strip().strip("|").split(" | ")] for line in table.splitlines()[2:]] for table in found]


def words(column: str) -> list[str]:
    """Return what stands in code style in a column."""
    return re.findall(r"`([a-z_]+)`", column)


def test_decision_leads_to_every_class_in_the_order_of_caution() -> None:
    """No class is forgotten, and the first yes is the least careful one that will do."""
    assert [words(row[2])[0] for row in tables()[0]] == [str(each) for each in Reversibility]
    assert re.findall(r"\d", " ".join(row[1] for row in tables()[0])) == ["1", "2", "3", "4", "5"], "the five classes of the pattern"


def test_members_are_those_that_may_be_registered() -> None:
    """What may be said of a tool is explained, and nothing that may not."""
    members, retries = tables()[2:4]
    of_retries = {name for row in retries for name in words(row[0])}
    assert [name for row in members for name in words(row[0])] == list(bodies.ToolBody.model_fields)
    assert of_retries == {*bodies.ActionBody.model_fields, "compensated_on"} - {"url"}
    (undo,) = (row for row in members if row[0] == "`compensation`")
    assert set(words(undo[2])) == bodies.CompensationBody.model_fields.keys() - of_retries


def test_defaults_of_the_retries_are_those_of_the_code() -> None:
    """Whoever leaves a member out knows what holds."""
    shown = {
        name: value
        for row in tables()[3]
        for name, value in zip(words(row[0]), (row[1].split(", ")), strict=True)
    }  # fmt: skip
    real = {name: getattr(DEFAULTS, name) for name in shown}
    assert shown == {
        name: "none" if value == frozenset() else f"{value:g}" if isinstance(value, float) else str(value) for name, value in real.items()
    }
    pauses = [DEFAULTS.initial_interval_ms * DEFAULTS.multiplier**number for number in range(DEFAULTS.max_retries)]
    assert sum(pauses) < 1_000, "the default pauses add up to less than a second"
