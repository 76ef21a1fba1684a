"""The tables hold exactly the contract's moves, and nothing moves otherwise. Must not test when a move is made."""

from itertools import product
from typing import Any

import pytest

from app.domain.model import EffectState, HaltReason, SessionState, UndoState
from app.domain.states import (
    EFFECT_MOVES,
    NEW_EFFECT_STATES,
    RESTING_STATES,
    SESSION_MOVES,
    TERMINAL_SESSION_STATES,
    UNDO_MOVES,
    UNWINDING_STATES,
    IllegalMoveError,
    advance,
    may_advance,
)
from tests.domain.world import new_effect, new_entry, new_session

# Contract, section 3, as it is written there: from, then where to.
SESSION = """
active: awaiting_approval failed halted completed
awaiting_approval: active failed halted
failed: compensating
compensating: compensated halted
compensated: halted
halted: compensating resolved
"""
# `compensation_failed` -> `compensating` is the effect's side of the operator's retry (`failed` -> `pending` -> `running`).
EFFECT = """
executing: committed failed unknown
unknown: committed failed compensating
committed: compensating
awaiting_approval: approved rejected expired cancelled
approved: executing rejected expired cancelled
compensating: compensated compensation_failed
compensation_failed: compensating
"""
UNDO = """
pending: running skipped compensated
running: compensated failed
failed: pending skipped compensated
"""

# Pairs of three machines in one list: the types of `advance` tell them apart only one by one.
Thing = Any
State = Any


def moves_of(text: str) -> set[tuple[str, str]]:
    """Read a table as it is written above."""
    rows = (line.split(":") for line in text.strip().splitlines())
    return {(source, target) for source, targets in rows for target in targets.split()}


EVERY_PAIR: list[tuple[Thing, State, bool]] = [
    *((new_session(a), b, (a, b) in moves_of(SESSION)) for a, b in product(SessionState, SessionState)),
    *((new_effect(a), b, (a, b) in moves_of(EFFECT)) for a, b in product(EffectState, EffectState)),
    *((new_entry(a), b, (a, b) in moves_of(UNDO)) for a, b in product(UndoState, UndoState)),
]


def test_tables_name_every_state_when_compared_with_the_words() -> None:
    """No state is without a row, and none is made up."""
    assert set(SESSION_MOVES) == set(SessionState)
    assert set(EFFECT_MOVES) == set(EffectState)
    assert set(UNDO_MOVES) == set(UndoState)


def test_advance_moves_or_refuses_when_given_every_pair_of_states() -> None:
    """Each pair of the whole product is either a move of the contract or refused, and a refusal names both states."""
    for thing, to, is_legal in EVERY_PAIR:
        assert may_advance(thing, to) is is_legal, (thing.state, to)
        changes = {"halt_reason": HaltReason.LATE_EFFECT} if to is SessionState.HALTED else {}
        if is_legal:
            moved = advance(thing, to, **changes)
            assert moved.state is to
            continue
        with pytest.raises(IllegalMoveError, match=rf"from {thing.state} to {to}$"):
            advance(thing, to, **changes)


def test_may_advance_refuses_when_the_state_is_another_machines() -> None:
    """States of different machines bear the same words; they are not the same states."""
    assert not may_advance(new_effect(EffectState.EXECUTING), SessionState.FAILED)
    assert not may_advance(new_session(SessionState.ACTIVE), EffectState.FAILED)
    assert not may_advance(new_entry(UndoState.PENDING), EffectState.COMPENSATED)


@pytest.mark.parametrize("reason", [None, *HaltReason])
def test_compensated_moves_to_halted_when_an_effect_came_late_and_never_else(reason: HaltReason | None) -> None:
    """The one way out of an end is for the one reason that has a name."""
    session = new_session(SessionState.COMPENSATED)
    if reason is HaltReason.LATE_EFFECT:
        assert advance(session, SessionState.HALTED, halt_reason=reason).state is SessionState.HALTED
        return
    with pytest.raises(IllegalMoveError):
        advance(session, SessionState.HALTED, halt_reason=reason)


def test_advance_changes_other_fields_and_only_those_when_they_are_named() -> None:
    """A move is the old value with the state and the named fields replaced; the old value stays."""
    effect = new_effect(EffectState.EXECUTING)
    moved = advance(effect, EffectState.FAILED, error="it broke")
    assert (moved.state, moved.error, moved.effect_id) == (EffectState.FAILED, "it broke", effect.effect_id)
    assert effect.state is EffectState.EXECUTING


def test_sets_of_states_agree_with_the_tables_when_compared() -> None:
    """Ends have no way on but the named one; resting sessions are ends and halted ones; unwinding ones are neither."""
    assert {state for state, moves in SESSION_MOVES.items() if not moves} == TERMINAL_SESSION_STATES - {SessionState.COMPENSATED}
    assert TERMINAL_SESSION_STATES | {SessionState.HALTED} == RESTING_STATES
    assert {SessionState.FAILED, SessionState.COMPENSATING} == UNWINDING_STATES
    assert NEW_EFFECT_STATES.isdisjoint(
        {target for source, targets in EFFECT_MOVES.items() for target in targets} - {EffectState.EXECUTING}
    )
