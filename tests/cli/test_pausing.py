"""`pause` and `resume` on the command line, with nothing but the database. Must not test what a pause holds: see tests/engine."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from app.domain.model import Role
from tests.factories import make_principal_key
from tests.golden import REPOSITORY
from tests.probes import fetch

PATIENCE_SECONDS = 60
HERE = "a.example:443"
PAUSES_SQL = "SELECT org, destination, paused_by, reason FROM pauses ORDER BY org, destination"


class Ran(NamedTuple):
    """What a command came to; `events` are the names of what it logged."""

    code: int
    out: str
    error: str
    events: list[str]


async def run(database_url: str, folder: Path, *words: str) -> Ran:
    """Run a command on the test's database."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "app", *words,
        cwd=folder, env={"PATH": "", "PYTHONPATH": str(REPOSITORY)} | ({"COUNTERMAND_DATABASE_URL": database_url} if database_url else {}),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(PATIENCE_SECONDS):
        out, error = await process.communicate()
    lines = error.decode().splitlines()
    events = [json.loads(line)["event"] for line in lines if line.startswith("{")]
    return Ran(process.returncode or 0, out.decode().strip(), error.decode().strip(), events)


@pytest.fixture
async def acme(database_url: str) -> str:
    """Return a database in which there is an org."""
    await make_principal_key(database_url, Role.AGENT, "robot-1", "acme")
    return database_url


# What it is said of -> the options, and the row that there is then.
SCOPES: list[tuple[list[str], tuple[str | None, str | None], str]] = [
    ([], (None, None), "everything"),
    (["--org", "acme"], ("acme", None), "acme"),
    (["--org", "acme", "--destination", HERE], ("acme", HERE), f"acme at {HERE}"),
]


@pytest.mark.parametrize(("options", "row", "name"), SCOPES)
async def test_calls_are_held_and_let_go_when_it_is_said_so(
    options: list[str], row: tuple[str | None, str | None], name: str, acme: str, tmp_path: Path
) -> None:
    """One row, under the command line's name; saying it twice does no harm, and is told once."""
    for events in (["paused"], []):
        ran = await run(acme, tmp_path, "pause", *options, "--reason", "moving")
        assert (ran.code, ran.out.partition(" is")[0].partition(" was")[0], ran.events) == (0, name, events)
        assert [tuple(found) for found in await fetch(acme, PAUSES_SQL)] == [(*row, "command-line", "moving")]
    for events, told in ((["resumed"], f"{name} is resumed"), ([], f"{name} was not paused")):
        ran = await run(acme, tmp_path, "resume", *options, "--reason", "done")
        assert (ran.code, ran.out, ran.events) == (0, told, events)
        assert await fetch(acme, PAUSES_SQL) == []


async def test_wider_pause_is_named_when_it_stays(acme: str, tmp_path: Path) -> None:
    """Whoever resumes a destination is told that its org, or everything, is held still."""
    for options in (["--org", "acme"], ["--org", "acme", "--destination", HERE]):
        assert (await run(acme, tmp_path, "pause", *options, "--reason", "moving")).code == 0
    ran = await run(acme, tmp_path, "resume", "--org", "acme", "--destination", HERE, "--reason", "done")
    assert (ran.code, ran.out) == (0, f"acme at {HERE} is still held by the pause of the org acme: moving")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--destination", HERE], "name the org by --org"),
        (["--org", "nobody"], "there is no org 'nobody'"),
        (["--org", "Acme"], "'Acme' is no org name"),
        (["--org", "acme", "--destination", "https://a.example"], "'https://a.example' is no destination: expected host:port"),
        (["--org", "acme", "--destination", "A.example:443"], "'A.example:443' is no destination"),
        (["--reason", ""], "expected a reason of 1 to 2000 characters"),
    ],
)
async def test_pause_is_refused_when_it_would_hold_nothing(options: list[str], words: str, acme: str, tmp_path: Path) -> None:
    """A slip of the pen is told, rather than believed to have stopped something."""
    ran = await run(acme, tmp_path, "pause", "--reason", "moving", *options)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.error
    assert await fetch(acme, PAUSES_SQL) == []


async def test_commands_are_refused_when_no_database_is_named(tmp_path: Path) -> None:
    """The emergency brake must not say that all is paused on a database of its own, which nobody else sees."""
    for verb in ("pause", "resume"):
        ran = await run("", tmp_path, verb, "--reason", "now")
        assert (ran.code, ran.out) == (2, "")
        assert ran.error.startswith("countermand: COUNTERMAND_DATABASE_URL: ")
    assert not await asyncio.to_thread((tmp_path / ".countermand").exists)
