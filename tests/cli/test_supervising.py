"""How workers are kept running, seen from outside with workers that do next to nothing. Must not start the service."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from app.cli.supervising import FIRST_PAUSE_SECONDS
from tests.golden import REPOSITORY

PATIENCE_SECONDS = 60
PROGRAM = """
import os, select, signal, sys
from app import observability
from app.cli.manners import SetupError
from app.cli.supervising import Supervisor

def fails(post):
    raise ValueError("a setting that cannot be")

def dies(post):
    post.tell_serving()
    os._exit(7)

def hangs(post):
    os.write(1, b"hanging\\n")
    while True:
        signal.pause()

def works(post):
    post.tell_serving()
    os.write(1, b"serving\\n")
    select.select([post.lifeline], [], [])

def ends_badly(post):
    works(post)
    sys.exit(1)

observability.configure()
try:
    ended = Supervisor({workers}, {work}, lambda: print("let go", flush=True)).run()
except SetupError as error:
    sys.exit(str(error))
print(f"ended {{ended}}", flush=True)
"""


@contextmanager
def supervisor(work: str, workers: int = 1) -> Iterator["subprocess.Popen[str]"]:
    """Run one with so many workers of that kind; all of them are gone at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(work=work, workers=workers)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def events(process: "subprocess.Popen[str]", name: str) -> Iterator[dict[str, object]]:
    """Yield what it logs under that name."""
    assert process.stderr is not None
    for line in process.stderr:
        event = json.loads(line)
        if event["event"] == name:
            yield event


def said(process: "subprocess.Popen[str]") -> str:
    """Return the next line that it prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_service_ends_with_a_sentence_when_no_worker_can_start() -> None:
    """What is set wrongly is not tried for ever."""
    with supervisor("fails", workers=2) as process:
        _, log = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert "ValueError: a setting that cannot be" in log
    assert "a worker ended with exit code 1 before any could serve" in log.splitlines()[-1]


def test_pause_doubles_when_a_worker_dies_again_and_again() -> None:
    """The first death costs next to nothing, and one that dies at once does not keep the machine busy."""
    with supervisor("dies") as process:
        died = events(process, "worker_died")
        told = [next(died) for _ in range(4)]
    assert [(event["number"], event["exit_code"], event["level"]) for event in told] == [(0, 7, "error")] * 4
    assert [event["pause_seconds"] for event in told] == [FIRST_PAUSE_SECONDS * factor for factor in (1, 2, 4, 8)]


@pytest.mark.parametrize(("work", "ended"), [("works", True), ("ends_badly", False)])
def test_workers_are_asked_to_end_when_a_signal_comes(work: str, *, ended: bool) -> None:
    """What only they may hold is given up first; then each ends by itself, and how is told."""
    with supervisor(work, workers=3) as process:
        assert [said(process) for _ in range(3)] == ["serving"] * 3
        process.send_signal(signal.SIGINT)
        assert [said(process), said(process)] == ["let go", f"ended {ended}"]


def test_workers_are_killed_when_a_second_signal_comes() -> None:
    """Whoever asks twice does not want to wait any longer."""
    with supervisor("hangs", workers=2) as process:
        assert [said(process), said(process)] == ["hanging"] * 2
        process.terminate()
        assert said(process) == "let go"
        process.terminate()
        assert said(process) == "ended False"


def test_another_comes_when_one_worker_is_told_to_stop() -> None:
    """An end that nobody has asked the supervisor for is a death, however clean."""
    with supervisor("works") as process:
        first = next(events(process, "worker_started"))["pid"]
        assert isinstance(first, int)
        assert said(process) == "serving"
        os.kill(first, signal.SIGTERM)
        assert next(events(process, "worker_died"))["pid"] == first
        assert said(process) == "serving"
        process.terminate()
        assert [said(process), said(process)] == ["let go", "ended True"]
