"""`countermand health`: what it asks, what it makes of the answer, and what asking costs. Must not test what health is: the API does."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from app.cli.health import Unreachable, ask, local_url
from app.cli.manners import SetupError
from app.settings import Settings
from tests.golden import REPOSITORY

PATIENCE_SECONDS = 60
GOOD = (200, b'{"status": "ok", "checks": {}}')
NOT_READY = (503, b'{"status": 503, "code": "not_ready", "detail": "database: unreachable"}')
# Answers that are no health of this service -> what the one line says.
STRANGE: dict[str, tuple[tuple[int, bytes], str]] = {
    "another service": ((200, b"<html>hello</html>"), "not an answer of this service"),
    "no object": ((200, b"[1]"), "not an answer of this service"),
    "other words": ((200, b'{"status": "UP"}'), "not an answer of this service"),
    "elsewhere": ((307, b'{"status": "ok"}'), "answered 307"),
    "too deep": ((200, b"[" * 60_000), "not an answer of this service"),
    "too long": ((503, json.dumps({"detail": "x" * 100_000}).encode()), "not an answer of this service"),
    "terminal's own": ((503, json.dumps({"detail": "a\nb\x1b[31m\u202e"}).encode()), "a?b?[31m?"),
}
NO_ADDRESSES = [
    "",
    "localhost:8420",
    "ftp://127.0.0.1",
    "http://",
    "http://u:p@127.0.0.1",
    "http://127.0.0.1:0",
    "http://h:99999",
    "http://a b/",
]
# What must not be loaded for a question that is asked every few seconds.
HEAVY = {"asyncpg", "fastapi", "httpx", "pydantic", "sqlalchemy", "starlette", "uvicorn"}


class Answering(ThreadingHTTPServer):
    """Gives one answer to everything and remembers what was asked."""

    def __init__(self, answer: tuple[int, bytes]) -> None:
        """Listen on a loopback port."""
        self.answer = answer
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), Exchange)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class Exchange(BaseHTTPRequestHandler):
    """One request."""

    server: Answering

    def do_GET(self) -> None:
        """Answer as told."""
        self.server.asked.append(self.path)
        status, body = self.server.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Keep quiet."""


@contextmanager
def answering(answer: tuple[int, bytes]) -> Iterator[Answering]:
    """Serve an answer for the length of the block."""
    with Answering(answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def run(directory: Path, *words: str, **settings: str) -> "subprocess.CompletedProcess[str]":
    """Run the command with these settings and no others; it then tells what it has loaded."""
    program = (
        "import atexit, sys; atexit.register(lambda: print(*sorted(m for m in sys.modules if '.' not in m)));"
        f"sys.argv = ['countermand', 'health', *{words!r}]; from app.cli import main; main()"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COUNTERMAND_")}
    environment |= {"PYTHONPATH": str(REPOSITORY)} | {f"COUNTERMAND_{name}": value for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def hang_up(listener: socket.socket) -> None:
    """Take one connection and close it."""
    listener.accept()[0].close()


def closed_port() -> int:
    """Return a port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_exit_code_tells_how_it_is_when_asked_on_the_command_line(tmp_path: Path) -> None:
    """As a container's health check runs it: address from the settings, one line, and nothing loaded that is not needed."""
    with answering(GOOD) as server:
        well = run(tmp_path, HOST="0.0.0.0", PORT=str(server.server_address[1]))
        server.answer = NOT_READY
        unready = run(tmp_path, "--ready", "--url", server.url)
        assert server.asked == ["/livez", "/readyz"]
    gone = run(tmp_path, PORT=str(closed_port()))
    wrong = run(tmp_path, PORT="http")
    assert [found.returncode for found in (well, unready, gone, wrong)] == [0, 1, 5, 2]
    line, loaded = well.stdout.splitlines()
    assert line == "live"
    assert "http" in loaded.split()
    assert HEAVY & set(loaded.split()) == set()
    assert unready.stderr == "countermand: /readyz answered 503: database: unreachable\n"
    assert gone.stderr.startswith("countermand: no answer from 127.0.0.1 port ")
    assert wrong.stderr == "countermand: COUNTERMAND_PORT: expected a number\n"
    assert len(gone.stderr.splitlines()) == 1


@pytest.mark.parametrize("case", STRANGE)
def test_answer_is_not_well_when_it_is_not_the_services_own(case: str) -> None:
    """Whatever else listens on the port: it is not healthy, said in one plain line of bounded length."""
    answer, said = STRANGE[case]
    with answering(answer) as server:
        found = ask(server.url, is_readiness=False)
    assert not found.is_good
    assert said in found.line
    assert found.line.isprintable()
    assert len(found.line) < 400


def test_path_is_kept_when_the_address_has_one() -> None:
    """Behind a proxy the service may live below a path."""
    with answering(GOOD) as server:
        assert ask(f"{server.url}/saga/", is_readiness=True).is_good
        assert server.asked == ["/saga/readyz"]


def test_nobody_answers_when_something_else_speaks_there() -> None:
    """A port where the other side hangs up is no answer, and no traceback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hanging_up = threading.Thread(target=hang_up, args=(listener,))
        hanging_up.start()
        with pytest.raises(Unreachable, match=r"no answer from 127\.0\.0\.1"):
            ask(f"http://127.0.0.1:{listener.getsockname()[1]}", is_readiness=False)
        hanging_up.join()


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_address_is_refused_when_it_is_none(url: str) -> None:
    """A mistake in a health check's own line is told from a service that is not well."""
    with pytest.raises(SetupError, match="--url: expected an address"):
        ask(url, is_readiness=False)


def test_address_is_the_services_when_the_settings_say_where_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same defaults, names and `.env` as the service; loopback where it listens everywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COUNTERMAND_HOST", raising=False)
    monkeypatch.delenv("COUNTERMAND_PORT", raising=False)
    defaults = Settings(_env_file=None)
    assert local_url() == f"http://{defaults.host}:{defaults.port}"
    monkeypatch.setenv("countermand_port", "9999")
    for host, asked in {"0.0.0.0": "127.0.0.1", "::": "[::1]", "fd00::7": "[fd00::7]", "10.1.2.3": "10.1.2.3"}.items():
        monkeypatch.setenv("COUNTERMAND_HOST", host)
        assert local_url() == f"http://{asked}:9999"
        assert Settings(_env_file=None).port == 9999
    monkeypatch.setenv("COUNTERMAND_HOST", "")
    (tmp_path / ".env").write_text("COUNTERMAND_HOST=::\nCOUNTERMAND_PORT=7777\n", encoding="utf-8")
    assert local_url() == "http://[::1]:9999", "the environment comes before the file"
    monkeypatch.delenv("countermand_port")
    assert local_url() == "http://[::1]:7777"


def test_address_is_asked_for_when_the_port_is_left_to_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody can know it; the message names the way out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COUNTERMAND_PORT", "0")
    with pytest.raises(SetupError, match="--url"):
        local_url()
