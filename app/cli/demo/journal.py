"""What a session's journal tells, as an auditor reads it. Must not interpret it beyond who did what at which step."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from app.cli.demo.api import Api
from app.cli.demo.systems import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry to be found: `step` and `actor` None where any will do; `says`: members that its body has to have."""

    kind: str
    step: int | None = None
    actor: str | None = None
    says: tuple[tuple[str, object], ...] = ()

    def is_in(self, found: JsonObject) -> bool:
        """Tell whether an entry of a journal is the one that is looked for."""
        body = json.loads(found["body"])
        return (
            found["kind"] == self.kind
            and self.step in {None, found["step"]}
            and self.actor in {None, found["actor"]}
            and all(body.get(name) == value for name, value in self.says)
        )

    def __str__(self) -> str:
        """Return what is looked for, in words."""
        step = "" if self.step is None else f" of step {self.step}"
        actor = "" if self.actor is None else f" by {self.actor}"
        says = "".join(f", {name} {value}" for name, value in self.says)
        return f"{self.kind}{step}{actor}{says}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """A session's journal, and what verifying it came to."""

    entries: Sequence[JsonObject]
    is_valid: bool
    message: str

    def missing(self, wanted: Sequence[Entry]) -> Entry | None:
        """Return the first of `wanted` that does not come after those before it; other entries may stand between them."""
        entries = iter(self.entries)
        return next((entry for entry in wanted if not any(entry.is_in(found) for found in entries)), None)


def read_journal(api: Api, session_id: str) -> Journal:
    """Read a journal whole, and have it verified."""
    path = f"/v1/sessions/{session_id}/journal"
    verified = api.get(f"{path}/verify")
    return Journal(entries=list(api.items(path)), is_valid=verified["valid"], message=verified["message"])
