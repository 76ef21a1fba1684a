"""A small run by hand in which everything holds, for breaking it one way at a time. Must not need the service."""

import hashlib
import json
from collections.abc import Mapping
from itertools import count
from typing import Any, TypeAlias

from tests.fakes import Received
from tests.faults.checker import ZEROS, head_of
from tests.faults.evidence import Call, Checkpoint, Evidence, Export, Heard, JsonObject, Place, credit_of, path_of

ORG, OTHER = "acme-1", "umbra-1"
AGENT, OPERATOR, ADMIN, ORCHESTRATOR = "agent:agent-1", "operator:operator-1", "admin:admin-1", "orchestrator"
Told: TypeAlias = tuple[str, int | None, str, JsonObject]  # of a journal's entry: kind, step, actor, body
_numbers = count(1)
WIRE = '{"amount":"100","of":"acme-1"}'
CREDIT = credit_of(ORG, 1)
UNDO_ARGS: Mapping[int, JsonObject] = {1: {"of": ORG, "credit": CREDIT}, 2: {"of": ORG, "find": "effect-e2"}}  # step 2: nobody knows


def chain(org: str, name: str, *told: Told) -> list[JsonObject]:
    """Return a journal that verifies: (kind, step, actor, body) of each entry, a second apart."""
    journal: list[JsonObject] = []
    for seq, (kind, step, actor, body) in enumerate(told, start=1):
        content: JsonObject = {}
        text, salt = dict(body), "00" * 16
        for part in sorted(text.keys() & {"result", "args"}):
            content[part] = {"salt": salt, "text": json.dumps(text.pop(part))}
            text[f"{part}_digest"] = hashlib.sha256(bytes.fromhex(salt) + content[part]["text"].encode()).hexdigest()
        entry: JsonObject = {
            "seq": seq,
            "kind": kind,
            "step": step,
            "actor": actor,
            "at": f"2026-01-01T00:00:{seq:02}.000000Z",
            "body": json.dumps(text, sort_keys=True, separators=(",", ":")),
            "content": content or None,
            "prev_hash": journal[-1]["hash"] if journal else ZEROS,
        }
        parts = ("countermand.journal.v1", org, name, str(seq), kind, "" if step is None else str(step), actor, entry["at"])
        framed = b"".join(
            len(part).to_bytes(4, "big") + part for part in (text.encode() for text in (*parts, entry["body"], entry["prev_hash"]))
        )
        journal.append({**entry, "hash": hashlib.sha256(framed).hexdigest()})
    return journal


def request(what: str, key: str, started_at: float, ended_at: float, *, step: int, **changes: Any) -> Received:
    """Return a request that was applied and answered 200: of the session `failed`, unless `session` says otherwise."""
    session, attempt = changes.pop("session", "failed"), changes.pop("attempt", 1)
    body = changes.pop("body", json.dumps(UNDO_ARGS[step]) if what == "undo" and step in UNDO_ARGS else "{}")
    return Received(
        **{
            "number": next(_numbers),
            "started_at": started_at,
            "ended_at": ended_at,
            "connection": 1,
            "method": "POST",
            "target": path_of(Place(ORG, session, step, what)),
            "headers": ((b"Idempotency-Key", key.encode()), (b"Countermand-Attempt", str(attempt).encode())),
            "body": body.encode(),
            "is_applied": True,
            **changes,
        }
    )


def call(op: str, answer: JsonObject, **changes: Any) -> Call:
    """Return a call that was answered, by the agent of the session `failed` unless told otherwise."""
    return Call(
        **{
            "number": next(_numbers),
            "attempt": 1,
            "org": ORG,
            "who": AGENT,
            "op": op,
            "session": "failed",
            "step": None,
            "method": "POST",
            "path": f"/sessions/failed/{op}",
            "key": None,
            "body": {},
            "asked_at": 0.0,
            "heard": Heard.OK,
            "answered_at": 1.0,
            "status": 200,
            "answer": answer,
            **changes,
        }
    )


def effect(step: int, reversibility: str, state: str, **members: Any) -> JsonObject:
    """Return an effect as the service shows it."""
    shown = {"effect_id": f"e{step}", "step_index": step, "reversibility": reversibility, "state": state, "payload": "{}", "approval": None}
    undo_id = f"u{step}" if reversibility == "compensatable" else None
    return {**shown, "forward_key": f"effect-e{step}", "undo_id": undo_id, **members}


def entry(step: int, state: str = "compensated", **members: Any) -> JsonObject:
    """Return an undo entry as the service shows it."""
    shown = {"undo_id": f"u{step}", "step_index": step, "stack_position": step, "state": state, "description": "in order"}
    return {**shown, "by_hand": False, **members}


def view(name: str, state: str, effects: list[JsonObject], undo_stack: list[JsonObject]) -> JsonObject:
    """Return a session as the service shows it."""
    return {"session_id": name, "state": state, "clean": state == "compensated", "effects": effects, "undo_stack": undo_stack}


def intent(step: int, **members: Any) -> Told:
    """Return what the journal says of a call that is told to execute."""
    return "INTENT", step, AGENT, {"effect_id": f"e{step}", "forward_key": f"effect-e{step}", **members}


def undone(step: int, **members: Any) -> tuple[Told, ...]:
    """Return what the journal says of an undo from its first send to its end."""
    body = {"undo_id": f"u{step}", "idempotency_key": f"undo-u{step}", "attempts_before": 0, "args": UNDO_ARGS[step]}
    url = f"http://endpoint{path_of(Place(ORG, 'failed', step, 'undo'))}"
    outcome = "committed" if "credit" in UNDO_ARGS[step] else "unknown"
    begun = {**body, "url": url, "outcome": outcome, **members}
    return ("COMPENSATING", step, ORCHESTRATOR, begun), ("COMPENSATED", step, ORCHESTRATOR, {"undo_id": f"u{step}"})


FAILED_JOURNAL: tuple[Told, ...] = (
    ("OPENED", None, AGENT, {}),
    intent(1),
    ("EXECUTED", 1, AGENT, {"effect_id": "e1", "result": {"credit": CREDIT}}),
    intent(2),
    ("SESSION_FAILED", None, AGENT, {"unknown_steps": [2], "not_applied_steps": []}),
    *undone(2),
    *undone(1),
    ("UNWOUND", None, ORCHESTRATOR, {}),
)
HALTED_JOURNAL: tuple[Told, ...] = (
    ("OPENED", None, AGENT, {}),
    ("AWAITING_APPROVAL", 1, AGENT, {"effect_id": "e1"}),
    ("APPROVED", 1, OPERATOR, {"effect_id": "e1"}),
    intent(1, released_to="agent-1"),
    ("EXECUTED", 1, AGENT, {"effect_id": "e1", "result": None}),
    ("PIVOT", 1, AGENT, {"effect_id": "e1"}),
    ("SESSION_FAILED", None, AGENT, {"unknown_steps": [], "not_applied_steps": []}),
    ("HALTED", None, AGENT, {"reason": "failed_after_pivot"}),
)


def export(name: str, shown: JsonObject, told: tuple[Told, ...], org: str = ORG) -> Export:
    """Return a session at the end, its journal verified."""
    journal = chain(org, name, *told)
    verified = {"valid": True, "entry_count": len(journal), "first_bad_seq": None, "message": "whole", "head": head_of(journal)}
    return Export(org=org, name=name, view=shown, journal=journal, verified=verified)


def good() -> Evidence:
    """Return a run of three sessions: `failed` is undone, `halted` failed past its pivot, `completed` is another org's."""
    undoable = [effect(2, "compensatable", "compensated"), effect(1, "compensatable", "compensated")]
    asked = {"requested_by": "agent-1", "expires_at": "2026-01-01T01:00:00.000000Z"}
    wire = effect(1, "irreversible", "committed", payload=WIRE, approval=asked)
    failed = export("failed", view("failed", "compensated", undoable, [entry(2), entry(1)]), FAILED_JOURNAL)
    halted = export("halted", view("halted", "halted", [wire], []), HALTED_JOURNAL)
    over: tuple[Told, ...] = (("OPENED", None, AGENT, {}), ("COMPLETED", None, AGENT, {}))
    completed = export("completed", view("completed", "completed", [], []), over, OTHER)
    told: dict[str, Any] = {"decision": "execute", "payload": "{}"}
    of_wire: Mapping[str, Any] = {"session": "halted", "step": 1}
    calls = [
        *(call("open", {}, session=name) for name in ("failed", "halted")),
        call("open", {}, session="completed", org=OTHER),
        *(call("intercept", {**told, **_ids(step)}, key=f"step-{step}", path="/intercept") for step in (1, 2)),
        call("commit", {"state": "committed"}, step=1, body={"result": {"credit": CREDIT}}),
        call("fail", {"state": "failed"}, key="fail"),
        call("look", {"state": "compensating"}, answered_at=2.0),
        call("look", {"state": "compensated"}, answered_at=3.0),
        call("approve", {"state": "approved"}, who=OPERATOR, **of_wire),
        call("reject", {"code": "already_decided"}, who=ADMIN, heard=Heard.FAIL, status=409, allowed=("already_decided",), **of_wire),
        call("resume", {"decision": "execute", "effect_id": "e1", "step_index": 1, "undo_id": None}, key="resume", **of_wire),
        call("commit", {"state": "committed"}, body={"result": None}, **of_wire),
        call("look across", {"code": "session_not_found"}, org=OTHER, heard=Heard.FAIL, status=404, allowed=("session_not_found",)),
    ]
    requests = [
        request("act", "effect-e1", 1.0, 1.1, step=1),
        request("act", "effect-e2", 2.0, 2.1, step=2),
        request("undo", "undo-u2", 3.0, 3.1, step=2, status=503, is_applied=False),
        request("undo", "undo-u2", 3.2, 3.3, step=2, attempt=2),
        request("undo", "undo-u1", 4.0, 4.1, step=1),
        request("act", "effect-e1", 5.0, 5.1, step=1, session="halted", body=WIRE),
    ]
    return Evidence(
        seed=1,
        calls=calls,
        requests=requests,
        exports=[failed, halted, completed],
        checkpoints=[Checkpoint(org=ORG, name="failed", journal=failed.journal[:3])],
        listed={ORG: ["failed", "halted"], OTHER: ["completed"]},
        escalated={ORG: ["halted"], OTHER: []},
    )


def _ids(step: int) -> JsonObject:
    return {"step_index": step, "effect_id": f"e{step}", "undo_id": f"u{step}", "forward_key": f"effect-e{step}"}
