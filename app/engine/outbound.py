"""The one door to the network: one request, one deadline, one answer or failure. Must not retry, follow redirects or judge an answer.

A response counts only when it is complete, or when its first 64 KiB are there. If it breaks off or drips past the deadline, the attempt
is a failure with unknown outcome whatever its status line said (contract, section 4): the same bytes go out again under the same key.
"""

import asyncio
import math
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, Literal, Self

import httpx

from app.domain.egress import EgressPolicy, UrlRefused, check_url
from app.domain.retry import Attempt, Failure
from app.engine.clock import Clock
from app.engine.transport import (
    MAX_CONNECTIONS,
    MAX_RESPONSE_BYTES,
    Answer,
    Errand,
    GuardedTransport,
    NotConnected,
    Resolve,
    resolve_by_system,
)

MAX_EXCERPT_BYTES: Final = 2_048  # what is kept of an answer for people (threat model, row B4)
MAX_WORDS_CHARACTERS: Final = 300  # of our own account of a failure, which may quote what was no HTTP
CHECKED_URLS: Final = 256  # whose text was found to be good; addresses are checked at each connect
USER_AGENT: Final = "countermand"

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"(?:[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)?")
# What frames the message is this module's to say.
_OWN_HEADERS: Final = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "keep-alive", "te", "trailer", "upgrade", "expect", "accept-encoding"}
)
_NOT_CONNECTED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@lru_cache(maxsize=64)  # they are a handful, on every request
def _may_be_set(name: str) -> bool:
    return _HEADER_NAME.fullmatch(name) is not None and name.lower() not in _OWN_HEADERS


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingRequest:
    """One request to an endpoint.

    `headers` are visible ASCII; Host, Content-Length and what else frames a message are added here. `timeout_seconds` is the total
    deadline, resolving and connecting included.

    Raises:
        ValueError: a header that could not be sent as it stands, or a deadline that is none. The URL is judged by `Outbound.send`.
    """

    method: Literal["POST", "GET"]
    url: str
    headers: Mapping[str, str]
    body: bytes
    timeout_seconds: float

    def __post_init__(self) -> None:
        if self.method == "GET" and self.body:
            raise ValueError("a GET has no body")
        if not (math.isfinite(self.timeout_seconds) and self.timeout_seconds > 0):
            raise ValueError(f"the deadline is a number of seconds above 0, found {self.timeout_seconds}")
        if len({name.lower() for name in self.headers}) != len(self.headers):
            raise ValueError("a header name occurs twice")
        for name, value in self.headers.items():
            if not _may_be_set(name):
                raise ValueError(f"{name!r} is not a header that may be set here")
            if _HEADER_VALUE.fullmatch(value) is None:
                raise ValueError(f"the value of header {name} is not visible ASCII")


class Outbound:
    """The door, to be held open with `async with`.

    Nothing is taken from the environment (proxies, .netrc), nothing is remembered between requests but open connections.

    Args:
        policy: where it may lead; checked on the URL and on every address before a connection is made to it.
        clock: measures `duration_ms`.
        resolve: turns a host name and port into addresses; the system's resolver by default.
        ssl_context: verifies endpoints; the system's authorities by default.
        transport: replaces connections altogether, in tests; the URL is still checked.
    """

    def __init__(
        self,
        policy: EgressPolicy,
        *,
        clock: Clock,
        resolve: Resolve | None = None,
        ssl_context: ssl.SSLContext | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Open nothing yet."""
        self._policy = policy
        self._clock = clock
        self._transport = (
            _StandIn(transport) if transport else GuardedTransport(policy, resolve=resolve or resolve_by_system, ssl_context=ssl_context)
        )
        self._is_guarded = transport is None
        self._check_url = lru_cache(maxsize=CHECKED_URLS)(partial(check_url, policy=policy))
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Close the connections kept for reuse."""
        await self._transport.aclose()

    async def send(self, request: OutgoingRequest) -> Attempt:
        """Send once and return what came of it, whatever the network or the endpoint does.

        `was_sent` is False only where no byte of the request can have left. Only cancellation is raised; a request cancelled in flight
        has unknown outcome.
        """
        started = self._clock.monotonic()
        try:
            destination = self._check_url(request.url)
        except UrlRefused as refused:
            return self._failed(started, Failure.EGRESS_DENIED, refused.detail, was_sent=False)
        errand = Errand(
            destination=destination,
            method=request.method,
            headers={"User-Agent": USER_AGENT, **request.headers, "Accept-Encoding": "identity"},
            body=request.body,
            connect_seconds=request.timeout_seconds,
        )
        try:
            async with asyncio.timeout(request.timeout_seconds), self._slots:
                # Another transport says nothing about what it sent: assume that it did.
                errand.may_have_left = not self._is_guarded
                answer = await self._transport.exchange(errand)
        except UrlRefused as refused:
            return self._failed(started, Failure.EGRESS_DENIED, refused.detail, was_sent=False)
        except httpx.HTTPError as error:
            was_sent = errand.may_have_left and not isinstance(error, _NOT_CONNECTED)
            return self._failed(
                started, _failure_of(error), f"{str(error)[:MAX_WORDS_CHARACTERS]}{_status_seen(errand)}", was_sent=was_sent
            )
        except TimeoutError:
            missing = "complete answer" if errand.may_have_left else "connection"
            detail = f"no {missing} within {request.timeout_seconds:g} s{_status_seen(errand)}"
            return self._failed(started, Failure.TIMEOUT, detail, was_sent=errand.may_have_left)
        return Attempt(
            status=answer.status,
            failure=None,
            was_sent=True,
            retry_after=answer.headers.get("retry-after"),
            location=answer.headers.get("location"),
            detail=_detail(answer),
            duration_ms=self._milliseconds_since(started),
            body=answer.body if _is_plain(answer) else b"",
        )

    def _failed(self, started: float, failure: Failure, detail: str, *, was_sent: bool) -> Attempt:
        return Attempt(
            status=None,
            failure=failure,
            was_sent=was_sent,
            retry_after=None,
            location=None,
            detail=detail,
            duration_ms=self._milliseconds_since(started),
        )

    def _milliseconds_since(self, started: float) -> int:
        return round((self._clock.monotonic() - started) * 1_000)


class _StandIn:
    """A transport of httpx in the place of ours."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport

    async def exchange(self, errand: Errand) -> Answer:
        # The host is said here, since httpx would decode an international name for it, and raise for an invalid one.
        headers = {"Host": errand.destination.authority, **errand.headers}
        outgoing = httpx.Request(errand.method, errand.destination.url, headers=headers, content=errand.body)
        response = await self._transport.handle_async_request(outgoing)
        body = await response.aread()
        return Answer(status=response.status_code, headers=dict(response.headers), body=body[:MAX_RESPONSE_BYTES])

    async def aclose(self) -> None:
        await self._transport.aclose()


def _is_plain(answer: Answer) -> bool:
    """Tell whether the body came as it is, which was asked for."""
    return answer.headers.get("content-encoding", "identity") == "identity"


def _detail(answer: Answer) -> str:
    if not _is_plain(answer):
        return f"(a body in {answer.headers['content-encoding'][:20]}, not shown)"
    return answer.body[:MAX_EXCERPT_BYTES].decode("utf-8", "replace")


def _failure_of(error: httpx.HTTPError) -> Failure:
    """Return the class of a transport's error, ours or another's."""
    match error:
        case NotConnected():
            return error.failure
        case httpx.ConnectError() | httpx.ConnectTimeout() | httpx.PoolTimeout():
            return Failure.CONNECT
        case httpx.TimeoutException():
            return Failure.TIMEOUT
        case httpx.NetworkError():
            return Failure.RESET
        case _:
            return Failure.PROTOCOL


def _status_seen(errand: Errand) -> str:
    return "" if errand.status is None else f" (after status {errand.status})"
