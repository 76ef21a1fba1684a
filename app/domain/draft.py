"""What one decision changes in one session: new versions of its rows and its journal entries. Must not decide: it only keeps account."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Generic, TypeVar
from uuid import UUID

from app.domain import journal
from app.domain.journal import Entry, Sealed
from app.domain.model import (
    Approval,
    ApprovalState,
    CallKind,
    Effect,
    EffectState,
    EntryKind,
    JournalHead,
    OutgoingCall,
    Session,
    SessionState,
    StepIndex,
    UndoEntry,
    UndoState,
)
from app.domain.states import RESTING_STATES, advance

Row = TypeVar("Row", Effect, UndoEntry, OutgoingCall, Approval)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a decision needs from outside: the moment, who asks, and dice.

    `now` is the database's, read after the lock; `actor` is how the journal names who caused the entries;
    `random_bytes(n)` gives salts and the random part of new ids.
    """

    now: datetime
    actor: str
    random_bytes: Callable[[int], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Generic[Row]):
    """One row before (None: it is new) and after."""

    before: Row | None
    after: Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """All writes of one decision; storage makes them in one statement, each guarded by what `before` says."""

    before: Session
    after: Session
    effects: tuple[Change[Effect], ...]
    undo_entries: tuple[Change[UndoEntry], ...]
    calls: tuple[Change[OutgoingCall], ...]
    approvals: tuple[Change[Approval], ...]
    entries: tuple[Sealed, ...]

    @property
    def wakes_waiters(self) -> bool:
        """Tell whether something came about that callers wait for: a session's rest, the answer to a question, the end of an action."""
        return (
            (self.before.state is not self.after.state and self.after.state in RESTING_STATES)
            or any(change.before is not None for change in self.approvals)
            or any(
                change.before is not None and change.after.kind is CallKind.ACTION and change.after.due_at is None for change in self.calls
            )
        )


# Reports that are kept and move nothing: whoever repeats them must not be able to outrun the versions that an operator acts on.
_EVIDENCE = frozenset({EntryKind.LATE_COMMIT, EntryKind.LATE_FAIL})


@dataclass(slots=True)
class Draft:
    """The account of one decision about one locked session; `changes()` seals it."""

    before: Session
    surroundings: Surroundings
    session: Session = field(init=False)
    now: datetime = field(init=False)
    """The moment of the decision; never before the session was opened, nor before its newest journal entry."""
    _effects: dict[UUID, Change[Effect]] = field(default_factory=dict)
    _undo_entries: dict[UUID, Change[UndoEntry]] = field(default_factory=dict)
    _calls: dict[UUID, Change[OutgoingCall]] = field(default_factory=dict)
    _approvals: dict[int, Change[Approval]] = field(default_factory=dict)
    _entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with the session as it was read."""
        self.session = self.before
        self.now = max(self.surroundings.now, self.before.head.at or self.before.created_at)

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing was changed or recorded so far."""
        has_rows = bool(self._effects or self._undo_entries or self._calls or self._approvals or self._entries)
        return not has_rows and self.session == self.before

    def new_id(self) -> UUID:
        """Make a UUIDv7 (RFC 9562): 48 bits of milliseconds, 74 random bits."""
        milliseconds = int(self.now.timestamp() * 1000)
        value = (milliseconds << 80) | int.from_bytes(self.surroundings.random_bytes(10), "big")
        value = (value & ~(0xF << 76)) | (0x7 << 76)
        value = (value & ~(0x3 << 62)) | (0x2 << 62)
        return UUID(int=value)

    def move_session(self, to: SessionState, **changes: Any) -> None:  # noqa: ANN401 - fields of Session, checked by replace
        """Advance the session."""
        self.session = advance(self.session, to, **changes)

    def change_session(self, **changes: Any) -> None:  # noqa: ANN401 - fields of Session, checked by replace
        """Change fields of the session other than its state."""
        self.session = replace(self.session, **changes)

    def add_effect(self, effect: Effect) -> None:
        """Register a new effect."""
        self._effects[effect.effect_id] = Change(before=None, after=effect)

    def move_effect(self, effect: Effect, to: EffectState, **changes: Any) -> Effect:  # noqa: ANN401 - fields of Effect, checked by replace
        """Advance an effect and return its new version."""
        return _put(self._effects, effect.effect_id, effect, advance(effect, to, **changes))

    def change_effect(self, effect: Effect, **changes: Any) -> Effect:  # noqa: ANN401 - fields of Effect, checked by replace
        """Change fields of an effect other than its state and return its new version."""
        return _put(self._effects, effect.effect_id, effect, replace(effect, **changes))

    def add_undo_entry(self, entry: UndoEntry) -> None:
        """Push a new entry on the undo stack."""
        self._undo_entries[entry.undo_id] = Change(before=None, after=entry)

    def move_undo_entry(self, entry: UndoEntry, to: UndoState, **changes: Any) -> UndoEntry:  # noqa: ANN401 - fields of UndoEntry, checked by replace
        """Advance an undo entry and return its new version."""
        return _put(self._undo_entries, entry.undo_id, entry, advance(entry, to, **changes))

    def add_call(self, call: OutgoingCall) -> None:
        """Add a new outgoing call."""
        self._calls[call.call_id] = Change(before=None, after=call)

    def change_call(self, call: OutgoingCall, **changes: Any) -> OutgoingCall:  # noqa: ANN401 - fields of OutgoingCall, checked by replace
        """Change fields of an outgoing call and return its new version."""
        return _put(self._calls, call.call_id, call, replace(call, **changes))

    def ask_approval(self, approval: Approval) -> None:
        """Put a question to a person."""
        self._approvals[approval.step_index] = Change(before=None, after=approval)

    def change_approval(self, approval: Approval, to: ApprovalState, **changes: Any) -> Approval:  # noqa: ANN401 - fields of Approval, checked by replace
        """Take the answer to a question, or its end, and return its new version; its effect's own move goes with it."""
        return _put(self._approvals, approval.step_index, approval, replace(approval, state=to, **changes))

    def open(self) -> None:
        """Record that the session was opened, if this is the first that is ever recorded of it."""
        if self.before.head.seq == 0:
            session = self.before
            self.record(
                EntryKind.OPENED,
                body={"owner": session.owner, "agent": session.agent, "idle_seconds": session.idle_seconds},
                contents={"metadata": session.metadata},
            )

    def record(
        self,
        kind: EntryKind,
        step: StepIndex | None = None,
        *,
        body: Mapping[str, object] | None = None,
        contents: Mapping[str, bytes] | None = None,
    ) -> None:
        """Add a journal entry; `contents` go beside the chained bytes, which hold only their salted digests."""
        self._entries.append(Entry(kind=kind, step=step, actor=self.surroundings.actor, body=body or {}, contents=contents or {}))

    def changes(self) -> Changes:
        """Seal the account: chain the entries, count the versions."""
        sealed = journal.seal(
            self.before.org,
            self.before.session_id,
            self.before.head,
            self._entries,
            self.now,
            lambda: self.surroundings.random_bytes(16),
        )
        is_session_told = any(entry.kind not in _EVIDENCE for entry in self._entries) or self.session != self.before
        is_visible = bool(self._effects or self._undo_entries) or is_session_told
        after = replace(
            self.session,
            active_at=self.now,
            updated_at=self.now if is_visible else self.before.updated_at,
            version=self.before.version + is_visible,
            revision=self.before.revision + 1,
            head=JournalHead(seq=sealed[-1].seq, digest=sealed[-1].digest, at=self.now) if sealed else self.before.head,
        )
        return Changes(
            before=self.before,
            after=after,
            effects=tuple(_counted(change) for change in self._effects.values()),
            undo_entries=tuple(self._undo_entries.values()),
            calls=tuple(self._calls.values()),
            approvals=tuple(self._approvals.values()),
            entries=sealed,
        )


Key = TypeVar("Key", UUID, int)


def _put(changes: dict[Key, Change[Row]], key: Key, seen: Row, after: Row) -> Row:
    known = changes.get(key)
    changes[key] = Change(before=known.before if known else seen, after=after)
    return after


def _counted(change: Change[Effect]) -> Change[Effect]:
    version = change.before.version + 1 if change.before else 1
    return change if change.after.version == version else Change(before=change.before, after=replace(change.after, version=version))
