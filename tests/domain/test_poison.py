"""What becomes of a session that crashes whoever works on it, decided without looking into it. Must not test who counts the crashes."""

from uuid import UUID

import pytest

from app.domain.journal import Sealed
from app.domain.json_text import parse
from app.domain.model import EffectId, EffectState, EntryKind, HaltReason, Outcome, SessionState, StepIndex, UndoId
from app.domain.poison import OPEN_STATES, OpenStep, is_poison, put_down
from app.domain.sending import POISON_AFTER_INTERRUPTED
from app.domain.states import EFFECT_MOVES, RESTING_STATES
from tests.domain.world import START, kinds_of, new_draft, new_session

K = EntryKind


def open_step(state: EffectState, step: int = 1, *, is_read: bool = False, is_irreversible: bool = False) -> OpenStep:
    """Make an open effect; one that is being undone has an undo that was tried twice."""
    is_undone = state is EffectState.COMPENSATING
    return OpenStep(
        step_index=StepIndex(step),
        effect_id=EffectId(UUID(int=step)),
        state=state,
        is_read=is_read,
        is_irreversible=is_irreversible,
        undo_id=UndoId(UUID(int=1_000 + step)) if is_undone else None,
        attempts=2 if is_undone else None,
        status=503 if is_undone else None,
        error="interrupted" if is_undone else None,
    )


def bodies_of(entries: tuple[Sealed, ...]) -> dict[str, object]:
    """Return the entries' bodies by kind."""
    return {entry.kind: parse(entry.body) for entry in entries}


# An open effect, whether it is a read -> where it is left, and what is known of it.
ENDS: list[tuple[EffectState, bool, EffectState, Outcome | None]] = [
    (EffectState.EXECUTING, False, EffectState.UNKNOWN, Outcome.UNKNOWN),
    (EffectState.EXECUTING, True, EffectState.FAILED, Outcome.NOT_APPLIED),
    (EffectState.AWAITING_APPROVAL, False, EffectState.CANCELLED, None),
    (EffectState.APPROVED, False, EffectState.CANCELLED, None),
    (EffectState.COMPENSATING, False, EffectState.COMPENSATION_FAILED, None),
]


@pytest.mark.parametrize(("state", "is_read", "left", "outcome"), ENDS)
def test_open_effect_is_left_where_a_person_can_go_on_when_its_session_is_put_down(
    state: EffectState, is_read: bool, left: EffectState, outcome: Outcome | None
) -> None:
    """Each is a move of the tables; nothing is left that somebody would have to be at."""
    (ended,) = put_down(new_draft(new_session(SessionState.COMPENSATING)), [open_step(state, is_read=is_read)])
    assert (ended.state, ended.outcome) == (left, outcome)
    assert left in EFFECT_MOVES[state]
    assert left not in OPEN_STATES


def test_every_open_state_has_an_end_when_compared() -> None:
    """A state that somebody is at and that has no end here would crash the last resort."""
    assert {state for state, *_ in ENDS} == set(OPEN_STATES)


MOVING = [state for state in SessionState if state not in RESTING_STATES]


@pytest.mark.parametrize("state", MOVING)
def test_session_is_halted_when_it_moves_by_itself(state: SessionState) -> None:
    """From wherever it is: one HALTED, as poison, after which nothing moves it but a person."""
    draft = new_draft(new_session(state))
    assert put_down(draft, []) == []
    changes = draft.changes()
    assert (changes.after.state, changes.after.halt_reason, changes.after.halted_at) == (SessionState.HALTED, HaltReason.POISON, START)
    assert changes.after.clean
    is_run_over = state in {SessionState.FAILED, SessionState.COMPENSATING}
    assert [entry.kind for entry in changes.entries] == ([] if is_run_over else [K.SESSION_FAILED]) + [K.HALTED]
    assert (changes.after.failed_at is None) is is_run_over


@pytest.mark.parametrize("state", sorted(RESTING_STATES))
def test_session_stays_when_it_is_at_rest(state: SessionState) -> None:
    """A call that crashes the worker after its session's end says nothing of the session."""
    draft = new_draft(new_session(state))
    assert put_down(draft, [open_step(EffectState.EXECUTING)]) == []
    assert draft.is_empty


def test_run_is_told_to_have_failed_when_it_was_active() -> None:
    """Every open call is in the journal: what is unknown, what was not applied, what nobody will be asked any more, and the pivot."""
    draft = new_draft(new_session(SessionState.ACTIVE))
    put_down(
        draft,
        [
            open_step(EffectState.EXECUTING, 1),
            open_step(EffectState.EXECUTING, 2, is_read=True),
            open_step(EffectState.APPROVED, 3, is_irreversible=True),
            open_step(EffectState.EXECUTING, 4, is_irreversible=True),
        ],
    )
    assert kinds_of(draft) == [K.SESSION_FAILED, K.CANCELLED, K.PIVOT, K.HALTED]
    told = bodies_of(draft.changes().entries)
    assert told[K.SESSION_FAILED] == {"error": "poison", "unknown_steps": [1, 4], "not_applied_steps": [2], "in_flight_steps": []}
    assert (draft.session.pivoted, draft.session.clean) == (True, False)


def test_undo_and_action_under_way_are_told_when_the_run_was_over() -> None:
    """An undo is given up with what it came to so far, an action that was awaited is unknown."""
    draft = new_draft(new_session(SessionState.FAILED))
    put_down(draft, [open_step(EffectState.COMPENSATING, 1), open_step(EffectState.EXECUTING, 2)])
    assert kinds_of(draft) == [K.COMPENSATION_FAILED, K.FAILED, K.HALTED]
    told = bodies_of(draft.changes().entries)
    assert told[K.COMPENSATION_FAILED] == {
        "undo_id": str(UUID(int=1_001)),
        "reason": "poison",
        "attempts": 2,
        "status": 503,
        "error": "interrupted",
    }
    assert told[K.FAILED] == {"effect_id": str(UUID(int=2)), "outcome": "unknown", "error": "poison"}


@pytest.mark.parametrize(("crashes", "expected"), [(0, False), (POISON_AFTER_INTERRUPTED - 1, False), (POISON_AFTER_INTERRUPTED, True)])
def test_work_is_poison_when_it_was_tried_so_often(crashes: int, expected: bool) -> None:
    """The same bound as for attempts whose process died."""
    assert is_poison(crashes) is expected
