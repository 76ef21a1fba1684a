"""Processes that do as they are told, one JSON line in, one JSON line out. Must not know what is said, nor need an installed package.

What is asked is `{"do": NAME, ...}`. The answer is `{"said": ...}`, or `{"fault": TEXT}`, which ends the bench.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

CLONE = Path(__file__).resolve().parent.parent
STOP_SECONDS = 10.0
MAX_LINE_BYTES = 16 * 1024 * 1024

Deed = Callable[..., Awaitable[object]]


class Fault(Exception):
    """A process of the bench failed; the message is its own account."""


class Process:
    """A module of the bench in a process of its own, which ends when the block does, or when this process is gone."""

    def __init__(self, python: Path, module: str, *arguments: str) -> None:
        """Start it; its stderr is this process's."""
        self._command: Sequence[str] = [str(python), "-m", module, *arguments]
        self._process = subprocess.Popen(
            self._command,
            cwd=CLONE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at the terminal is for the bench, which ends what it started
        )

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def __enter__(self) -> Self:
        """Be closed at the end."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """Tell it to end, and see that it did; after a failure nobody waits for what it is doing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if kind is not None:
            self._process.kill()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def ask(self, do: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON: whoever asks knows what is said
        """Have something done and return what it says of it.

        Raises:
            Fault: it could not, or it is gone.
        """
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: object) -> None:
        """Have something begun; `answer` waits for its end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self) -> Any:  # noqa: ANN401 - as ask
        """Wait for what it says of what it was told.

        Raises:
            Fault: as ask.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Fault(f"{' '.join(self._command[1:])} ended by itself, exit code {self._process.wait()}")
        said = json.loads(line)
        if "fault" in said:
            raise Fault(f"{self._command[2]}: {said['fault']}")
        return said["said"]


async def obey(deeds: Mapping[str, Deed]) -> None:
    """Be such a process: do what stdin asks for until it ends."""
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    # Libraries may print as they like: to stderr.
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        while line := await reader.readline():
            asked = json.loads(line)
            try:
                answer: dict[str, object] = {"said": await deeds[asked.pop("do")](**asked)}
            except Exception as error:  # noqa: BLE001 - whatever it was, the bench ends with it
                answer = {"fault": "".join(traceback.format_exception(error))}
            out.write(json.dumps(answer).encode() + b"\n")
            out.flush()


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run a process's main on uvloop where that is installed, else on asyncio's own loop."""
    loop_factory = importlib.import_module("uvloop").new_event_loop if importlib.util.find_spec("uvloop") else None
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
