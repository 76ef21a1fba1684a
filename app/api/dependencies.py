"""What every route asks for first: who calls, in which role, under which key of idempotency. Must not read bodies."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Header, Request

from app.api.strict_json import fingerprint
from app.domain.errors import Forbidden, Malformed, Unauthenticated
from app.domain.json_text import Json
from app.domain.model import Principal, RetryPolicy, Role, SessionId
from app.engine.authentication import Authenticator
from app.engine.decisions import Decisions
from app.engine.forward import Forward
from app.engine.gauges import Gauges
from app.engine.operations import Operations
from app.engine.orchestrator import Orchestrator
from app.engine.pauses import Pauses
from app.engine.registry import Registry
from app.engine.schema import Schema
from app.engine.verbs import Ask
from app.engine.waits import Waits
from app.storage.answers import RepeatableRequest
from app.storage.database import Database, SchemaMissing
from app.telemetry import Telemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The parts that routes call, made once by the composition root."""

    database: Database
    authenticator: Authenticator
    forward: Forward
    decisions: Decisions
    operations: Operations
    registry: Registry
    pauses: Pauses
    waits: Waits
    orchestrator: Orchestrator | None
    retry_defaults: RetryPolicy
    schema: Schema
    public_url: str
    telemetry: Telemetry
    gauges: Gauges

    def stop(self) -> None:
        """Begin nothing new: no call is claimed, and nobody is kept waiting any more."""
        self.waits.close()
        if self.orchestrator is not None:
            self.orchestrator.stop()


async def engine(request: Request) -> Engine:
    """Return the engine of this application."""
    return cast("Engine", request.app.state.engine)


EngineDependency = Annotated[Engine, Depends(engine)]


async def authenticate(request: Request, engine: EngineDependency) -> Principal:
    """Return who holds the bearer key of this request.

    Raises:
        Unauthenticated: no such header, not exactly one, or a key that nobody holds. SchemaMissing: the schema does not serve this code.
    """
    if not await engine.schema.serves():
        raise SchemaMissing("schema_missing", "the database has not the schema that this code knows: /readyz says what to do")
    values = request.headers.getlist("authorization")
    scheme, _, key = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    if scheme.lower() != "bearer":
        raise Unauthenticated("unauthenticated", "expected `Authorization: Bearer <key>` with a valid key")
    return await engine.authenticator.principal(key.strip())


@dataclass(frozen=True, slots=True)
class RoleCheck:
    """A FastAPI dependency that lets only these roles pass; made by `role_in`, found in the routes by `openapi`."""

    allowed: frozenset[Role]

    @property
    def refuses_some(self) -> bool:
        """Tell whether there is a role that may not pass."""
        return self.allowed != frozenset(Role)

    async def __call__(self, principal: Annotated[Principal, Depends(authenticate)]) -> Principal:
        """Return who calls.

        Raises:
            Forbidden: `role_not_allowed`.
        """
        if principal.role not in self.allowed:
            names = ", ".join(sorted(self.allowed))
            raise Forbidden("role_not_allowed", f"a key of role {principal.role} may not do this; it takes {names}", role=principal.role)
        return principal


def role_in(*roles: Role) -> RoleCheck:
    """Return a dependency that lets only these roles pass; an admin may do all that an operator may."""
    return RoleCheck(frozenset(roles) | ({Role.ADMIN} if Role.OPERATOR in roles else set()))


Agent = Annotated[Principal, Depends(role_in(Role.AGENT))]
AgentOrOperator = Annotated[Principal, Depends(role_in(Role.AGENT, Role.OPERATOR))]
Anyone = Annotated[Principal, Depends(role_in(*Role))]
Admin = Annotated[Principal, Depends(role_in(Role.ADMIN))]
Operator = Annotated[Principal, Depends(role_in(Role.OPERATOR))]
OperatorOrAuditor = Annotated[Principal, Depends(role_in(Role.OPERATOR, Role.AUDITOR))]

_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")


async def idempotency_key(
    request: Request,
    idempotency_key: Annotated[
        str | None, Header(description="Names this request: a repeat with the same key gets the same answer. Bare or quoted.")
    ] = None,
) -> str | None:
    """Return the request's Idempotency-Key without quotes.

    Raises:
        Malformed: given more than once, or not 1 to 255 visible ASCII characters.
    """
    values = request.headers.getlist("idempotency-key")
    if not values:
        return None
    key = (idempotency_key or "").strip()
    if len(key) >= len('""') and key[0] == key[-1] == '"':
        key = key[1:-1]
    if len(values) != 1 or _KEY.fullmatch(key) is None:
        raise Malformed("bad_idempotency_key", "expected one Idempotency-Key of 1 to 255 visible ASCII characters, bare or quoted")
    return key


def is_bare_key(text: str) -> bool:
    """Tell whether a header's value is an Idempotency-Key as it stands: no quotes, nothing to strip."""
    return text[:1] != '"' and _KEY.fullmatch(text) is not None


async def traceparent(request: Request) -> str | None:
    """Return the caller's trace context."""
    return traceparent_of(request.headers.get("traceparent", ""))


def traceparent_of(value: str) -> str | None:
    """Return a trace context where it is a valid one (W3C Trace Context); an invalid one is dropped, as the standard says."""
    return value[:55] if value and _TRACEPARENT.fullmatch(value) else None


_ETAG = re.compile(r'"v([0-9]{1,18})"')


async def if_match(
    request: Request,
    if_match: Annotated[str | None, Header(description="Act only if what the caller saw, by its ETag, is still current.")] = None,  # noqa: ARG001 - read from the request, which has all of them
) -> frozenset[int] | None:
    """Return the versions that the caller decided on; None where it does not say, or takes any (RFC 9110, section 13.1.1)."""
    values = request.headers.getlist("if-match")
    if not values or [value.strip() for value in values] == ["*"]:
        return None
    # Weak tags, and tags that are none of ours, match nothing: If-Match compares strongly.
    tags = (tag.strip() for value in values for tag in value.split(","))
    return frozenset(int(found[1]) for tag in tags if (found := _ETAG.fullmatch(tag)) is not None)


def etag(version: int) -> str:
    """Return the entity tag of a session's or an effect's version."""
    return f'"v{version}"'


def is_unchanged(request: Request, version: int) -> bool:
    """Tell whether the caller has this version already (If-None-Match, compared weakly)."""
    values = ",".join(request.headers.getlist("if-none-match"))
    tags = {tag.strip().removeprefix("W/") for tag in values.split(",")}
    return "*" in tags or etag(version) in tags


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls, under which Idempotency-Key, with which If-Match."""

    principal: Principal
    path: str
    key: str | None
    versions: frozenset[int] | None

    def ask(self, session_id: SessionId, tree: Json) -> Ask:
        """Return what the engine needs to know of this request; `tree` is its body."""
        repeatable = None
        if self.key is not None:
            repeatable = RepeatableRequest(subject=self.principal.subject, request=self.path, key=self.key, sha256=fingerprint(tree))
        return Ask(principal=self.principal, session_id=session_id, repeatable=repeatable, versions=self.versions)


IfMatch = Annotated[frozenset[int] | None, Depends(if_match)]
IdempotencyKey = Annotated[str | None, Depends(idempotency_key)]
Traceparent = Annotated[str | None, Depends(traceparent)]


def caller(*roles: Role) -> Callable[..., Awaitable[Caller]]:
    """Return a dependency that gives what there is to know of the caller of a repeatable verb, in one of these roles."""

    async def collect(
        request: Request, principal: Annotated[Principal, Depends(role_in(*roles))], key: IdempotencyKey, versions: IfMatch
    ) -> Caller:
        return Caller(principal=principal, path=f"{request.method} {request.url.path}", key=key, versions=versions)

    return collect


OperatorCaller = Annotated[Caller, Depends(caller(Role.OPERATOR))]
AgentCaller = Annotated[Caller, Depends(caller(Role.AGENT))]
AgentOrOperatorCaller = Annotated[Caller, Depends(caller(Role.AGENT, Role.OPERATOR))]
