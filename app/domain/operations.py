"""What an operator may order once automation has stopped: retry, skip, unwind, halt, resolve, settle. Must not send anything itself.

Every order has a reason and an entry in the journal, and repeating one does no harm.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from app.domain import egress, outcomes, sending, unwinding
from app.domain.draft import Draft
from app.domain.egress import EgressPolicy, UrlRefused
from app.domain.errors import Conflict, Invalid, SagaError
from app.domain.model import (
    Effect,
    EffectState,
    EntryKind,
    Outcome,
    Session,
    SessionState,
    UndoEntry,
    UndoState,
)
from app.domain.outcomes import REPORTING_STATES, Reported
from app.domain.states import UNWINDING_STATES
from app.domain.unwinding import StackItem

UNSETTLED_UNDO = frozenset({UndoState.PENDING, UndoState.FAILED})

KEYS_ARE_KEPT = timedelta(hours=24)
"""How long endpoints commonly remember an idempotency key (Stripe's v1: at least 24 h); after that a repeat may be taken for a new call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Have an undo tried again. `url` where its destination has moved: never other bytes."""

    reason: str
    url: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Take an undo out of the unwind; `by_hand`: because a person has undone the effect by other means."""

    reason: str
    by_hand: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """Say what is known of a call whose outcome was unknown; `result` is compact JSON text."""

    reason: str
    outcome: Outcome
    result: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What an order about the undo stack meets: every failed item, and the newest pending one."""

    failed: Sequence[StackItem]
    top: StackItem | None

    @property
    def unsettled(self) -> list[StackItem]:
        """All of them, newest first."""
        items = [*self.failed, *([] if self.top is None else [self.top])]
        return sorted(items, key=lambda item: item.entry.stack_position, reverse=True)


def retry(draft: Draft, target: StackItem, stack: Stack, order: Retry, policy: EgressPolicy) -> SagaError | None:
    """Try an undo again with a fresh budget, the same key and the same bytes, and let the unwind go on from there."""
    session, entry = draft.session, target.entry
    is_same_place = order.url is None or (target.call is not None and target.call.url == order.url)
    if _is_resumed(session) and entry.state is not UndoState.FAILED and is_same_place:
        return None  # ordered already
    refusal = _must_be_halted(session) or _must_be_unsettled(entry) or _must_be_next(target, stack)
    refusal = refusal or (None if order.url is None else _may_not_move_to(target, order.url, policy))
    if refusal is not None:
        return refusal
    _record_retry(draft, target, order)
    item = target
    if entry.state is UndoState.FAILED:
        item = replace(item, entry=draft.move_undo_entry(entry, UndoState.PENDING))
    if order.url is not None and item.call is not None:
        moved = draft.change_call(item.call, url=order.url, destination=sending.destination_of(order.url))
        item = replace(item, call=moved)
    unwinding.resume(draft, item)
    return None


def skip(draft: Draft, target: Reported, order: Skip) -> SagaError | None:
    """Take an undo out of the unwind; the session stays with the person until the unwind is ordered to go on."""
    entry = target.undo_entry
    if entry is None:
        raise AssertionError("the undo that was asked for is there")
    wanted = UndoState.COMPENSATED if order.by_hand else UndoState.SKIPPED
    if entry.state is wanted and entry.by_hand is order.by_hand and not draft.session.clean:
        return None  # ordered already
    refusal = _must_be_halted(draft.session) or _must_be_unsettled(entry)
    if refusal is not None:
        return refusal
    draft.change_session(clean=False)
    body = {"undo_id": str(entry.undo_id), "reason": order.reason, "by_hand": order.by_hand}
    if not order.by_hand:
        draft.move_undo_entry(entry, UndoState.SKIPPED)
        draft.record(EntryKind.SKIPPED, entry.stack_position, body=body)
        return None
    draft.move_undo_entry(entry, UndoState.COMPENSATED, by_hand=True, compensated_at=draft.now)
    draft.move_effect(draft.move_effect(target.effect, EffectState.COMPENSATING), EffectState.COMPENSATED)
    draft.record(EntryKind.COMPENSATED, entry.stack_position, body=body)
    return None


def unwind(draft: Draft, stack: Stack, reason: str) -> SagaError | None:
    """Let the unwind go on with the newest entry, failed ones included; this is also how one past the pivot is ordered."""
    session = draft.session
    if _is_resumed(session):
        return None  # ordered already
    refusal = _must_be_halted(session)
    if refusal is not None:
        return refusal
    retried = [str(item.entry.undo_id) for item in stack.unsettled if item.entry.state is UndoState.FAILED]
    draft.record(EntryKind.UNWIND_ORDERED, body={"reason": reason, "was": _reason_of(session), "retried": retried})
    items = [
        replace(item, entry=draft.move_undo_entry(item.entry, UndoState.PENDING)) if item.entry.state is UndoState.FAILED else item
        for item in stack.unsettled
    ]
    unwinding.resume(draft, items[0] if items else None)
    return None


def halt(draft: Draft, running: StackItem | None, reason: str, *, is_action_in_flight: bool) -> SagaError | None:
    """Stop an unwind at its next boundary: now, unless a request is in flight, whose answer is waited for.

    `running` is the entry whose call is due.
    """
    session = draft.session
    if session.state is SessionState.HALTED or session.halt_ordered:
        return None
    if session.state not in UNWINDING_STATES:
        return Conflict(
            "session_not_unwinding",
            f"session {session.session_id} is {session.state}; only an unwind can be halted",
            state=session.state.value,
        )
    draft.record(EntryKind.HALT_ORDERED, body={"reason": reason})
    if is_action_in_flight or (running is not None and running.call is not None and running.call.is_attempt_open):
        draft.change_session(halt_ordered=True)
        return None
    unwinding.halt_as_ordered(draft, running)
    return None


def resolve(draft: Draft, reason: str) -> SagaError | None:
    """Close a session as it stands: what is not undone stays so."""
    session = draft.session
    if session.state is SessionState.RESOLVED:
        return None
    refusal = _must_be_halted(session)
    if refusal is not None:
        return refusal
    draft.move_session(SessionState.RESOLVED, clean=False)
    draft.record(EntryKind.RESOLVED, body={"reason": reason, "was": _reason_of(session)})
    return None


def settle(draft: Draft, seen: Reported, irreversible: Sequence[Effect], order: Settle) -> Reported | SagaError:
    """Say what is known of an unknown call: its undo will be told so, or is taken out of the unwind.

    `irreversible` holds every irreversible effect of the session.
    """
    session, effect = draft.session, seen.effect
    is_same_result = order.outcome is not Outcome.COMMITTED or order.result in {None, effect.result}
    if effect.state in {EffectState.COMMITTED, EffectState.FAILED} and effect.outcome is order.outcome and is_same_result:
        return seen  # known already
    if session.state not in REPORTING_STATES | {SessionState.HALTED}:
        return _not_halted(session)
    is_result_missing = effect.state is EffectState.COMMITTED and effect.result is None and order.outcome is Outcome.COMMITTED
    if effect.state is not EffectState.UNKNOWN and not is_result_missing:
        return Conflict(
            "not_unknown",
            f"step {effect.step_index} is {effect.state}; only a call whose outcome is unknown can be settled",
            step_index=effect.step_index,
            state=effect.state.value,
        )
    draft.record(
        EntryKind.SETTLED,
        effect.step_index,
        body={"effect_id": str(effect.effect_id), "outcome": order.outcome.value, "reason": order.reason},
        contents={} if order.result is None else {"result": order.result},
    )
    if is_result_missing:
        return replace(seen, effect=draft.change_effect(effect, result=order.result))
    if order.outcome is Outcome.COMMITTED:
        settled = outcomes.settle_committed(draft, seen, order.result)
        outcomes.pivot_if_irreversible(draft, settled.effect)
        return settled
    return outcomes.settle_not_applied(draft, seen, irreversible, f"settled as not applied: {order.reason}")


def may_retry(target: StackItem, unsettled: Sequence[StackItem]) -> bool:
    """Tell whether an entry's turn may come now: all that is above it is settled, or failed and was declared independent."""
    above = [item for item in unsettled if item.entry.stack_position > target.entry.stack_position]
    return all(item.entry.state is UndoState.FAILED and item.entry.compensation.independent for item in above)


def may_key_be_forgotten(now: datetime, target: StackItem) -> bool:
    """Tell whether the endpoint may have forgotten this undo's key, so that a repeat could undo twice."""
    first_sent_at = target.call.first_sent_at if target.call else None
    return first_sent_at is not None and now - first_sent_at > KEYS_ARE_KEPT


def _record_retry(draft: Draft, target: StackItem, order: Retry) -> None:
    call = target.call
    draft.record(
        EntryKind.RETRIED,
        target.entry.stack_position,
        body={
            "undo_id": str(target.entry.undo_id),
            "reason": order.reason,
            "was": _reason_of(draft.session),
            "url": order.url,
            "attempts_before": call.attempts if call else 0,
            "key_may_be_forgotten": may_key_be_forgotten(draft.now, target),
        },
    )


def _reason_of(session: Session) -> str | None:
    return session.halt_reason.value if session.halt_reason else None


def _is_resumed(session: Session) -> bool:
    """Tell whether the unwind goes on, or has ended, because a person had it go on: what was ordered then may be ordered again."""
    return session.state in {SessionState.COMPENSATING, SessionState.COMPENSATED} and session.halted_at is not None


def _must_be_halted(session: Session) -> SagaError | None:
    return None if session.state is SessionState.HALTED else _not_halted(session)


def _not_halted(session: Session) -> SagaError:
    return Conflict(
        "session_not_halted",
        f"session {session.session_id} is {session.state}; this is for sessions that are halted",
        state=session.state.value,
    )


def _must_be_unsettled(entry: UndoEntry) -> SagaError | None:
    if entry.state in UNSETTLED_UNDO:
        return None
    return Conflict("undo_settled", f"undo {entry.undo_id} is {entry.state}; nothing is left to do", state=entry.state.value)


def _must_be_next(target: StackItem, stack: Stack) -> SagaError | None:
    if may_retry(target, stack.unsettled):
        return None
    newest = stack.unsettled[0].entry
    return Conflict(
        "undo_not_next",
        f"newest first: above undo {target.entry.undo_id} stands undo {newest.undo_id} of step {newest.stack_position}, {newest.state}",
        next_undo_id=str(newest.undo_id),
    )


def _may_not_move_to(target: StackItem, url: str, policy: EgressPolicy) -> SagaError | None:
    if target.call is None or target.call.first_sent_at is None:
        return Conflict(
            "undo_not_sent",
            f"undo {target.entry.undo_id} was never sent: it goes to the URL that is registered then; register the tool with the new one",
        )
    try:
        egress.check_url(url, policy)
    except UrlRefused as refused:
        detail = f"the undo could never be sent there: {refused.detail}"
        return Invalid("url_refused", detail, errors=[{"pointer": "/url", "detail": detail}])
    return None
