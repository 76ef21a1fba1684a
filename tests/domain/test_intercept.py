"""What an intercept is answered, case by case. Must not test how requests are read or rows are kept."""

from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import bindings, intercept
from app.domain.bindings import MAX_REFERENCES
from app.domain.draft import Change
from app.domain.errors import Conflict, Invalid
from app.domain.intercept import (
    AwaitApproval,
    Execute,
    InFlight,
    InterceptRules,
    Refuse,
    Replay,
)
from app.domain.json_text import dump
from app.domain.model import (
    MAX_STEP_INDEX,
    ApprovalState,
    EffectState,
    EntryKind,
    Outcome,
    Reversibility,
    SessionState,
    StepIndex,
    UndoState,
    UnknownVariant,
)
from app.domain.tools import Definition, Tool
from tests.domain.world import RULES, command, kinds_of, new_approval, new_compensation, new_draft, new_effect, new_entry, new_session, seen

APPROVAL = new_approval()
DENY = replace(RULES, is_inline_allowed=False)

# What a repeat is answered: under the same key, and without it (contract, "Repeats, by state of that step").
REPEATS: dict[EffectState, tuple[type, type]] = {
    EffectState.EXECUTING: (Execute, InFlight),
    EffectState.COMMITTED: (Replay, Replay),
    EffectState.AWAITING_APPROVAL: (AwaitApproval, AwaitApproval),
    EffectState.APPROVED: (AwaitApproval, AwaitApproval),
    EffectState.FAILED: (Refuse, Refuse),
    EffectState.UNKNOWN: (Refuse, Refuse),
    EffectState.REJECTED: (Refuse, Refuse),
    EffectState.EXPIRED: (Refuse, Refuse),
    EffectState.CANCELLED: (Refuse, Refuse),
    EffectState.COMPENSATING: (Refuse, Refuse),
    EffectState.COMPENSATED: (Refuse, Refuse),
    EffectState.COMPENSATION_FAILED: (Refuse, Refuse),
}


def refusal_of(decision: object) -> Conflict | Invalid:
    """Return the error of a refusal, which it must be."""
    assert isinstance(decision, Refuse)
    assert isinstance(decision.error, Conflict | Invalid)
    return decision.error


def decide_fresh(rules: InterceptRules = RULES, **changes: Any) -> tuple[object, list[EntryKind]]:
    """Decide a first intercept of an empty session; return the decision and what would be journaled."""
    draft = new_draft(new_session())
    decision = intercept.decide(draft, command(**changes), seen(), rules)
    return decision, kinds_of(draft)


@pytest.mark.parametrize("state", EffectState)
@pytest.mark.parametrize("session", SessionState)
def test_repeat_is_answered_from_state_when_the_step_is_known(state: EffectState, session: SessionState) -> None:
    """A repeat is judged by its own step alone, whatever became of the session, and changes nothing."""
    effect, entry = new_effect(state, error="declined", request_key="k-1"), new_entry()
    asked = None if state is EffectState.EXECUTING else APPROVAL
    under_key, at_step = REPEATS[state]
    for is_keyed, expected in ((True, under_key), (False, at_step)):
        draft = new_draft(new_session(session))
        met = seen(at_step=effect, under_key=effect if is_keyed else None, undo_of_repeat=entry, approval_of_repeat=asked)
        decision = intercept.decide(draft, command(request_key="k-1" if is_keyed else None), met, RULES)
        assert isinstance(decision, expected)
        assert draft.is_empty
        match decision:
            case Execute():
                assert (decision.effect, decision.undo_entry, decision.is_new) == (effect, entry, False)
            case Refuse(error=error):
                assert (error.code, error.facts["state"], error.facts["reason"]) == ("step_settled", state, "declined")
            case _:
                assert decision.effect == effect


@pytest.mark.parametrize("is_keyed", [True, False])
def test_repeat_lets_nothing_go_ahead_when_its_call_was_released(is_keyed: bool) -> None:
    """One approval is one release: not even the first request's key, nor a tool that bears repeating, gets another `execute`."""
    effect = new_effect(EffectState.EXECUTING, request_key="k-1", tool_version=1)
    met = seen(
        tool=Tool(name="issue_credit", version=1, definition=Definition(reversibility=R.IRREVERSIBLE, is_idempotent=True)),
        at_step=effect,
        under_key=effect if is_keyed else None,
        approval_of_repeat=new_approval(ApprovalState.RELEASED),
    )
    draft = new_draft(new_session())
    decision = intercept.decide(draft, command(request_key="k-1" if is_keyed else None, compensation=None, reversibility=None), met, RULES)
    assert decision == InFlight(effect=effect)
    assert draft.is_empty


@pytest.mark.parametrize("other", [{"tool": "send_mail"}, {"payload": b'{"amount": 2500}'}])
def test_repeat_is_refused_when_tool_or_bytes_differ(other: dict[str, Any]) -> None:
    """A step is one call: the same meaning in other bytes is another call."""
    draft = new_draft(new_session())
    error = refusal_of(intercept.decide(draft, command(**other), seen(at_step=new_effect()), RULES))
    assert (type(error), error.code) == (Conflict, "step_reused")
    assert draft.is_empty


def test_repeat_is_refused_when_the_key_belongs_to_another_request() -> None:
    """A key names one request, and wins over what stands at the step."""
    draft = new_draft(new_session())
    met = seen(under_key=new_effect(request_sha256=bytes([1]) * 32), at_step=new_effect())
    error = refusal_of(intercept.decide(draft, command(request_key="k-1"), met, RULES))
    assert (type(error), error.code) == (Invalid, "key_reused")
    assert draft.is_empty


@pytest.mark.parametrize("state", SessionState)
def test_new_call_is_taken_when_the_session_is_active_and_never_else(state: SessionState) -> None:
    """Nothing runs in a session that waits for a person, unwinds or is over."""
    draft = new_draft(new_session(state))
    decision = intercept.decide(draft, command(), seen(), RULES)
    if state is SessionState.ACTIVE:
        assert isinstance(decision, Execute)
        return
    error = refusal_of(decision)
    expected = "session_awaiting_approval" if state is SessionState.AWAITING_APPROVAL else "session_not_active"
    assert (type(error), error.code, error.facts["state"]) == (Conflict, expected, state)
    assert draft.is_empty


STEPS: list[tuple[int, int | None, int | None]] = [
    (0, 1, 1),
    (0, 7, 7),
    (0, None, 1),
    (7, None, 8),
    (7, 8, 8),
    (7, MAX_STEP_INDEX, MAX_STEP_INDEX),
    (7, 7, None),
    (7, 3, None),
    (7, MAX_STEP_INDEX + 1, None),
    (MAX_STEP_INDEX, None, None),
]


@pytest.mark.parametrize(("last", "asked", "expected"), STEPS)
def test_step_is_taken_assigned_or_refused_when_compared_with_the_last(last: int, asked: int | None, expected: int | None) -> None:
    """Steps only grow; one that is not named is the next; the column's end is the end."""
    draft = new_draft(new_session(last_step=last))
    decision = intercept.decide(draft, command(step_index=asked), seen(), RULES)
    if expected is None:
        error = refusal_of(decision)
        assert (error.code, error.facts["last_step"]) == ("step_out_of_order", last)
        return
    assert isinstance(decision, Execute)
    assert (decision.effect.step_index, draft.session.last_step) == (expected, expected)
    assert decision.undo_entry is not None
    assert decision.undo_entry.stack_position == expected


UNDO = new_compensation()
R = Reversibility
# What stands inline, where it is allowed and where not -> the class of the call, or the refusal's code.
INLINE: list[tuple[R | None, bool, R | str, R | str]] = [
    (None, False, R.IRREVERSIBLE, R.IRREVERSIBLE),
    (None, True, R.COMPENSATABLE, "inline_not_allowed"),
    (R.READ_ONLY, False, R.READ_ONLY, "inline_not_allowed"),
    (R.READ_ONLY, True, "compensation_not_allowed", "inline_not_allowed"),
    (R.REVERSIBLE, False, "tool_needs_compensation", "inline_not_allowed"),
    (R.REVERSIBLE, True, R.REVERSIBLE, "inline_not_allowed"),
    (R.COMPENSATABLE, False, "tool_needs_compensation", "inline_not_allowed"),
    (R.COMPENSATABLE, True, R.COMPENSATABLE, "inline_not_allowed"),
    (R.IRREVERSIBLE, False, R.IRREVERSIBLE, R.IRREVERSIBLE),
    (R.IRREVERSIBLE, True, "compensation_not_allowed", "inline_not_allowed"),
]


@pytest.mark.parametrize(("inline", "has_undo", "allowed", "denied"), INLINE)
def test_class_is_inline_or_irreversible_when_nobody_registered_the_tool(
    inline: R | None,
    has_undo: bool,
    allowed: R | str,
    denied: R | str,
) -> None:
    """Unknown tools fail closed; whoever describes one inline must be allowed to, and must describe it whole."""
    for rules, expected in ((RULES, allowed), (DENY, denied)):
        decision, kinds = decide_fresh(rules, reversibility=inline, compensation=UNDO if has_undo else None)
        if not isinstance(expected, Reversibility):
            assert refusal_of(decision).code == expected
            assert kinds == []
            continue
        if expected is R.IRREVERSIBLE:
            assert isinstance(decision, AwaitApproval)
            assert kinds == [EntryKind.OPENED, EntryKind.AWAITING_APPROVAL]
            continue
        assert isinstance(decision, Execute)
        assert decision.effect.reversibility is expected
        assert (decision.undo_entry is not None) is has_undo
        assert kinds == [EntryKind.OPENED, EntryKind.INTENT]


def test_execute_registers_effect_and_undo_when_the_call_may_go_ahead() -> None:
    """The undo is on the stack, pending, in the same decision that says go; ids are UUIDv7 of ours."""
    draft = new_draft(new_session(last_step=1))
    asked = command(step_index=StepIndex(2), request_key="k-2", traceparent="00-1-2-01")
    decision = intercept.decide(draft, asked, seen(), RULES)
    assert isinstance(decision, Execute)
    changes = draft.changes()
    assert (changes.effects[0].before, changes.undo_entries[0].before) == (None, None)
    effect, entry = changes.effects[0].after, changes.undo_entries[0].after
    assert (effect.state, effect.outcome, effect.attempt, effect.version, effect.executed_at) == (EffectState.EXECUTING, None, 1, 1, None)
    assert (effect.request_key, effect.traceparent, effect.payload) == ("k-2", "00-1-2-01", asked.payload)
    assert (entry.state, entry.compensation, entry.registered_at) == (UndoState.PENDING, UNDO, effect.registered_at)
    assert {effect.effect_id.version, entry.undo_id.version} == {7}
    assert effect.effect_id != UUID(int=entry.undo_id.int)
    assert (changes.calls, changes.approvals, changes.after.state) == ((), (), SessionState.ACTIVE)
    assert effect.payload_sha256.hex() not in changes.entries[-1].body.decode(), "a bare digest of a guessable payload gives it away"


def test_call_is_parked_when_it_is_irreversible() -> None:
    """Nothing runs, nothing can be undone: a question with an end is put to a person, and the session waits."""
    draft = new_draft(new_session())
    decision = intercept.decide(draft, command(reversibility=R.IRREVERSIBLE, compensation=None), seen(), RULES)
    assert isinstance(decision, AwaitApproval)
    changes = draft.changes()
    assert changes.approvals == (Change(before=None, after=decision.approval),)
    assert (decision.approval.expires_at - decision.approval.requested_at).total_seconds() == RULES.approval_ttl_seconds
    assert (changes.after.state, changes.after.last_step) == (SessionState.AWAITING_APPROVAL, 1)
    assert (changes.effects[0].after.state, changes.undo_entries, changes.calls) == (EffectState.AWAITING_APPROVAL, (), ())


def test_irreversible_call_is_refused_when_earlier_effects_are_open() -> None:
    """What cannot be undone comes after everything else is known; an undoable call does not mind."""
    met = seen(unsettled=[new_effect(EffectState.EXECUTING, 1), new_effect(EffectState.UNKNOWN, 2)])
    draft = new_draft(new_session(last_step=2))
    asked = command(step_index=StepIndex(3), reversibility=R.IRREVERSIBLE, compensation=None)
    error = refusal_of(intercept.decide(draft, asked, met, RULES))
    assert (type(error), error.code) == (Conflict, "unsettled_effects")
    assert error.facts["unsettled"] == [
        {"step_index": 1, "tool": "issue_credit", "state": "executing"},
        {"step_index": 2, "tool": "issue_credit", "state": "unknown"},
    ]
    assert draft.is_empty
    assert isinstance(intercept.decide(draft, command(step_index=StepIndex(3)), met, RULES), Execute)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/u", "http://[::1]/u", "ftp://a.example/u", "https://u:p@a.example/", "https:///u", "no url"]
)
@pytest.mark.parametrize("place", ["/compensation/url", "/compensation/unknown/url"])
def test_url_is_refused_at_intercept_when_it_could_never_be_called(url: str, place: str) -> None:
    """A dead undo address is discovered before the call runs, with its place in the request."""
    bad = new_compensation(url=url) if place == "/compensation/url" else new_compensation(unknown=UnknownVariant(args=b"{}", url=url))
    decision, kinds = decide_fresh(compensation=bad)
    error = refusal_of(decision)
    assert (type(error), error.code, kinds) == (Invalid, "url_refused", [])
    assert [fault["pointer"] for fault in error.facts["errors"]] == [place]  # type: ignore[attr-defined]  # facts are JSON


def reference(text: str) -> bytes:
    """Write args with one reference."""
    return dump({"x": [{"$ref": text}]})


OPEN = dump([{"$ref": "result#/id"}] * MAX_REFERENCES)
TOO_OPEN = dump([{"$ref": "result#/id"}] * (MAX_REFERENCES + 1))
BIG = dump({"text": "x" * (bindings.MAX_BOUND_ARGS_BYTES // 2)})
# args -> the refusal's code and the place of the fault, or None where they are taken; the payload is `BIG` with `amount` beside.
REFERENCES: list[tuple[bytes, tuple[str, str] | None]] = [
    (reference("payload#/amount"), None),
    (reference("effect#/forward_key"), None),
    (reference("result#/credit_id"), None),
    (reference("result#"), None),
    (OPEN, None),
    (dump({"$ref": "payload#/amount", "more": 1}), ("bad_reference", "")),
    (dump({"$ref": "#/definitions/amount", "more": 1}), None),
    (dump({"$ref": 7}), None),
    (reference("payload#/nope"), ("unresolved_reference", "/x/0")),
    (reference("effect#/nope"), ("unresolved_reference", "/x/0")),
    (reference("session#/id"), ("bad_reference", "/x/0")),
    (reference("result#credit_id"), ("bad_reference", "/x/0")),
    (reference("https://a.example/schema"), ("bad_reference", "/x/0")),
    (TOO_OPEN, ("bad_reference", f"/{MAX_REFERENCES}")),
    (dump([{"$ref": "payload#/text"}] * 3), ("args_too_large", "")),
]


@pytest.mark.parametrize(("args", "fault"), REFERENCES)
@pytest.mark.parametrize("is_variant", [False, True])
def test_references_are_checked_when_a_call_is_registered(args: bytes, fault: tuple[str, str] | None, is_variant: bool) -> None:
    """What can be bound now is, what waits for the result may be open, and everything else is refused with its place."""
    undo = new_compensation(unknown=UnknownVariant(args=args)) if is_variant else new_compensation(args)
    payload = BIG[:-1] + b',"amount":1.50}'
    decision, kinds = decide_fresh(compensation=undo, payload=payload)
    if fault is None:
        assert isinstance(decision, Execute)
        assert decision.undo_entry is not None
        assert decision.undo_entry.compensation == undo, "the descriptor is kept as it was said"
        return
    error = refusal_of(decision)
    place = "/compensation/unknown/args" if is_variant else "/compensation/args"
    assert (type(error), error.code, kinds) == (Invalid, fault[0], [])
    assert [each["pointer"] for each in error.facts["errors"]] == [place + fault[1]]  # type: ignore[attr-defined]  # facts are JSON


def test_reference_into_the_payload_is_refused_when_the_payload_is_no_json() -> None:
    """An opaque payload has no places to point at; without references it is as good as any."""
    opaque = b"\xe2\x82\xac not json"
    decision, _ = decide_fresh(payload=opaque, compensation=new_compensation(reference("payload#/a")))
    assert refusal_of(decision).code == "unresolved_reference"
    decision, _ = decide_fresh(payload=opaque)
    assert isinstance(decision, Execute)


REFERENCE_LIKE = st.sampled_from(["result#/secret", "effect#/forward_key", "payload#/x", "rubbish"]).map(lambda text: {"$ref": text})


@given(
    st.recursive(
        REFERENCE_LIKE, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "$ref"]), inner), max_leaves=4
    )
)
def test_what_looks_like_a_reference_stays_text_when_it_came_from_payload_or_result(injected: Any) -> None:
    """Data is never code: an agent's payload or a tool's result cannot make the service look anything up."""
    undo = new_compensation(dump({"p": {"$ref": "payload#/x"}, "r": {"$ref": "result#/x"}}))
    effect = new_effect(
        EffectState.COMMITTED, payload=dump({"x": injected}), result=dump({"x": injected, "secret": "s"}), outcome=Outcome.COMMITTED
    )
    assert bindings.body_to_send(undo.args, effect) == dump({"p": injected, "r": injected})
    decision, _ = decide_fresh(compensation=undo, payload=effect.payload)
    assert isinstance(decision, Execute)
