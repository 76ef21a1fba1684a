"""The routes of a person's decision: list what waits, approve, reject, resume. Must not decide: each turns a request into one verb."""

from hashlib import sha256
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from app.api import bodies, schemas
from app.api.cursors import MOMENT, SESSION, moment_of, read_cursor, shape, write_cursor
from app.api.dependencies import (
    AgentOrOperator,
    EngineDependency,
    IdempotencyKey,
    OperatorCaller,
    OperatorOrAuditor,
    authenticate,
)
from app.api.effects import look_at_step
from app.api.headers import sends
from app.api.problems import problem_responses
from app.api.render import acted_json, answer_response, approval_item_json, execute_json, json_response, reported_bytes
from app.api.sessions import WaitSeconds
from app.api.strict_json import PlainInteger, Received, SessionIdPath, StepPath, body, only_query
from app.domain.approval import Approve, Reject, Resume
from app.domain.journal import time_text
from app.domain.model import ApprovalState, SessionId, StepIndex
from app.storage import views
from app.storage.views import ApprovalPlace

MAX_PAGE = 200

_CURSOR = shape(MOMENT, SESSION, r"(\d{1,10})")

# Who calls is asked before anything else of the request is judged.
router = APIRouter(prefix="/v1", tags=["approvals"], dependencies=[Depends(authenticate)])

PAYLOAD_EXAMPLE = '{"amount":"100","to":"alice"}'
APPROVE_EXAMPLES = {
    "yes": {"approver": "manager@company.com"},
    "bound": {"reason": "checked with the customer", "payload_sha256": sha256(PAYLOAD_EXAMPLE.encode()).hexdigest()},
}
REJECT_EXAMPLES = {
    "no": {"reason": "wrong account"},
    "go on": {"reason": "do not mail this customer", "then": "continue"},
}
ACTION_RETRY_AFTER_SECONDS = 1  # an endpoint is called; most answer sooner
RESUME_EXAMPLES = {"wire": {"payload": PAYLOAD_EXAMPLE}}


@router.get(
    "/approvals",
    operation_id="listApprovals",
    responses={200: {"model": schemas.ApprovalListView}, **problem_responses("bad_cursor")},
    dependencies=[Depends(only_query("state", "limit", "cursor"))],
)
async def list_approvals(
    principal: OperatorOrAuditor,
    engine: EngineDependency,
    state: Annotated[ApprovalState | None, Query(description="`pending`: what waits for a person now; absent: all.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE), PlainInteger] = 50,
    cursor: Annotated[str | None, Query(max_length=500)] = None,
) -> Response:
    """Return questions put to people, oldest first, a page at a time. One that is past its time is not pending any more."""
    after = None
    if cursor is not None:
        found_at = read_cursor(cursor, _CURSOR)
        after = ApprovalPlace(
            requested_at=moment_of(found_at[1]), session_id=SessionId(found_at[2]), step_index=StepIndex(int(found_at[3]))
        )
    async with engine.database.snapshot(principal.org) as tx:
        found = await views.approvals(tx, state, after, limit + 1)
    page = found[:limit]
    last = page[-1].place if len(found) > limit else None
    next_cursor = None if last is None else write_cursor(time_text(last.requested_at), last.session_id, str(last.step_index))
    return json_response({"items": [approval_item_json(item) for item in page], "next_cursor": next_cursor})


@router.post(
    "/sessions/{session_id}/effects/{step}/approve",
    operation_id="approveEffect",
    responses={
        200: {"model": schemas.EffectView},
        **problem_responses("already_decided", "approval_not_found", "payload_differs", "same_subject"),
    },
    dependencies=[Depends(only_query())],
)
async def approve_effect(
    caller: OperatorCaller,
    engine: EngineDependency,
    session_id: SessionIdPath,
    step: StepPath,
    received: Annotated[Received[bodies.ApproveBody], Depends(body(bodies.ApproveBody, examples=APPROVE_EXAMPLES))],
) -> Response:
    """Say yes to exactly this payload. Nothing runs: that takes a resume, which presents the same bytes."""
    model = received.model
    decision = Approve(
        by=caller.principal.subject,
        reason=model.reason,
        claimed_approver=model.approver,
        payload_sha256=None if model.payload_sha256 is None else bytes.fromhex(model.payload_sha256),
    )
    ask = caller.ask(session_id, received.tree)
    return answer_response(await engine.decisions.approve(ask, step, decision, reported_bytes))


@router.post(
    "/sessions/{session_id}/effects/{step}/reject",
    operation_id="rejectEffect",
    responses={200: {"model": schemas.EffectView}, **problem_responses("already_decided", "approval_not_found", "same_subject")},
    dependencies=[Depends(only_query())],
)
async def reject_effect(
    caller: OperatorCaller,
    engine: EngineDependency,
    session_id: SessionIdPath,
    step: StepPath,
    received: Annotated[Received[bodies.RejectBody], Depends(body(bodies.RejectBody, examples=REJECT_EXAMPLES))],
) -> Response:
    """Say no: what the session did before is undone, unless `then` says that it goes on."""
    model = received.model
    decision = Reject(
        by=caller.principal.subject, reason=model.reason, claimed_approver=model.approver, is_continued=model.then == "continue"
    )
    ask = caller.ask(session_id, received.tree)
    return answer_response(await engine.decisions.reject(ask, step, decision, reported_bytes))


@router.post(
    "/sessions/{session_id}/effects/{step}/resume",
    operation_id="resumeEffect",
    responses={
        200: {"model": schemas.ExecuteView | schemas.ActedView},
        202: {"model": schemas.ActedView, **sends("Location", "Retry-After")},
        **problem_responses(
            "already_decided",
            "already_released",
            "approval_expired",
            "approval_not_found",
            "not_approved",
            "payload_changed",
            "payload_too_large",
            "session_past_deadline",
        ),
    },
    dependencies=[Depends(only_query("wait_s"))],
)
async def resume_effect(
    principal: AgentOrOperator,
    engine: EngineDependency,
    session_id: SessionIdPath,
    step: StepPath,
    key: IdempotencyKey,
    received: Annotated[Received[bodies.ResumeBody], Depends(body(bodies.ResumeBody, examples=RESUME_EXAMPLES))],
    wait_s: WaitSeconds = 0,
) -> Response:
    """Release an approved call, once. `execute`: run it now and report on it; a tool with an `action` is run by the service."""
    resume = Resume(by=principal.subject, payload=received.model.payload.encode(), request_key=key)
    released = await engine.decisions.resume(principal, session_id, step, resume)
    if not released.is_action:
        return json_response(execute_json(session_id, released.reported.effect, released.reported.undo_entry))
    view = await engine.waits.until(
        principal.org,
        session_id,
        lambda: look_at_step(engine, principal, session_id, step),
        lambda seen: not seen.is_in_progress,
        wait_s,
    )
    if view.is_in_progress:
        headers = {"Location": f"/v1/sessions/{session_id}/effects/{step}", "Retry-After": str(ACTION_RETRY_AFTER_SECONDS)}
        return json_response(acted_json(session_id, view), 202, headers)
    return json_response(acted_json(session_id, view))
