"""Turn the domain's values into the answers' JSON, number literals kept. Must not look anything up."""

import re
import struct
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType

from starlette.responses import Response

from app.domain import approval, bindings, tools
from app.domain.intercept import AwaitApproval, InFlight, Replay
from app.domain.journal import time_text
from app.domain.json_text import Json, JsonFault, dump, parse
from app.domain.model import Approval, Effect, Outcome, OutgoingCall, Session, SessionId, UndoEntry
from app.domain.outcomes import Reported
from app.domain.tools import Tool
from app.engine.verbs import Answer
from app.storage.views import ApprovalItem, SessionView, StepView

# Answers tell what tenants did: nothing on the way keeps them.
NOT_KEPT: Mapping[str, str] = MappingProxyType({"Cache-Control": "no-store"})

# Characters that show nothing, turn text round or break lines: a person who decides by what the terminal shows must not be deceived.
_UNSEEN = re.compile("[\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]")


def json_response(value: Json, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with compact JSON; nothing in it is cached by anybody."""
    return Response(visible(dump(value)), status, {**NOT_KEPT, **(headers or {})}, media_type="application/json")


def not_modified(headers: Mapping[str, str]) -> Response:
    """Answer that the caller has this version already, with the headers that the whole answer would have (RFC 9110, section 15.4.5)."""
    return Response(status_code=304, headers={**NOT_KEPT, **headers})


def visible(body: bytes) -> bytes:
    """Return the same JSON with every character that a reader could not see as an escape; strings are the same once read."""
    return body if body.isascii() else _UNSEEN.sub(_escape, body.decode()).encode()


def _escape(found: re.Match[str]) -> str:
    return "".join(f"\\u{unit:04x}" for (unit,) in struct.iter_unpack(">H", found[0].encode("utf-16-be")))


def answer_response(answer: Answer) -> Response:
    """Answer with bytes that were made inside the verb, or before, for the same request."""
    headers = {**NOT_KEPT, **({"Idempotent-Replayed": "true"} if answer.is_replayed else {})}
    return Response(visible(answer.body), answer.status, headers, media_type="application/json")


def reported_bytes(reported: Reported) -> bytes:
    """Render the effect that a report was about."""
    step = StepView(effect=reported.effect, approval=reported.approval, undo_entry=reported.undo_entry, call=None, action=reported.action)
    return dump(effect_json(step))


def session_bytes(view: SessionView) -> bytes:
    """Render a session as bytes."""
    return dump(session_json(view))


def kept_json(text: bytes) -> Json:
    """Read what was kept as JSON; what somebody has spoilt is shown as it is, so that the rest can be looked at."""
    try:
        return parse(text)
    except JsonFault:
        return text.decode("utf-8", "replace")


def tool_json(tool: Tool, created_by: str, created_at: datetime | None) -> Json:
    """Render one version of a tool."""
    definition = parse(tools.write(tool.definition))
    members = definition if isinstance(definition, dict) else {}
    return {"name": tool.name, "version": tool.version, **members, "created_by": created_by, "created_at": _time(created_at)}


def session_json(view: SessionView) -> Json:
    """Render a session with its effects and its undo stack."""
    return {
        **session_summary_json(view.session),
        "effects": [effect_json(step) for step in view.steps],
        "undo_stack": [undo_entry_json(step.undo_entry, step.call) for step in reversed(view.steps) if step.undo_entry is not None],
        "unreadable_steps": [*view.unreadable],
        "held_by": None if view.held_by is None else view.held_by.value,
    }


def session_summary_json(session: Session) -> dict[str, Json]:
    """Render what stands on the session's own row."""
    return {
        "session_id": session.session_id,
        "state": session.state.value,
        "clean": session.clean,
        "halt_reason": session.halt_reason.value if session.halt_reason else None,
        "pivoted": session.pivoted,
        "agent": session.agent,
        "metadata": kept_json(session.metadata),
        "created_at": time_text(session.created_at),
        "updated_at": time_text(session.updated_at),
        "deadline_at": _time(session.deadline_at),
        "idle_seconds": session.idle_seconds,
    }


def effect_json(step: StepView) -> dict[str, Json]:
    """Render one effect."""
    effect, undo_entry = step.effect, step.undo_entry
    is_resolved = undo_entry is None or effect.result is None
    return {
        "effect_id": str(effect.effect_id),
        "step_index": effect.step_index,
        "tool": effect.tool,
        "tool_version": effect.tool_version,
        "reversibility": effect.reversibility.value,
        "state": effect.state.value,
        "outcome": effect.outcome.value if effect.outcome else None,
        "payload": effect.payload.decode("utf-8", "replace"),
        "payload_sha256": effect.payload_sha256.hex(),
        "result": None if effect.result is None else kept_json(effect.result),
        "error": effect.error,
        "forward_key": effect.forward_key,
        "undo_id": None if undo_entry is None else str(undo_entry.undo_id),
        "attempt": effect.attempt,
        "released_to": None if step.approval is None else step.approval.released_to,
        "approval": None if step.approval is None else _approval_json(effect, step.approval),
        "action": None if step.action is None else _action_json(step.action),
        "unresolved": []
        if is_resolved or undo_entry is None
        else [str(reference) for reference in bindings.unresolved(undo_entry.compensation, effect)],
    }


def approval_item_json(item: ApprovalItem) -> Json:
    """Render a parked call with the session it belongs to."""
    return {**effect_json(item.step), "session_id": item.session_id, "agent": item.agent, "action_url": item.action_url}


def _approval_json(effect: Effect, asked: Approval) -> Json:
    return {
        "state": asked.state.value,
        "requested_at": time_text(asked.requested_at),
        "requested_by": asked.requested_by,
        "expires_at": time_text(asked.expires_at),
        "ttl_seconds": asked.ttl_seconds,
        "decided_at": _time(asked.decided_at),
        "decided_by": asked.decided_by,
        "claimed_approver": asked.claimed_approver,
        "reason": asked.reason,
        "released_at": _time(asked.released_at),
        "message": approval.message(effect, asked),
    }


def _action_json(call: OutgoingCall) -> Json:
    return {
        "url": call.url,
        "attempts": call.attempts,
        "last_status": call.last_status,
        "last_error": call.last_error,
        "next_attempt_at": _time(call.due_at),
    }


def undo_entry_json(entry: UndoEntry, call: OutgoingCall | None) -> dict[str, Json]:
    """Render one undo entry with what is known of its call."""
    return {
        "undo_id": str(entry.undo_id),
        "step_index": entry.stack_position,
        "stack_position": entry.stack_position,
        "state": entry.state.value,
        "description": entry.compensation.description,
        "url": call.url if call is not None and call.url is not None else entry.compensation.url,
        "attempts": call.attempts if call else 0,
        "last_status": call.last_status if call else None,
        "last_error": call.last_error if call else None,
        "next_attempt_at": _time(call.due_at) if call else None,
        "by_hand": entry.by_hand,
        "registered_at": time_text(entry.registered_at),
        "compensated_at": _time(entry.compensated_at),
    }


def execute_json(session_id: SessionId, effect: Effect, undo_entry: UndoEntry | None) -> Json:
    """Render the permission to run the tool."""
    return {
        "decision": "execute",
        "session_id": session_id,
        "step_index": effect.step_index,
        "effect_id": str(effect.effect_id),
        "undo_id": None if undo_entry is None else str(undo_entry.undo_id),
        "forward_key": effect.forward_key,
        "payload": effect.payload.decode(),
        "payload_sha256": effect.payload_sha256.hex(),
        "attempt": effect.attempt,
    }


def await_approval_json(session_id: SessionId, decision: AwaitApproval) -> Json:
    """Render that a person is asked, with the second seed's text for the model."""
    effect = decision.effect
    return {
        "decision": "await_approval",
        "session_id": session_id,
        "step_index": effect.step_index,
        "effect_id": str(effect.effect_id),
        "forward_key": effect.forward_key,
        "payload": effect.payload.decode(),
        "payload_sha256": effect.payload_sha256.hex(),
        "expires_at": time_text(decision.approval.expires_at),
        "message": approval.message(effect, decision.approval),
    }


_ACTED = {Outcome.COMMITTED: "executed", Outcome.NOT_APPLIED: "failed", Outcome.UNKNOWN: "unknown"}


def acted_json(session_id: SessionId, step: StepView) -> Json:
    """Render how the service's own execution of a released call stands."""
    effect = step.effect
    return {
        "decision": "in_flight" if step.is_in_progress or effect.outcome is None else _ACTED[effect.outcome],
        "session_id": session_id,
        "step_index": effect.step_index,
        "effect_id": str(effect.effect_id),
        "state": effect.state.value,
        "outcome": effect.outcome.value if effect.outcome else None,
        "result": None if effect.result is None else parse(effect.result),
        "error": effect.error,
    }


def repeat_json(session_id: SessionId, decision: Replay | InFlight) -> Json:
    """Render that the tool ran, or is being run by whoever was told first."""
    effect: Effect = decision.effect
    return {
        "decision": "replay" if isinstance(decision, Replay) else "in_flight",
        "session_id": session_id,
        "step_index": effect.step_index,
        "effect_id": str(effect.effect_id),
        "state": effect.state.value,
        "result": None if effect.result is None else parse(effect.result),
    }


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else time_text(moment)
