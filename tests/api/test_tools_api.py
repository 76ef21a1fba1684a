"""Registered tools over HTTP: versions, who may register what, and how a registration decides a call and its undo."""

import asyncio
from datetime import datetime
from typing import Any

import httpx
import pytest

from app.domain.model import Role
from tests.conftest import StartService
from tests.factories import JsonObject, Service, do_step
from tests.fakes import FakeEndpoint, Reply
from tests.probes import fetch, rest, row_counts

UNDO = {"url": "https://billing.example/undo", "args": {"id": {"$ref": "result#/id"}}}
CREDIT = {"reversibility": "compensatable", "compensation": UNDO}
RAW = {"Content-Type": "application/json"}


def fault(response: httpx.Response) -> tuple[int, str, list[str]]:
    """Return status, code and the pointers of a refusal."""
    problem = response.json()
    return response.status_code, problem["code"], [error.get("pointer") for error in problem.get("errors") or []]


def registered(response: httpx.Response) -> tuple[int, int]:
    """Return status and version of a registration."""
    return response.status_code, response.json()["version"]


async def tool_count(service: Service) -> int:
    """Count the versions of all tools of all orgs."""
    count: int = (await fetch(service.database_url, "SELECT count(*) AS n FROM tools"))[0]["n"]
    return count


async def test_version_is_new_only_when_the_definition_differs(service: Service) -> None:
    """Versions are immutable and counted; the same words in another order, with defaults said, are the same definition."""
    first = await service.admin.register("issue_credit", **CREDIT)
    assert registered(first) == (201, 1)
    shown = first.json()
    said = {"idempotent": False, "description": "", "payload_schema": None, "approval": None}
    assert shown.items() >= {"name": "issue_credit", "reversibility": "compensatable", "created_by": "admin-1", **said}.items()
    assert shown["compensation"].items() >= {**UNDO, "max_retries": 3, "on_unknown": "compensate", "unknown": None}.items()
    again = await service.admin.register("issue_credit", compensation={**UNDO, "max_retries": 3}, reversibility="compensatable", **said)
    assert (registered(again), again.text) == ((200, 1), first.text)

    assert registered(await service.admin.register("issue_credit", **CREDIT, description="a credit")) == (201, 2)
    assert registered(await service.admin.register("issue_credit", **CREDIT)) == (201, 3)
    assert (await service.agent.get("/tools/issue_credit")).json()["version"] == 3
    assert (await service.agent.get("/tools/issue_credit", params={"version": 1})).text == first.text
    assert fault(await service.agent.get("/tools/issue_credit", params={"version": 4})) == (404, "tool_not_found", [])
    for bad in ("0", "x", "01", "2147483648"):
        assert (await service.agent.get("/tools/issue_credit", params={"version": bad})).status_code == 422


async def test_literals_are_kept_when_a_definition_is_shown(service: Service) -> None:
    """Number literals and key order of schema and args come back as they were said, and decide whether it is the same."""
    args, schema = '{"z":1.10,"a":123456789012345678901234567890}', '{"type":"object","minProperties":1,"x-rate":1E+2}'
    body = f'{{"reversibility":"compensatable","payload_schema":{schema},"compensation":{{"url":"https://b.example/","args":{args}}}}}'
    put = await service.admin.request("PUT", "/v1/tools/t", content=body.encode(), headers=RAW)
    assert put.status_code == 201
    shown = (await service.agent.get("/tools/t")).text
    assert f'"payload_schema":{schema}' in shown
    assert f'"args":{args}' in shown
    other = await service.admin.request("PUT", "/v1/tools/t", content=body.replace("1.10", "1.1").encode(), headers=RAW)
    assert registered(other) == (201, 2)


async def test_dry_run_answers_and_stores_nothing(service: Service) -> None:
    """It tells the version there would be, or the refusal, and the registry stays as it was."""
    dry = {"dry_run": "true"}
    would = await service.admin.put("/tools/t", CREDIT, params=dry)
    assert (registered(would), would.json()["created_at"]) == ((201, 1), None)
    assert (await service.admin.get("/tools/t")).status_code == 404
    await service.admin.register("t", **CREDIT)
    assert registered(await service.admin.put("/tools/t", {"reversibility": "read_only"}, params=dry)) == (201, 2)
    assert registered(await service.admin.put("/tools/t", CREDIT, params=dry)) == (200, 1)
    assert fault(await service.admin.put("/tools/t", {"reversibility": "reversible"}, params=dry))[:2] == (422, "tool_needs_compensation")
    assert (await service.admin.put("/tools/t", CREDIT, params={"dry_run": "perhaps"})).status_code == 422
    assert await tool_count(service) == 1


async def test_name_is_unregistered_when_it_was_removed(service: Service) -> None:
    """Removal is a version of its own: old ones can still be read, calls are treated as nobody's tool, a return counts on."""
    await service.admin.register("t", **CREDIT)
    assert (await service.agent.intercept("before", tool="t", step_index=1)).json()["decision"] == "execute"
    assert (await service.admin.request("DELETE", "/v1/tools/t")).status_code == 204
    assert fault(await service.admin.request("DELETE", "/v1/tools/t"))[:2] == (404, "tool_not_found")
    assert fault(await service.agent.get("/tools/t"))[:2] == (404, "tool_not_found")
    assert (await service.agent.get("/tools")).json() == {"items": [], "next_cursor": None}
    assert (await service.agent.get("/tools/t", params={"version": 1})).json()["version"] == 1
    assert (await service.agent.get("/tools/t", params={"version": 2})).status_code == 404

    parked = await service.agent.intercept("after", tool="t", step_index=1)
    assert (parked.status_code, parked.json()["decision"]) == (202, "await_approval")
    effect = (await service.agent.get("/sessions/after/effects/1")).json()
    assert (effect["tool_version"], effect["reversibility"]) == (None, "irreversible")
    assert registered(await service.admin.register("t", **CREDIT)) == (201, 3)
    assert (await service.agent.get("/sessions/before/effects/1")).json()["tool_version"] == 1


async def test_list_has_every_tool_once_when_it_is_read_in_pages(service: Service) -> None:
    """The newest versions, by name, each on one page only."""
    names = ["a", "B", "b.1", "b:2", "c-3", "_", "Z9"]
    for name in names:
        await service.admin.register(name, reversibility="read_only")
    await service.admin.register("a", reversibility="irreversible")
    pages: list[list[JsonObject]] = []
    query: JsonObject | None = {"limit": 3}
    while query is not None:
        page = (await service.auditor.get("/tools", params=query)).json()
        pages.append(page["items"])
        query = {"limit": 3, "cursor": page["next_cursor"]} if page["next_cursor"] else None
    assert [len(items) for items in pages] == [3, 3, 1]
    found = [tool["name"] for items in pages for tool in items]
    assert (sorted(found), len(set(found))) == (sorted(names), len(names))
    assert {tool["name"]: tool["version"] for items in pages for tool in items}["a"] == 2
    for bad in ({"limit": "0"}, {"limit": "201"}, {"cursor": "no/name"}, {"after": "a"}):
        assert (await service.auditor.get("/tools", params=bad)).status_code == 422


async def test_only_admins_write_and_every_org_has_its_own_names(service: Service) -> None:
    """Role first; another org's tools are not there, for reading, for removing or for deciding a call."""
    await service.admin.register("t", **CREDIT)
    for client in (service.agent, service.operator, service.auditor):
        assert fault(await client.register("t", **CREDIT))[:2] == (403, "role_not_allowed")
        assert fault(await client.request("DELETE", "/v1/tools/none"))[:2] == (403, "role_not_allowed")
        assert (await client.get("/tools/t")).status_code == 200
        assert len((await client.get("/tools")).json()["items"]) == 1

    stranger = await service.client(Role.ADMIN, "admin-1", org="globex")
    assert fault(await stranger.get("/tools/t"))[:2] == (404, "tool_not_found")
    assert (await stranger.get("/tools")).json()["items"] == []
    assert fault(await stranger.request("DELETE", "/v1/tools/t"))[:2] == (404, "tool_not_found")
    foreign_agent = await service.client(Role.AGENT, "agent-1", org="globex")
    assert (await foreign_agent.intercept("s", tool="t", step_index=1)).status_code == 202
    assert registered(await stranger.register("t", reversibility="read_only")) == (201, 1)
    assert (await service.agent.get("/tools/t")).json()["reversibility"] == "compensatable"
    nobody = await service.admin.http.get("/v1/tools/t")
    assert nobody.status_code == 401


NAMELESS: list[tuple[JsonObject, str, str]] = [
    ({}, "invalid_request", "/reversibility"),
    ({"reversibility": "mostly"}, "invalid_request", "/reversibility"),
    ({"reversibility": "reversible"}, "tool_needs_compensation", "/compensation"),
    ({"reversibility": "compensatable"}, "tool_needs_compensation", "/compensation"),
    ({"reversibility": "read_only", "compensation": UNDO}, "compensation_not_allowed", "/compensation"),
    ({"reversibility": "irreversible", "compensation": UNDO}, "compensation_not_allowed", "/compensation"),
    ({"reversibility": "read_only", "owner": "me"}, "invalid_request", "/owner"),
    ({"reversibility": "read_only", "idempotent": "yes"}, "invalid_request", "/idempotent"),
    ({"reversibility": "read_only", "description": "x" * 2001}, "invalid_request", "/description"),
    ({"reversibility": "read_only", "approval": {}}, "invalid_request", "/approval/required"),
    ({"reversibility": "read_only", "approval": {"required": True, "ttl_seconds": 0}}, "invalid_request", "/approval/ttl_seconds"),
    ({"reversibility": "read_only", "approval": {"required": True, "by": "x"}}, "invalid_request", "/approval/by"),
    ({"reversibility": "read_only", "payload_schema": 5}, "bad_payload_schema", "/payload_schema"),
    ({"reversibility": "read_only", "payload_schema": {"type": "text"}}, "bad_payload_schema", "/payload_schema/type"),
    ({"reversibility": "read_only", "payload_schema": {"$ref": "https://x.example/s"}}, "bad_payload_schema", "/payload_schema/$ref"),
    ({"reversibility": "read_only", "payload_schema": {"$ref": "#/title", "title": "t"}}, "bad_payload_schema", "/payload_schema/title"),
]
IN_UNDO: list[tuple[JsonObject, str, str]] = [
    ({"url": None}, "invalid_request", "/compensation/url"),
    ({"url": "https://b.example/" + "x" * 2048}, "invalid_request", "/compensation/url"),
    ({"url": "file:///etc/passwd"}, "url_refused", "/compensation/url"),
    ({"url": "http://169.254.169.254/latest"}, "url_refused", "/compensation/url"),
    ({"unknown": {"args": {}, "url": "http://10.0.0.1/"}}, "url_refused", "/compensation/unknown/url"),
    ({"unknown": {"args": {"$ref": "nowhere#/a"}}}, "bad_reference", "/compensation/unknown/args"),
    ({"unknown": {"arguments": {}}}, "invalid_request", "/compensation/unknown/args"),
    ({"args": {"a": [{"$ref": "result/id"}]}}, "bad_reference", "/compensation/args/a/0"),
    ({"args": [{"$ref": "result#/id"}] * 33}, "bad_reference", "/compensation/args/32"),
    ({"method": "DELETE"}, "invalid_request", "/compensation/method"),
    ({"on_unknown": "guess"}, "invalid_request", "/compensation/on_unknown"),
    ({"independent": 1}, "invalid_request", "/compensation/independent"),
    ({"max_retries": 101}, "invalid_request", "/compensation/max_retries"),
    ({"max_retries": -1}, "invalid_request", "/compensation/max_retries"),
    ({"multiplier": 0.5}, "invalid_request", "/compensation/multiplier"),
    ({"initial_interval_ms": 0}, "invalid_request", "/compensation/initial_interval_ms"),
    ({"timeout_ms": 600_001}, "invalid_request", "/compensation/timeout_ms"),
    ({"deadline_ms": 0}, "invalid_request", "/compensation/deadline_ms"),
    ({"retry_on": [399]}, "invalid_request", "/compensation/retry_on/0"),
    ({"compensated_on": [404, 600]}, "invalid_request", "/compensation/compensated_on/1"),
    ({"retry_on": list(range(400, 433))}, "invalid_request", "/compensation/retry_on"),
    ({"description": "x" * 501}, "invalid_request", "/compensation/description"),
]


async def test_definition_is_refused_with_its_place_when_it_could_not_work(services: StartService) -> None:
    """Every kind of fault is a 422 with a pointer (sizes a 413), and nothing is stored."""
    service = await services(egress_allow="")
    in_undo = [({"reversibility": "reversible", "compensation": {**UNDO, **members}}, code, at) for members, code, at in IN_UNDO]
    for body, code, pointer in [*NAMELESS, *in_undo]:
        status, found, pointers = fault(await service.admin.put("/tools/t", body))
        assert (status, found) == (422, code), body
        assert pointer in pointers, body
    large = {"reversibility": "read_only", "payload_schema": {"description": "x" * 65_536}}
    assert fault(await service.admin.put("/tools/t", large)) == (413, "payload_too_large", ["/payload_schema"])
    for name in ("a%20b", "x" * 201, "caf%C3%A9", "a%00"):
        assert (await service.admin.put(f"/tools/{name}", CREDIT)).status_code == 422
    assert await tool_count(service) == 0


async def test_one_version_is_made_when_ten_register_the_same_at_once(service: Service) -> None:
    """The winner's version is everybody's answer."""
    answers = await asyncio.gather(*(service.admin.register("t", **CREDIT) for _ in range(10)))
    assert sorted(registered(answer) for answer in answers) == [(200, 1)] * 9 + [(201, 1)]
    assert len({answer.text for answer in answers}) == 1


async def test_no_version_is_given_twice_when_admins_race(service: Service) -> None:
    """Each different definition gets a version of its own, or is told to try again."""
    answers = await asyncio.gather(*(service.admin.register("t", **CREDIT, description=str(n)) for n in range(6)))
    versions = [answer.json()["version"] for answer in answers if answer.status_code == 201]
    assert sorted(versions) == list(range(1, len(versions) + 1))
    assert {answer.status_code for answer in answers} <= {201, 503}
    assert await tool_count(service) == len(versions)


async def test_payload_is_refused_when_it_does_not_fit_the_schema(services: StartService) -> None:
    """The pointers lead into the payload, wherever it stood in the request; nothing is stored; what fits goes ahead."""
    service = await services(inline_tools="deny")
    schema = {"type": "object", "required": ["order"], "properties": {"amount": {"type": "integer"}, "tags": {"items": {"type": "string"}}}}
    await service.admin.register("t", **CREDIT, payload_schema=schema)
    before = await row_counts(service.database_url)
    for options, pointers in (
        ({"args": {"amount": "1", "order": 1, "tags": ["a", 2]}}, ["/args/amount", "/args/tags/1"]),
        ({"payload": '{"order":1,"amount":1.5}'}, ["/payload/amount"]),
        ({"payload": "{}"}, ["/payload"]),
        ({"payload": "no json"}, ["/payload"]),
        ({"args": None}, ["/args"]),
    ):
        refused = await service.agent.intercept("s", tool="t", step_index=1, **options)
        assert fault(refused) == (422, "payload_schema", pointers)
        assert refused.json()["tool_version"] == 1
    assert await row_counts(service.database_url) == before
    taken = await service.agent.intercept("s", tool="t", step_index=1, payload='{ "order":1, "amount":2.0 }')
    assert (taken.status_code, taken.json()["payload"]) == (201, '{ "order":1, "amount":2.0 }')


async def test_call_may_only_raise_what_is_registered(service: Service) -> None:
    """No inline undo beside the registered one, no lower class; a raise to irreversible is parked without an undo."""
    await service.admin.register("t", **CREDIT)
    await service.admin.register("look", reversibility="read_only")
    before = await row_counts(service.database_url)
    for body, expected in (
        ({"tool": "t", "compensation": UNDO}, ("inline_not_allowed", "/compensation")),
        ({"tool": "look", "compensation": UNDO, "reversibility": "compensatable"}, ("inline_not_allowed", "/compensation")),
        ({"tool": "t", "reversibility": "reversible"}, ("reversibility_lowered", "/reversibility")),
        ({"tool": "t", "reversibility": "read_only"}, ("reversibility_lowered", "/reversibility")),
        ({"tool": "look", "reversibility": "compensatable"}, ("tool_needs_compensation", "/reversibility")),
    ):
        status, code, pointers = fault(await service.agent.intercept("s", step_index=1, **body))
        assert (status, code, pointers) == (422, expected[0], [expected[1]])
    assert await row_counts(service.database_url) == before

    same = await service.agent.intercept("s", tool="t", step_index=1, reversibility="compensatable")
    assert (same.status_code, same.json()["undo_id"] is not None) == (201, True)
    await service.agent.commit("s", 1, {"id": 1})
    raised = await service.agent.intercept("s", tool="t", step_index=2, reversibility="irreversible")
    assert (raised.status_code, raised.json()["decision"]) == (202, "await_approval")
    looked = await service.agent.intercept("s2", tool="look", step_index=1, reversibility="irreversible")
    assert looked.status_code == 202
    session = await service.agent.session("s")
    effect = session["effects"][1]
    assert (effect["reversibility"], effect["undo_id"], effect["tool_version"]) == ("irreversible", None, 1)
    assert len(session["undo_stack"]) == 1


async def test_call_runs_again_when_its_tool_is_idempotent(service: Service) -> None:
    """A caller that lost track may run an idempotent tool again: same ids, the next attempt; once committed it is told the result."""
    await service.admin.register("t", **CREDIT, idempotent=True)
    first = (await service.agent.intercept("s", tool="t", step_index=1)).json()
    again = await service.agent.intercept("s", tool="t", step_index=1)
    assert (again.status_code, again.json()) == (201, {**first, "attempt": 2})
    assert (await service.agent.intercept("s", tool="t", step_index=1)).json()["attempt"] == 3
    other = await service.agent.intercept("s", tool="t", step_index=1, args={"amount": 1})
    assert fault(other)[:2] == (409, "step_reused")
    assert (await service.agent.get("/sessions/s/effects/1")).json()["attempt"] == 3
    assert await service.operator.kinds("s") == ["OPENED", "INTENT", "INTENT", "INTENT"]
    await service.agent.commit("s", 1, {"id": 7})
    replay = await service.agent.intercept("s", tool="t", step_index=1)
    assert (replay.status_code, replay.json()["decision"], replay.json()["result"]) == (200, "replay", {"id": 7})
    assert len((await service.agent.session("s"))["undo_stack"]) == 1

    keyed = (await service.agent.intercept("k", tool="t", step_index=1, idempotency_key="K")).json()
    assert (await service.agent.intercept("k", tool="t", step_index=1, idempotency_key="K")).json() == keyed


async def test_undo_has_the_args_and_policy_seen_and_the_newest_url_when_it_is_sent(service: Service, endpoint: FakeEndpoint) -> None:
    """What to undo was fixed at the call; where the system lives now is the registry's newest word, fixed at the first send."""

    def version(path: str, number: int, **members: Any) -> JsonObject:
        undo = {"url": endpoint.url(path), "args": {"v": number}, "description": f"undo {number}", **members}
        return {"reversibility": "compensatable", "compensation": undo}

    gate = asyncio.Event()
    endpoint.script("/new", Reply(status=503, gate=gate), Reply(status=404))
    await service.admin.register("t", **version("/old", 1, compensated_on=[404]))
    await service.agent.intercept("s", tool="t", step_index=1)
    await service.agent.commit("s", 1, {})
    await service.admin.register("t", **version("/new", 2))
    assert (await service.agent.session("s"))["undo_stack"][0]["url"] == endpoint.url("/old")
    await service.agent.fail("s")
    await endpoint.wait_for_requests(1)
    await service.admin.register("t", **version("/newest", 3))
    gate.set()
    session: JsonObject = await rest(service.agent, "s")

    first, second = endpoint.received
    assert (first.path, first.body) == ("/new", b'{"v":1}')
    assert (second.path, second.body, second.key) == (first.path, first.body, first.key)
    entry = session["undo_stack"][0]
    assert (session["state"], entry["url"], entry["description"]) == ("compensated", endpoint.url("/new"), "undo 1")
    assert session["effects"][0]["tool_version"] == 1


@pytest.mark.parametrize("later", ["removed", "without_undo"])
async def test_undo_goes_to_its_own_url_when_the_registry_has_no_newer_one(service: Service, endpoint: FakeEndpoint, later: str) -> None:
    """A tool that was removed, or is said to need no undo now, is still undone as it was promised."""
    await service.admin.register("t", reversibility="reversible", compensation={"url": endpoint.url("/own"), "args": [1]})
    await service.agent.intercept("s", tool="t", step_index=1)
    await service.agent.commit("s", 1, {})
    if later == "removed":
        await service.admin.request("DELETE", "/v1/tools/t")
    else:
        await service.admin.register("t", reversibility="read_only")
    assert (await rest(service.agent, "s"))["state"] == "compensated"
    assert [(request.path, request.body) for request in endpoint.received] == [("/own", b"[1]")]


async def test_inline_undo_keeps_its_url_when_its_tool_is_registered_later(service: Service, endpoint: FakeEndpoint) -> None:
    """A registration says nothing about calls that were made before it."""
    await do_step(service.agent, "s", 1, endpoint.url("/inline"))
    await service.admin.register("issue_credit", reversibility="reversible", compensation={"url": endpoint.url("/registered")})
    assert (await rest(service.agent, "s"))["state"] == "compensated"
    assert [request.path for request in endpoint.received] == ["/inline"]


async def test_unknown_variant_has_the_newest_url_when_it_is_sent(service: Service, endpoint: FakeEndpoint) -> None:
    """The variant's args are those seen at the call; its place is the newest version's."""
    for path in ("/find-old", "/find-new"):
        unknown = {"args": {"from": path, "key": {"$ref": "effect#/forward_key"}}, "url": endpoint.url(path)}
        compensation = {"url": endpoint.url("/undo"), "args": {"id": {"$ref": "result#/id"}}, "unknown": unknown}
        await service.admin.register("t", reversibility="compensatable", compensation=compensation)
        if path == "/find-old":
            await service.agent.intercept("s", tool="t", step_index=1)
    assert (await rest(service.agent, "s"))["state"] == "compensated"
    key = (await service.agent.get("/sessions/s/effects/1")).json()["forward_key"]
    (request,) = endpoint.received
    assert (request.path, request.body.decode()) == ("/find-new", f'{{"from":"/find-old","key":"{key}"}}')


async def send_mail(service: Service, session_id: str, step: int) -> httpx.Response:
    """Ask to do what cannot be undone and needs nobody's approval."""
    await service.admin.register("mail", reversibility="irreversible", approval={"required": False})
    return await service.agent.intercept(session_id, tool="mail", step_index=step)


async def test_irreversible_call_is_a_pivot_when_it_went_ahead_unapproved(service: Service, endpoint: FakeEndpoint) -> None:
    """It waits for earlier effects, executes at once, pivots at commit, and a failure after it undoes nothing."""
    await service.admin.register("t", reversibility="compensatable", compensation={"url": endpoint.url("/undo")})
    await service.agent.intercept("s", tool="t", step_index=1)
    early = await send_mail(service, "s", 2)
    assert fault(early)[:2] == (409, "unsettled_effects")
    assert early.json()["unsettled"] == [{"step_index": 1, "tool": "t", "state": "executing"}]
    await service.agent.commit("s", 1, {})
    sent = await send_mail(service, "s", 2)
    assert (sent.status_code, sent.json()["decision"], sent.json()["undo_id"]) == (201, "execute", None)
    session = await service.agent.session("s")
    assert (session["pivoted"], session["clean"], session["state"]) == (False, True, "active")
    await service.agent.commit("s", 2, {})
    session = await service.agent.session("s")
    assert (session["pivoted"], session["clean"]) == (True, False)
    assert (await service.operator.kinds("s"))[-2:] == ["EXECUTED", "PIVOT"]
    await send_mail(service, "s", 3)
    await service.agent.commit("s", 3, {})

    failed: JsonObject = await rest(service.agent, "s")
    assert (failed["state"], failed["halt_reason"], failed["clean"]) == ("halted", "failed_after_pivot", False)
    assert [entry["state"] for entry in failed["undo_stack"]] == ["pending"]
    kinds = await service.operator.kinds("s")
    assert (kinds.count("PIVOT"), kinds[-2:]) == (1, ["SESSION_FAILED", "HALTED"])
    assert endpoint.received == []


async def test_irreversible_call_in_doubt_is_a_pivot_when_the_run_fails(service: Service, endpoint: FakeEndpoint) -> None:
    """Nobody knows whether the mail went out: the pivot is told before the halt, and nothing is undone."""
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    await send_mail(service, "s", 2)
    failed: JsonObject = await rest(service.agent, "s")
    assert (failed["state"], failed["halt_reason"], failed["pivoted"]) == ("halted", "failed_after_pivot", True)
    assert failed["effects"][1]["state"] == "unknown"
    assert (await service.operator.kinds("s"))[-3:] == ["SESSION_FAILED", "PIVOT", "HALTED"]
    assert endpoint.received == []


@pytest.mark.parametrize("reports", [["not_applied"], ["unknown", "not_applied"]])
async def test_pivot_is_taken_back_when_the_call_is_known_not_to_have_happened(
    service: Service, endpoint: FakeEndpoint, reports: list[str]
) -> None:
    """What was refused downstream is no pivot: a later failure unwinds, and the session ends clean."""
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    await send_mail(service, "s", 2)
    for outcome in reports:
        (await service.agent.fail_effect("s", 2, outcome)).raise_for_status()
        session = await service.agent.session("s")
        assert (session["pivoted"], session["clean"]) == ((True, False) if outcome == "unknown" else (False, True))
    ended: JsonObject = await rest(service.agent, "s")
    assert (ended["state"], ended["clean"], len(endpoint.received)) == ("compensated", True, 1)


async def test_pivot_stays_when_another_irreversible_call_stands(service: Service, endpoint: FakeEndpoint) -> None:
    """Taking one back does not take back the earlier one, also when it is told with the run's failure."""
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    for step in (2, 3):
        await send_mail(service, "s", step)
        if step == 2:
            await service.agent.commit("s", 2, {})
    (await service.agent.fail_effect("s", 3, "not_applied")).raise_for_status()
    assert (await service.agent.session("s"))["pivoted"]
    await send_mail(service, "s", 4)
    failed = (await service.agent.fail("s", effect={"step_index": 4, "outcome": "not_applied"})).json()
    assert (failed["state"], failed["halt_reason"], endpoint.received) == ("halted", "failed_after_pivot", [])


async def test_run_unwinds_when_its_only_irreversible_call_failed_unapplied_with_it(service: Service, endpoint: FakeEndpoint) -> None:
    """The report that comes with the run's failure counts before the pivot is judged."""
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    await send_mail(service, "s", 2)
    (await service.agent.fail("s", effect={"step_index": 2, "outcome": "not_applied"})).raise_for_status()
    assert (await rest(service.agent, "s"))["state"] == "compensated"
    assert len(endpoint.received) == 1


async def test_undoable_call_is_parked_when_its_tool_wants_approval(service: Service) -> None:
    """Whatever its class, a person is asked, for as long as the registration says."""
    rule = {"required": True, "ttl_seconds": 90}
    await service.admin.register("t", **CREDIT, approval=rule)
    await service.admin.register("look", reversibility="read_only", approval={"required": True})
    parked = await service.agent.intercept("s", tool="t", step_index=1)
    assert (parked.status_code, parked.json()["decision"]) == (202, "await_approval")
    effect = (await service.agent.get("/sessions/s/effects/1")).json()
    approval = effect["approval"]
    asked, expires = (datetime.fromisoformat(approval[name]) for name in ("requested_at", "expires_at"))
    assert ((expires - asked).total_seconds(), effect["reversibility"], effect["tool_version"]) == (90, "compensatable", 1)
    assert (await service.agent.session("s"))["undo_stack"] == []
    looked = await service.agent.intercept("l", tool="look", step_index=1)
    shown = (await service.agent.get("/sessions/l/effects/1")).json()["approval"]
    asked, expires = (datetime.fromisoformat(shown[name]) for name in ("requested_at", "expires_at"))
    assert (looked.status_code, (expires - asked).total_seconds()) == (202, 259_200)


async def test_call_is_in_flight_when_only_a_later_version_is_idempotent(service: Service) -> None:
    """What the version said on which the call was decided holds for it: a later promise is not a promise about it."""
    await service.admin.register("t", **CREDIT)
    (await service.agent.intercept("s", tool="t", step_index=1)).raise_for_status()
    await service.admin.register("t", **CREDIT, idempotent=True)
    repeat = await service.agent.intercept("s", tool="t", step_index=1)
    assert (repeat.status_code, repeat.json()["decision"]) == (200, "in_flight")
