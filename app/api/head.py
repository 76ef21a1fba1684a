"""Answer HEAD wherever GET is answered, without the body (RFC 9110, section 9.3.2). Must not know what is asked for."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadAsGet:
    """Runs a HEAD request as the GET it stands for, and sends the head of that answer alone."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap the application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass anything but HEAD on as it is."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_head)
