"""Run the pending compensations newest first: what one due undo does next, before and after each attempt. Must not send or wait."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import assert_never

from app.domain import bindings, sending
from app.domain.circuits import NOTHING_HELD, Held
from app.domain.draft import Draft
from app.domain.model import (
    CallId,
    CallKind,
    Compensation,
    Effect,
    EffectState,
    EntryKind,
    HaltReason,
    OnUnknown,
    Outcome,
    OutgoingCall,
    RetryPolicy,
    SessionState,
    UndoEntry,
    UndoState,
)
from app.domain.retry import Accepted, Attempt, Done, Failure, Permanent, Retry
from app.domain.sending import POISON_AFTER_INTERRUPTED, Move, Rest, Send, Wait, Yield
from app.domain.states import UNWINDING_STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class StackItem:
    """One undo entry with the effect it undoes, its call if it ever had one, and the tool's newest registration.

    An entry that was not sent yet goes to the newest registration's URL.
    """

    entry: UndoEntry
    effect: Effect
    call: OutgoingCall | None = None
    newest: Compensation | None = None

    @property
    def policy(self) -> RetryPolicy:
        """The retry policy of the version that was seen at intercept."""
        return self.entry.compensation.retry


@dataclass(frozen=True, slots=True, kw_only=True)
class Undoing:
    """An undo that is due, and what comes after it.

    `below`: what may be begun next, see `next_below`. `has_failed_entries`: some entry failed and nothing may be begun next. `may_go_on`
    False: the next entry becomes due, but this worker does not begin it. `held`: where nothing is sent now, except by a probe.
    """

    call: OutgoingCall
    item: StackItem
    below: StackItem | None
    has_failed_entries: bool
    may_go_on: bool = True
    held: Held = NOTHING_HELD
    is_probe: bool = False


def start(draft: Draft, top: StackItem | None) -> OutgoingCall | None:
    """Begin the unwind of a session that has failed: the newest pending entry becomes due, and is returned.

    A session that is marked goes to a person at once: something happened whose undo is gone, or an operator wants it so.
    """
    if draft.session.late_effect:
        _halt_session(draft, HaltReason.LATE_EFFECT)
        return None
    if top is None:
        _finish(draft, has_failed_entries=False)
        return None
    if draft.session.halt_ordered:
        _halt_session(draft, HaltReason.OPERATOR)
        return None
    return _make_due(draft, top)


def resume(draft: Draft, top: StackItem | None) -> None:
    """Go on with the unwind of a halted session at `top`, its newest entry to be undone; None: nothing is left to undo.

    What made the session a person's, this person has seen.
    """
    draft.move_session(SessionState.COMPENSATING, halt_reason=None)
    draft.change_session(late_effect=False)
    if top is None:
        _finish(draft, has_failed_entries=False)
        return
    _make_due(draft, top)


def halt_after_pivot(draft: Draft) -> None:
    """Hand a session that failed past the pivot to a person; nothing of it is undone."""
    _halt_session(draft, HaltReason.FAILED_AFTER_PIVOT)


def halt_late(draft: Draft) -> None:
    """Hand a session that was at rest to a person: an effect it had undone turned out to have happened after that."""
    _halt_session(draft, HaltReason.LATE_EFFECT)


def halt_poisoned(draft: Draft) -> None:
    """Hand a session to a person that crashes whoever works on it; what was under way is given up by then."""
    _halt_session(draft, HaltReason.POISON)


def halt_as_ordered(draft: Draft, running: StackItem | None) -> None:
    """Halt between two attempts; an entry that was being retried is given up, so that a person can have it retried or skip it."""
    if running is None or running.call is None:
        _halt_session(draft, HaltReason.OPERATOR)
        return
    if running.entry.state is not UndoState.RUNNING:  # not sent this time, or settled by a late report since its call became due
        _halt(draft, running.call, HaltReason.OPERATOR)
        return
    call = _give_up_entry(draft, running.call, running, HaltReason.OPERATOR)
    _halt(draft, call, HaltReason.OPERATOR)


def begin(draft: Draft, work: Undoing) -> Move:
    """Decide what to do with a claimed undo before anything is sent; an attempt to be sent is counted in the draft."""
    call, entry = work.call, work.item.entry
    if draft.session.state not in UNWINDING_STATES:
        draft.change_call(call, due_at=None)
        return Rest()
    if entry.state not in {UndoState.PENDING, UndoState.RUNNING}:
        draft.change_call(call, due_at=None)
        return _go_on(draft, work)
    call = sending.close_interrupted(draft, call)
    work = replace(work, call=call)
    if draft.session.halt_ordered:
        halt_as_ordered(draft, replace(work.item, call=call))
        return Rest()
    if call.interrupted >= POISON_AFTER_INTERRUPTED:
        return _fail(draft, work, HaltReason.POISON)
    if draft.now >= call.deadline_at:
        return _fail(draft, replace(work, call=sending.give_up_at_deadline(draft, call)), HaltReason.DEADLINE_EXCEEDED)
    return _send(draft, work)


def record(draft: Draft, work: Undoing, attempt: Attempt, unit: float, *, is_charged: bool = True) -> Move:
    """Decide what an attempt's answer means and what to do next; `unit` in [0, 1) is the jitter's die.

    `is_charged` False: if it is to be tried again, this attempt uses up none of the retries.
    """
    policy = work.item.policy
    call, verdict = sending.note(draft, work.call, attempt, policy)
    work = replace(work, call=call)
    match verdict:
        case Done():
            return _succeed(draft, work)
        case Accepted() | Retry() if draft.session.halt_ordered:
            halt_as_ordered(draft, replace(work.item, call=call))
            return Rest()
        case Accepted():
            return sending.poll_later(draft, call, policy, attempt, unit)
        case Retry():
            waiting = sending.retry_later(draft, call, policy, attempt, unit, is_charged=is_charged)
            if isinstance(waiting, Wait):
                return waiting
            return _fail(draft, replace(work, call=waiting), HaltReason.COMPENSATION_FAILED)
        case Permanent():
            is_denied = attempt.failure is Failure.EGRESS_DENIED
            return _fail(draft, work, HaltReason.EGRESS_DENIED if is_denied else HaltReason.COMPENSATION_FAILED)
        case _:
            assert_never(verdict)


def next_below(item: StackItem, pending: StackItem | None, failed: Sequence[StackItem]) -> StackItem | None:
    """Return what may be begun after `item`: the newest pending one below it, unless one that failed between the two holds it up.

    An `independent` one does not. Only an `item` that a person had retried can have failed ones below it.
    """
    if pending is None:
        return None
    between = (each for each in failed if pending.entry.stack_position < each.entry.stack_position < item.entry.stack_position)
    return pending if all(each.entry.compensation.independent for each in between) else None


def next_destination(work: Undoing) -> str | None:
    """Return where the session's next call goes if this one ends it; None where nothing is pending below."""
    return None if work.below is None else _destination(work.below)


def _destination(item: StackItem) -> str:
    if item.call is not None and item.call.url is not None:
        return item.call.destination
    return sending.destination_of((item.newest or item.entry.compensation).url)


def _make_due(draft: Draft, item: StackItem) -> OutgoingCall:
    """Make an entry's call due, with a fresh budget where it had one before."""
    if item.call is not None:
        return sending.refill(draft, item.call, item.policy)
    compensation = item.entry.compensation
    call = sending.new_call(
        CallId(item.entry.undo_id), CallKind.UNDO, item.entry.stack_position, compensation.url, draft.now, compensation.retry
    )
    settled_at = _settled_at(draft, item, call)
    if draft.now < settled_at:  # said at once: what holds the call meanwhile must not eat into its time
        call = replace(call, due_at=settled_at, deadline_at=_deadline(settled_at, compensation.retry))
    draft.add_call(call)
    return call


def _send(draft: Draft, work: Undoing) -> Move:
    item, call = work.item, work.call
    if not item.entry.compensation.is_readable:
        return _fail(draft, work, HaltReason.POISON)
    if item.entry.state is UndoState.PENDING:
        if draft.session.late_effect:
            return _halt(draft, call, HaltReason.LATE_EFFECT)
        settled_at = _settled_at(draft, item, call)
        if draft.now < settled_at:
            waiting = draft.change_call(call, due_at=settled_at, deadline_at=_deadline(settled_at, item.policy))
            return Wait(call=waiting, seconds=(settled_at - draft.now).total_seconds())
    unfrozen = sendable(item) if call.first_sent_at is None else None
    if isinstance(unfrozen, HaltReason):
        return _halt(draft, call, unfrozen)
    goes_to = call.destination if unfrozen is None else sending.destination_of(unfrozen.url)
    if work.held.holds(goes_to, is_probe=work.is_probe and goes_to == call.destination):
        # The tool may have moved since the call became due: from now on it waits where it will go.
        return Yield(call=call if goes_to == call.destination else draft.change_call(call, destination=goes_to))
    if unfrozen is not None:
        call = sending.freeze(draft, call, unfrozen.url, unfrozen.body, unfrozen.outcome)
    if item.entry.state is UndoState.PENDING:
        call, item = _begin_entry(draft, call, item)
    return Send(call=sending.count(draft, call), effect=item.effect, policy=item.policy)


def _settled_at(draft: Draft, item: StackItem, call: OutgoingCall) -> datetime:
    """Return when an undo may be begun: a call of unknown outcome may still be running, and would land after its own undo."""
    failed_at = draft.session.failed_at
    if failed_at is None or call.first_sent_at is not None or item.effect.outcome is Outcome.COMMITTED:
        return draft.now
    return failed_at + timedelta(milliseconds=item.entry.compensation.settle_ms)


def _deadline(due_at: datetime, policy: RetryPolicy) -> datetime:
    """Return the deadline of a call that is first sent later: it has all of its own time after that."""
    return due_at + timedelta(milliseconds=policy.deadline_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sendable:
    """What an undo would send, where, and what it would tell the endpoint of the effect."""

    url: str
    body: bytes
    outcome: Outcome


def sendable(item: StackItem) -> Sendable | HaltReason:
    """Say what is sent for an entry that was never sent yet, or why it cannot be."""
    effect, compensation = item.effect, item.entry.compensation
    outcome = Outcome.COMMITTED if effect.outcome is Outcome.COMMITTED else Outcome.UNKNOWN
    newest = item.newest or compensation
    if not (compensation.is_readable and newest.is_readable):
        return HaltReason.POISON
    if outcome is Outcome.UNKNOWN and compensation.on_unknown is OnUnknown.ESCALATE:
        return HaltReason.UNKNOWN_OUTCOME
    url, body = newest.url, bindings.body_to_send(compensation.args, effect)
    if body is None and compensation.unknown is not None:
        url = (newest.unknown.url if newest.unknown else compensation.unknown.url) or url
        body = bindings.body_to_send(compensation.unknown.args, effect)
    return HaltReason.UNRESOLVED_REFERENCE if body is None else Sendable(url=url, body=body, outcome=outcome)


def _begin_entry(draft: Draft, call: OutgoingCall, item: StackItem) -> tuple[OutgoingCall, StackItem]:
    """Tell the journal that the undo begins: for the first time, or anew because a person had it retried."""
    if call.body is None or call.outcome is None:
        raise AssertionError(f"call {call.call_id} is to be sent and not frozen")
    if draft.session.state is SessionState.FAILED:
        draft.move_session(SessionState.COMPENSATING)
    begun = replace(
        item,
        entry=draft.move_undo_entry(item.entry, UndoState.RUNNING),
        effect=draft.move_effect(item.effect, EffectState.COMPENSATING),
    )
    draft.record(
        EntryKind.COMPENSATING,
        item.entry.stack_position,
        body={
            "undo_id": str(item.entry.undo_id),
            "idempotency_key": call.idempotency_key,
            "url": call.url,
            "outcome": call.outcome.value,
            "attempts_before": call.attempts,
        },
        contents={"args": call.body},
    )
    return call, begun


def _succeed(draft: Draft, work: Undoing) -> Move:
    entry = work.item.entry
    draft.change_call(work.call, due_at=None)
    draft.move_undo_entry(entry, UndoState.COMPENSATED, compensated_at=draft.now)
    draft.move_effect(work.item.effect, EffectState.COMPENSATED)
    draft.record(
        EntryKind.COMPENSATED,
        entry.stack_position,
        body={"undo_id": str(entry.undo_id), "attempts": work.call.attempts, "status": work.call.last_status},
    )
    return _go_on(draft, work)


def _fail(draft: Draft, work: Undoing, reason: HaltReason) -> Move:
    """Give an entry up: a person owns it. An `independent` one lets the unwind go past it first."""
    entry = work.item.entry
    if entry.state is UndoState.PENDING:  # not sent this time: it stays as it is, for a person to look at
        return _halt(draft, work.call, reason)
    call = _give_up_entry(draft, work.call, work.item, reason)
    if entry.compensation.independent:
        return _go_on(draft, replace(work, call=call, has_failed_entries=True))
    return _halt(draft, call, reason)


def _give_up_entry(draft: Draft, call: OutgoingCall, item: StackItem, reason: HaltReason) -> OutgoingCall:
    call = draft.change_call(call, due_at=None)
    draft.move_undo_entry(item.entry, UndoState.FAILED)
    draft.move_effect(item.effect, EffectState.COMPENSATION_FAILED)
    draft.record(
        EntryKind.COMPENSATION_FAILED,
        item.entry.stack_position,
        body={
            "undo_id": str(item.entry.undo_id),
            "reason": reason.value,
            "attempts": call.attempts,
            "status": call.last_status,
            "error": call.last_error,
        },
    )
    return call


def _go_on(draft: Draft, work: Undoing) -> Move:
    """Take the next entry, in the same breath and under the same lease."""
    if draft.session.late_effect:
        return _halt(draft, work.call, HaltReason.LATE_EFFECT)
    if work.below is None:
        _finish(draft, has_failed_entries=work.has_failed_entries)
        return Rest()
    if draft.session.halt_ordered:
        return _halt(draft, work.call, HaltReason.OPERATOR)
    call = _make_due(draft, work.below)
    if not work.may_go_on:
        return Yield(call=call)
    return _send(draft, replace(work, call=call, item=work.below, below=None, is_probe=False))


def _finish(draft: Draft, *, has_failed_entries: bool) -> None:
    if has_failed_entries:
        _halt_session(draft, HaltReason.COMPENSATION_FAILED)
        return
    if draft.session.state is SessionState.FAILED:  # nothing was ever sent: there was no entry, or a late report settled them all
        draft.move_session(SessionState.COMPENSATING)
    draft.move_session(SessionState.COMPENSATED, halt_ordered=False)
    draft.record(EntryKind.UNWOUND)


def _halt(draft: Draft, call: OutgoingCall, reason: HaltReason) -> Rest:
    draft.change_call(call, due_at=None)
    _halt_session(draft, reason)
    return Rest()


def _halt_session(draft: Draft, reason: HaltReason) -> None:
    if draft.session.state is SessionState.FAILED:
        draft.move_session(SessionState.COMPENSATING)
    draft.move_session(SessionState.HALTED, halt_reason=reason, halted_at=draft.now, halt_ordered=False)
    draft.record(EntryKind.HALTED, body={"reason": reason.value})
