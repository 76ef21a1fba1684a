"""A session's life, one act after the other, each drawn by dice: agent, people, operators, workers. Must not know how the dice are made.

Every act is compared with what the contract says of it, and the world refuses what must never be.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from random import Random
from typing import TypeAlias
from uuid import UUID

from app.domain import actions, approval, operations, outcomes, unwinding
from app.domain.approval import Approve, Reject, Released, Resume
from app.domain.draft import Changes
from app.domain.egress import EgressPolicy
from app.domain.model import (
    Action,
    ApprovalState,
    CallKind,
    Compensation,
    EffectState,
    EntryKind,
    OnUnknown,
    Outcome,
    OutgoingCall,
    RetryPolicy,
    Reversibility,
    SessionState,
    UndoState,
    UnknownVariant,
)
from app.domain.operations import UNSETTLED_UNDO, Retry, Settle, Skip
from app.domain.outcomes import REPORTING_STATES, FailReport
from app.domain.retry import Attempt, Failure
from app.domain.sending import Move, Rest, Send, Wait, Yield
from app.domain.states import RESTING_STATES, TERMINAL_SESSION_STATES, UNWINDING_STATES
from app.domain.tools import ApprovalRule, Definition
from tests.domain import acts
from tests.domain.acts import IRREVERSIBLE, READ, Inline
from tests.domain.world import (
    ACTION_URL,
    OPERATOR,
    ORCHESTRATOR,
    WitnessedDraft,
    World,
    answered,
    broken,
    code_of,
    new_compensation,
)

Act: TypeAlias = Callable[[Random], None]

OPEN_ARGS = b'{"credit":{"$ref":"result#/credit_id"}}'
FORWARD_ARGS = b'{"forward_key":{"$ref":"effect#/forward_key"}}'
BY_FORWARD_KEY = UnknownVariant(args=FORWARD_ARGS, url="https://ledger.example/undo/by-key")
MOVED_URL = "https://moved.example/undo"
RESULTS = [b"{}", b'{"credit_id":"c-1"}', b"null"]
STATUSES = [200, 202, 202, 204, 303, 400, 404, 408, 409, 410, 425, 429, 500, 503, 504]
FAILURES = [failure for failure in Failure if failure is not Failure.INTERRUPTED]
DONE = answered(200)
MOST_STEPS = 7
DAY_MS = 86_400_000


def a_policy(dice: Random, *, is_undo: bool) -> RetryPolicy:
    """Draw when a call is tried again."""
    return RetryPolicy(
        max_retries=dice.choice([0, 1, 2]),
        initial_interval_ms=dice.choice([1, 100, 5_000]),
        deadline_ms=dice.choice([DAY_MS, DAY_MS, 1_000]),
        retry_on=dice.choice([frozenset(), frozenset({404})]),
        compensated_on=dice.choice([frozenset(), frozenset({410})]) if is_undo else frozenset(),
    )


def a_compensation(dice: Random) -> Compensation:
    """Draw how a call is undone."""
    return new_compensation(
        args=dice.choice([b"{}", b"{}", FORWARD_ARGS, b'{"amount":{"$ref":"payload#/amount"}}', OPEN_ARGS]),
        unknown=dice.choice([None, BY_FORWARD_KEY]),
        on_unknown=dice.choice([OnUnknown.COMPENSATE, OnUnknown.COMPENSATE, OnUnknown.COMPENSATE, OnUnknown.ESCALATE]),
        independent=dice.choice([False, True]),
        retry=a_policy(dice, is_undo=True),
    )


def a_definition(dice: Random) -> Definition:
    """Draw what is registered about a tool that people have to approve; now and then it is irreversible and they need not."""
    reversibility = dice.choice([*Reversibility, Reversibility.IRREVERSIBLE])
    is_undoable = reversibility in {Reversibility.REVERSIBLE, Reversibility.COMPENSATABLE}
    if reversibility is Reversibility.IRREVERSIBLE and dice.choice([False, False, True]):
        return Definition(reversibility=reversibility, approval=ApprovalRule(is_required=False))
    return Definition(
        reversibility=reversibility,
        compensation=a_compensation(dice) if is_undoable else None,
        approval=ApprovalRule(is_required=True, ttl_seconds=dice.choice([None, 5])),
        action=Action(url=ACTION_URL, retry=a_policy(dice, is_undo=False)) if dice.choice([True, True, False]) else None,
    )


def a_call(dice: Random) -> Inline | Definition:
    """Draw what an agent wants to do."""
    match dice.choice(["undoable", "undoable", "registered", "registered", "other"]):
        case "undoable":
            return Inline(reversibility=Reversibility.COMPENSATABLE, compensation=a_compensation(dice))
        case "registered":
            return a_definition(dice)
        case _:
            return dice.choice([READ, IRREVERSIBLE])


def an_attempt(dice: Random) -> Attempt | None:
    """Draw what a request comes to; None: the worker is lost before it learns of it."""
    match dice.choice(["done", "done", "refused", "answered", "answered", "answered", "broken", "lost"]):
        case "done":
            return DONE
        case "refused":
            return answered(400)
        case "answered":
            location = dice.choice([None, "/jobs/7", "https://elsewhere.example/jobs/7", "http://["])
            return answered(dice.choice(STATUSES), retry_after=dice.choice([None, "1", "7200", "rubbish"]), location=location)
        case "broken":
            return broken(dice.choice(FAILURES), was_sent=dice.choice([False, True]))
        case _:
            return None


class Walk:
    """One session after another, with what workers have in flight, and what has left for each call."""

    def __init__(self) -> None:
        self.world = World(seed=1)
        self.flying: set[UUID] = set()
        self.sent: dict[str, tuple[str | None, bytes | None, Outcome | None]] = {}
        self.log: list[tuple[object, ...]] = []

    def step(self, dice: Random) -> None:
        """Let one thing happen that can happen now."""
        act = dice.choice(self._possible())
        self._tell(act.__name__)
        with self._story():
            act(dice)
        if self.is_halted():
            told = {EntryKind.HALTED, EntryKind.LATE_COMMIT, EntryKind.LATE_FAIL, EntryKind.SETTLED, EntryKind.PIVOT}
            assert self.world.entries[-1].kind in told | {EntryKind.SKIPPED, EntryKind.COMPENSATED}

    def finish(self) -> None:
        """Let everything be answered: a failed session comes to rest, a person can bring any halted one to an end, the chain verifies."""
        self._tell("finish")
        with self._story():
            self._finish()

    def _finish(self) -> None:
        for _ in range(200):
            if self.flying:
                self._answer(min(self.flying), DONE, 0.5, may_go_on=True)
            elif self.world.due_calls():
                self._begin(self.world.due_calls()[0])
        assert not self.world.due_calls(), "the unwind does not come to an end"
        if self.is_halted():
            for step in [step for step, entry in self.world.stack.items() if entry.state in UNSETTLED_UNDO]:
                self._skip(step, by_hand=True)
            self._order("unwind")
            assert self.world.session.state is SessionState.COMPENSATED
        if self.world.session.failed_at is not None:
            assert self.world.session.state in {SessionState.COMPENSATED, SessionState.RESOLVED}
        self.world.verify()

    def is_reporting(self) -> bool:
        """Tell whether the run goes on."""
        return self.world.session.state in REPORTING_STATES

    def is_halted(self) -> bool:
        """Tell whether a person owns the session."""
        return self.world.session.state is SessionState.HALTED

    def _possible(self) -> list[Act]:
        """Return what can happen now, the likelier the oftener; what is refused for certain is rare, and yet there."""
        world, state = self.world, self.world.session.state
        is_unwinding, is_waiting = state in UNWINDING_STATES, state is SessionState.AWAITING_APPROVAL
        can_be_asked = state is SessionState.ACTIVE and world.session.last_step < MOST_STEPS
        weights: list[tuple[Act, int]] = [
            (self.ask, 5 if can_be_asked else 0),
            (self.report, 0 if not world.effects else 3 if state is SessionState.ACTIVE else 1),
            (self.end_run, 1 if state not in RESTING_STATES else 0),
            (self.decide_question, 0 if not world.approvals else 4 if is_waiting else 1),
            (self.resume, 0 if not world.approvals else 4 if is_waiting else 1),
            (self.work, 8 if world.due_calls() or self.flying else 0),
            (self.wait, 1 if state not in TERMINAL_SESSION_STATES else 0),
            (self.retry, 0 if not world.stack else 3 if self.is_halted() else 1 if is_unwinding else 0),
            (self.skip, 1 if world.stack and self.is_halted() else 0),
            (self.order, 2 if self.is_halted() else 1 if is_unwinding else 0),
            (self.settle, 1 if world.effects and (self.is_halted() or self.is_reporting()) else 0),
            (self.begin_another, 3 if state in TERMINAL_SESSION_STATES and not self.flying else 0),
        ]
        return [act for act, weight in weights for _ in range(weight)]

    def ask(self, dice: Random) -> None:
        """Intercept another call: undoable, a read, or one that has to wait for a person."""
        call = a_call(dice)
        self._tell(call)
        acts.ask(self.world, call)
        self._tick()

    def report(self, dice: Random) -> None:
        """Report that a call happened or failed, in time or late; most often one that is open."""
        world, was = self.world, self.world.session
        still_open = [step for step, effect in world.effects.items() if effect.state in outcomes.MOVABLE_OUTCOMES]
        step = dice.choice(still_open * 3 + sorted(world.effects))
        found, outcome = world.reported(step), dice.choice([Outcome.COMMITTED, Outcome.COMMITTED, Outcome.NOT_APPLIED, Outcome.UNKNOWN])
        self._tell(step, outcome)
        if outcome is Outcome.COMMITTED:
            acts.commit(world, step, dice.choice(RESULTS))
        else:
            acts.fail_effect(world, step, FailReport(outcome=outcome, error="it broke"))
        self._tick()
        entry, is_learnt = found.undo_entry, world.effects[step].outcome is not found.effect.outcome
        if was.state is SessionState.COMPENSATED and entry is not None and is_learnt:
            is_settled_by_person = entry.by_hand or entry.state is UndoState.SKIPPED
            assert self.is_halted() is not is_settled_by_person, "a late effect is told to nobody"

    def end_run(self, dice: Random) -> None:
        """Fail the run, again and again; or say that it ended well; or look whether it has taken too long."""
        match dice.choice(["fail", "fail", "complete", "sweep"]):
            case "fail":
                self._fail_run()
            case "complete":
                self._complete()
            case _:
                self._sweep()

    def _fail_run(self) -> None:
        self._tell("fail")
        world, was_reporting, revision = self.world, self.is_reporting(), self.world.session.revision
        acts.fail_run(world)
        self._tick()
        assert (world.session.revision > revision) is was_reporting
        in_flight = {step for step in world.effects if world.reported(step).is_in_flight}
        assert {step for step, effect in world.effects.items() if effect.state is EffectState.EXECUTING} <= in_flight

    def _complete(self) -> None:
        self._tell("complete")
        draft = self.world.draft()
        refusal = outcomes.complete(draft, self.world.known(pending=True))
        assert draft.is_empty is (refusal is not None)
        self._decide(draft)

    def _sweep(self) -> None:
        self._tell("sweep")
        draft, known = self.world.draft(ORCHESTRATOR), self.world.known()
        approval.expire(draft, known)
        outcomes.time_out(draft, known)
        self._decide(draft)
        is_open = {ApprovalState.PENDING, ApprovalState.APPROVED}
        assert all(draft.now < asked.expires_at for asked in self.world.approvals.values() if asked.state in is_open)

    def decide_question(self, dice: Random) -> None:
        """Let somebody decide about any call that was ever parked."""
        step, by = dice.choice(self._parked()), dice.choice(["ada", "ada", "bob", "robot-1"])
        verb = dice.choice(["approve", "approve", "approve", "approve other bytes", "reject", "reject and go on"])
        self._tell(step, by, verb)
        if verb.startswith("approve"):
            self._approve(by, step, is_right=verb == "approve")
        else:
            self._reject(by, step, is_continued=verb != "reject")

    def _approve(self, by: str, step: int, *, is_right: bool) -> None:
        world, asked = self.world, self.world.approvals[step]
        draft = world.draft(f"operator:{by}")
        decision = Approve(by=by, payload_sha256=None if is_right else bytes(32))
        decided = approval.approve(draft, world.reported(step), world.known(), decision)
        is_taken = is_right and asked.state is ApprovalState.PENDING and by != asked.requested_by and draft.now < asked.expires_at
        self._decide(draft)
        if asked.state is not ApprovalState.APPROVED:
            assert (world.approvals[step].state is ApprovalState.APPROVED) == is_taken
        assert code_of(decided) in {None, "same_subject", "payload_differs", "already_decided"}

    def _reject(self, by: str, step: int, *, is_continued: bool) -> None:
        world, asked = self.world, self.world.approvals[step]
        draft = world.draft(f"operator:{by}")
        decided = approval.reject(draft, world.reported(step), world.known(), Reject(by=by, reason="no", is_continued=is_continued))
        is_taken = asked.state is ApprovalState.PENDING and by != asked.requested_by and draft.now < asked.expires_at
        self._decide(draft)
        if asked.state is not ApprovalState.REJECTED:
            assert (world.approvals[step].state is ApprovalState.REJECTED) == is_taken
        assert not is_taken or (world.session.state is SessionState.ACTIVE) == is_continued
        assert code_of(decided) in {None, "same_subject", "already_decided"}

    def resume(self, dice: Random) -> None:
        """Present the bytes of any call that was ever parked, or other ones, and compare with what the contract says of it."""
        world, step = self.world, dice.choice(self._parked())
        by, key = dice.choice(["ada", "robot-1"]), dice.choice([None, "k-1", "k-2"])
        is_right = dice.choice([True, True, True, True, False])
        self._tell(step, by, key, is_right)
        asked, effect = world.approvals[step], world.effects[step]
        draft = world.draft(f"agent:{by}")
        payload = effect.payload if is_right else effect.payload + b" "
        released = approval.release(draft, world.parked(step), Resume(by=by, payload=payload, request_key=key))
        was_approved = asked.state is ApprovalState.APPROVED
        is_first = was_approved and is_right and draft.now < asked.expires_at
        is_again = (
            asked.state is ApprovalState.RELEASED and is_right and key is not None and (key, by) == (asked.release_key, asked.released_to)
        )
        is_running = effect.state is EffectState.EXECUTING or (step in world.definitions and world.definitions[step].action is not None)
        assert isinstance(released, Released) == (is_first or (is_again and is_running)), code_of(released)
        assert draft.is_empty is not was_approved, "an approval that stands is used up, and nothing else is"
        self._decide(draft)
        assert not was_approved or (world.approvals[step].state is ApprovalState.MISMATCHED) is not is_right
        if is_first:
            assert (world.approvals[step].released_to, world.session.state) == (by, SessionState.ACTIVE)

    def work(self, dice: Random) -> None:
        """Let a worker look at a due call, or learn what became of the attempt that it has in flight; or lose it."""
        ready = [call.call_id for call in self.world.due_calls() if call.call_id not in self.flying]
        call_id = dice.choice([*ready, *sorted(self.flying)])
        if call_id not in self.flying:
            self._tell("begin", self.world.calls[call_id].kind, self.world.calls[call_id].step_index)
            self._begin(self.world.calls[call_id])
            return
        attempt = an_attempt(dice)
        self._tell(attempt, self.world.calls[call_id].kind, self.world.calls[call_id].step_index)
        if attempt is None:
            self.flying.remove(call_id)
            return
        self._answer(call_id, attempt, dice.choice([0.0, 0.5, 0.99]), may_go_on=dice.choice([True, True, False]))

    def wait(self, dice: Random) -> None:
        """Let time pass."""
        seconds = dice.choice([1, 1, 1, 10, 3_600, 86_400])
        self._tell(seconds)
        self.world.now += timedelta(seconds=seconds)

    def retry(self, dice: Random) -> None:
        """Order that an undo is tried again, perhaps at another place."""
        world, step = self.world, dice.choice(sorted(self.world.stack))
        item, stack = world.item(step), world.unsettled()
        is_moved = item.call is not None and item.call.first_sent_at is not None and dice.choice([False, False, True])
        self._tell(step, is_moved)
        draft = world.draft(OPERATOR)
        order = Retry(reason="mended", url=MOVED_URL if is_moved else None)
        refusal = operations.retry(draft, item, stack, order, EgressPolicy())
        is_next = item.entry.state in UNSETTLED_UNDO and operations.may_retry(item, stack.unsettled)
        assert draft.is_empty is not (self.is_halted() and is_next)
        assert refusal is None or draft.is_empty
        if is_moved and not draft.is_empty:
            key = item.entry.idempotency_key
            self.sent[key] = (MOVED_URL, *self.sent[key][1:])
        self._decide(draft)

    def skip(self, dice: Random) -> None:
        """Take any undo out of the unwind."""
        step, by_hand = dice.choice(sorted(self.world.stack)), dice.choice([False, True])
        self._tell(step, by_hand)
        self._skip(step, by_hand=by_hand)

    def _skip(self, step: int, *, by_hand: bool) -> None:
        entry, draft = self.world.stack[step], self.world.draft(OPERATOR)
        refusal = operations.skip(draft, self.world.reported(step), Skip(reason="seen to", by_hand=by_hand))
        assert draft.is_empty is (entry.state not in UNSETTLED_UNDO)
        assert refusal is None or draft.is_empty
        self._decide(draft)

    def order(self, dice: Random) -> None:
        """Order something about the session as a whole."""
        verb = dice.choice(["unwind", "unwind", "unwind", "halt", "halt", "resolve"])
        self._tell(verb)
        self._order(verb)

    def _order(self, verb: str) -> None:
        world, was = self.world, self.world.session
        draft = world.draft(OPERATOR)
        is_carried_out = was.state is SessionState.HALTED
        match verb:
            case "unwind":
                refusal = operations.unwind(draft, world.unsettled(), "go on")
            case "resolve":
                refusal = operations.resolve(draft, "let it be")
            case _:
                due = world.due_undo()
                running = None if due is None else world.item(due.step_index)
                refusal = operations.halt(draft, running, "wait", is_action_in_flight=bool(world.due_actions()))
                is_carried_out = was.state in UNWINDING_STATES and not was.halt_ordered
        assert draft.is_empty is not is_carried_out
        assert refusal is None or draft.is_empty
        self._decide(draft)

    def settle(self, dice: Random) -> None:
        """Say what is known of any call, unknown or not; most often of one that is."""
        world = self.world
        unknown = [step for step, effect in world.effects.items() if effect.state is EffectState.UNKNOWN]
        step, outcome = dice.choice(unknown * 3 + sorted(world.effects)), dice.choice([Outcome.COMMITTED, Outcome.NOT_APPLIED])
        self._tell(step, outcome)
        irreversible = [other for other in world.effects.values() if other.reversibility is Reversibility.IRREVERSIBLE]
        result = dice.choice([None, *RESULTS]) if outcome is Outcome.COMMITTED else None
        effect, draft = world.effects[step], world.draft(OPERATOR)
        operations.settle(draft, world.reported(step), irreversible, Settle(reason="looked it up", outcome=outcome, result=result))
        is_result_missing = effect.state is EffectState.COMMITTED and effect.result is None and result is not None
        assert draft.is_empty is not (step in unknown or is_result_missing)
        self._decide(draft)

    def begin_another(self, dice: Random) -> None:
        """Go on with another session where one is over: nothing much can happen to it any more."""
        del dice
        self.world.verify()
        self.world, self.sent = World(seed=1), {}
        self.log = [("ended, and began another",)]

    def _parked(self) -> list[int]:
        """Return the calls that were ever parked, those that still wait more often."""
        waiting = [step for step, asked in self.world.approvals.items() if asked.state in {ApprovalState.PENDING, ApprovalState.APPROVED}]
        return sorted(self.world.approvals) + waiting * 5

    @contextmanager
    def _story(self) -> Iterator[None]:
        """Have a fault carry what led to it."""
        try:
            yield
        except Exception as fault:
            fault.add_note("\n".join(["what happened:", *(" ".join(map(str, what)) for what in self.log)]))
            raise

    def _decide(self, draft: WitnessedDraft) -> None:
        acts.keep(self.world, draft)
        self._tick()

    def _tick(self) -> None:
        """Let time go on a little."""
        self.world.now += timedelta(milliseconds=1)

    def _tell(self, *what: object) -> None:
        self.log.append(what)

    def _begin(self, call: OutgoingCall) -> None:
        assert call.due_at is not None
        self.world.now = max(self.world.now, call.due_at)
        draft, is_undo = self.world.draft(ORCHESTRATOR), call.kind is CallKind.UNDO
        move = unwinding.begin(draft, self.world.undoing(call)) if is_undo else actions.begin(draft, self.world.acting(call))
        self._follow(draft, move, call)

    def _answer(self, call_id: UUID, attempt: Attempt, unit: float, *, may_go_on: bool) -> None:
        call, draft = self.world.calls[call_id], self.world.draft(ORCHESTRATOR)
        self.flying.remove(call_id)
        if call.kind is CallKind.UNDO:
            move = unwinding.record(draft, self.world.undoing(call, may_go_on=may_go_on), attempt, unit)
        else:
            move = actions.record(draft, self.world.acting(call), attempt, unit)
        self._follow(draft, move, call)

    def _follow(self, draft: WitnessedDraft, move: Move, before: OutgoingCall) -> None:
        """Do what the worker does with a move, and check what it is told."""
        changes = self.world.apply(draft)
        self._tick()
        match move:
            case Rest():
                assert self.world.calls[before.call_id].due_at is None
                assert before.kind is CallKind.ACTION or self.world.session.state in RESTING_STATES
            case Wait(call=call, seconds=seconds):
                assert seconds <= 3_600
                assert call == self.world.calls[call.call_id]
                assert call.due_at is not None
                assert call.due_at <= max(call.deadline_at, self.world.now)
            case Yield(call=call):
                assert call == self.world.calls[call.call_id]
                assert (call.due_at, call.is_attempt_open) == (changes.calls[-1].after.due_at, False)
            case Send(call=call):
                self.flying.add(call.call_id)
                self._witness(changes, move, before if before.call_id == call.call_id else None)

    def _witness(self, changes: Changes, move: Send, before: OutgoingCall | None) -> None:
        """Check a request that is about to leave: counted and kept already, frozen, and its turn."""
        world, call = self.world, move.call
        assert call == world.calls[call.call_id], "what is sent is not what was written"
        assert call.is_attempt_open
        known = next((change.before for change in changes.calls if change.after.call_id == call.call_id), before)
        counted = (known.attempts, known.polls) if known else (0, 0)
        assert (call.attempts, call.polls) == (counted[0] + (not move.is_poll), counted[1] + move.is_poll)
        frozen = (call.url, call.body, call.outcome)
        is_first = call.idempotency_key not in self.sent
        assert self.sent.setdefault(call.idempotency_key, frozen) == frozen, "a call changed between two sends"
        if call.kind is CallKind.ACTION:
            assert call.body == world.effects[call.step_index].payload, "other bytes are sent than those approved"
            assert world.approvals[call.step_index].state is ApprovalState.RELEASED
            assert self.is_reporting() or move.is_poll, "an attempt of an action starts after its session failed"
            return
        assert world.stack[call.step_index].state is UndoState.RUNNING
        world.check_is_next(call.step_index)
        assert not is_first or any(entry.kind == EntryKind.COMPENSATING and entry.step == call.step_index for entry in changes.entries)
        assert None not in frozen
        assert b"$ref" not in (call.body or b""), "a half-filled undo is sent"
