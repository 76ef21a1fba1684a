"""Ask a service whether it lives or can serve, as a container's health check does. Must not load more than the standard library.

It is started anew every few seconds: the settings proper take a second of processor to load, so they are loaded only where a `.env` may
say what the environment does not.
"""

import argparse
import http.client
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from app.cli.manners import SetupError

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8420  # those of app.settings; a test compares
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (listened on, never asked)
LIVE_PATH, READY_PATH = "/livez", "/readyz"
TIMEOUT_SECONDS = 3.0  # the service itself gives its database a second
EXPECTED = "--url: expected an address like http://127.0.0.1:8420"
MAX_ANSWER_BYTES = 65_536
MAX_SHOWN_CHARACTERS = 300


class Unreachable(Exception):
    """Nobody answered; the text is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What was answered: whether all is well, and one line that says so or why not."""

    is_good: bool
    line: str


def read_words(words: Sequence[str]) -> argparse.Namespace:
    """Return `url` (None: not given) and `ready` from the command line; ends with 2 and the usage where it has others."""
    parser = argparse.ArgumentParser(
        "countermand health", description="Ask a service how it is: exit code 0 well, 1 not well, 5 no answer."
    )
    parser.add_argument("--url", help="the service's address; else the one that these settings would listen on here")
    parser.add_argument("--ready", action="store_true", help="ask whether it can serve (/readyz), not only whether it lives (/livez)")
    return parser.parse_args(words)


def ask(url: str | None, *, is_readiness: bool) -> Health:
    """GET `/livez`, or `/readyz`, of the service at `url`; None: of the one that these settings would start on this machine.

    Raises:
        SetupError: no http(s) address, or the settings leave the port open. Unreachable: no answer in time.
    """
    address = _read(url if url is not None else local_url())
    path = address.path.rstrip("/") + (READY_PATH if is_readiness else LIVE_PATH)
    status, body = _get(address, path)
    if status == http.client.OK and _members(body).get("status") == "ok":
        return Health(is_good=True, line="ready" if is_readiness else "live")
    detail = _members(body).get("detail") or "not an answer of this service"
    return Health(is_good=False, line=f"{path} answered {status}: {_printable(str(detail))}")


def local_url() -> str:
    """Return where the service listens as configured, on loopback where it listens everywhere."""
    host, port = _configured()
    if port == 0:
        raise SetupError("COUNTERMAND_PORT=0 leaves the port to the system: name the address by --url")
    host = EVERYWHERE.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _configured() -> tuple[str, int]:
    if Path(".env").exists():
        from app.settings import Settings

        settings = Settings()
        return settings.host, settings.port
    given = {name.upper(): value for name, value in os.environ.items() if value}
    port = given.get("COUNTERMAND_PORT", str(DEFAULT_PORT)).strip()
    if re.fullmatch("[0-9]{1,5}", port) is None:
        raise SetupError("COUNTERMAND_PORT: expected a number")
    return given.get("COUNTERMAND_HOST", DEFAULT_HOST), int(port)


def _read(url: str) -> SplitResult:
    """Take an address apart.

    Raises:
        SetupError: it is none of HTTP.
    """
    try:
        address = urlsplit(url)
        is_whole = bool(address.hostname) and (address.port is None or address.port > 0)
    except ValueError:
        raise SetupError(EXPECTED) from None
    is_plain = url.isascii() and url.isprintable() and " " not in url and address.username is None
    if not is_whole or not is_plain or address.scheme not in {"http", "https"}:
        raise SetupError(EXPECTED)
    return address


def _get(address: SplitResult, path: str) -> tuple[int, bytes]:
    connect = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    assert address.hostname is not None
    connection = connect(address.hostname, address.port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", path, headers={"Accept": "application/json", "Connection": "close"})
        response = connection.getresponse()
        return response.status, response.read(MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException) as error:
        where = f"{address.hostname} port {connection.port}"
        raise Unreachable(f"no answer from {where}: {_printable(str(error)) or type(error).__name__}") from error
    finally:
        connection.close()


def _members(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _printable(text: str) -> str:
    """Keep whoever answered from writing more than one plain line on a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text[:MAX_SHOWN_CHARACTERS])
