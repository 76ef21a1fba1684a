"""What is known of one run from the outside: what clients saw, what the endpoint did, what the journals say. Must not judge."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from tests.fakes import Received

JsonObject = dict[str, Any]


class Heard(StrEnum):
    """What a client knows of one attempt. `info`: it may have been done or not; the others speak for themselves."""

    OPEN = "open"
    OK = "ok"
    FAIL = "fail"
    INFO = "info"


@dataclass(slots=True, kw_only=True)
class Call:
    """One attempt of a client's call: its invocation, and what was heard of it.

    Attempts with one `number` are one call, asked again under one key because its answer was lost. `allowed` are codes of refusals that
    are in order here; `must_refuse`: nothing else is. Times are `time.monotonic()` seconds.
    """

    number: int
    attempt: int
    org: str
    who: str
    op: str
    session: str
    step: int | None
    method: str
    path: str
    key: str | None
    body: Any
    allowed: tuple[str, ...] = ()
    must_refuse: bool = False
    asked_at: float
    heard: Heard = Heard.OPEN
    answered_at: float | None = None
    status: int | None = None
    answer: Any = None

    @property
    def code(self) -> str | None:
        """The code of a refusal."""
        return self.answer.get("code") if isinstance(self.answer, dict) else None


@dataclass(slots=True, kw_only=True)
class Export:
    """A session at the end: as it is shown, its whole journal, and what the service says of that."""

    org: str
    name: str
    view: JsonObject
    journal: list[JsonObject]
    verified: JsonObject


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """A journal as it was at some moment during the run."""

    org: str
    name: str
    journal: list[JsonObject]


@dataclass(slots=True, kw_only=True)
class Inflicted:
    """A fault that was done, when, and to which replica."""

    kind: str
    at: float
    replica: int | None = None


class Place(NamedTuple):
    """Where a request to the endpoint belongs: `what` is act, action or undo."""

    org: str
    session: str
    ordinal: int
    what: str


def path_of(place: Place) -> str:
    """Return the path at which the endpoint plays a part."""
    return f"/{place.org}/{place.session}/{place.ordinal}/{place.what}"


def credit_of(org: str, ordinal: int) -> str:
    """Return the id in a step's result, which its undo has to name: no other step's is the same."""
    return f"{org}-{ordinal}"


def place_of(request: Received) -> Place:
    """Read a path again."""
    org, session, ordinal, what = request.path.strip("/").split("/")
    return Place(org, session, int(ordinal), what)


@dataclass(slots=True, kw_only=True)
class Evidence:
    """All of it. `listed` and `escalated`: the session ids that each org is shown; `crashes`: what the service logged of its own faults."""

    seed: int
    calls: list[Call] = field(default_factory=list)
    requests: list[Received] = field(default_factory=list)
    exports: list[Export] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    listed: Mapping[str, list[str]] = field(default_factory=dict)
    escalated: Mapping[str, list[str]] = field(default_factory=dict)
    crashes: list[str] = field(default_factory=list)
    faults: list[Inflicted] = field(default_factory=list)

    def write(self, directory: Path) -> None:
        """Leave it as files for a person to read: one JSON object a line."""
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("calls", "requests", "exports", "checkpoints", "faults"):
            lines = (json.dumps(asdict(item), default=_text) for item in getattr(self, name))
            (directory / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        rest = {name: getattr(self, name) for name in ("seed", "listed", "escalated", "crashes")}
        (directory / "rest.json").write_text(json.dumps(rest, indent=1), encoding="utf-8")


def _text(value: object) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
