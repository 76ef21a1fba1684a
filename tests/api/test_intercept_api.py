"""Asking before doing: what an intercept answers, by the state of its step and session, over HTTP."""

from hashlib import sha256
from typing import Any

import httpx

from tests.conftest import StartService
from tests.factories import Client, JsonObject, Service, do_step, undo_at
from tests.fakes import FakeEndpoint
from tests.probes import row_counts

URL = "http://127.0.0.1:9/undo"


def code(response: httpx.Response) -> tuple[int, str]:
    """Return status and problem code of a refusal."""
    return response.status_code, response.json()["code"]


async def test_answer_is_complete_when_a_call_may_run(service: Service) -> None:
    """`execute` names session, step, effect, undo and forward key, and gives the payload back byte for byte."""
    response = await service.agent.intercept(
        "refund-4921", tool="issue_credit", payload='{"order":4921, "amount":2500}', step_index=2, compensation=undo_at(URL)
    )
    body = response.json()
    assert response.status_code == 201
    assert response.headers["content-type"] == "application/json"
    assert response.headers["cache-control"] == "no-store"
    assert body == {
        "decision": "execute",
        "session_id": "refund-4921",
        "step_index": 2,
        "effect_id": body["effect_id"],
        "undo_id": body["undo_id"],
        "forward_key": f"effect-{body['effect_id']}",
        "payload": '{"order":4921, "amount":2500}',
        "payload_sha256": sha256(b'{"order":4921, "amount":2500}').hexdigest(),
        "attempt": 1,
    }
    session = await service.agent.session("refund-4921")
    assert (session["state"], session["agent"]) == ("active", "agent-1")
    assert session["undo_stack"][0]["undo_id"] == body["undo_id"]
    assert session["undo_stack"][0]["state"] == "pending"


async def test_step_numbers_start_at_one_and_grow_when_the_service_assigns_them(service: Service) -> None:
    """Without a step_index a key is required and the next number is taken; given ones must be greater than every other."""
    without_key = await service.agent.intercept("s", compensation=undo_at(URL))
    assert code(without_key) == (400, "idempotency_key_required")
    assert (await service.agent.get("/sessions/s")).status_code == 404
    steps = [
        (await service.agent.intercept("s", idempotency_key=f"k{n}", compensation=undo_at(URL))).json()["step_index"] for n in range(3)
    ]
    assert steps == [1, 2, 3]
    assert (await service.agent.intercept("s", step_index=10, compensation=undo_at(URL))).status_code == 201
    assert (await service.agent.intercept("s", idempotency_key="k11", compensation=undo_at(URL))).json()["step_index"] == 11
    late = await service.agent.intercept("s", step_index=5, compensation=undo_at(URL))
    assert code(late) == (422, "step_out_of_order")
    assert late.json()["errors"][0]["pointer"] == "/step_index"
    assert (await service.agent.intercept("s", step_index=2**31 - 1, compensation=undo_at(URL))).status_code == 201
    assert code(await service.agent.intercept("s", idempotency_key="beyond", compensation=undo_at(URL))) == (422, "step_out_of_order")


async def test_repeat_is_answered_by_the_state_of_its_step(service: Service) -> None:
    """Same key: the same execute. No key: in flight, then the result. Settled: a new step is needed."""
    asked: JsonObject = {"step_index": 1, "compensation": undo_at(URL)}
    first = await service.agent.intercept("s", idempotency_key="one", **asked)
    again = await service.agent.intercept("s", idempotency_key="one", **asked)
    quoted = await service.agent.intercept("s", idempotency_key='"one"', **asked)
    assert (again.status_code, again.text, quoted.text) == (201, first.text, first.text)
    for key in (None, "another"):
        in_flight = await service.agent.intercept("s", idempotency_key=key, **asked)
        assert (in_flight.status_code, in_flight.json()["decision"]) == (200, "in_flight")
        assert in_flight.json()["effect_id"] == first.json()["effect_id"]

    await service.agent.commit("s", 1, {"credit_id": "cr_1"})
    for key in (None, "one"):
        replay = await service.agent.intercept("s", idempotency_key=key, **asked)
        assert (replay.status_code, replay.json()["decision"], replay.json()["result"]) == (200, "replay", {"credit_id": "cr_1"})

    for step, outcome, state in ((2, "not_applied", "failed"), (3, "unknown", "unknown")):
        await service.agent.intercept("s", step_index=step, compensation=undo_at(URL))
        await service.agent.fail_effect("s", step, outcome, "card declined")
        settled = await service.agent.intercept("s", step_index=step, compensation=undo_at(URL))
        assert code(settled) == (409, "step_settled")
        assert (settled.json()["state"], settled.json()["reason"]) == (state, "card declined")
    assert len((await service.agent.session("s"))["effects"]) == 3
    assert (await service.operator.kinds("s")).count("INTENT") == 3


async def test_repeat_is_refused_when_it_is_another_request(service: Service) -> None:
    """Other bytes or another tool at a step: 409; another request under a key: 422; and nothing is stored."""
    undo = undo_at(URL)
    await service.agent.intercept("s", idempotency_key="one", payload='{"amount":1}', step_index=1, compensation=undo)
    before = await row_counts(service.database_url)
    differences: tuple[JsonObject, ...] = (
        {"payload": '{"amount": 1}'},
        {"payload": '{"amount":1}', "tool": "other"},
        {"args": {"amount": 2}},
    )
    for difference in differences:
        response = await service.agent.intercept("s", **{"step_index": 1, "compensation": undo, **difference})
        assert code(response) == (409, "step_reused")
        reused = await service.agent.intercept("s", idempotency_key="one", **{"step_index": 1, "compensation": undo, **difference})
        assert code(reused) == (422, "key_reused")
    elsewhere = await service.agent.intercept("s", idempotency_key="one", payload='{"amount":1}', step_index=2, compensation=undo)
    assert code(elsewhere) == (422, "key_reused")
    assert await row_counts(service.database_url) == before
    other = await service.agent.intercept("t", idempotency_key="one", step_index=1, compensation=undo)
    assert other.status_code == 201, "a key belongs to its session's path"


async def test_effect_is_refused_when_the_session_takes_none(service: Service, endpoint: FakeEndpoint) -> None:
    """A failed or unwound session executes nothing more, and says which state it is in."""
    await do_step(service.agent, "s", 1, endpoint.url("/1"))
    await service.agent.fail("s", wait_s=20)
    before = await row_counts(service.database_url)
    refused = await service.agent.intercept("s", step_index=2, compensation=undo_at(URL))
    assert code(refused) == (409, "session_not_active")
    assert refused.json()["state"] == "compensated"
    settled = await service.agent.intercept("s", step_index=1, compensation=undo_at(endpoint.url("/1")))
    assert code(settled) == (409, "step_settled")
    assert await row_counts(service.database_url) == before


async def park(agent: Client, session_id: str = "s", **body: Any) -> JsonObject:
    """Ask for something that cannot be undone, which must be parked."""
    response = await agent.intercept(session_id, tool="send_email", **body)
    assert response.status_code == 202, response.text
    found: JsonObject = response.json()
    return found | {"headers": dict(response.headers)}


async def test_irreversible_or_unknown_tool_is_parked_until_a_person_decides(service: Service, endpoint: FakeEndpoint) -> None:
    """202 with where to look, when to ask again and a text for the model; the session takes nothing else; a repeat says the same."""
    await do_step(service.agent, "s", 1, endpoint.url("/1"))
    parked = await park(service.agent, step_index=2, reversibility="irreversible", args={"to": "a@example.com"})
    assert parked["decision"] == "await_approval"
    assert parked["message"] == "[AWAITING_APPROVAL] Tool 'send_email' requires human approval"
    headers = parked.pop("headers")
    assert headers["location"] == "/v1/sessions/s/effects/2"
    assert int(headers["retry-after"]) >= 1

    session = await service.agent.session("s")
    assert (session["state"], session["pivoted"]) == ("awaiting_approval", False)
    effect = (await service.agent.get("/sessions/s/effects/2")).json()
    assert (effect["state"], effect["undo_id"], effect["outcome"]) == ("awaiting_approval", None, None)
    assert (effect["approval"]["state"], effect["approval"]["requested_by"]) == ("pending", "agent-1")
    assert effect["approval"]["expires_at"] == parked["expires_at"]

    before = await row_counts(service.database_url)
    refused = await service.agent.intercept("s", step_index=3, compensation=undo_at(URL))
    assert code(refused) == (409, "session_awaiting_approval")
    repeat = await park(service.agent, step_index=2, reversibility="irreversible", args={"to": "a@example.com"})
    assert repeat.pop("headers")["location"] == headers["location"]
    assert repeat == parked
    other = await service.agent.intercept("s", tool="send_email", step_index=2, reversibility="irreversible", args={"to": "b@example.com"})
    assert code(other) == (409, "step_reused")
    assert code(await service.agent.commit("s", 2, {})) == (409, "not_executing")
    assert await row_counts(service.database_url) == before
    assert (await service.operator.kinds("s"))[-1] == "AWAITING_APPROVAL"

    assert (await service.agent.fail("s", wait_s=20)).json()["state"] == "compensated"
    effect = (await service.agent.get("/sessions/s/effects/2")).json()
    assert (effect["state"], effect["outcome"]) == ("cancelled", None)
    assert "CANCELLED" in await service.operator.kinds("s")
    assert [request.path for request in endpoint.received] == ["/1"]
    settled = await service.agent.intercept(
        "s", tool="send_email", step_index=2, reversibility="irreversible", args={"to": "a@example.com"}
    )
    assert (code(settled), settled.json()["state"]) == ((409, "step_settled"), "cancelled")


async def test_tool_is_irreversible_when_nobody_says_otherwise(services: StartService) -> None:
    """Nothing registered, nothing inline: fail closed, also where inline descriptors are denied."""
    for policy in ("allow", "deny"):
        service = await services(inline_tools=policy)
        await park(service.agent, f"plain-{policy}", step_index=1)
        await park(service.agent, f"said-{policy}", step_index=1, reversibility="irreversible")
        assert (await service.agent.session(f"plain-{policy}"))["effects"][0]["reversibility"] == "irreversible"


async def test_inline_descriptor_is_refused_when_the_deployment_denies_it(services: StartService) -> None:
    """An agent that may not describe tools cannot name its own undo, nor call itself harmless."""
    service = await services(inline_tools="deny")
    bodies = (
        {"compensation": undo_at(URL)},
        {"reversibility": "compensatable", "compensation": undo_at(URL)},
        {"reversibility": "read_only"},
        {"reversibility": "reversible"},
    )
    for body in bodies:
        response = await service.agent.intercept("s", step_index=1, **body)
        assert code(response) == (422, "inline_not_allowed")
        assert response.json()["errors"][0]["pointer"] in {"/compensation", "/reversibility"}
    assert set((await row_counts(service.database_url)).values()) == {0}


async def test_irreversible_call_waits_for_earlier_effects_to_settle(service: Service) -> None:
    """While an earlier effect is executing or unknown, nothing irreversible is even asked for; reads do not count."""
    for step in (1, 2, 3):
        await service.agent.intercept("s", step_index=step, compensation=undo_at(URL))
    await service.agent.commit("s", 1)
    await service.agent.fail_effect("s", 2, "unknown")
    await service.agent.intercept("s", step_index=4, reversibility="read_only")
    refused = await service.agent.intercept("s", tool="send_email", step_index=5, reversibility="irreversible")
    assert code(refused) == (409, "unsettled_effects")
    assert [(item["step_index"], item["state"]) for item in refused.json()["unsettled"]] == [(2, "unknown"), (3, "executing")]
    await service.agent.commit("s", 2)
    await service.agent.fail_effect("s", 3, "not_applied")
    await park(service.agent, step_index=5, reversibility="irreversible")


async def test_descriptor_must_fit_its_class(service: Service) -> None:
    """What can be undone needs an undo; what cannot, or need not, has none; an undo alone means compensatable."""
    table = (
        ({"reversibility": "compensatable"}, "tool_needs_compensation"),
        ({"reversibility": "reversible"}, "tool_needs_compensation"),
        ({"reversibility": "irreversible", "compensation": undo_at(URL)}, "compensation_not_allowed"),
        ({"reversibility": "read_only", "compensation": undo_at(URL)}, "compensation_not_allowed"),
        ({"compensation": undo_at(URL, args={"x": {"$ref": "payload#/missing"}})}, "unresolved_reference"),
        ({"compensation": undo_at(URL, args={"x": {"$ref": "effect#/missing"}})}, "unresolved_reference"),
        ({"compensation": undo_at(URL, args=[0, {"$ref": "secrets#/key"}])}, "bad_reference"),
    )
    for body, expected in table:
        response = await service.agent.intercept("s", step_index=1, **body)
        assert code(response) == (422, expected), body
        assert response.json()["errors"][0]["pointer"].startswith("/compensation")
    assert set((await row_counts(service.database_url)).values()) == {0}
    plain = await service.agent.intercept("s", step_index=1, compensation=undo_at(URL))
    assert plain.status_code == 201
    assert (await service.agent.session("s"))["effects"][0]["reversibility"] == "compensatable"


async def test_undo_address_is_refused_when_it_could_never_be_called(services: StartService) -> None:
    """A wrong address is found out now, not when the undo is needed; the same goes for the variant's."""
    service = await services(egress_allow="")
    urls = (
        "http://127.0.0.1/undo",
        "http://2130706433/undo",
        "http://0x7f.1/undo",
        "http://[::1]/undo",
        "http://[::ffff:7f00:1]/undo",
        "http://169.254.169.254/latest",
        "http://10.0.0.8/undo",
        "http://localhost/undo",
        "https://user:secret@billing.example/undo",
        "ftp://billing.example/undo",
        "https:///undo",
        "https://billing.example:99999/undo",
        "https://billing.example/undo#part",
        "https://billing.example/a b",
        "/undo",
        "undo",
    )
    for url in urls:
        response = await service.agent.intercept("s", step_index=1, compensation=undo_at(url))
        assert code(response) == (422, "url_refused"), url
        assert response.json()["errors"][0]["pointer"] == "/compensation/url"
        assert "secret" not in response.text
        variant = undo_at("https://billing.example/undo", unknown={"args": {}, "url": url})
        response = await service.agent.intercept("s", step_index=1, compensation=variant)
        assert code(response) == (422, "url_refused"), url
        assert response.json()["errors"][0]["pointer"] == "/compensation/unknown/url"
    assert set((await row_counts(service.database_url)).values()) == {0}
    good = await service.agent.intercept("s", step_index=1, compensation=undo_at("https://billing.example/undo"))
    assert good.status_code == 201
