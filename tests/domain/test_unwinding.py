"""What one due undo does next, before and after each attempt, move by move. Must not test what an HTTP status means: see `test_retry`."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from app.domain import unwinding
from app.domain.compensation import UNREADABLE
from app.domain.model import (
    Compensation,
    EffectState,
    EntryKind,
    HaltReason,
    OnUnknown,
    Outcome,
    RetryPolicy,
    SessionState,
    UndoState,
    UnknownVariant,
)
from app.domain.retry import Attempt, Failure
from app.domain.sending import POISON_AFTER_INTERRUPTED, Rest, Send, Wait, Yield
from app.domain.unwinding import Undoing
from tests.domain.world import (
    ORCHESTRATOR,
    START,
    UNDO_URL,
    WitnessedDraft,
    World,
    answered,
    broken,
    new_call,
    new_compensation,
    new_effect,
    new_entry,
    new_session,
)

OPEN_ARGS = b'{"credit":{"$ref":"result#/credit_id"}}'
FORWARD_ARGS = b'{"forward_key":{"$ref":"effect#/forward_key"}}'
BY_FORWARD_KEY = UnknownVariant(args=FORWARD_ARGS, url="https://ledger.example/undo/by-key")

DONE = answered(200)


def due_work(compensation: Compensation | None = None, **call: Any) -> Undoing:
    """Make the work of a session with one committed effect whose undo is due."""
    entry = new_entry(compensation=compensation or new_compensation())
    return Undoing(
        call=new_call(**call),
        item=unwinding.StackItem(entry=entry, effect=new_effect(EffectState.COMMITTED)),
        below=None,
        has_failed_entries=False,
    )


def sent_work(compensation: Compensation | None = None, effect: EffectState = EffectState.COMPENSATING, **call: Any) -> Undoing:
    """Make the work of a session whose one undo was sent once, and has not been answered yet."""
    sent = {
        "url": UNDO_URL,
        "body": b"{}",
        "outcome": Outcome.COMMITTED,
        "attempts": 1,
        "is_attempt_open": True,
        "first_sent_at": START,
    }
    entry = new_entry(UndoState.RUNNING, compensation=compensation or new_compensation())
    return Undoing(
        call=new_call(**{**sent, **call}),
        item=unwinding.StackItem(entry=entry, effect=new_effect(effect)),
        below=None,
        has_failed_entries=False,
    )


def draft_of(state: SessionState, seconds: float = 0, **changes: Any) -> WitnessedDraft:
    """Begin the orchestrator's decision about a session in a state."""
    world = World(seed=1, session=new_session(state, **changes), now=START + timedelta(seconds=seconds))
    return world.draft(ORCHESTRATOR)


# What the effect is known to be, what its descriptor says -> what is sent as what, or why the session halts (contract, section 4).
FREEZES: list[tuple[EffectState, bytes | None, Compensation, tuple[str, bytes, Outcome] | HaltReason]] = [
    (EffectState.COMMITTED, b'{"credit_id":"c-1"}', new_compensation(OPEN_ARGS), (UNDO_URL, b'{"credit":"c-1"}', Outcome.COMMITTED)),
    (EffectState.COMMITTED, b"{}", new_compensation(OPEN_ARGS), HaltReason.UNRESOLVED_REFERENCE),
    (
        EffectState.COMMITTED,
        b"{}",
        new_compensation(OPEN_ARGS, unknown=UnknownVariant(args=b'{"by":1}')),
        (UNDO_URL, b'{"by":1}', Outcome.COMMITTED),
    ),
    (EffectState.UNKNOWN, None, new_compensation(b'{"a":1.50}'), (UNDO_URL, b'{"a":1.50}', Outcome.UNKNOWN)),
    (EffectState.UNKNOWN, None, new_compensation(OPEN_ARGS), HaltReason.UNRESOLVED_REFERENCE),
    (EffectState.UNKNOWN, None, new_compensation(OPEN_ARGS, unknown=UnknownVariant(args=OPEN_ARGS)), HaltReason.UNRESOLVED_REFERENCE),
    (
        EffectState.UNKNOWN,
        None,
        new_compensation(OPEN_ARGS, unknown=BY_FORWARD_KEY),
        (
            "https://ledger.example/undo/by-key",
            b'{"forward_key":"effect-00000000-0000-0000-0000-000000000001"}',
            Outcome.UNKNOWN,
        ),
    ),
    (EffectState.UNKNOWN, None, new_compensation(on_unknown=OnUnknown.ESCALATE), HaltReason.UNKNOWN_OUTCOME),
    (EffectState.COMMITTED, b"{}", new_compensation(on_unknown=OnUnknown.ESCALATE), (UNDO_URL, b"{}", Outcome.COMMITTED)),
]


@pytest.mark.parametrize(("state", "result", "compensation", "expected"), FREEZES)
def test_begin_freezes_or_halts_when_an_entry_is_first_sent(
    state: EffectState, result: bytes | None, compensation: Compensation, expected: tuple[str, bytes, Outcome] | HaltReason
) -> None:
    """What is sent is complete or is not sent; a halted entry stays pending, as does its effect."""
    work = due_work(compensation)
    item = unwinding.StackItem(entry=work.item.entry, effect=new_effect(state, result=result))
    draft = draft_of(SessionState.FAILED)
    move = unwinding.begin(draft, Undoing(call=work.call, item=item, below=None, has_failed_entries=False))
    changes = draft.changes()
    if isinstance(expected, HaltReason):
        assert isinstance(move, Rest)
        assert (changes.after.state, changes.after.halt_reason) == (SessionState.HALTED, expected)
        assert (changes.effects, changes.undo_entries) == ((), ())
        assert changes.calls[0].after.due_at is None
        assert [entry.kind for entry in changes.entries] == [EntryKind.HALTED]
        return
    assert isinstance(move, Send)
    assert (move.call.url, move.call.body, move.call.outcome) == expected
    assert (changes.after.state, changes.effects[0].after.state) == (SessionState.COMPENSATING, EffectState.COMPENSATING)
    assert [entry.kind for entry in changes.entries] == [EntryKind.COMPENSATING]


def test_bytes_stay_when_the_result_is_learnt_after_the_first_send() -> None:
    """A retry sends what was frozen, though by now the reference could be bound."""
    compensation = new_compensation(OPEN_ARGS, unknown=UnknownVariant(args=b'{"by":1}'))
    work = sent_work(compensation, body=b'{"by":1}', outcome=Outcome.UNKNOWN, is_attempt_open=False)
    move = unwinding.begin(draft_of(SessionState.COMPENSATING), work)
    assert isinstance(move, Send)
    assert (move.call.body, move.call.outcome, move.call.attempts) == (b'{"by":1}', Outcome.UNKNOWN, 2)


@pytest.mark.parametrize(
    ("session", "entry", "expected"),
    [
        (SessionState.HALTED, UndoState.PENDING, SessionState.HALTED),
        (SessionState.HALTED, UndoState.RUNNING, SessionState.HALTED),
        (SessionState.COMPENSATED, UndoState.COMPENSATED, SessionState.COMPENSATED),
        (SessionState.RESOLVED, UndoState.PENDING, SessionState.RESOLVED),
        (SessionState.FAILED, UndoState.SKIPPED, SessionState.COMPENSATED),
        (SessionState.COMPENSATING, UndoState.SKIPPED, SessionState.COMPENSATED),
        (SessionState.COMPENSATING, UndoState.COMPENSATED, SessionState.COMPENSATED),
    ],
)
def test_begin_sends_nothing_when_there_is_nothing_left_to_undo(session: SessionState, entry: UndoState, expected: SessionState) -> None:
    """A call that became due and lost its point ends; where it was the last, so does the session."""
    work = due_work()
    item = unwinding.StackItem(entry=new_entry(entry), effect=work.item.effect)
    draft = draft_of(session)
    move = unwinding.begin(draft, Undoing(call=work.call, item=item, below=None, has_failed_entries=False))
    changes = draft.changes()
    assert isinstance(move, Rest)
    assert changes.after.state is expected
    assert [change.after.due_at for change in changes.calls] == [None]
    assert (changes.effects, changes.undo_entries) == ((), ())


def test_begin_counts_an_interruption_when_an_attempt_has_no_end() -> None:
    """An attempt whose end nobody recorded may have been processed: it is counted as such and sent again."""
    draft = draft_of(SessionState.COMPENSATING)
    move = unwinding.begin(draft, sent_work())
    assert isinstance(move, Send)
    assert (move.call.attempts, move.call.interrupted, move.call.may_be_processing, move.call.failures) == (2, 1, True, 0)


def test_begin_halts_as_poison_when_attempts_never_end() -> None:
    """A call that takes its worker along every time is given to a person."""
    draft = draft_of(SessionState.COMPENSATING)
    work = sent_work(attempts=POISON_AFTER_INTERRUPTED, interrupted=POISON_AFTER_INTERRUPTED - 1)
    assert isinstance(unwinding.begin(draft, work), Rest)
    assert (draft.session.state, draft.session.halt_reason) == (SessionState.HALTED, HaltReason.POISON)


@pytest.mark.parametrize("entry", [UndoState.PENDING, UndoState.RUNNING])
def test_begin_halts_as_poison_when_the_descriptor_cannot_be_read(entry: UndoState) -> None:
    """Nothing is sent for an undo of which nobody knows what it was to be; only one that was begun has failed."""
    work = (due_work if entry is UndoState.PENDING else sent_work)(UNREADABLE)
    draft = draft_of(SessionState.COMPENSATING)
    assert isinstance(unwinding.begin(draft, work), Rest)
    changes = draft.changes()
    assert (changes.after.state, changes.after.halt_reason) == (SessionState.HALTED, HaltReason.POISON)
    assert [change.after.state for change in changes.undo_entries] == ([] if entry is UndoState.PENDING else [UndoState.FAILED])
    assert [change.after.due_at for change in changes.calls] == [None]


def test_entry_above_is_done_when_the_one_below_cannot_be_read() -> None:
    """What an endpoint has answered is written down before the next one is looked at."""
    below = unwinding.StackItem(entry=new_entry(step=0, compensation=UNREADABLE), effect=new_effect(EffectState.COMMITTED, step=0))
    draft = draft_of(SessionState.COMPENSATING)
    assert isinstance(unwinding.record(draft, replace(sent_work(), below=below), DONE, 0.5), Rest)
    changes = draft.changes()
    assert [change.after.state for change in changes.undo_entries] == [UndoState.COMPENSATED]
    assert (changes.after.state, changes.after.halt_reason) == (SessionState.HALTED, HaltReason.POISON)


def test_begin_halts_as_poison_when_the_newest_registration_cannot_be_read() -> None:
    """Where the tool's undo is registered now nobody knows, and the old place may be the wrong one; nothing is sent there."""
    work = due_work()
    draft = draft_of(SessionState.FAILED)
    move = unwinding.begin(draft, replace(work, item=replace(work.item, newest=UNREADABLE)))
    assert isinstance(move, Rest)
    assert draft.session.halt_reason is HaltReason.POISON


SETTLE_MS = 60_000
# What is known of the call, whether its undo was sent before, seconds since the session failed -> seconds that it is waited for.
SETTLES: list[tuple[EffectState, bool, float, float | None]] = [
    (EffectState.UNKNOWN, False, 0, 60),
    (EffectState.UNKNOWN, False, 59.999, 0.001),
    (EffectState.UNKNOWN, False, 60, None),
    (EffectState.UNKNOWN, False, 86_400 - 1, None),
    (EffectState.UNKNOWN, True, 0, None),
    (EffectState.COMMITTED, False, 0, None),
]


@pytest.mark.parametrize(("state", "was_sent", "seconds", "waits"), SETTLES)
@pytest.mark.parametrize("session", [SessionState.FAILED, SessionState.COMPENSATING])
def test_begin_waits_when_the_call_may_still_be_running(
    session: SessionState, state: EffectState, was_sent: bool, seconds: float, waits: float | None
) -> None:
    """The undo of a call of unknown outcome is begun no sooner than its descriptor says, and has all of its own time after that."""
    work = due_work(new_compensation(settle_ms=SETTLE_MS))
    once = {"url": UNDO_URL, "body": b"{}", "outcome": Outcome.UNKNOWN, "attempts": 1, "first_sent_at": START}
    sent: dict[str, Any] = once if was_sent else {}
    work = replace(work, call=new_call(**sent), item=replace(work.item, effect=new_effect(state)))
    draft = draft_of(session, seconds, failed_at=START)
    move = unwinding.begin(draft, work)
    if waits is None:
        assert isinstance(move, Send)
        return
    assert isinstance(move, Wait)
    assert move.seconds == pytest.approx(waits)
    assert (move.call.due_at, move.call.attempts) == (START + timedelta(seconds=60), 0)
    assert move.call.deadline_at == START + timedelta(seconds=60, milliseconds=RetryPolicy().deadline_ms)
    assert (draft.session.state, draft.changes().entries, draft.changes().undo_entries) == (session, (), ())


def test_next_entry_waits_when_its_call_may_still_be_running() -> None:
    """Moving on within a session waits as well: entries further down come after it."""
    entry = new_entry(step=0, compensation=new_compensation(settle_ms=SETTLE_MS))
    below = unwinding.StackItem(entry=entry, effect=new_effect(EffectState.UNKNOWN, step=0))
    draft = draft_of(SessionState.COMPENSATING, failed_at=START)
    move = unwinding.record(draft, replace(sent_work(), below=below), DONE, 0.5)
    assert isinstance(move, Wait)
    assert (move.call.step_index, move.seconds) == (0, 60)


def test_unwind_is_halted_when_an_operator_orders_it_before_the_call_has_settled() -> None:
    """A late effect, or an order, is not waited for."""
    work = due_work(new_compensation(settle_ms=SETTLE_MS))
    work = replace(work, item=replace(work.item, effect=new_effect(EffectState.UNKNOWN)))
    for mark, reason in (("late_effect", HaltReason.LATE_EFFECT), ("halt_ordered", HaltReason.OPERATOR)):
        draft = draft_of(SessionState.COMPENSATING, failed_at=START, **{mark: True})
        assert isinstance(unwinding.begin(draft, work), Rest)
        assert draft.session.halt_reason is reason


@pytest.mark.parametrize(("seconds", "is_over"), [(86_399.999, False), (86_400, True), (90_000, True)])
def test_begin_gives_up_when_the_deadline_is_reached(seconds: float, is_over: bool) -> None:
    """The deadline is the first moment at which nothing is sent any more."""
    draft = draft_of(SessionState.COMPENSATING, seconds)
    move = unwinding.begin(draft, sent_work(is_attempt_open=False))
    assert isinstance(move, Rest) is is_over
    if is_over:
        assert draft.session.halt_reason is HaltReason.DEADLINE_EXCEEDED
        assert EntryKind.COMPENSATION_FAILED in {entry.kind for entry in draft.changes().entries}


# How the session ends after an answer that is final for its only entry: independent or not, late effect or not.
ENDINGS: list[tuple[Attempt, bool, bool, SessionState, HaltReason | None, UndoState]] = [
    (DONE, False, False, SessionState.COMPENSATED, None, UndoState.COMPENSATED),
    (DONE, True, False, SessionState.COMPENSATED, None, UndoState.COMPENSATED),
    (DONE, False, True, SessionState.HALTED, HaltReason.LATE_EFFECT, UndoState.COMPENSATED),
    (answered(400), False, False, SessionState.HALTED, HaltReason.COMPENSATION_FAILED, UndoState.FAILED),
    (answered(400), True, False, SessionState.HALTED, HaltReason.COMPENSATION_FAILED, UndoState.FAILED),
    (answered(303), False, False, SessionState.HALTED, HaltReason.COMPENSATION_FAILED, UndoState.FAILED),
    (
        broken(Failure.EGRESS_DENIED, was_sent=False),
        False,
        False,
        SessionState.HALTED,
        HaltReason.EGRESS_DENIED,
        UndoState.FAILED,
    ),
]


@pytest.mark.parametrize(("attempt", "independent", "late", "state", "reason", "entry"), ENDINGS)
def test_record_ends_the_session_when_the_last_entry_is_settled(  # noqa: PLR0913, PLR0917 (the columns of the table)
    attempt: Attempt,
    independent: bool,
    late: bool,
    state: SessionState,
    reason: HaltReason | None,
    entry: UndoState,
) -> None:
    """Undone, or halted with the reason; never anything between."""
    draft = draft_of(SessionState.COMPENSATING, late_effect=late, clean=not late)
    move = unwinding.record(draft, sent_work(new_compensation(independent=independent)), attempt, 0.5)
    changes = draft.changes()
    assert isinstance(move, Rest)
    assert (changes.after.state, changes.after.halt_reason, changes.undo_entries[0].after.state) == (state, reason, entry)
    assert changes.calls[0].after.due_at is None


@pytest.mark.parametrize("independent", [False, True])
def test_record_goes_past_a_failed_entry_when_it_is_independent_only(independent: bool) -> None:
    """A failure stops the unwind with the rest pending, unless the descriptor says that the rest does not depend on it."""
    below = unwinding.StackItem(entry=new_entry(), effect=new_effect(EffectState.COMMITTED))
    upper = sent_work(new_compensation(independent=independent))
    item = unwinding.StackItem(entry=new_entry(UndoState.RUNNING, 2, compensation=upper.item.entry.compensation), effect=upper.item.effect)
    draft = draft_of(SessionState.COMPENSATING)
    move = unwinding.record(draft, Undoing(call=upper.call, item=item, below=below, has_failed_entries=False), answered(400), 0.5)
    states = {change.after.stack_position: change.after.state for change in draft.changes().undo_entries}
    if independent:
        assert isinstance(move, Send)
        assert states == {2: UndoState.FAILED, 1: UndoState.RUNNING}
        return
    assert isinstance(move, Rest)
    assert states == {2: UndoState.FAILED}


def test_record_yields_the_next_entry_when_the_worker_may_not_go_on() -> None:
    """The next entry becomes due for whoever comes next, and is neither frozen nor counted."""
    below = unwinding.StackItem(entry=new_entry(step=1), effect=new_effect(EffectState.COMMITTED))
    upper = sent_work()
    item = unwinding.StackItem(entry=new_entry(UndoState.RUNNING, 2), effect=upper.item.effect)
    work = Undoing(call=upper.call, item=item, below=below, has_failed_entries=False, may_go_on=False)
    draft = draft_of(SessionState.COMPENSATING)
    move = unwinding.record(draft, work, DONE, 0.5)
    assert isinstance(move, Yield)
    assert (move.call.step_index, move.call.attempts, move.call.is_attempt_open, move.call.first_sent_at) == (1, 0, False, None)
    assert move.call.due_at == draft.now
    assert [change.after.stack_position for change in draft.changes().undo_entries] == [2]


# Where the entry below was told to go, where the newest registration says, and the host and port that its call will count for.
DESTINATIONS: list[tuple[str, str | None, str]] = [
    ("https://ledger.example/undo", None, "ledger.example:443"),
    ("http://ledger.example/undo", None, "ledger.example:80"),
    ("https://ledger.example:8443/undo?a=1", None, "ledger.example:8443"),
    ("https://ledger.example/undo", "http://moved.example:8080/undo", "moved.example:8080"),
]


@pytest.mark.parametrize(("url", "newest", "destination"), DESTINATIONS)
def test_next_destination_is_where_the_entry_below_goes_when_it_is_sent(url: str, newest: str | None, destination: str) -> None:
    """What a worker asks for room at is the place that the next call is written with when it goes on."""
    below = unwinding.StackItem(
        entry=new_entry(step=1, compensation=new_compensation(url=url)),
        effect=new_effect(EffectState.COMMITTED),
        newest=None if newest is None else new_compensation(url=newest),
    )
    upper = sent_work()
    item = unwinding.StackItem(entry=new_entry(UndoState.RUNNING, 2), effect=upper.item.effect)
    work = Undoing(call=upper.call, item=item, below=below, has_failed_entries=False)
    assert unwinding.next_destination(work) == destination
    move = unwinding.record(draft_of(SessionState.COMPENSATING), work, DONE, 0.5)
    assert isinstance(move, Send)
    assert move.call.destination == destination


def test_next_destination_is_where_the_entry_below_was_sent_when_it_is_sent_again() -> None:
    """An address is frozen with the bytes: what a person has retried goes where it went before, or where that person said."""
    sent = {"url": "https://moved.example:8443/undo", "body": b"{}", "outcome": Outcome.COMMITTED, "attempts": 1, "first_sent_at": START}
    call = new_call(1, destination="moved.example:8443", **sent)
    below = unwinding.StackItem(
        entry=new_entry(step=1), effect=new_effect(EffectState.COMPENSATION_FAILED), call=call, newest=new_compensation(url=UNDO_URL)
    )
    upper = sent_work()
    item = unwinding.StackItem(entry=new_entry(UndoState.RUNNING, 2), effect=upper.item.effect)
    work = Undoing(call=upper.call, item=item, below=below, has_failed_entries=False)
    assert unwinding.next_destination(work) == "moved.example:8443"
    move = unwinding.record(draft_of(SessionState.COMPENSATING), work, DONE, 0.5)
    assert isinstance(move, Send)
    assert (move.call.url, move.call.destination, move.call.attempts) == ("https://moved.example:8443/undo", "moved.example:8443", 2)


# The failed entries, and whether each is independent; between the undo of step 5 and the pending one of step 2 -> whether that may begin.
BETWEEN: list[tuple[dict[int, bool], bool]] = [
    ({}, True),
    ({3: True}, True),
    ({3: False}, False),
    ({4: True, 3: False}, False),
    ({4: True, 3: True}, True),
    ({7: False, 1: False}, True),
]


@pytest.mark.parametrize(("failed", "may_begin"), BETWEEN)
def test_next_below_is_held_up_when_one_between_has_failed(failed: dict[int, bool], may_begin: bool) -> None:
    """Newest first: what failed below an undo that was retried is older than nothing that may be begun now."""

    def item(step: int, state: UndoState, *, independent: bool = False) -> unwinding.StackItem:
        entry = new_entry(state, step, compensation=new_compensation(independent=independent))
        return unwinding.StackItem(entry=entry, effect=new_effect(EffectState.COMMITTED, step))

    upper, pending = item(5, UndoState.RUNNING), item(2, UndoState.PENDING)
    failures = [item(step, UndoState.FAILED, independent=independent) for step, independent in failed.items()]
    assert unwinding.next_below(upper, pending, failures) is (pending if may_begin else None)
    assert unwinding.next_below(upper, None, failures) is None


def test_next_destination_is_none_when_nothing_is_pending_below() -> None:
    """The last entry needs no room for another."""
    assert unwinding.next_destination(sent_work()) is None


# Budget of 2 retries, waits of 100, 200 ms at most, jitter's die at its middle.
RETRIES: list[tuple[int, Attempt, float | None]] = [
    (0, answered(500), 0.05),
    (1, answered(500), 0.1),
    (2, answered(500), None),
    (0, answered(503, retry_after="20"), 20.0),
    (0, answered(503, retry_after="7200"), 3_600.0),
    (0, answered(503, retry_after="rubbish"), 0.05),
    (1, broken(Failure.CONNECT, was_sent=False), 0.1),
    (2, broken(Failure.TIMEOUT, was_sent=True), None),
]


@pytest.mark.parametrize(("failures", "attempt", "seconds"), RETRIES)
def test_record_waits_or_gives_up_when_an_attempt_may_be_repeated(failures: int, attempt: Attempt, seconds: float | None) -> None:
    """The budget counts failures; the wait is the longer of the backoff and what the endpoint asked for."""
    work = sent_work(new_compensation(retry=RetryPolicy(max_retries=2)), failures=failures, attempts=failures + 1)
    draft = draft_of(SessionState.COMPENSATING)
    move = unwinding.record(draft, work, attempt, 0.5)
    if seconds is None:
        assert isinstance(move, Rest)
        assert draft.session.halt_reason is HaltReason.COMPENSATION_FAILED
        return
    assert isinstance(move, Wait)
    assert move.seconds == pytest.approx(seconds)
    assert move.call.due_at == START + timedelta(seconds=seconds)
    assert (move.call.failures, move.call.is_attempt_open) == (failures + 1, False)


def test_record_never_waits_past_the_deadline_when_the_endpoint_asks_for_more() -> None:
    """The wait is cut at the deadline, where the entry is given up."""
    draft = draft_of(SessionState.COMPENSATING)
    move = unwinding.record(draft, sent_work(deadline_at=START + timedelta(seconds=5)), answered(503, retry_after="60"), 0.5)
    assert isinstance(move, Wait)
    assert move.seconds == 5


ACCEPTED: list[tuple[str | None, str | None]] = [
    (None, None),
    ("/jobs/7", "https://ledger.example/jobs/7"),
    ("jobs/7#now", "https://ledger.example/jobs/7"),
    ("https://elsewhere.example/7", "https://elsewhere.example/7"),
    ("http://[", "http://["),
]


@pytest.mark.parametrize(("location", "poll_url"), ACCEPTED)
def test_record_asks_on_when_an_undo_is_only_accepted(location: str | None, poll_url: str | None) -> None:
    """202 settles nothing and uses up no retry: its Location is asked, or the same bytes are sent again."""
    draft = draft_of(SessionState.COMPENSATING)
    move = unwinding.record(draft, sent_work(), answered(202, location=location), 0.5)
    assert isinstance(move, Wait)
    assert (move.call.poll_url, move.call.failures, move.call.attempts) == (poll_url, 0, 1)
    assert draft.changes().undo_entries == ()
    again = draft_of(SessionState.COMPENSATING)
    sent = unwinding.begin(again, sent_work(is_attempt_open=False, poll_url=poll_url))
    assert isinstance(sent, Send)
    assert sent.is_poll is (poll_url is not None)
    assert (sent.call.attempts, sent.call.polls) == ((1, 1) if poll_url else (2, 0))


# A call that asks a 202's Location, or its own URL; what is answered; what is told of it.
TOLD: list[tuple[str | None, Attempt, str | None]] = [
    (UNDO_URL, answered(500), "asking the Location of a 202: http 500"),
    (UNDO_URL, answered(404), "asking the Location of a 202: http 404"),
    (UNDO_URL, answered(202), "asking the Location of a 202: http 202"),
    (UNDO_URL, broken(Failure.TIMEOUT, was_sent=True), "asking the Location of a 202: timeout: it broke"),
    (UNDO_URL, DONE, None),
    (None, answered(500), "http 500"),
    (None, answered(202), "http 202"),
]


@pytest.mark.parametrize(("poll_url", "attempt", "told"), TOLD)
def test_last_error_says_what_was_asked_when_it_was_the_location(poll_url: str | None, attempt: Attempt, told: str | None) -> None:
    """Whoever reads `http 404` would look for it at the undo's own URL, which answered 202."""
    draft = draft_of(SessionState.COMPENSATING)
    unwinding.record(draft, sent_work(poll_url=poll_url, polls=1 if poll_url else 0), attempt, 0.5)
    assert draft.changes().calls[0].after.last_error == told


def test_begin_keeps_interruptions_within_what_was_counted_when_polls_are_cut_off() -> None:
    """A poll that was cut off is an interruption of a call with one attempt: the table's bound must count polls as well."""
    work = sent_work(poll_url=UNDO_URL, attempts=1, polls=1, interrupted=1)
    move = unwinding.begin(draft_of(SessionState.COMPENSATING), work)
    assert isinstance(move, Send)
    assert (move.call.attempts, move.call.polls, move.call.interrupted) == (1, 2, 2)


def test_conflict_is_waited_out_when_an_earlier_attempt_may_be_processing() -> None:
    """409 after an attempt of unknown outcome means that the endpoint is busy with that one; first of all it is a no."""
    busy = unwinding.record(draft_of(SessionState.COMPENSATING), sent_work(may_be_processing=True), answered(409), 0.5)
    refused = unwinding.record(draft_of(SessionState.COMPENSATING), sent_work(), answered(409), 0.5)
    assert isinstance(busy, Wait)
    assert isinstance(refused, Rest)


def test_start_ends_at_once_when_nothing_is_pending() -> None:
    """A run without an undo is compensated by doing nothing, and says so."""
    draft = draft_of(SessionState.FAILED)
    unwinding.start(draft, None)
    assert draft.session.state is SessionState.COMPENSATED
    assert [entry.kind for entry in draft.changes().entries] == [EntryKind.UNWOUND]


def test_start_makes_a_call_due_when_an_entry_is_pending() -> None:
    """The newest entry is due now, unsent, until its own deadline."""
    draft = draft_of(SessionState.FAILED)
    compensation = new_compensation(url="http://ledger.example:8080/u", retry=RetryPolicy(deadline_ms=5_000))
    entry = new_entry(step=3, compensation=compensation)
    unwinding.start(draft, unwinding.StackItem(entry=entry, effect=new_effect(EffectState.COMMITTED, 3)))
    (change,) = draft.changes().calls
    call = change.after
    assert (str(call.call_id), call.step_index, call.destination) == (str(entry.undo_id), 3, "ledger.example:8080")
    assert (call.due_at, call.deadline_at, call.attempts, call.body) == (START, START + timedelta(seconds=5), 0, None)
    assert draft.session.state is SessionState.FAILED
