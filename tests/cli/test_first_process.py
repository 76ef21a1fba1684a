"""What a command does as process 1 of a container, where the kernel drops the signals that nobody handles. Must not start a container."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden import REPOSITORY

PATIENCE_SECONDS = 60
TERMINATED_BY_SIGNAL = -signal.SIGTERM
ENDED_BY_ITSELF = 128 + signal.SIGTERM
# A command that waits for what nobody writes, and says so first.
PROGRAM = """
import os, sys, typer
os.getpid = lambda: {pid}
import app.cli
app.cli.cli.command("wait")(lambda: (print("waiting", flush=True), sys.stdin.read()))
sys.argv = ["countermand", "wait"]
app.cli.main()
"""


@pytest.mark.parametrize(("pid", "code"), [(1, ENDED_BY_ITSELF), (4711, TERMINATED_BY_SIGNAL)])
def test_command_ends_when_it_is_told_to_as_the_first_process(tmp_path: Path, pid: int, code: int) -> None:
    """`migrate` as a container of its own ends on SIGTERM at once; elsewhere the kernel does that, and the shell is told of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(pid=pid)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == code
