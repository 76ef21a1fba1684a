"""Restate's server as a process of its own, with its settings as they come. Must not keep anything when the bench is over."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import httpx

from bench.lines import Fault

START_SECONDS = 60.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.05
INGRESS, ADMIN = "http-ingress-server", "admin-api-server"
OPTIONS = ("--listen-mode", "tcp", "--bind-ip", "127.0.0.1", "--use-random-ports", "true", "--no-logo")
SHOWN_BYTES = 2_000


class RestateServer:
    """One that runs."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        """Wait until it says where it listens."""
        self.pid = process.pid
        self._log = log
        deadline = monotonic() + START_SECONDS
        while not {INGRESS, ADMIN} <= (ports := self._ports()).keys():
            if process.poll() is not None or monotonic() > deadline:
                raise Fault(f"Restate does not serve: {log.read_text(encoding='utf-8', errors='replace')[-SHOWN_BYTES:]}")
            time.sleep(POLL_SECONDS)
        self.ingress_port = ports[INGRESS]
        self._admin_url = f"http://127.0.0.1:{ports[ADMIN]}"

    def register(self, port: int) -> None:
        """Make the service on a port known to it; both may still be on the way up."""
        deadline = monotonic() + START_SECONDS
        with httpx.Client(base_url=self._admin_url, trust_env=False, timeout=START_SECONDS) as client:
            while True:
                try:
                    answer = client.post("/deployments", json={"uri": f"http://127.0.0.1:{port}"})
                except httpx.TransportError as error:
                    found = str(error)
                else:
                    if answer.is_success:
                        return
                    found = answer.text
                if monotonic() > deadline:
                    raise Fault(f"Restate does not take the service: {found}")
                time.sleep(POLL_SECONDS)

    def _ports(self) -> dict[str, int]:
        """Return the port of each server of it that listens."""
        ports = {}
        for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines():
            if "istening" in line and line.startswith("{") and line.endswith("}"):
                span = json.loads(line)["span"]
                ports[span["server_name"]] = span["server.port"]
        return ports


@contextmanager
def running(program: Path, directory: Path) -> Iterator[RestateServer]:
    """Run it with its data under `directory` until the end of the block."""
    log = directory / "restate.log"
    settings = {"RESTATE_LOG_FORMAT": "json", "RESTATE_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1"}
    mine = {name: value for name, value in os.environ.items() if not name.startswith("RESTATE_")}
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [program, *OPTIONS, "--base-dir", directory / "restate"],
            env=mine | settings,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield RestateServer(process, log)
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    """Return a port that nobody listens on now; Restate has to be told one."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port: int = bound.getsockname()[1]
        return port
