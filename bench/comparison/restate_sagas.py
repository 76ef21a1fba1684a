"""The three-step saga as a Restate service, served by Hypercorn in a process of its own. Must not be asked by anybody but Restate's server.

Each call of a tool and each compensation is a `ctx.run`; a refusal is a terminal error, on which the handler compensates newest first.
"""

import asyncio
import sys

import aiohttp
import restate
from hypercorn.asyncio import serve
from hypercorn.config import Config

from bench import lines

PAYLOAD = b'{"amount": 100, "to": "acct-42", "memo": "invoice 1234 for services"}'
PATHS = ("/tool", "/tool", "/tool")
FAILING_PATHS = ("/tool", "/tool", "/refuse")


class Tools:
    """The tools' endpoint."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        """Keep how it is reached."""
        self._session = session
        self._base_url = base_url

    async def post(self, path: str) -> str:
        """Call a tool, or undo it."""
        async with self._session.post(self._base_url + path, data=PAYLOAD, headers={"Content-Type": "application/json"}) as response:
            body: str = await response.text()
            if response.status == 409:
                raise restate.TerminalError("refused", status_code=409)
            response.raise_for_status()
            return body


def make_service(tools: Tools) -> restate.Service:
    """Return the service `Saga` with the handlers `happy` and `failing`; each answers how many calls it undid."""
    service = restate.Service("Saga")

    async def happy(ctx: restate.Context, _asked: dict[str, str]) -> int:
        return await _saga(ctx, tools, PATHS)

    async def failing(ctx: restate.Context, _asked: dict[str, str]) -> int:
        return await _saga(ctx, tools, FAILING_PATHS)

    service.handler()(happy)
    service.handler()(failing)
    return service


async def _saga(ctx: restate.Context, tools: Tools, paths: tuple[str, ...]) -> int:
    done = 0
    try:
        for path in paths:
            await ctx.run_typed("call", tools.post, path=path)
            done += 1
    except restate.TerminalError:
        for _ in range(done):
            await ctx.run_typed("undo", tools.post, path="/refund")
        return done
    return 0


async def main() -> None:
    """Serve on a port, with a tools' endpoint on another, both told by arguments, until stdin ends."""
    port, endpoint_port = sys.argv[1:]
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.loglevel = "ERROR"
    ended = asyncio.Event()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        app = restate.app(services=[make_service(Tools(session, f"http://127.0.0.1:{endpoint_port}"))])
        serving = asyncio.ensure_future(serve(app, config, shutdown_trigger=ended.wait))

        async def is_up() -> bool:
            return not serving.done()

        await lines.obey({"is_up": is_up})
        ended.set()
        await serving


if __name__ == "__main__":
    lines.run(main)
