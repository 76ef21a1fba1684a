"""The documents say what the code does. Must not test the code."""

import re
from collections.abc import Mapping
from enum import StrEnum
from itertools import product
from typing import Any

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from app.cli.migrating import MIGRATIONS
from app.domain.model import ApprovalState
from app.domain.states import EFFECT_MOVES, NEW_EFFECT_STATES, SESSION_MOVES, UNDO_MOVES
from app.main import SCHEMA_REVISION
from app.settings import Settings
from tests.domain.world import AGREEMENT
from tests.golden import REPOSITORY

STATES = (REPOSITORY / "docs/reference/states.md").read_text(encoding="utf-8")
EDGE = "[*]"

MACHINES: list[tuple[str, Any, set[str]]] = [
    ("Session", SESSION_MOVES, {"active"}),
    ("Effect", EFFECT_MOVES, set(NEW_EFFECT_STATES)),
    ("Undo entry", UNDO_MOVES, {"pending"}),
]


def section(title: str) -> str:
    """Return the text of one section."""
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", STATES, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def rows_of(text: str) -> list[list[list[str]]]:
    """Return the rows of a section's table, each as the words in code style of its columns."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [[re.findall(r"`([a-z_]+)`", column) for column in line] for line in lines]


@pytest.mark.parametrize(("title", "moves", "first"), MACHINES)
def test_diagram_has_the_moves_of_the_tables(title: str, moves: Mapping[StrEnum, frozenset[StrEnum]], first: set[str]) -> None:
    """Each arrow is a move, each move an arrow; where it begins and where nothing goes on is drawn as well."""
    drawn = re.findall(r"^ +(\S+) --> (\S+)$", section(title), re.MULTILINE)
    assert len(drawn) == len(set(drawn))
    real = {(str(source), str(target)) for source, targets in moves.items() for target in targets}
    assert {arrow for arrow in drawn if EDGE not in arrow} == real
    assert {target for source, target in drawn if source == EDGE} == {str(state) for state in first}
    assert {source for source, target in drawn if target == EDGE} == {str(source) for source, targets in moves.items() if not targets}


@pytest.mark.parametrize(("title", "moves"), [(title, moves) for title, moves, _ in MACHINES])
def test_table_explains_every_move_of_the_tables(title: str, moves: Mapping[StrEnum, frozenset[StrEnum]]) -> None:
    """No move is without its reason."""
    assert explained(title) == {(str(source), str(target)) for source, targets in moves.items() for target in targets}


def explained(title: str) -> set[tuple[str, str]]:
    """Return the moves that the table of a section gives a reason for."""
    found: set[tuple[str, str]] = set()
    for line in section(title).splitlines():
        row = re.match(r"\| (.*?) -> (.*?) \| ", line)
        if row is not None:
            found |= set(product(re.findall(r"`([a-z_]+)`", row[1]), re.findall(r"`([a-z_]+)`", row[2])))
    return found


def test_question_has_the_states_of_the_code_and_a_reason_for_every_move() -> None:
    """The question follows its effect and has no table of moves; tests/api/test_every_transition.py sees that each arrow is walked."""
    drawn = re.findall(r"^ +(\S+) --> (\S+)$", section("Approval"), re.MULTILINE)
    moves = {arrow for arrow in drawn if EDGE not in arrow}
    assert {state for arrow in drawn for state in arrow} - {EDGE} == {str(state) for state in ApprovalState}
    assert explained("Approval") == moves
    assert {target for source, target in drawn if source == EDGE} == {"pending"}
    assert {source for source, target in drawn if target == EDGE} == {str(state) for state in ApprovalState} - {
        source for source, _ in moves
    }


def test_agreement_of_entries_and_effects_is_the_one_that_is_tested() -> None:
    """The last table is what the machine test holds every decision to."""
    rows = rows_of(section("How the three go together"))
    drawn = {entry[0]: set(effects) for entry, effects in rows}
    assert drawn == {str(entry): set(map(str, effects)) for entry, effects in AGREEMENT.items()}


def test_schema_revision_is_the_newest_when_compared_with_the_migrations() -> None:
    """A service is ready on the revision that this code was written for, and there is one head."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    assert ScriptDirectory.from_config(config).get_heads() == [SCHEMA_REVISION]


SETTINGS = REPOSITORY / "docs/reference/settings.md"


@pytest.mark.skipif(not SETTINGS.exists(), reason="the settings have no document yet")
def test_every_setting_is_documented_and_no_other() -> None:
    """Each knob has its line, and each line its knob."""
    named = set(re.findall(r"`(COUNTERMAND_[A-Z_]+)", SETTINGS.read_text(encoding="utf-8")))
    real = {f"COUNTERMAND_{name.upper()}" for name in Settings.model_fields}
    assert real <= named, "a setting without a line"
    assert named <= real, "a line without a setting"
