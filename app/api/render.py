"""Turn the domain's values into the answers' JSON, number literals kept. Must not look anything up."""

from collections.abc import Mapping
from datetime import datetime

from starlette.responses import Response

from app.domain import bindings, tools
from app.domain.intercept import AwaitApproval, Execute, InFlight, Replay
from app.domain.journal import time_text
from app.domain.json_text import Json, dump, parse
from app.domain.model import Approval, Effect, EffectState, OutgoingCall, Session, SessionId, UndoEntry
from app.domain.outcomes import Reported
from app.domain.tools import Tool
from app.engine.forward import Answer
from app.storage.views import SessionView, StepView


def json_response(value: Json, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with compact JSON; nothing in it is cached by anybody."""
    return Response(dump(value), status, {"Cache-Control": "no-store", **(headers or {})}, media_type="application/json")


def answer_response(answer: Answer) -> Response:
    """Answer with bytes that were made inside the verb, or before, for the same request."""
    headers = {"Cache-Control": "no-store", **({"Idempotent-Replayed": "true"} if answer.is_replayed else {})}
    return Response(answer.body, answer.status, headers, media_type="application/json")


def reported_bytes(reported: Reported) -> bytes:
    """Render the effect that a report was about."""
    step = StepView(effect=reported.effect, approval=reported.approval, undo_entry=reported.undo_entry, call=None)
    return dump(effect_json(step))


def session_bytes(view: SessionView) -> bytes:
    """Render a session as bytes."""
    return dump(session_json(view))


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
        "metadata": parse(session.metadata),
        "created_at": time_text(session.created_at),
        "updated_at": time_text(session.updated_at),
        "deadline_at": _time(session.deadline_at),
        "idle_seconds": session.idle_seconds,
    }


def effect_json(step: StepView) -> Json:
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
        "payload": effect.payload.decode(),
        "payload_sha256": effect.payload_sha256.hex(),
        "result": None if effect.result is None else parse(effect.result),
        "error": effect.error,
        "forward_key": effect.forward_key,
        "undo_id": None if undo_entry is None else str(undo_entry.undo_id),
        "attempt": effect.attempt,
        "released_to": None,
        "approval": None if step.approval is None else _approval_json(step.approval, effect.state),
        "unresolved": []
        if is_resolved or undo_entry is None
        else [str(reference) for reference in bindings.unresolved(undo_entry.compensation, effect)],
    }


def _approval_json(approval: Approval, state: EffectState) -> Json:
    return {
        "state": state.value,
        "requested_at": time_text(approval.requested_at),
        "requested_by": approval.requested_by,
        "expires_at": time_text(approval.expires_at),
        "decided_at": None,
        "decided_by": None,
        "claimed_approver": None,
        "reason": None,
    }


def undo_entry_json(entry: UndoEntry, call: OutgoingCall | None) -> Json:
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


def execute_json(session_id: SessionId, decision: Execute) -> Json:
    """Render the permission to run the tool."""
    effect = decision.effect
    return {
        "decision": "execute",
        "session_id": session_id,
        "step_index": effect.step_index,
        "effect_id": str(effect.effect_id),
        "undo_id": None if decision.undo_entry is None else str(decision.undo_entry.undo_id),
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
        "message": f"[AWAITING_APPROVAL] Tool '{effect.tool}' requires human approval",
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
