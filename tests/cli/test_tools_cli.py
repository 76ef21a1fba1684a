"""`countermand tools apply`: what a file may look like, what is told and what is done, against a service on a real socket."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from app.cli import tools
from app.cli.manners import SetupError
from app.domain.json_text import dump
from app.engine.clock import SystemClock
from tests.factories import Service
from tests.probes import fetch

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60.0
FILE = """
tools:
  issue_credit:
    reversibility: compensatable
    payload_schema: {type: object, required: [order]}
    compensation:
      url: https://billing.example/undo/credit
      args: {credit_id: {$ref: "result#/credit_id"}, rate: 1.50}
      max_retries: 5
  send_reply:
    reversibility: irreversible
    approval: {required: true, ttl_seconds: 86400}
"""


class QuietServer(uvicorn.Server):
    """A server in the test's own loop that leaves the process's signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


@asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[str]:
    """Serve a running application on a loopback port and yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = QuietServer(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not server.started:
                    await SystemClock().sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


async def run(url: str, key: str, *arguments: str) -> tuple[int, list[str], str]:
    """Run `countermand tools apply` and return its exit code, the lines it printed and what it complained of."""
    settings = {"COUNTERMAND_URL": url, "COUNTERMAND_ADMIN_KEY": key}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COUNTERMAND_")} | settings
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", "from app.cli import main; main()", "tools", "apply", *arguments),
        cwd=REPOSITORY,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, out.decode().splitlines(), err.decode()


async def versions(service: Service) -> dict[str, int]:
    """Return the number of versions of each tool."""
    rows = await fetch(service.database_url, "SELECT name, count(*) AS n FROM tools GROUP BY name")
    return {row["name"]: row["n"] for row in rows}


def apply(definitions: Mapping[str, dict[str, Any]], *, is_dry_run: bool = False) -> list[str]:
    """Apply definitions as the command does, without the price of a process, and return the lines it would print."""
    with tools.connect() as client:
        return [str(step) for step in tools.apply(client, definitions, is_dry_run=is_dry_run)]


def point_at(monkeypatch: pytest.MonkeyPatch, url: str, key: str) -> None:
    """Let the command's settings name a service and a key."""
    monkeypatch.setenv("COUNTERMAND_URL", url)
    monkeypatch.setenv("COUNTERMAND_ADMIN_KEY", key)


async def test_file_is_applied_once_when_it_is_applied_again(service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A dry run tells and changes nothing; applying makes it so; again changes nothing; an edit names the members that differ."""
    file = tmp_path / "tools.yaml"
    file.write_text(FILE, encoding="utf-8")
    async with listening(service.app) as url:
        assert await run(url, service.admin.key, str(file), "--dry-run") == (0, ["+ issue_credit", "+ send_reply"], "")
        assert await versions(service) == {}
        assert await run(url, service.admin.key, str(file)) == (0, ["+ issue_credit", "+ send_reply"], "")
        point_at(monkeypatch, url, service.admin.key)
        assert await asyncio.to_thread(apply, tools.read_file(file)) == ["= issue_credit", "= send_reply"]
        file.write_text(FILE.replace("max_retries: 5", "max_retries: 6").replace("required: [order]", "required: [id]"), encoding="utf-8")
        changed = ["~ issue_credit: compensation, payload_schema", "= send_reply"]
        assert await asyncio.to_thread(apply, tools.read_file(file), is_dry_run=True) == changed
        assert await versions(service) == {"issue_credit": 1, "send_reply": 1}
        assert await asyncio.to_thread(apply, tools.read_file(file)) == changed
    assert await versions(service) == {"issue_credit": 2, "send_reply": 1}
    shown = (await service.agent.get("/tools/issue_credit")).json()
    assert shown["compensation"]["args"] == {"credit_id": {"$ref": "result#/credit_id"}, "rate": 1.5}
    assert shown["payload_schema"] == {"type": "object", "required": ["id"]}


async def test_command_fails_with_one_line_when_it_is_refused(service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A refusal names the request, the reason and the place; nobody there, or a key without the right, is told as well."""
    file = tmp_path / "tools.yaml"
    file.write_text("tools: {bad: {reversibility: reversible}}", encoding="utf-8")
    async with listening(service.app) as url:
        code, out, complaint = await run(url, service.admin.key, str(file))
        assert (code, out) == (2, [])
        assert complaint.startswith("countermand: PUT /v1/tools/bad: ")
        assert "/compensation" in complaint
        assert complaint.count("\n") == 1
        point_at(monkeypatch, url, service.agent.key)
        with pytest.raises(SetupError, match="role"):
            await asyncio.to_thread(apply, tools.read_file(file))
    code, _, complaint = await run(url, service.admin.key, str(file))
    assert (code, complaint.startswith("countermand: the service cannot be reached")) == (5, True)
    assert await versions(service) == {}


async def test_names_and_literals_survive_the_way(service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every name that the service takes can be applied; one that it refuses is told, and the ones before it stay."""
    definition = {"reversibility": "read_only", "description": "caf\u00e9 \U0001f600"}
    names = ["a.b:c-d_E9", "x" * 200]
    async with listening(service.app) as url:
        point_at(monkeypatch, url, service.admin.key)
        assert await asyncio.to_thread(apply, dict.fromkeys(names, definition)) == [f"+ {name}" for name in names]
        with pytest.raises(SetupError, match=r"/v1/tools/"):
            await asyncio.to_thread(apply, {"fine": definition, "not/a name": definition, "later": definition})
    assert await versions(service) == dict.fromkeys([*names, "fine"], 1)
    assert (await service.agent.get("/tools/a.b:c-d_E9")).json()["description"] == definition["description"]


async def test_tool_is_new_again_when_it_was_removed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is gone is registered anew, and shown so."""
    definition = {"reversibility": "read_only"}
    async with listening(service.app) as url:
        point_at(monkeypatch, url, service.admin.key)
        await asyncio.to_thread(apply, {"t": definition})
        await service.admin.request("DELETE", "/v1/tools/t")
        assert await asyncio.to_thread(apply, {"t": definition}) == ["+ t"]
    assert (await service.agent.get("/tools/t")).json()["version"] == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tools:",
        "tools: []",
        "[]",
        "5",
        "tool: {}",
        "tools: {1: {}}",
        "tools: {t: read_only}",
        "tools: {t: [1]}",
        "tools: {t: {a: 1}",
        "tools: !!python/object/apply:os.system [true]",
        "\x00",
        "tools: {t: {}, t: {}}",
        "tools: {t: {args: {1: a}}}",
        "tools: {t: {retry_on: !!set {a, b}}}",
        "tools: &all {t: *all}",
    ],
)
def test_file_is_refused_when_it_has_another_form(tmp_path: Path, text: str) -> None:
    """What is no mapping of names to definitions is told in one line; nothing in a file is ever run."""
    file = tmp_path / "tools.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SetupError) as refused:
        tools.read_file(file)
    assert "\n" not in str(refused.value)


def test_file_is_refused_when_it_cannot_be_read(tmp_path: Path) -> None:
    """Not there, a directory, or not UTF-8: a sentence, not a traceback."""
    with pytest.raises(SetupError, match="cannot read"):
        tools.read_file(tmp_path / "none.yaml")
    with pytest.raises(SetupError, match="cannot read"):
        tools.read_file(tmp_path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("tools: {t: {description: caf\u00e9}}".encode("latin-1"))
    with pytest.raises(SetupError):
        tools.read_file(latin)


def test_scalars_mean_what_json_would_mean_when_they_are_written_plainly(tmp_path: Path) -> None:
    """Undo bodies reach the endpoint as they stand in the file: no sexagesimals, no Norway, no octals, every literal kept."""
    file = tmp_path / "tools.yaml"
    file.write_text(
        "tools: {t: {args: {time: 12:30, country: NO, zip: 01234, grouped: 1_000, on: x, day: 2026-01-01, "
        "amount: 2500.10, big: 12345678901234567890, small: 1E+2, yes: true, none: null, text: '1'}}}",
        encoding="utf-8",
    )
    assert dump(tools.read_file(file)["t"]["args"]).decode() == (
        '{"time":"12:30","country":"NO","zip":"01234","grouped":"1_000","on":"x","day":"2026-01-01",'
        '"amount":2500.10,"big":12345678901234567890,"small":1E+2,"yes":true,"none":null,"text":"1"}'
    )


def test_json_is_a_file_too(tmp_path: Path) -> None:
    """JSON is YAML, so what another program wrote can be applied."""
    file = tmp_path / "tools.json"
    file.write_text('{"tools": {"t": {"reversibility": "read_only"}}}', encoding="utf-8")
    assert tools.read_file(file) == {"t": {"reversibility": "read_only"}}


def test_key_is_refused_unseen_when_it_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key with a line break, or a word with an umlaut, is told apart from a service that is away, and not repeated."""
    monkeypatch.setenv("COUNTERMAND_URL", "http://127.0.0.1:9")
    for key in ("cm_secret\nx", "sch\u00fcssel"):
        monkeypatch.setenv("COUNTERMAND_ADMIN_KEY", key)
        with pytest.raises(SetupError) as refused:
            tools.connect()
        assert key not in str(refused.value)


@pytest.mark.parametrize("missing", ["COUNTERMAND_URL", "COUNTERMAND_ADMIN_KEY"])
def test_command_says_what_to_set_when_a_setting_is_missing(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Address and key come from the environment, and nothing is guessed."""
    monkeypatch.setenv("COUNTERMAND_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("COUNTERMAND_ADMIN_KEY", f"cm_{'0' * 12}_{'0' * 64}")
    monkeypatch.setenv(missing, "")
    with pytest.raises(SetupError, match="COUNTERMAND_URL and COUNTERMAND_ADMIN_KEY"):
        tools.connect()


def test_key_is_the_files_when_one_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A secret store mounts the key; given both ways, or with no file there, nothing is guessed."""
    key = f"cm_{'0' * 12}_{'0' * 64}"
    (tmp_path / "key").write_text(f"{key}\n", encoding="utf-8")
    monkeypatch.setenv("COUNTERMAND_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("COUNTERMAND_ADMIN_KEY", "")
    monkeypatch.setenv("COUNTERMAND_ADMIN_KEY_FILE", str(tmp_path / "key"))
    with tools.connect() as client:
        assert client.headers["Authorization"] == f"Bearer {key}"
    monkeypatch.setenv("COUNTERMAND_ADMIN_KEY", key)
    with pytest.raises(SetupError, match="not both"):
        tools.connect()
    monkeypatch.setenv("COUNTERMAND_ADMIN_KEY", "")
    monkeypatch.setenv("COUNTERMAND_ADMIN_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(SetupError, match="COUNTERMAND_ADMIN_KEY_FILE: cannot read"):
        tools.connect()


def test_answer_that_is_no_json_is_a_refusal_when_something_else_listens() -> None:
    """A proxy's error page, or another service's 200, is told with the request and its status, not with a traceback."""
    for status in (200, 201, 302, 404, 502):

        def answer(request: httpx.Request, status: int = status) -> httpx.Response:
            return httpx.Response(status, text="<html>") if request.method == "PUT" else httpx.Response(404)

        with (
            httpx.Client(transport=httpx.MockTransport(answer), base_url="http://tools.test") as client,
            pytest.raises(SetupError, match=rf"PUT /v1/tools/t: {status}"),
        ):
            list(tools.apply(client, {"t": {}}, is_dry_run=False))
