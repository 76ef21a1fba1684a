"""References of an undo over HTTP: what is refused at once, what is shown as unresolved, what is never taken for one."""

import json
from typing import Any

import httpx
import pytest

from tests.factories import JsonObject, Service, undo_at
from tests.fakes import FakeEndpoint, Reply
from tests.probes import rest, row_counts

RAW = {"Content-Type": "application/json"}
DECOYS: list[Any] = [
    {"$ref": "result#/secret"},
    {"$ref": "effect#/forward_key"},
    [{"$ref": "payload#"}],
    {"deep": [{"$ref": "result#"}], "text": '{"$ref":"result#/secret"}'},
]


def fault(response: httpx.Response) -> tuple[int, str, list[str]]:
    """Return status, code and the pointers of a refusal."""
    problem = response.json()
    return response.status_code, problem["code"], [error["pointer"] for error in problem.get("errors") or []]


async def ask(service: Service, session_id: str, step: int, payload: object, compensation: JsonObject) -> httpx.Response:
    """Ask to run a tool with this payload and this inline undo."""
    return await service.agent.intercept(session_id, step_index=step, args=payload, compensation=compensation)


async def test_call_is_refused_when_a_reference_can_never_be_bound(service: Service, endpoint: FakeEndpoint) -> None:
    """Payload and effect are known at once, so what is not there is a 422 at its place; nothing is stored, the tool must not run."""
    url, before = endpoint.url("/undo"), await row_counts(service.database_url)
    payload: JsonObject = {"order": {"lines": [{"id": 1}]}, "empty": ""}
    for members, code, pointers in (
        ({"args": {"a": {"$ref": "payload#/absent"}}}, "unresolved_reference", ["/compensation/args/a"]),
        (
            {"args": [{"$ref": "payload#/order/lines/1"}, 1, {"$ref": "effect#/secret"}]},
            None,
            ["/compensation/args/0", "/compensation/args/2"],
        ),
        ({"args": {"$ref": "payload#/order/lines/-"}}, "unresolved_reference", ["/compensation/args"]),
        ({"args": {"$ref": "payload#/order/lines/00"}}, "unresolved_reference", ["/compensation/args"]),
        ({"args": {"$ref": "payload#/empty/0"}}, "unresolved_reference", ["/compensation/args"]),
        ({"unknown": {"args": {"k/1": {"$ref": "effect#/nothing"}}}}, None, ["/compensation/unknown/args/k~11"]),
        ({"args": {"$ref": "payload#order"}}, "bad_reference", ["/compensation/args"]),
        ({"args": {"a": {"$ref": "session#/agent"}}}, "bad_reference", ["/compensation/args/a"]),
        ({"args": {"a": {"$ref": "#/a"}}}, "bad_reference", ["/compensation/args/a"]),
        ({"args": [{"$ref": "result#/id"}] * 33}, "bad_reference", ["/compensation/args/32"]),
    ):
        refused = await ask(service, "s", 1, payload, undo_at(url, **members))
        assert fault(refused) == (422, code or "unresolved_reference", pointers), members
    assert await row_counts(service.database_url) == before


async def test_call_is_refused_when_binding_would_multiply_its_payload(service: Service, endpoint: FakeEndpoint) -> None:
    """A few references to a large payload must not become megabytes."""
    args = [{"$ref": "payload#"}] * 3
    refused = await ask(service, "s", 1, "x" * 100_000, undo_at(endpoint.url("/undo"), args=args))
    assert fault(refused) == (422, "args_too_large", ["/compensation/args"])


async def test_registered_references_are_checked_against_each_payload(service: Service, endpoint: FakeEndpoint) -> None:
    """A registration is a template; whether it can be filled is known when a payload comes."""
    compensation = {"url": endpoint.url("/undo"), "args": {"order": {"$ref": "payload#/order"}, "id": {"$ref": "result#/id"}}}
    await service.admin.register("t", reversibility="reversible", compensation=compensation)
    payloads: list[JsonObject | list[int] | str | None] = [{"amount": 1}, None, [], "order"]
    for payload in payloads:
        refused = await service.agent.intercept("s", tool="t", step_index=1, args=payload)
        assert fault(refused) == (422, "unresolved_reference", ["/compensation/args/order"])
    opaque = await service.agent.intercept("s", tool="t", step_index=1, payload="order=4921")
    assert fault(opaque) == (422, "unresolved_reference", ["/compensation/args/order"])
    (await service.agent.intercept("s", tool="t", step_index=1, args={"order": 4921})).raise_for_status()
    await service.agent.commit("s", 1, {"id": "c-1"})
    await rest(service.agent, "s")
    assert [request.body for request in endpoint.received] == [b'{"order":4921,"id":"c-1"}']


async def test_every_fact_of_the_effect_can_be_referred_to(service: Service, endpoint: FakeEndpoint) -> None:
    """What the endpoint may need to find the call again, also where the result is not known."""
    names = ["effect_id", "forward_key", "step_index", "tool", "payload_sha256"]
    args = {name: {"$ref": f"effect#/{name}"} for name in names}
    answer = (await ask(service, "s", 7, {"n": 1}, undo_at(endpoint.url("/undo"), args=args))).json()
    await rest(service.agent, "s")
    (request,) = endpoint.received
    assert json.loads(request.body) == {"tool": "issue_credit", **{name: answer[name] for name in names if name != "tool"}}
    assert request.header("Countermand-Outcome") == "unknown"


@pytest.mark.parametrize("result", ['{"ids":{}}', "null", "[]", '"id"', '{"ids":{"credit":{}}}'])
async def test_commit_is_taken_when_its_result_lacks_what_the_undo_needs(service: Service, endpoint: FakeEndpoint, result: str) -> None:
    """It happened, so it is recorded; the gap is shown at once, and at the unwind the session halts with the entry untouched."""
    args = {"id": {"$ref": "result#/ids/credit/0"}, "whole": {"$ref": "result#"}}
    (await ask(service, "s", 1, {}, undo_at(endpoint.url("/undo"), args=args))).raise_for_status()
    assert (await service.agent.get("/sessions/s/effects/1")).json()["unresolved"] == []
    body = f'{{"result":{result}}}'.encode()
    committed = await service.agent.request("POST", "/v1/sessions/s/effects/1/commit", content=body, headers=RAW)
    assert (committed.status_code, committed.json()["state"]) == (200, "committed")
    assert committed.json()["unresolved"] == ["result#/ids/credit/0"]
    assert (await service.agent.session("s"))["effects"][0]["unresolved"] == ["result#/ids/credit/0"]

    halted: JsonObject = await rest(service.agent, "s")
    assert (halted["state"], halted["halt_reason"]) == ("halted", "unresolved_reference")
    assert [(entry["state"], entry["attempts"]) for entry in halted["undo_stack"]] == [("pending", 0)]
    assert halted["effects"][0]["state"] == "committed"
    assert endpoint.received == []


async def test_null_is_something_when_a_reference_leads_to_it(service: Service, endpoint: FakeEndpoint) -> None:
    """A field that is there is bound, whatever its value, and exotic names are reached by RFC 6901."""
    args = [{"$ref": f"result#{pointer}"} for pointer in ("/null", "/", "/a~1b", "/m~0n", "/list/1", "/\u00e9")]
    (await ask(service, "s", 1, {}, undo_at(endpoint.url("/undo"), args=args))).raise_for_status()
    result = {"null": None, "": False, "a/b": 1, "m~n": "x", "list": [0, {"k": []}], "\u00e9": "\U0001f600"}
    committed = await service.agent.commit("s", 1, result)
    assert committed.json()["unresolved"] == []
    await rest(service.agent, "s")
    (request,) = endpoint.received
    assert json.loads(request.body) == [None, False, 1, "x", {"k": []}, "\U0001f600"]


@pytest.mark.parametrize("decoy", DECOYS)
async def test_nothing_in_payload_or_result_is_bound_when_it_looks_like_a_reference(
    service: Service, endpoint: FakeEndpoint, decoy: Any
) -> None:
    """Only the descriptor's own words refer; whoever controls a payload or a downstream answer must not reach into other data."""
    args = {"payload": {"$ref": "payload#/note"}, "result": {"$ref": "result#/note"}}
    (await ask(service, "s", 1, {"note": decoy}, undo_at(endpoint.url("/undo"), args=args))).raise_for_status()
    committed = await service.agent.commit("s", 1, {"note": decoy, "secret": "s3cret"})
    assert committed.json()["unresolved"] == []
    await rest(service.agent, "s")
    (request,) = endpoint.received
    assert json.loads(request.body) == {"payload": decoy, "result": decoy}
    assert b"s3cret" not in request.body


async def test_variant_without_a_url_goes_to_the_same_place_and_halts_when_it_is_open_too(service: Service, endpoint: FakeEndpoint) -> None:
    """The variant stands in for what is open; if it is open as well, nothing half-filled is sent."""
    open_args = {"id": {"$ref": "result#/id"}}
    found = undo_at(endpoint.url("/undo"), args=open_args, unknown={"args": {"step": {"$ref": "effect#/step_index"}}})
    stuck = undo_at(endpoint.url("/undo"), args=open_args, unknown={"args": {"other": {"$ref": "result#/other"}}})
    (await ask(service, "found", 3, {}, found)).raise_for_status()
    (await ask(service, "stuck", 1, {}, stuck)).raise_for_status()
    assert (await rest(service.agent, "found"))["state"] == "compensated"
    halted: JsonObject = await rest(service.agent, "stuck")
    assert (halted["state"], halted["halt_reason"]) == ("halted", "unresolved_reference")
    assert [(request.path, request.body) for request in endpoint.received] == [("/undo", b'{"step":3}')]


async def test_escalating_undo_waits_for_a_person_when_registered_so(service: Service, endpoint: FakeEndpoint) -> None:
    """`on_unknown: escalate` of a registration halts before the first send, also where the variant could be sent."""
    compensation = {"url": endpoint.url("/undo"), "on_unknown": "escalate", "unknown": {"args": {}}}
    await service.admin.register("t", reversibility="compensatable", compensation=compensation)
    (await service.agent.intercept("s", tool="t", step_index=1)).raise_for_status()
    await service.agent.fail_effect("s", 1, "unknown")
    halted: JsonObject = await rest(service.agent, "s")
    assert (halted["state"], halted["halt_reason"]) == ("halted", "unknown_outcome")
    assert [(entry["state"], entry["attempts"]) for entry in halted["undo_stack"]] == [("pending", 0)]
    assert endpoint.received == []


async def test_unwind_lists_every_failure_when_registered_undos_are_independent(service: Service, endpoint: FakeEndpoint) -> None:
    """It goes past each failed one, undoes the rest, and halts once, with every failure's own answer to look at."""
    for name, independent in (("loose", True), ("strict", False)):
        compensation = {"url": endpoint.url(f"/{name}"), "independent": independent}
        await service.admin.register(name, reversibility="reversible", compensation=compensation)
    endpoint.script("/loose", Reply(status=410), Reply(status=200), Reply(status=422))
    for step, tool in enumerate(["strict", "loose", "loose", "loose", "strict"], start=1):
        await service.agent.intercept("s", tool=tool, step_index=step)
        await service.agent.commit("s", step, {})
    halted: JsonObject = await rest(service.agent, "s")
    assert [request.path for request in endpoint.received] == ["/strict", "/loose", "/loose", "/loose", "/strict"]
    assert [(entry["state"], entry["last_status"]) for entry in halted["undo_stack"]] == [
        ("compensated", 200),
        ("failed", 410),
        ("compensated", 200),
        ("failed", 422),
        ("compensated", 200),
    ]
    assert [entry["last_error"] is not None for entry in halted["undo_stack"]] == [False, True, False, True, False]
    assert (halted["state"], halted["halt_reason"]) == ("halted", "compensation_failed")
    kinds = await service.operator.kinds("s")
    assert (kinds.count("COMPENSATION_FAILED"), kinds.count("HALTED"), kinds[-1]) == (2, 1, "HALTED")
