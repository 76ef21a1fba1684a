"""What an operator sees and says of destinations: the list, pause, resume, by role and by org. Must not test what a pause holds."""

import asyncio
from urllib.parse import urlsplit

import httpx
import pytest
import structlog

from app.cli import pausing
from app.domain.model import Role
from tests.conftest import StartService
from tests.factories import ORG, Client, JsonObject, Service, do_step
from tests.fakes import FakeEndpoint
from tests.probes import fetch

HERE, THERE = "a.example:443", "b.example:8443"
OPEN_SQL = "INSERT INTO circuits (org, destination, probe_at, last_error) VALUES ($1, $2, clock_timestamp(), 'http 503: moment')"
NOTHING = {"due": 0, "in_flight": 0, "later": 0, "oldest_due_at": None, "circuit": None, "paused": None}
ROUTES = [
    ("GET", "/destinations"),
    *(("POST", f"{path}/{verb}") for path in (f"/destinations/{HERE}", "") for verb in ("pause", "resume")),
]


async def say(client: Client, verb: str, destination: str | None = None, reason: str = "moving") -> httpx.Response:
    """Pause or resume a destination, or the org."""
    path = "" if destination is None else f"/destinations/{destination}"
    return await client.post(f"{path}/{verb}", {"reason": reason})


async def listed(client: Client, **params: object) -> JsonObject:
    """Return the list, which may be asked for."""
    response = await client.get("/destinations", params=params)
    response.raise_for_status()
    found: JsonObject = response.json()
    return found


async def by_name(client: Client) -> dict[str, JsonObject]:
    """Return what is listed of each destination."""
    return {item.pop("destination"): item for item in (await listed(client))["items"]}


async def test_destinations_are_listed_when_calls_wait_or_something_holds_them(
    services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """What waits, since when, who is at it, and why nothing goes there; where nothing is to be done is no place to look at."""
    service = await services(has_orchestrator=False)
    assert await listed(service.operator) == {"items": [], "paused": None, "next_cursor": None}
    waits = urlsplit(endpoint.url()).netloc
    for name in ("s", "t", "u"):
        await do_step(service.agent, name, 1, endpoint.url("/undo"))
        (await service.agent.fail(name)).raise_for_status()
    held = "UPDATE outgoing_calls SET leased_by = 'w', leased_until = clock_timestamp() + interval '1 h' WHERE session_id = 't'"
    await fetch(database_url, held)
    await fetch(database_url, "UPDATE outgoing_calls SET due_at = clock_timestamp() + interval '1 h' WHERE session_id = 'u'")
    await fetch(database_url, OPEN_SQL, ORG, HERE)
    (await say(service.operator, "pause", THERE)).raise_for_status()
    shown = await by_name(service.auditor)
    assert list(shown) == sorted(shown)
    assert set(shown) == {waits, HERE, THERE}
    (oldest,) = await fetch(database_url, "SELECT due_at FROM outgoing_calls WHERE session_id = 's'")
    assert shown[waits] == {**NOTHING, "due": 1, "in_flight": 1, "later": 1, "oldest_due_at": f"{oldest['due_at']:%Y-%m-%dT%H:%M:%S.%fZ}"}
    (circuit,) = await fetch(database_url, "SELECT opened_at, probe_at FROM circuits")
    assert shown[HERE] == {
        **NOTHING,
        "circuit": {
            "opened_at": f"{circuit['opened_at']:%Y-%m-%dT%H:%M:%S.%fZ}",
            "probe_at": f"{circuit['probe_at']:%Y-%m-%dT%H:%M:%S.%fZ}",
            "last_error": "http 503: moment",
        },
    }
    paused = shown[THERE].pop("paused")
    assert (paused.pop("at")[-1], paused) == ("Z", {"scope": "destination", "by": "operator:operator-1", "reason": "moving"})
    assert shown[THERE] == {name: value for name, value in NOTHING.items() if name != "paused"}


async def test_destinations_come_in_pages_when_there_are_many(services: StartService, database_url: str) -> None:
    """Every one once, by name, whatever made it one."""
    service = await services(has_orchestrator=False)
    names = [f"host-{number}.example:443" for number in range(5)]
    for number, name in enumerate(names):
        if number % 2:
            await fetch(database_url, OPEN_SQL, ORG, name)
        else:
            await do_step(service.agent, name.partition(".")[0], 1, f"https://{name}/undo")
            (await service.agent.fail(name.partition(".")[0])).raise_for_status()
    found: list[str] = []
    cursor: dict[str, object] = {}
    while True:
        page = await listed(service.operator, limit=2, **cursor)
        found += [item["destination"] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert found == names
    response = await service.operator.get("/destinations", params={"cursor": "bm8="})
    assert (response.status_code, response.json()["code"]) == (400, "bad_cursor")


async def test_pause_is_the_operators_to_order_when_roles_are_asked(services: StartService) -> None:
    """An agent neither sees nor holds where calls go, an auditor only sees, an admin may do all that an operator may."""
    service = await services(has_orchestrator=False)
    for role in Role:
        client = await service.client(role, f"{role}-2")
        for method, path in ROUTES:
            may = role in {Role.OPERATOR, Role.ADMIN} or (role is Role.AUDITOR and method == "GET")
            body = {"json": {"reason": "r"}} if method == "POST" else {}
            response = await client.request(method, f"/v1{path}", **body)
            assert response.status_code == (200 if may else 403), (role, path)
            assert may or response.json()["code"] == "role_not_allowed"


async def test_answer_is_the_same_when_an_order_is_repeated(services: StartService) -> None:
    """Who paused first, when and why stays; a repeat is told so, under any Idempotency-Key or none."""
    service = await services(has_orchestrator=False)
    with structlog.testing.capture_logs() as logs:
        for destination in (HERE, None):
            first = await say(service.operator, "pause", destination)
            again = await say(service.admin, "pause", destination, reason="another one")
            assert (first.status_code, again.status_code) == (200, 200)
            assert first.json() == again.json()
            assert first.json()["destination"] == destination
        for destination in (None, HERE):
            resumed = [await say(service.operator, "resume", destination) for _ in range(2)]
            assert [answer.json() for answer in resumed] == [{"destination": destination, "paused": None}] * 2
        path = f"/destinations/{HERE}/pause"
        keyed = [await service.operator.post(path, {"reason": f"r-{n}"}, headers={"Idempotency-Key": "k"}) for n in range(2)]
        assert keyed[0].content == keyed[1].content
    orders = [event for event in logs if event["event"] in {"paused", "resumed"}]
    assert [(event["event"], event["destination"], event["reason"]) for event in orders] == [
        ("paused", HERE, "moving"),
        ("paused", None, "moving"),
        ("resumed", None, "moving"),
        ("resumed", HERE, "moving"),
        ("paused", HERE, "r-0"),
    ]
    assert {(event["org"], event["actor"], event["log_level"]) for event in orders} == {(ORG, "operator:operator-1", "info")}


async def test_pause_is_one_orgs_own_when_another_has_the_same_destination(services: StartService) -> None:
    """No tenant sees, makes or takes away another's."""
    service = await services(has_orchestrator=False)
    foreigner = await service.client(Role.OPERATOR, "operator-1", "beta")
    for destination in (HERE, None):
        (await say(service.operator, "pause", destination)).raise_for_status()
        assert (await say(foreigner, "resume", destination)).json()["paused"] is None
    assert await listed(foreigner) == {"items": [], "paused": None, "next_cursor": None}
    mine = await listed(service.operator)
    assert (mine["paused"]["scope"], [item["paused"]["scope"] for item in mine["items"]]) == ("org", ["org"])


async def test_every_org_sees_it_when_everything_is_paused(services: StartService, database_url: str) -> None:
    """An operator finds out why nothing moves, and cannot lift what is not theirs; who ordered it is not told."""
    service = await services(has_orchestrator=False)
    (await say(service.operator, "pause", HERE)).raise_for_status()
    await asyncio.to_thread(pausing.pause, database_url, org=None, destination=None, reason="disk is full")
    for client in (service.operator, await service.client(Role.AUDITOR, "a", "beta")):
        paused = (await listed(client))["paused"]
        assert {name: paused[name] for name in ("scope", "by", "reason")} == {"scope": "everything", "by": None, "reason": "disk is full"}
    assert (await by_name(service.operator))[HERE]["paused"] == (await listed(service.operator))["paused"]
    resumed = (await say(service.operator, "resume")).json()
    assert resumed["paused"]["scope"] == "everything"
    await asyncio.to_thread(pausing.resume, database_url, org=None, destination=None, reason="done")
    shown = await listed(service.operator)
    assert (shown["paused"], shown["items"][0]["paused"]["scope"]) == (None, "destination")


BAD_DESTINATIONS = (
    "ledger.example", "ledger.example:", ":443", "ledger.example:0443", "ledger.example:443443", "Ledger.example:443",
    "https:ledger.example", "user@ledger.example:443", "ledger.example:443%20", "ledger.example:x", "b%C3%BCcher.example:443", "*",
)  # fmt: skip


@pytest.mark.parametrize("destination", BAD_DESTINATIONS)
async def test_destination_is_refused_when_no_call_could_go_there(destination: str, service: Service) -> None:
    """A pause under a name that no call ever has would hold nothing, and nobody would notice."""
    for verb in ("pause", "resume"):
        response = await say(service.operator, verb, destination)
        assert (response.status_code, response.json()["code"]) == (422, "invalid_request"), destination
    assert await fetch(service.database_url, "SELECT FROM pauses") == []


@pytest.mark.parametrize("destination", ["127.0.0.1:9009", "::1:80", "my_service:8080", "xn--bcher-kva.example:443", "localhost:1"])
async def test_destination_is_taken_when_the_list_could_show_it(destination: str, service: Service) -> None:
    """Names, addresses of both kinds, and any port."""
    (await say(service.operator, "pause", destination)).raise_for_status()
    assert list(await by_name(service.operator)) == [destination]


@pytest.mark.parametrize("body", [{}, {"reason": ""}, {"reason": 1}, {"reason": "r", "until": "noon"}, {"reason": "x" * 2_001}])
async def test_order_is_refused_when_it_has_no_reason(body: JsonObject, service: Service) -> None:
    """Whoever looks at what is held has to find why."""
    for path in ("/pause", "/resume", f"/destinations/{HERE}/pause", f"/destinations/{HERE}/resume"):
        response = await service.operator.post(path, body)
        assert (response.status_code, response.json()["code"]) == (422, "invalid_request"), path
