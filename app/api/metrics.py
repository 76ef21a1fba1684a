"""What Prometheus fetches. Must not ask for a key, and so must not tell what one tenant does."""

from fastapi import APIRouter
from starlette.responses import Response

from app import telemetry
from app.api.dependencies import EngineDependency

router = APIRouter(tags=["health"])


@router.get("/metrics", operation_id="getMetrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(engine: EngineDependency) -> Response:
    """Return the metrics in Prometheus' text format; with the database away, those that need it are left out."""
    await engine.gauges.refresh()
    return Response(engine.telemetry.exposition(), media_type=telemetry.CONTENT_TYPE)
