"""Who may do what, and whose things are there at all: every route against every role, other orgs and other agents."""

import json
from typing import NamedTuple
from uuid import UUID

import httpx
import pytest

from app.domain.model import Role
from tests.factories import Client, Service, do_step, park, undo_at
from tests.fakes import FakeEndpoint
from tests.probes import row_counts

URL = "http://127.0.0.1:9/undo"


class Route(NamedTuple):
    """One route: how to call it and who may."""

    method: str
    path: str
    body: object
    roles: str
    opens: bool = False
    """It opens the session where there is none, so nothing of the org is missing to it."""
    found: int = 200
    """What a caller who may is answered about a session that is there, is active and has one committed step."""


ROUTES = (
    Route("PUT", "/v1/sessions/{session_id}", {}, "agent operator admin", opens=True),
    Route("GET", "/v1/sessions/{session_id}", None, "agent operator auditor admin"),
    Route(
        "POST",
        "/v1/sessions/{session_id}/intercept",
        {"tool": "t", "args": 1, "step_index": 9, "compensation": undo_at(URL)},
        "agent",
        opens=True,
    ),
    Route("GET", "/v1/sessions/{session_id}/effects/{step}", None, "agent operator auditor admin"),
    Route("POST", "/v1/sessions/{session_id}/effects/{step}/commit", {"result": 1}, "agent operator admin", found=403),
    Route("POST", "/v1/sessions/{session_id}/effects/{step}/fail", {"error": "x"}, "agent operator admin", found=403),
    Route("POST", "/v1/sessions/{session_id}/effects/{step}/approve", {}, "operator admin", found=404),
    Route("POST", "/v1/sessions/{session_id}/effects/{step}/reject", {"reason": "x"}, "operator admin", found=404),
    Route("POST", "/v1/sessions/{session_id}/effects/{step}/resume", {"payload": "x"}, "agent operator admin", found=404),
    Route(
        "POST",
        "/v1/sessions/{session_id}/effects/{step}/settle",
        {"reason": "x", "outcome": "not_applied"},
        "operator admin",
        found=409,
    ),
    Route("POST", "/v1/sessions/{session_id}/undo/{undo_id}/retry", {"reason": "x"}, "operator admin", found=404),
    Route("POST", "/v1/sessions/{session_id}/undo/{undo_id}/skip", {"reason": "x"}, "operator admin", found=404),
    Route("POST", "/v1/sessions/{session_id}/unwind", {"reason": "x"}, "operator admin", found=409),
    Route("POST", "/v1/sessions/{session_id}/halt", {"reason": "x"}, "operator admin", found=409),
    Route("POST", "/v1/sessions/{session_id}/resolve", {"reason": "x"}, "operator admin", found=409),
    Route("GET", "/v1/sessions/{session_id}/escalation", None, "operator auditor admin", found=404),
    Route("POST", "/v1/sessions/{session_id}/fail", {"error": "x"}, "agent operator admin"),
    Route("POST", "/v1/sessions/{session_id}/complete", {}, "agent"),
    Route("POST", "/v1/sessions/{session_id}/touch", {}, "agent"),
    Route("GET", "/v1/sessions/{session_id}/journal", None, "operator auditor admin"),
    Route("GET", "/v1/sessions/{session_id}/journal/verify", None, "operator auditor admin"),
)
LISTS = (
    Route("GET", "/v1/sessions", None, "agent operator auditor admin"),
    Route("GET", "/v1/approvals", None, "operator auditor admin"),
    Route("GET", "/v1/escalations", None, "operator auditor admin"),
    Route("GET", "/v1/destinations", None, "operator auditor admin"),
)
TOOL = "/v1/tools/{name}"  # these know no session: see test_tools_api.py
# Nor do these: see test_destinations_api.py.
HOLD_ROUTES = {("POST", f"/v1{path}/{verb}") for path in ("/destinations/{destination}", "") for verb in ("pause", "resume")}
TOOL_ROUTES = {("GET", "/v1/tools"), ("GET", TOOL), ("PUT", TOOL), ("DELETE", TOOL)}


def path_of(route: Route, session_id: str) -> str:
    """Return where a route is called about a session."""
    return route.path.format(session_id=session_id, step=1, undo_id=UUID(int=7))


async def call(client: Client, route: Route, session_id: str) -> httpx.Response:
    """Call a route about a session's first step, or about an undo that nobody has."""
    path = path_of(route, session_id)
    return await client.request(route.method, path, **({} if route.body is None else {"json": route.body}))


def without_names(response: httpx.Response, session_id: str) -> dict[str, object]:
    """Return a problem without what differs between any two answers."""
    problem: dict[str, object] = json.loads(response.text.replace(session_id, "*"))
    del problem["instance"]
    return problem


@pytest.fixture
async def busy(service: Service, endpoint: FakeEndpoint) -> Service:
    """Return a service in which one session of the first agent is active with one committed effect."""
    await do_step(service.agent, "theirs", 1, endpoint.url("/undo"), {"secret": "result-of-acme"})
    return service


def test_every_route_is_judged_here_when_the_service_has_one(service: Service) -> None:
    """A route that is added and not listed in these tables is noticed."""
    described = {
        (method.upper(), path) for path, methods in service.app.openapi()["paths"].items() for method in methods if path.startswith("/v1")
    }
    assert described == {(route.method, route.path) for route in (*ROUTES, *LISTS)} | TOOL_ROUTES | HOLD_ROUTES


async def test_role_is_judged_before_existence_on_every_route(busy: Service) -> None:
    """A role that may not use a route gets 403 for sessions that are there and for ones that are not; the others do not."""
    before = await row_counts(busy.database_url)
    for role in Role:
        client = await busy.client(role, f"{role}-9")
        for route in (*ROUTES, *LISTS):
            for session_id in ("ghost", "theirs"):
                if role in route.roles.split() and (route.opens or route.path == "/v1/sessions/{session_id}/fail"):
                    continue  # would change something: what it answers is tested where it belongs
                response = await call(client, route, session_id)
                where = (role, route.method, route.path, session_id)
                if role not in route.roles.split():
                    assert (response.status_code, response.json()["code"]) == (403, "role_not_allowed"), where
                else:
                    is_there = route in LISTS or (session_id == "theirs" and role is not Role.AGENT)
                    assert response.status_code == (route.found if is_there else 404), where
                    assert response.is_success or response.json()["code"] != "role_not_allowed", where
    assert await row_counts(busy.database_url) == before


async def test_session_of_another_agent_is_not_there_on_any_route(busy: Service) -> None:
    """Another agent of the same org gets what it would get for a session that does not exist, and changes nothing."""
    stranger = await busy.client(Role.AGENT, "agent-2")
    before = await row_counts(busy.database_url)
    for route in (route for route in ROUTES if "agent" in route.roles.split()):
        response = await call(stranger, route, "theirs")
        assert response.status_code == 404, route
        assert "result-of-acme" not in response.text
        ghost = await stranger.get("/sessions/ghost")
        assert without_names(response, "theirs") == without_names(ghost, "ghost"), route
    assert (await stranger.get("/sessions")).json()["items"] == []
    assert await row_counts(busy.database_url) == before
    second_key = await busy.client(Role.AGENT, "agent-1")
    assert (await second_key.get("/sessions/theirs")).status_code == 200, "a subject may have several keys"


async def test_session_of_another_org_is_not_there_on_any_route(busy: Service) -> None:
    """Every role of another org gets 404 with the body of a session that does not exist; even for an agent of the same name."""
    await park(busy.agent, "parked", 1, "{}")
    await do_step(busy.agent, "halted", 1, URL, max_retries=0)
    assert (await busy.agent.fail("halted", wait_s=20)).json()["state"] == "halted"
    (await busy.operator.post("/destinations/ledger.example:443/pause", {"reason": "r"})).raise_for_status()
    for route in LISTS:
        assert (await call(busy.operator, route, "")).json()["items"], "there is something that must not be shown"
    before = await row_counts(busy.database_url)
    for role in Role:
        foreigner = await busy.client(role, f"{role}-1", org="other-org")
        for route in (route for route in ROUTES if role in route.roles.split() and not route.opens):
            response = await call(foreigner, route, "theirs")
            ghost = await call(foreigner, route, "ghost")
            assert (response.status_code, ghost.status_code) == (404, 404), (role, route)
            assert without_names(response, "theirs") == without_names(ghost, "ghost"), (role, route)
        for route in (route for route in LISTS if role in route.roles.split()):
            response = await call(foreigner, route, "")
            assert (response.status_code, response.json()["items"]) == (200, []), (role, route)
            assert response.json().get("counts", []) == [], (role, route)
    assert await row_counts(busy.database_url) == before


async def test_orgs_do_not_meet_when_they_use_one_session_id(busy: Service, endpoint: FakeEndpoint) -> None:
    """Each org has a session of that name: effects, keys, undo and journal of the one are untouched by the other's."""
    foreigner = await busy.client(Role.AGENT, "agent-1", org="other-org")
    watcher = await busy.client(Role.OPERATOR, "operator-1", org="other-org")
    shown = (await busy.agent.get("/sessions/theirs")).text
    opened = await foreigner.intercept("theirs", idempotency_key="k", step_index=1, compensation=undo_at(endpoint.url("/foreign")))
    assert (opened.status_code, opened.json()["decision"]) == (201, "execute")
    assert (await foreigner.fail("theirs", wait_s=20)).json()["state"] == "compensated"
    assert [request.path for request in endpoint.received] == ["/foreign"]
    assert (await busy.agent.get("/sessions/theirs")).text == shown
    assert "SESSION_FAILED" not in await busy.operator.kinds("theirs")
    for operator in (busy.operator, watcher):
        assert (await operator.get("/sessions/theirs/journal/verify")).json()["valid"] is True


async def test_caller_is_unknown_when_the_key_is_not_one(busy: Service) -> None:
    """No key, two, another scheme, an empty or wrong one: 401 with a challenge on every route, the same body for all."""
    good = busy.agent.key
    headers: list[list[tuple[str, str]]] = [
        [],
        [("Authorization", "Bearer ")],
        [("Authorization", "Bearer")],
        [("Authorization", good)],
        [("Authorization", f"Basic {good}")],
        [("Authorization", f"Bearer {good[:-1]}{'0' if good[-1] != '0' else '1'}")],
        [("Authorization", f"Bearer cm_{'0' * 12}_{'0' * 64}")],
        [("Authorization", f"Bearer {good} {good}")],
        [("Authorization", f"Bearer {good.upper()}")],
        [("Authorization", f"Bearer {good}"), ("Authorization", f"Bearer {good}")],
        [("Authorization", f"Bearer {'x' * 10_000}")],
        [("X-Api-Key", good)],
    ]
    bodies = set()
    for sent in headers:
        response = await busy.agent.http.get("/v1/sessions/theirs", headers=sent)
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer"), sent
        bodies.add(json.dumps({name: value for name, value in response.json().items() if name != "instance"}))
    assert len(bodies) == 1
    for route in (*ROUTES, *LISTS):
        path = path_of(route, "theirs")
        response = await busy.agent.http.request(route.method, path, content=b"not json", headers={"Content-Type": "text/plain"})
        assert response.status_code == 401, route
    lower_case = await busy.agent.http.get("/v1/sessions/theirs", headers={"Authorization": f"bearer {good}"})
    assert lower_case.status_code == 200
