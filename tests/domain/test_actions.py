"""A call that the service executes itself: its attempts, and what its end means for its session. Must not test what a status means."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import permutations
from typing import Any

import pytest

from app.domain import actions, journal, operations, outcomes
from app.domain.actions import Acting
from app.domain.json_text import parse
from app.domain.model import EffectState, EntryKind, HaltReason, Outcome, Reversibility, SessionState, UndoState
from app.domain.outcomes import NOT_SENT, FailReport, Reported
from app.domain.retry import Attempt, Failure
from app.domain.sending import NEVER_SENT, POISON_AFTER_INTERRUPTED, Move, Rest, Send, Wait, Yield
from app.domain.tools import ApprovalRule, Definition
from tests.domain.acts import UNDOABLE, answer, ask, begin, commit, due_at_step, fail_effect, fail_run, release, run, send
from tests.domain.world import (
    ACTION_URL,
    OPERATOR,
    World,
    answered,
    broken,
    code_of,
    new_action,
    new_action_call,
    new_compensation,
    new_effect,
    new_entry,
    new_session,
)

S = SessionState
E = EffectState
K = EntryKind
U = UndoState
R = Reversibility

STEP = 2
DONE = answered(200, body=b'{"credit_id": "c-1"}')
BUSY = answered(503)  # certainly not processed
LOST = answered(500)  # perhaps
NO = answered(400)
ACCEPTED = answered(202, location="/jobs/7")
NEVER_CONNECTED = broken(Failure.CONNECT, was_sent=False)
TIMED_OUT = broken(Failure.TIMEOUT, was_sent=True)


def tool(reversibility: Reversibility = R.COMPENSATABLE, **retry: Any) -> Definition:
    """Register a tool whose approved calls the service executes."""
    is_undoable = reversibility in {R.COMPENSATABLE, R.REVERSIBLE}
    return Definition(
        reversibility=reversibility,
        compensation=new_compensation() if is_undoable else None,
        approval=ApprovalRule(is_required=True),
        action=new_action(**retry),
    )


def released(*tools: Definition) -> World:
    """Make a session with one committed call, and calls after it that are approved and released to the service."""
    return run(World(seed=1), UNDOABLE, *tools)


def in_flight(*tools: Definition) -> World:
    """Make the same session when a request of every released call is on its way."""
    world = released(*tools)
    for step in range(STEP, STEP + len(tools)):
        assert isinstance(begin(world, due_at_step(world, step)), Send)
    return world


def send_all(world: World, attempts: Sequence[Attempt]) -> Move:
    """Send the released call once for each answer; return what the last one leads to."""
    move: Move = Rest()
    for attempt in attempts:
        move = send(world, STEP, attempt)
    return move


def told_of(world: World, kind: EntryKind) -> Any:
    """Return the body of the newest entry of a kind."""
    return parse(next(entry for entry in reversed(world.entries) if entry.kind == kind).body)


# Answers, with one retry after the first attempt -> what is known of the call then. `failed` needs certainty for every attempt.
ENDS: list[tuple[list[Attempt], EffectState]] = [
    ([DONE], E.COMMITTED),
    ([answered(204)], E.COMMITTED),
    ([BUSY, DONE], E.COMMITTED),
    ([LOST, DONE], E.COMMITTED),
    ([NO], E.FAILED),
    ([answered(404)], E.FAILED),
    ([answered(409)], E.FAILED),
    ([answered(303)], E.UNKNOWN),
    ([BUSY, BUSY], E.FAILED),
    ([answered(429), answered(425)], E.FAILED),
    ([NEVER_CONNECTED, NEVER_CONNECTED], E.FAILED),
    ([broken(Failure.EGRESS_DENIED, was_sent=False)], E.FAILED),
    ([BUSY, NO], E.FAILED),
    ([LOST, BUSY], E.UNKNOWN),
    ([BUSY, LOST], E.UNKNOWN),
    ([LOST, NO], E.UNKNOWN),
    ([TIMED_OUT, NEVER_CONNECTED], E.UNKNOWN),
    ([LOST, answered(409)], E.UNKNOWN),
    ([answered(202), NO], E.UNKNOWN),
    ([ACCEPTED, answered(404)], E.UNKNOWN),
    ([ACCEPTED, DONE], E.COMMITTED),
]
ENTRY_AFTER = {E.COMMITTED: U.PENDING, E.FAILED: U.SKIPPED, E.UNKNOWN: U.PENDING}


@pytest.mark.parametrize(("attempts", "state"), ENDS)
def test_call_is_failed_only_when_every_attempt_was_certainly_not_processed(attempts: list[Attempt], state: EffectState) -> None:
    """Done, did nothing, or nobody knows; the session goes on, and only what did nothing has nothing to undo."""
    world = released(tool(max_retries=1))
    count = len(world.entries)
    assert isinstance(send_all(world, attempts), Rest)
    effect, call = world.effects[STEP], next(call for call in world.calls.values() if call.step_index == STEP)
    assert (effect.state, world.stack[STEP].state, world.session.state) == (state, ENTRY_AFTER[state], S.ACTIVE)
    assert (call.due_at, world.due_undo()) == (None, None)
    kinds = {E.COMMITTED: [K.EXECUTED], E.FAILED: [K.FAILED, K.SKIPPED], E.UNKNOWN: [K.FAILED]}[state]
    assert [entry.kind for entry in world.entries[count:]] == kinds
    told = parse(world.entries[count].body)
    assert isinstance(told, dict)
    assert (told["attempts"], told["status"]) == (call.attempts, call.last_status)
    assert world.entries[count].actor == "orchestrator"
    if state is not E.COMMITTED:
        assert (told["outcome"], told["error"], effect.error) == (effect.outcome, call.last_error, call.last_error)


@pytest.mark.parametrize(("attempts", "state"), ENDS)
def test_irreversible_call_is_the_pivot_when_it_happened_or_may_have(attempts: list[Attempt], state: EffectState) -> None:
    """The point past which nothing is undone is known in the decision that learns of it."""
    world = released(tool(R.IRREVERSIBLE, max_retries=1))
    send_all(world, attempts)
    is_pivot = state in {E.COMMITTED, E.UNKNOWN}
    assert (world.effects[STEP].state, world.session.pivoted, world.session.clean) == (state, is_pivot, not is_pivot)
    assert [entry.kind for entry in world.entries[-2:]].count(K.PIVOT) == is_pivot


# What the endpoint sent as a body -> what is kept as the result.
RESULTS: list[tuple[bytes, bytes]] = [
    (b"", b"null"),
    (b"null", b"null"),
    (b'{"credit_id": "c-1", "amount": 1.50}', b'{"credit_id":"c-1","amount":1.50}'),
    (b'"text"', b'"text"'),
    (b"transfer-ok", b'"transfer-ok"'),
    (b'{"cut": "of', b'"{\\"cut\\": \\"of"'),
    (b"\xff\xfe", '"��"'.encode()),
]


@pytest.mark.parametrize(("body", "result"), RESULTS)
def test_result_is_what_was_answered_when_the_call_is_done(body: bytes, result: bytes) -> None:
    """JSON stays JSON, literals kept; anything else is kept as a text, so that references and people can look into it."""
    world = released(tool())
    send(world, STEP, answered(200, body=body))
    assert world.effects[STEP].result == result
    assert world.effects[STEP].executed_at is not None
    assert journal.has_content(world.entries[-1], "result", result)


def test_first_send_is_frozen_and_counted_when_the_call_is_due() -> None:
    """The approved bytes go to the address of the approved version, under the forward key, and are written down before they leave."""
    world = released(tool())
    move = begin(world, due_at_step(world, STEP))
    assert isinstance(move, Send)
    call, effect = move.call, world.effects[STEP]
    assert (call.url, call.body, call.outcome, call.first_sent_at) == (ACTION_URL, effect.payload, None, world.now)
    assert (call.attempts, call.is_attempt_open, move.is_poll) == (1, True, False)
    assert call.idempotency_key == effect.forward_key
    assert (move.effect, move.policy) == (effect, new_action().retry)
    assert call == world.calls[call.call_id]


def test_same_bytes_are_sent_again_when_the_call_is_retried() -> None:
    """A second attempt is the first one again, whatever was registered since."""
    world = released(tool(max_retries=1))
    send(world, STEP, BUSY)
    registered = world.definitions[STEP]
    world.definitions[STEP] = replace(registered, action=replace(new_action(max_retries=1), url="https://elsewhere.example/wire"))
    again = begin(world, due_at_step(world, STEP))
    assert isinstance(again, Send)
    assert (again.call.url, again.call.body, again.call.attempts) == (ACTION_URL, world.effects[STEP].payload, 2)


@pytest.mark.parametrize(
    ("attempt", "poll_url"), [(BUSY, None), (LOST, None), (answered(202), None), (ACCEPTED, "https://bank.example/jobs/7")]
)
def test_call_waits_when_an_attempt_was_not_the_end(attempt: Attempt, poll_url: str | None) -> None:
    """Nothing is known yet, nothing is told, and the effect goes on executing."""
    world = released(tool())
    count = len(world.entries)
    move = send(world, STEP, attempt)
    assert isinstance(move, Wait)
    assert (move.call.poll_url, world.effects[STEP].state, len(world.entries)) == (poll_url, E.EXECUTING, count)
    assert move.call == due_at_step(world, STEP)


@pytest.mark.parametrize(("seconds", "is_over"), [(9.999, False), (10.0, True), (11.0, True)])
@pytest.mark.parametrize("attempt", [None, BUSY, LOST, ACCEPTED])
def test_call_is_given_up_when_its_deadline_is_reached(attempt: Attempt | None, seconds: float, is_over: bool) -> None:
    """The deadline is the first moment at which nothing is sent any more; one that was accepted may still be processed."""
    world = released(tool(deadline_ms=10_000))
    due = due_at_step(world, STEP)
    if attempt is not None:
        send(world, STEP, attempt)
        due = due_at_step(world, STEP)
    world.now = due.deadline_at - timedelta(seconds=10) + timedelta(seconds=seconds)
    move = begin(world, due)
    assert isinstance(move, Rest) is is_over
    if not is_over:
        return
    effect = world.effects[STEP]
    assert effect.state is (E.UNKNOWN if attempt in {LOST, ACCEPTED} else E.FAILED)
    assert (
        effect.error
        == {
            None: NEVER_SENT,
            BUSY: "http 503",
            LOST: "http 500",
            ACCEPTED: "accepted but never finished; the last answer was: http 202",
        }[attempt]
    )


def test_attempt_without_an_end_counts_as_unknown_when_the_worker_was_lost() -> None:
    """It may have been processed: it is sent again under its key, and a later refusal does not say that nothing happened."""
    world = in_flight(tool())
    again = begin(world, due_at_step(world, STEP))
    assert isinstance(again, Send)
    assert (again.call.attempts, again.call.interrupted, again.call.may_be_processing) == (2, 1, True)
    answer(world, again.call, NO)
    assert world.effects[STEP].state is E.UNKNOWN


def test_call_is_given_up_when_it_takes_its_worker_along_every_time() -> None:
    """No more attempts of what seems to kill the worker; what came of the others nobody knows."""
    world = in_flight(tool())
    for _ in range(POISON_AFTER_INTERRUPTED - 1):
        assert isinstance(begin(world, due_at_step(world, STEP)), Send)
    assert isinstance(begin(world, due_at_step(world, STEP)), Rest)
    assert world.effects[STEP].state is E.UNKNOWN
    assert told_of(world, K.FAILED)["attempts"] == POISON_AFTER_INTERRUPTED


def test_nothing_is_sent_when_the_call_is_settled() -> None:
    """A call that became due and lost its point is due no more."""
    for state in sorted(set(E) - {E.EXECUTING}):
        call = new_action_call()
        work = Acting(
            call=call,
            seen=Reported(effect=new_effect(state), undo_entry=new_entry(), action=call),
            action=new_action(),
            irreversible=[],
            in_flight=[],
            top=[],
        )
        draft = World(seed=1, session=new_session()).draft("orchestrator")
        assert isinstance(actions.begin(draft, work), Rest)
        changes = draft.changes()
        assert [change.after for change in changes.calls] == [replace(call, due_at=None)]
        assert (changes.effects, changes.entries) == ((), ())


def test_answer_changes_nothing_when_the_run_was_completed_meanwhile() -> None:
    """A read needs no report, so its run may end while the service is still at it: the answer comes too late for anybody."""
    world = in_flight(tool(R.READ_ONLY))
    call = due_at_step(world, STEP)
    draft = world.draft()
    assert outcomes.complete(draft, world.known(pending=True)) is None
    world.apply(draft)
    assert (world.session.state, world.effects[STEP].state, world.due_calls()) == (S.COMPLETED, E.FAILED, [])
    count = len(world.entries)
    for attempt in (DONE, BUSY, ACCEPTED, NO):
        assert isinstance(answer(world, call, attempt), Rest)
        assert (world.due_calls(), len(world.entries)) == ([], count)


def test_run_is_not_complete_when_the_service_executes_a_call() -> None:
    """What may still happen is not settled."""
    world = in_flight(tool())
    draft = world.draft()
    assert code_of(outcomes.complete(draft, world.known(pending=True))) == "unsettled_effects"
    assert draft.is_empty


NOT_APPLIED = FailReport(outcome=Outcome.NOT_APPLIED, error="no")
PERHAPS = FailReport(outcome=Outcome.UNKNOWN, error="?")


@pytest.mark.parametrize("report", [None, NOT_APPLIED, PERHAPS])
def test_report_of_somebody_else_is_refused_when_the_service_executes_the_call(report: FailReport | None) -> None:
    """The service sees for itself; what stays unknown an operator may settle, and the agent cannot know more than that."""
    world = in_flight(tool())
    session = world.session
    assert code_of(commit(world, STEP) if report is None else fail_effect(world, STEP, report)) == "runs_as_action"
    assert world.session == session
    answer(world, due_at_step(world, STEP), answered(303))
    session = world.session
    refusal = commit(world, STEP) if report is None else fail_effect(world, STEP, report)
    assert code_of(refusal) == (None if report is PERHAPS else "runs_as_action"), "what is known already is no contradiction"
    assert (world.effects[STEP].state, world.session) == (E.UNKNOWN, session)
    draft = world.draft(OPERATOR)
    order = operations.Settle(reason="looked", outcome=Outcome.COMMITTED)
    assert isinstance(operations.settle(draft, world.reported(STEP), [], order), Reported)


def test_silence_is_no_reason_to_fail_a_run_when_the_service_executes_a_call() -> None:
    """A running action counts as activity; the run's own deadline still strikes."""
    world = in_flight(tool())
    world.now += timedelta(days=1)
    draft = world.draft("orchestrator")
    outcomes.time_out(draft, world.known())
    assert draft.is_empty
    world.session = replace(world.session, deadline_at=world.now)
    draft = world.draft("orchestrator")
    outcomes.time_out(draft, world.known())
    world.apply(draft)
    assert (world.session.state, world.effects[STEP].state) == (S.FAILED, E.EXECUTING)


# What had come of the call when its session failed -> what is known of it then; None: it is awaited.
WHEN_FAILED: list[tuple[str, list[Attempt], bool, EffectState | None]] = [
    ("never sent", [], False, E.FAILED),
    ("certainly not processed", [BUSY], False, E.FAILED),
    ("never connected", [BUSY, NEVER_CONNECTED], False, E.FAILED),
    ("perhaps processed", [LOST], False, E.UNKNOWN),
    ("perhaps processed, then not", [LOST, BUSY], False, E.UNKNOWN),
    ("accepted, nowhere to ask", [answered(202)], False, E.UNKNOWN),
    ("accepted, to be asked about", [ACCEPTED], False, None),
    ("on its way", [], True, None),
    ("on its way again", [BUSY], True, None),
    ("being asked about", [ACCEPTED], True, None),
]


@pytest.mark.parametrize(("what", "attempts", "is_open", "state"), WHEN_FAILED)
@pytest.mark.parametrize("reversibility", [R.COMPENSATABLE, R.IRREVERSIBLE, R.READ_ONLY])
def test_call_is_settled_or_awaited_when_its_session_fails(
    what: str, attempts: list[Attempt], is_open: bool, state: EffectState | None, reversibility: Reversibility
) -> None:
    """No new attempt starts. What may be on its way is waited for, before it is judged what can be undone; nothing else is."""
    world = released(tool(reversibility))
    send_all(world, attempts)
    if is_open:
        begin(world, due_at_step(world, STEP))
    fail_run(world)
    told = told_of(world, K.SESSION_FAILED)
    if state is None:
        assert (world.session.state, world.effects[STEP].state, world.due_undo()) == (S.FAILED, E.EXECUTING, None), what
        assert (told["in_flight_steps"], told["unknown_steps"], told["not_applied_steps"]) == ([STEP], [], [])
        assert due_at_step(world, STEP).due_at is not None
        return
    expected = E.FAILED if reversibility is R.READ_ONLY else state
    assert (world.effects[STEP].state, world.due_actions()) == (expected, []), what
    steps = [STEP] if expected is E.FAILED else []
    assert (told["in_flight_steps"], told["unknown_steps"], told["not_applied_steps"]) == ([], [] if steps else [STEP], steps)
    if expected is E.FAILED and state is E.FAILED:
        assert world.effects[STEP].error == NOT_SENT
    check_judged(world, expected)


def check_judged(world: World, state: EffectState) -> None:
    """Assert that a failed session is halted past the pivot, or unwound from the newest entry that has something to undo."""
    undo = world.due_undo()
    if world.effects[STEP].reversibility is R.IRREVERSIBLE and state is not E.FAILED:
        assert (world.session.state, world.session.halt_reason, undo) == (S.HALTED, HaltReason.FAILED_AFTER_PIVOT, None)
        assert {entry.state for entry in world.stack.values()} == {U.PENDING}
        return
    assert undo is not None
    is_undone = STEP in world.stack and state is not E.FAILED
    assert (world.session.state, undo.step_index) == (S.FAILED, STEP if is_undone else 1)
    assert world.stack[1].state is U.PENDING
    if STEP in world.stack:
        assert world.stack[STEP].state is (U.PENDING if is_undone else U.SKIPPED)


# The answer to the request that was on its way when the session failed -> what is known then; None: it was accepted, and is asked about.
AWAITED: list[tuple[Attempt | None, EffectState | None]] = [
    (DONE, E.COMMITTED),
    (NO, E.FAILED),
    (BUSY, E.FAILED),
    (NEVER_CONNECTED, E.FAILED),
    (LOST, E.UNKNOWN),
    (TIMED_OUT, E.UNKNOWN),
    (answered(202), E.UNKNOWN),
    (None, E.UNKNOWN),
    (ACCEPTED, None),
]


@pytest.mark.parametrize(("attempt", "state"), AWAITED)
@pytest.mark.parametrize("reversibility", [R.COMPENSATABLE, R.IRREVERSIBLE, R.READ_ONLY])
def test_session_is_judged_when_the_call_in_flight_has_ended(
    attempt: Attempt | None, state: EffectState | None, reversibility: Reversibility
) -> None:
    """The one attempt is the last: its answer, or the loss of its worker (None), says whether the pivot was passed and what is undone."""
    world = in_flight(tool(reversibility))
    fail_run(world)
    call = due_at_step(world, STEP)
    move = begin(world, call) if attempt is None else answer(world, call, attempt)
    if state is None:
        assert isinstance(move, Wait)
        assert (world.session.state, world.due_undo()) == (S.FAILED, None)
        return
    assert world.effects[STEP].state is state
    assert world.calls[call.call_id].attempts == 1, "an attempt started after the session had failed"
    check_judged(world, state)
    undo = world.due_undo()
    assert move == (Rest() if undo is None else Yield(call=undo))


def test_accepted_call_is_asked_about_to_its_deadline_when_the_session_has_failed() -> None:
    """Asking is no new attempt: it goes on, past every retry budget, until the endpoint says more, or the deadline is there."""
    world = in_flight(tool(R.IRREVERSIBLE, max_retries=0, deadline_ms=60_000))
    answer(world, due_at_step(world, STEP), ACCEPTED)
    fail_run(world)
    for attempt in (answered(202), LOST, BUSY, TIMED_OUT, NEVER_CONNECTED, answered(429)):
        asked = begin(world, due_at_step(world, STEP))
        assert isinstance(asked, Send)
        assert (asked.is_poll, asked.call.attempts) == (True, 1)
        assert isinstance(answer(world, asked.call, attempt), Wait)
        assert (world.session.state, world.session.pivoted) == (S.FAILED, False)
    world.now = due_at_step(world, STEP).deadline_at
    assert isinstance(begin(world, due_at_step(world, STEP)), Rest)
    assert (world.effects[STEP].state, world.session.halt_reason) == (E.UNKNOWN, HaltReason.FAILED_AFTER_PIVOT)


@pytest.mark.parametrize(("attempt", "state"), [(DONE, E.COMMITTED), (answered(404), E.UNKNOWN), (answered(303), E.UNKNOWN)])
def test_accepted_call_is_judged_when_its_location_says_more(attempt: Attempt, state: EffectState) -> None:
    """A final answer of the Location is the call's own; a Location that is gone leaves everything open."""
    world = in_flight(tool())
    answer(world, due_at_step(world, STEP), ACCEPTED)
    fail_run(world)
    send(world, STEP, attempt)
    assert world.effects[STEP].state is state
    check_judged(world, state)


def test_session_fails_again_in_vain_when_a_call_is_awaited() -> None:
    """Failing a run again is harmless; so is the sweep."""
    world = in_flight(tool())
    fail_run(world)
    session = world.session
    fail_run(world)
    draft = world.draft("orchestrator")
    outcomes.time_out(draft, world.known())
    assert draft.is_empty
    assert world.session == session


# The answers to two calls in flight, of the steps 2 and 3 -> which entries are left to undo, newest first.
TWO: list[tuple[Attempt, Attempt, list[int]]] = [
    (DONE, DONE, [3, 2, 1]),
    (DONE, NO, [2, 1]),
    (NO, DONE, [3, 1]),
    (NO, NO, [1]),
    (LOST, BUSY, [2, 1]),
    (BUSY, LOST, [3, 1]),
]


@pytest.mark.parametrize(("second", "third", "left"), TWO)
@pytest.mark.parametrize("order", list(permutations([2, 3])))
def test_unwind_begins_when_the_last_of_several_calls_has_ended(
    second: Attempt, third: Attempt, left: list[int], order: Sequence[int]
) -> None:
    """Whichever ends first, nothing is undone beside a call that may still happen; then the newest that has something to undo is due."""
    world = in_flight(tool(), tool())
    fail_run(world)
    assert told_of(world, K.SESSION_FAILED)["in_flight_steps"] == [2, 3]
    answers = {2: second, 3: third}
    first, last = order
    assert isinstance(answer(world, due_at_step(world, first), answers[first]), Rest)
    assert (world.session.state, world.due_undo()) == (S.FAILED, None)
    move = answer(world, due_at_step(world, last), answers[last])
    undo = world.due_undo()
    assert undo is not None
    assert (move, undo.step_index) == (Yield(call=undo), left[0])
    for step in left:
        send(world, step, DONE, may_go_on=False)
    assert world.session.state is S.COMPENSATED
    world.verify()


@pytest.mark.parametrize(("irreversible", "is_past"), [(DONE, True), (LOST, True), (BUSY, False)])
@pytest.mark.parametrize("order", list(permutations([2, 3])))
def test_pivot_is_judged_when_the_last_of_several_calls_has_ended(irreversible: Attempt, is_past: bool, order: Sequence[int]) -> None:
    """One irreversible call among them: only when all have ended is it known whether anything may be undone."""
    world = in_flight(tool(R.IRREVERSIBLE), tool())
    fail_run(world)
    answers = {2: irreversible, 3: DONE}
    for step in order:
        assert world.session.state is S.FAILED
        answer(world, due_at_step(world, step), answers[step])
    undo = world.due_undo()
    if is_past:
        assert (world.session.state, world.session.halt_reason, undo) == (S.HALTED, HaltReason.FAILED_AFTER_PIVOT, None)
        return
    assert undo is not None
    assert (world.session.state, undo.step_index) == (S.FAILED, 3)


def test_one_call_is_settled_and_another_awaited_when_their_session_fails() -> None:
    """Each call is judged by what came of it alone."""
    world = in_flight(tool(), tool())
    answer(world, due_at_step(world, 2), LOST)
    fail_run(world)
    assert [world.effects[step].state for step in (2, 3)] == [E.UNKNOWN, E.EXECUTING]
    assert [call.step_index for call in world.due_actions()] == [3]
    answer(world, due_at_step(world, 3), NO)
    undo = world.due_undo()
    assert undo is not None
    assert undo.step_index == 2


def test_session_goes_to_the_operator_when_a_halt_was_ordered_before_the_call_ended() -> None:
    """The call is awaited; then nothing is undone until the operator says so."""
    world = in_flight(tool())
    fail_run(world)
    draft = world.draft(OPERATOR)
    assert operations.halt(draft, None, "wait", is_action_in_flight=True) is None
    world.apply(draft)
    assert (world.session.state, world.session.halt_ordered) == (S.FAILED, True)
    assert isinstance(answer(world, due_at_step(world, STEP), DONE), Rest)
    assert (world.session.state, world.session.halt_reason, world.session.halt_ordered) == (S.HALTED, HaltReason.OPERATOR, False)
    assert {entry.state for entry in world.stack.values()} == {U.PENDING}


def test_session_is_compensated_when_nothing_is_left_to_undo_after_the_call() -> None:
    """A run whose only call did nothing is undone by doing nothing."""
    world = World(seed=1)
    assert ask(world, tool())
    release(world, 1)
    call = due_at_step(world, 1)
    begin(world, call)
    fail_run(world)
    assert isinstance(answer(world, call, NO), Rest)
    assert (world.session.state, world.entries[-1].kind) == (S.COMPENSATED, K.UNWOUND)


def test_session_is_told_of_a_late_effect_when_the_call_has_ended() -> None:
    """A mark that was set while the call was awaited is looked at before anything is undone."""
    world = in_flight(tool())
    world.session = replace(world.session, late_effect=True, clean=False)
    fail_run(world)
    answer(world, due_at_step(world, STEP), DONE)
    assert (world.session.state, world.session.halt_reason) == (S.HALTED, HaltReason.LATE_EFFECT)


@pytest.mark.parametrize("reversibility", [R.COMPENSATABLE, R.READ_ONLY, R.IRREVERSIBLE])
def test_late_report_of_the_agent_is_only_evidence_when_the_call_is_awaited(reversibility: Reversibility) -> None:
    """The service's own answer is still to come, and decides."""
    world = in_flight(tool(reversibility))
    fail_run(world)
    assert code_of(commit(world, STEP)) == "session_not_active"
    assert code_of(fail_effect(world, STEP, FailReport(outcome=Outcome.NOT_APPLIED, error="no"))) == "session_not_active"
    assert [entry.kind for entry in world.entries[-2:]] == [K.LATE_COMMIT, K.LATE_FAIL]
    assert (world.effects[STEP].state, world.session.state, world.session.late_effect) == (E.EXECUTING, S.FAILED, False)


def test_call_cannot_be_settled_by_an_operator_when_it_is_awaited() -> None:
    """Only what nobody knows can be settled."""
    world = in_flight(tool())
    draft = world.draft(OPERATOR)
    order = operations.Settle(reason="looked", outcome=Outcome.COMMITTED)
    assert code_of(operations.settle(draft, world.reported(STEP), [], order)) == "not_unknown"
    assert draft.is_empty
