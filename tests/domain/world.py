"""Values for the domain's tests, and a world without IO that keeps what decisions write. Must not decide: it checks and remembers."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any
from uuid import UUID

from app.domain import journal, unwinding
from app.domain.actions import Acting
from app.domain.approval import Evidence, Parked
from app.domain.draft import Change, Changes, Draft, Surroundings
from app.domain.egress import EgressPolicy
from app.domain.errors import SagaError
from app.domain.intercept import InterceptCommand, InterceptRules, Seen
from app.domain.journal import GENESIS, Sealed
from app.domain.model import (
    Action,
    Approval,
    ApprovalState,
    CallId,
    CallKind,
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
    RetryPolicy,
    Reversibility,
    Session,
    SessionId,
    SessionState,
    StepIndex,
    UndoEntry,
    UndoId,
    UndoState,
)
from app.domain.operations import UNSETTLED_UNDO, Stack
from app.domain.outcomes import MOVABLE_OUTCOMES, REPORTING_STATES, UNSETTLED, Reported
from app.domain.retry import Attempt, Failure
from app.domain.states import NEW_EFFECT_STATES, RESTING_STATES, UNWINDING_STATES
from app.domain.tools import Definition
from app.domain.unwinding import StackItem, Undoing

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
ACTOR = "agent:robot-1"
OPERATOR = "operator:ada"
ORCHESTRATOR = "orchestrator"
UNDO_URL = "https://ledger.example/undo"
ACTION_URL = "https://bank.example/wire"
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
        "halted_at": START if state is SessionState.HALTED else None,
        "halt_ordered": False,
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
        "kind": CallKind.UNDO,
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


def new_action_call(step: int = 1, **changes: Any) -> OutgoingCall:
    """Make the call of an action that is due and was never sent."""
    return new_call(step, **{"call_id": CallId(UUID(int=step)), "kind": CallKind.ACTION, "destination": "bank.example:443", **changes})


def new_approval(state: ApprovalState = ApprovalState.PENDING, step: int = 1, **changes: Any) -> Approval:
    """Make a question that was put an instant ago, with the answer that its state tells of."""
    is_decided = state in {ApprovalState.APPROVED, ApprovalState.RELEASED, ApprovalState.REJECTED, ApprovalState.MISMATCHED}
    is_released = state is ApprovalState.RELEASED
    values: dict[str, Any] = {
        "step_index": StepIndex(step),
        "state": state,
        "requested_by": "robot-1",
        "requested_at": START,
        "expires_at": START + timedelta(seconds=3_600),
        "ttl_seconds": 3_600,
        "decided_at": START if is_decided else None,
        "decided_by": "ada" if is_decided else None,
        "released_at": START if is_released else None,
        "released_to": "robot-1" if is_released else None,
    }
    return Approval(**{**values, **changes})


def new_action(**retry: Any) -> Action:
    """Make an action with a harmless URL; `retry` are the members of its policy."""
    return Action(url=ACTION_URL, retry=RetryPolicy(**retry))


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


def answered(status: int, *, retry_after: str | None = None, location: str | None = None, body: bytes = b"") -> Attempt:
    """Make an attempt that was answered."""
    headers = {"retry_after": retry_after, "location": location}
    return Attempt(status=status, failure=None, was_sent=True, **headers, detail="", duration_ms=7, body=body)


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
    UndoState.PENDING: frozenset(
        {EffectState.EXECUTING, EffectState.COMMITTED, EffectState.UNKNOWN, EffectState.COMPENSATION_FAILED},
    ),
    UndoState.RUNNING: frozenset({EffectState.COMPENSATING}),
    UndoState.COMPENSATED: frozenset({EffectState.COMPENSATED}),
    UndoState.FAILED: frozenset({EffectState.COMPENSATION_FAILED}),
    UndoState.SKIPPED: frozenset(
        {EffectState.FAILED, EffectState.COMMITTED, EffectState.UNKNOWN, EffectState.COMPENSATION_FAILED},
    ),
}
"""An undo entry's state says in which states its effect may be."""

FOLLOWS: dict[ApprovalState, frozenset[EffectState]] = {
    ApprovalState.PENDING: frozenset({EffectState.AWAITING_APPROVAL}),
    ApprovalState.APPROVED: frozenset({EffectState.APPROVED}),
    ApprovalState.RELEASED: frozenset(
        {
            EffectState.EXECUTING,
            EffectState.COMMITTED,
            EffectState.FAILED,
            EffectState.UNKNOWN,
            EffectState.COMPENSATING,
            EffectState.COMPENSATED,
            EffectState.COMPENSATION_FAILED,
        }
    ),
    ApprovalState.REJECTED: frozenset({EffectState.REJECTED}),
    ApprovalState.EXPIRED: frozenset({EffectState.EXPIRED}),
    ApprovalState.CANCELLED: frozenset({EffectState.CANCELLED}),
    ApprovalState.MISMATCHED: frozenset({EffectState.REJECTED}),
}
"""A question's state says in which states its effect may be."""

QUESTION_MOVES: dict[ApprovalState, frozenset[ApprovalState]] = {
    ApprovalState.PENDING: frozenset(
        {ApprovalState.APPROVED, ApprovalState.REJECTED, ApprovalState.EXPIRED, ApprovalState.CANCELLED},
    ),
    ApprovalState.APPROVED: frozenset(
        {ApprovalState.RELEASED, ApprovalState.EXPIRED, ApprovalState.CANCELLED, ApprovalState.MISMATCHED},
    ),
}
"""Where a question may go; everywhere else it is at its end."""


class WitnessedDraft(Draft):
    """A draft that also remembers every single move, which `changes()` sums up to a before and an after."""

    def __init__(self, before: Session, surroundings: Surroundings) -> None:
        super().__init__(before, surroundings)
        self.moves: list[tuple[str, str]] = []
        self.begun: list[StepIndex] = []

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
        if to is UndoState.RUNNING:
            self.begun.append(entry.stack_position)
        return moved

    def change_approval(self, approval: Approval, to: ApprovalState, **changes: Any) -> Approval:
        """Take the answer to a question, or its end."""
        assert to in QUESTION_MOVES.get(approval.state, frozenset()), f"a question moved from {approval.state} to {to}"
        changed = super().change_approval(approval, to, **changes)
        self.moves.append(("approval", to))
        return changed


TOLD_BY_ONE_ENTRY: dict[EntryKind, tuple[tuple[str, str], ...]] = {
    EntryKind.INTENT: (("new effect", EffectState.EXECUTING), ("effect", EffectState.EXECUTING)),
    EntryKind.AWAITING_APPROVAL: (("new effect", EffectState.AWAITING_APPROVAL),),
    EntryKind.APPROVED: (("approval", ApprovalState.APPROVED),),
    EntryKind.REJECTED: (("approval", ApprovalState.REJECTED),),
    EntryKind.EXPIRED: (("approval", ApprovalState.EXPIRED),),
    EntryKind.CANCELLED: (("approval", ApprovalState.CANCELLED),),
    EntryKind.PAYLOAD_MISMATCH: (("approval", ApprovalState.MISMATCHED),),
    EntryKind.UNWOUND: (("session", SessionState.COMPENSATED),),
    EntryKind.HALTED: (("session", SessionState.HALTED),),
    EntryKind.RESOLVED: (("session", SessionState.RESOLVED),),
    EntryKind.COMPLETED: (("session", SessionState.COMPLETED),),
    EntryKind.COMPENSATING: (("entry", UndoState.RUNNING),),
    EntryKind.COMPENSATED: (("entry", UndoState.COMPENSATED),),
    EntryKind.COMPENSATION_FAILED: (("entry", UndoState.FAILED),),
    EntryKind.SKIPPED: (("entry", UndoState.SKIPPED),),
}
"""Moves that have exactly one entry each, and the entries that stand for exactly one of these moves each."""

OPERATORS_ENTRIES = frozenset({EntryKind.SKIPPED, EntryKind.COMPENSATED, EntryKind.SETTLED})
"""What may be told of a session that is halted and stays so; each by an operator alone."""

NO_WAY_TO_RUN = frozenset({EntryKind.INTENT, EntryKind.REJECTED, EntryKind.EXPIRED, EntryKind.CANCELLED, EntryKind.PAYLOAD_MISMATCH})
"""After one of these about an approved call there is no INTENT about it any more."""


@dataclass(slots=True)
class World:
    """One session's rows as storage would keep them; `apply` refuses what the database, the contract or the journal would not bear.

    `definitions` holds what was registered about the tool of a step when it was asked for.
    """

    seed: int
    session: Session = field(default_factory=new_session)
    effects: dict[int, Effect] = field(default_factory=dict)
    stack: dict[int, UndoEntry] = field(default_factory=dict)
    calls: dict[UUID, OutgoingCall] = field(default_factory=dict)
    approvals: dict[int, Approval] = field(default_factory=dict)
    definitions: dict[int, Definition] = field(default_factory=dict)
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
        """Read an effect with its undo entry, its approval, and the service's own call of it while that may still turn out either way."""
        effect = self.effects[step]
        action = self.calls.get(effect.effect_id) if effect.state in MOVABLE_OUTCOMES else None
        return Reported(effect=effect, undo_entry=self.stack.get(step), approval=self.approvals.get(step), action=action)

    def known(self, *, pending: bool = False) -> list[Reported]:
        """Read what failing the session needs: everything open, and the two newest pending entries, or all of them beside actions."""
        steps = self._open() | set(self._pending() if pending or self.due_actions() else self._pending()[:2])
        return [self.reported(step) for step in sorted(steps)]

    def due_calls(self) -> list[OutgoingCall]:
        """Return every call that is due some time."""
        return [call for call in self.calls.values() if call.due_at is not None]

    def due_actions(self) -> list[OutgoingCall]:
        """Return the actions that are due some time."""
        return [call for call in self.due_calls() if call.kind is CallKind.ACTION]

    def due_undo(self) -> OutgoingCall | None:
        """Return the one undo that is due some time."""
        due = [call for call in self.due_calls() if call.kind is CallKind.UNDO]
        assert len(due) <= 1, "two undos of one session are due"
        return due[0] if due else None

    def item(self, step: int) -> StackItem:
        """Read one item of the stack."""
        entry = self.stack[step]
        return StackItem(entry=entry, effect=self.effects[step], call=self.calls.get(entry.undo_id))

    def unsettled(self) -> Stack:
        """Read what an order about the stack meets."""
        failed = [self.item(step) for step, entry in self.stack.items() if entry.state is UndoState.FAILED]
        return Stack(failed=failed, top=next((self.item(step) for step in self._pending()), None))

    def undoing(self, call: OutgoingCall, *, may_go_on: bool = True) -> Undoing:
        """Read what the worker reads with a claimed undo."""
        failed = [self.item(step) for step, entry in self.stack.items() if entry.state is UndoState.FAILED]
        pending = next((self.item(step) for step in self._pending() if step < call.step_index), None)
        item = self.item(call.step_index)
        below = unwinding.next_below(item, pending, failed)
        return Undoing(call=call, item=item, below=below, has_failed_entries=bool(failed) and below is None, may_go_on=may_go_on)

    def acting(self, call: OutgoingCall) -> Acting:
        """Read what the worker reads with a claimed action."""
        action = self.definitions[call.step_index].action
        assert action is not None
        irreversible = {step for step, effect in self.effects.items() if effect.reversibility is Reversibility.IRREVERSIBLE}
        steps = sorted(self._open() | set(self._pending()[:2]) | irreversible | {call.step_index})
        seen = replace(self.reported(call.step_index), action=call)
        return Acting(
            call=call,
            seen=seen,
            action=action,
            irreversible=[self.effects[step] for step in sorted(irreversible)],
            in_flight=[
                effect for effect in self.effects.values() if effect.state is EffectState.EXECUTING and effect.step_index != call.step_index
            ],
            top=[self.item(step) for step in steps if step in self.stack],
        )

    def parked(self, step: int) -> Parked:
        """Read what a resume meets."""
        return Parked(seen=self.reported(step), known=self.known(), evidence=self.evidence(step), definition=self.definitions.get(step))

    def evidence(self, step: int) -> Evidence | None:
        """Read a step's approval back from the journal."""
        entry = next((entry for entry in self.entries if (entry.kind, entry.step) == (EntryKind.APPROVED, step)), None)
        if entry is None:
            return None
        return Evidence(
            entry=entry, linked_by=self.entries[entry.seq].prev_hash if entry.seq < len(self.entries) else self.session.head.digest
        )

    def apply(self, draft: WitnessedDraft) -> Changes:
        """Keep what a decision wrote."""
        changes = draft.changes()
        assert changes.before == self.session
        _check_moves_are_told(draft, changes)
        _check_rest(changes, draft.surroundings.actor)
        for entry in changes.entries:
            self._check_release(entry)
        _keep(self.effects, changes.effects, lambda effect: effect.step_index)
        _keep(self.stack, changes.undo_entries, lambda entry: entry.stack_position)
        _keep(self.calls, changes.calls, lambda call: call.call_id)
        _keep(self.approvals, changes.approvals, lambda approval: approval.step_index)
        self.session = changes.after
        self.entries.extend(changes.entries)
        assert not (changes.before.halt_ordered and draft.begun), "an undo began after a halt had been ordered"
        for step in draft.begun:
            self.check_is_next(step)
        self.check()
        return changes

    def check_is_next(self, step: int) -> None:
        """Assert that an undo may be under way: whatever is newer is settled, or failed and was declared independent."""
        for newer, entry in self.stack.items():
            is_passed = entry.state is UndoState.FAILED and entry.compensation.independent
            assert newer <= step or entry.state not in UNSETTLED_UNDO | {UndoState.RUNNING} or is_passed, (step, newer, entry.state)

    def check(self) -> None:
        """Assert what must hold after every decision."""
        for effect in self.effects.values():
            _check_effect(effect)
        for step, approval in self.approvals.items():
            assert self.effects[step].state in FOLLOWS[approval.state], (step, approval.state, self.effects[step].state)
            _check_approval(approval)
        for step, entry in self.stack.items():
            assert self.effects[step].state in AGREEMENT[entry.state], (step, entry.state, self.effects[step].state)
            assert (entry.state is UndoState.COMPENSATED) == (entry.compensated_at is not None)
            assert not entry.by_hand or entry.state is UndoState.COMPENSATED
        for call in self.calls.values():
            _check_call(call)
        _check_session(self.session)
        self._check_hands()
        self._check_pivot()
        self._check_due()
        assert sum(entry.state is UndoState.RUNNING for entry in self.stack.values()) <= 1

    def verify(self) -> None:
        """Assert that the journal is one valid chain up to the session's head."""
        verdict = journal.verify(self.session.org, self.session.session_id, self.entries, self.session.head)
        assert verdict.valid, verdict.message

    def _open(self) -> set[int]:
        return {step for step, effect in self.effects.items() if effect.state in UNSETTLED}

    def _pending(self) -> list[int]:
        return sorted((step for step, entry in self.stack.items() if entry.state is UndoState.PENDING), reverse=True)

    def _check_due(self) -> None:
        """Assert that work is due where there is some, and nowhere else."""
        state, undo, actions = self.session.state, self.due_undo(), self.due_actions()
        if state in RESTING_STATES:
            assert not self.due_calls(), f"a session that is {state} has a call that is due"
        if state in UNWINDING_STATES:
            assert (undo is not None) != bool(actions), "a session unwinds, or first waits for its actions"
        else:
            assert undo is None, f"an undo is due in a session that is {state}"
        for call in actions:
            assert self.effects[call.step_index].state is EffectState.EXECUTING, "an action is due whose effect is settled"
        is_asking = any(approval.state in {ApprovalState.PENDING, ApprovalState.APPROVED} for approval in self.approvals.values())
        assert is_asking == (state is SessionState.AWAITING_APPROVAL)
        if state is SessionState.COMPENSATED:
            assert all(entry.state in {UndoState.COMPENSATED, UndoState.SKIPPED} for entry in self.stack.values())

    def _check_hands(self) -> None:
        """Assert that what a person has had a hand in is not called clean."""
        is_tampered = self.session.late_effect or self.session.state is SessionState.RESOLVED
        for step, entry in self.stack.items():
            was_taken_out = entry.state is UndoState.SKIPPED and self.effects[step].state is not EffectState.FAILED
            is_tampered = is_tampered or entry.by_hand or (was_taken_out and self.session.state is not SessionState.COMPLETED)
        assert not (self.session.clean and is_tampered), "a session is called clean that is not"

    def _check_pivot(self) -> None:
        """Assert that the session is past the pivot if something irreversible stands, or was said to after all, and only then."""
        irreversible = {step: effect for step, effect in self.effects.items() if effect.reversibility is Reversibility.IRREVERSIBLE}
        stands = any(effect.outcome in {Outcome.COMMITTED, Outcome.UNKNOWN} for effect in irreversible.values())
        assert self.session.pivoted or not stands, "something irreversible stands, and the session has no pivot"
        assert not (self.session.clean and stands), "something irreversible stands, and the session is called clean"
        contradicted = any(entry.kind == EntryKind.LATE_COMMIT and entry.step in irreversible for entry in self.entries)
        assert stands or contradicted or not self.session.pivoted, "the session has a pivot, and nothing irreversible stands"

    def _check_release(self, entry: Sealed) -> None:
        """Assert that an approved call is told to run once, after its approval and after nothing that speaks against it."""
        if entry.kind != EntryKind.INTENT or entry.step not in self.approvals:
            return
        before = {EntryKind(earlier.kind) for earlier in self.entries if earlier.step == entry.step}
        assert EntryKind.APPROVED in before, "a call was released that nobody approved"
        assert not before & NO_WAY_TO_RUN, f"a call was released after {before & NO_WAY_TO_RUN}"


def _keep(rows: dict[Any, Any], changed: Sequence[Change[Any]], key_of: Any) -> None:
    for change in changed:
        assert rows.get(key_of(change.after)) == change.before, "a decision changed a row that it did not see"
        if change.before is None and isinstance(change.after, Effect):
            assert change.after.state in NEW_EFFECT_STATES
        rows[key_of(change.after)] = change.after


def _check_moves_are_told(draft: WitnessedDraft, changes: Changes) -> None:
    moves, told = Counter(draft.moves), Counter(EntryKind(entry.kind) for entry in changes.entries)
    for kind, kinds_of_moves in TOLD_BY_ONE_ENTRY.items():
        count = sum(moves[move] for move in kinds_of_moves)
        assert told[kind] == count, f"{count} moves to {kinds_of_moves}, {told[kind]} entries {kind}"
    was_reporting, is_reporting = (session.state in REPORTING_STATES for session in (changes.before, changes.after))
    has_failed = was_reporting and not is_reporting and changes.after.state is not SessionState.COMPLETED
    assert told[EntryKind.SESSION_FAILED] == has_failed
    late = told[EntryKind.LATE_COMMIT] + told[EntryKind.LATE_FAIL]
    # In time there is one late report: that a call happened of which it was said that it had not. It marks the session.
    assert not was_reporting or not late or (not changes.after.clean and not told[EntryKind.LATE_FAIL])
    assert told[EntryKind.PIVOT] == (changes.after.pivoted and not changes.before.pivoted)
    _check_outcomes_are_told(moves, told, late)
    _check_orders_are_told(changes, moves, told)
    assert bool(changes.entries) or not draft.moves, "moved in silence"


def _check_outcomes_are_told(moves: Counter[tuple[str, str]], told: Counter[EntryKind], late: int) -> None:
    committed, failed, unknown = (moves["effect", state] for state in (EffectState.COMMITTED, EffectState.FAILED, EffectState.UNKNOWN))
    assert committed <= told[EntryKind.EXECUTED] + told[EntryKind.SETTLED] + late <= max(1, committed)
    assert told[EntryKind.EXECUTED] <= committed
    if failed:
        tellers = (EntryKind.FAILED, EntryKind.LATE_FAIL, EntryKind.SESSION_FAILED, EntryKind.SETTLED, EntryKind.COMPLETED)
        assert any(told[kind] for kind in tellers), "an effect failed in silence"
    if unknown:
        assert told[EntryKind.FAILED] or told[EntryKind.SESSION_FAILED], "an effect became unknown in silence"


def _check_orders_are_told(changes: Changes, moves: Counter[tuple[str, str]], told: Counter[EntryKind]) -> None:
    """Assert that only an order takes a session back from a person, or an entry back on the stack, and that each is told."""
    ordered = told[EntryKind.RETRIED] + told[EntryKind.UNWIND_ORDERED]
    assert ordered == (changes.before.state is SessionState.HALTED and moves["session", SessionState.COMPENSATING])
    assert ordered or not moves["entry", UndoState.PENDING]
    assert not (ordered and changes.after.late_effect), "what the person has seen would halt the unwind again"
    assert told[EntryKind.HALT_ORDERED] or changes.before.halt_ordered or not changes.after.halt_ordered


def _check_rest(changes: Changes, actor: str) -> None:
    """Refuse moves out of an end, but for the one that is named, and out of a person's hands, but by a person's order."""
    before, after, kinds = changes.before, changes.after, {EntryKind(entry.kind) for entry in changes.entries}
    if before.state not in RESTING_STATES:
        return
    is_by_operator = actor.startswith("operator:")
    if before.state is not after.state:
        is_late = (before.state, after.state, after.halt_reason) == (SessionState.COMPENSATED, SessionState.HALTED, HaltReason.LATE_EFFECT)
        assert is_late or (before.state is SessionState.HALTED and is_by_operator), f"{actor} moved a session that was {before.state}"
        return
    if before.state is SessionState.HALTED and is_by_operator and kinds & OPERATORS_ENTRIES:
        return
    is_learnt = before.state is SessionState.COMPENSATED and EntryKind.LATE_COMMIT in kinds  # of what a person undid, or let stand
    assert is_learnt or not changes.effects, f"effects changed in a session that is {before.state}"
    assert not changes.undo_entries, f"entries changed in a session that is {before.state}"
    assert all(change.after.due_at is None for change in changes.calls), f"a call became due in a session that is {before.state}"


KNOWN_OUTCOMES = {
    EffectState.COMMITTED: {Outcome.COMMITTED},
    EffectState.FAILED: {Outcome.NOT_APPLIED},
    EffectState.UNKNOWN: {Outcome.UNKNOWN},
    EffectState.COMPENSATING: {Outcome.COMMITTED, Outcome.UNKNOWN},
    EffectState.COMPENSATED: {Outcome.COMMITTED, Outcome.UNKNOWN},
    EffectState.COMPENSATION_FAILED: {Outcome.COMMITTED, Outcome.UNKNOWN},
}


def _check_effect(effect: Effect) -> None:
    """Assert the rules that the table effect_log repeats."""
    assert effect.outcome in KNOWN_OUTCOMES.get(effect.state, {None}), (effect.step_index, effect.state, effect.outcome)
    assert (effect.executed_at is not None) == (effect.outcome is Outcome.COMMITTED)
    assert effect.executed_at is None or effect.registered_at <= effect.executed_at
    is_undoable = effect.reversibility not in {Reversibility.IRREVERSIBLE, Reversibility.READ_ONLY}
    assert is_undoable or effect.state not in {EffectState.COMPENSATING, EffectState.COMPENSATED, EffectState.COMPENSATION_FAILED}


def _check_approval(approval: Approval) -> None:
    """Assert the rules that the table approvals repeats."""
    assert (approval.decided_at is None) == (approval.decided_by is None)
    assert approval.decided_by != approval.requested_by
    assert approval.decided_at is None or approval.requested_at <= approval.decided_at < approval.expires_at
    assert (approval.released_at is None) == (approval.released_to is None)
    assert (approval.state is ApprovalState.RELEASED) == (approval.released_at is not None)
    is_decided = approval.state in {ApprovalState.APPROVED, ApprovalState.RELEASED, ApprovalState.REJECTED, ApprovalState.MISMATCHED}
    assert not is_decided or approval.decided_at is not None
    assert approval.state is not ApprovalState.PENDING or approval.decided_at is None
    assert approval.released_at is None or (approval.decided_at is not None and approval.decided_at <= approval.released_at)
    assert approval.released_at is None or approval.released_at < approval.expires_at
    assert not approval.is_continued or approval.state is ApprovalState.REJECTED


def _check_call(call: OutgoingCall) -> None:
    """Assert the rules that the table outgoing_calls repeats."""
    is_sent = call.first_sent_at is not None
    assert is_sent == (call.url is not None) == (call.body is not None) == (call.attempts > 0)
    assert (call.outcome is not None) == (is_sent and call.kind is CallKind.UNDO)
    assert 0 <= call.failures <= call.attempts
    assert 0 <= call.interrupted <= call.attempts + call.polls


def _check_session(session: Session) -> None:
    """Assert the rules that the table sessions repeats."""
    is_in_hands = session.state in {SessionState.HALTED, SessionState.RESOLVED}
    assert not is_in_hands or (session.halt_reason is not None and session.halted_at is not None)
    assert is_in_hands or session.halt_reason is None
    assert not session.halt_ordered or session.state in UNWINDING_STATES
    assert (session.failed_at is not None) == (session.state not in REPORTING_STATES | {SessionState.COMPLETED})
