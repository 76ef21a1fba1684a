"""The routes of a tool call: intercept, look, commit, fail. Must not decide: each turns a request into one verb."""

from typing import Annotated, assert_never

from fastapi import APIRouter, Depends
from starlette.responses import Response

from app.api import schemas
from app.api.dependencies import Agent, Anyone, Engine, EngineDependency, IdempotencyKey, Traceparent, authenticate
from app.api.errors import problem_responses
from app.api.render import await_approval_json, effect_json, execute_json, json_response, repeat_json
from app.api.strict_json import MAX_PAYLOAD_BYTES, Received, SessionIdPath, StepPath, body, fingerprint, only_query, within
from app.domain.errors import Invalid, Malformed
from app.domain.intercept import AwaitApproval, Execute, InFlight, InterceptCommand, Refuse, Replay
from app.domain.json_text import dump
from app.domain.model import Compensation, Outcome, Principal, RetryPolicy, SessionId, StepIndex, UnknownVariant
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


@router.post(
    "/intercept",
    operation_id="interceptEffect",
    status_code=201,
    responses={
        200: {"model": schemas.RepeatView},
        201: {"model": schemas.ExecuteView},
        202: {"model": schemas.AwaitApprovalView},
        **problem_responses(403, 404, 409),
    },
    dependencies=[Depends(only_query())],
)
async def intercept_effect(
    principal: Agent,
    engine: EngineDependency,
    session_id: SessionIdPath,
    key: IdempotencyKey,
    trace: Traceparent,
    received: Annotated[Received[schemas.InterceptBody], Depends(body(schemas.InterceptBody, examples=INTERCEPT_EXAMPLES))],
) -> Response:
    """Ask before running a tool. `execute`: the call and its undo are durable, run it now; anything else: do not run it."""
    command = _command(engine, received, key, trace)
    decision = await engine.forward.intercept(principal, session_id, command)
    match decision:
        case Execute():
            return json_response(execute_json(session_id, decision), 201)
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
    responses={200: {"model": schemas.EffectView}, **problem_responses(403, 404)},
    dependencies=[Depends(only_query())],
)
async def get_effect(principal: Anyone, engine: EngineDependency, session_id: SessionIdPath, step: StepPath) -> Response:
    """Return one effect."""
    return json_response(effect_json(await _look(engine, principal, session_id, step)))


@router.post(
    "/effects/{step}/commit",
    operation_id="commitEffect",
    responses={200: {"model": schemas.EffectView}, **problem_responses(403, 404, 409)},
    dependencies=[Depends(only_query())],
)
async def commit_effect(
    principal: Agent,
    engine: EngineDependency,
    session_id: SessionIdPath,
    step: StepPath,
    received: Annotated[
        Received[schemas.CommitBody], Depends(body(schemas.CommitBody, examples={"credit": {"result": {"credit_id": "cr_9104_1"}}}))
    ],
) -> Response:
    """Say that the tool ran, with its result; references of its undo into the result are bound to this."""
    await engine.forward.commit(principal, session_id, step, dump(received.model.result))
    return json_response(effect_json(await _look(engine, principal, session_id, step)))


@router.post(
    "/effects/{step}/fail",
    operation_id="failEffect",
    responses={200: {"model": schemas.EffectView}, **problem_responses(403, 404, 409)},
    dependencies=[Depends(only_query())],
)
async def fail_effect(
    principal: Agent,
    engine: EngineDependency,
    session_id: SessionIdPath,
    step: StepPath,
    received: Annotated[
        Received[schemas.FailEffectBody],
        Depends(body(schemas.FailEffectBody, examples={"refused": {"error": "card declined", "outcome": "not_applied"}})),
    ],
) -> Response:
    """Say that this call failed; the session goes on. `not_applied`: it certainly did nothing, so there is nothing to undo."""
    report = FailReport(outcome=Outcome(received.model.outcome), error=received.model.error)
    await engine.forward.fail_effect(principal, session_id, step, report)
    return json_response(effect_json(await _look(engine, principal, session_id, step)))


async def _look(engine: Engine, principal: Principal, session_id: SessionId, step: StepIndex) -> StepView:
    async with engine.database.snapshot(principal.org) as tx:
        return await views.step_view(tx, principal, session_id, step)


def _command(engine: Engine, received: Received[schemas.InterceptBody], key: str | None, trace: str | None) -> InterceptCommand:
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
        step_index=None if model.step_index is None else StepIndex(model.step_index),
        reversibility=model.reversibility,
        compensation=None if model.compensation is None else _compensation(model.compensation, engine.retry_defaults),
        request_key=key,
        request_sha256=fingerprint(received.tree),
        traceparent=trace,
    )


def _compensation(model: schemas.CompensationBody, defaults: RetryPolicy) -> Compensation:
    unknown = None
    if model.unknown is not None:
        args = within(dump(model.unknown.args), limit_bytes=MAX_PAYLOAD_BYTES, pointer="/compensation/unknown/args")
        unknown = UnknownVariant(args=args, url=model.unknown.url)
    return Compensation(
        url=model.url,
        args=within(dump(model.args), limit_bytes=MAX_PAYLOAD_BYTES, pointer="/compensation/args"),
        description=model.description,
        unknown=unknown,
        on_unknown=model.on_unknown,
        independent=model.independent,
        retry=RetryPolicy(
            max_retries=_or(model.max_retries, defaults.max_retries),
            initial_interval_ms=_or(model.initial_interval_ms, defaults.initial_interval_ms),
            multiplier=defaults.multiplier if model.multiplier is None else model.multiplier,
            max_interval_ms=_or(model.max_interval_ms, defaults.max_interval_ms),
            timeout_ms=_or(model.timeout_ms, defaults.timeout_ms),
            deadline_ms=_or(model.deadline_ms, defaults.deadline_ms),
            retry_on=model.retry_on,
            compensated_on=model.compensated_on,
        ),
    )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
