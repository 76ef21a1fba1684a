"""The routes of an operator's orders: retry, skip, unwind, halt, resolve, settle. Must not decide: each turns a request into one verb."""

from dataclasses import replace
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Path
from starlette.responses import Response

from app.api import bodies, schemas
from app.api.dependencies import Engine, EngineDependency, OperatorCaller, authenticate
from app.api.problems import problem_responses
from app.api.render import answer_response, reported_bytes, session_bytes
from app.api.sessions import WaitSeconds, until_at_rest
from app.api.strict_json import Received, SessionIdPath, StepPath, body, only_query
from app.domain.json_text import dump
from app.domain.model import Outcome, Principal, SessionId, UndoId
from app.domain.operations import Retry, Settle, Skip
from app.engine.verbs import Answer

# Who calls is asked before anything else of the request is judged.
router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["operations"], dependencies=[Depends(authenticate)])

UndoIdPath = Annotated[UUID, Path(description="As the undo stack shows it.")]

REASON_EXAMPLES = {"because": {"reason": "the ledger is back"}}
RETRY_EXAMPLES = {
    "again": {"reason": "the ledger is back"},
    "moved": {"reason": "the ledger has moved", "url": "https://ledger.example/v2/undo"},
}
SKIP_EXAMPLES = {
    "by hand": {"reason": "credit reversed in the back office", "by_hand": True},
    "let it stand": {"reason": "the customer keeps it"},
}
SETTLE_EXAMPLES = {
    "happened": {"reason": "seen in the ledger", "outcome": "committed", "result": {"credit_id": "cr_9104_1"}},
    "did not": {"reason": "not in the ledger", "outcome": "not_applied"},
}

ReasonDependency = Annotated[Received[bodies.ReasonBody], Depends(body(bodies.ReasonBody, examples=REASON_EXAMPLES))]


@router.post(
    "/undo/{undo_id}/retry",
    operation_id="retryUndo",
    status_code=202,
    responses={
        202: {"model": schemas.SessionView},
        **problem_responses("session_not_halted", "undo_not_next", "undo_not_sent", "undo_settled", "url_refused"),
    },
    dependencies=[Depends(only_query("wait_s"))],
)
async def retry_undo(
    caller: OperatorCaller,
    engine: EngineDependency,
    session_id: SessionIdPath,
    undo_id: UndoIdPath,
    received: Annotated[Received[bodies.RetryBody], Depends(body(bodies.RetryBody, examples=RETRY_EXAMPLES))],
    wait_s: WaitSeconds = 0,
) -> Response:
    """Try the newest unsettled undo of a halted session again, under the same key, and let the unwind go on from there."""
    order = Retry(reason=received.model.reason, url=received.model.url)
    answer = await engine.operations.retry(caller.ask(session_id, received.tree), UndoId(undo_id), order, session_bytes)
    return await _at_rest(engine, caller.principal, session_id, answer, wait_s)


@router.post(
    "/undo/{undo_id}/skip",
    operation_id="skipUndo",
    responses={200: {"model": schemas.SessionView}, **problem_responses("session_not_halted", "undo_settled")},
    dependencies=[Depends(only_query())],
)
async def skip_undo(
    caller: OperatorCaller,
    engine: EngineDependency,
    session_id: SessionIdPath,
    undo_id: UndoIdPath,
    received: Annotated[Received[bodies.SkipBody], Depends(body(bodies.SkipBody, examples=SKIP_EXAMPLES))],
) -> Response:
    """Take an undo of a halted session out of the unwind; nothing is sent until the unwind is ordered to go on."""
    order = Skip(reason=received.model.reason, by_hand=received.model.by_hand)
    return answer_response(await engine.operations.skip(caller.ask(session_id, received.tree), UndoId(undo_id), order, session_bytes))


@router.post(
    "/unwind",
    operation_id="unwindSession",
    status_code=202,
    responses={202: {"model": schemas.SessionView}, **problem_responses("session_not_halted")},
    dependencies=[Depends(only_query("wait_s"))],
)
async def unwind_session(
    caller: OperatorCaller, engine: EngineDependency, session_id: SessionIdPath, received: ReasonDependency, wait_s: WaitSeconds = 0
) -> Response:
    """Let the unwind of a halted session go on, failed undos included; also past the pivot, where nothing is undone by itself."""
    answer = await engine.operations.unwind(caller.ask(session_id, received.tree), received.model.reason, session_bytes)
    return await _at_rest(engine, caller.principal, session_id, answer, wait_s)


@router.post(
    "/halt",
    operation_id="haltSession",
    status_code=202,
    responses={202: {"model": schemas.SessionView}, **problem_responses("session_not_unwinding")},
    dependencies=[Depends(only_query("wait_s"))],
)
async def halt_session(
    caller: OperatorCaller, engine: EngineDependency, session_id: SessionIdPath, received: ReasonDependency, wait_s: WaitSeconds = 0
) -> Response:
    """Stop an unwind at its next boundary: a request in flight is awaited, nothing more is sent."""
    answer = await engine.operations.halt(caller.ask(session_id, received.tree), received.model.reason, session_bytes)
    return await _at_rest(engine, caller.principal, session_id, answer, wait_s)


@router.post(
    "/resolve",
    operation_id="resolveSession",
    responses={200: {"model": schemas.SessionView}, **problem_responses("session_not_halted")},
    dependencies=[Depends(only_query())],
)
async def resolve_session(
    caller: OperatorCaller, engine: EngineDependency, session_id: SessionIdPath, received: ReasonDependency
) -> Response:
    """Close a halted session as it stands: what is not undone stays so."""
    return answer_response(await engine.operations.resolve(caller.ask(session_id, received.tree), received.model.reason, session_bytes))


@router.post(
    "/effects/{step}/settle",
    operation_id="settleEffect",
    responses={200: {"model": schemas.EffectView}, **problem_responses("not_unknown", "session_not_halted")},
    dependencies=[Depends(only_query())],
)
async def settle_effect(
    caller: OperatorCaller,
    engine: EngineDependency,
    session_id: SessionIdPath,
    step: StepPath,
    received: Annotated[Received[bodies.SettleBody], Depends(body(bodies.SettleBody, examples=SETTLE_EXAMPLES))],
) -> Response:
    """Say what is known of a call whose outcome was unknown, in an active or a halted session."""
    model = received.model
    order = Settle(
        reason=model.reason,
        outcome=Outcome(model.outcome),
        result=dump(model.result) if "result" in model.model_fields_set else None,
    )
    return answer_response(await engine.operations.settle(caller.ask(session_id, received.tree), step, order, reported_bytes))


async def _at_rest(engine: Engine, principal: Principal, session_id: SessionId, answer: Answer, wait_s: int) -> Response:
    """Answer at once, or hold the answer until the session is at rest."""
    if not wait_s:
        return answer_response(answer)
    with engine.waits.watch(principal.org, session_id) as watch:
        view = await until_at_rest(engine, principal, session_id, watch, None, wait_s)
    return answer_response(replace(answer, body=session_bytes(view)))
