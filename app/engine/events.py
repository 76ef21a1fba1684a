"""Tell the log, and count, what was committed: one event per journal entry. Must be called after the commit, never before."""

from dataclasses import dataclass
from typing import Literal, assert_never

import structlog

from app.domain.circuits import Change, Place
from app.domain.draft import Changes
from app.domain.journal import Sealed
from app.domain.json_text import parse
from app.domain.model import EntryKind, HaltReason, Session, SessionState
from app.telemetry import Telemetry

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

ORCHESTRATOR = "orchestrator"
"""Who causes the journal entries that no caller causes."""

_ERRORS = frozenset({EntryKind.HALTED, EntryKind.COMPENSATION_FAILED, EntryKind.LATE_COMMIT})
_WARNINGS = frozenset({EntryKind.FAILED, EntryKind.SESSION_FAILED, EntryKind.LATE_FAIL, EntryKind.PAYLOAD_MISMATCH, EntryKind.EXPIRED})
TELLING = frozenset({EntryKind.HALTED, EntryKind.COMPENSATION_FAILED, EntryKind.FAILED, EntryKind.SKIPPED})
FACTS = ("reason", "outcome", "status", "attempts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Tells what was committed, to the log and to the metrics of one application."""

    telemetry: Telemetry

    def __post_init__(self) -> None:
        """Show every kind and reason as 0 before the first."""
        self.telemetry.begin_at_zero(kinds=map(event_of, EntryKind), reasons=(reason.value for reason in HaltReason))

    def announce(self, changes: Changes) -> None:
        """Log and count every transition of a committed decision; the event's name is the entry's kind in lower case."""
        for entry in changes.entries:
            kind = EntryKind(entry.kind)
            event = event_of(kind)
            facts: dict[str, object] = {
                "org": changes.after.org,
                "session_id": changes.after.session_id,
                "seq": entry.seq,
                "actor": entry.actor,
            }
            if entry.step is not None:
                facts["step"] = entry.step
            if kind in TELLING:
                facts |= _told(entry)
            getattr(_log, level_of(kind))(event, **facts)
            self.telemetry.count_transition(event)
            if kind is EntryKind.HALTED and changes.after.halt_reason is not None:
                self.telemetry.count_halt(changes.after.halt_reason.value)

    def announce_state(self, session: Session) -> None:
        """Log a halt that may have been committed without being told: the answer to its commit was lost.

        It is not counted: whoever committed it may have heard so, and counted it.
        """
        if session.state is SessionState.HALTED:
            _log.error(event_of(EntryKind.HALTED), org=session.org, session_id=session.session_id, reason=session.halt_reason)

    def announce_circuit(self, place: Place, change: Change) -> None:
        """Log that a destination of an org is held to be away from now on, or that it is back."""
        match change:
            case Change.OPEN:
                _log.warning("circuit_opened", org=place.org, destination=place.destination)
            case Change.CLOSE:
                _log.info("circuit_closed", org=place.org, destination=place.destination)
            case Change.NOTE | Change.NONE:
                pass
            case _:
                assert_never(change)


def event_of(kind: EntryKind) -> str:
    """Return the name under which an entry is logged and counted."""
    return kind.value.lower()


def level_of(kind: EntryKind) -> Literal["error", "warning", "info"]:
    """Return how loud an entry is logged."""
    if kind in _ERRORS:
        return "error"
    return "warning" if kind in _WARNINGS else "info"


def _told(entry: Sealed) -> dict[str, object]:
    """Return what an entry's body says of why, in classes and numbers: no text of an agent or an endpoint."""
    body = parse(entry.body)
    return {name: body[name] for name in FACTS if name in body} if isinstance(body, dict) else {}
