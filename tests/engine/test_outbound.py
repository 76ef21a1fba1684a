"""The one door to the network, against real sockets: what every kind of endpoint, resolver and certificate comes to."""

import asyncio
import contextlib
import gzip
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import h11
import httpx
import pytest
import trustme
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.domain.egress import EgressPolicy
from app.domain.retry import Attempt, Failure
from app.engine import transport
from app.engine.clock import SystemClock
from app.engine.outbound import MAX_EXCERPT_BYTES, Outbound, OutgoingRequest
from app.engine.transport import MAX_CONNECTIONS, MAX_RESPONSE_BYTES, Resolve, resolve_by_system
from tests.fakes import FakeEndpoint, Mode, Reply
from tests.faults.endpoint import EndpointProcess

LOOPBACK = EgressPolicy.parse("127.0.0.0/8, ::1")
HOST = "billing.test"
LISTED_HOST = EgressPolicy.parse(HOST)
# Reading all authorities takes longer than most of these tests.
SYSTEM_TRUST = ssl.create_default_context()
# Long enough never to pass by chance on a busy machine, and the failing tests end without waiting for it.
AMPLE_SECONDS = 20.0
SHORT_SECONDS = 0.3


# What answers are made of, to be put together in any order.
WIRE = [
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 503 Busy\r\n",
    b"HTTP/1.0 202\r\n",
    b"HTTP/1.1 204 \r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"Content-Length: 5\r\n",
    b"Content-Length: 0\r\n",
    b"Content-Length: 7, 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n",
    b"Retry-After: \xff\r\n",
    b"Location:\r\n",
    b" folded\r\n",
    b"\r\n",
    b"hello",
    b"5\r\nhello\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffffffff\r\n",
    b"\x00",
    b"\n",
]

# What nearly plain answers are made of: a status line, fields, a body.
STATUS_LINES = [
    b"HTTP/1.1 200 OK",
    b"HTTP/1.1 200 ",
    b"HTTP/1.1 200",
    b"HTTP/1.0 200 OK",
    b"HTTP/1.1 503 Busy",
    b"HTTP/1.1 204 No",
    b"HTTP/1.1 304 X",
]
LENGTHS = [b"Content-Length: 5", b"content-length:5 ", b"Content-Length: 05", b"Content-Length: +5", b"Transfer-Encoding: chunked", b""]
FIELDS = [
    b"Retry-After: 7",
    b"Location:  /x ",
    b"Connection: close",
    b"Connection: keep-alive",
    b"X:\ta",
    b"X: \xff",
    b" folded",
    b"X : a",
    LENGTHS[0],
]
BODIES = [b"hello", b"hello", b"", b"hell", b"hello!", b"5\r\nhello\r\n0\r\n\r\n"]


class Names:
    """A resolver with an answer per question, the last one again and again; it counts the questions."""

    def __init__(self, *answers: Sequence[str] | OSError) -> None:
        self.questions: list[tuple[str, int]] = []
        self._answers = list(answers)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """Answer or fail as told."""
        self.questions.append((host, port))
        answer = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer


@pytest.fixture
async def endpoint() -> AsyncIterator[FakeEndpoint]:
    """Open an endpoint in the clear."""
    async with FakeEndpoint() as listening:
        yield listening


@pytest.fixture
async def door() -> AsyncIterator[Outbound]:
    """Open the door as it is, leading to loopback."""
    async with Outbound(LOOPBACK, clock=SystemClock(), ssl_context=SYSTEM_TRUST) as opened:
        yield opened


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Make an authority for one test run."""
    return trustme.CA()


def request_to(url: str, *, timeout_seconds: float = AMPLE_SECONDS, body: bytes = b'{"credit_id":1}') -> OutgoingRequest:
    """Return an undo as the service sends it."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": "undo-1"}
    return OutgoingRequest(method="POST", url=url, headers=headers, body=body, timeout_seconds=timeout_seconds)


def door_by(resolve: Resolve, policy: EgressPolicy = LISTED_HOST, ssl_context: ssl.SSLContext | None = None) -> Outbound:
    """Return a door whose names are ours."""
    return Outbound(policy, clock=SystemClock(), resolve=resolve, ssl_context=ssl_context or SYSTEM_TRUST)


def server_context(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    """Return a server's context with a certificate for `names`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    return context


def client_context(authority: trustme.CA) -> ssl.SSLContext:
    """Return a context that trusts that authority."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@contextlib.contextmanager
def silent_listener(*, backlog: int = 8) -> Iterator[int]:
    """Yield the port of a socket that connects and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as listening:
        yield listening.getsockname()[1]


async def test_request_arrives_byte_for_byte_when_sent(endpoint: FakeEndpoint, door: Outbound) -> None:
    """Path, query, headers and body are what the caller said, with only the framing added."""
    target = "/a/../b;c=%2F%2f?x=/?@:&y[]=1"
    body = '{"z":1.0, "a":"é"}\n'.encode()

    attempt = await door.send(request_to(endpoint.url(target), body=body))

    assert (attempt.status, attempt.failure, attempt.was_sent) == (200, None, True)
    (received,) = endpoint.received
    assert (received.method, received.target, received.body) == ("POST", target, body)
    assert {name.decode(): value.decode() for name, value in received.headers} == {
        "Host": f"127.0.0.1:{endpoint.port}",
        "User-Agent": "countermand",
        "Content-Type": "application/json",
        "Idempotency-Key": "undo-1",
        "Accept-Encoding": "identity",
        "Content-Length": str(len(body)),
    }


async def test_get_has_no_body_when_polling(endpoint: FakeEndpoint, door: Outbound) -> None:
    """A 202's Location is polled with a plain GET; the caller may name its own user agent."""
    headers = {"User-Agent": "countermand/1"}
    request = OutgoingRequest(method="GET", url=endpoint.url("/jobs/1"), headers=headers, body=b"", timeout_seconds=AMPLE_SECONDS)

    attempt = await door.send(request)

    assert attempt.status == 200
    (received,) = endpoint.received
    assert (received.method, received.body, received.header("Content-Length")) == ("GET", b"", None)
    assert received.header("User-Agent") == "countermand/1"


@pytest.mark.parametrize("mode", [Mode.NORMAL, Mode.CHUNKED, Mode.CLOSE_DELIMITED, Mode.INTERIM, Mode.EXTRA_BYTES])
@pytest.mark.parametrize("status", [200, 202, 404, 503, 299, 599])
async def test_status_counts_when_the_answer_is_complete(endpoint: FakeEndpoint, door: Outbound, mode: Mode, status: int) -> None:
    """However the end of the body is told, the answer is the status with what goes with it."""
    headers = {"Retry-After": "7", "Location": "/jobs/1"}
    endpoint.script("/undo", Reply(status=status, headers=headers, body=b'{"error":"x"}', mode=mode))

    attempt = await door.send(request_to(endpoint.url("/undo")))

    assert attempt == Attempt(
        status=status,
        failure=None,
        was_sent=True,
        retry_after="7",
        location="/jobs/1",
        detail='{"error":"x"}',
        duration_ms=attempt.duration_ms,
        body=b'{"error":"x"}',
    )


async def test_status_counts_when_there_is_no_body(endpoint: FakeEndpoint, door: Outbound) -> None:
    """A 204 is complete with its head."""
    endpoint.script("/undo", Reply(status=204))

    attempt = await door.send(request_to(endpoint.url("/undo")))

    assert (attempt.status, attempt.detail, attempt.location, attempt.retry_after, attempt.body) == (204, "", None, None, b"")


@pytest.mark.parametrize(
    ("reply", "failure"),
    [
        (Reply(mode=Mode.RESET_BEFORE_REPLY), Failure.RESET),
        (Reply(mode=Mode.RESET_AFTER_PROCESSING), Failure.RESET),
        (Reply(mode=Mode.RESET_IN_BODY), Failure.RESET),
        (Reply(mode=Mode.RESET_IN_BODY, status=422), Failure.RESET),
        (Reply(mode=Mode.CLOSE_WITHOUT_REPLY), Failure.RESET),
        (Reply(mode=Mode.NOT_HTTP), Failure.PROTOCOL),
        (Reply(mode=Mode.WRONG_LENGTH), Failure.PROTOCOL),
        (Reply(mode=Mode.HEADER_FLOOD), Failure.PROTOCOL),
        (Reply(mode=Mode.ENDLESS_CONTINUE), Failure.PROTOCOL),
        (Reply(status=101), Failure.PROTOCOL),
        (Reply(status=99), Failure.PROTOCOL),
        (Reply(headers={"X-Bad": "a\x00b"}), Failure.PROTOCOL),
        (Reply(headers={"Transfer-Encoding": "rot13"}), Failure.PROTOCOL),
    ],
    ids=lambda value: f"{value.mode}-{value.status}" if isinstance(value, Reply) else str(value),
)
async def test_outcome_is_unknown_when_the_answer_is_broken(endpoint: FakeEndpoint, door: Outbound, reply: Reply, failure: Failure) -> None:
    """Once the request may have left, no half answer settles anything, whatever its status line said."""
    endpoint.script("/undo", reply)

    attempt = await door.send(request_to(endpoint.url("/undo")))

    assert (attempt.status, attempt.failure, attempt.was_sent) == (None, failure, True)
    assert 0 < len(attempt.detail) < 400
    assert len(endpoint.received) == 1


@pytest.mark.parametrize("mode", [Mode.HANG, Mode.DRIP, Mode.DRIP_HEAD])
async def test_attempt_ends_by_its_deadline_when_the_endpoint_is_slow(endpoint: FakeEndpoint, door: Outbound, mode: Mode) -> None:
    """The deadline is one for the whole attempt: bytes that keep coming do not extend it."""
    endpoint.script("/undo", Reply(mode=mode))

    attempt = await door.send(request_to(endpoint.url("/undo"), timeout_seconds=SHORT_SECONDS))

    assert (attempt.failure, attempt.was_sent) == (Failure.TIMEOUT, True)
    assert SHORT_SECONDS * 1_000 - 10 <= attempt.duration_ms < AMPLE_SECONDS * 1_000 / 2
    assert ("after status 200" in attempt.detail) is (mode is Mode.DRIP)
    await endpoint.wait_for_answers(1)  # the connection was dropped, so the endpoint noticed


async def test_answer_is_cut_when_it_never_ends(endpoint: FakeEndpoint, door: Outbound) -> None:
    """The status counts, 64 KiB are read, the rest is refused, and memory stays flat."""
    endpoint.script("/undo", Reply(mode=Mode.ENDLESS))
    await door.send(request_to(endpoint.url("/warm-up")))
    tracemalloc.start()

    attempt = await door.send(request_to(endpoint.url("/undo")))
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert (attempt.status, len(attempt.detail), len(attempt.body)) == (200, MAX_EXCERPT_BYTES, MAX_RESPONSE_BYTES)
    assert peak < 4 * 2**20, "the endpoint's own buffers included"
    await endpoint.wait_for_closed_connections(1)


async def test_answer_is_cut_when_it_is_five_megabytes(endpoint: FakeEndpoint, door: Outbound) -> None:
    """A chatty endpoint is no failure; what is kept is the beginning."""
    endpoint.script("/undo", Reply(status=500, body=b"<p>" + b"x" * 5_000_000))

    attempt = await door.send(request_to(endpoint.url("/undo")))

    assert attempt.status == 500
    assert attempt.detail == "<p>" + "x" * (MAX_EXCERPT_BYTES - 3)
    assert attempt.body == b"<p>" + b"x" * (MAX_RESPONSE_BYTES - 3)


async def test_body_is_not_unpacked_when_it_is_compressed(endpoint: FakeEndpoint, door: Outbound) -> None:
    """A compression bomb stays packed: we did not ask for it."""
    bomb = gzip.compress(b"\0" * 20_000_000)
    endpoint.script("/undo", Reply(status=502, headers={"Content-Encoding": "gzip"}, body=bomb))
    await door.send(request_to(endpoint.url("/warm-up")))
    tracemalloc.start()

    attempt = await door.send(request_to(endpoint.url("/undo")))
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert (attempt.status, attempt.detail, attempt.body) == (502, "(a body in gzip, not shown)", b"")
    assert peak < 2 * 2**20


async def test_detail_is_text_when_the_body_is_not(endpoint: FakeEndpoint, door: Outbound) -> None:
    """Bytes that are no UTF-8 become replacement characters."""
    endpoint.script("/undo", Reply(status=500, body=b"caf\xe9 \x1b[31m"))

    attempt = await door.send(request_to(endpoint.url("/undo")))

    assert attempt.detail == "caf\ufffd \x1b[31m"
    assert attempt.body == b"caf\xe9 \x1b[31m"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirect_is_reported_and_not_followed_when_answered(endpoint: FakeEndpoint, door: Outbound, status: int) -> None:
    """The place that it points to hears nothing."""
    async with FakeEndpoint() as sentinel:
        endpoint.script("/undo", Reply(status=status, headers={"Location": sentinel.url("/stolen")}))

        attempt = await door.send(request_to(endpoint.url("/undo")))

        assert (attempt.status, attempt.location) == (status, sentinel.url("/stolen"))
        assert sentinel.connections == 0


async def test_nothing_is_remembered_when_cookies_are_set(endpoint: FakeEndpoint, door: Outbound) -> None:
    """Two undos share a connection and nothing else."""
    endpoint.script("/undo", Reply(headers={"Set-Cookie": "session=1"}))

    for _ in range(2):
        await door.send(request_to(endpoint.url("/undo")))

    assert [request.header("Cookie") for request in endpoint.received] == [None, None]
    assert endpoint.connections == 1


async def test_environment_is_ignored_when_it_names_proxies(
    endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither a proxy nor credentials come from the environment."""
    async with FakeEndpoint() as sentinel:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, sentinel.origin)
            monkeypatch.setenv(name.lower(), sentinel.origin)
        netrc = tmp_path / ".netrc"
        netrc.write_text("machine 127.0.0.1 login operator password secret\n", encoding="utf-8")
        monkeypatch.setenv("NETRC", str(netrc))
        monkeypatch.setenv("HOME", str(tmp_path))

        async with Outbound(LOOPBACK, clock=SystemClock()) as door:
            attempt = await door.send(request_to(endpoint.url("/undo")))

        assert attempt.status == 200
        assert endpoint.received[0].header("Authorization") is None
        assert sentinel.connections == 0


async def test_connection_is_reused_when_the_endpoint_keeps_it(endpoint: FakeEndpoint, door: Outbound) -> None:
    """Undos in a row to one endpoint cost one handshake."""
    for _ in range(3):
        assert (await door.send(request_to(endpoint.url("/undo")))).status == 200

    assert [request.connection for request in endpoint.received] == [1, 1, 1]


@pytest.mark.parametrize("mode", [Mode.CLOSE_DELIMITED, Mode.EXTRA_BYTES, Mode.ENDLESS, Mode.WRONG_LENGTH])
async def test_connection_is_not_reused_when_its_answer_was_unclean(endpoint: FakeEndpoint, door: Outbound, mode: Mode) -> None:
    """Left-over bytes are never taken for the answer to the next undo."""
    endpoint.script("/undo", Reply(mode=mode), Reply(status=503))

    await door.send(request_to(endpoint.url("/undo")))
    second = await door.send(request_to(endpoint.url("/undo")))

    assert second.status == 503
    assert [request.connection for request in endpoint.received] == [1, 2]


async def test_undo_is_sent_once_when_a_kept_connection_breaks(endpoint: FakeEndpoint, door: Outbound) -> None:
    """A reset on a reused connection is an unknown outcome, and repeating it is not the door's to decide."""
    endpoint.script("/undo", Reply(), Reply(mode=Mode.RESET_AFTER_PROCESSING))

    await door.send(request_to(endpoint.url("/undo")))
    second = await door.send(request_to(endpoint.url("/undo")))

    assert (second.failure, second.was_sent) == (Failure.RESET, True)
    assert len(endpoint.received) == 2


async def test_new_connection_is_made_when_the_endpoint_closed_the_kept_one(door: Outbound) -> None:
    """An endpoint that restarts between two undos costs no attempt."""
    async with FakeEndpoint() as before:
        assert (await door.send(request_to(before.url("/undo")))).status == 200
    async with FakeEndpoint(port=before.port) as after:
        assert (await door.send(request_to(after.url("/undo")))).status == 200
        assert after.connections == 1


async def test_kept_connection_is_closed_when_nobody_needs_it(
    endpoint: FakeEndpoint, door: Outbound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We close first, before the endpoint does in the middle of an undo."""
    monkeypatch.setattr(transport, "KEEP_ALIVE_SECONDS", 0.05)

    await door.send(request_to(endpoint.url("/undo")))

    await endpoint.wait_for_closed_connections(1)


async def test_kept_connection_is_dropped_when_the_endpoint_speaks_unasked(door: Outbound) -> None:
    """What an endpoint sends between two undos is neither buffered nor ever an answer."""
    may_speak, dropped = asyncio.Event(), asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
        await reader.readuntil(b'{"credit_id":1}')
        writer.write(answer)
        await may_speak.wait()
        writer.write(answer)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        dropped.set()
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    async with server:
        attempt = await door.send(request_to(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/undo"))
        may_speak.set()
        async with asyncio.timeout(transport.KEEP_ALIVE_SECONDS / 2):
            await dropped.wait()

    assert attempt.status == 200


async def test_connections_are_closed_when_the_door_is(endpoint: FakeEndpoint) -> None:
    """Nothing stays open behind a stopped service."""
    async with Outbound(LOOPBACK, clock=SystemClock()) as door:
        await asyncio.gather(*(door.send(request_to(endpoint.url("/undo"))) for _ in range(3)))

    await endpoint.wait_for_closed_connections(endpoint.connections)


async def test_connection_is_not_kept_when_the_door_closed_meanwhile(endpoint: FakeEndpoint) -> None:
    """A request that outlives the door still gets its answer, and leaves nothing open."""
    gate = asyncio.Event()
    endpoint.script("/undo", Reply(gate=gate))
    async with Outbound(LOOPBACK, clock=SystemClock(), ssl_context=SYSTEM_TRUST) as door:
        task = asyncio.create_task(door.send(request_to(endpoint.url("/undo"))))
        await endpoint.wait_for_requests(1)
    gate.set()

    assert (await task).status == 200
    await endpoint.wait_for_closed_connections(1, transport.KEEP_ALIVE_SECONDS / 2)


async def test_concurrency_is_bounded_when_many_send(endpoint: FakeEndpoint, door: Outbound) -> None:
    """The backstop holds: the request too many waits, within its deadline, and goes out when a slot is free."""
    gate = asyncio.Event()
    endpoint.script("/undo", Reply(gate=gate))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(door.send(request_to(endpoint.url("/undo")))) for _ in range(MAX_CONNECTIONS + 5)]
        await endpoint.wait_for_requests(MAX_CONNECTIONS)
        late = await door.send(request_to(endpoint.url("/undo"), timeout_seconds=SHORT_SECONDS))
        gate.set()

    assert (late.failure, late.was_sent) == (Failure.TIMEOUT, False)
    assert {task.result().status for task in tasks} == {200}
    assert endpoint.max_concurrency == MAX_CONNECTIONS


async def test_cancellation_passes_when_a_request_is_in_flight(endpoint: FakeEndpoint, door: Outbound) -> None:
    """A stopping worker is not held up, and the connection goes with the task."""
    endpoint.script("/undo", Reply(mode=Mode.HANG))
    task = asyncio.create_task(door.send(request_to(endpoint.url("/undo"))))
    await endpoint.wait_for_requests(1)

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    await endpoint.wait_for_closed_connections(1)


async def test_duration_is_the_clocks_when_measured(endpoint: FakeEndpoint) -> None:
    """Milliseconds come from the injected clock."""

    class Ticking(SystemClock):
        now = 100.0

        def monotonic(self) -> float:
            self.now += 1.5
            return self.now

    async with Outbound(LOOPBACK, clock=Ticking()) as door:
        assert (await door.send(request_to(endpoint.url("/undo")))).duration_ms == 1_500
        assert (await door.send(request_to("http://10.0.0.1/"))).duration_ms == 1_500


async def test_connect_fails_when_nobody_listens(door: Outbound) -> None:
    """A refused connection certainly processed nothing."""
    with silent_listener() as port:
        pass

    attempt = await door.send(request_to(f"http://127.0.0.1:{port}/undo"))

    assert (attempt.failure, attempt.was_sent) == (Failure.CONNECT, False)
    assert attempt.detail == f"127.0.0.1 port {port}: refused"


async def test_connect_fails_before_the_deadline_when_packets_are_swallowed(door: Outbound) -> None:
    """Half of the time is left when a lone address does not answer."""
    loop = asyncio.get_running_loop()
    with silent_listener(backlog=0) as port, contextlib.ExitStack() as stack:
        # A full accept queue makes the kernel drop the next handshake.
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.settimeout(0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(loop.sock_connect(filler, ("127.0.0.1", port)), 0.1)

        attempt = await door.send(request_to(f"http://127.0.0.1:{port}/undo", timeout_seconds=2 * SHORT_SECONDS))

    assert (attempt.failure, attempt.was_sent) == (Failure.CONNECT, False)
    assert attempt.detail.endswith("no reply in time")


async def test_next_address_is_tried_when_the_first_refuses(endpoint: FakeEndpoint) -> None:
    """A name with several addresses is as good as its best one."""
    names = Names(["127.0.0.9", "127.0.0.1"])
    async with door_by(names) as door:
        attempt = await door.send(request_to(f"http://{HOST}:{endpoint.port}/undo"))

    assert attempt.status == 200
    assert endpoint.received[0].header("Host") == f"{HOST}:{endpoint.port}"
    assert names.questions == [(HOST, endpoint.port)]


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), f"{HOST}: Name or service not known"),
        (OSError("resolver down"), f"{HOST}: OSError"),
        ([], f"{HOST}: no address"),
    ],
)
async def test_lookup_failure_is_its_own_class_when_a_name_does_not_resolve(answer: Sequence[str] | OSError, detail: str) -> None:
    """No address, no connection: certainly not processed, and never a way around the check."""
    async with door_by(Names(answer)) as door:
        attempt = await door.send(request_to(f"http://{HOST}/undo"))

    assert (attempt.failure, attempt.was_sent, attempt.detail) == (Failure.DNS, False, detail)


async def test_deadline_covers_the_lookup_when_the_resolver_hangs() -> None:
    """Waiting for a name is part of the attempt."""
    never = asyncio.Event()

    async def hang(_host: str, _port: int) -> Sequence[str]:
        await never.wait()
        return []

    async with door_by(hang) as door:
        attempt = await door.send(request_to(f"http://{HOST}/undo", timeout_seconds=SHORT_SECONDS))

    assert (attempt.failure, attempt.was_sent, attempt.detail) == (Failure.TIMEOUT, False, "no connection within 0.3 s")


async def test_system_resolver_answers_when_asked_for_localhost() -> None:
    """The default resolver is the machine's."""
    assert set(await resolve_by_system("localhost", 80)) & {"127.0.0.1", "::1"}


async def test_rebound_name_is_refused_when_it_turns_to_loopback() -> None:
    """Each connect resolves again and is checked again: a name that was good once is not good for ever."""
    policy = EgressPolicy.parse("127.0.0.2")
    names = Names(["127.0.0.2"], ["127.0.0.1"])
    async with FakeEndpoint() as sentinel, door_by(names, policy) as door:
        async with FakeEndpoint(host="127.0.0.2", port=sentinel.port, default=Reply(mode=Mode.CLOSE_DELIMITED)) as good:
            first = await door.send(request_to(good.url("/undo").replace("127.0.0.2", HOST)))
            second = await door.send(request_to(good.url("/undo").replace("127.0.0.2", HOST)))

        assert first.status == 200
        assert (second.failure, second.was_sent) == (Failure.EGRESS_DENIED, False)
        assert sentinel.connections == 0
    assert len(names.questions) == 2, "one lookup for each connect: what was checked is what was connected to"


@pytest.mark.parametrize(
    "answer", [["127.0.0.2", "127.0.0.1"], ["127.0.0.1", "127.0.0.2"], ["127.0.0.2", "::1"], ["127.0.0.2", "::ffff:7f00:1"]]
)
async def test_name_is_refused_when_one_of_its_addresses_is(answer: list[str]) -> None:
    """A mixed answer is an attack or a mistake: nobody hears anything."""
    policy = EgressPolicy.parse("127.0.0.2")
    async with (
        FakeEndpoint() as sentinel,
        FakeEndpoint(host="127.0.0.2", port=sentinel.port) as good,
        door_by(Names(answer), policy) as door,
    ):
        attempt = await door.send(request_to(f"http://{HOST}:{sentinel.port}/undo"))

        assert (attempt.failure, attempt.was_sent) == (Failure.EGRESS_DENIED, False)
        assert (sentinel.connections, good.connections) == (0, 0)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "2130706433", "0x7f.1", "localhost", "localhost.", "[::1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]"]
)
async def test_url_is_refused_when_it_leads_inside(endpoint: FakeEndpoint, host: str) -> None:
    """Written-out addresses are refused without a packet, as an answer and not as an exception."""
    async with Outbound(EgressPolicy(), clock=SystemClock()) as door:
        attempt = await door.send(request_to(f"http://{host}:{endpoint.port}/undo"))

    assert (attempt.failure, attempt.was_sent) == (Failure.EGRESS_DENIED, False)
    assert attempt.detail
    assert endpoint.connections == 0


async def test_international_name_stays_encoded_when_sent(endpoint: FakeEndpoint) -> None:
    """The name that is checked, resolved and sent is the ASCII one, for the policy, the resolver and the endpoint alike."""
    names = Names(["127.0.0.1"])
    async with door_by(names, EgressPolicy.parse("bücher.test")) as door:
        attempt = await door.send(request_to(f"http://xn--bcher-kva.test:{endpoint.port}/undo"))

    assert attempt.status == 200
    assert names.questions == [("xn--bcher-kva.test", endpoint.port)]
    assert endpoint.received[0].header("Host") == f"xn--bcher-kva.test:{endpoint.port}"


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f000001", "LOCALHOST", "localhost."])
async def test_host_is_canonical_when_sent(endpoint: FakeEndpoint, door: Outbound, host: str) -> None:
    """Every spelling of an allowed host goes out in its one form."""
    attempt = await door.send(request_to(f"http://{host}:{endpoint.port}/undo"))

    assert attempt.status == 200
    name = "localhost" if "local" in host.lower() else "127.0.0.1"
    assert endpoint.received[0].header("Host") == f"{name}:{endpoint.port}"


async def test_ipv6_endpoint_is_reached_when_allowed(door: Outbound) -> None:
    """Brackets are put where they belong."""
    async with FakeEndpoint(host="::1") as endpoint:
        attempt = await door.send(request_to(endpoint.url("/undo")))

    assert attempt.status == 200
    assert endpoint.received[0].header("Host") == f"[::1]:{endpoint.port}"


async def test_tls_names_the_host_when_the_certificate_is_good(authority: trustme.CA) -> None:
    """The connection goes to the checked address, name indication and certificate are the host's."""
    context = server_context(authority, HOST)
    indicated: list[str | None] = []
    context.sni_callback = lambda _socket, name, _context: indicated.append(name)
    async with FakeEndpoint(ssl_context=context) as endpoint, door_by(Names(["127.0.0.1"]), ssl_context=client_context(authority)) as door:
        attempts = [await door.send(request_to(f"https://{HOST}:{endpoint.port}/undo")) for _ in range(2)]

    assert [attempt.status for attempt in attempts] == [200, 200]
    assert indicated == [HOST], "the second undo took the same connection"


async def test_answer_is_cut_when_it_never_ends_over_tls(authority: trustme.CA) -> None:
    """The bounds hold behind TLS as well."""
    replies = {"/endless": [Reply(mode=Mode.ENDLESS)], "/big": [Reply(status=500, body=b"x" * 1_000_000)], "/drip": [Reply(mode=Mode.DRIP)]}
    endpoint = FakeEndpoint(replies, ssl_context=server_context(authority, HOST))
    async with endpoint, door_by(Names(["127.0.0.1"]), ssl_context=client_context(authority)) as door:
        url = f"https://{HOST}:{endpoint.port}"

        assert (await door.send(request_to(f"{url}/endless"))).status == 200
        assert (await door.send(request_to(f"{url}/big"))).status == 500
        assert (await door.send(request_to(f"{url}/drip", timeout_seconds=SHORT_SECONDS))).failure is Failure.TIMEOUT
        await endpoint.wait_for_closed_connections(3)


async def test_tls_fails_when_the_certificate_is_for_another_host(authority: trustme.CA) -> None:
    """A good certificate for a wrong name is no certificate."""
    endpoint = FakeEndpoint(ssl_context=server_context(authority, "other.test"))
    async with endpoint, door_by(Names(["127.0.0.1"]), ssl_context=client_context(authority)) as door:
        attempt = await door.send(request_to(f"https://{HOST}:{endpoint.port}/undo"))

    assert (attempt.failure, attempt.was_sent) == (Failure.TLS, False)
    assert "Hostname mismatch" in attempt.detail
    assert endpoint.received == []


async def test_tls_fails_when_nobody_vouches_for_the_certificate(authority: trustme.CA) -> None:
    """An unknown authority is refused by the default context."""
    endpoint = FakeEndpoint(ssl_context=server_context(authority, HOST))
    async with endpoint, Outbound(LISTED_HOST, clock=SystemClock(), resolve=Names(["127.0.0.1"])) as door:
        attempt = await door.send(request_to(f"https://{HOST}:{endpoint.port}/undo"))

    assert (attempt.failure, attempt.was_sent) == (Failure.TLS, False)
    assert attempt.detail.startswith(f"{HOST}: certificate:")
    assert endpoint.received == []


async def test_nothing_goes_in_the_clear_when_the_endpoint_has_no_tls() -> None:
    """An https URL is never sent without TLS: the endpoint sees a handshake it cannot read."""
    seen = bytearray()
    done = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await reader.read(65_536))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()
        done.set()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    async with server, door_by(Names(["127.0.0.1"])) as door:
        attempt = await door.send(request_to(f"https://{HOST}:{server.sockets[0].getsockname()[1]}/undo"))
        await asyncio.wait_for(done.wait(), AMPLE_SECONDS)

    assert (attempt.failure, attempt.was_sent) == (Failure.TLS, False)
    assert seen[0] == 0x16, "a TLS handshake record"
    assert b"undo" not in seen


async def test_deadline_covers_the_handshake_when_the_endpoint_is_silent(door: Outbound) -> None:
    """A handshake that never ends sent no request."""
    with silent_listener() as port:
        attempt = await door.send(request_to(f"https://127.0.0.1:{port}/undo", timeout_seconds=SHORT_SECONDS))

    assert (attempt.failure, attempt.was_sent) == (Failure.TIMEOUT, False)


@pytest.mark.parametrize(
    ("error", "failure", "was_sent"),
    [
        (httpx.ConnectError("x"), Failure.CONNECT, False),
        (httpx.ConnectTimeout("x"), Failure.CONNECT, False),
        (httpx.PoolTimeout("x"), Failure.CONNECT, False),
        (httpx.ReadTimeout("x"), Failure.TIMEOUT, True),
        (httpx.WriteTimeout("x"), Failure.TIMEOUT, True),
        (httpx.ReadError("x"), Failure.RESET, True),
        (httpx.WriteError("x"), Failure.RESET, True),
        (httpx.RemoteProtocolError("x"), Failure.PROTOCOL, True),
        (TimeoutError(), Failure.TIMEOUT, True),
    ],
)
async def test_failure_is_classed_when_another_transport_is_given(error: Exception, failure: Failure, *, was_sent: bool) -> None:
    """A transport of httpx can stand in; what it does not tell counts as sent."""

    def fail(_request: httpx.Request) -> httpx.Response:
        raise error

    async with Outbound(EgressPolicy(), clock=SystemClock(), transport=httpx.MockTransport(fail)) as door:
        attempt = await door.send(request_to("https://billing.example/undo"))

    assert (attempt.failure, attempt.was_sent) == (failure, was_sent)


async def test_url_is_checked_when_another_transport_is_given() -> None:
    """There is no way round the policy, and the transport gets the canonical URL."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(503, headers={"Retry-After": "5"}, text="busy")

    async with Outbound(EgressPolicy(), clock=SystemClock(), transport=httpx.MockTransport(answer)) as door:
        refused = await door.send(request_to("https://127.1/undo"))
        answered = await door.send(request_to("https://BILLING.example.:443/undo?x=1"))
        await door.send(request_to("https://xn--0.example/undo"))

    assert refused.failure is Failure.EGRESS_DENIED
    assert (answered.status, answered.retry_after, answered.detail) == (503, "5", "busy")
    assert asked == ["https://billing.example/undo?x=1", "https://xn--0.example/undo"]


@given(st.lists(st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(WIRE), max_size=12).map(b"".join)), min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_every_answer_comes_to_an_attempt_when_it_is_any_bytes(answers: list[bytes]) -> None:
    """No endpoint can make the door raise, or report a status that it did not send."""
    left = list(answers)

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while left:
                await reader.readuntil(b'{"credit_id":1}')
                writer.write(left.pop(0))
                if len(left) % 2:
                    break  # half of the answers end their connection
        writer.close()

    async def converse() -> list[Attempt]:
        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        async with server, Outbound(LOOPBACK, clock=SystemClock(), ssl_context=SYSTEM_TRUST) as door:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/undo"
            return [await door.send(request_to(url, timeout_seconds=0.05)) for _ in answers]

    attempts = asyncio.run(converse())

    assert len(attempts) == len(answers)
    for attempt in attempts:
        assert attempt.status in {None, 200, 202, 204, 503}
        # A busy machine may need longer to connect than this deadline allows.
        assert attempt.failure in {None, Failure.CONNECT, Failure.PROTOCOL, Failure.RESET, Failure.TIMEOUT}


async def test_connection_is_not_used_again_when_the_endpoint_says_that_it_will_close_it(door: Outbound) -> None:
    """Whoever announces the end may not have ended it yet: a request on it would be lost, with unknown outcome."""
    connections = 0

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b'{"credit_id":1}')
                writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello")
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/undo"
        attempts = [await door.send(request_to(url)) for _ in range(2)]

    assert [attempt.status for attempt in attempts] == [200, 200]
    assert connections == 2


def read_by_h11(answer: bytes) -> tuple[int, bytes, str | None] | None:
    """Return status, body and Retry-After as h11 alone reads an answer after which the connection ends; None where it reads none."""
    http = h11.Connection(our_role=h11.CLIENT)
    http.send(h11.Request(method="POST", target="/undo", headers=[("Host", "x"), ("Content-Length", "0")]))
    http.send(h11.EndOfMessage())
    http.receive_data(answer)
    http.receive_data(b"")
    status, body, retry_after = 0, b"", ""
    try:
        while not isinstance(event := http.next_event(), h11.EndOfMessage | h11.ConnectionClosed):
            if isinstance(event, h11.Response):
                status = event.status_code
                retry_after = ", ".join(value.decode("ascii") for name, value in event.headers if name == b"retry-after")
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
    except h11.RemoteProtocolError:
        return None
    return status, body, retry_after or None


@given(
    st.tuples(
        st.sampled_from(STATUS_LINES), st.lists(st.sampled_from(FIELDS), max_size=3), st.sampled_from(LENGTHS), st.sampled_from(BODIES)
    )
)
@settings(max_examples=60, deadline=None)
@example((STATUS_LINES[0], [FIELDS[0]], LENGTHS[0], BODIES[0]))
@example((STATUS_LINES[0], [FIELDS[0], FIELDS[6]], LENGTHS[0], BODIES[0]))  # a value that goes on in the next line
@example((STATUS_LINES[0], [FIELDS[0], FIELDS[0]], LENGTHS[0], BODIES[0]))
def test_answer_is_what_h11_reads_when_it_is_plain_or_nearly(parts: tuple[bytes, list[bytes], bytes, bytes]) -> None:
    """The short way for plain answers is no other way: whatever it takes, h11 takes for the same."""
    status_line, fields, length, body = parts
    answer = b"\r\n".join(filter(None, [status_line, *fields, length])) + b"\r\n\r\n" + body

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b'{"credit_id":1}')
        writer.write(answer)
        writer.close()

    async def send() -> Attempt:
        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        async with server, Outbound(LOOPBACK, clock=SystemClock(), ssl_context=SYSTEM_TRUST) as door:
            return await door.send(request_to(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/undo"))

    attempt = asyncio.run(send())

    assert (None if attempt.status is None else (attempt.status, attempt.body, attempt.retry_after)) == read_by_h11(answer)


@given(
    st.text(max_size=40)
    | st.text(alphabet="xn-0a.:/@[]%1", max_size=20).map("http://{}".format)
    | st.from_regex(r"http://xn--[a-z0-9-]{1,12}/")
)
@settings(max_examples=150, deadline=None)
def test_every_url_comes_to_an_attempt_when_it_is_any_text(url: str) -> None:
    """No URL that an agent thinks of can make the door raise."""

    async def send() -> Attempt:
        transport = httpx.MockTransport(lambda _request: httpx.Response(200))
        async with Outbound(EgressPolicy(), clock=SystemClock(), transport=transport) as door:
            return await door.send(request_to(url))

    attempt = asyncio.run(send())

    assert (attempt.status == 200) is (attempt.failure is None)
    assert attempt.failure in {None, Failure.EGRESS_DENIED}


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Name": "a\r\nX-Other: b"},
        {"X-Name": "a\nb"},
        {"X-Name": "a\x00b"},
        {"X-Name": "é"},
        {"X-Name": " padded"},
        {"X-Name": "padded\t"},
        {"X-Name\r\nX-Other": "b"},
        {"X Name": "b"},
        {"": "b"},
        {"X-Näme": "b"},
        {"Host": "evil.example"},
        {"content-length": "0"},
        {"Transfer-Encoding": "chunked"},
        {"Connection": "close"},
        {"Accept-Encoding": "gzip"},
        {"X-Name": "a", "x-name": "b"},
    ],
)
def test_request_cannot_be_made_when_a_header_is_unsafe(headers: dict[str, str]) -> None:
    """A header that could split or reframe the message is a fault of ours, found before anything is sent."""
    with pytest.raises(ValueError, match="header"):
        OutgoingRequest(method="POST", url="https://billing.example/", headers=headers, body=b"", timeout_seconds=1)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_request_cannot_be_made_when_it_has_no_deadline(seconds: float) -> None:
    """Every attempt ends."""
    with pytest.raises(ValueError, match="deadline"):
        OutgoingRequest(method="POST", url="https://billing.example/", headers={}, body=b"", timeout_seconds=seconds)


def test_request_cannot_be_made_when_a_get_has_a_body() -> None:
    """Polling sends nothing."""
    with pytest.raises(ValueError, match="no body"):
        OutgoingRequest(method="GET", url="https://billing.example/", headers={}, body=b"{}", timeout_seconds=1)


async def test_endpoint_process_tells_the_truth_when_it_is_asked_afterwards(tmp_path: Path, door: Outbound) -> None:
    """The log of an endpoint in another process has every request before its answer, and survives a restart of the endpoint."""
    log = tmp_path / "received.jsonl"
    script: dict[str, list[dict[str, object]]] = {
        "/undo": [{"status": 503, "headers": {"Retry-After": "1"}}, {"status": 200, "body": "done"}, {"mode": "hang"}]
    }
    body = b'{"bytes":"\xff"}'

    async with EndpointProcess(log, script) as endpoint:
        attempts = [await door.send(request_to(endpoint.url("/undo"), body=body)) for _ in range(2)]
        hanging = await door.send(request_to(endpoint.url("/undo"), body=body, timeout_seconds=SHORT_SECONDS))
        first_run = endpoint.received()
    async with EndpointProcess(log, port=endpoint.port) as endpoint:
        await door.send(request_to(endpoint.url("/undo"), body=body))

    assert [(attempt.status, attempt.retry_after, attempt.detail) for attempt in attempts] == [(503, "1", "{}"), (200, None, "done")]
    assert hanging.failure is Failure.TIMEOUT
    assert [request.is_applied for request in first_run] == [False, True, False], "the key is known at the third"
    assert [request.number for request in endpoint.received()] == [1, 2, 3, 4]
    assert {(request.body, request.key, request.path) for request in endpoint.received()} == {(body, "undo-1", "/undo")}
    assert sum(request.is_applied for request in endpoint.received()) == 1
    assert log.read_bytes().endswith(b"\n")
