"""The tools and their undos as one endpoint that takes no time, in a process of its own. Must not do anything but count.

`/tool` and whatever else succeed, `/refuse` answers 409. Needs no installed package.
"""

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import cast

from bench import lines

HEAD_END = b"\r\n\r\n"
LENGTH = b"\r\ncontent-length:"
OK_BODY = b'{"status": "ok", "charge": "ch_123"}'
NO_BODY = b'{"status": "refused"}'
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(OK_BODY), OK_BODY)
NO = b"HTTP/1.1 409 Conflict\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(NO_BODY), NO_BODY)


class Ledger:
    """What has arrived since it was last cleared."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.arrivals: list[float] = []
        self.refusals = 0
        self.newest: tuple[bytes, bytes] = (b"", b"")

    def clear(self) -> None:
        """Forget everything."""
        self.arrivals, self.refusals = [], 0

    def take(self, head: bytes, body: bytes) -> bytes:
        """Note one request and return its answer."""
        if head.startswith(b"POST /refuse"):
            self.refusals += 1
            return NO
        self.arrivals.append(monotonic())
        self.newest = (head, body)
        return OK


class Line(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, ledger: Ledger) -> None:
        """Take the ledger that it notes in."""
        self._ledger = ledger
        self._transport: asyncio.Transport
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        """Answer every request that is complete."""
        self._received += data
        while (end := self._received.find(HEAD_END)) >= 0:
            head = self._received[:end]
            lower = head.lower()
            at = lower.find(LENGTH)
            length = 0 if at < 0 else int(lower[at + len(LENGTH) :].partition(b"\r\n")[0])
            whole = end + len(HEAD_END) + length
            if len(self._received) < whole:
                return
            body = self._received[end + len(HEAD_END) : whole]
            self._received = self._received[whole:]
            self._transport.write(self._ledger.take(head, body))


async def main() -> None:
    """Listen on a free port of 127.0.0.1, and answer what the bench asks about it."""
    ledger = Ledger()
    server = await asyncio.get_running_loop().create_server(lambda: Line(ledger), "127.0.0.1", 0, backlog=1_024)

    async def port() -> int:
        bound: int = server.sockets[0].getsockname()[1]
        return bound

    async def clear() -> None:
        ledger.clear()

    async def count() -> int:
        return len(ledger.arrivals)

    async def arrivals() -> Sequence[float]:
        return ledger.arrivals

    async def newest() -> dict[str, object]:
        head, body = ledger.newest
        pairs = [line.partition(b":")[::2] for line in head.split(b"\r\n")[1:]]
        return {"headers": [[name.decode(), value.strip().decode()] for name, value in pairs], "body": body.decode()}

    await lines.obey({"port": port, "clear": clear, "count": count, "arrivals": arrivals, "newest": newest})


if __name__ == "__main__":
    lines.run(main)
