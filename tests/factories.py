"""Make what tests need: services, keys, clients, sessions. Must not assert anything."""

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import httpx
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.cells import Cells
from app.domain.keys import KEY_ID_BYTES, SECRET_BYTES, make_key
from app.domain.model import OrgName, Principal, Role
from app.engine.clock import SystemClock
from app.engine.deadlines import Deadlines
from app.engine.events import Events
from app.engine.poison import Poison
from app.main import Parts, create_app
from app.settings import Settings
from app.storage.database import open_database
from app.storage.keys import KeptKey, create_key
from app.telemetry import Telemetry
from tests.described import document, expect_described

ORG = "acme"
JsonObject = dict[str, Any]

QUICK: Mapping[str, object] = {
    "inline_tools": "allow",
    "egress_allow": "127.0.0.0/8",
    "poll_seconds": 0.1,
    "retry_initial_interval_ms": 10,
    "retry_max_interval_ms": 40,
    "attempt_timeout_ms": 2_000,
    "grace_seconds": 5.0,
    "database_connections": 5,
    "database_wait_seconds": 30,  # a busy machine is no reason for a test to meet 503
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running service and who may call it."""

    app: FastAPI
    database_url: str
    agent: "Client"
    operator: "Client"
    auditor: "Client"
    admin: "Client"

    async def client(self, role: Role, subject: str, org: str = ORG) -> "Client":
        """Make a key and return a client that uses it."""
        return Client(http=_http(self.app), key=await make_principal_key(self.database_url, role, subject, org))


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The public API as a client sees it; every call returns the raw response."""

    http: httpx.AsyncClient
    key: str

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send one request with the key."""
        headers = {"Authorization": f"Bearer {self.key}", **options.pop("headers", {})}
        return await self.http.request(method, path, headers=headers, **options)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        """GET a path below /v1."""
        return await self.request("GET", f"/v1{path}", **options)

    async def post(self, path: str, body: object = None, **options: Any) -> httpx.Response:
        """POST JSON to a path below /v1."""
        return await self.request("POST", f"/v1{path}", json={} if body is None else body, **options)

    async def put(self, path: str, body: object = None, **options: Any) -> httpx.Response:
        """PUT JSON to a path below /v1."""
        return await self.request("PUT", f"/v1{path}", json={} if body is None else body, **options)

    async def intercept(self, session_id: str, *, idempotency_key: str | None = None, **body: Any) -> httpx.Response:
        """Ask before running a tool; `tool` and `args` have defaults."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        filled = {"tool": "issue_credit", **body}
        if not {"payload", "args"} & filled.keys():
            filled["args"] = {"amount": 2500}
        return await self.post(f"/sessions/{session_id}/intercept", filled, headers=headers)

    async def commit(self, session_id: str, step: int, result: object = None) -> httpx.Response:
        """Say that a tool ran."""
        return await self.post(f"/sessions/{session_id}/effects/{step}/commit", {"result": result})

    async def fail_effect(self, session_id: str, step: int, outcome: str = "unknown", error: str = "it broke") -> httpx.Response:
        """Say that a tool failed."""
        return await self.post(f"/sessions/{session_id}/effects/{step}/fail", {"error": error, "outcome": outcome})

    async def fail(self, session_id: str, *, wait_s: int = 0, error: str = "the run failed", **body: Any) -> httpx.Response:
        """Say that the run failed."""
        return await self.post(f"/sessions/{session_id}/fail", {"error": error, **body}, params={"wait_s": wait_s} if wait_s else {})

    async def approve(self, session_id: str, step: int, **body: Any) -> httpx.Response:
        """Say yes to a parked call."""
        return await self.post(f"/sessions/{session_id}/effects/{step}/approve", body)

    async def reject(self, session_id: str, step: int, reason: str = "not like this", **body: Any) -> httpx.Response:
        """Say no to a parked call."""
        return await self.post(f"/sessions/{session_id}/effects/{step}/reject", {"reason": reason, **body})

    async def resume(
        self, session_id: str, step: int, payload: str, *, idempotency_key: str | None = None, wait_s: int = 0
    ) -> httpx.Response:
        """Present the bytes of an approved call, so that it is released."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        params = {"wait_s": wait_s} if wait_s else {}
        return await self.post(f"/sessions/{session_id}/effects/{step}/resume", {"payload": payload}, headers=headers, params=params)

    async def complete(self, session_id: str, **options: Any) -> httpx.Response:
        """Say that the run ended well."""
        return await self.post(f"/sessions/{session_id}/complete", {}, **options)

    async def touch(self, session_id: str) -> httpx.Response:
        """Give a sign of life."""
        return await self.post(f"/sessions/{session_id}/touch", {})

    async def register(self, name: str, **definition: Any) -> httpx.Response:
        """Register a tool."""
        return await self.put(f"/tools/{name}", definition)

    async def session(self, session_id: str) -> JsonObject:
        """Return a session, which must be there."""
        response = await self.get(f"/sessions/{session_id}")
        response.raise_for_status()
        found: JsonObject = response.json()
        return found

    async def effect(self, session_id: str, step: int, *, wait_s: int = 0) -> JsonObject:
        """Return an effect, which must be there; `wait_s`: once what it waits for is over."""
        response = await self.get(f"/sessions/{session_id}/effects/{step}", params={"wait_s": wait_s} if wait_s else {})
        response.raise_for_status()
        found: JsonObject = response.json()
        return found

    async def journal(self, session_id: str) -> list[JsonObject]:
        """Return up to 1,000 journal entries."""
        response = await self.get(f"/sessions/{session_id}/journal", params={"limit": 1000})
        response.raise_for_status()
        items: list[JsonObject] = response.json()["items"]
        return items

    async def kinds(self, session_id: str) -> list[str]:
        """Return the kinds of the journal's entries, in order."""
        return [entry["kind"] for entry in await self.journal(session_id)]


def undo_at(url: str, **members: Any) -> JsonObject:
    """Return an inline compensation."""
    return {"url": url, "description": "undo it", "args": {}, **members}


async def do_step(agent: Client, session_id: str, step: int, url: str, result: object = None, **compensation: Any) -> JsonObject:
    """Intercept and commit one undoable step; return the intercept's answer."""
    answer = await agent.intercept(session_id, step_index=step, compensation=undo_at(url, **compensation))
    answer.raise_for_status()
    (await agent.commit(session_id, step, result)).raise_for_status()
    body: JsonObject = answer.json()
    return body


async def park(agent: Client, session_id: str, step: int, payload: str, tool: str = "send_wire_transfer", **body: Any) -> JsonObject:
    """Ask for a call that a person has to approve: of a tool that nobody registered, unless `tool` is; return the answer."""
    answer = await agent.intercept(session_id, step_index=step, tool=tool, payload=payload, **body)
    if answer.status_code != httpx.codes.ACCEPTED:
        raise AssertionError(f"expected to be told to wait, found {answer.status_code}: {answer.text}")
    found: JsonObject = answer.json()
    return found


def new_events() -> Events:
    """Return what tells the log what was committed, with metrics that nobody fetches."""
    return Events(telemetry=Telemetry(version="0", schema_revision="0", cells=Cells.alone()))


def deadlines_of(service: Service) -> Deadlines:
    """Return a sweeper over the service's own parts, for a test to run by hand."""
    engine = service.app.state.engine
    poison = Poison(database=engine.database, events=new_events())
    return Deadlines(
        database=engine.database, forward=engine.forward, poison=poison, schema=engine.schema, clock=SystemClock(), sweep_seconds=0.01
    )


@asynccontextmanager
async def open_service(
    database_url: str, *, has_api: bool = True, has_orchestrator: bool = True, **settings: Any
) -> AsyncIterator[Service]:
    """Run a service in this loop; `settings` are those of app.settings by name, quick and permissive by default."""
    document()  # made once a process, before anything that is timed
    app = create_app(
        Settings(_env_file=None, **{**QUICK, **settings}),
        database_url,
        Parts(has_api=has_api, has_orchestrator=has_orchestrator),
    )
    keys = {role: await make_principal_key(database_url, role, f"{role}-1") for role in Role}
    async with app.router.lifespan_context(app):
        yield Service(
            app=app,
            database_url=database_url,
            **{role.value: Client(http=_http(app), key=key) for role, key in keys.items()},
        )


def _http(app: FastAPI) -> httpx.AsyncClient:
    hooks = {"response": [expect_described]}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=InOnePiece(app)), base_url="http://countermand.test", event_hooks=hooks)


SHORT_BYTES = 16_384


class InOnePiece:
    """Stands before an application and gives it a short body in one message, as a server does and httpx does not."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap it."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let everything through, a short body when it is whole."""
        length = dict(scope.get("headers", ())).get(b"content-length", b"")
        if not length.isdigit() or int(length) > SHORT_BYTES:
            await self._app(scope, receive, send)
            return
        body, has_more = b"", True
        while has_more:
            message = await receive()
            body, has_more = body + message.get("body", b""), message.get("more_body", False)
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def whole() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, whole, send)


async def make_principal_key(database_url: str, role: Role, subject: str, org: str = ORG) -> str:
    """Make a key in the database and return its text."""
    text, kept = make_key(secrets.token_bytes(KEY_ID_BYTES), secrets.token_bytes(SECRET_BYTES))
    principal = Principal(org=OrgName(org), role=role, subject=subject, key_id=kept.key_id)
    async with (
        open_database(database_url, size=1, application_name="tests") as database,
        database.transaction(principal.org) as tx,
    ):
        await create_key(tx, KeptKey(principal=principal, secret_digest=kept.secret_digest))
    return text


@asynccontextmanager
async def owner_connection(database_url: str) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    """Connect as the superuser, past row-level security: what an attacker with the database would be, or a test that ages rows."""
    connection = await asyncpg.connect(database_url)
    try:
        yield connection
    finally:
        await connection.close()
