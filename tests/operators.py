"""What an operator does at night: read the escalation, paste one of its commands into a shell. Must not assert anything."""

import argparse
import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.factories import Client, JsonObject
from tests.fakes import FakeEndpoint, Received
from tests.probes import PATIENCE_SECONDS, fetch, rest

# Says with what it was called: one unit separator, then each argument with a NUL after it.
CURL = r"""#!/bin/sh
printf '\037'
printf '%s\0' "$@"
"""


class ShellError(Exception):
    """The shell, or a command in it, said no."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shell:
    """A real shell that finds nothing to run but a `curl` that says with what it was called."""

    program: str
    path: Path

    async def run(self, command: str, **environment: str) -> list[list[str]]:
        """Run a command line and return the arguments of every curl in it.

        Raises:
            ShellError: it ended with another status than 0, or said something on stderr.
        """
        process = await asyncio.create_subprocess_exec(
            self.program,
            "-c",
            command,
            env={"PATH": str(self.path), **environment},
            cwd=self.path,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, complaint = await process.communicate()
        if process.returncode or complaint:
            raise ShellError(complaint.decode())
        return [call.split("\0")[:-1] for call in said.decode().split("\x1f")[1:]]


def open_shell(directory: Path, name: str = "sh") -> Shell:
    """Make a shell that works in `directory`, where its `curl` is put."""
    program = shutil.which(name)
    if program is None:
        raise FileNotFoundError(name)
    curl = directory / "curl"
    curl.write_text(CURL, encoding="ascii")
    curl.chmod(0o700)
    return Shell(program=program, path=directory)


async def send(client: Client, arguments: list[str]) -> httpx.Response:
    """Send what curl would send when called like this, to the client's application; the key is the command's own.

    Raises:
        argparse.ArgumentError, SystemExit: an option that is not known here.
    """
    parser = argparse.ArgumentParser("curl", add_help=False, allow_abbrev=False)
    parser.add_argument("-sS", action="store_true", required=True)
    parser.add_argument("-X", dest="method")
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("-d", dest="data", default="")
    parser.add_argument("url")
    asked = parser.parse_args(arguments)
    headers = dict(header.split(": ", 1) for header in asked.headers)
    return await client.http.request(asked.method, asked.url, headers=headers, content=asked.data.encode())


async def paste(shell: Shell, client: Client, command: str, reason: str, **environment: str) -> httpx.Response:
    """Paste a command, with a key and a reason in the environment, and send what comes of it."""
    (arguments,) = await shell.run(command, COUNTERMAND_KEY=client.key, REASON=reason, **environment)
    return await send(client, arguments)


async def escalation(client: Client, session_id: str) -> JsonObject:
    """Return what a person gets of a session, which somebody has to look at."""
    response = await client.get(f"/sessions/{session_id}/escalation")
    response.raise_for_status()
    found: JsonObject = response.json()
    return found


def move_of(package: JsonObject, name: str, step: int | None = None, **body: Any) -> JsonObject:
    """Return the one move of that name that says `body`, about that step where it is about one."""
    undo_ids = {entry["step_index"]: entry["undo_id"] for entry in package["undo_stack"]}
    below = "" if step is None else f"/effects/{step}/" if name == "settle" else f"/undo/{undo_ids[step]}/"
    (found,) = [move for move in package["moves"] if move["name"] == name and move["body"] == body and below in move["url"]]
    move: JsonObject = found
    return move


async def order(client: Client, session_id: str, path: str, reason: str = "because", **options: Any) -> httpx.Response:
    """Give an operator's order by hand: `path` is below the session; what is no option of the client's is said in the body."""
    known = {name: options.pop(name) for name in ("headers", "params") if name in options}
    return await client.post(f"/sessions/{session_id}/{path}", {"reason": reason, **options}, **known)


async def undo_ids(client: Client, session_id: str) -> dict[int, str]:
    """Return the undo ids of a session by step."""
    return {entry["step_index"]: entry["undo_id"] for entry in (await client.session(session_id))["undo_stack"]}


async def settled(client: Client, session_id: str) -> JsonObject:
    """Return a session that has failed once it is at rest."""
    found: JsonObject = await rest(client, session_id)
    return found


async def is_handed_back(database_url: str, session_id: str) -> None:
    """Return once the due call of a session waits for its time, in nobody's hands."""
    waiting = (
        "SELECT FROM outgoing_calls WHERE session_id = $1 AND due_at > clock_timestamp() AND leased_by IS NULL AND attempts > 0 "
        "AND NOT is_attempt_open"
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await fetch(database_url, waiting, session_id):
            pass  # every look is a round trip


def requests_of(endpoint: FakeEndpoint, session_id: str) -> list[Received]:
    """Return what reached an endpoint about one session, in order of arrival."""
    return [request for request in endpoint.received if request.header("Countermand-Session") == session_id]


def steps_of(endpoint: FakeEndpoint, session_id: str) -> list[int]:
    """Return which steps' undos reached an endpoint, in order of arrival."""
    return [int(request.header("Countermand-Step") or 0) for request in requests_of(endpoint, session_id)]


async def told(client: Client, session_id: str, kind: str) -> list[tuple[str, JsonObject]]:
    """Return actor and body of every journal entry of that kind."""
    return [(entry["actor"], json.loads(entry["body"])) for entry in await client.journal(session_id) if entry["kind"] == kind]
