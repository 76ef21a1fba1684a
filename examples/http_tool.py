"""Run a tool that is an HTTP endpoint. Must not know Countermand: only the key that it handed out."""

from typing import Any, Protocol

import httpx

TIMEOUT_SECONDS = 2.0  # for one call; after that nobody knows whether it happened


class NotApplied(Exception):
    """The tool certainly did nothing, so there is nothing to undo. Whatever else is raised leaves that open."""


class HttpTool(Protocol):
    """A tool that runs with a payload, under the forward key."""

    def __call__(self, payload: str, forward_key: str, /) -> dict[str, Any]:
        """Run it."""


def http_tool(url: str) -> HttpTool:
    """Return a tool that POSTs its payload.

    The forward key goes downstream as the Idempotency-Key: a repeat does nothing twice, and an undo can find the call by it. A connection
    that was never made, a 4xx and a 503 of these systems did nothing; of a timeout or any other answer nobody knows.
    """

    def run(payload: str, forward_key: str, /) -> dict[str, Any]:
        headers = {"Idempotency-Key": forward_key, "Content-Type": "application/json"}
        try:
            answer = httpx.post(url, content=payload, headers=headers, timeout=TIMEOUT_SECONDS)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise NotApplied(f"{url} cannot be reached: {error}") from error
        if answer.is_client_error or answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise NotApplied(f"{url} answered {answer.status_code} {answer.text}")
        return dict(answer.raise_for_status().json())

    return run
