"""Run `countermand serve` as a process of its own, kill it, start it again. Must not import what that process runs."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from app.cli.demo.failure import DemoFailed
from app.cli.demo.listeners import LOOPBACK

ROOT = Path(__file__).resolve().parents[3]
START_SECONDS = 60.0  # under a second on an idle machine; the first start of a fresh clone compiles every module
STOP_SECONDS = 15.0  # its own grace period and the closing of its connections
TAIL_LINES = 20
# On Linux the service ends with this process, even if that is killed: a demo leaves nothing running. Elsewhere it is started plainly.
FOLLOW_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the demo has gone")
os.execv(sys.executable, [sys.executable, "-m", "app", "serve"])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One running service."""

    process: subprocess.Popen[bytes]
    url: str

    def kill(self) -> None:
        """Kill it as a power cut would, and wait until it is gone."""
        self.process.kill()
        self.process.wait(STOP_SECONDS)


@contextmanager
def serving(environment: Mapping[str, str], log: Path) -> Iterator[Server]:
    """Start the service with only these COUNTERMAND_ settings, wait until it serves, and stop it at the end; its log is appended to `log`.

    Raises:
        DemoFailed: it ended at once, or does not serve within `START_SECONDS`.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COUNTERMAND_")}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", FOLLOW_PARENT, str(os.getpid())],
        cwd=ROOT,
        env={**inherited, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C at the terminal is for the demo, which then stops the service
    )
    assert process.stderr is not None
    port: Future[int] = Future()
    reader = threading.Thread(target=_follow, args=(process.stderr, log, port), daemon=True)
    reader.start()
    try:
        yield Server(process=process, url=f"http://{LOOPBACK}:{_await_port(port)}")
    finally:
        _stop(process)
        reader.join()  # ends with the stream, and the stream has ended
        process.stderr.close()


def tail(log: Path) -> str:
    """Return the last lines of the service's log, indented."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, then make it; harmless when it has ended."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_SECONDS)


def _await_port(port: Future[int]) -> int:
    try:
        return port.result(START_SECONDS)
    except TimeoutError as error:
        raise DemoFailed(f"the service did not start to serve within {START_SECONDS:g} s") from error


def _follow(stream: IO[bytes], log: Path, port: Future[int]) -> None:
    """Copy the service's log to a file, line by line, and pick out of it where it serves."""
    with log.open("ab", buffering=0) as kept:
        for line in stream:
            kept.write(line)
            found = _serving_port(line)
            if found is not None and not port.done():
                port.set_result(found)
    if not port.done():
        port.set_exception(DemoFailed("the service ended before it served"))


def _serving_port(line: bytes) -> int | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or event.get("event") != "serving":
        return None
    return int(event["port"])
