"""The demo's second half names the promise that is broken, and shows nothing but what is so. Must not play it: see `test_demo`."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from app.cli.demo import curl
from app.cli.demo.agent import Done
from app.cli.demo.api import Answered
from app.cli.demo.curl import Command
from app.cli.demo.escalation_page import page
from app.cli.demo.failure import DemoFailed
from app.cli.demo.journal import Journal
from app.cli.demo.listeners import WorldState
from app.cli.demo.person import move_about
from app.cli.demo.screen import WIDTH, say, say_checks, say_heading, say_lines, say_turn
from app.cli.demo.second_verdict import (
    AWAITING,
    Escalated,
    Refused,
    Released,
    Seen,
    Unwound,
    judge_escalated,
    judge_refused,
    judge_released,
    judge_unwound,
)
from app.cli.demo.systems import MAIL_IS_DOWN, MAILS_PATH, CallLog, JsonObject, LedgerLine, LoggedCall, Mail, Request
from app.cli.demo.verdict import Check
from app.domain.model import Reversibility

OPERATOR = "demo-operator"
PAYLOAD = b'{"to":"ada@example.com"}'
TOLD = {"message": AWAITING, "forward_key": "effect-4", "payload_sha256": sha256(PAYLOAD).hexdigest()}
CREDIT = LedgerLine(line_id="cr", amount=5)
REVERSAL = LedgerLine(line_id="rv", amount=-5, reverses="cr")
BEFORE = WorldState(ledger=(), ticket_status="open", notes=(), mails=0)
THEN = WorldState(ledger=(CREDIT,), ticket_status="refunded", notes=("a note",), mails=1)


def done(step: int, tool: str = "a_tool") -> Done:
    """Return a step that was taken."""
    return Done(
        step_index=step,
        tool=tool,
        reversibility=Reversibility.REVERSIBLE,
        story="",
        undo_story=f"undo {step}",
        forward_key=f"effect-{step}",
        undo_id=str(step),
    )


def called(at: int, key: str, *, system: str = "shop", body: bytes = b"{}", status: int = 200) -> LoggedCall:
    """Return a call that came at a moment and was answered half a second later."""
    request = Request(method="POST", path="/", key=key, attempt=1, body=body)
    is_applied = status < 300
    return LoggedCall(number=at, system=system, request=request, arrived_at=at, ended_at=at + 0.5, status=status, is_applied=is_applied)


def journal(*entries: tuple[str, int | None, str, JsonObject], is_valid: bool = True) -> Journal:
    """Return a journal of these kinds, steps, actors and bodies."""
    made = [{"kind": kind, "step": step, "actor": actor, "body": json.dumps(body)} for kind, step, actor, body in entries]
    return Journal(entries=made, is_valid=is_valid, message="" if is_valid else "entry 3 was changed")


def session(state: str, halt_reason: str | None = None, *, clean: bool = False) -> JsonObject:
    """Return a session as the API tells of it."""
    return {"state": state, "halt_reason": halt_reason, "clean": clean}


AGENT, ENGINE, PERSON = "agent:demo-agent", "orchestrator", f"operator:{OPERATOR}"
DONE = [done(1), done(2), done(3)]
ASKED: list[tuple[str, int | None, str, JsonObject]] = [
    ("EXECUTED", 3, AGENT, {}),
    ("AWAITING_APPROVAL", 4, AGENT, {}),
    ("APPROVED", 4, PERSON, {}),
]
MISMATCHED = [*ASKED, ("PAYLOAD_MISMATCH", 4, AGENT, {}), ("SESSION_FAILED", None, AGENT, {}), ("UNWOUND", None, ENGINE, {})]
SENT = [*ASKED, ("INTENT", 4, AGENT, {}), ("EXECUTED", 4, AGENT, {}), ("PIVOT", 4, AGENT, {})]
HALTED = [*SENT, ("SESSION_FAILED", None, AGENT, {}), ("HALTED", None, AGENT, {"reason": "failed_after_pivot"})]
ORDERED = [
    *HALTED,
    ("UNWIND_ORDERED", None, PERSON, {}),
    ("COMPENSATED", 3, ENGINE, {}),
    ("COMPENSATION_FAILED", 2, ENGINE, {}),
    ("HALTED", None, ENGINE, {"reason": "compensation_failed"}),
    ("COMPENSATED", 1, PERSON, {"by_hand": True}),
    ("RETRIED", 2, PERSON, {}),
    ("COMPENSATED", 2, ENGINE, {}),
    ("UNWOUND", None, ENGINE, {}),
]

UNDONE = [called(10, "undo-3"), called(11, "undo-2"), called(12, "undo-1")]
SENT_ONCE = called(5, "effect-4", system="mail", body=PAYLOAD, status=201)

REFUSED = Refused(
    seen=Seen(
        done=DONE,
        step=4,
        told=TOLD,
        calls=UNDONE,
        before=BEFORE,
        now=replace(BEFORE, ledger=(CREDIT, REVERSAL)),
        session=session("compensated", clean=True),
        journal=journal(*MISMATCHED),
        approver=OPERATOR,
    ),
    resumed=Answered(status=409, members={"code": "payload_changed"}),
)
RELEASED = Released(
    seen=replace(REFUSED.seen, calls=[SENT_ONCE], now=THEN, session=session("halted", "failed_after_pivot"), journal=journal(*HALTED)),
    resumed_again=Answered(status=409, members={"code": "already_released"}),
)
UNWOUND = Unwound(
    seen=replace(
        RELEASED.seen,
        calls=[SENT_ONCE, called(10, "undo-3"), called(11, "undo-2", status=423), called(12, "by-hand"), called(13, "undo-2")],
        now=replace(BEFORE, ledger=(CREDIT, REVERSAL), mails=1),
        session=session("compensated"),
        journal=journal(*ORDERED),
    ),
    by_hand=DONE[0],
    refused=DONE[1],
    halted=session("halted", "compensation_failed"),
    then=THEN,
)


def refused(**seen: Any) -> Refused:
    """Return chapter A with something else in it."""
    return replace(REFUSED, seen=replace(REFUSED.seen, **seen))


def released(**seen: Any) -> Released:
    """Return chapter B with something else in it."""
    return replace(RELEASED, seen=replace(RELEASED.seen, **seen))


def unwound(**seen: Any) -> Unwound:
    """Return chapter D with something else in it."""
    return replace(UNWOUND, seen=replace(UNWOUND.seen, **seen))


def judged(found: Refused | Released | Escalated | Unwound) -> list[Check]:
    """Return what became of the promises of a chapter."""
    match found:
        case Refused():
            return judge_refused(found)
        case Released():
            return judge_released(found)
        case Escalated():
            return judge_escalated(found)
        case Unwound():
            return judge_unwound(found)


def without(entries: Sequence[Any], kind: str) -> list[Any]:
    """Return a journal's entries without those of one kind."""
    return [entry for entry in entries if entry[0] != kind]


def another(entries: Sequence[Any], kind: str, actor: str) -> list[Any]:
    """Return a journal's entries with another actor of one kind."""
    return [(found, step, actor if found == kind else who, body) for found, step, who, body in entries]


def move(name: str, body: JsonObject, path: str) -> JsonObject:
    """Return an open move with its command."""
    url = f"http://127.0.0.1:8420/v1/sessions/s{path}"
    sent = json.dumps({**body, "reason": "REASON"}).replace('"', '\\"').replace("REASON", "${REASON:?say why}")
    key = '"Authorization: Bearer ${COUNTERMAND_KEY:?an operator key}"'
    headers = f"-H {key} -H 'Content-Type: application/json' -H 'If-Match: \"v9\"' -H 'Idempotency-Key: {name}-v9'"
    command = f'curl -sS -X POST {url} {headers} -d "{sent}"'
    return {"name": name, "title": name, "consequence": "", "warning": None, "method": "POST", "url": url, "body": body, "curl": command}


MOVES = [move("skip", {"by_hand": True}, "/undo/7/skip"), move("unwind", {}, "/unwind"), move("resolve", {}, "/resolve")]
PACKAGE: JsonObject = {
    "explanation": "why",
    "advice": "what to do",
    "undone": [],
    "not_undone": [{"step_index": step, "tool": "a_tool", "description": f"undo {step}", "sentence": "not sent yet"} for step in (3, 2, 1)],
    "cannot_be_undone": [{"step_index": 4, "tool": "send_reply", "description": "", "sentence": "irreversible"}],
    "steps": [{"step_index": step, "forward_key": f"effect-{step}", "result": {}} for step in (1, 2, 3, 4)]
    + [{"step_index": 5, "forward_key": "effect-5", "result": None}],
    "undo_stack": [{"undo_id": "7", "step_index": 3}],
    "decisions": [
        {"kind": "APPROVED", "step": 4, "actor": PERSON, "details": {"reason": "checked"}},
        {"kind": "SESSION_FAILED", "step": None, "actor": AGENT, "details": {"error": "it broke"}},
    ],
    "moves": MOVES,
}


def commands(moves: Sequence[JsonObject]) -> list[Command]:
    """Read the commands of moves."""
    return [curl.read(each["curl"], {"COUNTERMAND_KEY": "a-key", "REASON": "because"}) for each in moves]


ESCALATED = Escalated(
    done=DONE,
    reply=done(4, "send_reply"),
    error="it broke",
    announcement={"reason": "failed_after_pivot"},
    escalation=PACKAGE,
    commands=commands(MOVES),
    approver=OPERATOR,
)


def escalated(**members: Any) -> Escalated:
    """Return chapter C with something else in its package."""
    package = {**PACKAGE, **members}
    return replace(ESCALATED, escalation=package)


@pytest.mark.parametrize("found", [REFUSED, RELEASED, ESCALATED, UNWOUND])
def test_judges_find_no_fault_when_all_is_as_promised(found: Refused | Released | Escalated | Unwound) -> None:
    """Each chapter's promises can be kept."""
    assert [check for check in judged(found) if check.fault] == []


BROKEN: dict[str, tuple[Refused | Released | Escalated | Unwound, str]] = {
    "A: the model is told something else": (refused(told=TOLD | {"message": "ok"}), "the model was told"),
    "A: other bytes are let go": (
        replace(REFUSED, resumed=Answered(status=200, members={"decision": "execute"})),
        "the changed payload was refused",
    ),
    "A: refused for another reason": (
        replace(REFUSED, resumed=Answered(status=409, members={"code": "not_approved", "detail": ""})),
        "the changed payload was refused",
    ),
    "A: a mail goes out": (
        refused(calls=[called(9, "effect-4", system="mail", status=201), *UNDONE]),
        "nothing was sent",
    ),
    "A: the mail service is asked, and refuses": (
        refused(calls=[called(9, "effect-4", system="mail", status=503), *UNDONE]),
        "nothing was sent",
    ),
    "A: oldest first": (
        refused(calls=[called(10, "undo-1"), called(11, "undo-2"), called(12, "undo-3")]),
        "what was done before",
    ),
    "A: one undo is left out": (refused(calls=UNDONE[:2]), "what was done before"),
    "A: one is applied twice": (refused(calls=[*UNDONE, called(13, "undo-1")]), "what was done before"),
    "A: the credit stays": (refused(now=replace(BEFORE, ledger=(CREDIT,))), "the world"),
    "A: not clean": (refused(session=session("compensated")), "the session"),
    "A: the session goes on": (refused(session=session("active", clean=True)), "the session"),
    "A: nothing of the mismatch": (refused(journal=journal(*without(MISMATCHED, "PAYLOAD_MISMATCH"))), "the journal"),
    "A: the agent approved it": (refused(journal=journal(*another(MISMATCHED, "APPROVED", AGENT))), "the journal"),
    "A: the chain is broken": (refused(journal=journal(*MISMATCHED, is_valid=False)), "the journal"),
    "B: nothing goes out": (released(calls=[], now=replace(THEN, mails=0)), "the approved bytes went out once"),
    "B: two mails for one call": (released(now=replace(THEN, mails=2)), "the approved bytes went out once"),
    "B: two calls": (released(calls=[SENT_ONCE, SENT_ONCE]), "the approved bytes went out once"),
    "B: other bytes go out": (
        released(calls=[called(5, "effect-4", system="mail", body=b'{"to": "ada@example.com"}', status=201)]),
        "the approved bytes went out once",
    ),
    "B: another key": (
        released(calls=[called(5, "effect-9", system="mail", body=PAYLOAD, status=201)]),
        "the approved bytes went out once",
    ),
    "B: released twice": (
        replace(RELEASED, resumed_again=Answered(status=200, members={"decision": "execute"})),
        "they were released once",
    ),
    "B: undone past the pivot": (released(calls=[SENT_ONCE, called(6, "undo-3")]), "past the pivot nothing"),
    "B: unwound instead": (released(session=session("compensated")), "the session"),
    "B: halted for another reason": (released(session=session("halted", "poison")), "the session"),
    "B: no pivot": (released(journal=journal(*without(HALTED, "PIVOT"))), "the journal"),
    "B: executed before it was approved": (
        released(journal=journal(*HALTED[:2], *HALTED[3:5], HALTED[2], *HALTED[5:])),
        "the journal",
    ),
    "C: not announced as what it is": (replace(ESCALATED, announcement={"reason": "operator"}), "the session is among"),
    "C: a step is missing": (escalated(not_undone=PACKAGE["not_undone"][1:]), "what was done"),
    "C: oldest first": (escalated(not_undone=PACKAGE["not_undone"][::-1]), "what was done"),
    "C: undone, it says": (escalated(undone=PACKAGE["not_undone"]), "what was done"),
    "C: the reply is not told": (escalated(cannot_be_undone=[]), "what was done"),
    "C: a result is not told": (escalated(steps=PACKAGE["steps"][1:]), "what was done"),
    "C: who approved is not told": (escalated(decisions=PACKAGE["decisions"][1:]), "who approved"),
    "C: the error is not told": (escalated(decisions=PACKAGE["decisions"][:1]), "who approved"),
    "C: another error is told": (replace(ESCALATED, error="something else"), "who approved"),
    "C: no way to close it": (replace(escalated(moves=MOVES[:2]), commands=ESCALATED.commands[:2]), "each open move"),
    "C: a command for something else": (replace(ESCALATED, commands=ESCALATED.commands[::-1]), "each open move"),
    "C: a command that forgets what was shown": (
        replace(ESCALATED, commands=[replace(command, headers={}) for command in ESCALATED.commands]),
        "each open move",
    ),
    "C: a command without a reason": (
        replace(ESCALATED, commands=[replace(command, body="{}") for command in ESCALATED.commands]),
        "each open move",
    ),
    "D: it does not halt": (replace(UNWOUND, halted=session("compensated")), "a refused undo"),
    "D: what was done by hand is asked for": (unwound(calls=[*UNWOUND.seen.calls, called(14, "undo-1")]), "the endpoints"),
    "D: the note is left": (unwound(calls=[SENT_ONCE, *UNWOUND.seen.calls[2:]]), "the endpoints"),
    "D: other bytes the second time": (
        unwound(calls=[*UNWOUND.seen.calls[:4], called(13, "undo-2", body=b"{ }")]),
        "the retry",
    ),
    "D: tried once too often": (
        unwound(calls=[*UNWOUND.seen.calls[:3], called(12, "undo-2", status=423), called(13, "undo-2")]),
        "the retry",
    ),
    "D: the ticket is not set back": (unwound(now=replace(UNWOUND.seen.now, ticket_status="refunded")), "the world"),
    "D: one more mail": (unwound(now=replace(UNWOUND.seen.now, mails=2)), "the world"),
    "D: clean, it says": (unwound(session=session("compensated", clean=True)), "the session"),
    "D: still halted": (unwound(session=session("halted", "compensation_failed")), "the session"),
    "D: nobody ordered it": (unwound(journal=journal(*without(ORDERED, "UNWIND_ORDERED"))), "the journal"),
    "D: the agent retried": (unwound(journal=journal(*another(ORDERED, "RETRIED", AGENT))), "the journal"),
    "D: not said to be by hand": (
        unwound(journal=journal(*[(kind, step, who, {} if step == 1 else body) for kind, step, who, body in ORDERED])),
        "the journal",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_judges_name_the_promise_when_it_is_not_kept(case: str) -> None:
    """Each promise has its own check, and only that one fails."""
    found, promise = BROKEN[case]
    failed = [check.promise for check in judged(found) if check.fault]
    assert len(failed) == 1
    assert failed[0].startswith(promise)


def test_command_is_the_request_that_a_shell_would_send() -> None:
    """What is shown is what is sent: quotes taken off, variables filled in."""
    command = curl.read(MOVES[0]["curl"], {"COUNTERMAND_KEY": "a-key", "REASON": "it's done"})
    assert (command.method, command.url) == ("POST", MOVES[0]["url"])
    assert json.loads(command.body) == {"by_hand": True, "reason": "it's done"}
    assert command.headers == {
        "Authorization": "Bearer a-key",
        "Content-Type": "application/json",
        "If-Match": '"v9"',
        "Idempotency-Key": "skip-v9",
    }


def words(text: str) -> list[str]:
    """Split a command as a shell does, which joins a line that ends in a backslash with the next."""
    return shlex.split(text.replace("\\\n", ""))


def test_command_means_the_same_when_it_is_broken_into_lines() -> None:
    """It can be pasted as it is shown."""
    lines = curl.broken_into_lines(MOVES[0]["curl"])
    assert len(lines) == 6
    assert all(line.endswith(" \\") for line in lines[:-1])
    assert words("\n".join(lines)) == shlex.split(MOVES[0]["curl"])


@pytest.mark.parametrize(
    "text",
    [
        "rm -rf /",
        "curl -sS -X POST http://host/ -H 'A: b'",
        "curl -sS -X POST http://host/ -d '{}' -o /etc/passwd",
        "curl -sS -X POST http://host/ -H 'A: b' -d \"${HOME:?}\"",
        "curl -sS -X POST 'http://host/ -d {}",
    ],
)
def test_command_is_refused_when_it_is_not_of_the_form_that_was_expected(text: str) -> None:
    """Nothing is guessed: the demo says that it cannot read it."""
    with pytest.raises(DemoFailed, match="the command"):
        curl.read(text, {"COUNTERMAND_KEY": "a-key", "REASON": "because"})


def test_move_is_found_by_what_it_is_about_or_the_demo_fails() -> None:
    """An order that the escalation does not offer is never given."""
    assert move_about(PACKAGE, "skip", 3, by_hand=True) is MOVES[0]
    with pytest.raises(DemoFailed, match="offers no skip of step 2"):
        move_about(PACKAGE, "skip", 2, by_hand=True)
    with pytest.raises(DemoFailed, match="offers no skip of step 3"):
        move_about(PACKAGE, "skip", 3)


def test_page_shows_one_command_whole_and_the_length_of_the_others() -> None:
    """What is left out is said to be left out, and what can be pasted is whole."""
    lines = page(PACKAGE, whole=MOVES[1])
    text = "\n".join(lines)
    start = next(number for number, line in enumerate(lines) if line.strip().startswith("curl -sS"))
    whole = "\n".join(lines[start : start + 6])
    assert words(whole) == shlex.split(MOVES[1]["curl"])
    for each in (MOVES[0], MOVES[2]):
        assert f"{each['title']}: curl ... ({len(each['curl'])} characters)" in text
        assert each["curl"] not in text
    for told in (
        "why",
        "what to do",
        "step 3 a_tool (undo 3): not sent yet",
        "step 4 send_reply: irreversible",
        "by agent:demo-agent: it broke",
    ):
        assert told in text


def test_page_fits_the_terminal_when_texts_are_long() -> None:
    """A tenant's words are as long as they like."""
    lines = page({**PACKAGE, "explanation": "word " * 100, "moves": []}, whole=MOVES[1])
    assert max(map(len, lines)) <= WIDTH
    assert "\n".join(lines).count("word") == 100


def test_screen_shows_escapes_when_a_text_would_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing that an agent wrote can hide a line, turn text round or colour it."""
    hostile = "a\x1b[2Kb\rc\u202ed\x9be"
    say(hostile)
    say_heading(hostile)
    say_lines([hostile])
    say_turn("agent", hostile)
    say_checks([Check(promise=hostile, fault=hostile)])
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert out.count(r"a\x1b[2Kb") == 6


def mail_request(key: str) -> Request:
    """Return a request to send a mail."""
    return Request(method="POST", path=MAILS_PATH, key=key, attempt=0, body=b'{"to": "ada"}')


def test_refusal_is_not_remembered_when_a_system_is_mended() -> None:
    """A key that was refused is done once the system takes calls again; one that was done stays done while it refuses."""
    mail = Mail(CallLog())
    refused_first = mail.receive(mail_request("effect-1"))
    mail.refusal = None
    sent = mail.receive(mail_request("effect-1"))
    mail.refusal = MAIL_IS_DOWN
    repeated = mail.receive(mail_request("effect-1"))
    assert refused_first is MAIL_IS_DOWN
    assert sent is not None
    assert (sent.status, repeated) == (201, sent)
    assert mail.sent == ["ada"]
