"""What a report does in each state of its session and its effect, in time and late. Must not test how an unwind goes on."""

from dataclasses import replace
from datetime import timedelta
from itertools import product

import pytest

from app.domain import outcomes
from app.domain.errors import Conflict
from app.domain.model import EffectState, EntryKind, HaltReason, Outcome, Reversibility, SessionState, UndoState
from app.domain.outcomes import REPORTING_STATES, FailReport, Reported
from tests.domain.world import AGREEMENT, START, code_of, kinds_of, new_draft, new_effect, new_entry, new_session

RESULT = b'{"credit_id":"c-1"}'
OTHER = b'{"credit_id":"c-2"}'
IN_TIME = sorted(REPORTING_STATES)
LATE = sorted(set(SessionState) - REPORTING_STATES)
UNKNOWN = FailReport(outcome=Outcome.UNKNOWN, error="no answer")
NOT_APPLIED = FailReport(outcome=Outcome.NOT_APPLIED, error="card declined")

E = EffectState
K = EntryKind


def report_on(effect: E, entry: UndoState | None = UndoState.PENDING, outcome: Outcome | None = None) -> Reported:
    """Make what is seen of a call: an effect in a state, and its undo entry."""
    found = new_effect(effect) if outcome is None else new_effect(effect, outcome=outcome)
    return Reported(effect=found, undo_entry=None if entry is None else new_entry(entry))


# The effect's state -> its state after a commit, or the refusal's code; and what is journaled.
COMMITS_IN_TIME: dict[E, tuple[E | str, list[K]]] = {
    E.EXECUTING: (E.COMMITTED, [K.EXECUTED]),
    E.UNKNOWN: (E.COMMITTED, [K.EXECUTED]),
    E.COMMITTED: (E.COMMITTED, []),
    E.FAILED: ("not_executing", [K.LATE_COMMIT]),
    **dict.fromkeys((E.REJECTED, E.EXPIRED, E.CANCELLED), ("not_executing", [K.LATE_COMMIT])),
    **dict.fromkeys((E.AWAITING_APPROVAL, E.APPROVED, E.COMPENSATING, E.COMPENSATED, E.COMPENSATION_FAILED), ("not_executing", [])),
}


@pytest.mark.parametrize(("state", "session"), list(product(COMMITS_IN_TIME, IN_TIME)))
def test_commit_moves_repeats_or_refuses_when_it_is_in_time(state: E, session: SessionState) -> None:
    """An open call becomes committed once, with its result and time; the same again changes nothing."""
    expected, kinds = COMMITS_IN_TIME[state]
    draft = new_draft(new_session(session))
    decided = outcomes.commit(draft, report_on(state), RESULT)
    assert kinds_of(draft) == kinds
    if isinstance(decided, Reported):
        assert (decided.effect.state, decided.effect.outcome, decided.effect.result) == (expected, Outcome.COMMITTED, RESULT)
        assert decided.effect.executed_at == draft.now
        assert decided.undo_entry is not None
        assert decided.undo_entry.state is UndoState.PENDING
        return
    assert code_of(decided) == expected
    assert draft.is_empty is not bool(kinds)


@pytest.mark.parametrize(
    ("session", "kinds"),
    [
        (SessionState.COMPENSATING, [K.LATE_COMMIT, K.PIVOT]),
        (SessionState.COMPENSATED, [K.LATE_COMMIT, K.PIVOT, K.HALTED]),
    ],
)
def test_session_goes_to_a_person_when_the_irreversible_call_happened_after_all(session: SessionState, kinds: list[K]) -> None:
    """It was unwound because the irreversible call had done nothing; the report that it did is the pivot, and nothing is clean."""
    draft = new_draft(new_session(session))
    irreversible = Reported(effect=new_effect(E.FAILED, reversibility=Reversibility.IRREVERSIBLE), undo_entry=None)
    assert code_of(outcomes.commit(draft, irreversible, RESULT)) == "session_not_active"
    assert kinds_of(draft) == kinds
    assert (draft.session.late_effect, draft.session.pivoted, draft.session.clean) == (True, True, False)


def test_session_goes_to_a_person_when_a_call_happened_after_all() -> None:
    """It was said that nothing happened, so the undo is gone: what the commit says afterwards is kept, and nothing is unwound past it."""
    draft = new_draft(new_session())
    seen = report_on(E.FAILED, UndoState.SKIPPED)
    assert code_of(outcomes.commit(draft, seen, RESULT)) == "not_executing"
    assert (draft.session.clean, draft.session.late_effect) == (False, True)
    assert outcomes.fail_session(draft, "the run failed", [seen, report_on(E.COMMITTED)]) is None
    assert (draft.session.state, draft.session.halt_reason) == (SessionState.HALTED, HaltReason.LATE_EFFECT)


def test_irreversible_call_is_the_pivot_when_it_happened_after_all() -> None:
    """Withdrawn by `not_applied`, the pivot is back with the commit."""
    draft = new_draft(new_session())
    failed = report_on(E.FAILED, None)
    seen = replace(failed, effect=replace(failed.effect, reversibility=Reversibility.IRREVERSIBLE))
    assert code_of(outcomes.commit(draft, seen, RESULT)) == "not_executing"
    assert (draft.session.clean, draft.session.pivoted, kinds_of(draft)) == (False, True, [K.LATE_COMMIT, K.PIVOT])


def test_commit_is_refused_when_another_result_was_reported() -> None:
    """What a call gave back is said once."""
    draft = new_draft(new_session())
    assert code_of(outcomes.commit(draft, report_on(E.COMMITTED), OTHER)) == "result_differs"
    assert draft.is_empty


# The effect's state and the report -> its state after, or the refusal's code; what is journaled; the entry's state after.
FAILS_IN_TIME: list[tuple[E, FailReport, E | str, list[K], UndoState]] = [
    (E.EXECUTING, UNKNOWN, E.UNKNOWN, [K.FAILED], UndoState.PENDING),
    (E.EXECUTING, NOT_APPLIED, E.FAILED, [K.FAILED, K.SKIPPED], UndoState.SKIPPED),
    (E.UNKNOWN, UNKNOWN, E.UNKNOWN, [], UndoState.PENDING),
    (E.UNKNOWN, NOT_APPLIED, E.FAILED, [K.FAILED, K.SKIPPED], UndoState.SKIPPED),
    (E.FAILED, NOT_APPLIED, E.FAILED, [], UndoState.SKIPPED),
    (E.FAILED, UNKNOWN, "not_executing", [], UndoState.SKIPPED),
    *[
        (state, report, "not_executing", [], UndoState.PENDING)
        for state, report in product(sorted(set(E) - {E.EXECUTING, E.UNKNOWN, E.FAILED}), [UNKNOWN, NOT_APPLIED])
    ],
]


@pytest.mark.parametrize(("state", "report", "expected", "kinds", "entry"), FAILS_IN_TIME)
def test_fail_effect_moves_repeats_or_refuses_when_it_is_in_time(
    state: E, report: FailReport, expected: E | str, kinds: list[K], entry: UndoState
) -> None:
    """A call that was not applied needs no undo; one that may have been keeps it. The session goes on."""
    for session in IN_TIME:
        draft = new_draft(new_session(session))
        decided = outcomes.fail_effect(draft, report_on(state, UndoState.SKIPPED if state is E.FAILED else UndoState.PENDING), report, [])
        assert kinds_of(draft) == kinds
        assert draft.session.state is session
        if isinstance(decided, Reported):
            assert decided.effect.state is expected
            assert decided.undo_entry is not None
            assert decided.undo_entry.state is entry
            continue
        assert code_of(decided) == expected
        assert draft.is_empty


def test_fail_effect_works_without_an_undo_entry_when_the_call_is_a_read() -> None:
    """A read has nothing to skip."""
    draft = new_draft(new_session())
    decided = outcomes.fail_effect(draft, report_on(E.EXECUTING, None), NOT_APPLIED, [])
    assert isinstance(decided, Reported)
    assert (decided.effect.state, decided.undo_entry, kinds_of(draft)) == (E.FAILED, None, [K.FAILED])


# The session's state, the effect's and its entry's, what was known -> the effect's state after, the session's state and mark after.
LATE_COMMITS: list[tuple[SessionState, E, UndoState, Outcome, E, SessionState, bool]] = [
    (SessionState.FAILED, E.UNKNOWN, UndoState.PENDING, Outcome.UNKNOWN, E.COMMITTED, SessionState.FAILED, False),
    (SessionState.COMPENSATING, E.UNKNOWN, UndoState.PENDING, Outcome.UNKNOWN, E.COMMITTED, SessionState.COMPENSATING, False),
    (SessionState.COMPENSATING, E.COMPENSATING, UndoState.RUNNING, Outcome.UNKNOWN, E.COMPENSATING, SessionState.COMPENSATING, True),
    (SessionState.COMPENSATING, E.COMPENSATED, UndoState.COMPENSATED, Outcome.UNKNOWN, E.COMPENSATED, SessionState.COMPENSATING, True),
    (SessionState.COMPENSATING, E.FAILED, UndoState.SKIPPED, Outcome.NOT_APPLIED, E.FAILED, SessionState.COMPENSATING, True),
    (SessionState.COMPENSATED, E.FAILED, UndoState.SKIPPED, Outcome.NOT_APPLIED, E.FAILED, SessionState.HALTED, True),
    (SessionState.COMPENSATED, E.COMPENSATED, UndoState.COMPENSATED, Outcome.UNKNOWN, E.COMPENSATED, SessionState.HALTED, True),
    (SessionState.COMPENSATED, E.COMPENSATED, UndoState.COMPENSATED, Outcome.COMMITTED, E.COMPENSATED, SessionState.COMPENSATED, False),
    (SessionState.HALTED, E.UNKNOWN, UndoState.PENDING, Outcome.UNKNOWN, E.UNKNOWN, SessionState.HALTED, False),
    (SessionState.HALTED, E.COMPENSATED, UndoState.COMPENSATED, Outcome.UNKNOWN, E.COMPENSATED, SessionState.HALTED, False),
    (SessionState.RESOLVED, E.UNKNOWN, UndoState.PENDING, Outcome.UNKNOWN, E.UNKNOWN, SessionState.RESOLVED, False),
]


@pytest.mark.parametrize(("session", "state", "entry", "known", "after", "session_after", "is_marked"), LATE_COMMITS)
def test_commit_leaves_evidence_and_is_refused_when_it_is_late(  # noqa: PLR0913, PLR0917 (the columns of the table)
    session: SessionState,
    state: E,
    entry: UndoState,
    known: Outcome,
    after: E,
    session_after: SessionState,
    is_marked: bool,
) -> None:
    """A late commit is always told to the journal; it is used while the undo was not sent, and else a person hears of it."""
    draft = new_draft(new_session(session))
    seen = report_on(state, entry, known)
    decided = outcomes.commit(draft, seen, OTHER)
    assert code_of(decided) == "session_not_active"
    changes = draft.changes()
    assert changes.entries[0].kind == K.LATE_COMMIT
    assert OTHER.decode() in (changes.entries[0].content or b"").decode().replace("\\", "")
    effect = changes.effects[0].after if changes.effects else seen.effect
    assert (effect.state, changes.after.state, changes.after.late_effect) == (after, session_after, is_marked)
    if changes.effects:
        assert (effect.outcome, effect.result, effect.executed_at) == (Outcome.COMMITTED, OTHER, draft.now)
    is_news_for_a_person = session in {SessionState.HALTED, SessionState.RESOLVED} and known is not Outcome.COMMITTED
    assert changes.after.clean is not (is_marked or is_news_for_a_person)
    if session_after is not session:
        assert changes.after.halt_reason is HaltReason.LATE_EFFECT
        assert [entry.kind for entry in changes.entries] == [K.LATE_COMMIT, K.HALTED]


def test_commit_moves_nothing_when_the_session_has_ended_and_the_call_had_no_undo() -> None:
    """A read whose outcome is learnt after the end is evidence and no more: nothing moves in a session that is over."""
    draft = new_draft(new_session(SessionState.COMPENSATED))
    assert code_of(outcomes.commit(draft, report_on(E.UNKNOWN, None), RESULT)) == "session_not_active"
    changes = draft.changes()
    assert [entry.kind for entry in changes.entries] == [K.LATE_COMMIT]
    assert (changes.effects, changes.after.state) == ((), SessionState.COMPENSATED)


@pytest.mark.parametrize("session", LATE)
def test_commit_leaves_no_second_trace_when_it_says_what_is_known(session: SessionState) -> None:
    """An agent that repeats its commit after the run failed is told so, and fills no journal."""
    draft = new_draft(new_session(session))
    assert code_of(outcomes.commit(draft, report_on(E.COMMITTED), RESULT)) == "session_not_active"
    assert draft.is_empty


@pytest.mark.parametrize(("state", "report"), list(product(E, [UNKNOWN, NOT_APPLIED])))
def test_reports_change_nothing_when_the_session_is_completed(state: E, report: FailReport) -> None:
    """After complete nothing can unwind the session, so there is nothing that a report could change."""
    draft = new_draft(new_session(SessionState.COMPLETED))
    assert code_of(outcomes.commit(draft, report_on(state), OTHER)) == "session_not_active"
    assert code_of(outcomes.fail_effect(draft, report_on(state), report, [])) == "session_not_active"
    assert code_of(outcomes.fail_session(draft, "too late", [report_on(state)])) == "session_not_active"
    assert draft.is_empty


@pytest.mark.parametrize("session", [state for state in LATE if state is not SessionState.COMPLETED])
@pytest.mark.parametrize(
    ("state", "entry"), [(E.UNKNOWN, UndoState.PENDING), (E.COMMITTED, UndoState.PENDING), (E.COMPENSATING, UndoState.RUNNING)]
)
@pytest.mark.parametrize("report", [UNKNOWN, NOT_APPLIED])
def test_fail_effect_skips_or_is_recorded_when_it_is_late(session: SessionState, state: E, entry: UndoState, report: FailReport) -> None:
    """A call that was not applied is taken out of the unwind while its undo was not sent; any other late failure is recorded."""
    draft = new_draft(new_session(session))
    decided = outcomes.fail_effect(draft, report_on(state, entry), report, [])
    assert code_of(decided) == "session_not_active"
    is_unwinding = session in {SessionState.FAILED, SessionState.COMPENSATING}
    changes = draft.changes()
    if is_unwinding and state is E.UNKNOWN and report is NOT_APPLIED:
        assert [entry.kind for entry in changes.entries] == [K.LATE_FAIL, K.SKIPPED]
        assert (changes.effects[0].after.state, changes.undo_entries[0].after.state) == (E.FAILED, UndoState.SKIPPED)
        return
    is_known = state is E.UNKNOWN and report is UNKNOWN
    assert [entry.kind for entry in changes.entries] == ([] if is_known else [K.LATE_FAIL])
    assert (changes.effects, changes.undo_entries, changes.after.state) == ((), (), session)


def test_fail_session_settles_what_is_open_when_a_run_fails() -> None:
    """Every open call becomes unknown, a read failed, a question cancelled; what is settled stays; the newest pending undo is due."""
    states = {1: E.COMMITTED, 2: E.EXECUTING, 3: E.EXECUTING, 4: E.UNKNOWN, 5: E.FAILED, 6: E.AWAITING_APPROVAL}
    reads = {3}
    known = [
        Reported(
            effect=new_effect(state, step, reversibility=Reversibility.READ_ONLY if step in reads else Reversibility.COMPENSATABLE),
            undo_entry=None if step in reads | {6} else new_entry(UndoState.SKIPPED if state is E.FAILED else UndoState.PENDING, step),
        )
        for step, state in states.items()
    ]
    draft = new_draft(new_session(SessionState.AWAITING_APPROVAL, last_step=6))
    assert outcomes.fail_session(draft, "the run failed", known) is None
    changes = draft.changes()
    assert {change.after.step_index: (change.after.state, change.after.outcome) for change in changes.effects} == {
        2: (E.UNKNOWN, Outcome.UNKNOWN),
        3: (E.FAILED, Outcome.NOT_APPLIED),
        6: (E.CANCELLED, None),
    }
    assert [(entry.kind, entry.step) for entry in changes.entries] == [(K.SESSION_FAILED, None), (K.CANCELLED, 6)]
    assert b'"unknown_steps":[2,4]' in changes.entries[0].body
    assert (changes.after.state, changes.after.failed_at) == (SessionState.FAILED, draft.now)
    assert [(change.before, change.after.step_index) for change in changes.calls] == [(None, 4)]


@pytest.mark.parametrize("state", [state for state in LATE if state is not SessionState.COMPLETED])
def test_fail_session_changes_nothing_when_it_is_repeated(state: SessionState) -> None:
    """Failing a run again is harmless, wherever its unwind has got to."""
    draft = new_draft(new_session(state))
    assert outcomes.fail_session(draft, "again", [report_on(E.UNKNOWN)]) is None
    assert draft.is_empty


def test_fail_session_makes_the_second_newest_due_when_the_newest_was_not_applied() -> None:
    """A failure that comes along with the run's takes its own entry out first."""
    upper = Reported(effect=new_effect(E.EXECUTING, 2), undo_entry=new_entry(step=2))
    lower = Reported(effect=new_effect(E.COMMITTED, 1), undo_entry=new_entry(step=1))
    draft = new_draft(new_session(last_step=2))
    reported = outcomes.fail_effect(draft, upper, NOT_APPLIED, [])
    assert isinstance(reported, Reported)
    assert outcomes.fail_session(draft, "the run failed", [lower, reported]) is None
    assert [change.after.step_index for change in draft.changes().calls] == [1]
    assert kinds_of(draft) == [K.FAILED, K.SKIPPED, K.SESSION_FAILED]


def test_fail_session_ends_compensated_when_nothing_is_pending() -> None:
    """A run that did nothing undoable is undone by doing nothing."""
    draft = new_draft(new_session())
    assert outcomes.fail_session(draft, "the run failed", []) is None
    assert draft.session.state is SessionState.COMPENSATED
    assert kinds_of(draft) == [K.SESSION_FAILED, K.UNWOUND]


def test_contradiction_is_no_news_when_the_call_was_a_read() -> None:
    """Nothing of a read has to be undone, so it does not matter whether it happened."""
    draft = new_draft(new_session())
    failed = report_on(E.FAILED, None)
    seen = replace(failed, effect=replace(failed.effect, reversibility=Reversibility.READ_ONLY))
    assert code_of(outcomes.commit(draft, seen, RESULT)) == "not_executing"
    assert draft.is_empty


# The session's state -> what complete is answered; None: it is, or has become, completed.
COMPLETES: dict[SessionState, str | None] = {
    SessionState.ACTIVE: None,
    SessionState.COMPLETED: None,
    **{state: "session_not_active" for state in SessionState if state not in {SessionState.ACTIVE, SessionState.COMPLETED}},
}


@pytest.mark.parametrize(("session", "code"), COMPLETES.items())
def test_complete_ends_repeats_or_is_refused_when_everything_is_settled(session: SessionState, code: str | None) -> None:
    """A run that went well is over once: what could be undone is skipped, and a read of which nobody told the end did nothing."""
    read = Reported(effect=new_effect(E.EXECUTING, 2, reversibility=Reversibility.READ_ONLY), undo_entry=None)
    draft = new_draft(new_session(session))
    assert code_of(outcomes.complete(draft, [report_on(E.COMMITTED), read])) == code
    assert draft.is_empty is (session is not SessionState.ACTIVE)
    if session is SessionState.ACTIVE:
        changes = draft.changes()
        assert (changes.after.state, changes.undo_entries[0].after.state) == (SessionState.COMPLETED, UndoState.SKIPPED)
        assert [(change.after.step_index, change.after.state) for change in changes.effects] == [(2, E.FAILED)]
        assert [entry.kind for entry in changes.entries] == [K.SKIPPED, K.COMPLETED]


@pytest.mark.parametrize("state", sorted(outcomes.UNSETTLED))
def test_complete_is_refused_when_a_call_is_not_settled(state: E) -> None:
    """What may still happen, or may have happened, is nothing that went well; reads do not matter."""
    draft = new_draft(new_session())
    refusal = outcomes.complete(draft, [report_on(state)])
    assert isinstance(refusal, Conflict)
    assert (refusal.code, refusal.facts["unsettled"]) == (
        "unsettled_effects",
        [{"step_index": 1, "tool": "issue_credit", "state": state.value}],
    )
    assert draft.is_empty


@pytest.mark.parametrize(("seconds", "is_past"), [(59.999, False), (60.0, True)])
def test_complete_is_refused_when_the_deadline_is_past(seconds: float, is_past: bool) -> None:
    """A run that is out of time is about to be failed, and cannot end well any more."""
    draft = new_draft(new_session(deadline_at=START + timedelta(seconds=60)), START + timedelta(seconds=seconds))
    assert code_of(outcomes.complete(draft, [])) == ("session_past_deadline" if is_past else None)
    assert draft.is_empty is is_past


@pytest.mark.parametrize("session", SessionState)
def test_touch_is_refused_when_the_run_is_over(session: SessionState) -> None:
    """A sign of life of a run that goes on, or waits for a person, is taken; it tells the journal nothing."""
    draft = new_draft(new_session(session))
    assert code_of(outcomes.touch(draft)) == (None if session in REPORTING_STATES else "session_not_active")
    assert draft.is_empty


def test_agreement_names_every_undo_state_when_compared() -> None:
    """The world's rule about effects and entries leaves no state out."""
    assert set(AGREEMENT) == set(UndoState)
    assert replace(report_on(E.UNKNOWN), undo_entry=None).undo_entry is None
