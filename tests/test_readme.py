"""The README's commands do what it says, pasted in their order against `dev`. Must not test what they run: only that the text is true.

A shell reads the commands; `curl` is a stand-in, so that they run on machines without it and so that every answer is kept.
"""

import asyncio
import json
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio

from app.cli import tools
from app.main import create_app
from app.settings import Settings
from tests.conftest import execute, with_database
from tests.fakes import FakeEndpoint
from tests.golden import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PATIENCE_SECONDS = 60
README_URL = "http://127.0.0.1:8420"
README_ENDPOINT = "http://127.0.0.1:9009"
ROLES = ("AGENT", "OPERATOR", "AUDITOR", "ADMIN")
VARIABLES = ["COUNTERMAND_URL", *(f"COUNTERMAND_{role}_KEY" for role in ROLES)]

CURL = f"""#!{sys.executable} -IS
import json, os, sys
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

words, headers, body, method, url, after = iter(sys.argv[1:]), {{}}, None, None, None, ""
for word in words:
    if word in ("-s", "-S", "-sS"):
        pass
    elif word == "-sw":
        after = next(words)
    elif word == "-X":
        method = next(words)
    elif word == "-H":
        name, _, value = next(words).partition(": ")
        headers[name] = value
    elif word == "-d":
        body = next(words)
    elif word.startswith("-") or url is not None:
        sys.exit("this curl does not know " + word)
    else:
        url = word
method = method or ("GET" if body is None else "POST")
request = Request(url, None if body is None else body.encode(), headers, method=method)
try:
    answer = build_opener(ProxyHandler({{}})).open(request)
except HTTPError as refused:
    answer = refused
text = answer.read().decode()
sys.stdout.write(text + after.replace("\\\\n", "\\n"))
with open(os.environ["CURL_LOG"], "a") as log:
    log.write(json.dumps({{"method": method, "url": url, "status": answer.status, "answer": json.loads(text)}}) + "\\n")
"""


def section(title: str) -> str:
    """Return the text of one section."""
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def blocks(title: str, language: str = "sh") -> list[str]:
    """Return a section's fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", section(title), re.MULTILINE | re.DOTALL)


class Shell:
    """A shell into which the README's blocks are pasted, one after the other; `out` is what it printed last."""

    def __init__(self, directory: Path, variables: Mapping[str, str]) -> None:
        """Put the stand-in for curl where the shell finds it first."""
        stand_in = directory / "curl"
        stand_in.write_text(CURL, encoding="utf-8")
        stand_in.chmod(0o755)
        (directory / "python3").symlink_to(sys.executable)
        self.out = ""
        self._log = directory / "curl.log"
        self._kept = {name: value for name, value in os.environ.items() if not name.startswith("COUNTERMAND_")}
        self._kept |= {**variables, "CURL_LOG": str(self._log), "PATH": f"{directory}{os.pathsep}{os.environ['PATH']}"}

    async def paste(self, *texts: str) -> list[dict[str, Any]]:
        """Run the lines and return every request they sent, with its answer."""
        self._log.write_text("", encoding="utf-8")
        shell = await asyncio.create_subprocess_exec(
            "sh", "-eu", "-c", "\n".join(texts), env=self._kept, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(PATIENCE_SECONDS):
            out, err = await shell.communicate()
        self.out = out.decode()
        assert (shell.returncode, err.decode()) == (0, "")
        return [json.loads(line) for line in self._log.read_text(encoding="utf-8").splitlines()]


@asynccontextmanager
async def developing(database_url: str, directory: Path) -> AsyncIterator[str]:
    """Run `dev` and yield the lines that it wants pasted."""
    settings = {"COUNTERMAND_DATABASE_URL": database_url, "COUNTERMAND_PORT": "0", "COUNTERMAND_DATA_DIR": str(directory / "data")}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COUNTERMAND_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "app", "dev"),
        cwd=directory,
        env={**kept, **settings, "PYTHONPATH": str(REPOSITORY)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            told = [(await process.stdout.readline()).decode() for _ in range(len(VARIABLES) + 2)]
        yield "".join(told)
    finally:
        process.terminate()
        await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def exports(cluster_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Run `dev` on a database of this file's own and return the lines that it wants pasted; each test has tools and sessions of its own."""
    name = f"test_{uuid4().hex}"
    await execute(cluster_url, f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    async with developing(with_database(cluster_url, name), tmp_path_factory.mktemp("dev")) as told:
        yield told
    await execute(cluster_url, f'DROP DATABASE "{name}" WITH (FORCE)')


def variables_of(exports: str) -> dict[str, str]:
    """Read `export NAME=VALUE` lines as a shell does."""
    words = [shlex.split(line, comments=True) for line in exports.splitlines()]
    return dict(word[1].split("=", 1) for word in words if word)


def told(requests: list[dict[str, Any]]) -> list[tuple[str, int, str | None]]:
    """Return where each request went, how it was answered, and what was decided, or which state or code it found."""
    words = ("decision", "code", "state", "valid")
    return [
        (
            request["url"].partition("/v1/")[2],
            request["status"],
            next((request["answer"][word] for word in words if word in request["answer"]), None),
        )
        for request in requests
    ]


async def test_dev_prints_lines_that_can_be_pasted(exports: str, tmp_path: Path) -> None:
    """Every line is a comment or an export; what they set is the address and one key per role, and it works at once."""
    assert all(line.startswith(("# ", "export COUNTERMAND_")) for line in exports.splitlines())
    variables = variables_of(exports)
    assert list(variables) == VARIABLES
    check = 'curl -s -H "Authorization: Bearer $COUNTERMAND_AUDITOR_KEY" "$COUNTERMAND_URL/v1/escalations"'
    (request,) = await Shell(tmp_path, {}).paste(exports, check)
    assert request["status"] == 200


async def test_commands_do_what_is_said_when_they_are_pasted_in_order(exports: str, endpoint: FakeEndpoint, tmp_path: Path) -> None:
    """First the unwind by hand, then the second seed's three steps, the changed payload, and the way out of the escalation."""
    shell, url = Shell(tmp_path, {}), variables_of(exports)["COUNTERMAND_URL"]
    by_hand = [block for block in blocks("Try it by hand") if re.search(r"^(agent|operator)\b", block, re.MULTILINE)]
    moved = [block.replace(README_ENDPOINT, endpoint.url("").rstrip("/")) for block in by_hand]
    functions = [line for block in by_hand for line in block.splitlines() if "() {" in line]

    unwound = await shell.paste(exports, *moved)
    approved = await shell.paste(exports, *functions, *blocks("Have a person approve"))
    commands = blocks("When a person is called")
    halted = await shell.paste(exports, *functions, *commands[:-1])
    printed = shell.out
    (resolved,) = await shell.paste(exports, *(command.replace(README_URL, url) for command in commands[-1:]))

    refund, transfer = "sessions/refund-4921", "sessions/transfer-77"
    assert told(unwound) == [
        (f"{refund}/intercept", 201, "execute"),
        (f"{refund}/effects/1/commit", 200, "committed"),
        (f"{refund}/fail?wait_s=10", 202, "compensated"),
        (f"{refund}/journal", 200, None),
        (f"{refund}/journal/verify", 200, True),
    ]
    assert [request.body for request in endpoint.received] == [b'{"credit_id":"cr_9104_1"}']
    assert told(approved) == [
        (f"{transfer}/intercept", 202, "await_approval"),
        ("approvals?state=pending", 200, None),
        (f"{transfer}/effects/1/approve", 200, "approved"),
        (f"{transfer}/effects/1/resume", 200, "execute"),
        (f"{transfer}/effects/1/commit", 200, "committed"),
        ("sessions/transfer-78/intercept", 202, "await_approval"),
        ("sessions/transfer-78/effects/1/approve", 200, "approved"),
        ("sessions/transfer-78/effects/1/resume", 409, "payload_changed"),
    ]
    assert approved[0]["answer"]["message"] in section("Have a person approve")
    assert [item["session_id"] for item in approved[1]["answer"]["items"]] == ["transfer-77"]
    assert approved[2]["answer"]["approval"]["claimed_approver"] == "manager@company.com"
    assert approved[2]["answer"]["approval"]["decided_by"] == "demo-operator"
    assert told(halted) == [
        (f"{transfer}/fail?wait_s=10", 202, "halted"),
        ("escalations", 200, None),
        (f"{transfer}/escalation", 200, "halted"),
        (f"{transfer}/escalation", 200, "halted"),
    ]
    assert [item["session_id"] for item in halted[1]["answer"]["items"]] == ["transfer-77"]
    assert words(commands[-1].replace(README_URL, url)) == words(printed.splitlines()[-1])
    assert told([resolved]) == [(f"{transfer}/resolve", 200, "resolved")]


def words(commands: str) -> list[str]:
    """Split the curl among these lines into its words; what a missing variable is explained with does not count."""
    curl = commands[commands.index("curl ") :].replace("\\\n", "")
    return [re.sub(r":\?[^}]*", "", word) for word in shlex.split(curl)]


async def test_tools_are_taken_when_they_are_registered_as_shown(exports: str, tmp_path: Path) -> None:
    """The example of a tools.yaml is one that the service takes."""
    (shown,) = blocks("Register tools", "yaml")
    file = tmp_path / "tools.yaml"
    file.write_text(shown, encoding="utf-8")
    variables = variables_of(exports)
    headers = {"Authorization": f"Bearer {variables['COUNTERMAND_ADMIN_KEY']}"}

    def apply() -> list[str]:
        with httpx.Client(base_url=variables["COUNTERMAND_URL"], headers=headers, trust_env=False, timeout=PATIENCE_SECONDS) as client:
            return [str(step) for step in tools.apply(client, tools.read_file(file), is_dry_run=False)]

    assert await asyncio.to_thread(apply) == ["+ issue_credit", "+ send_reply"]


def shown_verbs() -> set[tuple[str, str]]:
    """Return each method and path of the table of verbs; `...` stands for the row's first path without its last part."""
    found: set[tuple[str, str]] = set()
    for line in section("The verbs").splitlines():
        columns = [column.strip() for column in line.strip("|").split(" | ")]
        if len(columns) < 4 or not re.match(r"[A-Z]+\b", columns[0]):
            continue
        first: str | None = None
        for part in columns[1].split(";"):
            methods = re.findall(r"\b(GET|PUT|POST|DELETE)\b", part.partition("`")[0]) or columns[0].split()
            for path in re.findall(r"`([^`?]+)[^`]*`", part):
                first = first or path
                found |= {(method, path.replace("...", first.rpartition("/")[0])) for method in methods}
    return found


def test_table_of_verbs_has_every_route_and_no_other() -> None:
    """Whoever looks for a verb finds it, under the path that it has."""
    paths = create_app(Settings(_env_file=None), "postgresql://nobody@127.0.0.1:1/nothing").openapi()["paths"]
    real = {
        (method.upper(), path.removeprefix("/v1").replace("{session_id}", "{id}")) for path, methods in paths.items() for method in methods
    }
    assert shown_verbs() == real
