"""Measure how long every verb takes to be answered. Must not change an answer, nor name anything but the operation."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.openapi import API_PREFIX
from app.engine.clock import Clock
from app.telemetry import Telemetry


class VerbTimes:
    """Takes the time from a request under /v1 to the end of its answer; what reaches no route is no verb."""

    def __init__(self, app: ASGIApp, *, telemetry: Telemetry, clock: Clock) -> None:
        """Wrap the application."""
        self._app = app
        self._telemetry = telemetry
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on, and look at the status on its way back."""
        if scope["type"] != "http" or not scope["path"].startswith(API_PREFIX):
            await self._app(scope, receive, send)
            return
        started, status = self._clock.monotonic(), 0

        async def send_seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        finally:
            verb = getattr(scope.get("route"), "operation_id", None)
            if verb is not None and status:  # without a status nobody was answered: the service stops
                self._telemetry.observe_verb(verb, f"{status // 100}xx", self._clock.monotonic() - started)
