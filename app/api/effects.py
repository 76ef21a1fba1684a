"""The routes of a tool call: intercept, look, commit, fail. Must not decide: each turns a request into one verb."""

from typing import Annotated, Any, Final, assert_never

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from app.api import bodies, schemas
from app.api.dependencies import (
    Agent,
    AgentOrOperatorCaller,
    Anyone,
    Caller,
    Engine,
    EngineDependency,
    IdempotencyKey,
    Traceparent,
    authenticate,
    etag,
    is_unchanged,
)
from app.api.descriptors import compensation_of
from app.api.headers import sends
from app.api.lean import LeanVerb, Plain
from app.api.problems import problem_responses
from app.api.render import (
    answer_response,
    await_approval_json,
    effect_json,
    execute_json,
    json_response,
    not_modified,
    repeat_json,
    reported_bytes,
)
from app.api.sessions import NOT_MODIFIED, WaitSeconds
from app.api.strict_json import MAX_PAYLOAD_BYTES, Received, SessionIdPath, StepPath, body, fingerprint, only_query, within
from app.domain.errors import Invalid, Malformed
from app.domain.intercept import AwaitApproval, Execute, InFlight, InterceptCommand, Refuse, Replay
from app.domain.json_text import dump
from app.domain.model import Outcome, Principal, Role, SessionId, StepIndex
from app.domain.outcomes import FailReport
from app.storage import views
from app.storage.views import StepView

APPROVAL_RETRY_AFTER_SECONDS = 5  # a person is asked; asking more often than this gains nothing

# Who calls is asked before anything else of the request is judged.
router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["effects"], dependencies=[Depends(authenticate)])

INTERCEPT_EXAMPLES = {
    "undoable": {
        "tool": "issue_credit",
        "payload": '{"order":4921,"amount":2500}',
        "step_index": 2,
        "reversibility": "compensatable",
        "compensation": {
            "url": "https://billing.example/undo/credit",
            "description": "reverse the credit",
            "args": {"credit_id": {"$ref": "result#/credit_id"}},
            "unknown": {"args": {"forward_key": {"$ref": "effect#/forward_key"}}},
        },
    },
    "irreversible": {"tool": "send_reply", "args": {"to": "customer@example.com"}, "reversibility": "irreversible", "step_index": 3},
}

COMMIT_EXAMPLES = {"credit": {"result": {"credit_id": "cr_9104_1"}}}
FAIL_EXAMPLES = {"refused": {"error": "card declined", "outcome": "not_applied"}}


@router.post(
    "/intercept",
    operation_id="interceptEffect",
    status_code=201,
    responses={
        200: {"model": schemas.RepeatView},
        201: {"model": schemas.ExecuteView},
        202: {"model": schemas.AwaitApprovalView, **sends("Location", "Retry-After")},
        **problem_responses(
            "args_too_large",
            "bad_reference",
            "busy",
            "compensation_not_allowed",
            "idempotency_key_required",
            "inline_not_allowed",
            "key_reused",
            "payload_schema",
            "payload_too_large",
            "reversibility_lowered",
            "session_awaiting_approval",
            "session_not_active",
            "session_past_deadline",
            "step_out_of_order",
            "step_reused",
            "step_settled",
            "tool_needs_compensation",
            "unresolved_reference",
            "unsettled_effects",
            "url_refused",
        ),
    },
    dependencies=[Depends(only_query())],
)
async def intercept_effect(
    principal: Agent,
    engine: EngineDependency,
    session_id: SessionIdPath,
    key: IdempotencyKey,
    trace: Traceparent,
    received: Annotated[Received[bodies.InterceptBody], Depends(body(bodies.InterceptBody, examples=INTERCEPT_EXAMPLES))],
) -> Response:
    """Ask before running a tool. `execute`: the call and its undo are durable, run it now; anything else: do not run it."""
    return await answer_intercept(engine, principal, session_id, received, key, trace)


async def answer_intercept(
    engine: Engine,
    principal: Principal,
    session_id: SessionId,
    received: Received[bodies.InterceptBody],
    key: str | None,
    trace: str | None,
) -> Response:
    """Turn an intercept that was read into the answer to it."""
    decision = await engine.forward.intercept(principal, session_id, _command(engine, received, key, trace))
    match decision:
        case Execute():
            return json_response(execute_json(session_id, decision.effect, decision.undo_entry), 201)
        case AwaitApproval():
            headers = {
                "Location": f"/v1/sessions/{session_id}/effects/{decision.effect.step_index}",
                "Retry-After": str(APPROVAL_RETRY_AFTER_SECONDS),
            }
            return json_response(await_approval_json(session_id, decision), 202, headers)
        case Replay() | InFlight():
            return json_response(repeat_json(session_id, decision))
        case Refuse():
            raise decision.error
        case _:
            assert_never(decision)


@router.get(
    "/effects/{step}",
    operation_id="getEffect",
    responses={200: {"model": schemas.EffectView, **sends("ETag")}, **NOT_MODIFIED},
    dependencies=[Depends(only_query("wait_s"))],
)
async def get_effect(
    request: Request,
    principal: Anyone,
    engine: EngineDependency,
    session_id: SessionIdPath,
    step: StepPath,
    wait_s: WaitSeconds = 0,
) -> Response:
    """Return one effect. `wait_s` holds the answer while the call waits for a person's decision, or is being executed by the service."""
    view = await engine.waits.until(
        principal.org,
        session_id,
        lambda: look_at_step(engine, principal, session_id, step),
        lambda seen: not seen.is_waiting,
        wait_s,
    )
    headers = {"ETag": etag(view.effect.version)}
    if is_unchanged(request, view.effect.version):
        return not_modified(headers)
    return json_response(effect_json(view), headers=headers)


@router.post(
    "/effects/{step}/commit",
    operation_id="commitEffect",
    responses={
        200: {"model": schemas.EffectView},
        **problem_responses("busy", "not_executing", "not_released_to_you", "result_differs", "runs_as_action", "session_not_active"),
    },
    dependencies=[Depends(only_query())],
)
async def commit_effect(
    caller: AgentOrOperatorCaller,
    engine: EngineDependency,
    session_id: SessionIdPath,
    step: StepPath,
    received: Annotated[Received[bodies.CommitBody], Depends(body(bodies.CommitBody, examples=COMMIT_EXAMPLES))],
) -> Response:
    """Say that the tool ran, with its result; references of its undo into the result are bound to this."""
    return await answer_commit(engine, caller, session_id, step, received)


async def answer_commit(
    engine: Engine, caller: Caller, session_id: SessionId, step: StepIndex, received: Received[bodies.CommitBody]
) -> Response:
    """Turn a commit that was read into the answer to it."""
    ask = caller.ask(session_id, received.tree)
    return answer_response(await engine.forward.commit(ask, step, dump(received.model.result), reported_bytes))


@router.post(
    "/effects/{step}/fail",
    operation_id="failEffect",
    responses={
        200: {"model": schemas.EffectView},
        **problem_responses("not_executing", "not_released_to_you", "runs_as_action", "session_not_active"),
    },
    dependencies=[Depends(only_query())],
)
async def fail_effect(
    caller: AgentOrOperatorCaller,
    engine: EngineDependency,
    session_id: SessionIdPath,
    step: StepPath,
    received: Annotated[Received[bodies.FailEffectBody], Depends(body(bodies.FailEffectBody, examples=FAIL_EXAMPLES))],
) -> Response:
    """Say that this call failed; the session goes on. `not_applied`: it certainly did nothing, so there is nothing to undo."""
    report = FailReport(outcome=Outcome(received.model.outcome), error=received.model.error)
    ask = caller.ask(session_id, received.tree)
    return answer_response(await engine.forward.fail_effect(ask, step, report, reported_bytes))


async def _lean_intercept(engine: Engine, plain: Plain, received: Received[bodies.InterceptBody]) -> Response:
    return await answer_intercept(engine, plain.caller.principal, plain.session_id, received, plain.caller.key, plain.trace)


async def _lean_commit(engine: Engine, plain: Plain, received: Received[bodies.CommitBody]) -> Response:
    return await answer_commit(engine, plain.caller, plain.session_id, plain.step, received)


LEAN: Final[tuple[LeanVerb[Any], ...]] = (
    LeanVerb(
        operation_id="interceptEffect",
        name="intercept",
        model=bodies.InterceptBody,
        roles=frozenset({Role.AGENT}),
        answer=_lean_intercept,
    ),
    LeanVerb(
        operation_id="commitEffect",
        name="commit",
        has_step=True,
        model=bodies.CommitBody,
        roles=frozenset({Role.AGENT}),
        answer=_lean_commit,
    ),
)


async def look_at_step(engine: Engine, principal: Principal, session_id: SessionId, step: StepIndex) -> StepView:
    """Read one step as the caller may see it."""
    async with engine.database.snapshot(principal.org) as tx:
        return await views.step_view(tx, principal, session_id, step)


def _command(engine: Engine, received: Received[bodies.InterceptBody], key: str | None, trace: str | None) -> InterceptCommand:
    model = received.model
    if model.step_index is None and key is None:
        raise Malformed(
            "idempotency_key_required",
            "without a step_index an Idempotency-Key is needed, so that a repeat can be told from a second call",
        )
    given = model.model_fields_set & {"payload", "args"}
    if len(given) != 1 or (given == {"payload"} and model.payload is None):
        raise Invalid(
            "invalid_request",
            "expected exactly one of payload and args",
            errors=[{"pointer": "/payload", "detail": "or args: exactly one"}],
        )
    payload = within(dump(model.args), limit_bytes=MAX_PAYLOAD_BYTES, pointer="/args") if model.payload is None else model.payload.encode()
    return InterceptCommand(
        tool=model.tool,
        payload=payload,
        payload_pointer="/args" if model.payload is None else "/payload",
        step_index=None if model.step_index is None else StepIndex(model.step_index),
        reversibility=model.reversibility,
        compensation=None if model.compensation is None else compensation_of(model.compensation, engine.retry_defaults),
        request_key=key,
        request_sha256=fingerprint(received.tree),
        traceparent=trace,
    )
