"""The checker finds each invariant broken when it is, and nothing where nothing is. Must not run the service: evidence is made by hand."""

import json
from collections.abc import Callable

import pytest

from tests.fakes import Mode, Received
from tests.faults.checker import INVARIANTS, check
from tests.faults.evidence import Call, Evidence, Export, Heard, Inflicted, JsonObject
from tests.faults.histories import (
    ADMIN,
    AGENT,
    FAILED_JOURNAL,
    HALTED_JOURNAL,
    OPERATOR,
    ORCHESTRATOR,
    ORG,
    OTHER,
    UNDO_ARGS,
    Told,
    call,
    effect,
    entry,
    export,
    good,
    intent,
    request,
    undone,
)

Break = Callable[[Evidence], object]


def named(evidence: Evidence, name: str) -> Export:
    """Return a session of the run."""
    return next(one for one in evidence.exports if one.name == name)


def asked(evidence: Evidence, op: str) -> Call:
    """Return the first call of that kind."""
    return next(one for one in evidence.calls if one.op == op)


def retold(name: str, told: tuple[Told, ...], **shown: object) -> Break:
    """Return what gives a session another journal, which verifies, and shows it otherwise."""

    def break_it(evidence: Evidence) -> None:
        found = named(evidence, name)
        again = export(name, {**found.view, **shown}, told, found.org)
        found.view, found.journal, found.verified = again.view, again.journal, again.verified

    return break_it


def also(*requests: Received) -> Break:
    """Return what lets the endpoint have seen more."""
    return lambda evidence: evidence.requests.extend(requests)


def heard(*calls: Call) -> Break:
    """Return what lets clients have seen more."""
    return lambda evidence: evidence.calls.extend(calls)


def without(told: tuple[Told, ...], kind: str, step: int | None = None) -> tuple[Told, ...]:
    """Return a journal that lacks what it should say."""
    return tuple(one for one in told if (one[0], one[1]) != (kind, step))


def undo(step: int, started_at: float, ended_at: float, **changes: object) -> Received:
    """Return an undo request."""
    return request("undo", f"undo-u{step}", started_at, ended_at, step=step, **changes)


def happen_at(moved: Received, at: float) -> None:
    """Move a request to another time."""
    moved.started_at, moved.ended_at = at, at + 0.1


def with_fault(at: float, happen: Break) -> Break:
    """Return what lets something have been broken at that time, and lets this happen too."""

    def break_it(evidence: Evidence) -> None:
        evidence.faults.append(Inflicted(kind="SIGSTOP, SIGCONT", at=at))
        happen(evidence)

    return break_it


def sent_twice(evidence: Evidence) -> None:
    """Let an undo have been sent anew while it was under way."""
    also(undo(2, 3.25, 3.35, attempt=3))(evidence)


def hang_up(evidence: Evidence) -> None:
    """Let an attempt have hung until its sender gave it up, of which the endpoint heard late."""
    evidence.requests[2].mode, evidence.requests[2].ended_at = Mode.HANG, 3.4


def resent(step: int, **changes: str) -> Break:
    """Return what lets every attempt of an undo have been sent otherwise."""

    def break_it(evidence: Evidence) -> None:
        kept = [one for one in evidence.requests if one.key != f"undo-u{step}"]
        evidence.requests = [*kept, undo(step, 3.0, 3.1, **changes), undo(step, 3.2, 3.3, attempt=2, **changes)]

    return break_it


def undone_with(step: int, args: JsonObject) -> Break:
    """Return what lets an undo have been begun, and sent, with such arguments."""

    def break_it(evidence: Evidence) -> None:
        begun = {2: undone(2), 1: undone(1), step: undone(step, args=args)}
        retold("failed", (*FAILED_JOURNAL[:5], *begun[2], *begun[1], FAILED_JOURNAL[-1]))(evidence)
        for one in evidence.requests:
            one.body = json.dumps(args).encode() if one.key == f"undo-u{step}" else one.body

    return break_it


def begun_anew(evidence: Evidence) -> None:
    """Let a person have had an undo tried again, whose second attempt was sent with the bytes of the first."""
    anew = undone(2, attempts_before=1, args={**UNDO_ARGS[2], "more": 1})
    given_up: Told = ("COMPENSATION_FAILED", 2, ORCHESTRATOR, {"undo_id": "u2"})
    halted: Told = ("HALTED", None, ORCHESTRATOR, {"reason": "compensation_failed"})
    retried: Told = ("RETRIED", None, OPERATOR, {"undo_id": "u2"})
    told = (*FAILED_JOURNAL[:6], given_up, halted, retried, *anew, *FAILED_JOURNAL[7:])
    retold("failed", told)(evidence)


def forget(evidence: Evidence, *numbers: int) -> None:
    """Let the endpoint never have seen these requests."""
    evidence.requests = [one for at, one in enumerate(evidence.requests) if at not in numbers]


def show(name: str, **members: object) -> Break:
    """Return what shows a session otherwise than its journal has it."""
    return lambda evidence: named(evidence, name).view.update(members)


def first_effect(evidence: Evidence, name: str, *, at: int = 0) -> dict[str, object]:
    """Return the newest effect of a session, or the one at that place."""
    found: dict[str, object] = named(evidence, name).view["effects"][at]
    return found


LATE_COMMIT: Told = ("LATE_COMMIT", 1, AGENT, {"effect_id": "e1", "result": 1})
OLDEST_FIRST = (*FAILED_JOURNAL[:5], *undone(1), *undone(2), FAILED_JOURNAL[-1])
NOT_BEGUN = {"undo_stack": [entry(2, "skipped"), entry(1)]}
SKIPPED: Told = ("SKIPPED", 2, ORCHESTRATOR, {"undo_id": "u2"})
TOLD_TWICE = {"decision": "execute", "step_index": 1, "effect_id": "other", "undo_id": "u1", "forward_key": "effect-e1"}


def skipped(actor: str, reason: str, *not_applied_steps: int) -> Break:
    """Return what lets the newer undo have been skipped instead of sent."""
    failed: Told = ("SESSION_FAILED", None, AGENT, {"unknown_steps": [], "not_applied_steps": list(not_applied_steps)})
    told: tuple[Told, ...] = (*FAILED_JOURNAL[:4], failed, ("SKIPPED", 2, actor, {"undo_id": "u2", "reason": reason}), *FAILED_JOURNAL[7:])
    newer = effect(2, "compensatable", "failed" if not_applied_steps else "executing")

    def break_it(evidence: Evidence) -> None:
        retold("failed", told, effects=[newer, first_effect(evidence, "failed", at=1)], **NOT_BEGUN, clean=False)(evidence)
        forget(evidence, 2, 3)

    return break_it


def still_asked(expires_at: str) -> Break:
    """Return what lets a question stand open at the end."""

    def break_it(evidence: Evidence) -> None:
        wire = {**first_effect(evidence, "halted"), "state": "awaiting_approval", "approval": {"expires_at": expires_at}}
        retold("halted", HALTED_JOURNAL[:2], state="awaiting_approval", effects=[wire])(evidence)
        forget(evidence, 5)
        evidence.escalated[ORG].clear()
        evidence.calls = [one for one in evidence.calls if one.session != "halted" or one.op == "open"]

    return break_it


BROKEN: dict[str, tuple[str, Break]] = {
    "executed without an intent": ("I1", retold("failed", without(FAILED_JOURNAL, "INTENT", 2))),
    "executed without an undo": ("I1", show("failed", undo_stack=[entry(1)])),
    "ran without being asked for": ("I1", also(request("act", "effect-e9", 1.0, 1.1, step=9))),
    "oldest first at the endpoint": ("I2", lambda evidence: happen_at(evidence.requests[4], 2.5)),
    "oldest first in the journal": ("I2", retold("failed", OLDEST_FIRST)),
    "repeated after a later one": ("I2", also(undo(2, 5.0, 5.1, attempt=3))),
    "two undos at once": ("I3", also(undo(2, 3.9, 4.05, attempt=3))),
    "one undo twice at once, and nothing had broken": ("I3", sent_twice),
    "one undo twice at once, long after a fault": ("I3", with_fault(-1.0, sent_twice)),
    "one undo twice at once, before a fault": ("I3", with_fault(3.3, sent_twice)),
    "one attempt sent twice at once": ("I3", also(undo(2, 3.25, 3.35, attempt=2))),
    "another key": ("I4", also(request("undo", "undo-u7", 3.4, 3.5, step=2))),
    "a key that is no undo's": ("I4", also(request("undo", "effect-e2", 3.4, 3.5, step=2))),
    "other bytes": ("I4", also(undo(2, 3.4, 3.5, attempt=3, body='{"more":1}'))),
    "other bytes than the journal's in every attempt": ("I4", resent(2, body=json.dumps({**UNDO_ARGS[2], "more": 1}))),
    "another place than the journal's in every attempt": ("I4", resent(2, target=f"/{ORG}/failed/7/undo")),
    "another step's credit in the journal too": ("I4", undone_with(1, {"of": ORG, "credit": f"{ORG}-2"})),
    "another call to be found in the journal too": ("I4", undone_with(2, {"of": ORG, "find": "effect-e1"})),
    "the bytes of before a person's retry": ("I4", begun_anew),
    "an attempt counted once and sent twice": ("I4", also(undo(2, 3.4, 3.5, attempt=2))),
    "pending below an end": ("I5", show("failed", undo_stack=[entry(2), entry(1, "pending")])),
    "said to be done and never done": ("I5", lambda evidence: forget(evidence, 4)),
    "only accepted, and said to be done": ("I5", lambda evidence: setattr(evidence.requests[4], "status", 202)),
    "skipped without a reason": ("I5", retold("failed", (*FAILED_JOURNAL[:5], SKIPPED, *FAILED_JOURNAL[7:]), **NOT_BEGUN)),
    "given up by the service itself": ("I5", skipped(ORCHESTRATOR, "compensation_failed")),
    "skipped as not applied, which nobody said": ("I5", skipped(ORCHESTRATOR, "not_applied")),
    "skipped as completed, which it is not": ("I5", skipped(AGENT, "completed")),
    "done at the endpoint and not undone there": ("I5", lambda evidence: setattr(evidence.requests[4], "is_applied", False)),
    "undone without a failure": (
        "I6",
        also(request("undo", "undo-u1", 6.0, 6.1, step=1, session="completed", target=f"/{OTHER}/completed/1/undo")),
    ),
    "undone before anybody failed the run": ("I6", lambda evidence: setattr(asked(evidence, "fail"), "asked_at", 3.1)),
    "undone unsaid": ("I6", retold("failed", without(FAILED_JOURNAL, "COMPENSATING", 1))),
    "released twice": ("I7", retold("halted", (*HALTED_JOURNAL[:4], intent(1, released_to="x"), *HALTED_JOURNAL[4:]))),
    "released unapproved": ("I7", retold("halted", without(HALTED_JOURNAL, "APPROVED", 1))),
    "approved by whoever asked": (
        "I7",
        retold("halted", (*HALTED_JOURNAL[:2], ("APPROVED", 1, "operator:agent-1", {}), *HALTED_JOURNAL[3:])),
    ),
    "released after a no": ("I7", retold("halted", (*HALTED_JOURNAL[:3], ("EXPIRED", 1, ORCHESTRATOR, {}), *HALTED_JOURNAL[3:]))),
    "released too late": (
        "I7",
        lambda evidence: first_effect(evidence, "halted").update(approval={"expires_at": "2026-01-01T00:00:04.000000Z"}),
    ),
    "ran unreleased": ("I7", retold("halted", without(HALTED_JOURNAL, "INTENT", 1))),
    "ran with other bytes": ("I7", lambda evidence: setattr(evidence.requests[5], "body", b'{"amount":"1000"}')),
    "released to two": ("I7", heard(call("resume", {**TOLD_TWICE, "effect_id": "e1"}, who=OPERATOR, session="halted", step=1))),
    "decided twice": ("I8", retold("halted", (*HALTED_JOURNAL[:3], ("REJECTED", 1, ADMIN, {"then": "continue"}), *HALTED_JOURNAL[3:]))),
    "told otherwise": ("I8", heard(call("reject", {}, who=ADMIN, session="halted", step=1))),
    "went on after the end": ("I9", retold("completed", (("OPENED", None, AGENT, {}), ("COMPLETED", None, AGENT, {}), intent(1)))),
    "left a halt by itself": ("I9", retold("halted", (*HALTED_JOURNAL, ("RESOLVED", None, ORCHESTRATOR, {})), state="resolved")),
    "was seen to leave an end": ("I9", heard(call("look", {"state": "compensating"}, answered_at=4.0))),
    "changed in the journal": ("I10", lambda evidence: named(evidence, "failed").journal[2].update(body='{"effect_id":"e9"}')),
    "a content changed": ("I10", lambda evidence: named(evidence, "failed").journal[2]["content"]["result"].update(text="2")),
    "cut off at the end": ("I10", lambda evidence: named(evidence, "failed").journal.pop()),
    "not verified by the service": ("I10", lambda evidence: named(evidence, "failed").verified.update(valid=False)),
    "written anew": ("I10", lambda evidence: evidence.checkpoints[0].journal[0].update(actor="agent:other")),
    "shown otherwise than told": ("I10", show("completed", state="active")),
    "an effect shown otherwise than told": ("I10", lambda evidence: first_effect(evidence, "failed").update(state="committed")),
    "an effect gone": ("I11", show("failed", effects=[])),
    "other ids than acknowledged": ("I11", heard(call("intercept", TOLD_TWICE))),
    "a commit gone": ("I11", retold("failed", without(FAILED_JOURNAL, "EXECUTED", 1))),
    "another result": ("I11", lambda evidence: asked(evidence, "commit").body.update(result={"credit": "c2"})),
    "a session gone": ("I11", lambda evidence: evidence.exports.pop(0)),
    "still unwinding": ("I12", show("failed", state="compensating")),
    "never ended": ("I12", show("completed", state="active")),
    "waiting for nobody": ("I12", show("completed", state="awaiting_approval")),
    "a question still open after its time": ("I12", still_asked("2025-12-31T23:59:20.000000Z")),
    "a question answered long after its time": (
        "I12",
        lambda evidence: first_effect(evidence, "halted").update(approval={"expires_at": "2025-12-31T23:59:20.000000Z"}),
    ),
    "never answered": ("I12", heard(call("commit", {}, heard=Heard.INFO))),
    "a fault of the service's own": ("I12", lambda evidence: evidence.crashes.append("call_crashed")),
    "answered 500": ("I12", heard(call("commit", {}, heard=Heard.INFO, status=500))),
    "refused for nothing": ("I13", heard(call("commit", {"code": "result_differs"}, heard=Heard.FAIL, status=409, step=1))),
    "answered twice, and differently": ("I13", heard(call("fail", {"state": "halted"}, key="fail"))),
    "two effects under one key": ("I13", heard(call("intercept", TOLD_TWICE, key="step-1", path="/intercept"))),
    "other bytes accepted": ("I13", heard(call("intercept", {**TOLD_TWICE, "effect_id": "e1"}, must_refuse=True))),
    "another org's session listed": ("I14", lambda evidence: evidence.listed[OTHER].append("failed")),
    "an own session not listed": ("I14", lambda evidence: evidence.listed[OTHER].clear()),
    "another org's data answered": ("I14", heard(call("look", {"state": "compensated", "of": OTHER}, answered_at=4.0))),
    "another org's data kept": ("I14", show("failed", metadata={"of": OTHER})),
    "another org's data sent": ("I14", also(undo(2, 3.4, 3.5, attempt=3, body=f'{{"of":"{OTHER}"}}'))),
    "seen across": ("I14", lambda evidence: setattr(asked(evidence, "look across"), "heard", Heard.OK)),
    "halted in silence": ("I15", lambda evidence: evidence.escalated[ORG].clear()),
}


def test_nothing_is_found_when_everything_holds() -> None:
    """A checker that cries wolf is turned off."""
    assert check(good()) == []


@pytest.mark.parametrize("way", BROKEN)
def test_invariant_is_named_when_it_does_not_hold(way: str) -> None:
    """Whatever else follows from it, the one that was broken is among those that are named."""
    number, break_it = BROKEN[way]
    evidence = good()
    break_it(evidence)
    found = check(evidence)
    assert number in {violation.invariant.split()[0] for violation in found}, found
    assert all(violation.detail for violation in found)


def test_every_invariant_is_broken_once_when_all_ways_are_counted() -> None:
    """An invariant that no hand-made history breaks may as well not be looked at."""
    assert {number for number, _ in BROKEN.values()} == {name.split()[0] for name in INVARIANTS}


ALLOWED: dict[str, Break] = {
    "a fenced-out worker's late repeat": lambda evidence: happen_at(evidence.requests[2], 5.0),
    "a worker that lost its lease in mid-request": with_fault(3.05, lambda evidence: setattr(evidence.requests[2], "ended_at", 4.5)),
    "an attempt of a worker that lost its lease by a fault": with_fault(3.0, sent_twice),
    "an attempt after one that hung": hang_up,
    "a skip by a person": skipped(OPERATOR, "it was looked into"),
    "a skip of what did nothing": skipped(ORCHESTRATOR, "not_applied", 2),
    "a question that is in time": still_asked("2026-01-01T01:00:00.000000Z"),
    "an act that its undo had overtaken": lambda evidence: happen_at(evidence.requests[0], 5.0),
    "a late report": retold("failed", (*FAILED_JOURNAL, LATE_COMMIT)),
    "a call that was asked again": heard(call("fail", {"state": "failed"}, key="fail")),
    "a look before the end": heard(call("look", {"state": "active"}, answered_at=0.5)),
}


def test_nothing_is_found_when_what_happened_is_allowed() -> None:
    """What a crash, a stall or a late report may leave behind is no violation."""
    for way, happen in ALLOWED.items():
        evidence = good()
        happen(evidence)
        assert check(evidence) == [], way
