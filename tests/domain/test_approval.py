"""A person's decision and the one release it allows, rule by rule. Must not test how the journal is read back or requests are raced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha256
from itertools import product
from typing import Any

import pytest

from app.domain import approval, intercept, journal, outcomes
from app.domain.approval import Approve, Evidence, Parked, Reject, Released, Resume
from app.domain.errors import Conflict, Forbidden, NotFound
from app.domain.intercept import AwaitApproval
from app.domain.json_text import parse
from app.domain.model import (
    ApprovalState,
    CallKind,
    EffectState,
    EntryKind,
    HaltReason,
    Reversibility,
    SessionId,
    SessionState,
    StepIndex,
    UndoState,
)
from app.domain.outcomes import Reported
from app.domain.tools import ApprovalRule, Definition, Tool
from tests.domain.acts import IRREVERSIBLE, UNDOABLE, ask, commit, fail_run, keep, release, run
from tests.domain.world import (
    ACTION_URL,
    FOLLOWS,
    RULES,
    START,
    UNDO_URL,
    World,
    code_of,
    command,
    new_action,
    new_approval,
    new_compensation,
    new_draft,
    new_effect,
    new_entry,
    new_session,
    seen,
)

PAYLOAD = b'{"amount":"100","to":"alice"}'
TTL_SECONDS = 3_600
STEP = 2
ASKED = ApprovalRule(is_required=True)

S = SessionState
E = EffectState
A = ApprovalState
K = EntryKind


def definition(reversibility: Reversibility = Reversibility.IRREVERSIBLE, **changes: Any) -> Definition:
    """Register a tool whose calls a person has to approve."""
    return Definition(reversibility=reversibility, approval=ASKED, **changes)


def waiting(registered: Definition | None = None) -> World:
    """Make a session whose first call was committed, and whose second waits for a person."""
    world = run(World(seed=1), UNDOABLE)
    assert ask(world, registered or IRREVERSIBLE, PAYLOAD)
    return world


def approved(registered: Definition | None = None) -> World:
    """Make the same session when the call is approved."""
    world = waiting(registered)
    decide(world, Approve(by="ada", reason="checked", claimed_approver="manager@company.example"))
    return world


def released(registered: Definition | None = None, key: str | None = "k-1") -> World:
    """Make the same session when the call is released to its agent."""
    world = approved(registered)
    assert isinstance(resume(world, request_key=key), Released)
    return world


def decide(world: World, decision: Approve | Reject) -> object:
    """Let somebody decide about the waiting call, and keep what is written."""
    draft = world.draft(f"operator:{decision.by}")
    found = world.reported(STEP)
    if isinstance(decision, Approve):
        decided: object = approval.approve(draft, found, world.known(), decision)
    else:
        decided = approval.reject(draft, found, world.known(), decision)
    keep(world, draft)
    return decided


def resume(world: World, payload: bytes = PAYLOAD, **changes: Any) -> object:
    """Present bytes, and keep what is written."""
    draft = world.draft("agent:robot-1")
    presented = Resume(**{"by": "robot-1", "payload": payload, "request_key": None, **changes})
    answer = approval.release(draft, world.parked(STEP), presented)
    keep(world, draft)
    return answer


def kinds_after(world: World, count: int) -> list[EntryKind]:
    """Return the kinds of the entries after the first `count`."""
    return [EntryKind(entry.kind) for entry in world.entries[count:]]


def body_of(world: World, kind: EntryKind) -> Any:
    """Return the body of the only entry of a kind."""
    (entry,) = (entry for entry in world.entries if entry.kind == kind)
    return parse(entry.body)


def in_state(state: ApprovalState, **changes: Any) -> Reported:
    """Make a call whose question is in a state, and its effect in one that goes with it."""
    effect = new_effect(min(FOLLOWS[state]), STEP, reversibility=Reversibility.IRREVERSIBLE, payload=PAYLOAD)
    return Reported(effect=effect, undo_entry=None, approval=new_approval(state, STEP, **changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One of the two decisions, by the one who decides in `new_approval`, or somebody else."""

    name: str
    by: str

    def run(self, draft: Any, found: Reported, known: Sequence[Reported] = ()) -> object:
        """Decide."""
        if self.name == "approve":
            return approval.approve(draft, found, known, Approve(by=self.by))
        return approval.reject(draft, found, known, Reject(by=self.by, reason="no"))


VERBS = [Verb(name=name, by=by) for name, by in product(["approve", "reject"], ["ada", "bob"])]


@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_decision_is_refused_when_nothing_was_asked(verb: Verb) -> None:
    """A call that may go ahead, or went, has nobody's decision."""
    draft = new_draft(new_session())
    error = verb.run(draft, Reported(effect=new_effect(), undo_entry=None))
    assert isinstance(error, NotFound)
    assert error.code == "approval_not_found"
    assert draft.is_empty


# The question's state -> whether ada, who decided, gets the same answer again for approve, and for reject; bob never does.
REPEATS: dict[ApprovalState, tuple[bool, bool]] = {
    A.APPROVED: (True, False),
    A.RELEASED: (True, False),
    A.REJECTED: (False, True),
    A.EXPIRED: (False, False),
    A.CANCELLED: (False, False),
    A.MISMATCHED: (False, False),
}


@pytest.mark.parametrize(("state", "verb"), list(product(REPEATS, VERBS)), ids=str)
def test_decision_is_taken_once_when_the_question_has_an_answer_or_an_end(state: ApprovalState, verb: Verb) -> None:
    """One winner: who decided may say the same again, anybody else learns what was decided, and nothing moves."""
    found = in_state(state)
    draft = new_draft(new_session(S.AWAITING_APPROVAL))
    decided = verb.run(draft, found)
    assert draft.is_empty
    if verb.by == "ada" and REPEATS[state][verb.name == "reject"]:
        assert decided is found
        return
    assert isinstance(decided, Conflict)
    assert (decided.code, decided.facts["state"]) == ("already_decided", state)
    assert found.approval is not None
    # What became of an approval later was not its approver's doing.
    is_persons = state in {A.APPROVED, A.RELEASED, A.REJECTED}
    assert decided.facts["decided_by"] == (found.approval.decided_by if is_persons else None)


def test_repeat_of_a_rejection_is_refused_when_it_says_another_consequence() -> None:
    """`continue` and `unwind` are two decisions: the second of them comes too late."""
    draft = new_draft(new_session())
    found = in_state(A.REJECTED, is_continued=True)
    decided = approval.reject(draft, found, [], Reject(by="ada", reason="no", is_continued=False))
    assert code_of(decided) == "already_decided"
    assert approval.reject(draft, found, [], Reject(by="ada", reason="no", is_continued=True)) is found
    assert draft.is_empty


@pytest.mark.parametrize("state", A)
@pytest.mark.parametrize("name", ["approve", "reject"])
def test_decision_is_refused_when_the_requesters_own_subject_decides(name: str, state: ApprovalState) -> None:
    """Nobody decides what they asked for, in whatever state the question is."""
    draft = new_draft(new_session(S.AWAITING_APPROVAL))
    error = Verb(name=name, by="robot-1").run(draft, in_state(state))
    assert isinstance(error, Forbidden)
    assert (error.code, error.facts["requested_by"]) == ("same_subject", "robot-1")
    assert draft.is_empty


@pytest.mark.parametrize("state", [A.PENDING, A.APPROVED, A.EXPIRED])
def test_approve_changes_nothing_when_another_payload_was_seen(state: ApprovalState) -> None:
    """Who has seen other bytes is told which ones wait, and has decided nothing; the bytes that wait are decided about."""
    draft = new_draft(new_session(S.AWAITING_APPROVAL))
    found = in_state(state)
    other = Approve(by="bob", payload_sha256=sha256(PAYLOAD + b" ").digest())
    error = approval.approve(draft, found, [], other)
    assert isinstance(error, Conflict)
    assert (error.code, error.facts["payload_sha256"]) == ("payload_differs", sha256(PAYLOAD).hexdigest())
    assert draft.is_empty
    if state is A.PENDING:
        same = replace(other, payload_sha256=sha256(PAYLOAD).digest())
        assert isinstance(approval.approve(draft, found, [], same), Reported)


def test_approve_records_who_said_what_when_it_is_the_first() -> None:
    """Approving is not executing: the session goes on waiting, and the journal keeps the bytes that were approved."""
    world = waiting()
    count = len(world.entries)
    world.now += timedelta(seconds=5)
    decided = decide(world, Approve(by="ada", reason="checked", claimed_approver="manager@company.example"))
    assert isinstance(decided, Reported)
    assert (decided.effect.state, decided.approval) == (E.APPROVED, world.approvals[STEP])
    asked = world.approvals[STEP]
    assert (world.session.state, world.effects[STEP].state, asked.state) == (S.AWAITING_APPROVAL, E.APPROVED, A.APPROVED)
    assert (asked.decided_by, asked.decided_at, asked.reason) == ("ada", START + timedelta(seconds=5), "checked")
    assert (asked.claimed_approver, asked.released_at) == ("manager@company.example", None)
    assert (kinds_after(world, count), world.entries[-1].actor) == ([K.APPROVED], "operator:ada")
    told = body_of(world, K.APPROVED)
    assert {name: told[name] for name in ("tool", "gate", "approver", "claimed_approver", "reason", "requested_by", "ttl_seconds")} == {
        "tool": "issue_credit",
        "gate": "approval-gate",
        "approver": "ada",
        "claimed_approver": "manager@company.example",
        "reason": "checked",
        "requested_by": "robot-1",
        "ttl_seconds": TTL_SECONDS,
    }
    assert told["expires_at"] == journal.time_text(asked.expires_at)
    assert journal.has_content(world.entries[-1], "payload", PAYLOAD)


@pytest.mark.parametrize("is_continued", [False, True])
def test_reject_fails_the_run_or_lets_it_go_on_when_the_person_says_so(is_continued: bool) -> None:
    """A no is not an undo of nothing: what was done before is undone, unless the person lets the run continue without the call."""
    world = waiting()
    count = len(world.entries)
    decided = decide(world, Reject(by="ada", reason="wrong account", claimed_approver="manager@company.example", is_continued=is_continued))
    assert isinstance(decided, Reported)
    effect, asked = world.effects[STEP], world.approvals[STEP]
    assert (effect.state, effect.error, effect.outcome) == (E.REJECTED, "rejected: wrong account", None)
    assert (asked.state, asked.decided_by, asked.reason, asked.is_continued) == (A.REJECTED, "ada", "wrong account", is_continued)
    assert asked.claimed_approver == "manager@company.example"
    told = body_of(world, K.REJECTED)
    assert (told["then"], told["reason"], told["approver"]) == ("continue" if is_continued else "unwind", "wrong account", "ada")
    if is_continued:
        assert (world.session.state, world.due_undo(), kinds_after(world, count)) == (S.ACTIVE, None, [K.REJECTED])
        return
    undo = world.due_undo()
    assert undo is not None
    assert (world.session.state, undo.step_index) == (S.FAILED, 1)
    assert kinds_after(world, count) == [K.REJECTED, K.SESSION_FAILED]
    assert body_of(world, K.SESSION_FAILED)["error"] == "step 2 was rejected: wrong account"


def test_rejected_call_stays_so_when_its_run_goes_on_to_the_end() -> None:
    """The agent takes a new step; the rejected one stays rejected."""
    world = waiting()
    decide(world, Reject(by="ada", reason="no", is_continued=True))
    assert code_of(decide(world, Approve(by="ada"))) == "already_decided"
    assert code_of(resume(world)) == "not_approved"
    draft = world.draft()
    assert outcomes.complete(draft, world.known(pending=True)) is None
    keep(world, draft)
    assert (world.session.state, world.stack[1].state) == (S.COMPLETED, UndoState.SKIPPED)


# Seconds after the question was put -> whether it is over. The boundary is exclusive, to the microsecond.
MOMENTS = [(0.0, False), (TTL_SECONDS - 1e-6, False), (float(TTL_SECONDS), True), (TTL_SECONDS + 1e-6, True), (TTL_SECONDS * 24.0, True)]


@pytest.mark.parametrize(("seconds", "is_over"), MOMENTS)
@pytest.mark.parametrize("decision", [Approve(by="ada"), Reject(by="ada", reason="no")], ids=["approve", "reject"])
def test_decision_comes_too_late_when_the_question_has_expired(decision: Approve | Reject, seconds: float, is_over: bool) -> None:
    """Whoever finds a question too old ends it, and is told so: nobody has said no, and the consequence is the same."""
    world = waiting()
    count = len(world.entries)
    world.now = START + timedelta(seconds=seconds)
    decided = decide(world, decision)
    if not is_over:
        assert isinstance(decided, Reported)
        return
    assert isinstance(decided, Conflict)
    assert (decided.code, decided.facts["state"], decided.facts["decided_by"]) == ("already_decided", A.EXPIRED, None)
    assert kinds_after(world, count) == [K.EXPIRED, K.SESSION_FAILED]
    assert (world.effects[STEP].state, world.approvals[STEP].decided_at, world.session.state) == (E.EXPIRED, None, S.FAILED)


@pytest.mark.parametrize(("seconds", "is_over"), MOMENTS)
def test_release_comes_too_late_when_the_approval_has_expired(seconds: float, is_over: bool) -> None:
    """An approval that nobody used in time is over at its very microsecond; the bytes being right does not help."""
    world = approved()
    count = len(world.entries)
    world.now = START + timedelta(seconds=seconds)
    answer = resume(world)
    if not is_over:
        assert isinstance(answer, Released)
        assert world.approvals[STEP].released_at == world.now
        return
    assert isinstance(answer, Conflict)
    assert (answer.code, answer.facts["expires_at"]) == ("approval_expired", "2026-01-02T04:04:05.000000Z")
    assert kinds_after(world, count) == [K.EXPIRED, K.SESSION_FAILED]
    assert (world.session.state, world.effects[STEP].state) == (S.FAILED, E.EXPIRED)
    assert code_of(resume(world)) == "approval_expired"
    assert len(world.entries) == count + 2, "an expiry is told once"


def test_expiry_goes_by_the_moment_of_the_decision_when_the_clock_was_set_back() -> None:
    """What an entry of the journal has seen to be past is past, whatever the database's clock says by now."""
    world = approved()
    world.now = START + timedelta(seconds=TTL_SECONDS)
    draft = world.draft()
    draft.record(K.LATE_FAIL)  # any entry that late
    world.session = draft.changes().after
    world.entries.extend(draft.changes().entries)
    world.now = START + timedelta(seconds=1)
    draft = world.draft()
    answer = approval.release(draft, world.parked(STEP), Resume(by="robot-1", payload=PAYLOAD, request_key=None))
    assert code_of(answer) == "approval_expired"


def test_expire_ends_a_question_when_it_is_too_old_and_nothing_else() -> None:
    """The sweep judges again under the lock: one that was decided or released in the meantime is left alone."""
    late = START + timedelta(seconds=TTL_SECONDS)
    for state, moment in product(A, [START, late - timedelta(microseconds=1), late]):
        draft = new_draft(new_session(S.AWAITING_APPROVAL), moment)
        found = in_state(state)
        approval.expire(draft, [Reported(effect=new_effect(E.COMMITTED), undo_entry=new_entry()), found])
        is_due = state in {A.PENDING, A.APPROVED} and moment == late
        assert draft.is_empty is not is_due, (state, moment)
        if is_due:
            changes = draft.changes()
            assert [entry.kind for entry in changes.entries] == [K.EXPIRED, K.SESSION_FAILED]
            assert [change.after.step_index for change in changes.calls] == [1]


@pytest.mark.parametrize(("begin", "was"), [(waiting, "nobody decided"), (approved, "it was approved, but not resumed")])
def test_expired_call_says_who_was_waited_for_when_its_time_was_up(begin: Callable[[], World], was: str) -> None:
    """Expired is not rejected: the agent and the journal are told which of the two people waited for did not come."""
    world = begin()
    world.now += timedelta(seconds=TTL_SECONDS)
    state = world.approvals[STEP].state
    draft = world.draft("orchestrator")
    approval.expire(draft, world.known())
    world.apply(draft)
    error = f"{was} before 2026-01-02T04:04:05.000000Z"
    assert world.effects[STEP].error == error
    assert body_of(world, K.SESSION_FAILED)["error"] == f"the approval of step 2 expired: {error}"
    assert body_of(world, K.EXPIRED)["was"] == state


def test_release_is_refused_when_nothing_was_asked() -> None:
    """There is nothing to resume about a call that never waited."""
    draft = new_draft(new_session())
    parked = Parked(seen=Reported(effect=new_effect(), undo_entry=None), known=[], evidence=None, definition=None)
    error = approval.release(draft, parked, Resume(by="robot-1", payload=PAYLOAD, request_key=None))
    assert isinstance(error, NotFound)
    assert draft.is_empty


@pytest.mark.parametrize("payload", [PAYLOAD, b"other"])
def test_release_is_refused_and_nothing_is_consumed_when_nobody_has_approved(payload: bytes) -> None:
    """A resume that comes too early, with whatever bytes, leaves the question open."""
    world = waiting()
    session = world.session
    answer = resume(world, payload)
    assert isinstance(answer, Conflict)
    assert (answer.code, answer.facts["state"]) == ("not_approved", A.PENDING)
    assert (world.session, world.approvals[STEP].state) == (session, A.PENDING)
    assert isinstance(decide(world, Approve(by="ada")), Reported)


def forge(world: World, evidence: Evidence, how: str) -> Evidence:
    """Spoil what stands in the journal, as somebody with access to the table would."""
    entry = evidence.entry
    match how:
        case "changed body":
            return replace(evidence, entry=replace(entry, body=entry.body.replace(b"alice", b"mallory").replace(b'"ada"', b'"eve"')))
        case "changed body, hash made to fit":
            changed = replace(entry, body=entry.body.replace(b'"ada"', b'"eve"'))
            digest = journal.compute_digest(world.session.org, world.session.session_id, changed)
            return replace(evidence, entry=replace(changed, digest=digest))
        case "changed actor":
            return replace(evidence, entry=replace(entry, actor="operator:eve"))
        case "another kind":
            changed = replace(entry, kind=K.AWAITING_APPROVAL.value)
            digest = journal.compute_digest(world.session.org, world.session.session_id, changed)
            return Evidence(entry=replace(changed, digest=digest), linked_by=digest)
        case "another step":
            changed = replace(entry, step=10)
            digest = journal.compute_digest(world.session.org, world.session.session_id, changed)
            return Evidence(entry=replace(changed, digest=digest), linked_by=digest)
        case "another session":
            digest = journal.compute_digest(world.session.org, SessionId("run-2"), entry)
            return Evidence(entry=replace(entry, digest=digest), linked_by=digest)
        case "not linked":
            return replace(evidence, linked_by=bytes(32))
        case _:
            raise AssertionError(how)


FORGERIES = [
    "changed body",
    "changed body, hash made to fit",
    "changed actor",
    "another kind",
    "another step",
    "another session",
    "not linked",
]


@pytest.mark.parametrize("how", FORGERIES)
@pytest.mark.parametrize("is_released", [False, True])
def test_release_is_refused_when_the_journal_does_not_bear_the_approval_out(how: str, is_released: bool) -> None:
    """Rows that say approved are not enough, nor is an entry that was changed, or put beside the chain: nothing is consumed."""
    world = released() if is_released else approved()
    evidence = world.evidence(STEP)
    assert evidence is not None
    parked = replace(world.parked(STEP), evidence=forge(world, evidence, how))
    draft = world.draft()
    answer = approval.release(draft, parked, Resume(by="robot-1", payload=PAYLOAD, request_key="k-1"))
    assert code_of(answer) == "not_approved"
    assert draft.is_empty


def test_release_is_refused_when_only_the_rows_say_approved() -> None:
    """Forged states without an entry release nothing."""
    found = in_state(A.APPROVED)
    draft = new_draft(new_session(S.AWAITING_APPROVAL))
    parked = Parked(seen=found, known=[found], evidence=None, definition=None)
    answer = approval.release(draft, parked, Resume(by="robot-1", payload=PAYLOAD, request_key=None))
    assert code_of(answer) == "not_approved"
    assert draft.is_empty


def erase(world: World) -> None:
    """Erase the contents of the APPROVED entry, as may be done."""
    place = next(place for place, entry in enumerate(world.entries) if entry.kind == K.APPROVED)
    world.entries[place] = replace(world.entries[place], content=None)


def tamper(world: World) -> None:
    """Change the payload that is kept of the call, its fingerprint along with it."""
    payload = PAYLOAD.replace(b"alice", b"mallory")
    world.effects[STEP] = replace(world.effects[STEP], payload=payload, payload_sha256=sha256(payload).digest())


def leave(world: World) -> None:
    """Change nothing."""
    del world


# What was done to the records, and the bytes that are presented: none of them are those that were approved, as far as anybody can show.
MISMATCHES: list[tuple[Callable[[World], None], bytes]] = [
    (leave, PAYLOAD + b" "),
    (leave, b'{"amount": "100","to":"alice"}'),
    (leave, b'{"to":"alice","amount":"100"}'),
    (leave, b'{"amount":"1000","to":"alice"}'),
    (leave, b""),
    (erase, PAYLOAD),
    (tamper, PAYLOAD),
    (tamper, PAYLOAD.replace(b"alice", b"mallory")),
]


@pytest.mark.parametrize(("spoil", "payload"), MISMATCHES)
def test_approval_is_used_up_when_other_bytes_are_presented(spoil: Callable[[World], None], payload: bytes) -> None:
    """What was about to run is not what a person saw: it never runs, the run fails, and what was done before is undone."""
    world = approved()
    spoil(world)
    count = len(world.entries)
    answer = resume(world, payload)
    assert isinstance(answer, Conflict)
    assert answer.code == "payload_changed"
    assert kinds_after(world, count) == [K.PAYLOAD_MISMATCH, K.SESSION_FAILED]
    mismatch = world.entries[count]
    assert journal.has_content(mismatch, "presented", payload)
    assert payload not in mismatch.body or not payload
    effect, asked = world.effects[STEP], world.approvals[STEP]
    assert (effect.state, effect.outcome, asked.state, asked.decided_by) == (E.REJECTED, None, A.MISMATCHED, "ada")
    assert world.session.state is S.FAILED
    undo = world.due_undo()
    assert undo is not None
    assert undo.step_index == 1
    assert code_of(resume(world)) == "already_decided"
    assert code_of(decide(world, Approve(by="ada"))) == "already_decided"
    assert len(world.entries) == count + 2, "a mismatch is told once"


def test_mismatch_wins_over_the_expiry_when_both_are_true() -> None:
    """The bytes are judged before the time: the contract's order of refusals."""
    world = approved()
    world.now += timedelta(seconds=TTL_SECONDS)
    assert code_of(resume(world, b"other")) == "payload_changed"
    assert world.approvals[STEP].state is A.MISMATCHED


def test_expiry_wins_over_the_runs_own_deadline_when_both_are_past() -> None:
    """A question that is over is told as such."""
    world = approved()
    world.session = replace(world.session, deadline_at=START + timedelta(seconds=TTL_SECONDS))
    world.now += timedelta(seconds=TTL_SECONDS)
    assert code_of(resume(world)) == "approval_expired"


@pytest.mark.parametrize("seconds", [9.0, 10.0, 11.0])
def test_run_fails_instead_of_being_resumed_when_its_deadline_is_past(seconds: float) -> None:
    """A run that is out of time is not taken up again: the call is cancelled, never let go first."""
    world = approved()
    world.session = replace(world.session, deadline_at=START + timedelta(seconds=10))
    count = len(world.entries)
    world.now = START + timedelta(seconds=seconds)
    answer = resume(world)
    if seconds < 10:
        assert isinstance(answer, Released)
        return
    assert code_of(answer) == "session_past_deadline"
    assert kinds_after(world, count) == [K.SESSION_FAILED, K.CANCELLED]
    assert (world.effects[STEP].state, world.approvals[STEP].state, world.session.state) == (E.CANCELLED, A.CANCELLED, S.FAILED)


def test_call_is_released_when_somebody_presents_its_bytes() -> None:
    """Release, INTENT and the session's return to active are one decision; who presents the bytes is the one to run them."""
    world = approved()
    count = len(world.entries)
    world.now += timedelta(seconds=5)
    answer = resume(world, by="carl", request_key="k-1")
    assert isinstance(answer, Released)
    effect, asked = world.effects[STEP], world.approvals[STEP]
    assert (answer.reported.effect.state, answer.reported.approval, answer.is_action) == (E.EXECUTING, asked, False)
    assert answer.reported.undo_entry is None
    assert (world.session.state, effect.state, effect.outcome, asked.state) == (S.ACTIVE, E.EXECUTING, None, A.RELEASED)
    assert (asked.released_to, asked.released_at, asked.release_key) == ("carl", world.now, "k-1")
    assert (asked.decided_by, kinds_after(world, count)) == ("ada", [K.INTENT])
    told = parse(world.entries[-1].body)
    assert isinstance(told, dict)
    approved_seq = next(entry.seq for entry in world.entries if entry.kind == K.APPROVED)
    assert (told["released_to"], told["approved_seq"], told["action_url"]) == ("carl", approved_seq, None)
    assert journal.has_content(world.entries[-1], "payload", PAYLOAD)
    assert (world.session.pivoted, world.due_calls()) == (False, [])


# Who presents what, under which key, after the release to robot-1 under k-1 -> whether the lost answer is given again.
AGAIN: list[tuple[dict[str, Any], bool]] = [
    ({"by": "robot-1", "payload": PAYLOAD, "request_key": "k-1"}, True),
    ({"by": "robot-1", "payload": PAYLOAD, "request_key": "k-2"}, False),
    ({"by": "robot-1", "payload": PAYLOAD, "request_key": None}, False),
    ({"by": "robot-1", "payload": PAYLOAD + b" ", "request_key": "k-1"}, False),
    ({"by": "ada", "payload": PAYLOAD, "request_key": "k-1"}, False),
]


@pytest.mark.parametrize(("asked", "is_given"), AGAIN)
@pytest.mark.parametrize("has_action", [False, True])
@pytest.mark.parametrize("state", [E.EXECUTING, E.COMMITTED, E.FAILED, E.UNKNOWN])
def test_lost_answer_is_given_again_when_it_is_the_same_request_alone(
    asked: dict[str, Any], is_given: bool, has_action: bool, state: EffectState
) -> None:
    """The releasing principal gets what it lost, while it is to be acted on; everybody else learns that it is done. Nothing moves."""
    registered = definition(action=new_action()) if has_action else None
    world = released(registered)
    found = world.parked(STEP)
    effect = new_effect(state, STEP, payload=PAYLOAD, effect_id=world.effects[STEP].effect_id)
    draft = world.draft()
    answer = approval.release(draft, replace(found, seen=replace(found.seen, effect=effect)), Resume(**asked))
    assert draft.is_empty
    if is_given and (has_action or state is E.EXECUTING):
        assert isinstance(answer, Released)
        assert (answer.reported.effect, answer.is_action) == (effect, has_action)
        return
    assert isinstance(answer, Conflict)
    assert (answer.code, answer.facts["state"], answer.facts["released_to"]) == ("already_released", state, "robot-1")
    assert answer.facts["released_at"] == "2026-01-02T03:04:05.000000Z"


def test_answer_is_never_given_again_when_the_release_had_no_key() -> None:
    """No key, no claim to the lost answer: two requests without one are not the same."""
    world = released(key=None)
    assert code_of(resume(world)) == "already_released"


def test_released_call_stays_released_when_its_time_is_up() -> None:
    """What was let go in time is not taken back."""
    world = released()
    world.now += timedelta(seconds=TTL_SECONDS)
    draft = world.draft()
    approval.expire(draft, world.known())
    assert draft.is_empty
    assert code_of(resume(world)) == "already_released"


@pytest.mark.parametrize(
    ("state", "code"), [(A.REJECTED, "already_decided"), (A.CANCELLED, "already_decided"), (A.EXPIRED, "approval_expired")]
)
def test_release_is_refused_when_the_question_has_ended_since_it_was_approved(state: ApprovalState, code: str) -> None:
    """An APPROVED entry that stands is not enough: the question must not have come to its end since."""
    world = approved()
    found = world.parked(STEP)
    ended = in_state(state, decided_by="ada", decided_at=START)
    draft = world.draft()
    answer = approval.release(draft, replace(found, seen=ended), Resume(by="robot-1", payload=PAYLOAD, request_key=None))
    assert code_of(answer) == code
    assert draft.is_empty


# What was registered about the tool -> whether an undo entry is pushed, and whether the service runs the call.
REGISTERED: list[tuple[Definition | None, bool, bool]] = [
    (None, False, False),
    (definition(), False, False),
    (definition(action=new_action()), False, True),
    (definition(Reversibility.COMPENSATABLE, compensation=new_compensation()), True, False),
    (definition(Reversibility.REVERSIBLE, compensation=new_compensation(), action=new_action()), True, True),
    (definition(Reversibility.READ_ONLY, action=new_action()), False, True),
]


@pytest.mark.parametrize(("registered", "is_undoable", "is_action"), REGISTERED)
def test_release_pushes_the_undo_and_makes_the_action_due_when_they_are_registered(
    registered: Definition | None, is_undoable: bool, is_action: bool
) -> None:
    """The undo is on the stack in the decision that says go; what the service runs itself is due in the same one."""
    world = approved(registered)
    world.now += timedelta(seconds=5)
    answer = resume(world)
    assert isinstance(answer, Released)
    assert answer.is_action is is_action
    assert (STEP in world.stack, answer.reported.undo_entry) == (is_undoable, world.stack.get(STEP))
    told = parse(world.entries[-1].body)
    assert isinstance(told, dict)
    assert told.get("undo_url") == (UNDO_URL if is_undoable else None)
    assert told["action_url"] == (ACTION_URL if is_action else None)
    if is_undoable:
        assert (world.stack[STEP].state, world.stack[STEP].stack_position) == (UndoState.PENDING, STEP)
    actions = world.due_actions()
    assert len(actions) == is_action
    for call in actions:
        assert (str(call.call_id), call.kind, call.step_index) == (str(world.effects[STEP].effect_id), CallKind.ACTION, STEP)
        assert (call.due_at, call.attempts, call.body, call.destination) == (world.now, 0, None, "bank.example:443")
        assert call.deadline_at == world.now + timedelta(days=1)


def test_call_gets_no_undo_at_its_release_when_it_was_raised_to_irreversible() -> None:
    """The class at intercept holds: the tool's own compensation is not for a call that was said to be irreversible."""
    world = World(seed=1)
    registered = Definition(reversibility=Reversibility.COMPENSATABLE, compensation=new_compensation())
    asked = command(payload=PAYLOAD, step_index=StepIndex(STEP), reversibility=Reversibility.IRREVERSIBLE, compensation=None)
    draft = world.draft()
    decision = intercept.decide(draft, asked, seen(tool=Tool(name=asked.tool, version=1, definition=registered)), RULES)
    assert isinstance(decision, AwaitApproval)
    world.definitions[STEP] = registered
    world.apply(draft)
    release(world, STEP)
    assert world.stack == {}


def test_released_call_is_the_pivot_when_it_is_committed() -> None:
    """From there on nothing is undone: the run's failure is a person's."""
    world = released()
    commit(world, STEP)
    assert world.session.pivoted
    fail_run(world)
    assert (world.session.state, world.session.halt_reason) == (S.HALTED, HaltReason.FAILED_AFTER_PIVOT)


@pytest.mark.parametrize(("begin", "code"), [(waiting, "not_approved"), (approved, "already_decided")])
def test_question_is_cancelled_when_the_run_fails(begin: Callable[[], World], code: str) -> None:
    """Nobody is asked any more; a decision that comes afterwards learns why."""
    world = begin()
    fail_run(world)
    assert (world.approvals[STEP].state, world.effects[STEP].state) == (A.CANCELLED, E.CANCELLED)
    assert code_of(decide(world, Approve(by="bob"))) == "already_decided"
    assert code_of(resume(world)) == code


# The second seed's journal, as it is printed there.
STORY = [(1, K.EXECUTED), (STEP, K.AWAITING_APPROVAL), (STEP, K.APPROVED), (STEP, K.INTENT), (STEP, K.EXECUTED)]


def test_journal_has_the_five_entries_of_the_story_when_the_call_is_approved_and_run() -> None:
    """What was proposed, who approved it, and that what was executed was what was approved; the person is the actor of the approval."""
    world = released()
    commit(world, STEP, b'{"status":"sent"}')
    told = [(entry.step, EntryKind(entry.kind)) for entry in world.entries]
    assert [each for each in told if each in STORY] == STORY
    assert {entry.actor for entry in world.entries if entry.kind == K.APPROVED} == {"operator:ada"}
    world.verify()


MESSAGES: dict[ApprovalState, str] = {
    A.PENDING: "[AWAITING_APPROVAL] Tool 'send_wire_transfer' requires human approval",
    A.APPROVED: (
        "[APPROVED] Tool 'send_wire_transfer' was approved and has not run; "
        "resume it with exactly its payload before 2026-01-02T04:04:05.000000Z"
    ),
    A.RELEASED: "[RELEASED] Tool 'send_wire_transfer' was released once; it is committed",
    A.REJECTED: "[REJECTED] Tool 'send_wire_transfer' did not run: rejected: no",
    A.MISMATCHED: "[REJECTED] Tool 'send_wire_transfer' did not run: rejected: no",
    A.EXPIRED: "[EXPIRED] Tool 'send_wire_transfer' did not run: nobody decided",
    A.CANCELLED: "[CANCELLED] Tool 'send_wire_transfer' did not run: its session failed before it was released",
}


@pytest.mark.parametrize("state", A)
def test_message_says_what_became_of_the_call_when_a_model_reads_it(state: ApprovalState) -> None:
    """A model reads this: it must never take a call that did not run for one that did, nor a rejection for an expiry."""
    effect = {A.RELEASED: E.COMMITTED}.get(state, min(FOLLOWS[state]))
    error = {A.REJECTED: "rejected: no", A.MISMATCHED: "rejected: no", A.EXPIRED: "nobody decided"}.get(state)
    assert approval.message(new_effect(effect, STEP, tool="send_wire_transfer", error=error), new_approval(state, STEP)) == MESSAGES[state]


def test_rejection_settles_what_else_is_open_when_it_fails_the_run() -> None:
    """A run fails by a rejection as it fails by any error: calls under way are unknown, and undone newest first."""
    world = World(seed=1)
    for call in (UNDOABLE, UNDOABLE, definition(Reversibility.COMPENSATABLE, compensation=new_compensation())):
        ask(world, call)
    draft = world.draft("operator:ada")
    approval.reject(draft, world.reported(3), world.known(), Reject(by="ada", reason="no"))
    world.apply(draft)
    assert [effect.state for effect in world.effects.values()] == [E.UNKNOWN, E.UNKNOWN, E.REJECTED]
    undo = world.due_undo()
    assert undo is not None
    assert undo.step_index == 2


def test_follows_names_every_state_when_compared() -> None:
    """The world's rule about questions and effects leaves no state out."""
    assert set(FOLLOWS) == set(A)
