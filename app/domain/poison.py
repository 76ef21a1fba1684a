"""Put down a session that crashes whoever works on it: a person's, with nothing left under way. Must not look into what its rows hold."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.domain import outcomes, unwinding
from app.domain.draft import Draft
from app.domain.model import EffectId, EffectState, EntryKind, HaltReason, Outcome, StepIndex, UndoId
from app.domain.outcomes import REPORTING_STATES
from app.domain.sending import POISON_AFTER_INTERRUPTED
from app.domain.states import UNWINDING_STATES

MAX_WAIT_SECONDS = 60.0
"""The waits after a crash double from a second up to this: a call is given up after about four minutes, and a release may come before."""

OPEN_STATES = (EffectState.EXECUTING, EffectState.AWAITING_APPROVAL, EffectState.APPROVED, EffectState.COMPENSATING)
"""Effects that somebody is at, or that wait for somebody: no session is at rest with one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStep:
    """What the columns that cannot be spoilt say of an open effect; `attempts`, `status` and `error` are those of its undo's call."""

    step_index: StepIndex
    effect_id: EffectId
    state: EffectState
    is_read: bool
    is_irreversible: bool
    undo_id: UndoId | None
    attempts: int | None
    status: int | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Where an open effect is left; `outcome` None: what was known of it stays."""

    step: OpenStep
    state: EffectState
    outcome: Outcome | None = None


def is_poison(crashes: int) -> bool:
    """Tell whether work that was tried so often is held to be what crashes the worker."""
    return crashes >= POISON_AFTER_INTERRUPTED


def put_down(draft: Draft, steps: Sequence[OpenStep]) -> list[Ended]:
    """Halt a session that moves by itself, and say where its open effects are left; in any other nothing is moved.

    What a call of its own came to nobody knows, nor whether an undo under way was done.
    """
    session = draft.session
    if session.state not in REPORTING_STATES | UNWINDING_STATES:
        return []
    ended = [_end(step) for step in steps]
    if session.state in REPORTING_STATES:
        draft.change_session(failed_at=draft.now)
        draft.record(
            EntryKind.SESSION_FAILED,
            body={
                "error": HaltReason.POISON.value,
                "unknown_steps": _steps(ended, EffectState.UNKNOWN),
                "not_applied_steps": _steps(ended, EffectState.FAILED),
                "in_flight_steps": [],
            },
        )
    for one in ended:
        _record(draft, one)
    unwinding.halt_poisoned(draft)
    return ended


def _end(step: OpenStep) -> Ended:
    match step.state:
        case EffectState.EXECUTING if step.is_read:
            return Ended(step=step, state=EffectState.FAILED, outcome=Outcome.NOT_APPLIED)
        case EffectState.EXECUTING:
            return Ended(step=step, state=EffectState.UNKNOWN, outcome=Outcome.UNKNOWN)
        case EffectState.AWAITING_APPROVAL | EffectState.APPROVED:
            return Ended(step=step, state=EffectState.CANCELLED)
        case EffectState.COMPENSATING:
            return Ended(step=step, state=EffectState.COMPENSATION_FAILED)
        case _:
            raise AssertionError(f"step {step.step_index} is {step.state}: nobody is at it")


def _record(draft: Draft, ended: Ended) -> None:
    """Tell the journal of one step; what became of the calls of a run that has only just failed, its SESSION_FAILED tells."""
    step, body = ended.step, {"effect_id": str(ended.step.effect_id)}
    match ended.state:
        case EffectState.CANCELLED:
            draft.record(EntryKind.CANCELLED, step.step_index, body=body)
        case EffectState.COMPENSATION_FAILED:
            draft.record(EntryKind.COMPENSATION_FAILED, step.step_index, body=_given_up(step))
        case _ if ended.outcome is not None and draft.session.state in UNWINDING_STATES:
            body |= {"outcome": ended.outcome.value, "error": HaltReason.POISON.value}
            draft.record(EntryKind.FAILED, step.step_index, body=body)
        case _:
            pass
    if ended.state is EffectState.UNKNOWN and step.is_irreversible:
        outcomes.pivot(draft, step.step_index, step.effect_id)


def _given_up(step: OpenStep) -> dict[str, object]:
    return {
        "undo_id": str(step.undo_id),
        "reason": HaltReason.POISON.value,
        "attempts": step.attempts,
        "status": step.status,
        "error": step.error,
    }


def _steps(ended: Sequence[Ended], state: EffectState) -> list[int]:
    return [one.step.step_index for one in ended if one.state is state]
