"""What an unwind does to the world: which undo is sent, in which order, with which bytes; the endpoint's own log is the witness."""

import json
import re
from itertools import pairwise

from tests.factories import JsonObject, Service, do_step, undo_at
from tests.fakes import FakeEndpoint, Reply
from tests.probes import make_due, rest, spoil

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def entry_at(session: JsonObject, step: int) -> JsonObject:
    """Return one entry of the undo stack."""
    found: JsonObject = next(entry for entry in session["undo_stack"] if entry["step_index"] == step)
    return found


async def intercept_raw(service: Service, session_id: str, body: bytes, **headers: str) -> JsonObject:
    """Intercept with exactly these bytes."""
    path = f"/v1/sessions/{session_id}/intercept"
    sent = {"Content-Type": "application/json", **headers}
    response = await service.agent.request("POST", path, content=body, headers=sent)
    response.raise_for_status()
    found: JsonObject = response.json()
    return found


async def test_undo_is_newest_first_one_at_a_time_when_a_run_fails(service: Service, endpoint: FakeEndpoint) -> None:
    """Five effects are undone in reverse order, each once, none before the one above it is done."""
    answers = [await do_step(service.agent, "s", step, endpoint.url(f"/undo/{step}"), args={"step": step}) for step in range(1, 6)]
    session: JsonObject = await rest(service.agent, "s")

    received = endpoint.received
    assert [request.path for request in received] == [f"/undo/{step}" for step in (5, 4, 3, 2, 1)]
    assert [request.key for request in received] == [f"undo-{answer['undo_id']}" for answer in reversed(answers)]
    assert [request.body for request in received] == [f'{{"step":{step}}}'.encode() for step in (5, 4, 3, 2, 1)]
    assert endpoint.max_concurrency == 1
    assert all(earlier.ended_at is not None and earlier.ended_at <= later.started_at for earlier, later in pairwise(received))
    assert [endpoint.applications_of(request.key) for request in received] == [1] * 5
    assert (session["state"], session["clean"], session["halt_reason"]) == ("compensated", True, None)
    assert [entry["step_index"] for entry in session["undo_stack"]] == [5, 4, 3, 2, 1]
    assert {(entry["state"], entry["attempts"], entry["last_status"]) for entry in session["undo_stack"]} == {("compensated", 1, 200)}
    undone_at = [entry["compensated_at"] for entry in session["undo_stack"]]
    assert undone_at == sorted(undone_at)
    assert {effect["state"] for effect in session["effects"]} == {"compensated"}
    told = [(entry["kind"], entry["step"]) for entry in await service.operator.journal("s")][-12:]
    pairs = [(kind, step) for step in (5, 4, 3, 2, 1) for kind in ("COMPENSATING", "COMPENSATED")]
    assert told == [("SESSION_FAILED", None), *pairs, ("UNWOUND", None)]


async def test_order_is_by_step_when_commits_came_in_another(service: Service, endpoint: FakeEndpoint) -> None:
    """The place in the session counts, not when a call was reported, nor gaps between the steps."""
    for step in (2, 7, 30):
        (await service.agent.intercept("s", step_index=step, compensation=undo_at(endpoint.url(f"/{step}")))).raise_for_status()
    for step in (7, 30, 2):
        (await service.agent.commit("s", step)).raise_for_status()
    assert (await rest(service.agent, "s"))["state"] == "compensated"
    assert [request.path for request in endpoint.received] == ["/30", "/7", "/2"]


async def test_request_has_exactly_the_promised_headers_when_sent(service: Service, endpoint: FakeEndpoint) -> None:
    """An undo carries the contract's headers and nothing of ours beside what frames a message; the caller's trace goes on."""
    url = endpoint.url("/undo/credit?source=agent")
    body = json.dumps({"tool": "issue_credit", "args": {}, "step_index": 7, "compensation": {"url": url, "args": [1]}}).encode()
    answer = await intercept_raw(service, "run.1:a-b_c", body, traceparent=f"00-{TRACE}-00f067aa0ba902b7-01")
    (await service.agent.commit("run.1:a-b_c", 7)).raise_for_status()
    await rest(service.agent, "run.1:a-b_c")

    (request,) = endpoint.received
    sent = {name.decode().lower(): value.decode() for name, value in request.headers}
    assert len(sent) == len(request.headers)
    traceparent = sent.pop("traceparent")
    assert re.fullmatch(rf"00-{TRACE}-(?!0{{16}}|00f067aa0ba902b7)[0-9a-f]{{16}}-01", traceparent)
    assert sent == {
        "host": f"127.0.0.1:{endpoint.port}",
        "content-type": "application/json",
        "content-length": "3",
        "accept-encoding": "identity",
        "user-agent": "countermand",
        "idempotency-key": f"undo-{answer['undo_id']}",
        "countermand-session": "run.1:a-b_c",
        "countermand-step": "7",
        "countermand-effect": answer["effect_id"],
        "countermand-outcome": "committed",
        "countermand-attempt": "1",
    }
    assert (request.method, request.target, request.body) == ("POST", "/undo/credit?source=agent", b"[1]")


async def test_bound_values_keep_every_byte_when_sent_shown_and_journaled(service: Service, endpoint: FakeEndpoint) -> None:
    """Number literals, key order, emoji and U+0000 arrive as they were given, in the request, the GETs and the journal."""
    values = '{"z":1.10,"a":1E+2,"big":123456789012345678901234567890,"neg":-0.0,"text":"\\u0000 \U0001f600 \\"q\\" \u00e9"}'
    args = (
        '{"literal":2.50,"from_payload":{"$ref":"payload#/z"},"all":{"$ref":"payload#"},"from_result":{"$ref":"result#/deep/0"},'
        '"key":{"$ref":"effect#/forward_key"}}'
    )
    url = endpoint.url("/undo")
    body = f'{{"tool":"t","args":{values},"step_index":1,"compensation":{{"url":"{url}","args":{args}}}}}'
    answer = await intercept_raw(service, "s", body.encode())
    assert answer["payload"] == values
    result = f'{{"deep":[{values}]}}'
    committed = await service.agent.request(
        "POST",
        "/v1/sessions/s/effects/1/commit",
        content=f'{{"result":{result}}}'.encode(),
        headers={"Content-Type": "application/json"},
    )
    assert f'"result":{result}' in committed.text
    await rest(service.agent, "s")

    key = answer["forward_key"]
    expected = f'{{"literal":2.50,"from_payload":1.10,"all":{values},"from_result":{values},"key":"{key}"}}'
    (request,) = endpoint.received
    assert request.body.decode() == expected
    shown = await service.operator.get("/sessions/s")
    assert f'"result":{result}' in shown.text
    assert shown.json()["effects"][0]["payload"] == values
    contents = {entry["kind"]: entry["content"] for entry in await service.operator.journal("s")}
    assert contents["INTENT"]["payload"]["text"] == values
    assert contents["EXECUTED"]["result"]["text"] == result
    assert contents["COMPENSATING"]["args"]["text"] == expected


async def test_bytes_stay_frozen_when_the_stored_args_change_after_the_first_send(service: Service, endpoint: FakeEndpoint) -> None:
    """URL and bytes of the second attempt are those of the first, whatever the descriptor says by then."""
    endpoint.script("/undo", Reply(status=503, headers={"Retry-After": "600"}), Reply())
    await do_step(service.agent, "s", 1, endpoint.url("/undo"), args={"credit": {"$ref": "result#/id"}}, result={"id": 1.5})
    (await service.agent.fail("s")).raise_for_status()
    await endpoint.wait_for_answers(1)
    await spoil(
        service.database_url,
        "UPDATE undo_stack SET compensation = convert_to(replace(convert_from(compensation, 'UTF8'), '/undo', '/other'), 'UTF8')",
    )
    await make_due(service.database_url, "s")
    assert (await rest(service.agent, "s"))["state"] == "compensated"
    first, second = endpoint.received
    assert (second.path, second.body, second.key) == (first.path, first.body, first.key)
    assert first.body == b'{"credit":1.5}'


async def test_unknown_outcome_is_told_when_the_call_was_never_reported(service: Service, endpoint: FakeEndpoint) -> None:
    """A call that was executing, or reported as unknown, is undone and marked so; reads and failed calls are not."""
    for step in (1, 2, 3):
        await service.agent.intercept("s", step_index=step, compensation=undo_at(endpoint.url(f"/{step}")))
    await service.agent.commit("s", 1)
    await service.agent.fail_effect("s", 2, "unknown")
    await service.agent.intercept("s", step_index=4, compensation=undo_at(endpoint.url("/4")))
    await service.agent.fail_effect("s", 4, "not_applied")
    await service.agent.intercept("s", step_index=5, reversibility="read_only")

    session: JsonObject = await rest(service.agent, "s")
    assert [(request.path, request.header("Countermand-Outcome")) for request in endpoint.received] == [
        ("/3", "unknown"),
        ("/2", "unknown"),
        ("/1", "committed"),
    ]
    assert session["state"] == "compensated"
    assert entry_at(session, 4)["state"] == "skipped"
    assert [effect["state"] for effect in session["effects"]] == ["compensated", "compensated", "compensated", "failed", "failed"]


async def test_unknown_variant_is_sent_when_the_result_is_not_known(service: Service, endpoint: FakeEndpoint) -> None:
    """Open references are never half filled: the variant's args and URL go out instead."""
    unknown = {"args": {"find": {"$ref": "effect#/forward_key"}}, "url": endpoint.url("/find-and-undo")}
    args = {"credit_id": {"$ref": "result#/credit_id"}}
    compensation = undo_at(endpoint.url("/undo"), args=args, unknown=unknown)
    uncommitted = (await service.agent.intercept("s", step_index=1, compensation=compensation)).json()
    await do_step(service.agent, "s", 2, endpoint.url("/undo"), result={"credit_id": "cr_2"}, args=args, unknown=unknown)
    lacking = await do_step(service.agent, "s", 3, endpoint.url("/undo"), result={"other": 1}, args=args, unknown=unknown)
    assert (await service.agent.get("/sessions/s/effects/3")).json()["unresolved"] == ["result#/credit_id"]
    assert (await rest(service.agent, "s"))["state"] == "compensated"
    assert [(request.path, json.loads(request.body), request.header("Countermand-Outcome")) for request in endpoint.received] == [
        ("/find-and-undo", {"find": lacking["forward_key"]}, "committed"),
        ("/undo", {"credit_id": "cr_2"}, "committed"),
        ("/find-and-undo", {"find": uncommitted["forward_key"]}, "unknown"),
    ]


async def test_session_halts_unsent_when_an_undo_cannot_be_filled_or_must_be_judged(service: Service, endpoint: FakeEndpoint) -> None:
    """Open references without a variant, and `on_unknown: escalate`, go to a person; nothing leaves, the rest stays pending."""
    members: dict[str, JsonObject] = {
        "unresolved_reference": {"args": {"id": {"$ref": "result#/id"}}},
        "unknown_outcome": {"on_unknown": "escalate"},
    }
    for reason, descriptor in members.items():
        await do_step(service.agent, reason, 1, endpoint.url("/below"))
        await service.agent.intercept(reason, step_index=2, compensation=undo_at(endpoint.url("/top"), **descriptor))
        session: JsonObject = await rest(service.agent, reason)
        assert (session["state"], session["halt_reason"]) == ("halted", reason)
        assert [entry["state"] for entry in session["undo_stack"]] == ["pending", "pending"]
        assert session["undo_stack"][0]["next_attempt_at"] is None
        assert (await service.operator.kinds(reason))[-2:] == ["SESSION_FAILED", "HALTED"]
    assert endpoint.received == []


async def test_escalating_undo_is_sent_when_its_call_is_known_to_have_happened(service: Service, endpoint: FakeEndpoint) -> None:
    """`on_unknown: escalate` concerns unknown outcomes alone."""
    await do_step(service.agent, "s", 1, endpoint.url("/undo"), on_unknown="escalate")
    assert (await rest(service.agent, "s"))["state"] == "compensated"
    assert len(endpoint.received) == 1


async def test_unwind_goes_past_a_failed_entry_when_it_is_independent(service: Service, endpoint: FakeEndpoint) -> None:
    """Entries below an independent failure are undone; then the session halts with all failures listed."""
    endpoint.script("/refuses", Reply(status=400, body=b"no such credit"))
    await do_step(service.agent, "s", 1, endpoint.url("/1"))
    await do_step(service.agent, "s", 2, endpoint.url("/refuses"), independent=True)
    await do_step(service.agent, "s", 3, endpoint.url("/3"))
    await do_step(service.agent, "s", 4, endpoint.url("/refuses"), independent=True)
    session: JsonObject = await rest(service.agent, "s")
    assert [request.path for request in endpoint.received] == ["/refuses", "/3", "/refuses", "/1"]
    assert (session["state"], session["halt_reason"]) == ("halted", "compensation_failed")
    assert [entry["state"] for entry in session["undo_stack"]] == ["failed", "compensated", "failed", "compensated"]
    assert (await service.operator.kinds("s")).count("COMPENSATION_FAILED") == 2
    assert (await service.operator.kinds("s"))[-1] == "HALTED"


async def test_session_is_compensated_at_once_when_there_is_nothing_to_undo(service: Service, endpoint: FakeEndpoint) -> None:
    """An empty stack, or one with skipped entries only, needs no call at all."""
    (await service.agent.put("/sessions/empty")).raise_for_status()
    await service.agent.intercept("skipped", step_index=1, compensation=undo_at(endpoint.url("/1")))
    await service.agent.fail_effect("skipped", 1, "not_applied")
    for name in ("empty", "skipped"):
        response = await service.agent.fail(name)
        assert (response.status_code, response.json()["state"]) == (202, "compensated")
        assert (await service.operator.kinds(name))[-2:] == ["SESSION_FAILED", "UNWOUND"]
    assert endpoint.received == []
