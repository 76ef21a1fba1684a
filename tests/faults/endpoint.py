"""An endpoint in a process of its own, whose log on disk is the ground truth of what was done. Must not import `app`.

By hand: `python -m tests.faults.endpoint --log FILE`. The first line on stdout is `{"port": N}`; each line on stdin replaces what is played
at some paths, `{"/undo/a": [{"status": 503}, {"mode": "hang"}]}`, and is answered by an empty object. It ends when stdin does.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self, TypeAlias

from tests.fakes import DEFAULT_WAIT_SECONDS, FakeEndpoint, Mode, Received, Reply, read_log

REPOSITORY = Path(__file__).resolve().parent.parent.parent
MAX_LINE_BYTES = 4 * 1024 * 1024  # of one script

JsonReply: TypeAlias = Mapping[str, object]
JsonScript: TypeAlias = Mapping[str, Sequence[JsonReply]]

MEMBERS = {"status", "headers", "body", "mode", "delay_seconds", "applies", "busy_status", "forgets_key"}


def reply_from_json(value: JsonReply) -> Reply:
    """Read one reply of a script: the fields of `Reply` without `gate`; `body` is text.

    Raises:
        ValueError: an unknown member or mode.
    """
    unknown = value.keys() - MEMBERS
    if unknown:
        message = f"unknown members of a reply: {sorted(unknown)}"
        raise ValueError(message)
    headers, applies, busy_status = value.get("headers", {}), value.get("applies"), value.get("busy_status")
    assert isinstance(headers, Mapping)
    return Reply(
        status=int(str(value.get("status", 200))),
        headers={str(name): str(text) for name, text in headers.items()},
        body=str(value.get("body", "{}")).encode(),
        mode=Mode(str(value.get("mode", "normal"))),
        delay_seconds=float(str(value.get("delay_seconds", 0.0))),
        applies=None if applies is None else bool(applies),
        busy_status=None if busy_status is None else int(str(busy_status)),
        forgets_key=bool(value.get("forgets_key", False)),
    )


class EndpointProcess:
    """A `FakeEndpoint` in a process of its own, which outlives a killed service and ends with this one.

    `script`: path -> replies as JSON values (see `reply_from_json`). The same `log_path` may be used again after a restart.
    """

    def __init__(self, log_path: Path, script: JsonScript | None = None, *, port: int = 0, remembers_keys: bool = True) -> None:
        """Keep the command; the process runs from `async with` on."""
        self.log_path = log_path
        self.port = port
        self._script = script or {}
        self._arguments = ["--log", str(log_path), *([] if remembers_keys else ["--forgets-keys"])]
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        """Start it and wait for its port."""
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, "-m", "tests.faults.endpoint", "--port", str(self.port), *self._arguments]
        self._process = await asyncio.create_subprocess_exec(*command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, start_new_session=True)
        self.port = (await self._told())["port"]
        await self.play(self._script)
        return self

    async def __aexit__(self, *_error: object) -> None:
        """End it and wait for it."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), DEFAULT_WAIT_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def url(self, path: str = "/") -> str:
        """Return the absolute URL of `path` there."""
        return f"http://127.0.0.1:{self.port}{path}"

    async def play(self, script: JsonScript) -> None:
        """Replace what is to be played at these paths, and return once that holds."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(script).encode() + b"\n")
        await self._process.stdin.drain()
        await self._told()

    def received(self, offset: int = 0) -> list[Received]:
        """Return what has arrived, from the file, beginning at a place in it."""
        return read_log(self.log_path, offset)

    async def _told(self) -> dict[str, int]:
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(DEFAULT_WAIT_SECONDS):
            told: dict[str, int] = json.loads(await self._process.stdout.readline())
        return told


def _tell(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def _serve(options: argparse.Namespace) -> None:
    """Listen, and play what comes on stdin, until that ends."""
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with FakeEndpoint(remembers_keys=not options.forgets_keys, port=options.port, log_path=options.log) as endpoint:
        _tell({"port": endpoint.port})
        while line := await reader.readline():
            for path, replies in json.loads(line).items():
                endpoint.script(path, *map(reply_from_json, replies))
            _tell({})


def main() -> None:
    """Run one endpoint in the foreground."""
    parser = argparse.ArgumentParser(description="A scripted HTTP endpoint on 127.0.0.1 that logs every request it gets.")
    parser.add_argument("--port", type=int, default=0, help="0: any free one; the first line on stdout tells which")
    parser.add_argument("--log", type=Path, help="file for the requests, JSON Lines, fsynced before each answer")
    parser.add_argument("--forgets-keys", action="store_true", help="apply an effect again when its Idempotency-Key comes again")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
