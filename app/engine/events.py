"""Tell the log what was committed: one event per journal entry. Must be called after the commit, never before."""

import structlog

from app.domain.draft import Changes
from app.domain.model import EntryKind

_log = structlog.stdlib.get_logger("countermand")

ORCHESTRATOR = "orchestrator"
"""Who causes the journal entries that no caller causes."""

_ERRORS = frozenset({EntryKind.HALTED, EntryKind.COMPENSATION_FAILED, EntryKind.LATE_COMMIT})
_WARNINGS = frozenset({EntryKind.FAILED, EntryKind.SESSION_FAILED, EntryKind.LATE_FAIL, EntryKind.PAYLOAD_MISMATCH, EntryKind.EXPIRED})


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
        if kind is EntryKind.HALTED:
            facts["halt_reason"] = changes.after.halt_reason
        event = kind.value.lower()
        if kind in _ERRORS:
            _log.error(event, **facts)
        elif kind in _WARNINGS:
            _log.warning(event, **facts)
        else:
            _log.info(event, **facts)
