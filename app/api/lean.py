"""Answer the agent's verbs, where plain, without the framework's routing. Must not refuse a request's form: the routes do that.

Nearly all of what a service is asked are four verbs, in the form that our documents show. Such a request is recognised here from
its bytes and goes straight to its verb; whatever is missing, odd or large in it, and whoever calls for the first time in a while, goes
on to the ordinary route with nothing lost, and is judged and answered there (docs/decisions/0029).
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import errors
from app.api.dependencies import Caller, Engine, is_bare_key, traceparent_of
from app.api.strict_json import Received, is_session_id
from app.domain.errors import SagaError
from app.domain.json_text import JsonFault, parse
from app.domain.model import MAX_STEP_INDEX, Role, SessionId, StepIndex
from app.engine.clock import Clock
from app.telemetry import Telemetry

MAX_LEAN_BYTES: Final = 16_384  # a larger body costs what it costs; the routes count its bytes
LATE_SECONDS: Final = 0.25  # for the body to begin: it comes with its head nearly always, and the route waits for one that does not

# Beside these, what a client of HTTP sends of itself changes nothing about what a verb means.
_NOT_PLAIN = frozenset({b"content-encoding", b"if-match", b"transfer-encoding", b"expect", b"range"})
_ONCE = frozenset({b"authorization", b"content-type", b"content-length", b"idempotency-key", b"traceparent"})

_JSON = re.compile(rb'application/json(?:; ?charset=(?:utf-8|"utf-8"))?', re.IGNORECASE)  # of what `strict_json` takes, what clients send
_WAIT_S = re.compile(rb"wait_s=([0-9]|[1-4][0-9]|5[0-5])")  # `sessions.WaitSeconds`, in its plain spelling

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A plain request of which everything was read: who calls, for which session and step, with what trace context."""

    caller: Caller
    session_id: SessionId
    step: StepIndex
    trace: str | None
    wait_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeanVerb(Generic[Model]):
    """A verb that is answered here: the last segment of its path, whether a step stands before it, and the route's own answer to it."""

    operation_id: str
    name: str
    model: type[Model]
    roles: frozenset[Role]
    answer: Callable[[Engine, Plain, Received[Model]], Awaitable[Response]]
    has_step: bool = False
    may_wait: bool = False


class LeanVerbs:
    """Stands before an application and answers what is plain."""

    def __init__(self, app: FastAPI, verbs: Iterable[LeanVerb[Any]], *, telemetry: Telemetry, clock: Clock) -> None:
        """Wrap the application, whose state has the engine once it runs."""
        self._app = app
        self._telemetry = telemetry
        self._clock = clock
        self._verbs = {(verb.name, verb.has_step): verb for verb in verbs}

    async def __call__(self, scope: Scope, receive: Receive, send: Send, otherwise: ASGIApp) -> None:
        """Answer a plain request; let `otherwise` answer any other, with the messages that were taken from it."""
        found = self._find(scope)
        if found is None:
            await otherwise(scope, receive, send)
            return
        started = self._clock.monotonic()
        verb, plain = found
        taken = await _take(receive)
        received = _read(verb, taken)
        if received is None:
            await otherwise(scope, _again(taken, receive), send)
            return
        status = 0

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal status
            try:
                response = await verb.answer(self._app.state.engine, plain, received)
            except SagaError as refusal:
                response = errors.refused(Request(scope), refusal)
            status = response.status_code
            await response(scope, receive, send)

        await errors.guarded(answer, scope, receive, send)
        if status:
            self._telemetry.observe_verb(verb.operation_id, f"{status // 100}xx", self._clock.monotonic() - started)

    def _find(self, scope: Scope) -> tuple[LeanVerb[Any], Plain] | None:
        """Return which verb is asked for by whom, if all that the head of the request says is plain."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope.get("root_path"):
            return None
        parts = scope["path"].split("/")
        verb = self._verbs.get((parts[-1], len(parts) == 7))
        if verb is None or parts[:3] != ["", "v1", "sessions"] or len(parts) != (7 if verb.has_step else 5):
            return None
        wait_s = _wait_s(scope["query_string"], verb)
        if wait_s is None:
            return None
        session_id = parts[3]
        step = _step(parts[4:6]) if verb.has_step else 0
        if step is None or not is_session_id(session_id):
            return None
        heads = _heads(scope["headers"])
        if heads is None:
            return None
        caller = _caller(self._app.state.engine, scope["path"], verb, heads)
        if caller is None:
            return None
        trace = traceparent_of(heads.get(b"traceparent", b"").decode("latin-1"))
        return verb, Plain(caller=caller, session_id=SessionId(session_id), step=StepIndex(step), trace=trace, wait_s=wait_s)


def _wait_s(query: bytes, verb: LeanVerb[Any]) -> int | None:
    """Return how long the answer may be held, seconds; None where the query says anything else."""
    if not query:
        return 0
    found = _WAIT_S.fullmatch(query) if verb.may_wait else None
    return None if found is None else int(found[1])


def _step(parts: list[str]) -> int | None:
    """Return the step that a path names; 0 where it names none by right."""
    kind, text = parts
    if kind != "effects" or not text.isascii() or not text.isdecimal() or text[0] == "0" or len(text) > len(str(MAX_STEP_INDEX)):
        return None
    step = int(text)
    return step if step <= MAX_STEP_INDEX else None


def _heads(headers: Iterable[tuple[bytes, bytes]]) -> Mapping[bytes, bytes] | None:
    """Return the headers that a verb looks at; None where one says more, or is there twice."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _ONCE:
            if name in found:
                return None
            found[name] = value
        elif name in _NOT_PLAIN:
            return None
    length = found.get(b"content-length", b"")
    if _JSON.fullmatch(found.get(b"content-type", b"")) is None or not length.isdigit() or len(length) > len(str(MAX_LEAN_BYTES)):
        return None
    return found if int(length) <= MAX_LEAN_BYTES else None


def _caller(engine: Engine, path: str, verb: LeanVerb[Any], heads: Mapping[bytes, bytes]) -> Caller | None:
    """Return who calls, if that was asked a moment ago and they may."""
    scheme, _, key = heads.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() != "bearer" or not engine.schema.is_known_to_serve():
        return None
    principal = engine.authenticator.known(key.strip())
    if principal is None or principal.role not in verb.roles:
        return None
    request_key = heads.get(b"idempotency-key")
    if request_key is not None and not is_bare_key(request_key.decode("latin-1")):
        return None
    name = None if request_key is None else request_key.decode("latin-1")
    return Caller(principal=principal, path=f"POST {path}", key=name, versions=None)


async def _take(receive: Receive) -> list[Message]:
    """Take the body's first message, in which a short body is whole; one that is late is left to the route, and to its bound.

    A `receive` that is cancelled has taken nothing.
    """
    try:
        async with asyncio.timeout(LATE_SECONDS):
            return [await receive()]
    except TimeoutError:
        return []


def _read(verb: LeanVerb[Model], taken: list[Message]) -> Received[Model] | None:
    """Return the body, if it is whole and acceptable: what is not, the route finds out again, and says why."""
    if not taken or taken[0]["type"] != "http.request" or taken[0].get("more_body", False):
        return None
    try:
        tree = parse(taken[0]["body"])
        return Received(model=verb.model.model_validate(tree), tree=tree)
    except (JsonFault, ValidationError):
        return None


def _again(taken: list[Message], receive: Receive) -> Receive:
    """Return what gives the messages that were taken once more, then those that come after them."""
    left = iter(taken)

    async def again() -> Message:
        message = next(left, None)
        return await receive() if message is None else message

    return again
