"""Decision records have one form, one index, and name what enforces them; so does CONTRIBUTING. Must not judge a decision."""

import os
import re
import tomllib
from pathlib import Path

import pytest

from tests.golden import REPOSITORY

FOLDER = REPOSITORY / "docs/decisions"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
PARTS = ["Context", "Decision", "Consequences", "Alternatives", "Enforced by"]
MAX_LINES = 30
CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")

each_record = pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)


def parts_of(text: str) -> dict[str, str]:
    """Return the parts of a record by name, in their order."""
    return dict(re.findall(r"^\*\*([A-Z][a-z ]+)\.\*\* (.*?)(?=^\*\*[A-Z][a-z ]+\.\*\* |\Z)", text, re.MULTILINE | re.DOTALL))


def existing_tests() -> set[str]:
    """Return the name of every test."""
    sources = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests").rglob("test_*.py"))
    return set(re.findall(r"^(?:async )?def (test_\w+)\(", sources, re.MULTILINE))


def contracts() -> set[str]:
    """Return the id of every import contract."""
    configured = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    return {contract["id"] for contract in configured["tool"]["importlinter"]["contracts"]}


@each_record
def test_record_has_its_form_when_it_is_read(record: Path) -> None:
    """Its number, a title, the five parts in order, and no more than a screen."""
    text = record.read_text(encoding="utf-8")
    assert text.startswith(f"# {record.name[:4]}: ")
    assert list(parts_of(text)) == PARTS
    assert all(part.strip() for part in parts_of(text).values())
    assert len(text.splitlines()) <= MAX_LINES


@each_record
def test_record_names_what_is_there_when_it_says_how_it_is_enforced(record: Path) -> None:
    """A test that is renamed or removed takes its line here along; a decision that nothing notices the loss of is a wish."""
    enforced = parts_of(record.read_text(encoding="utf-8"))["Enforced by"]
    paths = set(re.findall(r"\btests/[\w/.]*\w", enforced))
    tests = set(re.findall(r"`(test_\w+)`", enforced))
    quoted = set(re.findall(r"`([a-z]+(?:-[a-z]+)*)`", enforced))
    assert [path for path in sorted(paths) if not (REPOSITORY / path).exists()] == []
    assert tests - existing_tests() == set()
    assert quoted - contracts() == set()
    assert paths | tests or "import contract" in enforced


def test_index_has_every_record_under_its_title_when_it_is_read() -> None:
    """Whoever looks for a decision finds it, by its number and its words."""
    shown = re.findall(r"^\| \[(\d{4})\]\((.+?)\) \| (.+?) \|$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    titles = {record.name: record.read_text(encoding="utf-8").splitlines()[0] for record in RECORDS}
    assert [(name, f"# {number}: {title}") for number, name, title in shown] == list(titles.items())
    assert [number for number, _, _ in shown] == [f"{place:04}" for place in range(1, len(RECORDS) + 1)]


def test_template_is_the_form_that_records_have_when_it_is_copied() -> None:
    """What CONTRIBUTING hands out passes the tests above."""
    (template,) = re.findall(r"^```text\n(# NNNN: .*?)^```$", CONTRIBUTING, re.MULTILINE | re.DOTALL)
    assert list(parts_of(template)) == PARTS


def test_one_command_is_what_runs_before_a_change_lands_when_it_is_typed() -> None:
    """The command that CONTRIBUTING begins with is the only one in .ci/, can be started, and runs the two verbs that are named there."""
    (command,) = re.findall(r"^```sh\n(.+)\n```$", CONTRIBUTING, re.MULTILINE)
    assert [f".ci/{path.name}" for path in (REPOSITORY / ".ci").iterdir()] == [command]
    assert os.access(REPOSITORY / command, os.X_OK)
    run = re.findall(r"^python3 -m app .+$", (REPOSITORY / command).read_text(encoding="utf-8"), re.MULTILINE)
    assert run == ["python3 -m app test", "python3 -m app check"]
    assert [verb for verb in run if f"`{verb}`" not in CONTRIBUTING] == []


def test_files_are_there_when_the_table_of_changes_names_them() -> None:
    """Whoever follows the table meets what it says."""
    rows = [line for line in CONTRIBUTING.splitlines() if line.startswith("| ") and "`" in line]
    named = {path for row in rows for path in re.findall(r"`((?:app|docs|migrations|tests)/[\w./-]*|pyproject\.toml|llms\.txt)`", row)}
    assert len(rows) > len(PARTS)
    assert [path for path in sorted(named) if not (REPOSITORY / path).exists()] == []
