"""Is the second half as promised? Judge what the endpoints, the world, the API and the journal say. Must not look anything up."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from app.cli.demo.agent import Done
from app.cli.demo.api import Answered
from app.cli.demo.curl import Command
from app.cli.demo.journal import Entry, Journal
from app.cli.demo.listeners import WorldState
from app.cli.demo.systems import JsonObject, LoggedCall, Mail
from app.cli.demo.verdict import Check, keys_fault, once_fault, order_fault, world_fault
from app.domain.model import EntryKind, HaltReason, SessionState

AWAITING = "[AWAITING_APPROVAL] Tool 'send_reply' requires human approval"
"""The second seed's text for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known of a run at the end of a chapter.

    `done` are the steps before the reply, `step` is the reply's, `told` what the agent was answered when it asked for it. `calls` are all
    that the outside systems were asked since the run began.
    """

    done: Sequence[Done]
    step: int
    told: JsonObject
    calls: Sequence[LoggedCall]
    before: WorldState
    now: WorldState
    session: JsonObject
    journal: Journal
    approver: str

    @property
    def undos(self) -> list[LoggedCall]:
        """The calls that undo something."""
        return [call for call in self.calls if call.request.is_undo]

    @property
    def mails(self) -> list[LoggedCall]:
        """The calls to the mail service."""
        return [call for call in self.calls if call.system == Mail.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Chapter A: `resumed` is the answer to the resume with other bytes than the approved ones."""

    seen: Seen
    resumed: Answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """Chapter B: `resumed_again` is the answer to the second resume."""

    seen: Seen
    resumed_again: Answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Escalated:
    """Chapter C: what was done before, why it failed, and what the person got; `commands` are the moves' in their order."""

    done: Sequence[Done]
    reply: Done
    error: str
    announcement: JsonObject
    escalation: JsonObject
    commands: Sequence[Command]
    approver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwound:
    """Chapter D: `halted` is the session after the first order, `then` the world before it.

    `by_hand`: the step that was undone past the service; `refused`: the one whose undo was refused once.
    """

    seen: Seen
    by_hand: Done
    refused: Done
    halted: JsonObject
    then: WorldState


def judge_refused(found: Refused) -> list[Check]:
    """Return the promises about a payload that was changed after its approval."""
    seen, step = found.seen, found.seen.step
    entries = [
        Entry(kind=EntryKind.AWAITING_APPROVAL, step=step),
        Entry(kind=EntryKind.APPROVED, step=step, actor=f"operator:{seen.approver}"),
        Entry(kind=EntryKind.PAYLOAD_MISMATCH, step=step),
        Entry(kind=EntryKind.SESSION_FAILED),
        Entry(kind=EntryKind.UNWOUND),
    ]
    return [
        _told(seen.told),
        _refused_with("the changed payload was refused, 409 payload_changed", "payload_changed", found.resumed),
        Check(promise="nothing was sent: the mail service was not even asked", fault=_calls_told(seen.mails)),
        _undone("what was done before was undone, newest first, each once", _undo_keys(seen.done), seen.undos),
        Check(promise="the world is as it was", fault=world_fault(seen.before, seen.now)),
        _ended("the session is compensated, and clean", seen.session, SessionState.COMPENSATED, is_clean=True),
        _journal("the journal has the approval, by whom, and the PAYLOAD_MISMATCH", entries, seen.journal),
    ]


def judge_released(found: Released) -> list[Check]:
    """Return the promises about a reply that was approved and sent, and about the failure after it."""
    seen, step = found.seen, found.seen.step
    entries = [
        Entry(kind=EntryKind.EXECUTED, step=step - 1),
        Entry(kind=EntryKind.AWAITING_APPROVAL, step=step),
        Entry(kind=EntryKind.APPROVED, step=step, actor=f"operator:{seen.approver}"),
        Entry(kind=EntryKind.INTENT, step=step),
        Entry(kind=EntryKind.EXECUTED, step=step),
        Entry(kind=EntryKind.PIVOT, step=step),
        Entry(kind=EntryKind.HALTED, says=(("reason", HaltReason.FAILED_AFTER_PIVOT),)),
    ]
    return [
        Check(promise="the approved bytes went out once, under the forward key", fault=_sent_once(seen)),
        _refused_with("they were released once: the second resume is 409 already_released", "already_released", found.resumed_again),
        Check(promise="past the pivot nothing was undone", fault=_calls_told(seen.undos)),
        _ended("the session is halted", seen.session, SessionState.HALTED, is_clean=False, reason=HaltReason.FAILED_AFTER_PIVOT),
        _journal("the journal has the second seed's five entries in its order, and the PIVOT", entries, seen.journal),
    ]


def judge_escalated(found: Escalated) -> list[Check]:
    """Return the promises about what the person gets who is called."""
    return [
        Check(promise="the session is among those announced in /v1/escalations", fault=_announced(found.announcement)),
        Check(promise="what was done, what is not undone and what cannot be is told, step by step", fault=_told_of_steps(found)),
        Check(promise="who approved and why the run failed is told", fault=_told_of_people(found)),
        Check(promise="each open move is a whole command, bound to what was shown", fault=_commands(found)),
    ]


def judge_unwound(found: Unwound) -> list[Check]:
    """Return the promises about the operator's orders."""
    seen = found.seen
    expected = _undo_keys([done for done in seen.done if done is not found.by_hand])
    by = f"operator:{seen.approver}"
    note = seen.done[-1].step_index
    entries = [
        Entry(kind=EntryKind.UNWIND_ORDERED, actor=by),
        Entry(kind=EntryKind.COMPENSATED, step=note),
        Entry(kind=EntryKind.COMPENSATION_FAILED, step=found.refused.step_index),
        Entry(kind=EntryKind.HALTED, says=(("reason", HaltReason.COMPENSATION_FAILED),)),
        Entry(kind=EntryKind.COMPENSATED, step=found.by_hand.step_index, actor=by, says=(("by_hand", True),)),
        Entry(kind=EntryKind.RETRIED, step=found.refused.step_index, actor=by),
        Entry(kind=EntryKind.COMPENSATED, step=found.refused.step_index),
        Entry(kind=EntryKind.UNWOUND),
    ]
    # Everything that can be undone is; the reply stands.
    end = replace(seen.before, mails=found.then.mails)
    reason = HaltReason.COMPENSATION_FAILED
    return [
        _ended("a refused undo halted the session", found.halted, SessionState.HALTED, is_clean=False, reason=reason),
        _undone("the endpoints were asked newest first, and for nothing that was done by hand", expected, seen.undos),
        Check(promise="the retry had the same key and the same bytes", fault=_retried(found)),
        Check(promise="the world is as it was, but for the reply", fault=world_fault(end, seen.now)),
        _ended("the session is compensated, and not clean", seen.session, SessionState.COMPENSATED, is_clean=False),
        _journal("the journal has each order, by whom", entries, seen.journal),
    ]


def _undo_keys(done: Sequence[Done]) -> list[str]:
    return [each.undo_key for each in reversed(done) if each.undo_key is not None]


def _told(told: JsonObject) -> Check:
    fault = "" if told.get("message") == AWAITING else f"it was told {told.get('message')!r}"
    return Check(promise=f"the model was told {AWAITING}", fault=fault)


def _refused_with(promise: str, code: str, answer: Answered) -> Check:
    is_kept, found = (answer.status, answer.code) == (409, code), answer.code or answer.members.get("decision")
    return Check(promise=promise, fault="" if is_kept else f"it was answered {answer.status} {found}")


def _undone(promise: str, expected: Sequence[str], undos: Sequence[LoggedCall]) -> Check:
    fault = keys_fault(expected, undos) or order_fault(expected, undos) or once_fault(expected, undos)
    return Check(promise=promise, fault=fault)


def _ended(promise: str, session: JsonObject, state: SessionState, *, is_clean: bool, reason: HaltReason | None = None) -> Check:
    is_kept = (session["state"], session["clean"], session["halt_reason"]) == (state, is_clean, reason)
    clean = "clean" if session["clean"] else "not clean"
    return Check(promise=promise, fault="" if is_kept else f"it is {session['state']} ({session['halt_reason']}), {clean}")


def _journal(promise: str, entries: Sequence[Entry], journal: Journal) -> Check:
    missing = journal.missing(entries)
    fault = journal.message if not journal.is_valid else "" if missing is None else f"in this order there is no {missing}"
    return Check(promise=f"{promise}; its {len(journal.entries)} entries verify", fault=fault)


def _calls_told(calls: Sequence[LoggedCall]) -> str:
    return ", ".join(f"{call.system} was asked {call.request.path} under {call.request.key or 'no key'}" for call in calls)


def _sent_once(seen: Seen) -> str:
    sent = seen.now.mails - seen.before.mails
    if sent != 1 or [call.is_applied for call in seen.mails] != [True]:
        return f"the mail service was asked {len(seen.mails)} times, and sent {sent} mails"
    (request,) = (call.request for call in seen.mails)
    if sha256(request.body).hexdigest() != seen.told["payload_sha256"]:
        return f"other bytes than the approved ones were sent: {request.body.decode(errors='replace')}"
    forward_key = seen.told["forward_key"]
    return "" if request.key == forward_key else f"it came under {request.key}, expected {forward_key}"


def _announced(item: JsonObject) -> str:
    return "" if item["reason"] == HaltReason.FAILED_AFTER_PIVOT else f"it is there as {item['reason']}"


def _told_of_steps(found: Escalated) -> str:
    package = found.escalation
    told = {name: [(each["step_index"], each["description"]) for each in package[name]] for name in ("undone", "not_undone")}
    if told != {"undone": [], "not_undone": [(done.step_index, done.undo_story) for done in reversed(found.done)]}:
        return f"it tells {told}"
    irreversible = [(each["step_index"], each["tool"]) for each in package["cannot_be_undone"]]
    if irreversible != [(found.reply.step_index, found.reply.tool)]:
        return f"it tells that {irreversible} cannot be undone"
    keys = {step["step_index"]: step["forward_key"] for step in package["steps"] if step["result"] is not None}
    done = {done.step_index: done.forward_key for done in (*found.done, found.reply)}
    return "" if keys == done else f"it has results of {keys}, expected {done}"


def _told_of_people(found: Escalated) -> str:
    told = [(entry["kind"], entry["step"], entry["actor"], entry["details"]) for entry in found.escalation["decisions"]]
    approvals = [(step, actor) for kind, step, actor, _ in told if kind == EntryKind.APPROVED]
    if approvals != [(found.reply.step_index, f"operator:{found.approver}")]:
        return f"the approvals it tells are {approvals}"
    errors = [details.get("error") for kind, _, _, details in told if kind == EntryKind.SESSION_FAILED]
    return "" if errors == [found.error] else f"the errors it tells are {errors}"


def _commands(found: Escalated) -> str:
    moves = found.escalation["moves"]
    expected = {"unwind", "resolve", "skip"}
    if not expected <= {move["name"] for move in moves}:
        return f"the moves are {[move['name'] for move in moves]}, expected at least {sorted(expected)}"
    for move, command in zip(moves, found.commands, strict=True):
        body = json.loads(command.body)
        is_as_told = (command.method, command.url) == (move["method"], move["url"])
        is_bound = {"If-Match", "Idempotency-Key", "Authorization"} <= command.headers.keys()
        if not is_as_told or not is_bound or not body.pop("reason", "") or body != move["body"]:
            return f"the command of {move['name']} sends {command.method} {command.url} {command.body}"
    return ""


def _retried(found: Unwound) -> str:
    sent = [call for call in found.seen.undos if call.request.key == found.refused.undo_key]
    answers = [call.status for call in sent]
    if len(answers) != 2 or answers[0] == answers[1]:
        return f"it was sent {len(answers)} times, and answered {answers}"
    return "" if len({call.request.body for call in sent}) == 1 else "it came with other bytes the second time"
