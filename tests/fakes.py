"""An endpoint over real sockets that plays scripted replies and logs what reached it. Must not import `app`: it is the ground truth.

In a test's own loop:

    async with FakeEndpoint({"/undo/a": [Reply(status=503), Reply()]}) as endpoint:
        ...  # send something to endpoint.url("/undo/a")
        first, second = await endpoint.wait_for_requests(2)
        assert endpoint.applications_of("undo-...") == 1

With a `log_path`, each request is fsynced to that file before it is answered, and `read_log` gives the same `Received` values back;
tests.faults.endpoint runs it in a process of its own.
"""

import asyncio
import contextlib
import gzip
import json
import os
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path
from typing import IO, Self, assert_never
from urllib.parse import urlsplit

# Longest wait of a test for something that should happen at once, in seconds; generous because the cores are shared.
DEFAULT_WAIT_SECONDS = 10.0
# Between two bytes of a dripping reply, in seconds: slow beside any per-read timeout, quick beside a test's patience.
DRIP_SECONDS = 0.02
MAX_HEAD_BYTES = 256 * 1024
BLOCK = b"x" * 65_536
FLOOD_HEADER_LINES = 20_000


class Mode(StrEnum):
    """How a reply reaches the wire, or fails to."""

    NORMAL = "normal"
    INTERIM = "interim"
    CHUNKED = "chunked"
    CLOSE_DELIMITED = "close_delimited"
    GZIP = "gzip"
    RESET_BEFORE_REPLY = "reset_before_reply"
    RESET_AFTER_PROCESSING = "reset_after_processing"
    RESET_IN_BODY = "reset_in_body"
    RESET_AFTER_REPLY = "reset_after_reply"
    CLOSE_WITHOUT_REPLY = "close_without_reply"
    HANG = "hang"
    DRIP = "drip"
    DRIP_HEAD = "drip_head"
    ENDLESS = "endless"
    ENDLESS_CONTINUE = "endless_continue"
    HEADER_FLOOD = "header_flood"
    WRONG_LENGTH = "wrong_length"
    EXTRA_BYTES = "extra_bytes"
    NOT_HTTP = "not_http"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One scripted answer.

    `gate`: the answer waits until it is set. `delay_seconds`: then for that long, real time; prefer a gate. `applies` None: an effect
    takes place if the status is below 300 and the mode is not `reset_before_reply`. It takes place before gate and delay.
    `busy_status`: what other requests under the same key are answered while this answer is on its way. `forgets_key`: the effect takes
    place although that key has had it.
    Modes: `interim` sends a 103 first; `hang` never answers; `drip` sends the head and then single bytes, `drip_head` starts with
    them; `endless` and `endless_continue` never stop; `wrong_length` announces more bytes than it sends, `extra_bytes` fewer.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b"{}"
    mode: Mode = Mode.NORMAL
    gate: asyncio.Event | None = None
    delay_seconds: float = 0.0
    applies: bool | None = None
    busy_status: int | None = None
    forgets_key: bool = False

    @property
    def does_apply(self) -> bool:
        """Whether the endpoint does what was asked before it gives this answer."""
        if self.applies is not None:
            return self.applies
        return self.status < HTTPStatus.MULTIPLE_CHOICES and self.mode is not Mode.RESET_BEFORE_REPLY


@dataclass(slots=True, kw_only=True)
class Received:
    """One request as it arrived, names and values of headers untouched.

    Times are `time.monotonic()` seconds, comparable between processes of one Linux machine. `ended_at` is None while the answer is
    not out; `left_at` is when the client was gone before that. `is_applied`: this request made the effect happen (a known key in a
    key-aware endpoint does not apply twice). `status` and `mode` are the reply's.
    """

    number: int
    started_at: float
    ended_at: float | None
    connection: int
    method: str
    target: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    is_applied: bool = False
    status: int = HTTPStatus.OK
    mode: str = Mode.NORMAL
    left_at: float | None = None

    @property
    def path(self) -> str:
        """The target without its query."""
        return urlsplit(self.target).path

    @property
    def key(self) -> str | None:
        """The idempotency key, as sent."""
        return self.header("Idempotency-Key")

    def header(self, name: str) -> str | None:
        """Return the first value of that header, matched without case."""
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for found, value in self.headers if found.lower() == wanted), None)


class Ear(asyncio.StreamReader):
    """Hears when the other side leaves, however long ago anybody listened."""

    left_at: float | None = None

    def feed_eof(self) -> None:
        """Take note of a polite end."""
        self._note_leaving()
        super().feed_eof()

    def set_exception(self, exc: Exception) -> None:
        """Take note of a broken connection."""
        self._note_leaving()
        super().set_exception(exc)

    def _note_leaving(self) -> None:
        if self.left_at is None:
            self.left_at = time.monotonic()


ScriptItem = Reply | Callable[[Received], Reply]
Script = Mapping[str, Sequence[ScriptItem]]


class FakeEndpoint:
    """An HTTP/1.1 endpoint on a loopback port of its own.

    Per path a list of replies is played, the last one again and again; other paths get `default`. `remembers_keys`: an effect is
    applied once per Idempotency-Key; without it, every request that applies applies again.
    """

    def __init__(  # noqa: PLR0913 (all have defaults and are named at the call)
        self,
        script: Script | None = None,
        *,
        default: Reply | None = None,
        remembers_keys: bool = True,
        ssl_context: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        log_path: Path | None = None,
    ) -> None:
        """Keep the script; the port is open from `async with` on."""
        self.received: list[Received] = []
        self.connections = 0
        self.closed_connections = 0
        self.in_flight = 0
        self.max_concurrency = 0
        self.port = port
        self._numbered = 0
        self._host = host
        self._script = {path: list(replies) for path, replies in (script or {}).items()}
        self._default = default if default is not None else Reply()
        self._remembers_keys = remembers_keys
        self._ssl_context = ssl_context
        self._applications: Counter[str | None] = Counter()
        self._playing: dict[str | None, Reply] = {}
        self._changed = asyncio.Condition()
        self._closing = asyncio.Event()
        self._conversations: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._log_path = log_path
        self._log: IO[str] | None = None

    async def __aenter__(self) -> Self:
        """Listen."""
        if self._log_path is not None:
            earlier = read_log(self._log_path)
            self._numbered = len(earlier)
            self._applications.update(request.key for request in earlier if request.is_applied)
            self._log = self._log_path.open("a", encoding="utf-8")
        self._server = await asyncio.get_running_loop().create_server(
            lambda: asyncio.StreamReaderProtocol(Ear(limit=MAX_HEAD_BYTES), self._converse),
            self._host,
            self.port,
            ssl=self._ssl_context,
            reuse_address=True,
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Stop listening, break what is still open and wait for it."""
        self._closing.set()
        if self._server is not None:
            self._server.close()
        for conversation in self._conversations:
            conversation.cancel()
        await asyncio.gather(*self._conversations, return_exceptions=True)
        if self._log is not None:
            self._log.close()

    @property
    def origin(self) -> str:
        """Scheme, host and port, without a slash at the end."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._ssl_context else 'http'}://{host}:{self.port}"

    def url(self, path: str = "/") -> str:
        """Return the absolute URL of `path` here."""
        return f"{self.origin}{path}"

    def script(self, path: str, *replies: ScriptItem) -> None:
        """Replace what is still to be played at `path`."""
        self._script[path] = list(replies)

    def requests(self, path: str) -> list[Received]:
        """Return what reached `path`, oldest first."""
        return [request for request in self.received if request.path == path]

    @property
    def applied(self) -> list[Received]:
        """The requests that made an effect happen, in order."""
        return [request for request in self.received if request.is_applied]

    def applications_of(self, key: str | None) -> int:
        """Return how often the effect of that Idempotency-Key took place."""
        return self._applications[key]

    async def wait_for_requests(self, count: int, timeout_seconds: float = DEFAULT_WAIT_SECONDS) -> list[Received]:
        """Return all requests once at least `count` have arrived; raise TimeoutError when they do not."""
        await self._wait_until(lambda: len(self.received) >= count, timeout_seconds)
        return list(self.received)

    async def wait_for_answers(self, count: int, timeout_seconds: float = DEFAULT_WAIT_SECONDS) -> list[Received]:
        """Return all requests once at least `count` have ended; raise TimeoutError when they do not."""
        await self._wait_until(lambda: sum(request.ended_at is not None for request in self.received) >= count, timeout_seconds)
        return list(self.received)

    async def wait_for_closed_connections(self, count: int, timeout_seconds: float = DEFAULT_WAIT_SECONDS) -> None:
        """Return once at least `count` connections have ended; raise TimeoutError when they do not."""
        await self._wait_until(lambda: self.closed_connections >= count, timeout_seconds)

    async def _wait_until(self, is_so: Callable[[], bool], timeout_seconds: float) -> None:
        async with asyncio.timeout(timeout_seconds), self._changed:
            await self._changed.wait_for(is_so)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer request after request on one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        self.connections += 1
        connection = self.connections
        try:
            while (request := await self._read(reader, connection)) is not None:
                if not await self._answer(request, reader, writer):
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, ssl.SSLError):
            return  # the other side left, or the endpoint is closing: nothing to tell anybody
        finally:
            self._conversations.discard(task)
            writer.close()
            self.closed_connections += 1
            await self._announce()

    async def _read(self, reader: asyncio.StreamReader, connection: int) -> Received | None:
        """Read one request, or None when the client is done."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        started_at = time.monotonic()
        request_line, *lines = head[:-4].split(b"\r\n")
        method, target, _version = request_line.decode("latin-1").split(" ")
        pairs = (line.split(b":", 1) for line in lines)
        headers = tuple((name, value.strip()) for name, value in pairs)
        length = next((int(value) for name, value in headers if name.lower() == b"content-length"), 0)
        return Received(
            number=self._next_number(),
            started_at=started_at,
            ended_at=None,
            connection=connection,
            method=method,
            target=target,
            headers=headers,
            body=await reader.readexactly(length),
        )

    def _next_number(self) -> int:
        self._numbered += 1
        return self._numbered

    async def _answer(self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Log the request, apply it, play its reply; return whether the connection stays open."""
        reply = self._next_reply(request)
        is_repeat = request.key in self._playing
        if not is_repeat:
            self._playing[request.key] = reply
        request.status, request.mode = reply.status, reply.mode
        self._apply(request, reply)
        self.received.append(request)
        self._write_log({"event": "received", **_to_json(request)})
        self.in_flight += 1
        self.max_concurrency = max(self.max_concurrency, self.in_flight)
        await self._announce()
        try:
            if reply.gate is not None:
                await reply.gate.wait()
            if reply.delay_seconds > 0:
                await self._pause(reply.delay_seconds)
            return await self._play(reply, reader, writer)
        finally:
            self.in_flight -= 1
            if not is_repeat:
                del self._playing[request.key]
            request.ended_at, request.left_at = time.monotonic(), reader.left_at if isinstance(reader, Ear) else None
            self._write_log({"event": "ended", "number": request.number, "ended_at": request.ended_at, "left_at": request.left_at})
            await self._announce()

    def _next_reply(self, request: Received) -> Reply:
        playing = self._playing.get(request.key) if request.key is not None else None
        if playing is not None and playing.busy_status is not None:
            return Reply(status=playing.busy_status)
        replies = self._script.get(request.path)
        if not replies:
            return self._default
        item = replies[0] if len(replies) == 1 else replies.pop(0)
        return item if isinstance(item, Reply) else item(request)

    def _apply(self, request: Received, reply: Reply) -> None:
        is_known = self._remembers_keys and not reply.forgets_key and request.key is not None and self._applications[request.key] > 0
        request.is_applied = reply.does_apply and not is_known
        if request.is_applied:
            self._applications[request.key] += 1

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _pause(self, seconds: float) -> None:
        """Wait in real time, but not past the end of the endpoint."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    async def _play(self, reply: Reply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Write the reply in its mode; return whether the connection stays open."""
        match reply.mode:
            case Mode.RESET_BEFORE_REPLY | Mode.RESET_AFTER_PROCESSING:
                _reset(writer)
            case Mode.CLOSE_WITHOUT_REPLY:
                return False
            case Mode.HANG:
                await reader.read(1)  # ends when the client gives up
            case Mode.DRIP | Mode.DRIP_HEAD | Mode.ENDLESS | Mode.ENDLESS_CONTINUE:
                await self._play_without_end(reply, writer)
            case Mode.RESET_IN_BODY:
                await _send(writer, _head(reply, {"Content-Length": str(len(reply.body) + len(BLOCK))}), reply.body)
                _reset(writer)
            case Mode.RESET_AFTER_REPLY:
                await _send(writer, *_framed(reply))
                _reset(writer)
            case Mode.NORMAL | Mode.INTERIM | Mode.CHUNKED | Mode.GZIP | Mode.EXTRA_BYTES:
                await _send(writer, *_framed(reply))
                return True
            case Mode.CLOSE_DELIMITED | Mode.HEADER_FLOOD | Mode.WRONG_LENGTH | Mode.NOT_HTTP:
                await _send(writer, *_framed(reply))
            case _:
                assert_never(reply.mode)
        return False

    async def _play_without_end(self, reply: Reply, writer: asyncio.StreamWriter) -> None:
        """Send for as long as somebody listens."""
        if reply.mode in {Mode.DRIP, Mode.ENDLESS}:
            await _send(writer, _head(reply, {"Content-Length": str(2**40)}))
        head = iter(_head(reply, {}))
        while not self._closing.is_set():
            match reply.mode:
                case Mode.ENDLESS:
                    await _send(writer, BLOCK)
                case Mode.ENDLESS_CONTINUE:
                    await _send(writer, b"HTTP/1.1 100 Continue\r\n\r\n" * 100)
                case Mode.DRIP_HEAD:
                    await _send(writer, bytes([next(head, ord("x"))]))
                    await self._pause(DRIP_SECONDS)
                case _:
                    await _send(writer, b"x")
                    await self._pause(DRIP_SECONDS)

    def _write_log(self, event: Mapping[str, object]) -> None:
        """Append one line; what arrived is on the disk before it is answered."""
        if self._log is None:
            return
        self._log.write(json.dumps(event) + "\n")
        self._log.flush()
        if event["event"] == "received":
            os.fsync(self._log.fileno())


def _head(reply: Reply, framing: Mapping[str, str]) -> bytes:
    """Return status line and headers."""
    try:
        phrase = HTTPStatus(reply.status).phrase
    except ValueError:
        phrase = "Unknown"
    headers = {"Content-Type": "application/json", **reply.headers, **framing}
    lines = [f"HTTP/1.1 {reply.status} {phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _framed(reply: Reply) -> tuple[bytes, ...]:
    """Return the pieces of a reply that ends by itself: head, body and what follows it."""
    body, length, trailer = reply.body, len(reply.body), b""
    framing = {"Content-Length": str(length)}
    match reply.mode:
        case Mode.CHUNKED:
            framing = {"Transfer-Encoding": "chunked"}
            body, trailer = (b"%x\r\n%b\r\n" % (length, body) if body else b""), b"0\r\n\r\n"
        case Mode.CLOSE_DELIMITED:
            framing = {"Connection": "close"}
        case Mode.GZIP:
            body = gzip.compress(body)
            framing = {"Content-Encoding": "gzip", "Content-Length": str(len(body))}
        case Mode.HEADER_FLOOD:
            framing |= {f"X-Flood-{number}": "x" * 40 for number in range(FLOOD_HEADER_LINES)}
        case Mode.WRONG_LENGTH:
            framing = {"Content-Length": str(length + 10)}
        case Mode.EXTRA_BYTES:
            trailer = b"HTTP/1.1 200 Forged\r\nContent-Length: 0\r\n\r\n"
        case Mode.INTERIM:
            return b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n", _head(reply, framing), body
        case Mode.NOT_HTTP:
            return (b"SSH-2.0-OpenSSH_9.2\r\n",)
        case _ if reply.status in {HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED}:
            framing, body = {}, b""
        case _:
            pass
    return _head(reply, framing), body, trailer


async def _send(writer: asyncio.StreamWriter, *pieces: bytes) -> None:
    writer.write(b"".join(pieces))
    await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _to_json(request: Received) -> dict[str, object]:
    """Return the request as JSON values; bytes that are not UTF-8 survive as lone surrogates."""
    return {
        "number": request.number,
        "started_at": request.started_at,
        "connection": request.connection,
        "method": request.method,
        "target": request.target,
        "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in request.headers],
        "body": request.body.decode("utf-8", "surrogateescape"),
        "is_applied": request.is_applied,
        "status": request.status,
        "mode": request.mode,
    }


def read_log(path: Path, offset: int = 0) -> list[Received]:
    """Return the requests that a log tells of from `offset` on, in order of arrival; a half-written last line is not counted."""
    requests: dict[int, Received] = {}
    for line in path.read_bytes()[offset:].splitlines(keepends=True) if path.exists() else ():
        if not line.endswith(b"\n"):
            break
        event = json.loads(line)
        if event.pop("event") == "ended":
            if event["number"] in requests:
                ended = requests[event["number"]]
                ended.ended_at, ended.left_at = event["ended_at"], event["left_at"]
            continue
        headers = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in event.pop("headers"))
        body = event.pop("body").encode("utf-8", "surrogateescape")
        requests[event["number"]] = Received(ended_at=None, headers=headers, body=body, **event)
    return list(requests.values())
