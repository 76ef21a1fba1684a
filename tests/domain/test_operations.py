"""An operator's orders, one by one, and what they lead to. Must not test who may give them, or how they race with a worker."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from app.domain import operations
from app.domain.egress import EgressPolicy
from app.domain.errors import Conflict, Invalid
from app.domain.json_text import parse
from app.domain.model import (
    EffectState,
    EntryKind,
    HaltReason,
    OnUnknown,
    Outcome,
    Reversibility,
    SessionState,
    UndoState,
)
from app.domain.operations import Retry, Settle, Skip, Stack
from app.domain.outcomes import FailReport, Reported
from app.domain.retry import Attempt, Failure
from app.domain.sending import Move, Rest, Send
from app.domain.states import UNWINDING_STATES
from app.domain.tools import ApprovalRule, Definition
from app.domain.unwinding import StackItem
from tests.domain.acts import UNDOABLE, Inline, answer, ask, begin, commit, due_at_step, fail_effect, fail_run, keep, run, send
from tests.domain.world import (
    AGREEMENT,
    OPERATOR,
    START,
    UNDO_URL,
    WitnessedDraft,
    World,
    answered,
    broken,
    code_of,
    new_action,
    new_call,
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

DONE = answered(200)
NO = answered(400)
BUSY = answered(503)
ACCEPTED = answered(202, location="/jobs/7")
LOST = broken(Failure.TIMEOUT, was_sent=True)
MOVED_URL = "https://moved.example:8443/undo"
FREE = Definition(reversibility=R.IRREVERSIBLE, approval=ApprovalRule(is_required=False))
"""Irreversible, and nobody has to approve it."""


def undoable(**changes: Any) -> Inline:
    """Make a call with an undo of its own kind."""
    return Inline(reversibility=R.COMPENSATABLE, compensation=new_compensation(**changes))


INDEPENDENT = undoable(independent=True)
UNDONE_BY_RESULT = undoable(args=b'{"credit":{"$ref":"result#/credit_id"}}')
ASKED_WHEN_UNKNOWN = undoable(on_unknown=OnUnknown.ESCALATE)


def failed(*calls: Inline | Definition) -> World:
    """Make a session that did the calls, and failed."""
    world = run(World(seed=1), *calls)
    fail_run(world)
    return world


def halted(*calls: Inline | Definition) -> World:
    """Make a session that failed, and whose newest undo was refused by its endpoint."""
    world = failed(*(calls or (UNDOABLE, UNDOABLE)))
    send(world, world.session.last_step, NO)
    assert world.session.state is S.HALTED
    return world


def order(world: World, decide: Callable[[WitnessedDraft], object]) -> object:
    """Let the operator order something, and keep what is written."""
    draft = world.draft(OPERATOR)
    answer_of_order = decide(draft)
    keep(world, draft)
    return answer_of_order


def retry(world: World, step: int, url: str | None = None) -> object:
    """Order that an undo is tried again."""
    stack, item = world.unsettled(), world.item(step)
    return order(world, lambda draft: operations.retry(draft, item, stack, Retry(reason="mended", url=url), EgressPolicy()))


def skip(world: World, step: int, *, by_hand: bool = False) -> object:
    """Order that an undo is taken out."""
    found = world.reported(step)
    return order(world, lambda draft: operations.skip(draft, found, Skip(reason="seen to", by_hand=by_hand)))


def unwind(world: World) -> object:
    """Order that the unwind goes on."""
    stack = world.unsettled()
    return order(world, lambda draft: operations.unwind(draft, stack, "go on"))


def halt(world: World) -> object:
    """Order that the unwind stops."""
    due = world.due_undo()
    running = None if due is None else world.item(due.step_index)
    is_in_flight = bool(world.due_actions())
    return order(world, lambda draft: operations.halt(draft, running, "wait", is_action_in_flight=is_in_flight))


def resolve(world: World) -> object:
    """Order that the session is closed."""
    return order(world, lambda draft: operations.resolve(draft, "let it be"))


def settle(world: World, step: int, outcome: Outcome, result: bytes | None = None) -> object:
    """Say what is known of a call."""
    found = world.reported(step)
    irreversible = [effect for effect in world.effects.values() if effect.reversibility is R.IRREVERSIBLE]
    said = Settle(reason="looked it up", outcome=outcome, result=result)
    return order(world, lambda draft: operations.settle(draft, found, irreversible, said))


def told_of(world: World, kind: EntryKind) -> Any:
    """Return the body of the newest entry of a kind."""
    return parse(next(entry for entry in reversed(world.entries) if entry.kind == kind).body)


def states_of(world: World) -> dict[int, UndoState]:
    """Return where each undo stands."""
    return {step: entry.state for step, entry in world.stack.items()}


def seen_as(entry: UndoState, step: int = 1, **changes: Any) -> StackItem:
    """Make an item of the stack that was sent, if its state says so."""
    was_sent = entry not in {U.PENDING, U.SKIPPED}
    sent: dict[str, Any] = {"url": UNDO_URL, "body": b"{}", "outcome": Outcome.COMMITTED, "attempts": 1, "first_sent_at": START}
    call = new_call(step, due_at=None, **(sent if was_sent else {}))
    effect = new_effect(E.COMMITTED if entry is U.PENDING else min(AGREEMENT[entry]), step)
    return StackItem(entry=new_entry(entry, step, compensation=new_compensation(**changes)), effect=effect, call=call)


Order = Callable[[WitnessedDraft, UndoState], object]


def retry_one(draft: WitnessedDraft, entry: UndoState) -> object:
    """Order a retry of the only undo."""
    item = seen_as(entry)
    stack = Stack(failed=[item] if entry is U.FAILED else [], top=item if entry is U.PENDING else None)
    return operations.retry(draft, item, stack, Retry(reason="mended"), EgressPolicy())


def skip_one(draft: WitnessedDraft, entry: UndoState) -> object:
    """Order that the only undo is taken out."""
    item = seen_as(entry)
    return operations.skip(draft, Reported(effect=item.effect, undo_entry=item.entry), Skip(reason="seen to"))


def undo_one_by_hand(draft: WitnessedDraft, entry: UndoState) -> object:
    """Say that the only effect was undone by hand."""
    item = seen_as(entry)
    return operations.skip(draft, Reported(effect=item.effect, undo_entry=item.entry), Skip(reason="seen to", by_hand=True))


def unwind_one(draft: WitnessedDraft, entry: UndoState) -> object:
    """Order that the unwind goes on with the only undo."""
    item = seen_as(entry)
    return operations.unwind(draft, Stack(failed=[item] if entry is U.FAILED else [], top=item if entry is U.PENDING else None), "go on")


def halt_one(draft: WitnessedDraft, entry: UndoState) -> object:
    """Order that the unwind stops at the only undo."""
    return operations.halt(draft, seen_as(entry), "wait", is_action_in_flight=False)


def resolve_one(draft: WitnessedDraft, entry: UndoState) -> object:
    """Order that the session is closed."""
    del entry
    return operations.resolve(draft, "let it be")


HARMLESS = {S.COMPENSATING, S.COMPENSATED}  # where the session was halted before: what was ordered then may be ordered again
NOT_HALTED = "session_not_halted"
# An order and the state of the only undo -> where it is carried out, where it changes nothing, and the refusal everywhere else.
ORDERS: list[tuple[Order, UndoState, set[SessionState], set[SessionState], str]] = [
    (retry_one, U.PENDING, {S.HALTED}, set(HARMLESS), NOT_HALTED),
    (retry_one, U.FAILED, {S.HALTED}, set(), NOT_HALTED),
    (skip_one, U.PENDING, {S.HALTED}, set(), NOT_HALTED),
    (skip_one, U.FAILED, {S.HALTED}, set(), NOT_HALTED),
    (undo_one_by_hand, U.PENDING, {S.HALTED}, set(), NOT_HALTED),
    (undo_one_by_hand, U.FAILED, {S.HALTED}, set(), NOT_HALTED),
    (unwind_one, U.PENDING, {S.HALTED}, set(HARMLESS), NOT_HALTED),
    (unwind_one, U.FAILED, {S.HALTED}, set(HARMLESS), NOT_HALTED),
    (unwind_one, U.COMPENSATED, {S.HALTED}, set(HARMLESS), NOT_HALTED),
    (halt_one, U.PENDING, set(UNWINDING_STATES), {S.HALTED}, "session_not_unwinding"),
    (resolve_one, U.PENDING, {S.HALTED}, {S.RESOLVED}, NOT_HALTED),
]


@pytest.mark.parametrize(("give", "entry", "carried_out", "harmless", "code"), ORDERS)
@pytest.mark.parametrize("state", S)
def test_order_is_carried_out_harmless_or_refused_when_the_session_is_in_a_state(  # noqa: PLR0913, PLR0917 (the columns of the table)
    give: Order, entry: UndoState, carried_out: set[SessionState], harmless: set[SessionState], code: str, state: SessionState
) -> None:
    """An operator owns what is halted; what was ordered already, or is under way, is no error; everything else is refused."""
    draft = World(seed=1, session=new_session(state, clean=False, halted_at=START)).draft(OPERATOR)
    refusal = give(draft, entry)
    assert draft.is_empty is (state not in carried_out)
    if state in carried_out | harmless:
        assert refusal is None
        return
    assert isinstance(refusal, Conflict)
    assert (refusal.code, refusal.facts["state"]) == (code, state)


@pytest.mark.parametrize("give", [retry_one, unwind_one])
@pytest.mark.parametrize("state", sorted(HARMLESS))
def test_order_is_refused_when_the_unwind_goes_on_by_itself(give: Order, state: SessionState) -> None:
    """Nobody has ordered it before, so this is no repeat: an order that changes nothing must not look carried out."""
    draft = World(seed=1, session=new_session(state, halted_at=None)).draft(OPERATOR)
    assert code_of(give(draft, U.PENDING)) == NOT_HALTED
    assert draft.is_empty


@pytest.mark.parametrize("give", [retry_one, skip_one, undo_one_by_hand])
@pytest.mark.parametrize("entry", [U.COMPENSATED, U.SKIPPED])
def test_order_is_refused_when_the_undo_is_settled(give: Order, entry: UndoState) -> None:
    """What is undone, or was not applied, is nothing to try again or to take out."""
    draft = World(seed=1, session=new_session(S.HALTED)).draft(OPERATOR)
    refusal = give(draft, entry)
    assert isinstance(refusal, Conflict)
    assert (refusal.code, refusal.facts["state"]) == ("undo_settled", entry)
    assert draft.is_empty


# The stack, newest first: state, independent -> which of them may be retried now.
P, F, C = U.PENDING, U.FAILED, U.COMPENSATED
TURNS: list[tuple[list[tuple[UndoState, bool]], list[bool]]] = [
    ([(P, False), (P, False)], [True, False]),
    ([(F, False), (P, False)], [True, False]),
    ([(F, True), (P, False)], [True, True]),
    ([(P, True), (P, True)], [True, False]),
    ([(C, False), (F, False), (P, False)], [False, True, False]),
    ([(F, True), (F, True), (F, False), (P, False)], [True, True, True, False]),
    ([(F, False), (F, True), (P, False)], [True, False, False]),
    ([(F, True), (P, False), (F, True), (P, False)], [True, True, False, False]),
]


@pytest.mark.parametrize(("stack", "may"), TURNS)
def test_undo_is_retried_when_its_turn_may_have_come(stack: list[tuple[UndoState, bool]], may: list[bool]) -> None:
    """Newest first, for people too: below something that is not settled nothing is tried, unless that failed and was independent."""
    steps = range(len(stack), 0, -1)
    items = {step: seen_as(state, step, independent=independent) for step, (state, independent) in zip(steps, stack, strict=True)}
    failed_items = [item for item in items.values() if item.entry.state is F]
    top = next((item for item in items.values() if item.entry.state is P), None)
    for step, is_next in zip(steps, may, strict=True):
        draft = World(seed=1, session=new_session(S.HALTED)).draft(OPERATOR)
        refusal = operations.retry(draft, items[step], Stack(failed=failed_items, top=top), Retry(reason="mended"), EgressPolicy())
        assert draft.is_empty is not is_next, step
        if is_next:
            assert refusal is None
            assert [change.after.step_index for change in draft.changes().calls] == [step]
            continue
        assert isinstance(refusal, Conflict)
        if items[step].entry.state is not C:
            newest = next(item for item in items.values() if item.entry.state in {P, F})
            assert (refusal.code, refusal.facts["next_undo_id"]) == ("undo_not_next", str(newest.entry.undo_id))


def test_retry_fills_the_budget_and_sends_the_same_again_when_an_undo_has_failed() -> None:
    """Same key, same bytes, fresh budget and deadline; the journal tells why, and that it begins anew."""
    world = failed(UNDOABLE, undoable(args=b'{"amount":{"$ref":"payload#/amount"}}'))
    for attempt in (BUSY, LOST, NO):
        send(world, 2, attempt)
    before = world.calls[world.stack[2].undo_id]
    assert (world.session.halt_reason, before.failures) == (HaltReason.COMPENSATION_FAILED, 2)
    world.now += timedelta(hours=1)
    count = len(world.entries)
    assert retry(world, 2) is None
    call = due_at_step(world, 2)
    assert (call.due_at, call.deadline_at) == (world.now, world.now + timedelta(days=1))
    assert (call.failures, call.interrupted, call.attempts, call.may_be_processing) == (0, 0, 3, True)
    assert (call.url, call.body, call.outcome, call.first_sent_at) == (before.url, before.body, before.outcome, before.first_sent_at)
    assert (world.session.state, world.session.halt_reason, states_of(world)) == (S.COMPENSATING, None, {1: P, 2: P})
    told = told_of(world, K.RETRIED)
    assert told == {
        "undo_id": str(world.stack[2].undo_id),
        "reason": "mended",
        "was": "compensation_failed",
        "url": None,
        "attempts_before": 3,
        "key_may_be_forgotten": False,
    }
    move = begin(world, call)
    assert isinstance(move, Send)
    assert (move.call.body, move.call.attempts, move.call.idempotency_key) == (before.body, 4, before.idempotency_key)
    assert [entry.kind for entry in world.entries[count:]] == [K.RETRIED, K.COMPENSATING]
    assert told_of(world, K.COMPENSATING)["attempts_before"] == 3
    answer(world, call, DONE)
    send_on(world)
    assert (world.session.state, world.session.clean) == (S.COMPENSATED, True)
    world.verify()


def send_on(world: World, attempt: Attempt = DONE) -> None:
    """Send and answer until the session rests, which takes two acts for each undo."""
    for _ in range(2 * len(world.stack) + 1):
        call = world.due_undo()
        if call is None:
            return
        if call.is_attempt_open:
            answer(world, call, attempt)
        else:
            begin(world, call)
    raise AssertionError("the unwind does not come to an end")


def test_retry_asks_no_location_again_when_the_undo_was_accepted_and_never_finished() -> None:
    """What the old Location says has been waited for; the same bytes are sent again."""
    world = failed(undoable())
    send(world, 1, ACCEPTED)
    send(world, 1, answered(404))
    assert world.session.state is S.HALTED
    retry(world, 1)
    move = begin(world, due_at_step(world, 1))
    assert isinstance(move, Send)
    assert (move.is_poll, move.call.attempts, move.call.may_be_processing) == (False, 2, True)


def test_retried_undo_stays_pending_when_its_deadline_comes_before_a_worker() -> None:
    """It was not sent this time, so it has not failed again: the person finds it as it was left."""
    world = halted()
    retry(world, 2)
    count = len(world.entries)
    world.now = due_at_step(world, 2).deadline_at
    assert isinstance(begin(world, due_at_step(world, 2)), Rest)
    assert (world.session.halt_reason, states_of(world)) == (HaltReason.DEADLINE_EXCEEDED, {1: P, 2: P})
    assert [entry.kind for entry in world.entries[count:]] == [K.HALTED]
    retry(world, 2)
    send_on(world)
    assert world.session.state is S.COMPENSATED


def test_retry_sends_what_was_frozen_when_more_is_known_by_now() -> None:
    """An undo that was sent as of unknown outcome goes out as such for ever, whatever a late commit has told since."""
    world = run(World(seed=1))
    ask(world, undoable())
    fail_run(world)
    send(world, 1, NO)
    assert code_of(commit(world, 1)) == "session_not_active"
    retry(world, 1)
    move = begin(world, due_at_step(world, 1))
    assert isinstance(move, Send)
    assert (move.call.outcome, move.call.attempts) == (Outcome.UNKNOWN, 2)


def test_late_commit_is_evidence_when_the_undo_is_to_be_retried() -> None:
    """Between the order and the worker: the undo was sent before, so its effect stays what it is, and a person hears of it."""
    world = World(seed=1)
    ask(world, undoable())
    fail_run(world)
    send(world, 1, NO)
    retry(world, 1)
    assert code_of(commit(world, 1)) == "session_not_active"
    assert (world.effects[1].state, world.effects[1].outcome, world.session.late_effect) == (E.COMPENSATION_FAILED, Outcome.COMMITTED, True)
    assert isinstance(begin(world, due_at_step(world, 1)), Rest)
    assert (world.session.halt_reason, states_of(world)) == (HaltReason.LATE_EFFECT, {1: P})


# Hours since the first attempt -> whether its endpoint may have forgotten the key; the first send is what counts, not the last.
AGES = [(0.0, False), (24.0, False), (24.0 + 1e-6, True), (72.0, True)]


@pytest.mark.parametrize(("hours", "is_flagged"), AGES)
def test_retry_is_flagged_when_the_key_may_be_forgotten(hours: float, is_flagged: bool) -> None:
    """Endpoints commonly keep a key for a day: after that the same bytes could undo twice, and the journal says that it was known."""
    world = halted(UNDOABLE)
    first_sent_at = world.calls[world.stack[1].undo_id].first_sent_at
    assert first_sent_at is not None
    world.now = first_sent_at + timedelta(hours=hours)
    assert operations.may_key_be_forgotten(world.now, world.item(1)) is is_flagged
    retry(world, 1)
    assert told_of(world, K.RETRIED)["key_may_be_forgotten"] is is_flagged


def test_retry_is_not_flagged_when_the_undo_was_never_sent() -> None:
    """No endpoint knows a key that never left."""
    world = failed(UNDOABLE)
    halt(world)
    world.now += timedelta(days=7)
    assert not operations.may_key_be_forgotten(world.now, world.item(1))
    assert not operations.may_key_be_forgotten(world.now, StackItem(entry=world.stack[1], effect=world.effects[1]))
    retry(world, 1)
    assert told_of(world, K.RETRIED)["key_may_be_forgotten"] is False


def test_retry_goes_elsewhere_with_the_same_bytes_when_the_destination_has_moved() -> None:
    """A new address, never new bytes."""
    world = halted()
    before = world.calls[world.stack[2].undo_id]
    assert retry(world, 2, MOVED_URL) is None
    call = due_at_step(world, 2)
    assert (call.url, call.destination, call.body) == (MOVED_URL, "moved.example:8443", before.body)
    assert told_of(world, K.RETRIED)["url"] == MOVED_URL
    move = begin(world, call)
    assert isinstance(move, Send)
    assert (move.call.url, move.call.idempotency_key) == (MOVED_URL, before.idempotency_key)


@pytest.mark.parametrize("url", ["http://127.0.0.1/u", "ftp://a.example/u", "https://u:p@a.example/", "no url"])
def test_retry_is_refused_when_the_new_destination_could_never_be_called(url: str) -> None:
    """A dead address is refused when it is ordered, not discovered by a worker."""
    world = halted()
    session = world.session
    refusal = retry(world, 2, url)
    assert isinstance(refusal, Invalid)
    assert refusal.code == "url_refused"
    assert world.session == session


def test_retry_is_refused_when_an_undo_that_was_never_sent_is_to_go_elsewhere() -> None:
    """It goes to where its tool is registered then, so the new address belongs into the registration."""
    world = failed(UNDOABLE)
    halt(world)
    assert code_of(retry(world, 1, MOVED_URL)) == "undo_not_sent"
    assert world.session.state is S.HALTED
    never_due = StackItem(entry=world.stack[1], effect=world.effects[1])
    draft = world.draft(OPERATOR)
    moved = Retry(reason="moved", url=MOVED_URL)
    assert code_of(operations.retry(draft, never_due, Stack(failed=[], top=never_due), moved, EgressPolicy())) == "undo_not_sent"
    assert draft.is_empty


@pytest.mark.parametrize("is_independent", [False, True])
def test_unwind_stops_at_a_failed_undo_when_a_newer_one_was_retried(is_independent: bool) -> None:
    """What failed below a retried one is still in the way of everything older, unless it was declared independent."""
    world = failed(UNDOABLE, undoable(independent=is_independent), INDEPENDENT)
    begin(world, due_at_step(world, 3))
    answer(world, due_at_step(world, 3), NO)
    answer(world, due_at_step(world, 2), NO)
    if is_independent:
        answer(world, due_at_step(world, 1), NO)
    assert states_of(world) == {1: F if is_independent else P, 2: F, 3: F}
    assert retry(world, 3) is None
    send(world, 3, DONE)
    assert (world.session.state, world.session.halt_reason) == (S.HALTED, HaltReason.COMPENSATION_FAILED)
    assert states_of(world) == {1: F if is_independent else P, 2: F, 3: C}
    assert retry(world, 2) is None
    send(world, 2, DONE)
    if is_independent:
        assert world.session.state is S.HALTED
        retry(world, 1)
        send(world, 1, DONE)
    else:
        answer(world, due_at_step(world, 1), DONE)
    assert (world.session.state, states_of(world)) == (S.COMPENSATED, {1: C, 2: C, 3: C})


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_skip_takes_an_undo_out_when_a_person_has_seen_to_it(is_sent: bool, by_hand: bool) -> None:
    """By hand: it is undone, by other means. Else the effect is let stand. Nothing is sent until the unwind is ordered."""
    world = halted() if is_sent else failed(UNDOABLE, UNDOABLE)
    if not is_sent:
        halt(world)
    effect, count = world.effects[2], len(world.entries)
    assert skip(world, 2, by_hand=by_hand) is None
    entry = world.stack[2]
    assert (world.session.state, world.session.clean, world.due_undo()) == (S.HALTED, False, None)
    assert [(each.kind, each.step, each.actor) for each in world.entries[count:]] == [
        (K.COMPENSATED if by_hand else K.SKIPPED, 2, OPERATOR)
    ]
    told = parse(world.entries[-1].body)
    assert told == {"undo_id": str(entry.undo_id), "reason": "seen to", "by_hand": by_hand}
    if by_hand:
        assert (entry.state, entry.by_hand, entry.compensated_at, world.effects[2].state) == (C, True, world.session.head.at, E.COMPENSATED)
    else:
        assert (entry.state, entry.by_hand, entry.compensated_at, world.effects[2].state) == (U.SKIPPED, False, None, effect.state)
    session = world.session
    assert skip(world, 2, by_hand=by_hand) is None
    assert world.session == session, "a repeat changes nothing"
    assert code_of(skip(world, 2, by_hand=not by_hand)) == "undo_settled"
    unwind(world)
    send_on(world)
    assert (world.session.state, world.session.clean, states_of(world)) == (S.COMPENSATED, False, {1: C, 2: entry.state})


def test_skip_is_taken_anywhere_in_the_stack_when_the_session_is_halted() -> None:
    """A person may have undone an older effect first: that breaks no order of ours."""
    world = halted(UNDOABLE, UNDOABLE, UNDOABLE)
    assert skip(world, 1, by_hand=True) is None
    unwind(world)
    send_on(world)
    assert (world.session.state, states_of(world)) == (S.COMPENSATED, {1: C, 2: C, 3: C})


def test_skip_of_an_undo_is_refused_when_its_effect_was_not_applied() -> None:
    """There was nothing to undo, and nobody has had a hand in it."""
    world = World(seed=1)
    ask(world, UNDOABLE)
    ask(world, UNDOABLE)
    fail_effect(world, 2, FailReport(outcome=Outcome.NOT_APPLIED, error="no"))
    fail_run(world)
    halt(world)
    assert code_of(skip(world, 2)) == "undo_settled"
    assert world.session.clean


def test_unwind_takes_failed_undos_for_pending_when_it_is_ordered() -> None:
    """Everything that is not settled is tried again, newest first, and the journal says which had failed."""
    world = failed(UNDOABLE, UNDOABLE, INDEPENDENT)
    begin(world, due_at_step(world, 3))
    answer(world, due_at_step(world, 3), NO)
    answer(world, due_at_step(world, 2), NO)
    assert states_of(world) == {1: P, 2: F, 3: F}
    count = len(world.entries)
    assert unwind(world) is None
    told = told_of(world, K.UNWIND_ORDERED)
    assert (told["reason"], told["was"]) == ("go on", "compensation_failed")
    assert sorted(told["retried"]) == sorted(str(world.stack[step].undo_id) for step in (2, 3))
    assert (world.session.state, world.session.halt_reason, states_of(world)) == (S.COMPENSATING, None, {1: P, 2: P, 3: P})
    send_on(world)
    assert (world.session.state, world.session.clean) == (S.COMPENSATED, True)
    begun = [entry.step for entry in world.entries[count:] if entry.kind == K.COMPENSATING]
    assert begun == [3, 2, 1]


def test_unwind_goes_past_the_pivot_when_an_operator_orders_it() -> None:
    """Automation undoes nothing past the pivot; a person may. What is irreversible stands, so it is not clean."""
    world = failed(UNDOABLE, FREE)
    assert (world.session.halt_reason, world.session.pivoted) == (HaltReason.FAILED_AFTER_PIVOT, True)
    unwind(world)
    assert told_of(world, K.UNWIND_ORDERED)["was"] == "failed_after_pivot"
    send_on(world)
    assert (world.session.state, world.session.clean, world.session.pivoted) == (S.COMPENSATED, False, True)
    assert [effect.state for effect in world.effects.values()] == [E.COMPENSATED, E.COMMITTED]


def test_unwind_ends_the_session_when_nothing_is_left_to_undo() -> None:
    """The last skip leaves the session with the person, who then has it ended."""
    world = halted(UNDOABLE)
    skip(world, 1)
    assert unwind(world) is None
    assert (world.session.state, world.session.halt_reason, world.session.clean) == (S.COMPENSATED, None, False)
    assert [entry.kind for entry in world.entries[-2:]] == [K.UNWIND_ORDERED, K.UNWOUND]
    session = world.session
    assert unwind(world) is None
    assert world.session == session


def test_unwind_goes_on_when_the_session_was_marked_by_a_late_effect() -> None:
    """The person has seen it: the mark is gone, or nothing could ever be undone again; clean it is not."""
    world = World(seed=1)
    ask(world, UNDOABLE)
    ask(world, UNDOABLE)
    fail_run(world)
    begin(world, due_at_step(world, 2))
    commit(world, 2)
    answer(world, due_at_step(world, 2), DONE)
    assert (world.session.halt_reason, world.session.late_effect) == (HaltReason.LATE_EFFECT, True)
    unwind(world)
    assert not world.session.late_effect
    send_on(world)
    assert (world.session.state, world.session.clean) == (S.COMPENSATED, False)


def test_unwind_halts_again_when_what_stopped_it_is_still_so() -> None:
    """An undo that needs what the result does not have is not sent because somebody orders it; nor is one whose call nobody knows of."""
    world = World(seed=1)
    for call in (UNDONE_BY_RESULT, ASKED_WHEN_UNKNOWN):
        ask(world, call)
    commit(world, 1)
    fail_run(world)
    for reason, step in ((HaltReason.UNKNOWN_OUTCOME, 2), (HaltReason.UNRESOLVED_REFERENCE, 1)):
        begin(world, due_at_step(world, step))
        assert world.session.halt_reason is reason
        unwind(world)
        begin(world, due_at_step(world, step))
        assert (world.session.state, world.session.halt_reason, world.stack[step].state) == (S.HALTED, reason, P)
        skip(world, step, by_hand=True)
        unwind(world)
    assert world.session.state is S.COMPENSATED


def waiting(world: World) -> None:
    """Let the newest undo be due, unsent."""
    del world


def tried(world: World) -> None:
    """Let the newest undo wait to be tried again."""
    send(world, 2, BUSY)


def accepted(world: World) -> None:
    """Let the newest undo be accepted, and wait to be asked about."""
    send(world, 2, ACCEPTED)


def outgoing(world: World) -> None:
    """Let a request of the newest undo be on its way."""
    begin(world, due_at_step(world, 2))


def reported_late(world: World) -> None:
    """Let the agent say, late, that the newest call had done nothing, while its undo is due."""
    fail_effect(world, 2, FailReport(outcome=Outcome.NOT_APPLIED, error="no"))


# What the newest undo is at -> whether the halt comes at once, and the state of its entry then.
HALTS: list[tuple[Callable[[World], None], bool, UndoState]] = [
    (waiting, True, P),
    (tried, True, F),
    (accepted, True, F),
    (outgoing, False, U.RUNNING),
    (reported_late, True, U.SKIPPED),
]


@pytest.mark.parametrize(("prepare", "is_now", "entry"), HALTS)
def test_halt_comes_at_once_or_at_the_boundary_when_it_is_ordered(prepare: Callable[[World], None], is_now: bool, entry: UndoState) -> None:
    """Only a request in flight is waited for. An undo that was being retried is given up, so that a person can retry or skip it."""
    world = World(seed=1)
    ask(world, UNDOABLE)
    ask(world, UNDOABLE)
    fail_run(world)
    prepare(world)
    count = len(world.entries)
    assert halt(world) is None
    assert told_of(world, K.HALT_ORDERED) == {"reason": "wait"}
    assert world.entries[count].actor == OPERATOR
    assert states_of(world) == {1: P, 2: entry}
    assert (world.session.state is S.HALTED, world.session.halt_ordered) == (is_now, not is_now)
    given_up = [K.COMPENSATION_FAILED] if entry is F else []
    assert [each.kind for each in world.entries[count:]] == [K.HALT_ORDERED, *given_up, *([K.HALTED] if is_now else [])]
    if is_now:
        assert (world.session.halt_reason, world.due_undo()) == (HaltReason.OPERATOR, None)
    if entry is F:
        assert told_of(world, K.COMPENSATION_FAILED)["reason"] == "operator"
    session = world.session
    assert halt(world) is None
    assert world.session == session, "a repeat changes nothing"


def test_halt_comes_at_once_when_nothing_is_due() -> None:
    """An unwind that has nothing to wait for is stopped as it stands."""
    draft = World(seed=1, session=new_session(S.FAILED, failed_at=START)).draft(OPERATOR)
    assert operations.halt(draft, None, "wait", is_action_in_flight=False) is None
    assert (draft.session.state, draft.session.halt_reason) == (S.HALTED, HaltReason.OPERATOR)


def test_halt_waits_for_the_action_when_one_is_in_flight() -> None:
    """Nothing is undone meanwhile, so there is nothing to stop yet; what the action comes to is known first."""
    acting = Definition(reversibility=R.IRREVERSIBLE, approval=ApprovalRule(is_required=True), action=new_action())
    world = run(World(seed=1), UNDOABLE, acting)
    begin(world, due_at_step(world, 2))
    fail_run(world)
    halt(world)
    assert (world.session.state, world.session.halt_ordered) == (S.FAILED, True)
    answer(world, due_at_step(world, 2), NO)
    assert (world.session.state, world.session.halt_reason, world.session.halt_ordered) == (S.HALTED, HaltReason.OPERATOR, False)


# The call in flight when a halt was ordered: independent or not, older undos or not, its answer (None: the worker was lost)
# -> the reason, or None where the session is compensated; and its entry then.
BOUNDARIES: list[tuple[bool, bool, Attempt | None, HaltReason | None, UndoState]] = [
    (False, True, DONE, HaltReason.OPERATOR, C),
    (False, False, DONE, None, C),
    (False, True, BUSY, HaltReason.OPERATOR, F),
    (False, True, LOST, HaltReason.OPERATOR, F),
    (False, True, ACCEPTED, HaltReason.OPERATOR, F),
    (False, True, None, HaltReason.OPERATOR, F),
    (False, True, NO, HaltReason.COMPENSATION_FAILED, F),
    (True, True, NO, HaltReason.OPERATOR, F),
    (True, False, NO, HaltReason.COMPENSATION_FAILED, F),
]


@pytest.mark.parametrize(("independent", "has_older", "attempt", "reason", "entry"), BOUNDARIES)
def test_halt_is_carried_out_when_the_request_in_flight_has_ended(
    independent: bool, has_older: bool, attempt: Attempt | None, reason: HaltReason | None, entry: UndoState
) -> None:
    """An undo that was answered counts; nothing new begins, no retry starts, and a session that is through is through."""
    world = failed(*([UNDOABLE] if has_older else []), undoable(independent=independent))
    step = world.session.last_step
    call = due_at_step(world, step)
    begin(world, call)
    halt(world)
    move: Move = begin(world, call) if attempt is None else answer(world, call, attempt)
    assert isinstance(move, Rest)
    assert (world.session.state, world.session.halt_reason) == (S.COMPENSATED if reason is None else S.HALTED, reason)
    assert not world.session.halt_ordered
    assert world.stack[step].state is entry
    assert not has_older or world.stack[1].state is P
    if reason is not None:
        unwind(world)
        send_on(world)
    assert world.session.state is S.COMPENSATED


def test_resolve_closes_the_session_as_it_stands_when_it_is_halted() -> None:
    """What is not undone stays so, the reason of the halt stays readable, and nothing is called clean."""
    world = halted()
    assert resolve(world) is None
    assert (world.session.state, world.session.clean, world.session.halt_reason) == (S.RESOLVED, False, HaltReason.COMPENSATION_FAILED)
    assert told_of(world, K.RESOLVED) == {"reason": "let it be", "was": "compensation_failed"}
    assert states_of(world) == {1: P, 2: F}
    session = world.session
    assert resolve(world) is None
    assert world.session == session, "a repeat changes nothing"
    assert code_of(unwind(world)) == code_of(retry(world, 2)) == code_of(skip(world, 2)) == NOT_HALTED
    assert code_of(halt(world)) == "session_not_unwinding"


SETTLED_STATES = {Outcome.COMMITTED: E.COMMITTED, Outcome.NOT_APPLIED: E.FAILED}


@pytest.mark.parametrize("session", S)
@pytest.mark.parametrize("state", E)
@pytest.mark.parametrize("outcome", SETTLED_STATES)
def test_settle_moves_repeats_or_is_refused_when_a_call_is_in_a_state(session: SessionState, state: EffectState, outcome: Outcome) -> None:
    """Only what nobody knows can be settled, and only while its undo is not under way; what is known already is no error anywhere."""
    found = Reported(effect=new_effect(state), undo_entry=new_entry(U.SKIPPED if state is E.FAILED else P))
    draft = World(seed=1, session=new_session(session)).draft(OPERATOR)
    decided = operations.settle(draft, found, [], Settle(reason="looked", outcome=outcome))
    if state is SETTLED_STATES[outcome]:
        assert decided is found
        assert draft.is_empty
    elif session not in {S.ACTIVE, S.AWAITING_APPROVAL, S.HALTED}:
        assert code_of(decided) == NOT_HALTED
        assert draft.is_empty
    elif state is not E.UNKNOWN:
        assert isinstance(decided, Conflict)
        assert (decided.code, decided.facts["state"]) == ("not_unknown", state)
        assert draft.is_empty
    else:
        assert isinstance(decided, Reported)
        assert (decided.effect.state, draft.session.state) == (SETTLED_STATES[outcome], session)
        assert draft.changes().entries[0].kind == K.SETTLED


@pytest.mark.parametrize("is_halted", [False, True])
@pytest.mark.parametrize("result", [None, b'{"credit_id":"c-1"}'])
def test_settle_as_committed_lets_the_undo_be_sent_as_such_when_the_unwind_goes_on(is_halted: bool, result: bytes | None) -> None:
    """The undo's endpoint is told what is known now, and what the result holds is bound, if somebody said it."""
    world = World(seed=1)
    ask(world, UNDOABLE if result is None else UNDONE_BY_RESULT)
    fail_effect(world, 1, FailReport(outcome=Outcome.UNKNOWN, error="no answer"))
    if is_halted:
        fail_run(world)
        halt(world)
    count = len(world.entries)
    settled = settle(world, 1, Outcome.COMMITTED, result)
    assert isinstance(settled, Reported)
    effect = world.effects[1]
    assert (effect.state, effect.outcome, effect.result, effect.error) == (E.COMMITTED, Outcome.COMMITTED, result, None)
    assert [(entry.kind, entry.actor) for entry in world.entries[count:]] == [(K.SETTLED, OPERATOR)]
    told = told_of(world, K.SETTLED)
    assert (told["outcome"], told["reason"]) == ("committed", "looked it up")
    session = world.session
    for same in (None, result):
        assert isinstance(settle(world, 1, Outcome.COMMITTED, same), Reported)
    assert world.session == session, "a repeat changes nothing"
    if result is None:
        assert isinstance(settle(world, 1, Outcome.COMMITTED, b'{"late":1}'), Reported)
        assert world.effects[1].result == b'{"late":1}', "a result that nobody had may still be told"
    assert code_of(settle(world, 1, Outcome.COMMITTED, b'{"credit_id":"c-2"}')) == "not_unknown"
    if is_halted:
        unwind(world)
    else:
        fail_run(world)
    move = begin(world, due_at_step(world, 1))
    assert isinstance(move, Send)
    assert (move.call.outcome, move.call.body) == (Outcome.COMMITTED, b"{}" if result is None else b'{"credit":"c-1"}')


@pytest.mark.parametrize("is_halted", [False, True])
def test_settle_as_not_applied_takes_the_undo_out_when_the_call_did_nothing(is_halted: bool) -> None:
    """Nothing happened, so nothing is undone; that a person looked it up is no blemish."""
    world = World(seed=1)
    ask(world, ASKED_WHEN_UNKNOWN)
    fail_effect(world, 1, FailReport(outcome=Outcome.UNKNOWN, error="no answer"))
    if is_halted:
        fail_run(world)
        begin(world, due_at_step(world, 1))
        assert world.session.halt_reason is HaltReason.UNKNOWN_OUTCOME
    count = len(world.entries)
    settle(world, 1, Outcome.NOT_APPLIED)
    effect = world.effects[1]
    assert (effect.state, effect.outcome, effect.error) == (E.FAILED, Outcome.NOT_APPLIED, "settled as not applied: looked it up")
    assert [entry.kind for entry in world.entries[count:]] == [K.SETTLED, K.SKIPPED]
    assert (states_of(world), world.session.clean) == ({1: U.SKIPPED}, True)
    if is_halted:
        unwind(world)
        assert (world.session.state, world.session.clean) == (S.COMPENSATED, True)


def doubtful(*calls: Inline | Definition, is_halted: bool) -> World:
    """Make a session whose last call's outcome is unknown, failed or not."""
    world = run(World(seed=1), *calls[:-1])
    ask(world, calls[-1])
    fail_effect(world, world.session.last_step, FailReport(outcome=Outcome.UNKNOWN, error="no answer"))
    if is_halted:
        fail_run(world)
        assert world.session.halt_reason is HaltReason.FAILED_AFTER_PIVOT
    assert world.session.pivoted
    return world


@pytest.mark.parametrize("is_halted", [False, True])
def test_pivot_is_lifted_when_the_irreversible_call_did_nothing(is_halted: bool) -> None:
    """What stood in the way of undoing did not happen: an active session fails like any other again; a halted one waits for the order."""
    world = doubtful(UNDOABLE, FREE, is_halted=is_halted)
    settle(world, 2, Outcome.NOT_APPLIED)
    assert (world.session.pivoted, world.session.clean) == (False, not is_halted)
    if is_halted:
        assert (world.session.state, world.due_undo()) == (S.HALTED, None)
        unwind(world)
    else:
        fail_run(world)
    send_on(world)
    assert (world.session.state, states_of(world)) == (S.COMPENSATED, {1: C})


@pytest.mark.parametrize("is_halted", [False, True])
def test_pivot_stays_when_another_irreversible_call_stands(is_halted: bool) -> None:
    """An earlier one that went ahead still is the pivot."""
    world = doubtful(FREE, FREE, is_halted=is_halted)
    settle(world, 2, Outcome.NOT_APPLIED)
    assert (world.session.pivoted, world.session.clean) == (True, False)


@pytest.mark.parametrize("is_halted", [False, True])
def test_pivot_is_not_told_twice_when_the_irreversible_call_did_happen(is_halted: bool) -> None:
    """That it may have happened was the pivot; that it did is no second one."""
    world = doubtful(UNDOABLE, FREE, is_halted=is_halted)
    settle(world, 2, Outcome.COMMITTED)
    assert (world.session.pivoted, world.session.clean) == (True, False)
    assert [entry.kind for entry in world.entries].count(K.PIVOT) == 1


def test_settled_pivot_is_told_when_it_had_been_lifted_before() -> None:
    """A pivot that is taken back, and a later one, are two."""
    world = doubtful(UNDOABLE, FREE, is_halted=False)
    settle(world, 2, Outcome.NOT_APPLIED)
    run(world, FREE)
    assert world.session.pivoted
    assert [entry.step for entry in world.entries if entry.kind == K.PIVOT] == [2, 3]


def test_settle_leaves_a_skipped_undo_alone_when_a_person_has_taken_it_out_before() -> None:
    """What was taken out stays out, whatever becomes known; and it stays told as unclean."""
    for outcome, state in SETTLED_STATES.items():
        world = World(seed=1)
        ask(world, UNDOABLE)
        fail_run(world)
        halt(world)
        skip(world, 1)
        settle(world, 1, outcome)
        assert (world.stack[1].state, world.effects[1].state) == (U.SKIPPED, state)
        unwind(world)
        assert (world.session.state, world.session.clean) == (S.COMPENSATED, False)


def test_late_commit_is_no_news_when_a_person_had_settled_the_undo() -> None:
    """Who let an effect stand, or undid it by hand, knew that it may have happened: what is learnt is kept, and nobody is called."""
    for by_hand in (False, True):
        world = World(seed=1)
        ask(world, UNDOABLE)
        fail_run(world)
        halt(world)
        skip(world, 1, by_hand=by_hand)
        unwind(world)
        assert code_of(commit(world, 1)) == "session_not_active"
        assert (world.session.state, world.effects[1].outcome, world.entries[-1].kind) == (S.COMPENSATED, Outcome.COMMITTED, K.LATE_COMMIT)


# Orders that lead from a halted session to a compensated one, each given twice.
WAYS: list[Sequence[Callable[[World], object]]] = [
    (unwind,),
    (lambda world: retry(world, 2),),
    (lambda world: skip(world, 2), unwind),
    (lambda world: skip(world, 2, by_hand=True), unwind),
]


@pytest.mark.parametrize("way", WAYS)
def test_order_does_no_harm_when_it_is_repeated(way: Sequence[Callable[[World], object]]) -> None:
    """An answer that was lost is asked for again: the second order finds it done, at once, and after the end."""
    world = halted()
    for give in way:
        assert give(world) is None
        session = world.session
        assert give(world) is None
        assert world.session == session
    send_on(world)
    assert world.session.state is S.COMPENSATED
    session = world.session
    assert unwind(world) is None
    assert world.session == session
