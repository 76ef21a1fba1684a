"""All state moves: one table per machine, and `advance`, the only way to move. Must not know why a move is made."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, overload

from app.domain.model import Effect, EffectState, HaltReason, Session, SessionState, UndoEntry, UndoState

S = SessionState
E = EffectState
U = UndoState

SESSION_MOVES: Mapping[SessionState, frozenset[SessionState]] = {
    S.ACTIVE: frozenset({S.AWAITING_APPROVAL, S.FAILED, S.HALTED, S.COMPLETED}),
    S.AWAITING_APPROVAL: frozenset({S.ACTIVE, S.FAILED, S.HALTED}),
    S.FAILED: frozenset({S.COMPENSATING}),
    S.COMPENSATING: frozenset({S.COMPENSATED, S.HALTED}),
    S.COMPENSATED: frozenset({S.HALTED}),
    S.HALTED: frozenset({S.COMPENSATING, S.RESOLVED}),
    S.RESOLVED: frozenset(),
    S.COMPLETED: frozenset(),
}

EFFECT_MOVES: Mapping[EffectState, frozenset[EffectState]] = {
    E.EXECUTING: frozenset({E.COMMITTED, E.FAILED, E.UNKNOWN}),
    E.UNKNOWN: frozenset({E.COMMITTED, E.FAILED, E.COMPENSATING}),
    E.COMMITTED: frozenset({E.COMPENSATING}),
    E.FAILED: frozenset(),
    E.AWAITING_APPROVAL: frozenset({E.APPROVED, E.REJECTED, E.EXPIRED, E.CANCELLED}),
    E.APPROVED: frozenset({E.EXECUTING, E.REJECTED, E.EXPIRED, E.CANCELLED}),
    E.REJECTED: frozenset(),
    E.EXPIRED: frozenset(),
    E.CANCELLED: frozenset(),
    E.COMPENSATING: frozenset({E.COMPENSATED, E.COMPENSATION_FAILED}),
    E.COMPENSATED: frozenset(),
    E.COMPENSATION_FAILED: frozenset({E.COMPENSATING}),
}

UNDO_MOVES: Mapping[UndoState, frozenset[UndoState]] = {
    U.PENDING: frozenset({U.RUNNING, U.SKIPPED, U.COMPENSATED}),
    U.RUNNING: frozenset({U.COMPENSATED, U.FAILED}),
    U.FAILED: frozenset({U.PENDING, U.SKIPPED, U.COMPENSATED}),
    U.COMPENSATED: frozenset(),
    U.SKIPPED: frozenset(),
}

NEW_EFFECT_STATES = frozenset({E.EXECUTING, E.AWAITING_APPROVAL})

TERMINAL_SESSION_STATES = frozenset({S.COMPLETED, S.COMPENSATED, S.RESOLVED})
UNWINDING_STATES = frozenset({S.FAILED, S.COMPENSATING})
RESTING_STATES = TERMINAL_SESSION_STATES | {S.HALTED}
"""A session here moves no further by itself: what `wait_s` waits for."""


class IllegalMoveError(Exception):
    """A move that no table has: a fault of ours, never of the caller's, and nothing may be written."""


def may_advance(thing: Session | Effect | UndoEntry, to: SessionState | EffectState | UndoState) -> bool:
    """Tell whether the tables have a move from where `thing` stands to `to`."""
    match thing, to:
        case Session(), SessionState():
            return to in SESSION_MOVES[thing.state]
        case Effect(), EffectState():
            return to in EFFECT_MOVES[thing.state]
        case UndoEntry(), UndoState():
            return to in UNDO_MOVES[thing.state]
        case _:
            return False


@overload
def advance(thing: Session, to: SessionState, **changes: Any) -> Session: ...  # noqa: ANN401 - fields of the dataclass, checked by replace
@overload
def advance(thing: Effect, to: EffectState, **changes: Any) -> Effect: ...  # noqa: ANN401 - as above
@overload
def advance(thing: UndoEntry, to: UndoState, **changes: Any) -> UndoEntry: ...  # noqa: ANN401 - as above
def advance(thing: Any, to: Any, **changes: Any) -> Any:
    """Return `thing` in state `to`, with other fields changed along.

    Raises:
        IllegalMoveError: the tables have no such move; `compensated` -> `halted` exists for `late_effect` alone.
    """
    is_allowed = may_advance(thing, to)
    if isinstance(thing, Session) and thing.state is S.COMPENSATED:
        is_allowed = is_allowed and changes.get("halt_reason") is HaltReason.LATE_EFFECT
    if not is_allowed:
        message = f"{type(thing).__name__} may not move from {thing.state} to {to}"
        raise IllegalMoveError(message)
    return replace(thing, state=to, **changes)
