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
    Effect,
    EffectState,
    EntryKind,
    Outcome,
    Reversibility,
    Session,
    SessionState,
    UndoEntry,
    UndoState,
)
from app.domain.states import UNWINDING_STATES
from app.domain.unwinding import StackItem

REPORTING_STATES = frozenset({SessionState.ACTIVE, SessionState.AWAITING_APPROVAL})
"""While a session is in one of these, reports about its calls are in time."""

AGENT_TIMEOUT = "agent_timeout"
"""The error of a session that failed because its agent fell silent or ran out of time."""

UNSETTLED = frozenset({EffectState.EXECUTING, EffectState.UNKNOWN, EffectState.AWAITING_APPROVAL, EffectState.APPROVED})

MOVABLE_OUTCOMES = frozenset({EffectState.EXECUTING, EffectState.UNKNOWN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """One effect with what would undo it and what was asked about it, as a report finds or leaves them."""

    effect: Effect
    undo_entry: UndoEntry | None
    approval: Approval | None = None


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
    if effect.state is EffectState.FAILED:
        return _commit_contradicted(draft, seen, result)
    if effect.state not in MOVABLE_OUTCOMES:
        return _not_executing(effect)
    committed = draft.move_effect(
        effect, EffectState.COMMITTED, outcome=Outcome.COMMITTED, result=result, executed_at=draft.now, error=None
    )
    draft.record(EntryKind.EXECUTED, effect.step_index, body={"effect_id": str(effect.effect_id)}, contents={"result": result})
    if effect.reversibility is Reversibility.IRREVERSIBLE:
        _pivot(draft, committed)
    return replace(seen, effect=committed)


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
    body = {"effect_id": str(effect.effect_id), "outcome": report.outcome.value, "error": report.error}
    draft.record(EntryKind.FAILED, effect.step_index, body=body)
    match report.outcome:
        case Outcome.NOT_APPLIED:
            failed = draft.move_effect(effect, EffectState.FAILED, outcome=Outcome.NOT_APPLIED, error=report.error)
            if draft.session.pivoted and not any(_stands(other) for other in irreversible if other.effect_id != effect.effect_id):
                draft.change_session(pivoted=False, clean=True)  # what may have been the pivot is now known not to have happened
            return replace(seen, effect=failed, undo_entry=_skip(draft, seen.undo_entry, Outcome.NOT_APPLIED))
        case Outcome.UNKNOWN:
            unknown = draft.move_effect(effect, EffectState.UNKNOWN, outcome=Outcome.UNKNOWN, error=report.error)
            if effect.reversibility is Reversibility.IRREVERSIBLE:
                _pivot(draft, unknown)
            return replace(seen, effect=unknown)
        case Outcome.COMMITTED:
            raise AssertionError("a failure report says not_applied or unknown")
        case _:
            assert_never(report.outcome)


def fail_session(draft: Draft, error: str, known: Sequence[Reported]) -> SagaError | None:
    """Fail the run: settle what is open as unknown and make the newest undo due. A repeat changes nothing.

    `error` is for people. `known` holds at least every effect that is executing, unknown or waiting for a decision, and the newest pending
    undo entry.
    """
    session = draft.session
    if session.state is SessionState.COMPLETED:
        return Conflict("session_not_active", f"session {session.session_id} is completed; nothing can unwind it", state=session.state)
    if session.state not in REPORTING_STATES:
        return None
    draft.change_session(failed_at=draft.now)
    settled = [replace(seen, effect=_settle_as_unknown(draft, seen.effect)) for seen in known]
    unknown_steps = [seen.effect.step_index for seen in settled if seen.effect.state is EffectState.UNKNOWN]
    draft.record(EntryKind.SESSION_FAILED, body={"error": error, "unknown_steps": unknown_steps})
    for seen in settled:
        if seen.effect.state is EffectState.CANCELLED:
            draft.record(EntryKind.CANCELLED, seen.effect.step_index, body={"effect_id": str(seen.effect.effect_id)})
        if seen.effect.reversibility is Reversibility.IRREVERSIBLE and seen.effect.state is EffectState.UNKNOWN:
            _pivot(draft, seen.effect)
    if draft.session.pivoted:
        unwinding.halt_after_pivot(draft)
        return None
    draft.move_session(SessionState.FAILED)
    unwinding.start(draft, _newest_pending(settled))
    return None


def _pivot(draft: Draft, effect: Effect) -> None:
    """Mark the point past which nothing is unwound any more; the first irreversible effect that went ahead, or may have, is it."""
    draft.change_session(clean=False)
    if draft.session.pivoted:
        return
    draft.change_session(pivoted=True)
    draft.record(EntryKind.PIVOT, effect.step_index, body={"effect_id": str(effect.effect_id)})


def _stands(effect: Effect) -> bool:
    return effect.reversibility is Reversibility.IRREVERSIBLE and effect.outcome in {Outcome.COMMITTED, Outcome.UNKNOWN}


def time_out(draft: Draft, known: Sequence[Reported]) -> None:
    """Fail an active session that is past its deadline or silent for too long; anything else, one that just moved above all, stays."""
    if is_out_of_time(draft):
        fail_session(draft, AGENT_TIMEOUT, known)


def is_out_of_time(draft: Draft) -> bool:
    """Tell whether an active session is past its deadline, or silent for too long; waiting for a person is neither."""
    session = draft.session
    if session.state is not SessionState.ACTIVE:
        return False
    is_silent = session.idle_seconds is not None and draft.now >= session.active_at + timedelta(seconds=session.idle_seconds)
    return is_silent or is_past_deadline(draft)


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


def _newest_pending(known: Sequence[Reported]) -> StackItem | None:
    pending = [
        StackItem(entry=seen.undo_entry, effect=seen.effect)
        for seen in known
        if seen.undo_entry is not None and seen.undo_entry.state is UndoState.PENDING
    ]
    return max(pending, key=lambda item: item.entry.stack_position, default=None)


def _settle_as_unknown(draft: Draft, effect: Effect) -> Effect:
    match effect.state:
        case EffectState.EXECUTING if effect.reversibility is Reversibility.READ_ONLY:
            return draft.move_effect(effect, EffectState.FAILED, outcome=Outcome.NOT_APPLIED)
        case EffectState.EXECUTING:
            return draft.move_effect(effect, EffectState.UNKNOWN, outcome=Outcome.UNKNOWN)
        case EffectState.AWAITING_APPROVAL | EffectState.APPROVED:
            return draft.move_effect(effect, EffectState.CANCELLED)
        case _:
            return effect


def _commit_late(draft: Draft, seen: Reported, result: bytes) -> SagaError:
    """Take a report after the session has failed: keep the evidence, use it where the undo was not sent yet, and say no."""
    effect, session = seen.effect, draft.session
    refusal = _session_not_active(session, effect)
    if session.state is SessionState.COMPLETED:
        return refusal
    if effect.outcome is Outcome.COMMITTED and effect.result == result:
        return refusal  # known already, in time or late
    _record_late(draft, effect, result)
    if session.state not in UNWINDING_STATES | {SessionState.COMPENSATED} or seen.undo_entry is None:
        return refusal  # halted or resolved: a person owns it; or nothing that an undo could have met
    match effect.outcome:
        case Outcome.UNKNOWN if seen.undo_entry.state is UndoState.PENDING:
            draft.move_effect(effect, EffectState.COMMITTED, outcome=Outcome.COMMITTED, result=result, executed_at=draft.now)
        case Outcome.UNKNOWN:
            draft.change_effect(effect, outcome=Outcome.COMMITTED, result=result, executed_at=draft.now)
            _hand_over_late(draft)
        case Outcome.NOT_APPLIED:  # it was said that nothing happened, so its undo was skipped
            _hand_over_late(draft)
        case _:
            pass
    return refusal


def _commit_contradicted(draft: Draft, seen: Reported, result: bytes) -> SagaError:
    """Take the report that a call happened after all, though it was said that it did not: its undo is gone, so a person has to look."""
    effect = seen.effect
    refusal = _not_executing(effect)
    if effect.reversibility is Reversibility.READ_ONLY:
        return refusal
    _record_late(draft, effect, result)
    draft.change_session(late_effect=True, clean=False)
    if effect.reversibility is Reversibility.IRREVERSIBLE:
        _pivot(draft, effect)
    return refusal


def _record_late(draft: Draft, effect: Effect, result: bytes) -> None:
    draft.record(EntryKind.LATE_COMMIT, effect.step_index, body={"effect_id": str(effect.effect_id)}, contents={"result": result})


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


def _not_executing(effect: Effect) -> SagaError:
    return Conflict(
        "not_executing",
        f"step {effect.step_index} is {effect.state}; only an executing call, or one whose outcome is unknown, can be reported on",
        step_index=effect.step_index,
        state=effect.state.value,
    )
