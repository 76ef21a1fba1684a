"""The commands that documents name exist, with the options that they show. Must not run them: see `test_documents`."""

import re
from collections.abc import Iterator, Mapping

import pytest
import typer

from app.__main__ import DEVELOPER_VERBS
from app.cli import HEALTH, cli
from tests.docs.documents import Document, documents
from tests.golden import REPOSITORY

MAKE_VERBS = set(re.findall(r"^([a-z-]+):.*## ", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
# What reads its own command line, or hands it on.
HANDS_ON = {"python", "test"}
HEALTH_OPTIONS = {"--url", "--ready"}  # tests/cli/test_health.py shows them
# Where a command ends: the shell's own signs, or its line.
END = re.compile(r"[;|&#<>()`\n]|\\\n")

ALL = [document for document in documents() if not document.name.startswith(("CHANGELOG.md", "docs/field-reports.md"))]
every_document = pytest.mark.parametrize("document", ALL, ids=lambda document: document.name)


def real_commands() -> Mapping[str, set[str]]:
    """Return each command of the command line, with its options."""
    root = typer.main.get_command(cli)
    found: dict[str, set[str]] = {}

    def add(words: str, command: object) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            add(f"{words} {name}".strip(), inner)
        if not hasattr(command, "commands"):
            found[words] = {option for parameter in getattr(command, "params", ()) for option in parameter.opts if option.startswith("--")}

    add("", root)
    return {**found, HEALTH: HEALTH_OPTIONS, **{verb: found.get(verb, set()) for verb in DEVELOPER_VERBS}}


COMMANDS = real_commands()


def code_of(document: Document) -> Iterator[str]:
    """Return what a document shows as code: its blocks, and the spans between backticks."""
    for block in document.blocks:
        yield block.text
    yield from re.findall(r"`([^`\n]+)`", document.prose)


def commands_in(code: str) -> Iterator[str]:
    """Find the commands of the command line in a piece of code, without `python3 -m app` or `countermand`."""
    for start in re.finditer(
        r"\bpython3? -m app\s|(?:^|(?<=[;&|] )|(?<=countermand ))countermand (?=[a-z])(?!countermand )", code, re.MULTILINE
    ):
        yield END.split(re.sub(r"\\\n", " ", code[start.end() :]), maxsplit=1)[0].strip()


def make_verbs_in(code: str) -> list[str]:
    """Find the verbs of make in a piece of code."""
    return re.findall(r"(?:^|(?<=[;&|] ))make (?:[A-Z_]+=\S+ )*([a-z-]+)", code, re.MULTILINE)


def faults_of(command: str) -> list[str]:
    """Return what there is not in a command: itself, or an option; `COMMAND` and `...` stand for any."""
    name = next((name for name in sorted(COMMANDS, key=len, reverse=True) if f"{command} ".startswith(f"{name} ")), None)
    if name is None:
        return [] if command.split()[:1] in (["COMMAND"], ["..."], ["VERB"]) else [command]
    options = [] if name in HANDS_ON else re.findall(r"--[a-z][a-z-]*", command)
    return [f"{name} {option}" for option in options if option not in COMMANDS[name]]


@every_document
def test_every_command_exists_when_a_document_names_it(document: Document) -> None:
    """A command that was renamed takes its mention along."""
    commands = [command for code in code_of(document) for command in commands_in(code)]
    assert [fault for command in commands for fault in faults_of(command)] == []


@every_document
def test_every_verb_of_make_exists_when_a_document_names_it(document: Document) -> None:
    """`make help` knows it."""
    assert {verb for code in code_of(document) for verb in make_verbs_in(code)} - MAKE_VERBS == set()


@pytest.mark.parametrize(
    ("code", "faults"),
    [
        ("python3 -m app serve --no-orchestrator", []),
        ("python3 -m app serve --no-orchestra", ["serve --no-orchestra"]),
        ("export A=b; python3 -m app tools apply tools.yaml --dry-run | cat --all", []),
        ("python3 -m app tool apply", ["tool apply"]),
        ("countermand keys create --org O", []),
        ("docker compose exec -T countermand countermand keys make", ["keys make"]),
        ("countermand health --ready", []),
        ("python3 -m app test tests/domain --pdb", []),
        ("python3 -m app COMMAND", []),
        ("job_name: countermand", []),
        ("countermand = httpx.Client()", []),
    ],
)
def test_fault_is_found_when_a_command_is_none(code: str, faults: list[str]) -> None:
    """The tests above could not fail otherwise."""
    assert [fault for command in commands_in(code) for fault in faults_of(command)] == faults


def test_verbs_of_make_are_found_when_code_has_some() -> None:
    """At the beginning of a line, after another command, with variables; not in a sentence."""
    assert make_verbs_in('make help\n. x && make PYTHON=python3.12 test ARGS="-x"\n# to make them') == ["help", "test"]


def test_table_of_commands_has_every_command_and_option() -> None:
    """docs/reference/commands.md is the whole command line."""
    text = (REPOSITORY / "docs/reference/commands.md").read_text(encoding="utf-8")
    rows = [row.replace("\\|", "") for row in re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)]
    shown = {name: set(re.findall(r"--[a-z-]+", row)) for row in rows for name in COMMANDS if f"{row} ".startswith(f"{name} ")}
    assert shown == COMMANDS
    assert len(rows) == len(COMMANDS)
