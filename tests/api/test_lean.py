"""The short way answers as the routes would, takes plain requests alone, and loses nothing of the others. Must not measure speed."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from app.cli.framing import BoundedProtocol
from app.domain.errors import Unauthenticated
from app.domain.model import Role
from app.engine.authentication import FRESH_SECONDS, Authenticator
from app.main import Application
from app.storage.database import open_database
from tests.conftest import StartService
from tests.factories import InOnePiece, JsonObject, Service, make_principal_key, owner_connection, undo_at
from tests.fakes import FakeEndpoint
from tests.probes import PATIENCE_SECONDS, through

ORDINARY = {"Range": "bytes=0-"}  # means nothing to a verb, and is not plain
IDS = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
WAYS = re.compile("plain-|ordinary-")
TIMES = re.compile(r"\d{4}-\d\d-\d\dT[0-9:.]+Z")


class HeldClock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        """Return the moment."""
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Move on."""
        self.now += seconds


def told(response: httpx.Response) -> tuple[int, dict[str, str], str]:
    """Return what an answer says, ids and times left out."""
    headers = {name: WAYS.sub("", value) for name, value in response.headers.items() if name != "content-length"}
    return response.status_code, headers, WAYS.sub("", TIMES.sub("TIME", IDS.sub("ID", response.text)))


VERBS: list[tuple[str, JsonObject]] = [
    ("intercept", {"tool": "pay", "payload": '{"amount":1.50}', "step_index": 1}),
    ("intercept", {"tool": "pay", "payload": '{"amount":1.50}', "step_index": 1}),
    ("intercept", {"tool": "pay", "payload": "other", "step_index": 1}),
    ("intercept", {"tool": "pay", "args": {"amount": 2, "to": "Zoë", "deep": [{"n": None}]}, "step_index": 3}),
    ("intercept", {"tool": "pay", "args": {}, "step_index": 2}),
    ("intercept", {"tool": "pay", "payload": "p"}),
    ("intercept", {"tool": "pay", "payload": "p", "args": 1, "step_index": 4}),
    ("intercept", {"tool": "pay", "payload": "p", "step_index": "4"}),
    ("intercept", {"tool": "pay", "payload": "p", "step_index": 4, "more": 1}),
    ("intercept", {"tool": "no tool", "payload": "p", "step_index": 4}),
    ("intercept", {"tool": "unknown", "payload": "p", "step_index": 4, "compensation": {"url": "nonsense", "args": {}}}),
    ("effects/1/commit", {"result": {"charge": "ch_1", "at": 1.50}}),
    ("effects/1/commit", {"result": {"charge": "ch_1", "at": 1.50}}),
    ("effects/1/commit", {"result": {"charge": "ch_2"}}),
    ("effects/3/commit", {"result": None}),
    ("effects/9/commit", {"result": 1}),
    ("effects/1/commit", {}),
    ("effects/0/commit", {"result": 1}),
    ("effects/01/commit", {"result": 1}),
    ("effects/99999999999/commit", {"result": 1}),
    ("intercept", {"tool": "wire", "payload": "w", "step_index": 5}),
    ("intercept", {"tool": "pay", "payload": "p", "step_index": 6}),
    ("complete", {}),
    ("fail", {"error": "it broke", "effect": {"step_index": 8, "outcome": "unknown"}}),
    ("fail?wait_s=56", {"error": "it broke"}),
    ("fail?wait_s=20", {"error": "it broke"}),
    ("fail", {"error": "it broke"}),
    ("effects/3/commit", {"result": 2}),
    ("complete", {}),
]


async def test_both_ways_answer_alike_when_the_same_is_asked(service: Service, endpoint: FakeEndpoint) -> None:
    """Status, headers and body of the short way are those of the route, in good and bad requests, and so is what is journaled."""
    undo = {"url": endpoint.url("/undo"), "args": {"charge": {"$ref": "result#/charge"}}}
    (await service.admin.register("pay", reversibility="compensatable", compensation=undo)).raise_for_status()
    await service.agent.get("/sessions")  # the caller is known now
    for verb, body in VERBS:
        plain = await service.agent.post(f"/sessions/plain-1/{verb}", body)
        ordinary = await service.agent.post(f"/sessions/ordinary-1/{verb}", body, headers=ORDINARY)
        assert told(plain) == told(ordinary), (verb, body)
    assert await service.operator.kinds("plain-1") == await service.operator.kinds("ordinary-1")
    shown = [await service.operator.session(f"{way}-1") for way in ("plain", "ordinary")]
    assert [effect["state"] for effect in shown[0]["effects"]] == [effect["state"] for effect in shown[1]["effects"]]


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        "application/json;charset=utf-8",
        "application/json; Charset=UTF-8",
        'application/json; charset="utf-8"',
    ],
)
async def test_both_ways_take_json_when_its_encoding_is_named(service: Service, content_type: str) -> None:
    """However a client says that it sends JSON in UTF-8, the short way takes it, and the route says that it is the same."""
    await service.agent.get("/sessions")
    headers = {"Content-Type": content_type}
    body = '{"tool": "pay", "payload": "Zoë", "step_index": 1}'.encode()
    plain = await service.agent.request("POST", "/v1/sessions/plain-1/intercept", content=body, headers=headers)
    ordinary = await service.agent.request("POST", "/v1/sessions/ordinary-1/intercept", content=body, headers={**headers, **ORDINARY})
    assert told(plain) == told(ordinary)
    assert plain.status_code == httpx.codes.ACCEPTED
    routed = Routed()
    agent = through(InOnePiece(lean_then(service, routed)), service.agent)
    answer = await agent.request("POST", "/v1/sessions/plain-1/intercept", content=body, headers=headers)
    assert (answer.status_code, routed.bodies) == (httpx.codes.ACCEPTED, [])


class Routed:
    """An ordinary route that notes what body reaches it."""

    def __init__(self) -> None:
        """Nothing has yet."""
        self.bodies: list[bytes] = []

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Take the whole body, and answer with nothing."""
        body, has_more = b"", True
        while has_more:
            message = await receive()
            body, has_more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})


def lean_then(service: Service, route: ASGIApp) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Return the short way of a service, before another route than its own."""

    async def lean_then_route(scope: Scope, receive: Receive, send: Send) -> None:
        assert isinstance(service.app, Application)
        assert service.app.lean is not None
        await service.app.lean(scope, receive, send, route)

    return lean_then_route


async def test_a_run_ends_alike_both_ways(service: Service, endpoint: FakeEndpoint) -> None:
    """A run that ends well shows its steps and skipped undos, whichever way it was told."""
    for way, headers in (("plain", {}), ("ordinary", ORDINARY)):
        for step in (1, 2):
            await service.agent.intercept(f"{way}-1", step_index=step, compensation=undo_at(endpoint.url("/undo")))
            await service.agent.commit(f"{way}-1", step, {"n": step})
        answer = await service.agent.post(f"/sessions/{way}-1/complete", {}, headers=headers)
        assert answer.status_code == httpx.codes.OK
        seen = (await service.agent.get(f"/sessions/{way}-1")).json()
        assert answer.json() == seen


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("intercept", {"headers": {"If-Match": '"v1"'}}),
        ("intercept", {"headers": {"Content-Type": "application/json; charset=latin-1"}}),
        ("intercept", {"headers": {"Content-Type": "application/json; charset=utf-8; charset=utf-8"}}),
        ("intercept", {"headers": {"Content-Type": "application/json; charset=utf-8x"}}),
        ("intercept", {"headers": {"Content-Type": 'application/json; charset="utf-8'}}),
        ("intercept", {"headers": {"Content-Type": "text/json; charset=utf-8"}}),
        ("intercept", {"headers": {"Authorization": "Bearer cm_nobody"}}),
        ("intercept", {"headers": {"Authorization": "Basic eDp5"}}),
        ("intercept", {"headers": {"Idempotency-Key": '"quoted"'}}),
        ("intercept", {"headers": {"Content-Encoding": "gzip"}}),
        ("intercept?x=1", {}),
        ("intercept", {"content": b'{"tool": "pay", "tool": "pay"}'}),
        ("intercept", {"content": b"{"}),
        ("intercept", {"content": b'{"tool": "pay", "payload": "' + b"x" * 20_000 + b'", "step_index": 1}'}),
        ("touch", {}),
    ],
)
async def test_what_is_not_plain_reaches_its_route_whole(service: Service, verb: str, options: dict[str, Any]) -> None:
    """Whatever is odd in a request, the route judges it, with all of its body."""
    await service.agent.get("/sessions")
    routed = Routed()
    headers = {"Authorization": f"Bearer {service.agent.key}", "Content-Type": "application/json", **options.get("headers", {})}
    content = options.get("content", b'{"tool": "pay", "payload": "p", "step_index": 1}')
    app = InOnePiece(lean_then(service, routed))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://countermand.test") as http:
        answer = await http.post(f"/v1/sessions/s/{verb}", content=content, headers=headers)
    assert (answer.status_code, routed.bodies) == (204, [content])


async def test_body_in_pieces_is_taken_whole_when_a_client_sends_it_slowly(service: Service) -> None:
    """The first piece that was taken is given back to the route, before the others."""
    await service.agent.get("/sessions")
    pieces = [b'{"tool": "pay", "payload": "p", ', b'"step_index": 1}']

    async def receive() -> Message:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await service.app(intercept_scope(service, 48), receive, send)
    assert sent[0]["status"] == httpx.codes.ACCEPTED, sent


def intercept_scope(service: Service, length: int) -> Scope:
    """Return the head of an intercept with a body of so many bytes, as a server tells it."""
    headers = [
        (b"authorization", f"Bearer {service.agent.key}".encode()),
        (b"content-type", b"application/json"),
        (b"content-length", str(length).encode()),
    ]
    scope = {"type": "http", "method": "POST", "path": "/v1/sessions/s/intercept", "raw_path": b"/v1/sessions/s/intercept"}
    return {**scope, "query_string": b"", "headers": headers, "asgi": {"version": "3.0"}, "http_version": "1.1"}


class Patience:
    """Stands before an application and notes when whoever waits for a body waits no longer."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap it."""
        self._app = app
        self.is_over = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let everything through."""

        async def watched() -> Message:
            try:
                return await receive()
            except asyncio.CancelledError:
                self.is_over.set()
                raise

        await self._app(scope, watched, send)


async def test_late_body_is_left_to_the_route_when_it_does_not_begin(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The route's bound on a body is the only one: the short way waits for a moment, and loses nothing of what comes after it."""
    monkeypatch.setattr("app.api.lean.LATE_SECONDS", 0.01)
    await service.agent.get("/sessions")
    messages: asyncio.Queue[Message] = asyncio.Queue()
    routed, sent = Routed(), asyncio.Queue[Message]()
    patience = Patience(lean_then(service, routed))
    answering = asyncio.create_task(patience(intercept_scope(service, 2), messages.get, sent.put))
    async with asyncio.timeout(PATIENCE_SECONDS / 2):  # less than the route's
        await patience.is_over.wait()
        await messages.put({"type": "http.request", "body": b"{", "more_body": True})
        await messages.put({"type": "http.request", "body": b"}", "more_body": False})
        await answering
    assert routed.bodies == [b"{}"]


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Serve an application on a loopback port as `serve` does, and connect to it."""
    config = uvicorn.Config(app, http=BoundedProtocol, lifespan="off", log_config=None)
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BoundedProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()


async def test_late_body_is_taken_whole_when_a_real_server_has_it(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head now, body later and in pieces: the call is taken with every byte of its payload, and the connection goes on."""
    monkeypatch.setattr("app.api.lean.LATE_SECONDS", 0.01)
    await service.agent.get("/sessions")
    patience = Patience(service.app)
    async with listening(patience) as (reader, writer), asyncio.timeout(PATIENCE_SECONDS / 2):
        for step in (1, 2):
            patience.is_over.clear()
            payload = f"{step}" * 5_000
            body = f'{{"tool": "pay", "payload": "{payload}", "step_index": {step}}}'.encode()
            head = f"POST /v1/sessions/s{step}/intercept HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {service.agent.key}\r\n"
            writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            await patience.is_over.wait()
            for piece in (body[:1], body[1:3_000], body[3_000:]):
                writer.write(piece)
                await writer.drain()
            answer = (await reader.readuntil(b"\r\n\r\n")).decode()
            assert answer.startswith("HTTP/1.1 202 "), answer
            length = re.search(r"content-length: (\d+)", answer)
            assert length, answer
            await reader.readexactly(int(length[1]))
    for step in (1, 2):
        assert (await service.operator.effect(f"s{step}", step))["payload"] == f"{step}" * 5_000


async def test_short_way_counts_under_the_verbs_own_name(service: Service, endpoint: FakeEndpoint) -> None:
    """The time of a verb is counted once, whichever way it was answered."""
    await service.agent.get("/sessions")
    await service.agent.intercept("s", step_index=1, compensation=undo_at(endpoint.url("/undo")))
    metrics = (await service.agent.request("GET", "/metrics")).text
    assert re.search(r"_seconds_count\{[^}]*interceptEffect[^}]*\} 1\.0\n", metrics), metrics


async def test_revoked_key_is_good_for_a_few_seconds_at_most(database_url: str) -> None:
    """What the database said of a key is taken for a moment, and asked again after it."""
    key, clock = await make_principal_key(database_url, Role.AGENT, "robot-1"), HeldClock()
    async with open_database(database_url, size=2, application_name="tests") as database:
        authenticator = Authenticator(database=database, clock=clock)
        assert authenticator.known(key) is None
        known = await authenticator.principal(key)
        async with owner_connection(database_url) as owner:
            await owner.execute("UPDATE keys SET revoked_at = clock_timestamp()")
        assert authenticator.known(key) == known
        clock.now += FRESH_SECONDS / 2
        assert authenticator.known(key) is None, "one caller asks again"
        clock.now += FRESH_SECONDS / 2
        assert authenticator.known(key) is None
        with pytest.raises(Unauthenticated):
            await authenticator.principal(key)
        with pytest.raises(Unauthenticated):
            await authenticator.principal(key)


async def test_caller_of_another_role_is_refused_by_the_route(service: Service, services: StartService) -> None:
    """An operator does not intercept, however plain the request is; another org's agent does not find the session."""
    await service.operator.get("/sessions")
    refused = await service.operator.intercept("s", step_index=1)
    assert (refused.status_code, refused.json()["code"]) == (403, "role_not_allowed")
    stranger = await service.client(Role.AGENT, "agent-1", "beta")
    await service.agent.intercept("s", step_index=1)
    await stranger.get("/sessions")
    for verb, body in (("effects/1/commit", {"result": 1}), ("complete", {}), ("fail", {"error": "x"})):
        answer = await stranger.post(f"/sessions/s/{verb}", body)
        assert (answer.status_code, answer.json()["code"]) == (404, "session_not_found")
    other = await service.client(Role.AGENT, "agent-2")
    await other.get("/sessions")
    answer = await other.post("/sessions/s/intercept", {"tool": "pay", "payload": "p", "step_index": 2})
    assert (answer.status_code, answer.json()["code"]) == (404, "session_not_found")
