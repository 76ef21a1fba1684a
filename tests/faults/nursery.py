"""A process that has done the service's imports and forks it: a start costs a tenth of a second, not two of CPU time.

Must not open, read or start anything of the service before the fork: what a service has, it made itself.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Self

import time_machine

REPOSITORY = Path(__file__).resolve().parent.parent.parent
MAX_REQUEST_BYTES = 65_536
SKEW = "CLOCK_SKEW_SECONDS"  # in the environment: how far the time of day of what is forked is off; spans are measured as ever


class Nursery:
    """Forks `countermand` with arguments and settings; whatever it forked ends with it, and it ends with the process that opened it.

    `environment` is added to this process's own, for it and for all that it forks.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """Spawn it; the imports go on beside whatever this process does next."""
        self._control, far_end = socket.socketpair()
        with far_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.nursery", str(far_end.fileno())],
                cwd=REPOSITORY,
                env=_clean_environment() | dict(environment or {}),
                pass_fds=(far_end.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # what is forked ends as one group, and Ctrl-C at the terminal is for whoever opened it
            )

    def __enter__(self) -> Self:
        """Be closed at the end."""
        return self

    def __exit__(self, *_error: object) -> None:
        """End it with all that it forked."""
        self._control.close()
        self._process.wait()

    def fork(self, arguments: Sequence[str], settings: Mapping[str, str], directory: Path, log: int) -> int:
        """Start a service whose log goes to the open descriptor `log`, and return its number."""
        request = {"arguments": list(arguments), "settings": dict(settings), "directory": str(directory)}
        socket.send_fds(self._control, [json.dumps(request).encode()], [log])
        return self._answer()

    def exit_code(self, pid: int) -> int:
        """Return the exit code (minus the signal that ended it) of one that has ended; blocks until then."""
        self._control.send(json.dumps({"pid": pid}).encode())
        return self._answer()

    def _answer(self) -> int:
        answer = self._control.recv(MAX_REQUEST_BYTES)
        if not answer:
            raise RuntimeError(f"the nursery ended by itself: exit code {self._process.wait()}")
        return int(answer)


def _clean_environment() -> dict[str, str]:
    """Keep this process's variables but settings of the service; where bytecode may not lie beside the sources, none is written."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COUNTERMAND_")} | {"PYTHONPATH": str(REPOSITORY)}


def _become(request: Mapping[str, Any], log: int) -> NoReturn:
    """Be the service from here on."""
    from app.cli import main  # noqa: PLC0415 - loaded already, by who forked this

    skew = timedelta(seconds=float(os.environ.get(SKEW, "0")))
    if skew:
        time_machine.travel(skew, tick=True).start()
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    os.chdir(request["directory"])
    os.environ.update(request["settings"])
    sys.argv = ["countermand", *request["arguments"]]
    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(control: socket.socket) -> None:
    """Fork and bury as told, until nobody is there to tell."""
    import app.cli.migrating  # noqa: PLC0415 - the one who only opens a nursery does without all this
    import app.cli.serving  # noqa: F401, PLC0415 - as above

    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 1)
        if not message:
            os.killpg(0, signal.SIGKILL)
        request = json.loads(message)
        if "pid" in request:
            _, status = os.waitpid(request["pid"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                control.close()
                _become(request, descriptors[0])
            os.close(descriptors[0])
        control.send(str(answer).encode())


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as opened:
        _run(opened)
