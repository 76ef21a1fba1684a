"""The three-step saga as a DBOS workflow, in a process of its own. Must not weaken what DBOS writes: durability is its own default.

A workflow is called by its caller, which waits for its end; each call of a tool and each compensation is a step.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count
from time import monotonic

import aiohttp
from dbos import DBOS, DBOSConfig

from bench import lines

CONNECTIONS = 64  # of DBOS's pool: twice as many as there are callers at most
PAYLOAD = b'{"amount": 100, "to": "acct-42", "memo": "invoice 1234 for services"}'
PATHS = ("/tool", "/tool", "/tool")
FAILING_PATHS = ("/tool", "/tool", "/refuse")

Saga = Callable[[Sequence[str]], Awaitable[int]]


class Refused(Exception):
    """The tool said no."""


def make_saga(session: aiohttp.ClientSession, base_url: str) -> Saga:
    """Register the workflow and its steps, and return how the workflow is called; it answers how many calls it undid."""

    async def post(path: str) -> str:
        async with session.post(base_url + path, data=PAYLOAD, headers={"Content-Type": "application/json"}) as response:
            body: str = await response.text()
            if response.status == 409:
                raise Refused(path)
            response.raise_for_status()
            return body

    step = DBOS.step(name="post")(post)

    async def saga(paths: Sequence[str]) -> int:
        done = 0
        try:
            for path in paths:
                await step(path)
                done += 1
        except Refused:
            for _ in range(done):
                await step("/refund")
            return done
        return 0

    workflow: Saga = DBOS.workflow(name="saga")(saga)
    return workflow


async def run_sagas(saga: Saga, *, callers: int, seconds: float, is_failing: bool) -> dict[str, float]:
    """Run workflows, each caller one after another."""
    began_at = monotonic()
    paths, expected = (FAILING_PATHS, 2) if is_failing else (PATHS, 0)

    async def caller() -> int:
        for number in count():
            if monotonic() >= began_at + seconds:
                return number
            if (undone := await saga(paths)) != expected:
                raise lines.Fault(f"expected {expected} undone, found {undone}")
        raise AssertionError

    numbers = await asyncio.gather(*(caller() for _ in range(callers)))
    return {"units": sum(numbers), "seconds": monotonic() - began_at}


async def main() -> None:
    """Obey, on a database and an endpoint that the arguments tell."""
    database_url, port = sys.argv[1:]
    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": database_url,
        "sys_db_pool_size": CONNECTIONS,
        "log_level": "ERROR",
    }
    DBOS(config=config)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        saga = make_saga(session, f"http://127.0.0.1:{port}")
        DBOS.launch()
        try:
            await lines.obey({"sagas": partial(run_sagas, saga)})
        finally:
            DBOS.destroy()


if __name__ == "__main__":
    lines.run(main)
