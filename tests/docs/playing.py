"""Play a document: its blocks pasted from top to bottom against a real `dev`, as a reader would. Must not judge but by what it shows.

One `sh -eu` lives for the whole document, in a directory of the document's own. `curl` is a stand-in that keeps what was answered,
`python3` is this interpreter; other ports stand for those that documents show, everywhere. What each mark means: see `documents`.
"""

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import yaml

from app.cli import keys
from app.cli.serving import DEV_SUBJECTS
from app.engine.clock import SystemClock
from tests.docs.documents import OF_WHAT_STAYS, Block, Document, Kind, Wrong
from tests.golden import REPOSITORY

PATIENCE_SECONDS = 60  # for one block; most take less than a second
PROBE_SECONDS = 0.02
END_SECONDS = 10
SERVICE_PORT = 8420
# What a reader's own endpoint listens on.
READERS_PORT = re.compile(r"\b90[01]\d\b")
DEFAULT_READERS_PORT = "9009"
ROLES = ("AGENT", "OPERATOR", "AUDITOR", "ADMIN")
VARIABLES = ["COUNTERMAND_URL", *(f"COUNTERMAND_{role}_KEY" for role in ROLES)]
ANYTHING = "..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request that a block sent by curl, and how it was answered."""

    method: str
    url: str
    status: int
    text: str

    @property
    def refusal(self) -> str | None:
        """`409 payload_changed`, as a mark says it; without a code where the answer has none."""
        if self.status < 400:
            return None
        (problem, *_) = [*values_in(self.text), None]
        code = problem.get("code", "") if isinstance(problem, dict) else ""
        return f"{self.status} {code}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a block of shell printed and sent."""

    block: Block
    out: str
    requests: list[Request]


def put_stand_ins(directory: Path) -> Path:
    """Put `curl` and `python3` into a directory that is searched first; return the file that the requests will be in."""
    stand_ins = {"curl": f"-IS {shlex.quote(str(REPOSITORY / 'tests/docs/stand_in_curl.py'))}", "python3": ""}
    for name, words in stand_ins.items():
        (directory / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n', encoding="utf-8")
        (directory / name).chmod(0o755)
    return directory / "curl.log"


def put_interpreter(folder: Path) -> None:
    """Put what documents call `.venv/bin/python` into a folder: this interpreter, which has the clone's packages."""
    program = folder / ".venv/bin/python"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n', encoding="utf-8")
    program.chmod(0o755)


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


class Desk:
    """A reader's machine: one shell, further ones for what stays, and the files of a document."""

    def __init__(self, directory: Path, variables: Mapping[str, str]) -> None:
        """Lay the document's directory beside the player's own."""
        self.folder, self._own = directory / "folder", directory / "player"
        for each in (self.folder, self._own):
            each.mkdir()
        put_interpreter(self.folder)
        self._log = put_stand_ins(self._own)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("COUNTERMAND_")}
        own = {
            "CURL_LOG": str(self._log),
            "PATH": f"{self._own}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONUNBUFFERED": "1",
        }
        self._environment = {**kept, **own, **variables}
        service = urlsplit(variables["COUNTERMAND_URL"]).port if "COUNTERMAND_URL" in variables else None
        self._ports = {str(SERVICE_PORT): str(service)} if service else {}
        self._shell: Process | None = None
        self._staying: dict[str, tuple[Process, Path]] = {}
        self._pasted = 0

    async def __aenter__(self) -> Self:
        """Open the shell."""
        self._shell = await self._start("sh", "-eu", stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        return self

    async def __aexit__(self, *_error: object) -> None:
        """End everything that was started."""
        assert self._shell is not None
        for process in (self._shell, *(process for process, _ in self._staying.values())):
            await _end(process)

    def moved(self, text: str) -> str:
        """Put the real ports in the place of those shown."""
        for shown in READERS_PORT.findall(text):
            self._ports.setdefault(shown, str(free_port()))
        for shown, real in self._ports.items():
            text = re.sub(rf"\b{shown}\b", real, text)
        return text

    def save(self, name: str, text: str) -> None:
        """Keep a file of the document."""
        path = (self.folder / name).resolve()
        assert path.is_relative_to(self.folder.resolve()), name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.moved(text), encoding="utf-8")

    async def paste(self, text: str) -> tuple[str, list[Request]]:
        """Run a block in the shell; return what it printed and sent.

        Raises:
            Failed: it ended the shell, took too long, or complained on stderr.
        """
        assert self._shell is not None
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        block, out, err = self._files()
        block.write_text(self.moved(text), encoding="utf-8")
        self._log.write_text("", encoding="utf-8")
        words = f". {shlex.quote(str(block))} </dev/null >{shlex.quote(str(out))} 2>{shlex.quote(str(err))}\necho\n"
        with suppress(BrokenPipeError, ConnectionResetError):
            self._shell.stdin.write(words.encode())
            await self._shell.stdin.drain()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                if not await self._shell.stdout.readline():
                    raise Failed(f"a command failed: exit code {await self._shell.wait()}", _text(out) + _text(err))
        except TimeoutError as error:
            raise Failed(f"it does not end within {PATIENCE_SECONDS} s", _text(out) + _text(err)) from error
        if complaint := _text(err):
            raise Failed("it writes to stderr", _text(out) + complaint)
        sent = [Request(**json.loads(line)) for line in _text(self._log).splitlines()]
        return _text(out), sent

    async def stay(self, text: str, shown_port: str) -> None:
        """Start a block in a shell of its own, in the place of what stayed at that port before, and wait until its port is open.

        Raises:
            Failed: it ended, or opens no port in time.
        """
        if shown_port in self._staying:
            await _end(self._staying.pop(shown_port)[0])
        block, out, _ = self._files()
        block.write_text(self.moved(text), encoding="utf-8")
        port = int(self.moved(shown_port))
        with out.open("wb") as file:
            process = await self._start("sh", "-eu", str(block), stdin=DEVNULL, stdout=file, stderr=file)
        self._staying[shown_port] = (process, out)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not await _is_open(port):
                    if process.returncode is not None:
                        raise Failed(f"it ended with exit code {process.returncode} instead of staying", _text(out))
                    await SystemClock().sleep(PROBE_SECONDS)
        except TimeoutError as error:
            raise Failed(f"it does not listen on {shown_port} within {PATIENCE_SECONDS} s", _text(out)) from error

    def said_by_what_stays(self) -> str:
        """Return what all that stays has printed so far."""
        return "".join(_text(out) for _, out in self._staying.values())

    def _files(self) -> tuple[Path, Path, Path]:
        self._pasted += 1
        block, out, err = (self._own / f"{self._pasted}.{what}" for what in ("sh", "out", "err"))
        return block, out, err

    async def _start(self, *words: str, **streams: Any) -> Process:
        return await asyncio.create_subprocess_exec(*words, cwd=self.folder, env=self._environment, start_new_session=True, **streams)


class Failed(Exception):
    """A block did not do well; `printed` is what it printed."""

    def __init__(self, why: str, printed: str) -> None:
        super().__init__(why)
        self.why, self.printed = why, printed


async def play(document: Document, variables: Mapping[str, str], directory: Path) -> list[Ran]:
    """Play a document and return what its blocks of shell did.

    Raises:
        Wrong: a block fails, is refused or answered otherwise than shown, or cannot be played as it is marked.
    """
    ran: list[Ran] = []
    async with Desk(directory, variables) as desk:
        for block in document.blocks:
            try:
                await _play_block(block, desk, ran)
            except Failed as failed:
                raise Wrong(document.name, block, failed.why, failed.printed) from None
    return ran


async def _play_block(block: Block, desk: Desk, ran: list[Ran]) -> None:
    match block.kind:
        case Kind.RUN:
            out, requests = await desk.paste(block.text)
            ran.append(Ran(block=block, out=out, requests=requests))
            _judge_refusals(block, ran[-1])
        case Kind.STAYS:
            await desk.stay(block.text, block.marks["stays"] or DEFAULT_READERS_PORT)
        case Kind.SAVED:
            desk.save(block.marks["file"], block.text)
        case Kind.ANSWER:
            _judge_answer(block, desk, ran)
        case Kind.PARSED:
            _parse(block)
        case Kind.UNKNOWN:
            raise Failed(f"nothing is known to be done with it, marked {dict(block.marks)}", "")
        case Kind.SHOWN | Kind.NOT_RUN:
            pass


def _judge_refusals(block: Block, ran: Ran) -> None:
    refused = [request.refusal for request in ran.requests if request.refusal is not None]
    expected = block.marks["refused"].split(", ") if "refused" in block.marks else []
    if refused != expected:
        raise Failed(f"refused: {', '.join(refused) or 'nothing'}; expected: {', '.join(expected) or 'nothing'}", ran.out)


def _judge_answer(block: Block, desk: Desk, ran: list[Ran]) -> None:
    if block.marks["answer"] == OF_WHAT_STAYS:
        printed = desk.said_by_what_stays()
    elif block.marks["answer"] or not ran:
        raise Failed("there is nothing that it could be the answer of", "")
    else:
        printed = ran[-1].out
    shown = desk.moved(block.text)
    if not (is_among(_json(shown), values_in(printed)) if block.language == "json" else is_said(shown, printed)):
        raise Failed("the answer shown is not the one that came", printed)


def _json(shown: str) -> object:
    try:
        return json.loads(shown)
    except ValueError as error:
        raise Failed(f"it is no JSON: {error}", "") from error


def _parse(block: Block) -> None:
    try:
        yaml.safe_load(block.text)
    except yaml.YAMLError as error:
        raise Failed(f"it is no YAML: {error}", "") from error


def values_in(text: str) -> Iterator[object]:
    """Find the JSON objects and arrays that stand in a text, from left to right."""
    decoder, opening, at = json.JSONDecoder(), re.compile(r"[{\[]"), 0
    while (begin := opening.search(text, at)) is not None:
        try:
            value, at = decoder.raw_decode(text, begin.start())
        except ValueError:
            at = begin.end()
        else:
            yield value


def is_among(shown: object, found: Iterator[object]) -> bool:
    """Tell whether one of the values has all that is shown."""
    return any(is_part(shown, value) for value in found)


def is_part(shown: object, found: object) -> bool:
    """Tell whether a value has all that is shown: `...` in a string stands for any characters, alone for any value, or any more items."""
    match shown, found:
        case str(), _ if shown == ANYTHING:
            return True
        case dict(), dict():
            return all(name in found and is_part(value, found[name]) for name, value in shown.items())
        case [*first, last], list() if last == ANYTHING:
            return len(found) >= len(first) and all(map(is_part, first, found))
        case list(), list():
            return len(shown) == len(found) and all(map(is_part, shown, found))
        case str(), str():
            return re.fullmatch(_pattern(shown), found, re.DOTALL) is not None
        case _:
            return type(shown) is type(found) and shown == found


def is_said(shown: str, printed: str) -> bool:
    """Tell whether these lines were printed, one after the other: `...` stands for any characters, alone on a line for any lines."""
    lines = [r"(?:.*\n)*" if line.strip() == ANYTHING else _pattern(line.rstrip()) + r" *\n" for line in shown.splitlines()]
    return re.search("^" + "".join(lines), printed if printed.endswith("\n") else printed + "\n", re.MULTILINE) is not None


def _pattern(text: str) -> str:
    return ".*".join(map(re.escape, text.split(ANYTHING)))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


async def _is_open(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def _end(process: Process) -> None:
    """End a shell and all that it started: they are a session of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


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
        stdout=PIPE,
        stderr=DEVNULL,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            told = [(await process.stdout.readline()).decode() for _ in range(len(VARIABLES) + 2)]
        yield "".join(told)
    finally:
        process.terminate()
        await process.wait()


def variables_of(exports: str) -> dict[str, str]:
    """Read `export NAME=VALUE` lines as a shell does."""
    words = [shlex.split(line, comments=True) for line in exports.splitlines()]
    return dict(word[1].split("=", 1) for word in words if word)


@dataclass(frozen=True, slots=True, kw_only=True)
class Development:
    """A running `dev`: the lines that it printed, and its database."""

    exports: str
    database_url: str

    async def variables(self, org: str) -> dict[str, str]:
        """Return what the lines set, the last one too, with keys of an org of its own, and ORG.

        No document sees another's tools, sessions and questions.
        """
        return await asyncio.to_thread(self._variables, org)

    def _variables(self, org: str) -> dict[str, str]:
        made = {
            f"COUNTERMAND_{role.upper()}_KEY": keys.create(self.database_url, org=org, role=role, subject=subject).key
            for role, subject in DEV_SUBJECTS.items()
        }
        return variables_of(self.exports) | made | {"ORG": org, "COUNTERMAND_DATABASE_URL": self.database_url}
