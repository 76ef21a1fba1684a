"""Every refusal and every crash as the one shape RFC 9457 gives it. Must not test which verb refuses what."""

import asyncio
import inspect
from collections.abc import AsyncIterator, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import httpx
import pytest
import structlog
from fastapi import APIRouter, FastAPI, Header, HTTPException, Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.errors import STATUSES, Problem, answer, install
from app.domain import errors
from app.domain.errors import Conflict, Invalid, SagaError, Unavailable

REQUEST_ID = UUID("8f1b6a52-6c1e-4b7c-9a53-0d6c0f5f3a11")
SECRET = "canary-4921"

REFUSALS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, SagaError) and kind is not SagaError]


class _StorageUnavailableError(Unavailable):
    """Stands for a refusal that another floor derives."""


class _RequestIds:
    """Stands for the middleware that names requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["request_id"] = REQUEST_ID
        await self._app(scope, receive, send)


@pytest.fixture
def app() -> FastAPI:
    """Return an app with problems installed and one included router, as the service has them."""
    app = FastAPI()
    install(app)
    router = APIRouter()

    @router.get("/things/{name}")
    async def read(name: str, x_count: Annotated[int, Header()] = 0) -> dict[str, object]:
        return {"name": name, "count": x_count}

    @router.put("/things/{name}")
    async def write(name: str) -> None: ...

    @router.delete("/things/{name}")
    async def forget(name: str) -> None: ...

    @router.post("/things/{name}/plain")
    async def plain(name: str, body: dict[str, int]) -> None: ...

    app.include_router(router, prefix="/v1")
    return app


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of the app in this process; an exception that leaves the app fails the test."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://countermand.test") as client:
        yield client


def _raises(app: FastAPI, error: Exception) -> None:
    @app.post("/raises")
    async def raises() -> None:
        raise error


def _checked(response: httpx.Response) -> dict[str, Any]:
    """Return the problem, having checked what holds for all of them."""
    problem: dict[str, Any] = response.json()
    Problem.model_validate(problem)
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["cache-control"] == "no-store"
    assert problem["status"] == response.status_code
    assert problem["type"] == f"urn:countermand:problem:{problem['code']}"
    assert str(UUID(problem["instance"])) == problem["instance"].removeprefix("urn:uuid:")
    return problem


def test_status_is_known_when_a_refusal_class_exists() -> None:
    """The one table is complete: no class of the tree would end as a crash."""
    assert set(REFUSALS) == set(STATUSES)


STATUS_TABLE: list[tuple[str, int, dict[str, str]]] = [
    ("Malformed", 400, {}),
    ("Unauthenticated", 401, {"www-authenticate": "Bearer"}),
    ("Forbidden", 403, {}),
    ("NotFound", 404, {}),
    ("Conflict", 409, {}),
    ("Stale", 412, {}),
    ("TooLarge", 413, {}),
    ("WrongMediaType", 415, {"accept": "application/json", "accept-encoding": "identity"}),
    ("Invalid", 422, {}),
    ("Unavailable", 503, {"retry-after": "1"}),
]


@pytest.mark.parametrize(("name", "status", "headers"), STATUS_TABLE)
async def test_refusal_becomes_its_status_when_raised(
    name: str, status: int, headers: dict[str, str], app: FastAPI, client: httpx.AsyncClient
) -> None:
    """Class decides status and headers; code, detail and facts come from where it was raised."""
    kind: type[SagaError] = getattr(errors, name)
    _raises(app, kind("some_code", "what was found", state="failed", steps=[1, 2]))

    response = await client.post("/raises")

    problem = _checked(response)
    assert response.status_code == status
    assert {**problem, "instance": ""} == {
        "type": "urn:countermand:problem:some_code",
        "title": kind.title,
        "status": status,
        "detail": "what was found",
        "instance": "",
        "code": "some_code",
        "state": "failed",
        "steps": [1, 2],
    }
    assert {header: response.headers[header] for header in headers} == headers


async def test_refusal_of_another_floor_is_known_when_derived(app: FastAPI, client: httpx.AsyncClient) -> None:
    """A subclass answers as its class does."""
    _raises(app, _StorageUnavailableError("storage_unavailable", "no connection", retry_after_seconds=7))

    response = await client.post("/raises")

    assert (response.status_code, response.headers["retry-after"]) == (503, "7")
    assert _checked(response)["title"] == Unavailable.title


async def test_facts_are_rendered_when_they_are_not_json(app: FastAPI, client: httpx.AsyncClient) -> None:
    """A fact never breaks the answer: what JSON lacks is text, and no fact takes a standard member's place."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    facts: dict[str, Any] = {"id": REQUEST_ID, "at": at, "path": Path("a"), "type": "x", "status": 1, "title": "x", "instance": "x"}
    _raises(app, Conflict("some_code", "half a pair \ud800, an escape \x1b and \N{RIGHT-TO-LEFT OVERRIDE}", **facts))

    response = await client.post("/raises")

    problem = _checked(response)
    assert (problem["id"], problem["at"], problem["path"]) == (str(REQUEST_ID), "2026-01-01T00:00:00+00:00", "a")
    assert (problem["title"], problem["status"]) == (Conflict.title, 409)
    assert response.text.isascii()
    assert response.text.isprintable()


async def test_instance_is_the_request_id_when_one_is_set(app: FastAPI, client: httpx.AsyncClient) -> None:
    """What the caller quotes is what the logs are searched for."""
    app.add_middleware(_RequestIds)

    assert _checked(await client.get("/nowhere"))["instance"] == f"urn:uuid:{REQUEST_ID}"


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "FROB"])
@pytest.mark.parametrize(
    "path", ["/", "/nowhere", "/v1", "/v1/", "/v1/things/", "/v1//things/a", "/v1/things/a/", "/v1/things/a%2Fb", "/%FF"]
)
async def test_unknown_path_is_a_problem_when_asked(method: str, path: str, client: httpx.AsyncClient) -> None:
    """Nothing but problems under paths that do not exist; a slash too many is not redirected to a host the caller names."""
    response = await client.request(method, path)

    assert response.status_code == 404
    assert response.headers["content-type"] == "application/problem+json"
    if method != "HEAD":
        assert _checked(response)["code"] == "unknown_path"


@pytest.mark.parametrize("method", ["POST", "PATCH", "OPTIONS", "TRACE", "HEAD", "FROB", "get"])
async def test_method_is_refused_with_all_allowed_ones_when_the_path_exists(method: str, client: httpx.AsyncClient) -> None:
    """Allow names the methods of all routes of the path, not of the first one only."""
    transport_request = httpx.Request(method, "http://countermand.test/v1/things/a")
    transport_request.method = method  # the client would write it in capitals

    response = await client.send(transport_request)

    assert response.status_code == 405
    assert response.headers["allow"] == "DELETE, GET, PUT"
    if method != "HEAD":
        problem = _checked(response)
        assert (problem["code"], problem["allow"]) == ("method_not_allowed", ["DELETE", "GET", "PUT"])


async def test_parameter_is_named_when_the_framework_refuses_it(client: httpx.AsyncClient) -> None:
    """The framework's own validation has our shape too, and repeats no value."""
    response = await client.get("/v1/things/a", headers={"x-count": SECRET})

    problem = _checked(response)
    assert (response.status_code, problem["code"], problem["title"]) == (422, "invalid_request", Invalid.title)
    assert [error["parameter"] for error in problem["errors"]] == ["x-count"]
    assert SECRET not in response.text


BODIES: list[tuple[str, int, str | None]] = [('{"a": "x"}', 422, "/a"), ("{", 422, "/1"), ("[]", 422, "")]


@pytest.mark.parametrize(("text", "status", "pointer"), BODIES)
async def test_body_is_located_when_the_framework_refuses_it(text: str, status: int, pointer: str, client: httpx.AsyncClient) -> None:
    """A route that declares its body the framework's way still answers with pointers."""
    response = await client.post("/v1/things/a/plain", content=text, headers={"content-type": "application/json"})

    assert response.status_code == status
    assert [error["pointer"] for error in _checked(response)["errors"]] == [pointer]


@pytest.mark.parametrize(("status", "title"), [(400, "Bad Request"), (418, "I'm a Teapot"), (429, "Too Many Requests"), (499, "Refused")])
async def test_other_refusals_of_the_framework_are_problems_when_raised(
    status: int, title: str, app: FastAPI, client: httpx.AsyncClient
) -> None:
    """A status without a class of ours still has a stable code and keeps its headers."""
    _raises(app, HTTPException(status, "too much tea", headers={"Retry-After": "3"}))

    response = await client.post("/raises")

    problem = _checked(response)
    assert (problem["code"], problem["title"], problem["detail"]) == (f"http_{status}", title, "too much tea")
    assert response.headers["retry-after"] == "3"


async def test_answer_has_no_body_when_the_framework_forbids_one(app: FastAPI, client: httpx.AsyncClient) -> None:
    """304 is no error and stays what it is."""
    _raises(app, HTTPException(304))

    response = await client.post("/raises")

    assert (response.status_code, response.content) == (304, b"")


class _DriverError(Exception):
    """Stands for a driver's exception: it repeats the values in its text, and has an SQLSTATE."""

    sqlstate = "22P02"


def _crashes() -> list[Exception]:
    caused = RuntimeError(SECRET)
    caused.__cause__ = _DriverError(SECRET)
    circular = RuntimeError(SECRET)
    circular.__cause__ = circular
    return [
        KeyError(SECRET),
        _DriverError(SECRET),
        caused,
        circular,
        ExceptionGroup(SECRET, [ValueError(SECRET), TimeoutError(SECRET)]),
        SagaError("some_code", SECRET),
    ]


@pytest.mark.parametrize("error", _crashes(), ids=lambda error: type(error).__name__)
async def test_crash_is_logged_once_without_text_when_unhandled(error: Exception, app: FastAPI, client: httpx.AsyncClient) -> None:
    """500 tells the caller nothing but where to look; the log tells where it crashed, and no value."""
    app.add_middleware(_RequestIds)
    _raises(app, error)

    with structlog.testing.capture_logs() as logs:
        response = await client.post("/raises", headers={"x-secret": SECRET})

    problem = _checked(response)
    assert (response.status_code, problem["code"]) == (500, "internal")
    (entry,) = logs
    assert (entry["event"], entry["log_level"], entry["request_id"]) == ("request_crashed", "error", str(REQUEST_ID))
    assert (entry["method"], entry["route"]) == ("POST", "/raises")
    assert type(error).__name__ in entry["error"] or isinstance(error, SagaError)
    assert entry["sqlstate"] == getattr(error, "sqlstate", None)
    assert any(frame.startswith(__file__) and frame.endswith(" raises") for frame in entry["frames"])
    assert SECRET not in f"{response.text} {response.headers} {logs}"


async def test_crash_of_a_middleware_is_a_problem_when_it_stands_outside(app: FastAPI) -> None:
    """Whatever crashes, the caller gets a problem; the server hears of it too, as it must for a broken stack."""

    class _Broken:
        def __init__(self, app: ASGIApp) -> None:
            self._app = app

        async def __call__(self, _scope: Scope, _receive: Receive, _send: Send) -> None:
            raise RuntimeError(SECRET)

    app.add_middleware(_Broken)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    with structlog.testing.capture_logs() as logs:
        async with httpx.AsyncClient(transport=transport, base_url="http://countermand.test") as client:
            response = await client.get("/v1/things/a")

    assert (response.status_code, _checked(response)["code"]) == (500, "internal")
    assert [entry["event"] for entry in logs] == ["request_crashed"]
    assert SECRET not in f"{response.text} {logs}"


async def _exchange(app: FastAPI, path: str) -> list[MutableMapping[str, Any]]:
    sent: list[MutableMapping[str, Any]] = []
    incoming = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in incoming:
            return message
        await asyncio.Event().wait()
        raise AssertionError("after its request the caller only listens: nobody sets that event")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": []}
    await asyncio.wait_for(app({**scope, "http_version": "1.1"}, receive, send), timeout=5)
    return sent


@pytest.mark.parametrize(("error", "events"), [(RuntimeError(SECRET), ["request_crashed"]), (ClientDisconnect(), [])])
async def test_answer_stays_cut_off_when_it_breaks_in_the_middle(error: Exception, events: list[str], app: FastAPI) -> None:
    """Half an answer is never completed into something that looks whole; a reader who left is no crash."""

    @app.get("/stream")
    async def stream() -> Response:
        async def lines() -> AsyncIterator[bytes]:
            yield b"first\n"
            raise error

        return StreamingResponse(lines())

    with structlog.testing.capture_logs() as logs:
        sent = await _exchange(app, "/stream")

    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[-1]["more_body"] is True
    assert [entry["event"] for entry in logs] == events


def test_installation_is_refused_when_the_framework_limits_bodies() -> None:
    """The framework's own limit would answer text/plain, even in place of a 401."""
    with pytest.raises(ValueError, match="max_body_size"):
        install(FastAPI(max_body_size=1024))


async def test_refusal_is_rendered_when_a_layer_has_no_exception_handlers(app: FastAPI, client: httpx.AsyncClient) -> None:
    """Middlewares answer in the same shape."""

    @app.get("/full")
    async def full(request: Request) -> Response:
        return answer(request, Conflict("some_code", "no"))

    assert _checked(await client.get("/full"))["status"] == 409
