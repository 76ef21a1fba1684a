"""HEAD answers with the head of the GET it stands for (RFC 9110, section 9.3.2). Must not test what GET answers."""

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from tests.factories import Service, do_step, park
from tests.fakes import FakeEndpoint
from tests.halts import Night
from tests.probes import row_counts, through

# Of the same length each time it is asked for: the answer names no request.
GET_PATHS = (
    "/livez",
    "/readyz",
    "/v1/sessions",
    "/v1/sessions/s",
    "/v1/sessions/s/effects/1",
    "/v1/sessions/s/journal",
    "/v1/sessions/s/escalation",
    "/v1/sessions/halted/escalation",
    "/v1/approvals",
    "/v1/escalations",
    "/v1/tools/none",
)
COMPARED = ("content-type", "content-length", "etag", "cache-control", "retry-after")


def head_of(response: httpx.Response) -> tuple[int, dict[str, str | None]]:
    """Return status and headers, without those that differ from one answer to the next."""
    return response.status_code, {name: response.headers.get(name) for name in COMPARED}


@pytest.mark.parametrize("path", GET_PATHS)
async def test_head_is_that_of_get_without_a_body_when_the_path_can_be_got(service: Service, endpoint: FakeEndpoint, path: str) -> None:
    """Probes and clients that look before they fetch are told the same, the length included, and nothing is written."""
    await do_step(service.agent, "s", 1, endpoint.url("/1"))
    await park(service.agent, "parked", 1, "{}")
    if "halted" in path:  # nowhere else: a list tells for how long, whose digits may grow in between
        await Night(service=service, endpoint=endpoint).refused("halted")
    before = await row_counts(service.database_url)
    got = await service.operator.request("GET", path)
    sent: list[bytes] = []

    async def looking_app(scope: Scope, receive: Receive, send: Send) -> None:
        async def look(message: Message) -> None:
            sent.append(message.get("body", b""))  # the client would drop it unseen
            await send(message)

        await service.app(scope, receive, look)

    response = await through(looking_app, service.operator).request("HEAD", path)
    assert head_of(response) == head_of(got)
    assert (b"".join(sent), got.content != b"") == (b"", True)
    assert await row_counts(service.database_url) == before


async def test_head_is_not_modified_when_the_version_is_known(service: Service, endpoint: FakeEndpoint) -> None:
    """What a client has seen already is not sent again, asked for in either way."""
    await do_step(service.agent, "s", 1, endpoint.url("/1"))
    seen = (await service.agent.request("HEAD", "/v1/sessions/s")).headers["etag"]
    response = await service.agent.request("HEAD", "/v1/sessions/s", headers={"If-None-Match": seen})
    assert (response.status_code, response.headers["etag"], response.content) == (304, seen, b"")


@pytest.mark.parametrize(("key", "path", "status"), [("valid", "/v1/sessions/none", 404), ("none", "/v1/sessions/s", 401)])
async def test_head_is_refused_as_get_is_when_there_is_nothing_to_show(service: Service, key: str, path: str, status: int) -> None:
    """A refusal is a problem without its text."""
    headers = {} if key == "none" else {"Authorization": f"Bearer {service.agent.key}"}
    response = await service.agent.http.head(path, headers=headers)
    assert (response.status_code, response.headers["content-type"], response.content) == (status, "application/problem+json", b"")


@pytest.mark.parametrize(
    "path",
    [
        *(f"/v1/sessions/s/{verb}" for verb in ("fail", "touch", "unwind", "halt", "resolve")),
        *(f"/v1/sessions/s/effects/1/{verb}" for verb in ("commit", "approve", "reject", "resume", "settle")),
        *(f"/v1/sessions/s/undo/00000000-0000-0000-0000-000000000007/{verb}" for verb in ("retry", "skip")),
    ],
)
async def test_head_is_refused_when_the_path_takes_posts_only(service: Service, endpoint: FakeEndpoint, path: str) -> None:
    """There is no GET that it could stand for, and it is not taken for the POST."""
    await do_step(service.agent, "s", 1, endpoint.url("/1"))
    before = await row_counts(service.database_url)
    response = await service.agent.request("HEAD", path)
    assert (response.status_code, response.headers["content-type"], response.content) == (405, "application/problem+json", b"")
    assert response.headers["allow"] == "POST"
    assert await row_counts(service.database_url) == before
