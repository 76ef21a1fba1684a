"""The head of a request has an end, and `serve` sees to it. Must not test what is done with a request that has one."""

import asyncio
import re
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from app.cli.framing import MAX_HEAD_BYTES, BoundedProtocol

READ_BYTES = 262_144  # what a loop reads at once, at most
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answer with how many bytes the body had."""
    length, has_more = 0, True
    while has_more:
        message = await receive()
        length, has_more = length + len(message["body"]), message["more_body"]
    text = str(length).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(text)).encode())]})
    await send({"type": "http.response.body", "body": text})


class Wire(asyncio.Transport):
    """A connection of which the test decides how it is cut into reads."""

    def __init__(self) -> None:
        """Serve on it as `serve` does."""
        super().__init__()
        self._written = b""
        self._is_closed = False
        config = uvicorn.Config(application, http=BoundedProtocol, lifespan="off", log_config=None)
        self._state = ServerState()
        self._protocol = BoundedProtocol(config=config, server_state=self._state, app_state={})
        self._protocol.connection_made(self)

    def read(self, data: bytes) -> None:
        """Have the server read so much at once."""
        self._protocol.data_received(data)

    async def rest(self) -> None:
        """Have it answer every request that is whole."""
        while self._state.tasks:
            await asyncio.wait(self._state.tasks)

    @property
    def answers(self) -> list[tuple[int, str]]:
        """Return the statuses and bodies that the server has written."""
        heads = r"HTTP/1\.1 (\d+).*?\r\n\r\n([^H]*)"
        return [(int(status), body) for status, body in re.findall(heads, self._written.decode(), re.DOTALL)]

    def write(self, data: Any) -> None:
        """Take what the server writes."""
        self._written += bytes(data)

    def close(self) -> None:
        """End."""
        self._is_closed = True

    def is_closing(self) -> bool:
        """Tell whether it has ended."""
        return self._is_closed

    def get_extra_info(self, _name: str, default: Any = None) -> Any:
        """Tell nothing."""
        return default

    def pause_reading(self) -> None:
        """Go on as before: the test decides."""

    def resume_reading(self) -> None:
        """Go on as before."""


@pytest.mark.parametrize(
    ("beginning", "piece"),
    [
        (b"GET /", b"a" * 1_024),
        (POST + b"Name", b"a" * 1_024),
        (POST + b"Name: ", b"a" * 1_024),
        (POST, b"Name: value\r\n" * 80),
    ],
)
async def test_head_is_refused_when_it_does_not_end(beginning: bytes, piece: bytes) -> None:
    """A stranger must not fill the memory: with an address, a header's name or value, or headers without number."""
    wire = Wire()
    wire.read(beginning)
    pieces = MAX_HEAD_BYTES // len(piece)
    for _ in range(pieces):
        wire.read(piece)
    assert (wire.answers, wire.is_closing()) == ([], False)
    wire.read(piece)
    assert (wire.answers, wire.is_closing()) == ([(400, "The head of the request is too long.")], True)


async def test_request_is_answered_when_its_head_came_in_pieces() -> None:
    """What else is in the read that ends a head is not the head's: a body, the next request, and where that begins."""
    wire = Wire()
    body = b"b" * (READ_BYTES - 100)
    head = POST + b"Content-Length: %d\r\n\r\n" % len(body)
    wire.read(head[:10])
    wire.read(head[10:] + body + head[:10])
    wire.read(head[10:] + body[:-1])
    wire.read(body[-1:] + head[:20])
    wire.read(head[20:] + body)
    await wire.rest()
    assert (wire.answers, wire.is_closing()) == ([(200, str(len(body)))] * 3, False)


async def test_count_begins_anew_when_a_connection_is_kept() -> None:
    """Many requests on one connection are no long head."""
    wire = Wire()
    request = POST + b"Content-Length: 0\r\nName: " + b"a" * 1_024 + b"\r\n\r\n"
    for _ in range(4 * MAX_HEAD_BYTES // len(request)):
        wire.read(request[:500])
        wire.read(request[500:1_000])
        wire.read(request[1_000:])
        await wire.rest()
    assert {status for status, _ in wire.answers} == {200}


def test_loop_is_uvloop_when_nobody_chooses_one() -> None:
    """What uvicorn does by itself is what the decision counts on."""
    assert uvicorn.Config(application).get_loop_factory() is uvloop.new_event_loop
