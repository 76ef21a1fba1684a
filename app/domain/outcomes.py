"""What is reported of a call or of a run: commit and fail, in time or late. Must not run anything: see `unwinding`.

A refusal may come with evidence in the draft (LATE_COMMIT, LATE_FAIL): it is written first, then the caller is told no.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import assert_never

from app.domain import unwinding
from app.domain.draft import Draft
from app.domain.errors import Conflict, SagaError
from app.domain.model import (
    Approval,
    ApprovalState,
    Effect,
    EffectId,
    EffectState,
    EntryKind,
    Outcome,
    OutgoingCall,
    Reversibility,
    Session,
    SessionState,
    StepIndex,
    UndoEntry,
    UndoState,
)
from app.domain.states import UNWINDING_STATES
from app.domain.unwinding import StackItem

REPORTING_STATES = frozenset({SessionState.ACTIVE, SessionState.AWAITING_APPROVAL})
"""While a session is in one of these, reports about its calls are in time."""

NOT_SENT = "the session failed before this was sent, or while it was certainly not processed"

AGENT_TIMEOUT = "agent_timeout"
"""The error of a session that failed because its agent fell silent or ran out of time."""

UNSETTLED = frozenset({EffectState.EXECUTING, EffectState.UNKNOWN, EffectState.AWAITING_APPROVAL, EffectState.APPROVED})

NEVER_RELEASED = frozenset({EffectState.REJECTED, EffectState.EXPIRED, EffectState.CANCELLED})
"""Whoever reports that such a call happened says that it passed the gate by: its session goes on, and is not clean."""

MOVABLE_OUTCOMES = frozenset({EffectState.EXECUTING, EffectState.UNKNOWN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """One effect with what would undo it, what was asked about it, and the service's own call of it, as a report finds or leaves them."""

    effect: Effect
    undo_entry: UndoEntry | None
    approval: Approval | None = None
    action: OutgoingCall | None = None

    @property
    def is_running_as_action(self) -> bool:
        """Tell whether the service is executing this call: nobody else can say what came of it."""
        return self.effect.state is EffectState.EXECUTING and self.action is not None

    @property
    def is_in_flight(self) -> bool:
        """Tell whether a request of the service's may be on its way now, or was accepted and is being worked on."""
        action = self.action
        return self.is_running_as_action and action is not None and (action.is_attempt_open or action.poll_url is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailReport:
    """What the agent says of a call that failed."""

    outcome: Outcome
    error: str


def commit(draft: Draft, seen: Reported, result: bytes) -> Reported | SagaError:
    """Take the report that a call happened; `result` is compact JSON text. A repeat changes nothing."""
    effect, session = seen.effect, draft.session
    if session.state not in REPORTING_STATES:
        return _commit_late(draft, seen, result)
    if effect.state is EffectState.COMMITTED:
        return seen if effect.result == result else _result_differs(effect)
    if effect.state is EffectState.FAILED or effect.state in NEVER_RELEASED:
        return _commit_contradicted(draft, seen, result)
    if effect.state not in MOVABLE_OUTCOMES:
        return _not_executing(effect)
    if seen.action is not None:
        return _runs_as_action(effect)
    committed = settle_committed(draft, seen, result)
    draft.record(EntryKind.EXECUTED, effect.step_index, body={"effect_id": str(effect.effect_id)}, contents={"result": result})
    pivot_if_irreversible(draft, committed.effect)
    return committed


def fail_effect(draft: Draft, seen: Reported, report: FailReport, irreversible: Sequence[Effect]) -> Reported | SagaError:
    """Take the report that one call failed; the session goes on. A repeat changes nothing.

    `irreversible` holds every irreversible effect of the session.
    """
    effect, session = seen.effect, draft.session
    if session.state not in REPORTING_STATES:
        return _fail_late(draft, seen, report)
    if effect.outcome is report.outcome and effect.state in {EffectState.FAILED, EffectState.UNKNOWN}:
        return seen
    if effect.state not in MOVABLE_OUTCOMES:
        return _not_executing(effect)
    if seen.action is not None:
        return _runs_as_action(effect)
    body = {"effect_id": str(effect.effect_id), "outcome": report.outcome.value, "error": report.error}
    draft.record(EntryKind.FAILED, effect.step_index, body=body)
    match report.outcome:
        case Outcome.NOT_APPLIED:
            return settle_not_applied(draft, seen, irreversible, report.error)
        case Outcome.UNKNOWN:
            return settle_unknown(draft, seen, report.error)
        case Outcome.COMMITTED:
            raise AssertionError("a failure report says not_applied or unknown")
        case _:
            assert_never(report.outcome)


def settle_committed(draft: Draft, seen: Reported, result: bytes | None) -> Reported:
    """Take it as known that a call happened; an irreversible one is the pivot. What told so is for the caller to record."""
    committed = draft.move_effect(
        seen.effect, EffectState.COMMITTED, outcome=Outcome.COMMITTED, result=result, executed_at=draft.now, error=None
    )
    return replace(seen, effect=committed)


def settle_not_applied(draft: Draft, seen: Reported, irreversible: Sequence[Effect], error: str) -> Reported:
    """Take it as known that a call did nothing: there is nothing to undo, and if it was held for the pivot, it is none.

    `irreversible` holds every irreversible effect of the session.
    """
    effect = seen.effect
    failed = draft.move_effect(effect, EffectState.FAILED, outcome=Outcome.NOT_APPLIED, error=error)
    if draft.session.pivoted and not any(_stands(other) for other in irreversible if other.effect_id != effect.effect_id):
        # What may have been the pivot did not happen. Past the end of the run a person has had a hand in it all the same.
        is_clean = draft.session.state in REPORTING_STATES and not draft.session.late_effect
        draft.change_session(pivoted=False, clean=is_clean)
    return replace(seen, effect=failed, undo_entry=_skip(draft, seen.undo_entry, Outcome.NOT_APPLIED))


def settle_unknown(draft: Draft, seen: Reported, error: str) -> Reported:
    """Take it as known that nobody knows; an irreversible call may have happened, so it is the pivot."""
    unknown = draft.move_effect(seen.effect, EffectState.UNKNOWN, outcome=Outcome.UNKNOWN, error=error)
    pivot_if_irreversible(draft, unknown)
    return replace(seen, effect=unknown)


def fail_session(draft: Draft, error: str, known: Sequence[Reported]) -> SagaError | None:
    """Fail the run: settle what is open as unknown and make the newest undo due. A repeat changes nothing.

    `error` is for people. `known` holds at least every effect that is executing, unknown or waiting for a decision, and the newest pending
    undo entry. An action whose request may be on its way is waited for: only when it has ended is it judged what can be undone.
    """
    session = draft.session
    if session.state is SessionState.COMPLETED:
        return Conflict("session_not_active", f"session {session.session_id} is completed; nothing can unwind it", state=session.state)
    if session.state not in REPORTING_STATES:
        return None
    draft.change_session(failed_at=draft.now)
    settled = [_settle_open(draft, seen) for seen in known]
    moved = [after for before, after in zip(known, settled, strict=True) if before.effect.state is not after.effect.state]
    in_flight_steps = _steps(settled, EffectState.EXECUTING)
    body = {
        "error": error,
        "unknown_steps": _steps(settled, EffectState.UNKNOWN),
        "not_applied_steps": _steps(moved, EffectState.FAILED),
        "in_flight_steps": in_flight_steps,
    }
    draft.record(EntryKind.SESSION_FAILED, body=body)
    for seen in settled:
        if seen.effect.state is EffectState.FAILED:
            _skip(draft, seen.undo_entry, Outcome.NOT_APPLIED)
        if seen.effect.state is EffectState.CANCELLED:
            draft.record(EntryKind.CANCELLED, seen.effect.step_index, body={"effect_id": str(seen.effect.effect_id)})
        if seen.effect.state is EffectState.UNKNOWN:
            pivot_if_irreversible(draft, seen.effect)
    if in_flight_steps:
        draft.move_session(SessionState.FAILED)
        return None
    judge(draft, _newest_pending(settled))
    return None


def judge(draft: Draft, top: StackItem | None) -> OutgoingCall | None:
    """Say what becomes of a failed session now that nothing of it is in flight; return the undo that is due, if one is.

    Past the pivot nothing is undone.
    """
    if draft.session.pivoted:
        unwinding.halt_after_pivot(draft)
        return None
    if draft.session.state is not SessionState.FAILED:
        draft.move_session(SessionState.FAILED)
    return unwinding.start(draft, top)


def pivot_if_irreversible(draft: Draft, effect: Effect) -> None:
    """Mark the point past which nothing is unwound any more; the first irreversible effect that went ahead, or may have, is it."""
    if effect.reversibility is Reversibility.IRREVERSIBLE:
        pivot(draft, effect.step_index, effect.effect_id)


def pivot(draft: Draft, step: StepIndex, effect_id: EffectId) -> None:
    """Mark the point past which nothing is unwound by itself, at this irreversible call unless there was one before."""
    draft.change_session(clean=False)
    if draft.session.pivoted:
        return
    draft.change_session(pivoted=True)
    draft.record(EntryKind.PIVOT, step, body={"effect_id": str(effect_id)})


def _stands(effect: Effect) -> bool:
    return effect.reversibility is Reversibility.IRREVERSIBLE and effect.outcome in {Outcome.COMMITTED, Outcome.UNKNOWN}


def time_out(draft: Draft, known: Sequence[Reported]) -> None:
    """Fail an active session that is past its deadline or silent for too long; anything else, one that just moved above all, stays."""
    if is_out_of_time(draft, known):
        fail_session(draft, AGENT_TIMEOUT, known)


def is_out_of_time(draft: Draft, known: Sequence[Reported]) -> bool:
    """Tell whether an active session is past its deadline, or silent for too long; waiting for a person, or for an action, is neither."""
    session = draft.session
    if session.state is not SessionState.ACTIVE:
        return False
    is_silent = session.idle_seconds is not None and draft.now >= session.active_at + timedelta(seconds=session.idle_seconds)
    return (is_silent and not any(seen.is_running_as_action for seen in known)) or is_past_deadline(draft)


def is_past_deadline(draft: Draft) -> bool:
    """Tell whether a session is past the moment that it was given; unlike silence, no sign of life changes that."""
    return draft.session.deadline_at is not None and draft.now >= draft.session.deadline_at


def past_deadline(session: Session) -> Conflict:
    """Return the refusal of a session that is about to be failed for want of time."""
    return Conflict("session_past_deadline", f"session {session.session_id} is past its deadline; it is about to be failed")


def complete(draft: Draft, known: Sequence[Reported]) -> SagaError | None:
    """End a run that went well: its undo entries are skipped and nothing can unwind it any more. A repeat changes nothing.

    `known` holds at least every effect that is not settled and every pending undo entry.
    """
    session = draft.session
    if session.state is SessionState.COMPLETED:
        return None
    unsettled = [
        seen.effect for seen in known if seen.effect.state in UNSETTLED and seen.effect.reversibility is not Reversibility.READ_ONLY
    ]
    if session.state in REPORTING_STATES and unsettled:
        return unsettled_effects(unsettled, "a run is complete only when every effect is committed or failed")
    if session.state is not SessionState.ACTIVE:
        return _not_active(session)
    if is_past_deadline(draft):
        return past_deadline(session)
    for seen in known:
        if seen.effect.state is EffectState.EXECUTING:  # a read of which nobody told the end
            draft.move_effect(seen.effect, EffectState.FAILED, outcome=Outcome.NOT_APPLIED)
            if seen.action is not None:
                draft.change_call(seen.action, due_at=None)
        _skip(draft, seen.undo_entry, SessionState.COMPLETED)
    draft.move_session(SessionState.COMPLETED)
    draft.record(EntryKind.COMPLETED)
    return None


def touch(draft: Draft) -> SagaError | None:
    """Take a sign of life; it is no transition, so nothing is recorded."""
    return None if draft.session.state in REPORTING_STATES else _not_active(draft.session)


def unsettled_effects(effects: Sequence[Effect], sentence: str) -> Conflict:
    """Return the refusal that lists which effects have to be settled first."""
    steps = [{"step_index": effect.step_index, "tool": effect.tool, "state": effect.state.value} for effect in effects]
    return Conflict("unsettled_effects", sentence, unsettled=steps)


def _not_active(session: Session) -> Conflict:
    return Conflict("session_not_active", f"session {session.session_id} is {session.state}", state=session.state.value)


def _steps(known: Sequence[Reported], state: EffectState) -> list[int]:
    return [seen.effect.step_index for seen in known if seen.effect.state is state]


def _newest_pending(known: Sequence[Reported]) -> StackItem | None:
    pending = [
        StackItem(entry=seen.undo_entry, effect=seen.effect)
        for seen in known
        if seen.undo_entry is not None and seen.undo_entry.state is UndoState.PENDING and seen.effect.state is not EffectState.FAILED
    ]
    return max(pending, key=lambda item: item.entry.stack_position, default=None)


def _settle_open(draft: Draft, seen: Reported) -> Reported:
    """Say of a call that is open when its session fails what is known of it; one that is in flight as an action stays open."""
    effect = seen.effect
    match effect.state:
        case EffectState.EXECUTING if seen.is_in_flight:
            return seen
        case EffectState.EXECUTING:
            return replace(seen, effect=_settle_executing(draft, seen))
        case EffectState.AWAITING_APPROVAL | EffectState.APPROVED:
            asked = None if seen.approval is None else draft.change_approval(seen.approval, ApprovalState.CANCELLED)
            return replace(seen, effect=draft.move_effect(effect, EffectState.CANCELLED), approval=asked)
        case _:
            return seen


def _settle_executing(draft: Draft, seen: Reported) -> Effect:
    if seen.action is not None:
        draft.change_call(seen.action, due_at=None)
        if not seen.action.may_be_processing:  # never sent, or certainly not processed each time
            return draft.move_effect(seen.effect, EffectState.FAILED, outcome=Outcome.NOT_APPLIED, error=NOT_SENT)
    if seen.effect.reversibility is Reversibility.READ_ONLY:
        return draft.move_effect(seen.effect, EffectState.FAILED, outcome=Outcome.NOT_APPLIED)
    return draft.move_effect(seen.effect, EffectState.UNKNOWN, outcome=Outcome.UNKNOWN)


def _commit_late(draft: Draft, seen: Reported, result: bytes) -> SagaError:
    """Take a report after the session has failed: keep the evidence, use it where the undo was not sent yet, and say no."""
    effect, session = seen.effect, draft.session
    refusal = _session_not_active(session, effect)
    if session.state is SessionState.COMPLETED:
        return refusal
    if effect.outcome is Outcome.COMMITTED and effect.result == result:
        return refusal  # known already, in time or late
    _record_late(draft, effect, result)
    if session.state not in UNWINDING_STATES | {SessionState.COMPENSATED}:
        if effect.outcome is not Outcome.COMMITTED:
            draft.change_session(clean=False)
        return refusal  # halted or resolved: a person owns it, and sees the report
    if seen.undo_entry is None:
        _take_late_without_undo(draft, effect)
        return refusal
    match effect.outcome:
        case Outcome.UNKNOWN if effect.state is EffectState.UNKNOWN:  # its undo was not sent, or a person lets the effect stand
            draft.move_effect(effect, EffectState.COMMITTED, outcome=Outcome.COMMITTED, result=result, executed_at=draft.now)
        case Outcome.UNKNOWN:
            draft.change_effect(effect, outcome=Outcome.COMMITTED, result=result, executed_at=draft.now)
            if not _is_settled_by_person(seen.undo_entry):
                _hand_over_late(draft)
        case Outcome.NOT_APPLIED:  # it was said that nothing happened, so its undo was skipped
            _hand_over_late(draft)
        case _:
            pass
    return refusal


def _take_late_without_undo(draft: Draft, effect: Effect) -> None:
    """Hand over a call that happened though it was said that it did not; one that no person had let go ahead is marked, and told."""
    if effect.reversibility is Reversibility.READ_ONLY:
        return
    if effect.state is EffectState.FAILED:
        pivot_if_irreversible(draft, effect)
        _hand_over_late(draft)
    elif effect.state in NEVER_RELEASED:
        draft.change_session(clean=False)


def _commit_contradicted(draft: Draft, seen: Reported, result: bytes) -> SagaError:
    """Take the report that a call happened though it was said that it did not, or a person had said no: a person has to look."""
    effect = seen.effect
    refusal = _not_executing(effect)
    if effect.reversibility is Reversibility.READ_ONLY:
        return refusal
    _record_late(draft, effect, result)
    draft.change_session(late_effect=draft.session.late_effect or effect.state is EffectState.FAILED, clean=False)
    if effect.state is EffectState.FAILED:
        pivot_if_irreversible(draft, effect)
    return refusal


def _record_late(draft: Draft, effect: Effect, result: bytes) -> None:
    draft.record(EntryKind.LATE_COMMIT, effect.step_index, body={"effect_id": str(effect.effect_id)}, contents={"result": result})


def _is_settled_by_person(sent: UndoEntry) -> bool:
    """Tell whether a person undid by other means, or let stand, what an undo was sent for: that it happened is no news then."""
    return sent.by_hand or sent.state is UndoState.SKIPPED


def _hand_over_late(draft: Draft) -> None:
    """Mark the session: the worker halts it at the next boundary; one that is at rest already is halted now."""
    draft.change_session(late_effect=True, clean=False)
    if draft.session.state is SessionState.COMPENSATED:
        unwinding.halt_late(draft)


def _fail_late(draft: Draft, seen: Reported, report: FailReport) -> SagaError:
    effect, session = seen.effect, draft.session
    refusal = _session_not_active(session, effect)
    if session.state is SessionState.COMPLETED or effect.outcome is report.outcome:
        return refusal
    body = {"effect_id": str(effect.effect_id), "outcome": report.outcome.value, "error": report.error}
    draft.record(EntryKind.LATE_FAIL, effect.step_index, body=body)
    is_skippable = (
        session.state in UNWINDING_STATES
        and report.outcome is Outcome.NOT_APPLIED
        and effect.state is EffectState.UNKNOWN
        and seen.undo_entry is not None
        and seen.undo_entry.state is UndoState.PENDING
    )
    if is_skippable:
        draft.move_effect(effect, EffectState.FAILED, outcome=Outcome.NOT_APPLIED, error=report.error)
        _skip(draft, seen.undo_entry, Outcome.NOT_APPLIED)
    return refusal


def _skip(draft: Draft, undo_entry: UndoEntry | None, reason: Outcome | SessionState) -> UndoEntry | None:
    """Take an entry out of the unwind: its effect was not applied, or its session is complete."""
    if undo_entry is None or undo_entry.state is not UndoState.PENDING:
        return undo_entry
    draft.record(EntryKind.SKIPPED, undo_entry.stack_position, body={"undo_id": str(undo_entry.undo_id), "reason": reason.value})
    return draft.move_undo_entry(undo_entry, UndoState.SKIPPED)


def _session_not_active(session: Session, effect: Effect) -> SagaError:
    return Conflict(
        "session_not_active",
        f"session {session.session_id} is {session.state}; the report about step {effect.step_index} comes too late",
        state=session.state.value,
        effect_state=effect.state.value,
    )


def _result_differs(effect: Effect) -> SagaError:
    return Conflict(
        "result_differs",
        f"step {effect.step_index} was committed with another result",
        step_index=effect.step_index,
    )


def _runs_as_action(effect: Effect) -> SagaError:
    return Conflict(
        "runs_as_action",
        f"step {effect.step_index} is executed by the service, which sees what comes of it; an operator may settle what stays unknown",
        step_index=effect.step_index,
        state=effect.state.value,
    )


def _not_executing(effect: Effect) -> SagaError:
    return Conflict(
        "not_executing",
        f"step {effect.step_index} is {effect.state}; only an executing call, or one whose outcome is unknown, can be reported on",
        step_index=effect.step_index,
        state=effect.state.value,
    )
