"""Apply a file of tool registrations to a running service. Must not judge them: the service does."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import yaml

from app.cli import yaml_json
from app.cli.manners import SetupError
from app.domain.json_text import Json, dump
from app.domain.keys import read_key
from app.settings import read_secret

TIMEOUT_SECONDS = 30.0
# What the service adds to what was said.
_ANSWERED_ONLY = frozenset({"name", "version", "created_by", "created_at"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What applying the file does to one tool: `+` registers it, `~` makes a new version, `=` leaves it; `members` differ."""

    mark: str
    name: str
    members: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return one line for the person at the terminal."""
        return f"{self.mark} {self.name}" + (f": {', '.join(self.members)}" if self.members else "")


def read_file(path: Path) -> dict[str, dict[str, Json]]:
    """Read `tools: {name: definition}` from a YAML (or JSON) file.

    Raises:
        SetupError: it cannot be read, or has another form.
    """
    try:
        found = yaml_json.read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SetupError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    except yaml.YAMLError as error:
        raise SetupError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    tools = found.get("tools") if isinstance(found, dict) else None
    if not isinstance(tools, dict) or not all(isinstance(name, str) and isinstance(tool, dict) for name, tool in tools.items()):
        raise SetupError(f"{path}: expected a mapping `tools:` of names to definitions")
    try:
        dump(tools)
    except (TypeError, ValueError, RecursionError) as error:  # YAML can say sets, references to itself, halves of characters
        raise SetupError(f"{path} holds what JSON has no word for: {error}") from error
    return tools


def connect() -> httpx.Client:
    """Return a client of the service that COUNTERMAND_URL names, with the key in COUNTERMAND_ADMIN_KEY, or in the file of ..._FILE.

    Raises:
        SetupError: one of them is missing, or the key is given both ways.
    """
    url, key = os.environ.get("COUNTERMAND_URL"), _admin_key()
    if not url or not key:
        raise SetupError("set COUNTERMAND_URL and COUNTERMAND_ADMIN_KEY: the service's address and an admin's key")
    if read_key(key) is None:
        raise SetupError("COUNTERMAND_ADMIN_KEY is not shaped like a key: expected cm_..., as `keys create` printed it")
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_SECONDS, trust_env=False)


def _admin_key() -> str | None:
    key, file = os.environ.get("COUNTERMAND_ADMIN_KEY"), os.environ.get("COUNTERMAND_ADMIN_KEY_FILE")
    if not file:
        return key
    if key:
        raise SetupError("COUNTERMAND_ADMIN_KEY: set this or COUNTERMAND_ADMIN_KEY_FILE, not both")
    try:
        return read_secret(Path(file))
    except ValueError as error:
        raise SetupError(f"COUNTERMAND_ADMIN_KEY_FILE: {error}") from error


def apply(client: httpx.Client, tools: Mapping[str, dict[str, Json]], *, is_dry_run: bool) -> Iterator[Step]:
    """Register what is new or differs, tool by tool, and yield what was done, or would be.

    Raises:
        SetupError: the service refuses, with its reason.
    """
    for name, definition in tools.items():
        path = f"/v1/tools/{quote(name, safe='')}"
        before = client.get(path)
        registered = {} if before.status_code == httpx.codes.NOT_FOUND else _checked(before)
        after = client.put(
            path, content=dump(definition), headers={"Content-Type": "application/json"}, params={"dry_run": "true"} if is_dry_run else {}
        )
        yield _step(name, registered, _checked(after), is_new_version=after.status_code == httpx.codes.CREATED)


def _step(name: str, registered: Mapping[str, Any], applied: Mapping[str, Any], *, is_new_version: bool) -> Step:
    if not is_new_version:
        return Step(mark="=", name=name)
    if not registered:
        return Step(mark="+", name=name)
    members = (member for member in applied if member not in _ANSWERED_ONLY and applied[member] != registered.get(member))
    return Step(mark="~", name=name, members=tuple(sorted(members)))


def _checked(response: httpx.Response) -> Mapping[str, Any]:
    try:
        found = response.json()
    except ValueError:
        found = None
    body: Mapping[str, Any] = found if isinstance(found, dict) else {}
    if body and response.is_success:
        return body
    detail = body.get("detail") or f"{response.status_code}, and no answer of this service"
    faults = [f"{fault.get('pointer', '')}: {fault.get('detail', '')}" for fault in body.get("errors") or []]
    request = response.request
    # Most refusals with one fault say its sentence as their own.
    said = faults if len(faults) == 1 and faults[0].endswith(f": {detail}") else [detail, *faults]
    raise SetupError(f"{request.method} {request.url.path}: {'; '.join(said)}")
