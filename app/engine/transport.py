"""HTTP/1.1 to endpoints over connections that are only ever made to a checked address. Must not judge an answer or try again.

It is our own, on h11, because a generic pool neither tells whether a byte of the request can have left, nor notices bytes left over from
one answer, which would then be read as the answer to the next undo (docs/decisions/0005).
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, cast

import h11
import httpx

from app.domain.egress import Destination, EgressPolicy, check_address, is_address
from app.domain.retry import Failure

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
_Origin: TypeAlias = tuple[str, str, int]

MAX_HEAD_BYTES: Final = 65_536  # status line and headers; the common servers stop at 8 to 32 KiB
MAX_INTERIM_ANSWERS: Final = 16  # 1xx; two are plausible (100, 103), an endless row is an attack
# Short, since a POST on a connection that the endpoint has just closed ends with unknown outcome; common servers close after 5 s or more.
KEEP_ALIVE_SECONDS: Final = 4.0
MAX_CONNECTIONS: Final = 100  # at once, to all endpoints together; a backstop, the orchestrator bounds its own work
MAX_ADDRESSES: Final = 4  # tried per connect; a name with more has others to try at the next attempt
ERRAND: Final = "countermand.errand"  # the extension of a request that holds its Errand

_WORDS: Final[Mapping[type[Exception], str]] = {
    ConnectionRefusedError: "refused",
    ConnectionResetError: "reset",
    TimeoutError: "no reply in time",
}


@dataclass(slots=True, kw_only=True)
class Errand:
    """What goes with a request to the transport, and how far it got, which an attempt that was broken off needs to know."""

    destination: Destination
    connect_seconds: float
    may_have_left: bool = False
    status: int | None = None


class NotConnected(httpx.ConnectError):
    """No connection was made, so no byte of the request has left."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure


async def resolve_by_system(host: str, port: int) -> list[str]:
    """Return the addresses of `host` in the system's order of preference.

    Raises:
        OSError: the name does not exist or the resolver does not answer.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for _family, _type, _protocol, _name, sockaddr in found]


class GuardedTransport(httpx.AsyncBaseTransport):
    """HTTP/1.1 over connections that are only ever made to a checked address.

    All addresses of a name are checked before the first is connected to, and one refused address refuses the name: an answer that mixes
    public and private ones is an attack or a mistake. Connections are reused per scheme, host and port, for a few seconds.
    """

    def __init__(self, policy: EgressPolicy, *, resolve: Resolve, ssl_context: ssl.SSLContext | None) -> None:
        """Open nothing yet; the default context reads the system's authorities now."""
        self._policy = policy
        self._resolve = resolve
        self._ssl_context = ssl_context or _default_ssl_context()
        self._idle: dict[_Origin, list[_Connection]] = {}
        self._is_closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send `request` and return its response once the head is there; the body is read, or broken off, by the caller.

        Raises:
            UrlRefused: an address of the host is not allowed.
            httpx.HTTPError: no connection, no answer, or none that is HTTP.
        """
        errand: Errand = request.extensions[ERRAND]
        destination = errand.destination
        origin = (destination.scheme, destination.host, destination.port)
        connection = self._take(origin) or await self._connect(origin, errand.connect_seconds)
        try:
            errand.may_have_left = True
            connection.write(request, destination.target)
            head = await connection.read_head()
        except BaseException:
            connection.abort()
            raise
        stream = _Body(connection, lambda: self._give_back(origin, connection))
        return httpx.Response(head.status_code, headers=head.headers.raw_items(), stream=stream, request=request)

    async def aclose(self) -> None:
        """Close what is kept for reuse, and keep nothing from now on."""
        self._is_closed = True
        connections = [connection for waiting in self._idle.values() for connection in waiting]
        self._idle.clear()
        for connection in connections:
            connection.abort()
        for connection in connections:
            await connection.is_lost.wait()

    def _take(self, origin: _Origin) -> "_Connection | None":
        """Return the connection kept last, if there is one; those that ended or spoke meanwhile are gone."""
        if origin not in self._idle:
            return None
        connection = self._idle[origin][-1]
        self._forget(origin, connection)
        return connection

    def _give_back(self, origin: _Origin, connection: "_Connection") -> None:
        """Keep a connection for reuse."""
        if self._is_closed or sum(map(len, self._idle.values())) >= MAX_CONNECTIONS:
            connection.abort()
            return
        self._idle.setdefault(origin, []).append(connection)
        connection.rest(KEEP_ALIVE_SECONDS, lambda: self._drop(origin, connection))

    def _drop(self, origin: _Origin, connection: "_Connection") -> None:
        """Close a kept connection."""
        self._forget(origin, connection)
        connection.abort()

    def _forget(self, origin: _Origin, connection: "_Connection") -> None:
        connection.end_rest()
        self._idle[origin].remove(connection)
        if not self._idle[origin]:
            del self._idle[origin]

    async def _connect(self, origin: _Origin, seconds: float) -> "_Connection":
        """Return a new connection, made within `seconds`.

        Raises:
            UrlRefused: an address of the host is not allowed.
            NotConnected: the name does not resolve, no address answers, or the endpoint's certificate is not good for the name.
        """
        scheme, host, port = origin
        addresses = await self._checked_addresses(host, port)
        # So that a first address that swallows packets leaves time for the others, and for the answer.
        share_seconds = seconds / (len(addresses) + 1)
        problems: list[str] = []
        for address in addresses:
            try:
                async with asyncio.timeout(share_seconds):
                    connected = await _open_socket(address, port)
            except OSError as error:
                problems.append(f"{address} port {port}: {_what(error)}")
                continue
            return await _converse_over(connected, self._ssl_context if scheme == "https" else None, host)
        raise NotConnected(Failure.CONNECT, "; ".join(problems))

    async def _checked_addresses(self, host: str, port: int) -> list[str]:
        """Resolve a name once and return its addresses if every one of them is allowed."""
        try:
            addresses = [host] if is_address(host) else list(await self._resolve(host, port))
        except (OSError, UnicodeError) as error:
            raise NotConnected(Failure.DNS, f"{host}: {_what(error)}") from error
        if not addresses:
            raise NotConnected(Failure.DNS, f"{host}: no address")
        for address in addresses:
            check_address(address, host, self._policy)
        return list(dict.fromkeys(addresses))[:MAX_ADDRESSES]


class _Connection(asyncio.Protocol):
    """One connection: HTTP/1.1 by h11 over the loop's transport.

    It buffers no more than the loop reads at once, since whoever waits for bytes runs before the loop reads again, and a connection that
    nobody waits on is dropped at its first byte.
    """

    def __init__(self) -> None:
        self.is_lost = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._http = h11.Connection(our_role=h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._received = bytearray()
        self._is_ended = False
        self._error: Exception | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._drop: Callable[[], None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._wake()

    def eof_received(self) -> None:
        self._is_ended = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_ended = True
        self._error = exc
        self.is_lost.set()
        self._wake()

    def abort(self) -> None:
        """Close at once."""
        self.end_rest()
        self._transport.abort()

    def rest(self, seconds: float, drop: Callable[[], None]) -> None:
        """Call `drop` after `seconds`, or as soon as anything happens on a connection that nobody uses."""
        self._drop = drop
        self._expiry = self._loop.call_later(seconds, drop)

    def end_rest(self) -> None:
        """Cancel what `rest` began."""
        self._drop = None
        if self._expiry is not None:
            self._expiry.cancel()

    def write(self, request: httpx.Request, target: str) -> None:
        """Hand the whole request to the socket; what it does not take at once goes out while the answer is awaited."""
        head = h11.Request(method=request.method, target=target, headers=request.headers.raw)
        events: list[h11.Event] = [head, h11.Data(data=request.content), h11.EndOfMessage()]
        self._transport.write(b"".join(self._http.send(event) or b"" for event in events))

    async def read_head(self) -> h11.Response:
        """Return the final status line with its headers, past interim answers."""
        for _ in range(MAX_INTERIM_ANSWERS):
            event = await self._next_event()
            if isinstance(event, h11.Response):
                return event
        raise httpx.RemoteProtocolError(f"more than {MAX_INTERIM_ANSWERS} interim answers")

    async def read_body(self) -> bytes | None:
        """Return the next piece of the body, or None at its end."""
        event = await self._next_event()
        return bytes(event.data) if isinstance(event, h11.Data) else None

    def finish(self) -> bool:
        """Get ready for another request after a complete answer; return whether this connection may carry one."""
        is_left_over = bool(self._received or self._http.trailing_data[0])
        if is_left_over or self._is_ended or not (self._http.our_state is self._http.their_state is h11.DONE):
            return False
        self._http.start_next_cycle()
        return True

    async def _next_event(self) -> h11.Event:
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                raise httpx.RemoteProtocolError(str(error)) from error
            if isinstance(event, h11.Event):
                return event
            data = await self._receive()
            if not data:
                self._refuse_missing_head()
            self._http.receive_data(data)

    def _refuse_missing_head(self) -> None:
        """Tell an end without an answer from one in the middle of its head; h11 judges an end in the body."""
        if self._http.their_state is not h11.SEND_RESPONSE:
            return
        if self._http.trailing_data[0]:
            raise httpx.RemoteProtocolError("closed by the endpoint in the head of its answer")
        raise httpx.ReadError("closed by the endpoint before an answer")

    async def _receive(self) -> bytes:
        """Return what has arrived, waiting for something; empty at the end."""
        while not self._received and not self._is_ended:
            self._arrival = self._loop.create_future()
            await self._arrival
        if not self._received and self._error is not None:
            raise httpx.ReadError(_what(self._error))
        data = bytes(self._received)
        self._received.clear()
        return data

    def _wake(self) -> None:
        if self._drop is not None:
            self._drop()
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class _Body(httpx.AsyncByteStream):
    """The body of one answer; closing it early closes the connection."""

    def __init__(self, connection: _Connection, give_back: Callable[[], None]) -> None:
        self._connection = connection
        self._give_back = give_back
        self._is_complete = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        data = await self._connection.read_body()
        if data is None:
            self._is_complete = True
            raise StopAsyncIteration
        return data

    async def aclose(self) -> None:
        if self._is_complete and self._connection.finish():
            self._give_back()
        else:
            self._connection.abort()


async def _open_socket(address: str, port: int) -> socket.socket:
    """Return a socket connected to an address; no name is resolved here."""
    connecting = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connecting.settimeout(0)  # the loop waits, not the socket
        await asyncio.get_running_loop().sock_connect(connecting, (address, port))
    except BaseException:
        connecting.close()
        raise
    return connecting


async def _converse_over(connected: socket.socket, ssl_context: ssl.SSLContext | None, host: str) -> _Connection:
    """Take the socket over, after the TLS handshake for `host` where a context is given."""
    loop = asyncio.get_running_loop()
    try:
        server_hostname = None if ssl_context is None else host
        _transport, connection = await loop.create_connection(_Connection, sock=connected, ssl=ssl_context, server_hostname=server_hostname)
    except OSError as error:
        failure = Failure.CONNECT if ssl_context is None else Failure.TLS
        raise NotConnected(failure, f"{host}: {_what(error)}") from error
    return connection


def _default_ssl_context() -> ssl.SSLContext:
    """Trust the system's authorities, and the bundled ones where the system has none, as in the smallest containers."""
    paths = ssl.get_default_verify_paths()
    has_authorities = bool(paths.cafile) or (bool(paths.capath) and any(Path(paths.capath).iterdir()))
    context = ssl.create_default_context() if has_authorities else httpx.create_ssl_context(trust_env=False)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _what(error: Exception) -> str:
    """Say in a few words what the system reported."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason
    strerror = error.strerror if isinstance(error, OSError) else None
    return _WORDS.get(type(error)) or strerror or type(error).__name__
