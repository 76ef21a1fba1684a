"""Speak HTTP with the service and with the endpoints of the story, as anybody could. Must not know what is asked, or why."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from app.cli.demo.failure import DemoFailed
from app.cli.demo.systems import JsonObject

CALL_SECONDS = 10.0  # everything is on this machine
UNWIND_SECONDS = 30  # a few undos, a lease of one second that has to run out, and a slow machine
PAGE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An answer that may be a refusal."""

    status: int
    members: JsonObject

    @property
    def code(self) -> str | None:
        """The stable code of a problem; None of anything else."""
        return self.members.get("code")

    def __str__(self) -> str:
        """Return the status, and of a problem its code and what it says."""
        return f"{self.status}" if self.code is None else f"{self.status} {self.code}: {self.members['detail']}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """The service's public API, seen with one key."""

    http: httpx.Client
    url: str
    key: str

    def get(self, path: str, **query: Any) -> JsonObject:  # noqa: ANN401 (httpx's own values)
        """GET something that must be there."""
        return accepted("GET", self.url + path, ask(self.http, "GET", self.url + path, params=query, headers=self._headers))

    def items(self, path: str, **query: str) -> Iterator[JsonObject]:
        """GET a list, page by page."""
        cursor: dict[str, str] = {}
        while True:
            page = self.get(path, limit=PAGE, **query, **cursor)
            yield from page["items"]
            if page["next_cursor"] is None:
                return
            cursor = {"cursor": page["next_cursor"]}

    def post(self, path: str, body: JsonObject, **query: int) -> JsonObject:
        """POST something that must be accepted."""
        return accepted("POST", self.url + path, self.try_post(path, body, **query))

    def try_post(self, path: str, body: JsonObject, **query: int) -> Answered:
        """POST something that may be refused."""
        return ask(self.http, "POST", self.url + path, json=body, params=query, headers=self._headers)

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}


def http_client() -> httpx.Client:
    """Return a client for everything on this machine; nothing is taken from the environment."""
    return httpx.Client(timeout=httpx.Timeout(CALL_SECONDS, read=UNWIND_SECONDS + CALL_SECONDS), trust_env=False)


def ask(client: httpx.Client, method: str, url: str, **options: Any) -> Answered:  # noqa: ANN401 (httpx's own options)
    """Send a request that must be answered with a JSON object, whatever it says."""
    try:
        response = client.request(method, url, **options)
    except httpx.HTTPError as error:
        raise DemoFailed(f"{method} {url} failed: {type(error).__name__}: {error}") from error
    try:
        members: JsonObject = response.json()
    except ValueError as error:
        raise DemoFailed(f"{method} {url} was answered {response.status_code} without JSON: {response.text[:500]}") from error
    return Answered(status=response.status_code, members=members)


def accepted(method: str, url: str, answer: Answered) -> JsonObject:
    """Return what a request was answered with that must not be refused."""
    if not httpx.codes.is_success(answer.status):
        raise DemoFailed(f"{method} {url} was answered {answer.status}: {str(answer.members)[:500]}")
    return answer.members
