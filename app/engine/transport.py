"""HTTP/1.1 to endpoints over connections that are only ever made to a checked address. Must not judge an answer or try again.

It is our own, on h11, because a generic pool neither tells whether a byte of the request can have left, nor notices bytes left over from
one answer, which would then be read as the answer to the next undo (docs/decisions/0005).
"""

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
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
# An answer to an undo is a status, to an action its result; more is not read (contract, "The outgoing request").
MAX_RESPONSE_BYTES: Final = 65_536

# What nearly every answer is, whole as it arrives: nothing in its head but visible ASCII, one field a line. Any other is h11's to read.
_PLAIN_HEAD: Final = re.compile(
    rb"HTTP/1\.1 (?P<status>[2-5][0-9]{2}) [ -~]*\r\n(?P<fields>(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[ -~]*\r\n)*)\r\n"
)
_LENGTH: Final = re.compile(r"[0-9]{1,9}")
_BODILESS: Final = frozenset({204, 205, 304})
# What frames an answer otherwise than by its length, or ends the connection after it.
_NOT_PLAIN: Final = frozenset({"transfer-encoding", "connection", "upgrade", "trailer"})

_WORDS: Final[Mapping[type[Exception], str]] = {
    ConnectionRefusedError: "refused",
    ConnectionResetError: "reset",
    TimeoutError: "no reply in time",
}


@dataclass(slots=True, kw_only=True)
class Errand:
    """A request to the transport, and how far it got, which an attempt that was broken off needs to know.

    `headers` can be sent as they stand; what frames the message is added to them.
    """

    destination: Destination
    method: str
    headers: Mapping[str, str]
    body: bytes
    connect_seconds: float
    may_have_left: bool = False
    status: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A complete answer, or one whose body was cut: its headers by their names in lower case, several of a name as one list."""

    status: int
    headers: Mapping[str, str]
    body: bytes


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


class GuardedTransport:
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

    async def exchange(self, errand: Errand) -> Answer:
        """Send a request and return its answer, of the body no more than the first 64 KiB.

        Raises:
            UrlRefused: an address of the host is not allowed.
            httpx.HTTPError: no connection, no answer, or none that is HTTP.
        """
        destination = errand.destination
        origin = (destination.scheme, destination.host, destination.port)
        connection = self._take(origin) or await self._connect(origin, errand.connect_seconds)
        try:
            errand.may_have_left = True
            answer = await connection.exchange(errand)
        except BaseException:
            connection.abort()
            raise
        if connection.may_be_used_again:
            self._give_back(origin, connection)
        else:
            connection.abort()
        return answer

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
    """One connection: HTTP/1.1 over the loop's transport, one exchange after the other.

    It buffers no more than the loop reads at once, since whoever waits for bytes runs before the loop reads again, and a connection that
    nobody waits on is dropped at its first byte. An answer that is plain and arrives whole is read at a glance, any other by h11.
    """

    def __init__(self) -> None:
        self.is_lost = asyncio.Event()
        self.may_be_used_again = False
        self._loop = asyncio.get_running_loop()
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

    async def exchange(self, errand: Errand) -> Answer:
        """Hand the whole request to the socket, and read its answer; what the socket does not take at once goes out meanwhile."""
        self.may_be_used_again = False
        headers = {"Host": errand.destination.authority, **errand.headers}
        if errand.method != "GET":
            headers["Content-Length"] = str(len(errand.body))
        head = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        self._transport.write(f"{errand.method} {errand.destination.target} HTTP/1.1\r\n{head}\r\n".encode("ascii") + errand.body)
        received = await self._receive()
        plain = _plain_answer(received)
        if plain is None:
            return await self._converse(errand, headers, received)
        errand.status = plain.status
        self.may_be_used_again = not (self._received or self._is_ended)
        return plain

    async def _converse(self, errand: Errand, headers: Mapping[str, str], received: bytes) -> Answer:
        """Read an answer of which something has arrived, past interim ones; of the body, no more than is wanted."""
        http = h11.Connection(our_role=h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        request = h11.Request(method=errand.method, target=errand.destination.target, headers=list(headers.items()))
        for sent in (request, h11.Data(data=errand.body), h11.EndOfMessage()):
            http.send(sent)
        if not received:
            _refuse_missing_head(http)
        http.receive_data(received)
        head = await self._read_head(http)
        errand.status = head.status_code
        body = bytearray()
        while len(body) <= MAX_RESPONSE_BYTES:
            event = await self._next_event(http)
            if not isinstance(event, h11.Data):
                is_left_over = bool(self._received or http.trailing_data[0])
                self.may_be_used_again = not (is_left_over or self._is_ended) and http.our_state is http.their_state is h11.DONE
                break
            body += event.data
        return Answer(status=head.status_code, headers=_joined(head.headers), body=bytes(body[:MAX_RESPONSE_BYTES]))

    async def _read_head(self, http: h11.Connection) -> h11.Response:
        """Return the final status line with its headers, past interim answers."""
        for _ in range(MAX_INTERIM_ANSWERS):
            event = await self._next_event(http)
            if isinstance(event, h11.Response):
                return event
        raise httpx.RemoteProtocolError(f"more than {MAX_INTERIM_ANSWERS} interim answers")

    async def _next_event(self, http: h11.Connection) -> h11.Event:
        while True:
            try:
                event = http.next_event()
            except h11.RemoteProtocolError as error:
                raise httpx.RemoteProtocolError(str(error)) from error
            if isinstance(event, h11.Event):
                return event
            data = await self._receive()
            if not data:
                _refuse_missing_head(http)
            http.receive_data(data)

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


def _plain_answer(received: bytes) -> Answer | None:
    """Return the answer if these bytes are one, whole and framed by nothing but its length; None is no judgement."""
    head = _PLAIN_HEAD.match(received)
    if head is None or len(received) > MAX_RESPONSE_BYTES:
        return None
    status = int(head["status"])
    fields = [line.partition(":") for line in head["fields"].decode("ascii").splitlines()]
    headers = {name.lower(): value.strip(" ") for name, _, value in fields}
    if len(headers) != len(fields) or status in _BODILESS or not _NOT_PLAIN.isdisjoint(headers):
        return None
    length = headers.get("content-length", "")
    if _LENGTH.fullmatch(length) is None or int(length) != len(received) - head.end():
        return None
    return Answer(status=status, headers=headers, body=received[head.end() :])


def _joined(fields: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return headers by name, several of one name as a list (RFC 9110, section 5.3)."""
    headers: dict[str, str] = {}
    for name_bytes, value_bytes in fields:
        name, value = name_bytes.decode("ascii"), value_bytes.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _refuse_missing_head(http: h11.Connection) -> None:
    """Tell an end without an answer from one in the middle of its head; h11 judges an end in the body."""
    if http.their_state is not h11.SEND_RESPONSE:
        return
    if http.trailing_data[0]:
        raise httpx.RemoteProtocolError("closed by the endpoint in the head of its answer")
    raise httpx.ReadError("closed by the endpoint before an answer")


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
