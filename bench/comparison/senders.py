"""Post what an undo posts with nothing but an HTTP client, in a process of its own: httpx or aiohttp. Must not record anything."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from uuid import uuid4

from bench import lines

KEY = "idempotency-key"
OF_THE_CLIENT = frozenset({"host", "content-length", "connection", "accept-encoding"})  # what a client writes by itself
Post = Callable[[dict[str, str], bytes], Awaitable[int]]


async def send(post: Post, *, calls: int, at_once: int, headers: Sequence[Sequence[str]], body: str) -> dict[str, float]:
    """Post so many times, each under a key of its own, so many in flight at once."""
    same = {name: value for name, value in headers if name.lower() not in OF_THE_CLIENT | {KEY}}
    left = iter(range(calls))

    async def work() -> None:
        for _ in left:
            status = await post({**same, "Idempotency-Key": f"undo-{uuid4()}"}, body.encode())
            if status != 200:
                raise lines.Fault(f"expected 200, found {status}")

    began_at = monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())
    return {"seconds": monotonic() - began_at}


async def with_httpx(url: str) -> None:
    """Obey with one client on its default transport."""
    import httpx  # noqa: PLC0415 - the other side does without

    async with httpx.AsyncClient(trust_env=False) as client:

        async def post(headers: dict[str, str], body: bytes) -> int:
            return (await client.post(url, headers=headers, content=body)).status_code

        await lines.obey({"send": lambda **asked: send(post, **asked)})


async def with_aiohttp(url: str) -> None:
    """Obey with one bare session."""
    import aiohttp  # noqa: PLC0415 - as above

    async with aiohttp.ClientSession() as session:

        async def post(headers: dict[str, str], body: bytes) -> int:
            async with session.post(url, headers=headers, data=body) as response:
                await response.read()
                status: int = response.status
                return status

        await lines.obey({"send": lambda **asked: send(post, **asked)})


async def main() -> None:
    """Obey as `httpx` or `aiohttp` to an endpoint's port, both told by arguments."""
    client, port = sys.argv[1:]
    url = f"http://127.0.0.1:{port}/refund"
    await {"httpx": with_httpx, "aiohttp": with_aiohttp}[client](url)


if __name__ == "__main__":
    lines.run(main)
