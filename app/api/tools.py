"""The routes of registered tools. Must not decide: each turns a request into one verb and its answer into JSON."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query
from starlette.responses import Response

from app.api import bodies, schemas
from app.api.dependencies import Admin, Anyone, EngineDependency, authenticate
from app.api.descriptors import definition_of
from app.api.problems import problem_responses
from app.api.render import json_response, tool_json
from app.api.strict_json import PlainInteger, Received, body, only_query
from app.domain.json_text import Json
from app.domain.model import MAX_STEP_INDEX
from app.engine.registry import tool_not_found
from app.storage import tools
from app.storage.tools import KeptTool

MAX_PAGE = 200

router = APIRouter(prefix="/v1/tools", tags=["tools"], dependencies=[Depends(authenticate)])

ToolNamePath = Annotated[str, Path(min_length=1, max_length=200, pattern=bodies.TOOL_NAME)]

TOOL_EXAMPLES = {
    "credit": {
        "reversibility": "compensatable",
        "description": "Issue a credit on an order.",
        "payload_schema": {"type": "object", "required": ["order", "amount"]},
        "compensation": {
            "url": "https://billing.example/undo/credit",
            "description": "reverse the credit",
            "args": {"credit_id": {"$ref": "result#/credit_id"}},
            "unknown": {"args": {"forward_key": {"$ref": "effect#/forward_key"}}},
        },
    },
    "reply": {"reversibility": "irreversible", "approval": {"required": True, "ttl_seconds": 86400}},
}


@router.put(
    "/{name}",
    operation_id="registerTool",
    responses={
        200: {"model": schemas.ToolView},
        201: {"model": schemas.ToolView},
        **problem_responses(
            "action_needs_approval",
            "bad_payload_schema",
            "bad_reference",
            "compensation_not_allowed",
            "payload_too_large",
            "registry_busy",
            "tool_needs_compensation",
            "url_refused",
        ),
    },
    dependencies=[Depends(only_query("dry_run"))],
)
async def register_tool(
    principal: Admin,
    engine: EngineDependency,
    name: ToolNamePath,
    received: Annotated[Received[bodies.ToolBody], Depends(body(bodies.ToolBody, examples=TOOL_EXAMPLES))],
    dry_run: Annotated[Literal["true", "false"], Query(description="Check, answer as if it were done, and change nothing.")] = "false",
) -> Response:
    """Register a tool, or a new version of it (201). The very same definition again changes nothing (200)."""
    definition = definition_of(received.model, engine.retry_defaults)
    registered = await engine.registry.register(principal, name, definition, is_dry_run=dry_run == "true")
    shown = tool_json(registered.tool, registered.created_by, registered.created_at)
    return json_response(shown, 201 if registered.is_new else 200)


@router.get(
    "",
    operation_id="listTools",
    responses={200: {"model": schemas.ToolListView}},
    dependencies=[Depends(only_query("limit", "cursor"))],
)
async def list_tools(
    principal: Anyone,
    engine: EngineDependency,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE), PlainInteger] = 50,
    cursor: Annotated[str | None, Query(max_length=200, pattern=bodies.TOOL_NAME)] = None,
) -> Response:
    """Return the newest version of every registered tool, by name, a page at a time."""
    async with engine.database.snapshot(principal.org) as tx:
        found = await tools.newest(tx, cursor, limit + 1)
    next_cursor = found[limit - 1].tool.name if len(found) > limit else None
    return json_response({"items": [_kept_json(kept) for kept in found[:limit]], "next_cursor": next_cursor})


@router.get(
    "/{name}",
    operation_id="getTool",
    responses={200: {"model": schemas.ToolView}, **problem_responses("tool_not_found")},
    dependencies=[Depends(only_query("version"))],
)
async def get_tool(
    principal: Anyone,
    engine: EngineDependency,
    name: ToolNamePath,
    version: Annotated[int | None, Query(ge=1, le=MAX_STEP_INDEX), PlainInteger] = None,
) -> Response:
    """Return the newest version of a tool, or a given one."""
    async with engine.database.snapshot(principal.org) as tx:
        kept = await tools.find(tx, name, version)
    if kept is None or kept.is_deleted:
        raise tool_not_found(name)
    return json_response(_kept_json(kept))


@router.delete(
    "/{name}",
    operation_id="removeTool",
    status_code=204,
    responses={204: {"description": "It is no longer registered."}, **problem_responses("registry_busy", "tool_not_found")},
    dependencies=[Depends(only_query())],
)
async def remove_tool(principal: Admin, engine: EngineDependency, name: ToolNamePath) -> Response:
    """Take a name out of the registry: from now on it is a tool that nobody registered. Calls made before keep the version they saw."""
    await engine.registry.remove(principal, name)
    return Response(status_code=204)


def _kept_json(kept: KeptTool) -> Json:
    return tool_json(kept.tool, kept.created_by, kept.created_at)
