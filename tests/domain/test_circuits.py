"""When a destination counts as away, what that costs and what follows, by table; what is held is not begun. Must not keep anything."""

from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import actions, circuits, unwinding
from app.domain.circuits import AWAY_FAILURES, AWAY_STATUSES, Change, Held, Rules, Sight, Standing
from app.domain.model import CallId, EffectState, HaltReason, Outcome, RetryPolicy, SessionState, UndoState, UnknownVariant
from app.domain.retry import Attempt, Failure
from app.domain.sending import Rest, Send, Wait, Yield
from app.domain.unwinding import StackItem, Undoing
from tests.domain.acts import due_at_step
from tests.domain.test_actions import STEP, released, tool
from tests.domain.world import (
    ORCHESTRATOR,
    START,
    UNDO_URL,
    answered,
    broken,
    new_call,
    new_compensation,
    new_draft,
    new_effect,
    new_entry,
    new_session,
)

HERE = "ledger.example:443"
BOTH = frozenset({HERE, "bank.example:443"})  # where undos and actions go
RULES = Rules(calls=3, limit=16)
NEVER = Rules(calls=0, limit=16)
CALLS = [CallId(UUID(int=number)) for number in range(20)]
POLICY = RetryPolicy()

# What came of a request -> what it tells of its destination.
SIGHTS: list[tuple[Attempt, Sight]] = [
    *((answered(status), Sight.OUTAGE) for status in (502, 503, 504)),
    *((answered(status), Sight.ANSWER) for status in (200, 202, 204, 301, 400, 404, 408, 409, 425, 429, 500, 501, 505, 507, 599, 999)),
    *(
        (broken(failure, was_sent=False), Sight.OUTAGE)
        for failure in (Failure.DNS, Failure.CONNECT, Failure.TLS, Failure.TIMEOUT, Failure.RESET)
    ),
    (broken(Failure.TIMEOUT, was_sent=True), Sight.OUTAGE),
    (broken(Failure.RESET, was_sent=True), Sight.OUTAGE),
    (broken(Failure.PROTOCOL, was_sent=True), Sight.ANSWER),
    (broken(Failure.EGRESS_DENIED, was_sent=False), Sight.NOTHING),
]


@pytest.mark.parametrize(("attempt", "expected"), SIGHTS)
def test_destination_is_away_when_nobody_answered_or_a_gateway_says_so(attempt: Attempt, expected: Sight) -> None:
    """A 500 and a 4xx are answers about one call; an address that was never asked tells nothing. A poll tells what an attempt does."""
    assert circuits.sight(new_call(), POLICY, attempt) is expected
    assert circuits.sight(new_call(poll_url="https://ledger.example/jobs/7"), POLICY, attempt) is expected


def test_failures_that_tell_nothing_are_named_when_the_rest_are_outages() -> None:
    """A new way to fail has to be judged."""
    assert set(Failure) - AWAY_FAILURES == {Failure.PROTOCOL, Failure.EGRESS_DENIED, Failure.INTERRUPTED}
    assert {502, 503, 504} == AWAY_STATUSES


def test_poll_tells_nothing_when_it_asks_another_destination() -> None:
    """A Location may lead elsewhere: what is away there is not where the calls go."""
    elsewhere = new_call(poll_url="https://jobs.example/7")
    assert circuits.sight(elsewhere, POLICY, answered(503)) is Sight.NOTHING
    assert circuits.sight(elsewhere, POLICY, answered(200)) is Sight.NOTHING


def test_status_is_an_answer_when_the_descriptor_takes_it_for_done() -> None:
    """Whoever says that 503 means done says it of the call, not of a poll, where the list does not apply."""
    policy = RetryPolicy(compensated_on=frozenset({503}))
    assert circuits.sight(new_call(), policy, answered(503)) is Sight.ANSWER
    assert circuits.sight(new_call(poll_url="https://ledger.example/jobs/7"), policy, answered(503)) is Sight.OUTAGE


def saw(standing: Standing, *sights: tuple[int, Sight], rules: Rules = RULES) -> Standing:
    """Let a process see these, each by one of the calls."""
    for number, seen in sights:
        standing = circuits.see(standing, CALLS[number], seen, rules)
    return standing


OUT, ANSWER, NOTHING = Sight.OUTAGE, Sight.ANSWER, Sight.NOTHING
# What one process sees, by which call -> whether that is enough to hold the destination for away.
ROWS_OF_SIGHTS: list[tuple[list[tuple[int, Sight]], bool]] = [
    ([(0, OUT), (1, OUT)], False),
    ([(0, OUT), (1, OUT), (2, OUT)], True),
    ([(0, OUT)] * 50, False),
    ([(0, OUT), (1, OUT), (0, OUT), (1, OUT)], False),
    ([(0, OUT), (1, OUT), (9, ANSWER), (2, OUT)], False),
    ([(0, OUT), (1, OUT), (0, ANSWER), (2, OUT), (3, OUT)], False),
    ([(0, OUT), (1, OUT), (9, NOTHING), (2, OUT)], True),
    ([(0, OUT), (1, OUT), (2, OUT), (2, ANSWER)], False),
    ([], False),
]


@pytest.mark.parametrize(("sights", "is_away"), ROWS_OF_SIGHTS)
def test_process_holds_a_destination_for_away_when_enough_calls_in_a_row_say_so(sights: list[tuple[int, Sight]], is_away: bool) -> None:
    """Distinct calls count, in a row, with nothing else answered between: one call alone never opens a circuit."""
    assert circuits.is_away(saw(Standing(), *sights), RULES) is is_away
    assert circuits.is_away(saw(Standing(), *sights, rules=NEVER), NEVER) is False


@given(st.lists(st.tuples(st.integers(0, 19), st.sampled_from(Sight)), max_size=60))
def test_memory_is_bounded_when_an_outage_lasts(sights: list[tuple[int, Sight]]) -> None:
    """A herd of calls is not kept, only as many as it takes."""
    assert len(saw(Standing(), *sights).outages) <= RULES.calls


AWAY = saw(Standing(), (0, OUT), (1, OUT), (2, OUT))
OPEN = circuits.look(Standing(), is_open=True)
# What was seen and known, whether the row is there, whether the call was a probe -> what changes, whether it is charged.
CHANGES: list[tuple[tuple[Sight, Standing, bool, bool], tuple[Change, bool]]] = [
    ((OUT, Standing(), False, False), (Change.NONE, True)),
    ((OUT, AWAY, False, False), (Change.OPEN, False)),
    ((OUT, AWAY, True, False), (Change.NONE, False)),
    ((OUT, Standing(), True, False), (Change.NONE, False)),  # another replica has opened it
    ((OUT, Standing(), True, True), (Change.NOTE, False)),
    ((OUT, OPEN, False, False), (Change.NONE, False)),  # somebody closed it a moment ago: this one was sent before
    ((ANSWER, Standing(), False, False), (Change.NONE, True)),
    ((ANSWER, Standing(), True, True), (Change.CLOSE, True)),
    ((ANSWER, OPEN, True, False), (Change.CLOSE, True)),  # not only a probe may find out
    ((NOTHING, Standing(), True, True), (Change.NONE, True)),
]


@pytest.mark.parametrize(("found", "expected"), CHANGES)
def test_circuit_changes_and_spares_the_budget_when_a_sight_says_so(
    found: tuple[Sight, Standing, bool, bool], expected: tuple[Change, bool]
) -> None:
    """From the sight that opens it on an outage is nobody's failure; any answer closes it."""
    seen, standing, is_open, is_probe = found
    change = circuits.change(seen, standing, RULES, is_open=is_open, is_probe=is_probe)
    assert (change, circuits.is_charged(seen, standing, RULES, is_open=is_open)) == expected


def test_destination_is_tried_with_few_calls_at_first_when_it_is_back() -> None:
    """One, two, four, eight, and then as many as anywhere: a destination that has just come up is not run over."""
    standing = saw(OPEN, (0, ANSWER))
    limits = [standing.limit]
    while standing.limit is not None:
        standing = saw(standing, (1, ANSWER))
        limits.append(standing.limit)
    assert limits == [1, 2, 4, 8, None]
    assert saw(AWAY, (0, ANSWER)).limit == 1, "closed before anybody looked"
    assert saw(Standing(), (0, ANSWER)).limit is None


def test_destination_is_tried_anew_when_another_replica_closed_its_circuit() -> None:
    """What this process saw before is over: the next outage is the first again."""
    known = circuits.look(AWAY, is_open=True)
    assert (known.is_open, known.outages) == (True, AWAY.outages)
    assert circuits.look(known, is_open=False) == Standing(limit=1)
    assert circuits.look(AWAY, is_open=False) == AWAY, "it is being opened: nobody can see the row yet"


@pytest.mark.parametrize(("probes", "ceiling"), [(0, 1), (1, 2), (2, 4), (5, 32), (6, 60), (7, 60), (10_000, 60)])
def test_probes_come_ever_more_rarely_when_an_outage_lasts(probes: int, ceiling: float) -> None:
    """Doubling from a second to a minute; half of it is jitter."""
    assert circuits.probe_seconds(probes, 0.0) == pytest.approx(ceiling / 2)
    assert circuits.probe_seconds(probes, 0.5) == pytest.approx(ceiling * 0.75)
    assert circuits.probe_seconds(probes, 1.0) == pytest.approx(ceiling)


# What is held -> whether a call goes there, and whether a probe does.
HELD: list[tuple[Held, bool, bool]] = [
    (Held(), True, True),
    (Held(circuits=BOTH), False, True),
    (Held(circuits=frozenset({"other.example:443"})), True, True),
    (Held(pauses=BOTH), False, False),
    (Held(is_all_paused=True), False, False),
    (Held(circuits=BOTH, pauses=BOTH), False, False),
]


@pytest.mark.parametrize(("held", "goes", "probe_goes"), HELD)
def test_call_is_begun_only_where_nothing_holds_it(*, held: Held, goes: bool, probe_goes: bool) -> None:
    """A probe passes an open circuit, nothing passes a pause; what is held changes nothing, so that it is due as before."""
    for is_probe, expected in ((False, goes), (True, probe_goes)):
        draft = new_draft(new_session(SessionState.FAILED))
        assert isinstance(unwinding.begin(draft, due_undo(held=held, is_probe=is_probe)), Send if expected else Yield)
        assert draft.is_empty is not expected
        world = released(tool())
        draft = world.draft(ORCHESTRATOR)
        acting = replace(world.acting(due_at_step(world, STEP)), held=held, is_probe=is_probe)
        assert isinstance(actions.begin(draft, acting), Send if expected else Yield)
        assert draft.is_empty is not expected


def due_undo(**changes: object) -> Undoing:
    """Make the work of a session with one committed effect whose undo is due."""
    work = Undoing(
        call=new_call(),
        item=StackItem(entry=new_entry(), effect=new_effect(EffectState.COMMITTED)),
        below=None,
        has_failed_entries=False,
    )
    return replace(work, **changes)  # type: ignore[arg-type]  # fields of Undoing


@pytest.mark.parametrize("held", [Held(circuits=frozenset({HERE})), Held(is_all_paused=True)])
def test_call_is_given_up_at_its_deadline_when_it_is_held(held: Held) -> None:
    """Nothing waits silently for ever: a person gets it, though nothing is sent."""
    undo = due_undo(held=held, call=new_call(deadline_at=START + timedelta(seconds=1)))
    draft = new_draft(new_session(SessionState.COMPENSATING), START + timedelta(seconds=1))
    assert isinstance(unwinding.begin(draft, undo), Rest)
    assert draft.session.halt_reason is HaltReason.DEADLINE_EXCEEDED


def test_call_waits_where_it_will_go_when_its_tool_has_moved() -> None:
    """The newest registration says where it is sent: that place's circuit counts, and a probe of the old place does not pass it."""
    moved = new_compensation(url="https://new.example/undo")
    item = StackItem(entry=new_entry(), effect=new_effect(EffectState.COMMITTED), newest=moved)
    held = Held(circuits=frozenset({"new.example:443"}))
    draft = new_draft(new_session(SessionState.FAILED))
    move = unwinding.begin(draft, due_undo(item=item, held=held, is_probe=True))
    assert isinstance(move, Yield)
    assert (move.call.destination, move.call.url, move.call.due_at) == ("new.example:443", None, START)
    assert draft.session.state is SessionState.FAILED
    free = unwinding.begin(new_draft(new_session(SessionState.FAILED)), due_undo(item=item, held=Held(circuits=frozenset({HERE}))))
    assert isinstance(free, Send)


def test_variant_counts_when_it_is_what_will_be_sent() -> None:
    """An undo by forward key may go elsewhere than the one with the result would have."""
    variant = UnknownVariant(args=b"{}", url="https://finder.example/undo")
    unbound = new_compensation(b'{"id":{"$ref":"result#/id"}}', unknown=variant)
    item = StackItem(entry=new_entry(compensation=unbound), effect=new_effect(EffectState.UNKNOWN))
    move = unwinding.begin(
        new_draft(new_session(SessionState.FAILED)), due_undo(item=item, held=Held(circuits=frozenset({"finder.example:443"})))
    )
    assert isinstance(move, Yield)
    assert move.call.destination == "finder.example:443"


@pytest.mark.parametrize("attempt", [answered(503), broken(Failure.TIMEOUT, was_sent=True)])
def test_budget_stays_when_an_outage_is_not_charged(attempt: Attempt) -> None:
    """The attempt is counted as ever, the failure is not; the call waits for its next turn however often that was so."""
    sent = new_call(url=UNDO_URL, body=b"{}", outcome=Outcome.COMMITTED, attempts=40, failures=3, is_attempt_open=True, first_sent_at=START)
    running = StackItem(entry=new_entry(UndoState.RUNNING), effect=new_effect(EffectState.COMPENSATING))
    for is_charged in (False, True):
        draft = new_draft(new_session(SessionState.COMPENSATING))
        move = unwinding.record(draft, due_undo(call=sent, item=running), attempt, 0.5, is_charged=is_charged)
        assert isinstance(move, Rest if is_charged else Wait)
        if isinstance(move, Wait):
            assert (move.call.attempts, move.call.failures) == (40, 3)
            assert move.call.due_at is not None
            assert move.call.due_at > START, "it goes to the end of the line"


def test_next_entry_waits_when_its_destination_is_held() -> None:
    """An undo that is done makes the next one due; whoever may not begin it leaves it to the next claim."""
    draft = new_draft(new_session(SessionState.COMPENSATING))
    below = StackItem(entry=new_entry(), effect=new_effect(EffectState.COMMITTED))
    running = StackItem(entry=new_entry(UndoState.RUNNING, 2), effect=new_effect(EffectState.COMPENSATING, 2))
    sent = new_call(2, url=UNDO_URL, body=b"{}", outcome=Outcome.COMMITTED, attempts=1, is_attempt_open=True, first_sent_at=START)
    above = due_undo(call=sent, item=running, below=below, held=Held(circuits=frozenset({HERE})))
    move = unwinding.record(draft, above, answered(200), 0.5)
    assert isinstance(move, Yield)
    assert (move.call.step_index, move.call.due_at, move.call.attempts) == (1, START, 0)
