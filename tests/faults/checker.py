"""Holds what clients saw, what the endpoint did and what the journals say against the invariants. Must not ask the service anything.

`check` names each violated invariant (docs/reliability.md lists them) with its evidence. Each is one function below.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from tests.fakes import Mode, Received
from tests.faults.evidence import Call, Evidence, Export, Heard, JsonObject, credit_of, place_of

SessionKey: TypeAlias = tuple[str, str]

OPERATORS = ("operator:", "admin:")
ENDS = frozenset({"completed", "compensated", "resolved"})
UNDOABLE = frozenset({"reversible", "compensatable"})
SETTLING = frozenset({"COMPENSATED", "SKIPPED"})
LATE = frozenset({"LATE_COMMIT", "LATE_FAIL"})
DECIDED = frozenset({"APPROVED", "REJECTED"})
NEVER_RUN = frozenset({"REJECTED", "EXPIRED", "CANCELLED", "PAYLOAD_MISMATCH"})
ANSWERED = frozenset({"INTENT", "REJECTED", "EXPIRED", "CANCELLED", "PAYLOAD_MISMATCH"})  # what ends a question
ASKING = frozenset({"awaiting_approval", "approved"})
FAILING = frozenset({"fail", "reject", "resume"})  # what a client asks for that may fail a run
GIVEN_UP = frozenset({Mode.HANG, Mode.DRIP, Mode.DRIP_HEAD})  # replies that only the sender's own deadline ends
FELT_SECONDS = 3.0  # how long after its beginning a fault may cost a lease: it lasts for two seconds at most, and a lease for one
OVERDUE = timedelta(seconds=30)  # for how long faults may keep a question open after its time; a client waits longer before it ends the run
ZEROS = "0" * 64


class Violation(NamedTuple):
    """An invariant that did not hold, and what shows it."""

    invariant: str
    detail: str


@dataclass(slots=True)
class Facts:
    """Evidence, put in order: everything by session."""

    evidence: Evidence
    exports: dict[SessionKey, Export] = field(default_factory=dict)
    requests: dict[SessionKey, list[Received]] = field(default_factory=lambda: defaultdict(list))
    undos: dict[SessionKey, list[Received]] = field(default_factory=lambda: defaultdict(list))
    heard: dict[SessionKey, list[Call]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        """Sort it."""
        self.exports = {(export.org, export.name): export for export in self.evidence.exports}
        for request in sorted(self.evidence.requests, key=lambda one: one.started_at):
            place = place_of(request)
            self.requests[place.org, place.session].append(request)
            if place.what == "undo":
                self.undos[place.org, place.session].append(request)
        for call in self.evidence.calls:
            if call.heard is Heard.OK and call.op != "look across":
                self.heard[call.org, call.session].append(call)

    def entries(self, key: SessionKey, *kinds: str) -> list[JsonObject]:
        """Return the journal's entries of these kinds, in order."""
        export = self.exports.get(key)
        return [] if export is None else [entry for entry in export.journal if entry["kind"] in kinds]

    def positions(self, key: SessionKey) -> dict[str, int]:
        """Return the stack position of each undo, by its key."""
        export = self.exports.get(key)
        return {} if export is None else {f"undo-{entry['undo_id']}": entry["stack_position"] for entry in export.view["undo_stack"]}


def check(evidence: Evidence) -> list[Violation]:
    """Return everything that does not hold."""
    facts = Facts(evidence)
    return [Violation(name, detail) for name, invariant in INVARIANTS.items() for detail in invariant(facts)]


def register_first(facts: Facts) -> Iterator[str]:
    """I1: who was told to execute has an intent in the journal and, where the class has one, an undo on the stack; nothing ran without."""
    for key, calls in facts.heard.items():
        effects = _effects(facts, key)
        intents = {_body(entry)["effect_id"] for entry in facts.entries(key, "INTENT")}
        undo_keys = facts.positions(key)
        for call in calls:
            if call.op not in {"intercept", "resume"} or call.answer.get("decision") != "execute":
                continue
            told = call.answer
            effect = effects.get(told["effect_id"])
            if effect is None or told["effect_id"] not in intents:
                yield f"{key}: step {told['step_index']} was told to execute and is not on record"
            elif effect["reversibility"] in UNDOABLE and f"undo-{told['undo_id']}" not in undo_keys:
                yield f"{key}: step {told['step_index']} was told to execute and has no undo"
    for key, requests in facts.requests.items():
        forward_keys = {_body(entry)["forward_key"] for entry in facts.entries(key, "INTENT")}
        for request in requests:
            if place_of(request).what != "undo" and request.key not in forward_keys:
                yield f"{key}: {request.key} ran without an intent"


def newest_first(facts: Facts) -> Iterator[str]:
    """I2: undos begin newest first, and none begins before the ones above are settled; what is repeated later is a fenced-out worker's."""
    for key, requests in facts.undos.items():
        positions = facts.positions(key)
        ordered = _ordered_again(facts, key)
        lowest: int | None = None
        attempts: dict[str | None, int] = {}
        for request in requests:
            position = positions.get(request.key or "", 0)
            is_fenced = _attempt(request) < attempts.get(request.key, 0)
            if lowest is not None and position > lowest and not is_fenced and request.key not in ordered:
                yield f"{key}: undo of step {position} was sent after that of step {lowest}"
            lowest = position if lowest is None else min(lowest, position)
            attempts[request.key] = max(_attempt(request), attempts.get(request.key, 0))
    for key, export in facts.exports.items():
        independent = {entry["stack_position"] for entry in export.view["undo_stack"] if entry["description"] == "independent"}
        open_positions = {entry["stack_position"] for entry in export.view["undo_stack"]}
        for entry in export.journal:
            step = entry["step"]
            if entry["kind"] == "COMPENSATING" and (above := {other for other in open_positions if other > step}):
                yield f"{key}: undo of step {step} began before {sorted(above)} were settled"
            if entry["kind"] in SETTLING or (entry["kind"] == "COMPENSATION_FAILED" and step in independent):
                open_positions.discard(step)


def one_at_a_time(facts: Facts) -> Iterator[str]:
    """I3: no two undo requests of a session at once, but of one undo whose earlier sender a fault or its deadline had cut off."""
    for key, requests in facts.undos.items():
        for at, earlier in enumerate(requests):
            for later in requests[at + 1 :]:
                if later.started_at >= _gone_at(earlier):
                    continue
                if earlier.key == later.key and _attempt(earlier) != _attempt(later) and _may_be_cut_off(facts, earlier, later):
                    continue
                if earlier.key != later.key and any(_is_superseded(one, later.started_at, requests) for one in (earlier, later)):
                    continue
                yield f"{key}: {later.key} attempt {_attempt(later)} was sent while {earlier.key} attempt {_attempt(earlier)} was under way"


def _may_be_cut_off(facts: Facts, earlier: Received, later: Received) -> bool:
    """Tell whether the earlier one's sender may have lost its lease, or have given up, before the later one was sent."""
    if earlier.mode in GIVEN_UP:
        return True
    return any(earlier.started_at - FELT_SECONDS <= fault.at <= later.started_at for fault in facts.evidence.faults)


def one_key_one_body(facts: Facts) -> Iterator[str]:
    """I4: a request of an undo or action has its own key, bytes and place, an undo the journal's; no two attempts have one number."""
    by_key: dict[tuple[str, str | None], list[Received]] = defaultdict(list)
    for key, requests in facts.requests.items():
        known = facts.positions(key).keys() | {effect["forward_key"] for effect in _effects(facts, key).values()}
        for request in requests:
            by_key[key[0], request.key].append(request)
            if request.key not in known:
                yield f"{key}: {request.path} was called under {request.key}, which is no key of this session"
            if place_of(request).what == "undo" and not (request.key or "").startswith("undo-"):
                yield f"{key}: an undo was called under {request.key}"
    for (org, name), requests in by_key.items():
        sent = [request for request in requests if place_of(request).what != "act"]
        if len({(request.path, request.body) for request in sent}) > 1:
            yield f"{org}: {name} was sent with different bytes, or to different places"
        repeated = [number for number, count in Counter(map(_attempt, sent)).items() if count > 1]
        if repeated:
            yield f"{org}: {name} was sent twice as attempt {repeated}"
    for key, requests in facts.undos.items():
        yield from (f"{key}: {request.key} {fault}" for request in requests for fault in _not_as_told(facts, key, request))


def _not_as_told(facts: Facts, key: SessionKey, request: Received) -> Iterator[str]:
    """Hold one undo request against what the journal says was begun, and against what the step's agent reported."""
    begun = [entry for entry in facts.entries(key, "COMPENSATING") if _body(entry)["idempotency_key"] == request.key]
    told = [entry for entry in begun if _body(entry)["attempts_before"] < _attempt(request)]
    if not told:  # what was never begun is for I6
        return
    body, args = _body(told[-1]), told[-1]["content"]["args"]["text"]
    if request.path != urlsplit(body["url"]).path:
        yield f"was sent to {request.path}, and the journal says {body['url']}"
    if request.body != args.encode():
        yield f"was sent {request.body!r}, and the journal says {args}"
    place, forward_keys = place_of(request), {undo: forward for forward, undo in _undo_keys(facts, key).items()}
    is_known = body["outcome"] == "committed"
    found = {"credit": credit_of(place.org, place.ordinal)} if is_known else {"find": forward_keys.get(request.key or "")}
    named = {"of": place.org, **found}
    if json.loads(request.body) != named:
        yield f"was sent {request.body!r}, and had to name {named}"


def nothing_lost(facts: Facts) -> Iterator[str]:
    """I5: after a failure every undo was done there, or is settled by a person with a reason, or had nothing to undo, or waits for one."""
    for key, export in facts.exports.items():
        yield from _skipped_by_itself(facts, key)
        if not facts.entries(key, "SESSION_FAILED"):
            continue
        state = export.view["state"]
        done = {request.key for request in facts.undos[key] if 200 <= request.status < 300 and request.status != 202}
        reasons = {entry["step"] for entry in facts.entries(key, "SKIPPED") if _body(entry).get("reason") and entry["actor"]}
        for entry in export.view["undo_stack"]:
            if state == "compensated" and entry["state"] not in {"compensated", "skipped"}:
                yield f"{key}: compensated, and the undo of step {entry['step_index']} is {entry['state']}"
            if entry["state"] == "compensated" and not entry["by_hand"] and f"undo-{entry['undo_id']}" not in done:
                yield f"{key}: the undo of step {entry['step_index']} is said to be done, and the endpoint never did it"
            if entry["state"] == "skipped" and entry["stack_position"] not in reasons:
                yield f"{key}: the undo of step {entry['step_index']} was skipped without a reason"
        if state == "compensated" and export.view["clean"]:
            yield from _undone_at_the_endpoint(facts, key)


def _skipped_by_itself(facts: Facts, key: SessionKey) -> Iterator[str]:
    """Tell of undos that no person had skipped, of a step that is not known to have done nothing in a run that did not go well."""
    reports = facts.entries(key, "FAILED", "SETTLED", "LATE_FAIL")
    not_applied = {entry["step"] for entry in reports if _body(entry)["outcome"] == "not_applied"}
    for failed in facts.entries(key, "SESSION_FAILED"):
        not_applied |= set(_body(failed)["not_applied_steps"])
    for entry in facts.entries(key, "SKIPPED"):
        reason = _body(entry).get("reason")
        is_nothing = reason == "not_applied" and entry["step"] in not_applied
        is_complete = reason == "completed" and facts.entries(key, "COMPLETED")
        if not (entry["actor"].startswith(OPERATORS) or is_nothing or is_complete):
            yield f"{key}: the undo of step {entry['step']} was skipped by {entry['actor']} for {reason}"


def _undone_at_the_endpoint(facts: Facts, key: SessionKey) -> Iterator[str]:
    """Hold a clean end against the ground truth: what was done there was undone after that."""
    overtaken = {request.number for request in overtaken_by_their_undo(facts, key)}
    undo_keys = _undo_keys(facts, key)
    for request in facts.requests[key]:
        if place_of(request).what == "act" and request.is_applied and request.number not in overtaken:
            undone = {undo.key for undo in facts.undos[key] if undo.is_applied}
            if undo_keys.get(request.key or "") not in undone:
                yield f"{key}: {request.key} was done, the session is compensated, and it was never undone"


def overtaken_by_their_undo(facts: Facts, key: SessionKey) -> list[Received]:
    """Return the acts that began when their undo was there already: an endpoint has to refuse those, and ours does not (fault X27)."""
    undo_keys = _undo_keys(facts, key)
    first = {undo.key: undo.started_at for undo in reversed(facts.undos[key])}
    acts = [request for request in facts.requests[key] if place_of(request).what == "act"]
    return [act for act in acts if first.get(undo_keys.get(act.key or "", ""), act.started_at) < act.started_at]


def no_undo_without_failure(facts: Facts) -> Iterator[str]:
    """I6: nothing is undone of a run that has not failed, nor an undo sent that the journal does not know of."""
    for key, requests in facts.undos.items():
        begun = {_body(entry)["idempotency_key"] for entry in facts.entries(key, "COMPENSATING")}
        for request in requests:
            if not facts.entries(key, "SESSION_FAILED"):
                yield f"{key}: {request.key} was sent, and the run has not failed"
            elif request.key not in begun:
                yield f"{key}: {request.key} was sent, and the journal does not say so"
            elif request.started_at < _asked_to_fail_at(facts, key):
                yield f"{key}: {request.key} was sent before anybody had failed the run"


def _asked_to_fail_at(facts: Facts, key: SessionKey) -> float:
    """Return when its client first asked for what failed a run; nothing on our clock says when the service failed one by itself."""
    actor = facts.entries(key, "SESSION_FAILED")[0]["actor"]
    calls = (call for call in facts.evidence.calls if (call.org, call.session) == key)
    return min((call.asked_at for call in calls if call.who == actor and call.op in FAILING), default=float("-inf"))


def one_release(facts: Facts) -> Iterator[str]:
    """I7: an approval releases at most once, to one principal, what was approved by somebody else in time, and never after a no."""
    for key, export in facts.exports.items():
        for asked in facts.entries(key, "AWAITING_APPROVAL"):
            step = asked["step"]
            effect = next(effect for effect in export.view["effects"] if effect["step_index"] == step)
            story = [entry for entry in export.journal if entry["step"] == step]
            intents = [entry for entry in story if entry["kind"] == "INTENT"]
            if len(intents) > 1:
                yield f"{key}: step {step} was released {len(intents)} times"
            for intent in intents:
                before = [entry for entry in story if entry["seq"] < intent["seq"]]
                yield from (f"{key}: step {step} {fault}" for fault in _unapproved(before, asked, intent, effect))
            yield from (f"{key}: step {step} {fault}" for fault in _ran_otherwise(facts, key, effect, has_intent=bool(intents)))


def _unapproved(before: list[JsonObject], asked: JsonObject, intent: JsonObject, effect: JsonObject) -> Iterator[str]:
    approvals = [entry for entry in before if entry["kind"] == "APPROVED" and entry["actor"].startswith(OPERATORS)]
    if not approvals:
        yield "was released without an approval"
    elif approvals[-1]["actor"].partition(":")[2] == asked["actor"].partition(":")[2]:
        yield "was approved by the one whose agent asked"
    if any(entry["kind"] in NEVER_RUN for entry in before):
        yield "was released after a no"
    if intent["at"] >= effect["approval"]["expires_at"]:
        yield "was released after its time"


def _ran_otherwise(facts: Facts, key: SessionKey, effect: JsonObject, *, has_intent: bool) -> Iterator[str]:
    ran = [request for request in facts.requests[key] if request.key == effect["forward_key"]]
    if ran and not has_intent:
        yield "ran, and was never released"
    if any(request.body.decode() != effect["payload"] for request in ran):
        yield "ran with other bytes than those that were approved"
    step = effect["step_index"]
    told = {call.who for call in facts.heard[key] if call.op == "resume" and call.step == step and call.answer["decision"] == "execute"}
    if len(told) > 1:
        yield f"was released to {sorted(told)}"


def one_decision(facts: Facts) -> Iterator[str]:
    """I8: one decision per question in the journal, and nobody was told otherwise."""
    for key in facts.exports:
        decided: dict[int, JsonObject] = {}
        for entry in facts.entries(key, *DECIDED):
            if entry["step"] in decided:
                yield f"{key}: step {entry['step']} was decided twice"
            decided[entry["step"]] = entry
        for call in facts.heard[key]:
            kind = {"approve": "APPROVED", "reject": "REJECTED"}.get(call.op)
            if kind is None or call.step is None:
                continue
            entry = decided.get(call.step, {})
            if (entry.get("kind"), entry.get("actor")) != (kind, call.who):
                yield f"{key}: {call.who} was told that step {call.step} was {kind.lower()}, the journal says {entry.get('kind')}"


def ends_are_ends(facts: Facts) -> Iterator[str]:
    """I9: nothing follows an end but late reports; `compensated` is left for `late_effect` alone, `halted` by a person alone."""
    for key, export in facts.exports.items():
        end: str | None = None
        for entry in export.journal:
            kind, actor = entry["kind"], entry["actor"]
            is_late_halt = kind == "HALTED" and _body(entry)["reason"] == "late_effect" and end == "UNWOUND"
            is_persons = end == "HALTED" and actor.startswith(OPERATORS)
            if end is not None and kind not in LATE and not is_late_halt and not is_persons:
                yield f"{key}: {kind} by {actor} follows {end}"
            if kind in {"UNWOUND", "COMPLETED", "RESOLVED", "HALTED"}:
                end = kind
            elif kind in {"RETRIED", "UNWIND_ORDERED"}:
                end = None
        yield from _seen_to_leave_an_end(facts, key, export)


def _seen_to_leave_an_end(facts: Facts, key: SessionKey, export: Export) -> Iterator[str]:
    """Tell of clients that saw a session at an end, and then elsewhere."""
    has_late_halt = any(_body(entry)["reason"] == "late_effect" for entry in facts.entries(key, "HALTED"))
    seen = sorted((call for call in facts.heard[key] if call.op == "look"), key=lambda call: call.answered_at or 0.0)
    states = [call.answer["state"] for call in seen] + [export.view["state"]]
    for earlier, later in pairwise(states):
        if earlier in ENDS and later != earlier and not (earlier == "compensated" and has_late_halt):
            yield f"{key}: was seen {earlier}, then {later}"


def journal_holds(facts: Facts) -> Iterator[str]:
    """I10: the chain verifies, here and at the service; an older copy is its beginning; and it tells of the state that is shown."""
    for key, export in facts.exports.items():
        fault = broken_chain(*key, export.journal)
        if fault:
            yield f"{key}: {fault}"
        if export.verified != {
            "valid": True,
            "entry_count": len(export.journal),
            "first_bad_seq": None,
            "message": export.verified["message"],
            "head": head_of(export.journal),
        }:
            yield f"{key}: the service says {export.verified}"
        state, effects = told_states(export.journal)
        if state != export.view["state"]:
            yield f"{key}: the journal says {state}, shown is {export.view['state']}"
        for effect in export.view["effects"]:
            step, shown = effect["step_index"], effect["state"]
            if effects.get(step, shown) != shown:
                yield f"{key}: the journal says that step {step} is {effects[step]}, shown is {shown}"
    for checkpoint in facts.evidence.checkpoints:
        export_then = facts.exports.get((checkpoint.org, checkpoint.name))
        if export_then is None or export_then.journal[: len(checkpoint.journal)] != checkpoint.journal:
            yield f"{(checkpoint.org, checkpoint.name)}: the journal was written anew"


def head_of(journal: list[JsonObject]) -> JsonObject:
    """Return what the service says is the newest link of a chain."""
    return {name: journal[-1][name] for name in ("seq", "hash", "at")}


def broken_chain(org: str, name: str, journal: list[JsonObject]) -> str | None:
    """Verify a chain as docs/reference/journal-format.md has it; say what is wrong with it."""
    last_hash, last_at = ZEROS, ""
    for place, entry in enumerate(journal, start=1):
        step = "" if entry["step"] is None else str(entry["step"])
        parts = ("countermand.journal.v1", org, name, str(entry["seq"]), entry["kind"], step, entry["actor"], entry["at"], entry["body"])
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in (text.encode() for text in (*parts, entry["prev_hash"])))
        if entry["seq"] != place or entry["prev_hash"] != last_hash or hashlib.sha256(framed).hexdigest() != entry["hash"]:
            return f"the chain is broken at {place}"
        if entry["at"] < last_at:
            return f"time runs backwards at {place}"
        for content, value in (entry["content"] or {}).items():
            digest = hashlib.sha256(bytes.fromhex(value["salt"]) + value["text"].encode()).hexdigest()
            if _body(entry)[f"{content}_digest"] != digest:
                return f"{content} was changed at {place}"
        last_hash, last_at = entry["hash"], entry["at"]
    return None


SESSION_TOLD: Mapping[str, str] = {
    "OPENED": "active",
    "AWAITING_APPROVAL": "awaiting_approval",
    "SESSION_FAILED": "failed",
    "COMPENSATING": "compensating",
    "UNWOUND": "compensated",
    "HALTED": "halted",
    "RETRIED": "compensating",
    "UNWIND_ORDERED": "compensating",
    "RESOLVED": "resolved",
    "COMPLETED": "completed",
}
EFFECT_TOLD: Mapping[str, str] = {
    "INTENT": "executing",
    "EXECUTED": "committed",
    "AWAITING_APPROVAL": "awaiting_approval",
    "APPROVED": "approved",
    "REJECTED": "rejected",
    "PAYLOAD_MISMATCH": "rejected",
    "EXPIRED": "expired",
    "CANCELLED": "cancelled",
    "COMPENSATING": "compensating",
    "COMPENSATED": "compensated",
    "COMPENSATION_FAILED": "compensation_failed",
}


def told_states(journal: list[JsonObject]) -> tuple[str, dict[int, str]]:
    """Replay a journal: where the session stands, and each effect that no late report was about."""
    state = ""
    effects: dict[int, str] = {}
    for entry in journal:
        kind, step, body = entry["kind"], entry["step"], _body(entry)
        state = SESSION_TOLD.get(kind, state)
        if (kind == "INTENT" and "released_to" in body) or (kind == "REJECTED" and body["then"] == "continue"):
            state = "active"
        if kind == "SESSION_FAILED":
            effects |= dict.fromkeys(body["unknown_steps"], "unknown") | dict.fromkeys(body["not_applied_steps"], "failed")
        if kind in {"FAILED", "SETTLED"}:
            effects[step] = "failed" if body["outcome"] == "not_applied" else body["outcome"]
        elif kind in EFFECT_TOLD:
            effects[step] = EFFECT_TOLD[kind]
    late = {entry["step"] for entry in journal if entry["kind"] in LATE}
    return state, {step: told for step, told in effects.items() if step not in late}


# What an acknowledged call must have left in the journal: kind, and whether it is about the call's own step.
LEFT: Mapping[str, tuple[str, bool]] = {
    "open": ("OPENED", False),
    "commit": ("EXECUTED", True),
    "fail_effect": ("FAILED", True),
    "fail": ("SESSION_FAILED", False),
    "complete": ("COMPLETED", False),
    "approve": ("APPROVED", True),
    "reject": ("REJECTED", True),
    "resume": ("INTENT", True),
    "retry": ("RETRIED", False),
    "unwind": ("UNWIND_ORDERED", False),
    "resolve": ("RESOLVED", False),
}


def acknowledged_stands(facts: Facts) -> Iterator[str]:
    """I11: whatever a client was told was done is there at the end."""
    for key, calls in facts.heard.items():
        if key not in facts.exports:
            if any(call.op in LEFT for call in calls):
                yield f"{key}: was acknowledged, and is not there"
            continue
        effects = _effects(facts, key)
        for call in calls:
            if call.op == "intercept" and not _is_same_effect(effects.get(call.answer["effect_id"]), call.answer):
                yield f"{key}: the answer to {call.op} of step {call.answer['step_index']} does not stand"
            kind, is_steps = LEFT.get(call.op, ("", False))
            left = facts.entries(key, kind)
            if kind and not any(not is_steps or entry["step"] == call.step for entry in left):
                yield f"{key}: {call.op} (step {call.step}) was acknowledged and left no {kind}"
            if call.op == "commit" and (found := _committed(left, call.step)) not in (None, call.body["result"]):
                yield f"{key}: step {call.step} was committed with {call.body['result']}, kept is {found}"


def _is_same_effect(effect: JsonObject | None, answer: JsonObject) -> bool:
    names = ("step_index", "forward_key", "undo_id", "payload")
    return effect is not None and all(effect[name] == answer[name] for name in names if answer.get(name) is not None)


def _committed(left: list[JsonObject], step: int | None) -> Any:
    return next((json.loads(entry["content"]["result"]["text"]) for entry in left if entry["step"] == step), None)


def everything_moves(facts: Facts) -> Iterator[str]:
    """I12: once faults are over no run or question is open for ever, everybody has an answer, and the service has no faults of its own."""
    for key, export in facts.exports.items():
        state, waiting = export.view["state"], [effect for effect in export.view["effects"] if effect["state"] in ASKING]
        if state in {"active", "failed", "compensating"} or (state == "awaiting_approval" and not waiting):
            yield f"{key}: is still {state}"
        yield from _left_open(facts, key, export)
    last = {call.number: call for call in facts.evidence.calls}
    for call in last.values():
        if call.heard in {Heard.INFO, Heard.OPEN}:
            yield f"{(call.org, call.session)}: {call.op} was never answered: {call.answer}"
    for call in facts.evidence.calls:
        if call.status is not None and call.status >= 500 and call.status != 503:
            yield f"{(call.org, call.session)}: {call.op} was answered {call.status}"
    yield from (f"the service: {crash}" for crash in facts.evidence.crashes)


def _left_open(facts: Facts, key: SessionKey, export: Export) -> Iterator[str]:
    """Tell of questions that were open long after their time: until they were answered otherwise, or to the end."""
    newest = max(entry["at"] for other in facts.evidence.exports for entry in other.journal)
    for effect in export.view["effects"]:
        if effect["approval"] is None:
            continue
        ends = [entry["at"] for entry in facts.entries(key, *ANSWERED) if entry["step"] == effect["step_index"]]
        overdue = _moment([*ends, newest][0]) - _moment(effect["approval"]["expires_at"])
        if overdue > OVERDUE:
            yield f"{key}: the question of step {effect['step_index']} was open {overdue} after its time"


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def repeats_agree(facts: Facts) -> Iterator[str]:
    """I13: attempts under one key are answered alike, nobody meets a refusal that nothing stood for, other bytes are refused."""
    answers: dict[tuple[str, str, str, str], JsonObject] = {}
    for call in facts.evidence.calls:
        where = f"{(call.org, call.session)}: {call.op} (step {call.step}) by {call.who}"
        if call.heard is Heard.FAIL and call.code not in call.allowed:
            yield f"{where} was refused with {call.status} {call.code}: {call.answer}"
        if call.heard is Heard.OK and call.must_refuse:
            yield f"{where} was answered {call.status}, and had to be refused"
        if call.heard is not Heard.OK or call.key is None or call.must_refuse:
            continue
        told = _identity(call)
        if answers.setdefault((call.org, call.who, call.path, call.key), told) != told:
            yield f"{where} was answered twice under one key, and differently"


def _identity(call: Call) -> JsonObject:
    """Return the part of an answer that a repeat must bear again: how an action stands by now may differ."""
    if call.op in {"intercept", "resume"}:
        return {name: call.answer.get(name) for name in ("step_index", "effect_id", "undo_id", "forward_key", "payload")}
    answer: JsonObject = call.answer
    return answer


def orgs_are_apart(facts: Facts) -> Iterator[str]:
    """I14: an org is shown its own sessions, all of them, and nothing that bears another's name; nothing of it goes elsewhere."""
    orgs = set(facts.evidence.listed)
    opened = defaultdict(set)
    for call in facts.evidence.calls:
        if call.op == "open" and call.heard is Heard.OK:
            opened[call.org].add(call.session)
    for org, listed in facts.evidence.listed.items():
        if set(listed) != opened[org]:
            yield f"{org}: is shown {sorted(listed)}, opened were {sorted(opened[org])}"
    for call in facts.evidence.calls:
        if call.op == "look across" and call.heard is Heard.OK:
            yield f"{call.org}: was shown {call.session} of another org"
        shown = json.dumps(call.answer)
        yield from (f"{call.org}: {call.op} was answered with something of {other}" for other in orgs - {call.org} if _bears(shown, other))
    for export in facts.evidence.exports:
        shown = json.dumps([export.view, export.journal])
        yield from (f"{export.org}: {export.name} shows something of {other}" for other in orgs - {export.org} if _bears(shown, other))
    for request in facts.evidence.requests:
        org = place_of(request).org
        sent = request.body.decode(errors="replace")
        yield from (f"{org}: {request.path} was sent something of {other}" for other in orgs - {org} if _bears(sent, other))


def _bears(text: str, org: str) -> bool:
    """Tell whether a text bears an org's name: in what its clients sent, in the paths that they named."""
    return f'"{org}"' in text or f'\\"{org}\\"' in text or f"/{org}/" in text


def halted_is_loud(facts: Facts) -> Iterator[str]:
    """I15: every halted session stands among the escalations of its org, and nothing else does."""
    for org, shown in facts.evidence.escalated.items():
        halted = {export.name for export in facts.evidence.exports if export.org == org and export.view["state"] == "halted"}
        if set(shown) != halted:
            yield f"{org}: escalated are {sorted(shown)}, halted are {sorted(halted)}"


INVARIANTS: Mapping[str, Callable[[Facts], Iterator[str]]] = {
    "I1 register first": register_first,
    "I2 newest first": newest_first,
    "I3 one at a time": one_at_a_time,
    "I4 one key, one body": one_key_one_body,
    "I5 nothing lost": nothing_lost,
    "I6 no undo without failure": no_undo_without_failure,
    "I7 one release": one_release,
    "I8 one decision": one_decision,
    "I9 ends are ends": ends_are_ends,
    "I10 journal": journal_holds,
    "I11 acknowledged stands": acknowledged_stands,
    "I12 progress": everything_moves,
    "I13 repeats agree": repeats_agree,
    "I14 orgs are apart": orgs_are_apart,
    "I15 halted is loud": halted_is_loud,
}


def _body(entry: JsonObject) -> JsonObject:
    body: JsonObject = json.loads(entry["body"])
    return body


def _effects(facts: Facts, key: SessionKey) -> dict[str, JsonObject]:
    export = facts.exports.get(key)
    return {} if export is None else {effect["effect_id"]: effect for effect in export.view["effects"]}


def _undo_keys(facts: Facts, key: SessionKey) -> dict[str, str]:
    return {effect["forward_key"]: f"undo-{effect['undo_id']}" for effect in _effects(facts, key).values()}


def _attempt(request: Received) -> int:
    return int(request.header("Countermand-Attempt") or 0)


def _gone_at(request: Received) -> float:
    """Return when a request was over for whoever sent it: answered, or left."""
    moments = [moment for moment in (request.ended_at, request.left_at) if moment is not None]
    return min(moments, default=float("inf"))


def _is_superseded(request: Received, at: float, requests: list[Received]) -> bool:
    """Tell whether a later attempt of the same undo had begun: then this one's sender had lost its lease, or its life."""
    return any(other.key == request.key and _attempt(other) > _attempt(request) and other.started_at <= at for other in requests)


def _ordered_again(facts: Facts, key: SessionKey) -> set[str]:
    """Return the keys of undos that a person had tried again."""
    retried = {_body(entry)["undo_id"] for entry in facts.entries(key, "RETRIED")}
    for entry in facts.entries(key, "UNWIND_ORDERED"):
        retried |= set(_body(entry)["retried"])
    return {f"undo-{undo_id}" for undo_id in retried}
