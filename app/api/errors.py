"""Turn every refusal and every crash into one `application/problem+json` answer. Must not decide anything, nor show what a crash said."""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from http import HTTPStatus
from itertools import islice
from types import MappingProxyType
from typing import Any
from uuid import UUID, uuid4

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.domain.errors import (
    Conflict,
    Forbidden,
    Invalid,
    Malformed,
    NotFound,
    SagaError,
    Stale,
    TooLarge,
    Unauthenticated,
    Unavailable,
    WrongMediaType,
)
from app.domain.json_text import pointer_text
from app.storage.database import StorageUnavailable

PROBLEM_MEDIA_TYPE = "application/problem+json"  # RFC 9457, section 3
PROBLEM_TYPE_PREFIX = "urn:countermand:problem:"

# A body with a hundred thousand bad members gets an answer that a person can read.
MAX_LISTED_ERRORS = 20

# A log line stays a log line: enough for our own frames under the framework's, and for the chain of drivers' causes.
MAX_REPORTED_FRAMES = 100
MAX_REPORTED_CAUSES = 8

STATUSES: Mapping[type[SagaError], HTTPStatus] = MappingProxyType(
    {
        Malformed: HTTPStatus.BAD_REQUEST,
        Unauthenticated: HTTPStatus.UNAUTHORIZED,
        Forbidden: HTTPStatus.FORBIDDEN,
        NotFound: HTTPStatus.NOT_FOUND,
        Conflict: HTTPStatus.CONFLICT,
        Stale: HTTPStatus.PRECONDITION_FAILED,
        TooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        WrongMediaType: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        Invalid: HTTPStatus.UNPROCESSABLE_ENTITY,
        Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    }
)

# Pydantic speaks of Python's types; callers sent JSON. What is not listed is understandable as it stands.
_SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "bool_type": "expected true or false",
        "dict_type": "expected an object",
        "extra_forbidden": "unknown member",
        "float_type": "expected a number",
        "frozen_set_type": "expected an array",
        "int_type": "expected an integer in plain digits, at most 18 of them",
        "list_type": "expected an array",
        "missing": "required, but absent",
        "model_attributes_type": "expected an object",
        "model_type": "expected an object",
        "set_type": "expected an array",
        "string_type": "expected a string",
        "tuple_type": "expected an array",
    }
)

# How pydantic shows a member of an enum that a Literal expects; only its quoted value means anything to a caller.
_MEMBER_OF_ENUM = re.compile(r"<\w+\.\w+: ('[^']*')>")

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class ProblemError(BaseModel):
    """One member or parameter that is not acceptable."""

    pointer: str | None = Field(default=None, description="JSON Pointer (RFC 6901) into the request's body.")
    parameter: str | None = Field(default=None, description="Name of the path, query or header parameter.")
    detail: str


class Problem(BaseModel):
    """Why a request was refused (RFC 9457); facts of the single code stand beside these members."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "type": "urn:countermand:problem:session_not_active",
                    "title": "The state forbids this",
                    "status": 409,
                    "detail": "session refund-4921 is compensating, expected active",
                    "instance": "urn:uuid:8f1b6a52-6c1e-4b7c-9a53-0d6c0f5f3a11",
                    "code": "session_not_active",
                    "state": "compensating",
                }
            ]
        },
    )

    type: str = Field(description="`urn:countermand:problem:` and the code.")
    title: str = Field(description="The same for all problems of one code.")
    status: int
    detail: str = Field(description="What was found and what was expected, for people.")
    instance: str = Field(description="`urn:uuid:` and the id of this request, as in the logs.")
    code: str = Field(description="Stable word for programs.")
    errors: list[ProblemError] | None = Field(default=None, description="Where, when members or parameters are at fault.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """What an answer says, before it is bytes."""

    status: int
    code: str
    title: str
    detail: str
    facts: Mapping[str, object] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def install(app: FastAPI) -> None:
    """Make every 4xx and 5xx of `app`, the framework's own included, a problem.

    Middleware added afterwards wraps the answer to a crash like any other answer. Redirects from `/x/` to `/x` are switched off: their
    target would be built from the caller's Host header.

    Raises:
        ValueError: the app has the framework's `max_body_size`, which answers text/plain; `strict_json` counts the bytes instead.
    """
    if app.max_body_size is not None:
        raise ValueError("expected no max_body_size on the app: bodies are bounded by strict_json, which answers with a problem")
    app.router.redirect_slashes = False
    for kind in (SagaError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _answer_exception)
    app.add_middleware(CrashGuard)


def answer(request: Request, error: SagaError) -> Response:
    """Render a refusal for a layer that stands outside the exception handlers, such as a middleware.

    Raises:
        LookupError: the error's class is not in the table.
    """
    return _render(request, _refusal_of(error))


def request_id(request: Request) -> UUID:
    """Return the id of this request: `request.state.request_id` where a middleware has set one, else a new one kept there."""
    known = getattr(request.state, "request_id", None)
    if isinstance(known, UUID):
        return known
    request.state.request_id = fresh = uuid4()
    return fresh


def sentence(error: Mapping[str, Any]) -> str:
    """Say in JSON's words what one pydantic error found; never contains the value."""
    return _SENTENCES.get(error["type"]) or _MEMBER_OF_ENUM.sub(r"\1", str(error["msg"]).removeprefix("Value error, "))


class CrashGuard:
    """Answer and log an exception that nobody handled, once; without it the server would log it again, with its text."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app, guarded."""
        await guarded(self._app, scope, receive, send)


async def guarded(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run `app`; a crash before the answer began becomes a 500, one after it leaves the answer cut off.

    A request that outlasts the grace of a stop is cancelled by the server: whoever asked may ask another replica.
    """
    if scope["type"] != "http":
        await app(scope, receive, send)
        return
    is_started = False

    async def watched(message: Message) -> None:
        nonlocal is_started
        is_started = is_started or message["type"] == "http.response.start"
        await send(message)

    try:
        await app(scope, receive, watched)
    except ClientDisconnect:
        return
    except asyncio.CancelledError:
        if not is_started:
            await answer(Request(scope), Unavailable("stopping", "the service is stopping; ask again"))(scope, receive, send)
        raise
    except Exception as error:  # noqa: BLE001 - the outermost edge: what arrives here was handled by nobody
        response = _crash(Request(scope), error)
        if not is_started:
            await response(scope, receive, send)


def refused(request: Request, error: SagaError) -> Response:
    """Render a refusal that a route met, and log it where it tells of the database."""
    if isinstance(error, StorageUnavailable):
        _log.warning("storage_unavailable", where="request", cause=error.cause)
    return answer(request, error)


async def _answer_exception(request: Request, error: Exception) -> Response:
    match error:
        case SagaError() if isinstance(error, tuple(STATUSES)):
            return refused(request, error)
        case RequestValidationError():
            return _render(request, _parameters_refusal(error.errors()))
        case HTTPException():
            return _answer_framework(request, error)
        case _:
            return _crash(request, error)


def _refusal_of(error: SagaError) -> _Refusal:
    status = next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), None)
    if status is None:
        raise LookupError(f"no HTTP status for {type(error).__name__} ({error.code})")
    return _Refusal(status=status, code=error.code, title=error.title, detail=error.detail, facts=error.facts, headers=_headers_of(error))


def _headers_of(error: SagaError) -> Mapping[str, str]:
    match error:
        case Unauthenticated():
            return {"WWW-Authenticate": "Bearer"}
        case Unavailable():
            return {"Retry-After": str(max(1, error.retry_after_seconds))}
        case WrongMediaType():
            # RFC 9110, section 15.5.16: say what would have been accepted.
            return {"Accept": "application/json", "Accept-Encoding": "identity"}
        case _:
            return {}


def _parameters_refusal(errors: Sequence[Any]) -> _Refusal:
    """Describe path, query and header parameters (and bodies declared the framework's way) that failed validation."""
    listed = [_located(error) for error in errors[:MAX_LISTED_ERRORS]]
    return _Refusal(
        status=STATUSES[Invalid],
        code="invalid_request",
        title=Invalid.title,
        detail=f"not acceptable: {len(errors)} of the request's values",
        facts={"errors": listed},
    )


def _located(error: Mapping[str, Any]) -> dict[str, str]:
    source, *path = error["loc"]
    if source == "body":
        return {"pointer": pointer_text(path), "detail": sentence(error)}
    return {"parameter": str(path[0]) if path else str(source), "detail": sentence(error)}


def _answer_framework(request: Request, error: HTTPException) -> Response:
    headers = dict(error.headers or {})
    if error.status_code < HTTPStatus.BAD_REQUEST:
        return Response(status_code=error.status_code, headers=headers)
    match error.status_code:
        case HTTPStatus.NOT_FOUND:
            refusal = _Refusal(status=404, code="unknown_path", title="No such path", detail="nothing is served at this path")
        case HTTPStatus.METHOD_NOT_ALLOWED if methods := _allowed_methods(request):
            refusal = _method_refusal(methods)
        case status:
            refusal = _Refusal(status=status, code=f"http_{status}", title=_phrase(status), detail=str(error.detail), headers=headers)
    return _render(request, refusal)


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods of all routes with this path; the framework's own Allow knows only the first of them (RFC 9110, 10.2.1)."""
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    allowed: set[str] = set()
    for route in iter_route_contexts(request.app.routes):
        pattern = getattr(route, "path_regex", None)
        if pattern is not None and pattern.match(path):
            allowed |= route.methods or set()
    return sorted(allowed)


def _method_refusal(methods: list[str]) -> _Refusal:
    return _Refusal(
        status=405,
        code="method_not_allowed",
        title="Method not allowed",
        detail=f"this path answers {', '.join(methods)} only",
        facts={"allow": methods},
        headers={"Allow": ", ".join(methods)},
    )


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Refused"


def _crash(request: Request, error: Exception) -> Response:
    """Log where it crashed, without what the exceptions say: drivers put the values they choked on into their messages."""
    route = request.scope.get("route")
    _log.error(
        "request_crashed",
        request_id=str(request_id(request)),
        method=request.method,
        route=getattr(route, "path_format", None),
        error=" from ".join(islice(_class_names(error), MAX_REPORTED_CAUSES)),
        sqlstate=getattr(error, "sqlstate", None),
        frames=list(islice(_frames(error), MAX_REPORTED_FRAMES)),
    )
    return _render(
        request,
        _Refusal(
            status=500,
            code="internal",
            title="Internal error",
            detail="the request crashed; its instance finds it in the service's log",
        ),
    )


def _class_names(error: BaseException) -> Iterator[str]:
    kind = type(error)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(error, BaseExceptionGroup):
        name = f"{name}[{', '.join(' from '.join(_class_names(member)) for member in error.exceptions)}]"
    yield name
    if error.__cause__ is not None:
        yield from _class_names(error.__cause__)


def _frames(error: BaseException) -> Iterator[str]:
    """Yield `file:line function` from the outermost call inwards; those of its members and its cause follow."""
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        yield f"{code.co_filename}:{step.tb_lineno} {code.co_name}"
        step = step.tb_next
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _frames(member)
    if error.__cause__ is not None:
        yield from _frames(error.__cause__)


def _render(request: Request, refusal: _Refusal) -> Response:
    problem = {
        **refusal.facts,
        "type": PROBLEM_TYPE_PREFIX + refusal.code,
        "title": refusal.title,
        "status": int(refusal.status),
        "detail": refusal.detail,
        "instance": f"urn:uuid:{request_id(request)}",
        "code": refusal.code,
    }
    return Response(
        # ASCII only: no byte of a caller's text can upset a terminal or a log that shows the answer.
        json.dumps(problem, default=_plain, ensure_ascii=True).encode(),
        status_code=refusal.status,
        headers={**refusal.headers, "Cache-Control": "no-store"},
        media_type=PROBLEM_MEDIA_TYPE,
    )


def _plain(fact: object) -> object:
    if isinstance(fact, datetime):
        return fact.isoformat()
    return str(fact)
