"""What every route asks for first: who calls, in which role, under which key of idempotency. Must not read bodies."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Header, Request

from app.domain.errors import Forbidden, Malformed, Unauthenticated
from app.domain.model import Principal, RetryPolicy, Role
from app.engine.authentication import Authenticator
from app.engine.forward import Forward
from app.engine.orchestrator import Orchestrator
from app.engine.waits import Waits
from app.storage.database import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The parts that routes call, made once by the composition root."""

    database: Database
    authenticator: Authenticator
    forward: Forward
    waits: Waits
    orchestrator: Orchestrator | None
    retry_defaults: RetryPolicy
    schema_revision: str


async def engine(request: Request) -> Engine:
    """Return the engine of this application."""
    return cast("Engine", request.app.state.engine)


EngineDependency = Annotated[Engine, Depends(engine)]


async def authenticate(request: Request, engine: EngineDependency) -> Principal:
    """Return who holds the bearer key of this request.

    Raises:
        Unauthenticated: no such header, not exactly one, or a key that nobody holds.
    """
    values = request.headers.getlist("authorization")
    scheme, _, key = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    if scheme.lower() != "bearer":
        raise Unauthenticated("unauthenticated", "expected `Authorization: Bearer <key>` with a valid key")
    return await engine.authenticator.principal(key.strip())


def role_in(*roles: Role) -> Callable[[Principal], Awaitable[Principal]]:
    """Return a dependency that lets only these roles pass; an admin may do all that an operator may."""
    allowed = frozenset(roles) | ({Role.ADMIN} if Role.OPERATOR in roles else set())

    async def check(principal: Annotated[Principal, Depends(authenticate)]) -> Principal:
        if principal.role not in allowed:
            names = ", ".join(sorted(allowed))
            raise Forbidden("role_not_allowed", f"a key of role {principal.role} may not do this; it takes {names}", role=principal.role)
        return principal

    return check


Agent = Annotated[Principal, Depends(role_in(Role.AGENT))]
AgentOrOperator = Annotated[Principal, Depends(role_in(Role.AGENT, Role.OPERATOR))]
Anyone = Annotated[Principal, Depends(role_in(*Role))]
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


async def traceparent(request: Request) -> str | None:
    """Return the caller's trace context where it is a valid one (W3C Trace Context); an invalid one is dropped, as the standard says."""
    value = request.headers.get("traceparent", "")
    return value[:55] if _TRACEPARENT.fullmatch(value) else None


IdempotencyKey = Annotated[str | None, Depends(idempotency_key)]
Traceparent = Annotated[str | None, Depends(traceparent)]
