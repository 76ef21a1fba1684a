"""Values for the domain's tests, and a world without IO that keeps what decisions write. Must not decide: it checks and remembers."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any
from uuid import UUID

from app.domain import journal
from app.domain.draft import Change, Changes, Draft, Surroundings
from app.domain.egress import EgressPolicy
from app.domain.errors import SagaError
from app.domain.intercept import InterceptCommand, InterceptRules, Seen
from app.domain.journal import GENESIS, Sealed
from app.domain.model import (
    Approval,
    CallId,
    Compensation,
    Effect,
    EffectId,
    EffectState,
    EntryKind,
    HaltReason,
    JournalHead,
    OrgName,
    Outcome,
    OutgoingCall,
    Reversibility,
    Session,
    SessionId,
    SessionState,
    StepIndex,
    UndoEntry,
    UndoId,
    UndoState,
)
from app.domain.outcomes import REPORTING_STATES, Reported
from app.domain.retry import Attempt, Failure
from app.domain.states import NEW_EFFECT_STATES, TERMINAL_SESSION_STATES
from app.domain.unwinding import StackItem, Work

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
ACTOR = "agent:robot-1"
UNDO_URL = "https://ledger.example/undo"
RULES = InterceptRules(is_inline_allowed=True, egress=EgressPolicy(), approval_ttl_seconds=3_600)

OUTCOMES = {
    EffectState.COMMITTED: Outcome.COMMITTED,
    EffectState.FAILED: Outcome.NOT_APPLIED,
    EffectState.UNKNOWN: Outcome.UNKNOWN,
    EffectState.COMPENSATING: Outcome.COMMITTED,
    EffectState.COMPENSATED: Outcome.COMMITTED,
    EffectState.COMPENSATION_FAILED: Outcome.COMMITTED,
}
"""What is known of an effect that a test puts into a state without saying."""


def new_session(state: SessionState = SessionState.ACTIVE, **changes: Any) -> Session:
    """Make a session with an empty journal, opened at `START`."""
    values: dict[str, Any] = {
        "org": OrgName("acme"),
        "session_id": SessionId("run-1"),
        "owner": "robot-1",
        "agent": "robot",
        "metadata": b"{}",
        "state": state,
        "halt_reason": HaltReason.COMPENSATION_FAILED if state is SessionState.HALTED else None,
        "clean": True,
        "pivoted": False,
        "late_effect": False,
        "last_step": 0,
        "idle_seconds": 600,
        "deadline_at": None,
        "failed_at": None,
        "created_at": START,
        "updated_at": START,
        "active_at": START,
        "version": 0,
        "revision": 0,
        "head": JournalHead(seq=0, digest=GENESIS, at=None),
    }
    return Session(**{**values, **changes})


def new_effect(state: EffectState = EffectState.EXECUTING, step: int = 1, **changes: Any) -> Effect:
    """Make an effect in a state, with the outcome that goes with it."""
    payload: bytes = changes.get("payload", b'{"amount":2500}')
    outcome: Outcome | None = changes.get("outcome", OUTCOMES.get(state))
    values: dict[str, Any] = {
        "step_index": StepIndex(step),
        "effect_id": EffectId(UUID(int=step)),
        "tool": "issue_credit",
        "tool_version": None,
        "reversibility": Reversibility.COMPENSATABLE,
        "state": state,
        "outcome": outcome,
        "payload": payload,
        "payload_sha256": sha256(payload).digest(),
        "result": b'{"credit_id":"c-1"}' if outcome is Outcome.COMMITTED else None,
        "error": None,
        "request_key": None,
        "request_sha256": bytes(32),
        "attempt": 1,
        "traceparent": None,
        "registered_at": START,
        "executed_at": START if outcome is Outcome.COMMITTED else None,
        "version": 1,
    }
    return Effect(**{**values, **changes})


def new_compensation(args: bytes = b"{}", **changes: Any) -> Compensation:
    """Make a compensation with a harmless URL."""
    return Compensation(**{"url": UNDO_URL, "args": args, **changes})


def new_entry(state: UndoState = UndoState.PENDING, step: int = 1, **changes: Any) -> UndoEntry:
    """Make an undo entry for the effect at `step`."""
    values: dict[str, Any] = {
        "undo_id": UndoId(UUID(int=1_000 + step)),
        "stack_position": StepIndex(step),
        "state": state,
        "compensation": new_compensation(),
        "by_hand": False,
        "registered_at": START,
        "compensated_at": START if state is UndoState.COMPENSATED else None,
    }
    return UndoEntry(**{**values, **changes})


def new_call(step: int = 1, **changes: Any) -> OutgoingCall:
    """Make a call that is due and was never sent."""
    values: dict[str, Any] = {
        "call_id": CallId(UUID(int=1_000 + step)),
        "step_index": StepIndex(step),
        "destination": "ledger.example:443",
        "url": None,
        "body": None,
        "outcome": None,
        "attempts": 0,
        "failures": 0,
        "interrupted": 0,
        "polls": 0,
        "is_attempt_open": False,
        "may_be_processing": False,
        "poll_url": None,
        "last_status": None,
        "last_error": None,
        "due_at": START,
        "first_sent_at": None,
        "deadline_at": START + timedelta(days=1),
        "epoch": 1,
    }
    return OutgoingCall(**{**values, **changes})


def new_draft(session: Session, now: datetime = START) -> Draft:
    """Begin a decision of the agent about a session."""
    return Draft(session, Surroundings(now=now, actor=ACTOR, random_bytes=random.Random(7).randbytes))


def command(**changes: Any) -> InterceptCommand:
    """Make an intercept of a compensatable call without references."""
    values: dict[str, Any] = {
        "tool": "issue_credit",
        "payload": b'{"amount":2500}',
        "payload_pointer": "/args",
        "step_index": StepIndex(1),
        "reversibility": Reversibility.COMPENSATABLE,
        "compensation": new_compensation(),
        "request_key": None,
        "request_sha256": bytes(32),
        "traceparent": None,
    }
    return InterceptCommand(**{**values, **changes})


def seen(**changes: Any) -> Seen:
    """Say what an intercept meets: nothing, unless told otherwise."""
    values: dict[str, Any] = {
        "tool": None,
        "at_step": None,
        "under_key": None,
        "unsettled": [],
        "undo_of_repeat": None,
        "approval_of_repeat": None,
    }
    return Seen(**{**values, **changes})


def answered(status: int, *, retry_after: str | None = None, location: str | None = None) -> Attempt:
    """Make an attempt that was answered."""
    return Attempt(status=status, failure=None, was_sent=True, retry_after=retry_after, location=location, detail="", duration_ms=7)


def broken(failure: Failure, *, was_sent: bool) -> Attempt:
    """Make an attempt that was not answered."""
    return Attempt(status=None, failure=failure, was_sent=was_sent, retry_after=None, location=None, detail="it broke", duration_ms=7)


def code_of(decided: object) -> str | None:
    """Return a refusal's code; None for anything else."""
    return decided.code if isinstance(decided, SagaError) else None


def kinds_of(draft: Draft) -> list[EntryKind]:
    """Return the kinds of the entries that a draft would journal, in order."""
    return [EntryKind(entry.kind) for entry in draft.changes().entries]


AGREEMENT: dict[UndoState, frozenset[EffectState]] = {
    UndoState.PENDING: frozenset({EffectState.EXECUTING, EffectState.COMMITTED, EffectState.UNKNOWN}),
    UndoState.RUNNING: frozenset({EffectState.COMPENSATING}),
    UndoState.COMPENSATED: frozenset({EffectState.COMPENSATED}),
    UndoState.FAILED: frozenset({EffectState.COMPENSATION_FAILED}),
    UndoState.SKIPPED: frozenset({EffectState.FAILED}),
}
"""An undo entry's state says in which states its effect may be (no operator has been at it)."""


class WitnessedDraft(Draft):
    """A draft that also remembers every single move, which `changes()` sums up to a before and an after."""

    def __init__(self, before: Session, surroundings: Surroundings) -> None:
        super().__init__(before, surroundings)
        self.moves: list[tuple[str, str]] = []

    def move_session(self, to: SessionState, **changes: Any) -> None:
        """Advance the session."""
        super().move_session(to, **changes)
        self.moves.append(("session", to))

    def add_effect(self, effect: Effect) -> None:
        """Register a new effect."""
        super().add_effect(effect)
        self.moves.append(("new effect", effect.state))

    def move_effect(self, effect: Effect, to: EffectState, **changes: Any) -> Effect:
        """Advance an effect and return its new version."""
        moved = super().move_effect(effect, to, **changes)
        self.moves.append(("effect", to))
        return moved

    def move_undo_entry(self, entry: UndoEntry, to: UndoState, **changes: Any) -> UndoEntry:
        """Advance an undo entry and return its new version."""
        moved = super().move_undo_entry(entry, to, **changes)
        self.moves.append(("entry", to))
        return moved


TOLD_BY_ONE_ENTRY: dict[EntryKind, tuple[str, str]] = {
    EntryKind.INTENT: ("new effect", EffectState.EXECUTING),
    EntryKind.AWAITING_APPROVAL: ("new effect", EffectState.AWAITING_APPROVAL),
    EntryKind.CANCELLED: ("effect", EffectState.CANCELLED),
    EntryKind.SESSION_FAILED: ("session", SessionState.FAILED),
    EntryKind.UNWOUND: ("session", SessionState.COMPENSATED),
    EntryKind.HALTED: ("session", SessionState.HALTED),
    EntryKind.COMPENSATING: ("entry", UndoState.RUNNING),
    EntryKind.COMPENSATED: ("entry", UndoState.COMPENSATED),
    EntryKind.COMPENSATION_FAILED: ("entry", UndoState.FAILED),
    EntryKind.SKIPPED: ("entry", UndoState.SKIPPED),
}
"""Moves that have exactly one entry each, and the entries that stand for exactly one move each."""


@dataclass(slots=True)
class World:
    """One session's rows as storage would keep them; `apply` refuses what the database, the contract or the journal would not bear."""

    seed: int
    session: Session = field(default_factory=new_session)
    effects: dict[int, Effect] = field(default_factory=dict)
    stack: dict[int, UndoEntry] = field(default_factory=dict)
    calls: dict[UUID, OutgoingCall] = field(default_factory=dict)
    approvals: dict[int, Approval] = field(default_factory=dict)
    entries: list[Sealed] = field(default_factory=list)
    now: datetime = START
    _dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        """Throw the same dice for the same seed."""
        self._dice = random.Random(self.seed)

    def draft(self, actor: str = ACTOR) -> WitnessedDraft:
        """Begin a decision now."""
        return WitnessedDraft(self.session, Surroundings(now=self.now, actor=actor, random_bytes=self._dice.randbytes))

    def reported(self, step: int) -> Reported:
        """Read an effect with its undo entry."""
        return Reported(effect=self.effects[step], undo_entry=self.stack.get(step))

    def all_reported(self) -> list[Reported]:
        """Read what `fail_session` needs: everything open, and the newest pending entry."""
        open_states = MOVING_EFFECT_STATES
        pending = [step for step, entry in self.stack.items() if entry.state is UndoState.PENDING]
        steps = {step for step, effect in self.effects.items() if effect.state in open_states} | set(sorted(pending)[-1:])
        return [self.reported(step) for step in sorted(steps)]

    def due_call(self) -> OutgoingCall | None:
        """Return the one call that is due some time."""
        due = [call for call in self.calls.values() if call.due_at is not None]
        assert len(due) <= 1, "two calls of one session are due"
        return due[0] if due else None

    def work(self, call: OutgoingCall, *, may_go_on: bool = True) -> Work:
        """Read what the worker reads with a claimed call."""
        below = max((s for s, e in self.stack.items() if e.state is UndoState.PENDING and s < call.step_index), default=None)
        has_failed = any(entry.state is UndoState.FAILED for entry in self.stack.values())
        return Work(
            call=call,
            item=StackItem(entry=self.stack[call.step_index], effect=self.effects[call.step_index]),
            below=None if below is None else StackItem(entry=self.stack[below], effect=self.effects[below]),
            has_failed_entries=has_failed and below is None,
            may_go_on=may_go_on,
        )

    def apply(self, draft: WitnessedDraft) -> Changes:
        """Keep what a decision wrote."""
        changes = draft.changes()
        assert changes.before == self.session
        _check_moves_are_told(draft, changes)
        _check_rest(changes)
        _keep(self.effects, changes.effects, lambda effect: effect.step_index)
        _keep(self.stack, changes.undo_entries, lambda entry: entry.stack_position)
        _keep(self.calls, changes.calls, lambda call: call.call_id)
        self.approvals.update({approval.step_index: approval for approval in changes.approvals})
        self.session = changes.after
        self.entries.extend(changes.entries)
        self.check()
        return changes

    def check(self) -> None:
        """Assert what must hold after every decision."""
        self.due_call()
        for step, entry in self.stack.items():
            assert self.effects[step].state in AGREEMENT[entry.state], (step, entry.state, self.effects[step].state)
        for call in self.calls.values():
            _check_call(call)
        for effect in self.effects.values():
            assert (effect.executed_at is not None) == (effect.outcome is Outcome.COMMITTED)
            assert effect.executed_at is None or effect.registered_at <= effect.executed_at
        begun = [step for step, entry in self.stack.items() if entry.state not in {UndoState.PENDING, UndoState.SKIPPED}]
        above = [self.stack[step] for step in self.stack if begun and step > min(begun)]
        assert all(entry.state is not UndoState.PENDING for entry in above), "an entry was begun while a newer one was pending"
        assert sum(entry.state is UndoState.RUNNING for entry in self.stack.values()) <= 1
        if self.session.state in TERMINAL_SESSION_STATES | {SessionState.HALTED}:
            assert self.due_call() is None, "a session at rest has a call that is due"
        if self.session.state is SessionState.COMPENSATED:
            assert all(entry.state in {UndoState.COMPENSATED, UndoState.SKIPPED} for entry in self.stack.values())

    def verify(self) -> None:
        """Assert that the journal is one valid chain up to the session's head."""
        verdict = journal.verify(self.session.org, self.session.session_id, self.entries, self.session.head)
        assert verdict.valid, verdict.message


MOVING_EFFECT_STATES = frozenset({EffectState.EXECUTING, EffectState.UNKNOWN, EffectState.AWAITING_APPROVAL, EffectState.APPROVED})


def _keep(rows: dict[Any, Any], changed: Sequence[Change[Any]], key_of: Any) -> None:
    for change in changed:
        assert rows.get(key_of(change.after)) == change.before, "a decision changed a row that it did not see"
        if change.before is None and isinstance(change.after, Effect):
            assert change.after.state in NEW_EFFECT_STATES
        rows[key_of(change.after)] = change.after


def _check_moves_are_told(draft: WitnessedDraft, changes: Changes) -> None:
    moves, told = Counter(draft.moves), Counter(EntryKind(entry.kind) for entry in changes.entries)
    for kind, move in TOLD_BY_ONE_ENTRY.items():
        assert told[kind] == moves[move], f"{moves[move]} moves to {move}, {told[kind]} entries {kind}"
    is_late = changes.before.state not in REPORTING_STATES
    late = told[EntryKind.LATE_COMMIT] + told[EntryKind.LATE_FAIL]
    # In time there is one late report: that a call happened of which it was said that it had not. It marks the session.
    assert is_late or not late or (changes.after.late_effect and not told[EntryKind.LATE_FAIL])
    committed = moves["effect", EffectState.COMMITTED]
    assert committed == told[EntryKind.EXECUTED] + (late if committed else 0)
    if moves["effect", EffectState.FAILED]:
        assert told[EntryKind.FAILED] + told[EntryKind.LATE_FAIL] + told[EntryKind.SESSION_FAILED] >= 1
    assert bool(changes.entries) or not draft.moves, "moved in silence"


def _check_rest(changes: Changes) -> None:
    """Refuse moves out of an end, but for the one that is named."""
    before, after = changes.before, changes.after
    if before.state not in TERMINAL_SESSION_STATES | {SessionState.HALTED}:
        return
    if before.state is after.state:
        assert not changes.effects, f"effects changed in a session that is {before.state}"
        assert not changes.undo_entries, f"entries changed in a session that is {before.state}"
        return
    assert (before.state, after.state, after.halt_reason) == (SessionState.COMPENSATED, SessionState.HALTED, HaltReason.LATE_EFFECT)


def _check_call(call: OutgoingCall) -> None:
    """Assert the rules that the table outgoing_calls repeats."""
    is_sent = call.first_sent_at is not None
    assert is_sent == (call.url is not None) == (call.body is not None) == (call.outcome is not None) == (call.attempts > 0)
    assert 0 <= call.failures <= call.attempts
    assert 0 <= call.interrupted <= call.attempts + call.polls
