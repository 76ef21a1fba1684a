"""The routes of destinations: what waits and what holds it, pause, resume. Must not decide: each turns a request into one verb."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from starlette.responses import Response

from app.api import bodies, schemas
from app.api.cursors import read_cursor, shape, write_cursor
from app.api.dependencies import EngineDependency, Operator, OperatorOrAuditor, authenticate
from app.api.problems import problem_responses
from app.api.render import json_response
from app.api.strict_json import PlainInteger, Received, body, only_query
from app.domain.journal import time_text
from app.domain.json_text import Json
from app.domain.model import Principal
from app.domain.sending import DESTINATION
from app.storage import destinations, pauses
from app.storage.destinations import DestinationView, OpenCircuit
from app.storage.pauses import Pause

MAX_PAGE = 200

_CURSOR = shape(f"({DESTINATION})")

# Who calls is asked before anything else of the request is judged.
router = APIRouter(prefix="/v1", tags=["destinations"], dependencies=[Depends(authenticate)])

DestinationPath = Annotated[str, Path(pattern=f"^{DESTINATION}$", description="host:port, in lower case, as the list shows it.")]

PAUSE_EXAMPLES = {"planned": {"reason": "the ledger is being moved until noon"}}
RESUME_EXAMPLES = {"over": {"reason": "the ledger is back"}}

PauseDependency = Annotated[Received[bodies.PauseBody], Depends(body(bodies.PauseBody, examples=PAUSE_EXAMPLES))]
ResumeDependency = Annotated[Received[bodies.PauseBody], Depends(body(bodies.PauseBody, examples=RESUME_EXAMPLES))]


@router.get(
    "/destinations",
    operation_id="listDestinations",
    responses={200: {"model": schemas.DestinationListView}, **problem_responses("bad_cursor")},
    dependencies=[Depends(only_query("limit", "cursor"))],
)
async def list_destinations(
    principal: OperatorOrAuditor,
    engine: EngineDependency,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE), PlainInteger] = 50,
    cursor: Annotated[str | None, Query(max_length=500)] = None,
) -> Response:
    """Return where undos and actions of the org wait, or something holds them: an open circuit, a person's pause."""
    after = "" if cursor is None else read_cursor(cursor, _CURSOR)[1]
    async with engine.database.snapshot(principal.org) as tx:
        found = await destinations.page(tx, after, limit + 1)
        paused = await pauses.widest(tx, None)
    next_cursor = write_cursor(found[limit - 1].destination) if len(found) > limit else None
    return json_response(
        {"items": [_destination_json(view) for view in found[:limit]], "paused": _paused_json(paused), "next_cursor": next_cursor}
    )


@router.post(
    "/destinations/{destination}/pause",
    operation_id="pauseDestination",
    responses={200: {"model": schemas.HoldView}},
    dependencies=[Depends(only_query())],
)
async def pause_destination(
    principal: Operator, engine: EngineDependency, destination: DestinationPath, received: PauseDependency
) -> Response:
    """Send nothing more of this org there; what is in flight ends. A repeat is harmless, with or without an Idempotency-Key."""
    standing = await engine.pauses.pause(principal.org, destination, _actor(principal), received.model.reason)
    return _hold_response(destination, standing)


@router.post(
    "/destinations/{destination}/resume",
    operation_id="resumeDestination",
    responses={200: {"model": schemas.HoldView}},
    dependencies=[Depends(only_query())],
)
async def resume_destination(
    principal: Operator, engine: EngineDependency, destination: DestinationPath, received: ResumeDependency
) -> Response:
    """Take such a pause away; where the circuit is open, probe at once. A repeat is harmless, with or without an Idempotency-Key."""
    _, standing = await engine.pauses.resume(principal.org, destination, _actor(principal), received.model.reason)
    return _hold_response(destination, standing)


@router.post(
    "/pause",
    operation_id="pauseOrg",
    responses={200: {"model": schemas.HoldView}},
    dependencies=[Depends(only_query())],
)
async def pause_org(principal: Operator, engine: EngineDependency, received: PauseDependency) -> Response:
    """Send nothing more of this org anywhere; what is in flight ends. A repeat is harmless, with or without an Idempotency-Key."""
    standing = await engine.pauses.pause(principal.org, None, _actor(principal), received.model.reason)
    return _hold_response(None, standing)


@router.post(
    "/resume",
    operation_id="resumeOrg",
    responses={200: {"model": schemas.HoldView}},
    dependencies=[Depends(only_query())],
)
async def resume_org(principal: Operator, engine: EngineDependency, received: ResumeDependency) -> Response:
    """Take the org's pause away, not those of its destinations. A repeat is harmless, with or without an Idempotency-Key."""
    _, standing = await engine.pauses.resume(principal.org, None, _actor(principal), received.model.reason)
    return _hold_response(None, standing)


def _actor(principal: Principal) -> str:
    return f"{principal.role}:{principal.subject}"


def _hold_response(destination: str | None, standing: Pause | None) -> Response:
    return json_response({"destination": destination, "paused": _paused_json(standing)})


def _destination_json(view: DestinationView) -> Json:
    return {
        "destination": view.destination,
        "due": view.due,
        "in_flight": view.in_flight,
        "later": view.later,
        "oldest_due_at": None if view.oldest_due_at is None else time_text(view.oldest_due_at),
        "circuit": _circuit_json(view.circuit),
        "paused": _paused_json(view.pause),
    }


def _circuit_json(circuit: OpenCircuit | None) -> Json:
    if circuit is None:
        return None
    return {"opened_at": time_text(circuit.opened_at), "probe_at": time_text(circuit.probe_at), "last_error": circuit.last_error}


def _paused_json(pause: Pause | None) -> Json:
    if pause is None:
        return None
    return {"scope": pause.scope.value, "at": time_text(pause.at), "by": pause.by, "reason": pause.reason}
