"""Whether the process lives and whether it can serve. Must not touch the database for liveness: its outage must not restart replicas."""

from fastapi import APIRouter
from starlette.responses import Response

from app.api import schemas
from app.api.dependencies import Engine, EngineDependency
from app.api.problems import problem_responses
from app.api.render import json_response
from app.domain.errors import Unavailable
from app.storage.database import StorageUnavailable

OK = "ok"

router = APIRouter(tags=["health"])


@router.get("/livez", operation_id="getLiveness", responses={200: {"model": schemas.HealthView}})
async def livez() -> Response:
    """Say that the event loop answers."""
    return json_response({"status": OK, "checks": {}})


@router.get("/readyz", operation_id="getReadiness", responses={200: {"model": schemas.HealthView}, **problem_responses("not_ready")})
async def readyz(engine: EngineDependency) -> Response:
    """Say whether the database answers, its schema serves this code, and the orchestrator turns."""
    checks = {"database": await _database(engine), "orchestrator": _orchestrator(engine)}
    failing = ", ".join(f"{name}: {found}" for name, found in checks.items() if found != OK)
    if failing:
        raise Unavailable("not_ready", failing, checks=checks)
    return json_response({"status": OK, "checks": dict(checks)})


async def _database(engine: Engine) -> str:
    try:
        return await engine.schema.refusal() or OK
    except StorageUnavailable:
        return "unreachable"


def _orchestrator(engine: Engine) -> str:
    if engine.orchestrator is None:
        return OK
    return OK if engine.orchestrator.is_turning() else "the loop has not turned lately, or is stopping"
