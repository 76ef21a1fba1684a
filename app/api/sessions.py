"""The routes of a session: open, look, list, fail. Must not decide: each turns a request into one verb."""

from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from app.api import bodies, schemas
from app.api.cursors import MOMENT, SESSION, moment_of, read_cursor, shape, write_cursor
from app.api.dependencies import (
    Agent,
    AgentCaller,
    AgentOrOperator,
    AgentOrOperatorCaller,
    Anyone,
    Caller,
    Engine,
    EngineDependency,
    authenticate,
    etag,
    is_unchanged,
)
from app.api.headers import sends
from app.api.lean import LeanVerb, Plain
from app.api.problems import problem_responses
from app.api.render import answer_response, json_response, not_modified, session_bytes, session_json, session_summary_json
from app.api.strict_json import PlainInteger, Received, SessionIdPath, body, only_query, within
from app.domain.journal import time_text
from app.domain.json_text import dump
from app.domain.model import Outcome, Principal, Role, SessionId, SessionState, StepIndex
from app.domain.outcomes import FailReport
from app.domain.states import RESTING_STATES
from app.engine.forward import NamedFailure, SessionOptions
from app.engine.waits import Watch
from app.storage import views
from app.storage.views import Place, SessionFilter, SessionView

MAX_METADATA_BYTES = 16_384  # contract, section 5
MAX_WAIT_SECONDS = 55  # below the usual minute after which proxies give up
MAX_PAGE = 200

_CURSOR = shape(MOMENT, SESSION)

# Who calls is asked before anything else of the request is judged.
NOT_MODIFIED: dict[int | str, dict[str, Any]] = {
    304: {"description": "The caller has this version already (If-None-Match).", **sends("ETag")}
}

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], dependencies=[Depends(authenticate)])

FAIL_EXAMPLES = {
    "run": {"error": "the mail service is down"},
    "call": {"error": "the run ended", "effect": {"step_index": 3, "outcome": "not_applied", "error": "refused"}},
}

WaitSeconds = Annotated[
    int, Query(ge=0, le=MAX_WAIT_SECONDS, description="Hold the answer this long, or until the session is at rest."), PlainInteger
]


@router.put(
    "/{session_id}",
    operation_id="openSession",
    responses={
        200: {"model": schemas.SessionView},
        201: {"model": schemas.SessionView},
        **problem_responses("session_differs", "payload_too_large"),
    },
    dependencies=[Depends(only_query())],
)
async def open_session(
    principal: AgentOrOperator,
    engine: EngineDependency,
    session_id: SessionIdPath,
    received: Annotated[
        Received[bodies.SessionBody],
        Depends(body(bodies.SessionBody, examples={"refund": {"agent": "refund-agent", "metadata": {"order": 4921}}})),
    ],
) -> Response:
    """Open a session, or find it there with the same options (200). Optional: intercept opens one by itself."""
    model = received.model
    metadata = None
    if model.metadata is not None:
        metadata = within(dump(model.metadata), limit_bytes=MAX_METADATA_BYTES, pointer="/metadata")
    options = SessionOptions(agent=model.agent, metadata=metadata, idle_seconds=model.idle_seconds, deadline_at=model.deadline_at)
    is_new = await engine.forward.open(principal, session_id, options)
    return json_response(session_json(await look(engine, principal, session_id)), 201 if is_new else 200)


@router.get(
    "/{session_id}",
    operation_id="getSession",
    responses={200: {"model": schemas.SessionView, **sends("ETag")}, **NOT_MODIFIED},
    dependencies=[Depends(only_query())],
)
async def get_session(request: Request, principal: Anyone, engine: EngineDependency, session_id: SessionIdPath) -> Response:
    """Return a session with its effects and its undo stack. The ETag counts what is visible; attempts do not move it."""
    view = await look(engine, principal, session_id)
    headers = {"ETag": etag(view.session.version)}
    if is_unchanged(request, view.session.version):
        return not_modified(headers)
    return json_response(session_json(view), headers=headers)


@router.get(
    "",
    operation_id="listSessions",
    responses={200: {"model": schemas.SessionListView}, **problem_responses("bad_cursor")},
    dependencies=[Depends(only_query("state", "tool", "agent", "limit", "cursor"))],
)
async def list_sessions(
    principal: Anyone,
    engine: EngineDependency,
    state: Annotated[SessionState | None, Query()] = None,
    tool: Annotated[str | None, Query(max_length=200, pattern=r"^[^\x00]*$")] = None,
    agent: Annotated[str | None, Query(max_length=200, pattern=r"^[^\x00]*$")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE), PlainInteger] = 50,
    cursor: Annotated[str | None, Query(max_length=500)] = None,
) -> Response:
    """Return the sessions that the caller may see, newest first, a page at a time."""
    after = None
    if cursor is not None:
        found_at = read_cursor(cursor, _CURSOR)
        after = Place(created_at=moment_of(found_at[1]), session_id=SessionId(found_at[2]))
    async with engine.database.snapshot(principal.org) as tx:
        wanted = SessionFilter(state=state, tool=tool, agent=agent)
        found = await views.sessions(tx, principal, wanted, after, limit + 1)
    page = found[:limit]
    next_cursor = write_cursor(time_text(page[-1].created_at), page[-1].session_id) if len(found) > limit else None
    return json_response({"items": [session_summary_json(session) for session in page], "next_cursor": next_cursor})


@router.post(
    "/{session_id}/fail",
    operation_id="failSession",
    status_code=202,
    responses={202: {"model": schemas.SessionView}, **problem_responses("busy", "effect_not_found", "not_executing", "session_not_active")},
    dependencies=[Depends(only_query("wait_s"))],
)
async def fail_session(
    caller: AgentOrOperatorCaller,
    engine: EngineDependency,
    session_id: SessionIdPath,
    received: Annotated[Received[bodies.FailSessionBody], Depends(body(bodies.FailSessionBody, examples=FAIL_EXAMPLES))],
    wait_s: WaitSeconds = 0,
) -> Response:
    """Say that the run failed: what it did is undone newest first. Repeats are harmless."""
    return await answer_fail(engine, caller, session_id, received, wait_s)


async def answer_fail(
    engine: Engine, caller: Caller, session_id: SessionId, received: Received[bodies.FailSessionBody], wait_s: int
) -> Response:
    """Turn the report of a failed run that was read into the answer to it; `wait_s` holds that until the session is at rest."""
    model, named = received.model, None
    if model.effect is not None:
        report = FailReport(outcome=Outcome(model.effect.outcome), error=model.effect.error or model.error)
        named = NamedFailure(step_index=StepIndex(model.effect.step_index), report=report)
    seen: SessionView | None = None
    is_answered_later = bool(wait_s) and caller.key is None  # with a key, what was to be answered at first is kept

    def render(view: SessionView) -> bytes:
        nonlocal seen
        seen = view
        return b"" if is_answered_later else session_bytes(view)

    ask = caller.ask(session_id, received.tree)
    with engine.waits.watch(caller.principal.org, session_id) as watch:
        answer = await engine.forward.fail_session(ask, model.error, named, render, is_answered_later=is_answered_later)
        if not wait_s:
            return answer_response(answer)
        view = await until_at_rest(engine, caller.principal, session_id, watch, seen, wait_s)
    return answer_response(replace(answer, body=session_bytes(view)))


async def until_at_rest(
    engine: Engine, principal: Principal, session_id: SessionId, watch: Watch, seen: SessionView | None, seconds: int
) -> SessionView:
    """Return a session when it is at rest, or `seconds` are over; meanwhile its own row is all that is read, however long it is.

    `seen`: what the caller knows of it already, as it is from when it was watched on.
    """

    async def glance() -> SessionView | None:
        async with engine.database.snapshot(principal.org) as tx:
            session = await views.session(tx, principal, session_id)
            return await views.with_steps(tx, session) if session.state in RESTING_STATES else None

    found = await watch.until(seen or await glance(), glance, _is_at_rest, seconds)
    return found if found is not None and _is_at_rest(found) else await look(engine, principal, session_id)


def _is_at_rest(view: SessionView | None) -> bool:
    return view is not None and view.session.state in RESTING_STATES


@router.post(
    "/{session_id}/complete",
    operation_id="completeSession",
    responses={
        200: {"model": schemas.SessionView},
        **problem_responses("busy", "session_not_active", "session_past_deadline", "unsettled_effects"),
    },
    dependencies=[Depends(only_query())],
)
async def complete_session(
    caller: AgentCaller,
    engine: EngineDependency,
    session_id: SessionIdPath,
    received: Annotated[Received[bodies.EmptyBody], Depends(body(bodies.EmptyBody))],
) -> Response:
    """Say that the run ended well: nothing can unwind it any more. Refused while an effect is not settled."""
    return await answer_complete(engine, caller, session_id, received)


async def answer_complete(engine: Engine, caller: Caller, session_id: SessionId, received: Received[bodies.EmptyBody]) -> Response:
    """Turn the report of a run that ended well into the answer to it."""
    return answer_response(await engine.forward.complete(caller.ask(session_id, received.tree), session_bytes))


@router.post(
    "/{session_id}/touch",
    operation_id="touchSession",
    responses={200: {"model": schemas.SessionSummaryView}, **problem_responses("session_not_active")},
    dependencies=[Depends(only_query())],
)
async def touch_session(
    principal: Agent,
    engine: EngineDependency,
    session_id: SessionIdPath,
    _received: Annotated[Received[bodies.EmptyBody], Depends(body(bodies.EmptyBody))],
) -> Response:
    """Give a sign of life, so that the session is not taken for abandoned; changes nothing that is visible.

    Needs no Idempotency-Key: a repeat is one more sign of life.
    """
    return json_response(session_summary_json(await engine.forward.touch(principal, session_id)))


async def look(engine: Engine, principal: Principal, session_id: SessionId) -> SessionView:
    """Read a session as the caller may see it."""
    async with engine.database.snapshot(principal.org) as tx:
        return await views.session_view(tx, principal, session_id)


async def _lean_fail(engine: Engine, plain: Plain, received: Received[bodies.FailSessionBody]) -> Response:
    return await answer_fail(engine, plain.caller, plain.session_id, received, plain.wait_s)


async def _lean_complete(engine: Engine, plain: Plain, received: Received[bodies.EmptyBody]) -> Response:
    return await answer_complete(engine, plain.caller, plain.session_id, received)


LEAN: Final[tuple[LeanVerb[Any], ...]] = (
    LeanVerb(
        operation_id="failSession",
        name="fail",
        model=bodies.FailSessionBody,
        roles=frozenset({Role.AGENT}),
        answer=_lean_fail,
        may_wait=True,
    ),
    LeanVerb(
        operation_id="completeSession",
        name="complete",
        model=bodies.EmptyBody,
        roles=frozenset({Role.AGENT}),
        answer=_lean_complete,
    ),
)
