"""Hold an answer of the service to the description of its API: status, problem's code, headers. Must not ask anything itself."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import httpx

from app.api.problems import declared_codes
from app.main import create_app
from app.settings import Settings

NO_SUCH_DATABASE = "postgresql://nobody@127.0.0.1:9/none"

# A request that has one of these reached no operation.
OF_NO_OPERATION = {"unknown_path", "method_not_allowed"}

# What frames an answer is not described: any server adds it.
FRAMING = {"connection", "content-length", "content-type", "date", "server", "transfer-encoding"}


class Described(NamedTuple):
    """One operation of the document, and what a path of it looks like."""

    method: str
    path: re.Pattern[str]
    responses: Mapping[str, Mapping[str, Any]]


@cache
def document() -> dict[str, Any]:
    """Return the description of an application that is not started."""
    described: dict[str, Any] = create_app(Settings(_env_file=None), NO_SUCH_DATABASE).openapi()
    return described


@cache
def _described() -> list[Described]:
    return [
        Described(method.upper(), re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), operation["responses"])
        for path, methods in document()["paths"].items()
        for method, operation in methods.items()
    ]


def responses_of(method: str, path: str) -> Mapping[str, Mapping[str, Any]] | None:
    """Return what an operation may answer, by status, or None where the document has no such operation; HEAD is answered as GET."""
    asked = "GET" if method == "HEAD" else method
    return next((found.responses for found in _described() if found.method == asked and found.path.fullmatch(path)), None)


def differences(answer: httpx.Response, body: bytes) -> list[str]:
    """Say in what an answer differs from what is described for it; of what is not described at all nothing is said."""
    request = answer.request
    responses = responses_of(request.method, request.url.raw_path.decode().partition("?")[0])
    code = httpx.Response(200, content=body).json().get("code") if body and answer.is_error else None  # HEAD has no body
    if responses is None or code in OF_NO_OPERATION:
        return []
    declared = responses.get(str(answer.status_code))
    if declared is None:
        return [f"status {answer.status_code}"]
    headers: Mapping[str, Any] = declared.get("headers", {})
    components = document()["components"]["headers"]
    sent = set(answer.headers) - FRAMING
    found = [f"header {name} is not declared" for name in sorted(sent - {name.lower() for name in headers})]
    required = {name for name in headers if components[name].get("required")}
    found += [f"header {name} is not sent" for name in sorted(required) if name.lower() not in sent]
    if code is not None and code not in declared_codes({"": declared}):
        found.append(f"code {code} is not declared")
    return found


async def expect_described(answer: httpx.Response) -> None:
    """Refuse an answer that the description does not hold; for the hooks of a client, so that every test's traffic is looked at.

    Raises:
        AssertionError: status, code or a header is not declared, or a header that is always there is not.
    """
    found = differences(answer, await answer.aread() if answer.is_error else b"")
    if found:
        raise AssertionError(f"{answer.request.method} {answer.request.url} -> {answer.status_code}: {'; '.join(found)}")
