"""The routes of a session: open, look, list, fail. Must not decide: each turns a request into one verb."""

import base64
import re
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from app.api import schemas
from app.api.dependencies import AgentOrOperator, Anyone, Engine, EngineDependency, authenticate
from app.api.errors import problem_responses
from app.api.render import json_response, session_json, session_summary_json
from app.api.strict_json import PlainInteger, Received, SessionIdPath, body, only_query, within
from app.domain.errors import Malformed
from app.domain.journal import time_text
from app.domain.json_text import dump
from app.domain.model import Outcome, Principal, SessionId, SessionState, StepIndex
from app.domain.outcomes import FailReport
from app.domain.states import RESTING_STATES
from app.engine.forward import NamedFailure, SessionOptions
from app.storage import views
from app.storage.views import Place, SessionFilter, SessionView

MAX_METADATA_BYTES = 16_384  # contract, section 5
MAX_WAIT_SECONDS = 55  # below the usual minute after which proxies give up
MAX_PAGE = 200

# Version, created_at, session_id: opaque to clients, and free to change with its version.
_CURSOR = re.compile(r"1 (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z) ([A-Za-z0-9._:-]{1,200})", re.ASCII)

# Who calls is asked before anything else of the request is judged.
router = APIRouter(prefix="/v1/sessions", tags=["sessions"], dependencies=[Depends(authenticate)])

WaitSeconds = Annotated[
    int, Query(ge=0, le=MAX_WAIT_SECONDS, description="Hold the answer this long, or until the session is at rest."), PlainInteger
]


@router.put(
    "/{session_id}",
    operation_id="openSession",
    responses={200: {"model": schemas.SessionView}, 201: {"model": schemas.SessionView}, **problem_responses(403, 404, 409)},
    dependencies=[Depends(only_query())],
)
async def open_session(
    principal: AgentOrOperator,
    engine: EngineDependency,
    session_id: SessionIdPath,
    received: Annotated[
        Received[schemas.SessionBody],
        Depends(body(schemas.SessionBody, examples={"refund": {"agent": "refund-agent", "metadata": {"order": 4921}}})),
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
    responses={200: {"model": schemas.SessionView}, **problem_responses(403, 404)},
    dependencies=[Depends(only_query())],
)
async def get_session(principal: Anyone, engine: EngineDependency, session_id: SessionIdPath) -> Response:
    """Return a session with its effects and its undo stack."""
    return json_response(session_json(await look(engine, principal, session_id)))


@router.get(
    "",
    operation_id="listSessions",
    responses={200: {"model": schemas.SessionListView}, **problem_responses(400, 403)},
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
    after = None if cursor is None else _read_cursor(cursor)
    async with engine.database.snapshot(principal.org) as tx:
        wanted = SessionFilter(state=state, tool=tool, agent=agent)
        found = await views.sessions(tx, principal, wanted, after, limit + 1)
    page = found[:limit]
    next_cursor = _write_cursor(Place(created_at=page[-1].created_at, session_id=page[-1].session_id)) if len(found) > limit else None
    return json_response({"items": [session_summary_json(session) for session in page], "next_cursor": next_cursor})


@router.post(
    "/{session_id}/fail",
    operation_id="failSession",
    status_code=202,
    responses={202: {"model": schemas.SessionView}, **problem_responses(403, 404, 409)},
    dependencies=[Depends(only_query("wait_s"))],
)
async def fail_session(
    principal: AgentOrOperator,
    engine: EngineDependency,
    session_id: SessionIdPath,
    received: Annotated[
        Received[schemas.FailSessionBody],
        Depends(
            body(
                schemas.FailSessionBody,
                examples={
                    "run": {"error": "the mail service is down"},
                    "call": {"error": "the run ended", "effect": {"step_index": 3, "outcome": "not_applied", "error": "refused"}},
                },
            )
        ),
    ],
    wait_s: WaitSeconds = 0,
) -> Response:
    """Say that the run failed: what it did is undone newest first. Repeats are harmless."""
    model, named = received.model, None
    if model.effect is not None:
        report = FailReport(outcome=Outcome(model.effect.outcome), error=model.effect.error or model.error)
        named = NamedFailure(step_index=StepIndex(model.effect.step_index), report=report)
    await engine.forward.fail_session(principal, session_id, model.error, named)
    view = await engine.waits.until(
        principal.org,
        session_id,
        lambda: look(engine, principal, session_id),
        lambda seen: seen.session.state in RESTING_STATES,
        wait_s,
    )
    return json_response(session_json(view), 202)


async def look(engine: Engine, principal: Principal, session_id: SessionId) -> SessionView:
    """Read a session as the caller may see it."""
    async with engine.database.snapshot(principal.org) as tx:
        return await views.session_view(tx, principal, session_id)


def _write_cursor(place: Place) -> str:
    return base64.urlsafe_b64encode(f"1 {time_text(place.created_at)} {place.session_id}".encode()).decode()


def _read_cursor(cursor: str) -> Place:
    try:
        text = base64.b64decode(cursor.encode(), altchars=b"-_", validate=True).decode()
        found = _CURSOR.fullmatch(text)
        if found is not None:
            return Place(created_at=datetime.fromisoformat(found[1]), session_id=SessionId(found[2]))
    except ValueError:  # not base64, not UTF-8, no such day
        pass
    raise Malformed("bad_cursor", "expected a cursor as `next_cursor` gave it")
