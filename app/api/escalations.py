"""The routes of what waits for a person: the list, and one session's whole package. Must not change anything."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from app.api import schemas
from app.api.cursors import MOMENT, SESSION, moment_of, read_cursor, shape, write_cursor
from app.api.dependencies import EngineDependency, OperatorOrAuditor, authenticate, etag
from app.api.headers import sends
from app.api.problems import problem_responses
from app.api.render import effect_json, json_response, kept_json, undo_entry_json
from app.api.strict_json import PlainInteger, SessionIdPath, only_query
from app.domain.errors import NotFound
from app.domain.escalation import REASONS, Escalation, Found, Judged, Move, escalate
from app.domain.journal import Sealed, time_text
from app.domain.json_text import Json, JsonFault, parse
from app.domain.model import EntryKind, HaltReason, Session, SessionId, StepIndex
from app.domain.unwinding import StackItem
from app.storage import journal, views
from app.storage.views import HaltCount, HaltedSession, HaltPlace, SessionView, StepView

MAX_PAGE = 200
MAX_CONTENT_CHARACTERS = 2_000  # of one content in the list of what happened
ORDER_WAIT_SECONDS = 30  # a person sees how it ended, and is not left waiting for an endpoint that hangs

_CURSOR = shape(MOMENT, SESSION)

# Who calls is asked before anything else of the request is judged.
router = APIRouter(prefix="/v1", tags=["escalations"], dependencies=[Depends(authenticate)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Package:
    """Everything that a person gets, as it was read at one moment."""

    view: SessionView
    escalation: Escalation
    entries: Sequence[Sealed]


@router.get(
    "/escalations",
    operation_id="listEscalations",
    responses={200: {"model": schemas.EscalationListView}, **problem_responses("bad_cursor")},
    dependencies=[Depends(only_query("reason", "limit", "cursor"))],
)
async def list_escalations(
    principal: OperatorOrAuditor,
    engine: EngineDependency,
    reason: Annotated[HaltReason | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE), PlainInteger] = 50,
    cursor: Annotated[str | None, Query(max_length=500)] = None,
) -> Response:
    """Return the sessions that wait for a person, the longest waiting first, a page at a time, with counts by reason."""
    after = None
    if cursor is not None:
        found_at = read_cursor(cursor, _CURSOR)
        after = HaltPlace(halted_at=moment_of(found_at[1]), session_id=SessionId(found_at[2]))
    async with engine.database.snapshot(principal.org) as tx:
        found = await views.halted(tx, reason, after, limit + 1)
        counts = await views.halt_counts(tx)
    page = found[:limit]
    last = page[-1].session if len(found) > limit else None
    next_cursor = None if last is None else write_cursor(str(_halted_at(last)), last.session_id)
    return json_response(
        {"items": [_item_json(item) for item in page], "counts": [_count_json(count) for count in counts], "next_cursor": next_cursor}
    )


@router.get(
    "/sessions/{session_id}/escalation",
    operation_id="getEscalation",
    responses={200: {"model": schemas.EscalationView, **sends("ETag")}, **problem_responses("escalation_not_found")},
    dependencies=[Depends(only_query())],
)
async def get_escalation(
    request: Request, principal: OperatorOrAuditor, engine: EngineDependency, session_id: SessionIdPath
) -> Response:  # fmt: skip
    """Return what a person has to know of a halted session, and what can be ordered now, each with a ready curl."""
    async with engine.database.snapshot(principal.org) as tx:
        view = await views.session_view(tx, principal, session_id)
        entries = await journal.decisions(tx, session_id)
        escalation = escalate(_found(view, entries, await views.now(tx)))
        if escalation is None:
            raise NotFound(
                "escalation_not_found",
                f"session {session_id} is {view.session.state}; nobody has to look at it",
                session_id=session_id,
                state=view.session.state.value,
            )
    package = _Package(view=view, escalation=escalation, entries=entries)
    base_url = (engine.public_url or str(request.base_url)).rstrip("/")
    return json_response(_package_json(package, base_url), headers={"ETag": etag(view.session.version)})


def _found(view: SessionView, entries: Sequence[Sealed], now: datetime) -> Found:
    return Found(
        session=view.session,
        effects=[step.effect for step in view.steps],
        stack=[item for step in view.steps if (item := _stack_item(step)) is not None],
        late_steps={StepIndex(entry.step) for entry in entries if entry.kind == EntryKind.LATE_COMMIT and entry.step is not None},
        now=now,
    )


def _stack_item(step: StepView) -> StackItem | None:
    return None if step.undo_entry is None else StackItem(entry=step.undo_entry, effect=step.effect, call=step.call)


def _item_json(item: HaltedSession) -> Json:
    session = item.session
    return {
        "session_id": session.session_id,
        "agent": session.agent,
        "reason": _reason(session).value,
        "explanation": REASONS[_reason(session)],
        "pivoted": session.pivoted,
        "halted_at": _halted_at(session),
        "age_seconds": item.age_seconds,
        "url": f"/v1/sessions/{session.session_id}/escalation",
    }


def _count_json(count: HaltCount) -> Json:
    return {
        "reason": count.reason.value,
        "count": count.count,
        "oldest_halted_at": time_text(count.oldest_halted_at),
        "oldest_age_seconds": count.oldest_age_seconds,
    }


def _package_json(package: _Package, base_url: str) -> Json:
    session, escalation = package.view.session, package.escalation
    return {
        "session_id": session.session_id,
        "state": session.state.value,
        "reason": _reason(session).value,
        "explanation": escalation.explanation,
        "advice": escalation.advice,
        "halted_at": _halted_at(session),
        "agent": session.agent,
        "owner": session.owner,
        "metadata": kept_json(session.metadata),
        "clean": session.clean,
        "pivoted": session.pivoted,
        "created_at": time_text(session.created_at),
        "failed_at": None if session.failed_at is None else time_text(session.failed_at),
        "error": next((_object(entry.body).get("error") for entry in package.entries if entry.kind == EntryKind.SESSION_FAILED), None),
        "undone": [_judged_json(found) for found in escalation.undone],
        "not_undone": [_judged_json(found) for found in escalation.not_undone],
        "cannot_be_undone": [_judged_json(found) for found in escalation.cannot_be_undone],
        "moves": [_move_json(move, f"{base_url}/v1/sessions/{session.session_id}{_place(move)}") for move in escalation.moves],
        "steps": [_step_json(step) for step in package.view.steps],
        "undo_stack": [found for step in reversed(package.view.steps) if (found := _undo_json(step)) is not None],
        "unreadable_steps": [*package.view.unreadable],
        "decisions": [_happened_json(entry) for entry in package.entries],
    }


def _judged_json(judged: Judged) -> Json:
    return {
        "step_index": judged.effect.step_index,
        "tool": judged.effect.tool,
        "description": judged.description,
        "sentence": judged.sentence,
    }


def _move_json(move: Move, url: str) -> Json:
    body = parse(json.dumps(dict(move.body)).encode())
    return {
        "name": move.name,
        "title": move.title,
        "consequence": move.consequence,
        "warning": move.warning,
        "method": "POST",
        "url": url,
        "body": body,
        "curl": _curl(move, url),
    }


def _place(move: Move) -> str:
    """Return where an order goes; one that sets the unwind going is answered when that is over, or has taken a while."""
    return f"{move.path}?wait_s={ORDER_WAIT_SECONDS}" if move.name in {"retry", "unwind"} else move.path


def _curl(move: Move, url: str) -> str:
    """Return a command to paste into a shell; what the caller's request said of this host is quoted, and nothing of an agent is in it.

    It acts on what was shown, or not at all (If-Match), and repeating it after a lost answer does no harm (Idempotency-Key).
    """
    members = {**move.body, "reason": "REASON", **({"result": "RESULT"} if move.needs_result else {})}
    body = json.dumps(members, separators=(",", ":")).replace('"', '\\"')
    body = body.replace("REASON", "${REASON:?say why, in REASON, without double quotes}")
    body = body.replace('\\"RESULT\\"', "${RESULT:?what the tool returned, as JSON}")
    return " ".join(
        (
            f"curl -sS -X POST {shlex.quote(url)}",
            '-H "Authorization: Bearer ${COUNTERMAND_KEY:?an operator key}"',
            "-H 'Content-Type: application/json'",
            f"-H 'If-Match: {etag(move.version)}'",
            f"-H 'Idempotency-Key: {'-'.join((move.name, *(str(value).lower() for value in move.body.values()), f'v{move.version}'))}'",
            f'-d "{body}"',
        )
    )


def _step_json(step: StepView) -> Json:
    effect = step.effect
    return {
        **effect_json(step),
        "registered_at": time_text(effect.registered_at),
        "executed_at": None if effect.executed_at is None else time_text(effect.executed_at),
    }


def _undo_json(step: StepView) -> Json:
    entry, call = step.undo_entry, step.call
    if entry is None:
        return None
    return {
        **undo_entry_json(entry, call),
        "idempotency_key": entry.idempotency_key,
        "independent": entry.compensation.independent,
        "first_sent_at": None if call is None or call.first_sent_at is None else time_text(call.first_sent_at),
        "body": None if call is None or call.body is None else call.body.decode("utf-8", "replace"),
    }


def _happened_json(entry: Sealed) -> Json:
    return {
        "seq": entry.seq,
        "at": entry.at,
        "kind": entry.kind,
        "step": entry.step,
        "actor": entry.actor,
        "details": _object(entry.body),
        "contents": {name: _cut(content.get("text")) for name, content in _object(entry.content).items() if isinstance(content, dict)},
    }


def _cut(text: Json) -> Json:
    """Shorten what could be a megabyte: who looks has to find the rest of the package; the journal has all of it."""
    if not isinstance(text, str) or len(text) <= MAX_CONTENT_CHARACTERS:
        return text
    return f"{text[:MAX_CONTENT_CHARACTERS]} ... (cut; the journal has all of it)"


def _object(text: bytes | None) -> dict[str, Json]:
    """Read what the journal holds; what somebody has spoilt is for `verify` to name, and shows nothing here."""
    if text is None:
        return {}
    try:
        found = parse(text)
    except JsonFault:
        return {}
    return found if isinstance(found, dict) else {}


def _reason(session: Session) -> HaltReason:
    if session.halt_reason is None:
        raise AssertionError(f"session {session.session_id} is {session.state} without a reason")
    return session.halt_reason


def _halted_at(session: Session) -> str | None:
    return None if session.halted_at is None else time_text(session.halted_at)
