"""A client's end of one kept-alive HTTP/1.1 connection, which costs little: bytes out, status and body in.

Must not forgive: an answer that it does not understand, or another status than the expected one, ends the bench.
"""

import asyncio
from typing import NamedTuple, cast

HEAD_END = b"\r\n\r\n"
MAX_HEAD_BYTES = 65_536
LENGTH = b"\r\ncontent-length:"
BODYLESS = frozenset({204, 304})
SHOWN_BYTES = 2_000  # of an unexpected answer's body


class Answer(NamedTuple):
    """What came back."""

    status: int
    body: bytes


class MalformedAnswer(Exception):
    """The peer said something that this client does not speak."""


class UnexpectedAnswer(Exception):
    """The peer answered with another status than the expected one."""


def read_answer(data: bytes) -> Answer | None:
    """Return the answer that `data` holds, or None while it is incomplete.

    Raises:
        MalformedAnswer: not HTTP/1.1, interim, without a length (chunked included), or with more behind it than was asked for.
    """
    end = data.find(HEAD_END)
    if end < 0:
        if len(data) > MAX_HEAD_BYTES:
            raise MalformedAnswer(f"no end of the head within {MAX_HEAD_BYTES} bytes")
        return None
    head = data[:end].lower()
    code = head[9:12]
    if not head.startswith(b"http/1.1 ") or not code.isdigit() or code < b"200":
        raise MalformedAnswer(f"expected the final status of an HTTP/1.1 answer, found {data[:60]!r}")
    status = int(code)
    length = _length(head, status)
    whole = end + len(HEAD_END) + length
    if len(data) < whole:
        return None
    if len(data) > whole:
        raise MalformedAnswer(f"{len(data) - whole} bytes more than the answer to what was asked: {data[whole:][:60]!r}")
    return Answer(status, data[end + len(HEAD_END) :])


def _length(head: bytes, status: int) -> int:
    at = head.find(LENGTH)
    if at < 0:
        if status in BODYLESS:
            return 0
        raise MalformedAnswer(f"an answer without Content-Length: {head!r}")
    text = head[at + len(LENGTH) :].partition(b"\r\n")[0].strip()
    if not text.isdigit():
        raise MalformedAnswer(f"expected a number of bytes, found Content-Length: {text!r}")
    return int(text)


def render(method: str, path: str, head: bytes, body: bytes = b"") -> bytes:
    """Return a request's bytes; `head` are whole header lines, each with its line end."""
    return b"%b %b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (method.encode(), path.encode(), head, len(body), body)


class Connection(asyncio.Protocol):
    """One connection with at most one request in flight."""

    def __init__(self) -> None:
        """Wait to be connected: `connect` does it."""
        self._transport: asyncio.Transport
        self._received = b""
        self._waiting: asyncio.Future[Answer] | None = None

    async def ask(self, request: bytes, expected: int) -> bytes:
        """Send a request and return the body of its answer.

        Raises:
            UnexpectedAnswer, MalformedAnswer: see there. ConnectionError: the peer has gone.
        """
        assert self._waiting is None
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        status, body = await self._waiting
        if status != expected:
            line = request.partition(b"\r\n")[0].decode()
            raise UnexpectedAnswer(f"{line}: expected {expected}, found {status}: {body[:SHOWN_BYTES].decode(errors='replace')}")
        return body

    def close(self) -> None:
        """Hang up."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        """Collect an answer and hand it to who waits."""
        self._received += data
        try:
            answer = read_answer(self._received)
        except MalformedAnswer as error:
            self._end(error)
            return
        if answer is None:
            return
        self._received = b""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        """Tell who waits."""
        self._end(error or ConnectionError("the peer hung up in mid-answer"))

    def _end(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)


async def connect(host: str, port: int) -> Connection:
    """Open a connection."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
    return connection
