"""Tell the log what was committed: one event per journal entry. Must be called after the commit, never before."""

import structlog

from app.domain.draft import Changes
from app.domain.journal import Sealed
from app.domain.json_text import parse
from app.domain.model import EntryKind, Session, SessionState

_log = structlog.stdlib.get_logger("countermand")

ORCHESTRATOR = "orchestrator"
"""Who causes the journal entries that no caller causes."""

_ERRORS = frozenset({EntryKind.HALTED, EntryKind.COMPENSATION_FAILED, EntryKind.LATE_COMMIT})
_WARNINGS = frozenset({EntryKind.FAILED, EntryKind.SESSION_FAILED, EntryKind.LATE_FAIL, EntryKind.PAYLOAD_MISMATCH, EntryKind.EXPIRED})


_TELLING = frozenset({EntryKind.HALTED, EntryKind.COMPENSATION_FAILED, EntryKind.FAILED, EntryKind.SKIPPED})
_FACTS = ("reason", "outcome", "status", "attempts")


def announce(changes: Changes) -> None:
    """Log every transition of a committed decision; the event's name is the entry's kind in lower case."""
    for entry in changes.entries:
        kind = EntryKind(entry.kind)
        facts: dict[str, object] = {
            "org": changes.after.org,
            "session_id": changes.after.session_id,
            "seq": entry.seq,
            "actor": entry.actor,
        }
        if entry.step is not None:
            facts["step"] = entry.step
        if kind in _TELLING:
            facts |= _told(entry)
        event = kind.value.lower()
        if kind in _ERRORS:
            _log.error(event, **facts)
        elif kind in _WARNINGS:
            _log.warning(event, **facts)
        else:
            _log.info(event, **facts)


def announce_state(session: Session) -> None:
    """Log a halt that may have been committed without being told: the answer to its commit was lost."""
    if session.state is SessionState.HALTED:
        _log.error(EntryKind.HALTED.value.lower(), org=session.org, session_id=session.session_id, reason=session.halt_reason)


def _told(entry: Sealed) -> dict[str, object]:
    """Return what an entry's body says of why, in classes and numbers: no text of an agent or an endpoint."""
    body = parse(entry.body)
    return {name: body[name] for name in _FACTS if name in body} if isinstance(body, dict) else {}
