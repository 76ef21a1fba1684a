"""The load client against odd answers. Must not pass over one that it does not understand."""

import asyncio

import pytest

from bench.wire import Answer, MalformedAnswer, UnexpectedAnswer, connect, read_answer, render

CREATED = b'HTTP/1.1 201 Created\r\ndate: today\r\ncontent-length: 15\r\n\r\n{"step": "\xc3\xa9"}\n'


def test_answer_is_read_when_its_last_byte_is_there() -> None:
    """However the bytes are cut, nothing is an answer before its end."""
    assert [read_answer(CREATED[:end]) for end in range(len(CREATED))] == [None] * len(CREATED)
    assert read_answer(CREATED) == Answer(201, '{"step": "é"}\n'.encode())


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"HTTP/1.1 200 OK\r\nCONTENT-LENGTH:2\r\n\r\n{}", Answer(200, b"{}")),
        (b"HTTP/1.1 200 OK\r\nContent-Length:   0  \r\nX: y\r\n\r\n", Answer(200, b"")),
        (b"HTTP/1.1 200 \r\nx-content-length: 9\r\ncontent-length: 1\r\n\r\n1", Answer(200, b"1")),
        (b"HTTP/1.1 204 No Content\r\n\r\n", Answer(204, b"")),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\n\r\n\r\n", Answer(503, b"\r\n\r\n")),
    ],
)
def test_answer_is_read_when_it_is_written_differently(data: bytes, answer: Answer) -> None:
    """Servers differ in case, blanks, reasons and order; bodies may hold anything."""
    assert read_answer(data) == answer


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: +2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: \r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\n",
        b"x" * 70_000,
    ],
)
def test_answer_is_refused_when_it_is_not_understood(data: bytes) -> None:
    """A client that guesses counts answers that never were."""
    with pytest.raises(MalformedAnswer):
        read_answer(data)


async def ask(answer: bytes, expected: int) -> bytes:
    """Ask a server that says `answer`, in pieces, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readuntil(b"\r\n\r\n{}") == b"POST /x HTTP/1.1\r\nHost: here\r\nContent-Length: 2\r\n\r\n{}"
        for at in range(0, len(answer), 7):
            writer.write(answer[at : at + 7])
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        connection = await connect(*server.sockets[0].getsockname())
        try:
            async with asyncio.timeout(10):
                return await connection.ask(render("POST", "/x", b"Host: here\r\n", b"{}"), expected)
        finally:
            connection.close()


async def test_body_is_returned_when_the_status_is_the_expected_one() -> None:
    """What was asked is written as HTTP wants it, and what comes in pieces is put together."""
    assert await ask(CREATED, 201) == '{"step": "é"}\n'.encode()


async def test_client_ends_loudly_when_the_status_is_another() -> None:
    """A refusal is quick, and would pass for speed; the message says what was asked and what was said."""
    with pytest.raises(UnexpectedAnswer, match=r"POST /x HTTP/1.1: expected 200, found 201: {\"step\""):
        await ask(CREATED, 200)


@pytest.mark.parametrize(("said", "error"), [(CREATED[:-3], ConnectionError), (b"", ConnectionError), (b"x" * 70_000, MalformedAnswer)])
async def test_client_does_not_hang_when_the_server_leaves_or_talks_nonsense(said: bytes, error: type[Exception]) -> None:
    """Whoever waits is told; a bench that hangs tells nobody."""
    with pytest.raises(error):
        await ask(said, 201)
