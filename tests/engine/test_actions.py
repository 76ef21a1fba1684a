"""Approved calls that the service executes itself: results, retries, what is known at the end, and runs that fail meanwhile."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.conftest import StartService
from tests.factories import JsonObject, Service, deadlines_of, do_step, open_service, owner_connection, park, undo_at
from tests.fakes import FakeEndpoint, Mode, Reply
from tests.faults.gates import wait_until
from tests.probes import call_of, fetch, make_due, rest

PAYLOAD = '{ "amount":100.00, "to":"alice"}'
NEVER = {"sweep_seconds": 3_600}  # the service's own sweep happens once, at its start
WAIT_SECONDS = 20
UNHURRIED_MS = 60_000  # a request that is held here is not over before the test says so, however busy the machine
OK = Reply(body=b'"transfer-ok"')


def code(response: httpx.Response) -> tuple[int, str]:
    """Return status and code of a refusal."""
    return response.status_code, response.json()["code"]


async def wire(service: Service, endpoint: FakeEndpoint, *replies: Reply, **action: Any) -> None:
    """Register an irreversible tool that the service executes at /wire, which answers so."""
    endpoint.script("/wire", *replies)
    described = {"url": endpoint.url("/wire"), "timeout_ms": UNHURRIED_MS, **action}
    registered = await service.admin.register("wire", reversibility="irreversible", action=described)
    registered.raise_for_status()


async def approved(service: Service, name: str, step: int = 1, tool: str = "wire") -> None:
    """Have a call approved."""
    await park(service.agent, name, step, PAYLOAD, tool=tool)
    (await service.operator.approve(name, step)).raise_for_status()


async def executed(service: Service, name: str, step: int = 1, tool: str = "wire") -> JsonObject:
    """Have a call approved, release it, and return the answer once the service has come to an end with it."""
    await approved(service, name, step, tool)
    answer = await service.operator.resume(name, step, PAYLOAD, wait_s=WAIT_SECONDS)
    found: JsonObject = answer.json()
    told = {"committed": "executed", "not_applied": "failed", "unknown": "unknown"}[found["outcome"]]
    assert (answer.status_code, found["decision"]) == (200, told), "the decision says what came of it"
    return found


async def at_rest(service: Service, name: str) -> JsonObject:
    """Fail a run and return its session once it is at rest."""
    session: JsonObject = await rest(service.agent, name)
    return session


async def step_kinds(service: Service, name: str, step: int = 1) -> list[str]:
    """Return the kinds of a step's journal entries from the release on."""
    kinds = [entry["kind"] for entry in await service.auditor.journal(name) if entry["step"] == step]
    return kinds[kinds.index("INTENT") :]


RESULTS: dict[str, tuple[bytes, str]] = {
    "json": (b'{ "id":"t-1", "fee":1.50 }', '{"id":"t-1","fee":1.50}'),
    "number": (b"100.00", "100.00"),
    "text": (b"transfer-ok", '"transfer-ok"'),
    "empty": (b"", "null"),
    "key-twice": (b'{"a":1,"a":2}', r'"{\"a\":1,\"a\":2}"'),
    "no-number": (b'{"a":NaN}', r'"{\"a\":NaN}"'),
    "no-utf-8": (b"\xff!", '"\ufffd!"'),
    "nul": (b"a\x00b", r'"a\u0000b"'),
    "too-deep": (b"[" * 70 + b"]" * 70, f'"{"[" * 70}{"]" * 70}"'),
}


async def test_result_is_the_endpoints_answer(service: Service, endpoint: FakeEndpoint) -> None:
    """JSON as it is, number literals kept; anything else as a string; nothing as null; each committed and told once."""
    await wire(service, endpoint, OK)
    for name, (body, result) in RESULTS.items():
        endpoint.script("/wire", Reply(body=body))
        answer = await executed(service, name)
        assert (answer["state"], answer["outcome"], answer["error"]) == ("committed", "committed", None), name
        raw = (await service.agent.get(f"/sessions/{name}/effects/1")).text
        assert f'"result":{result},' in raw, (name, raw)
        assert await step_kinds(service, name) == ["INTENT", "EXECUTED", "PIVOT"]
        executed_entry = (await service.auditor.journal(name))[-2]
        assert executed_entry["content"]["result"]["text"] == result
        assert executed_entry["actor"] == "orchestrator"


async def test_result_is_cut_when_the_answer_does_not_end(service: Service, endpoint: FakeEndpoint) -> None:
    """The call is done; of an endless answer the beginning is kept, as text."""
    await wire(service, endpoint, Reply(mode=Mode.ENDLESS))
    assert len((await executed(service, "s"))["result"]) == 65_536


async def test_request_is_the_approved_bytes_under_the_effects_key(service: Service, endpoint: FakeEndpoint) -> None:
    """One POST: byte for byte what was approved, under the forward key, naming session, step and effect."""
    await wire(service, endpoint, OK)
    answer = await executed(service, "s", step=7)
    (request,) = endpoint.received
    assert (request.method, request.body) == ("POST", PAYLOAD.encode())
    assert request.key == f"effect-{answer['effect_id']}" == (await service.agent.effect("s", 7))["forward_key"]
    headers = {name: request.header(f"Countermand-{name}") for name in ("Session", "Step", "Effect", "Attempt", "Outcome")}
    assert headers == {"Session": "s", "Step": "7", "Effect": answer["effect_id"], "Attempt": "1", "Outcome": None}
    assert request.header("Content-Type") == "application/json"
    session = await service.agent.session("s")
    assert (session["state"], session["pivoted"], session["undo_stack"]) == ("active", True, [])
    action = session["effects"][0]["action"]
    assert (action["url"], action["attempts"], action["last_status"], action["next_attempt_at"]) == (endpoint.url("/wire"), 1, 200, None)


async def test_attempts_share_key_and_bytes_when_the_endpoint_recovers(service: Service, endpoint: FakeEndpoint) -> None:
    """500, reset, 503, 200: the same bytes under one key each time, applied once, told once."""
    await wire(service, endpoint, Reply(status=500), Reply(mode=Mode.RESET_AFTER_PROCESSING), Reply(status=503), OK)
    answer = await executed(service, "s")
    assert {(request.key, request.body) for request in endpoint.received} == {(f"effect-{answer['effect_id']}", PAYLOAD.encode())}
    assert [request.header("Countermand-Attempt") for request in endpoint.received] == ["1", "2", "3", "4"]
    assert endpoint.applications_of(endpoint.received[0].key) == 1
    assert await step_kinds(service, "s") == ["INTENT", "EXECUTED", "PIVOT"]


# What the endpoint answers when two attempts may be made, and what is known then.
FAILURES: dict[str, tuple[tuple[Reply, ...], str, int]] = {
    "refused": ((Reply(status=422, body=b"no such account"),), "not_applied", 1),
    "not found": ((Reply(status=404),), "not_applied", 1),
    "conflict": ((Reply(status=409),), "not_applied", 1),
    "busy": ((Reply(status=503), Reply(status=429)), "not_applied", 2),
    "broken": ((Reply(status=500), Reply(status=500)), "unknown", 2),
    "broken then busy": ((Reply(status=500), Reply(status=503)), "unknown", 2),
    "broken then refused": ((Reply(status=500), Reply(status=422)), "unknown", 2),
    "reset": ((Reply(mode=Mode.RESET_AFTER_PROCESSING), Reply(mode=Mode.RESET_BEFORE_REPLY)), "unknown", 2),
    "redirected": ((Reply(status=303, headers={"Location": "/elsewhere"}),), "unknown", 1),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_effect_says_what_is_known_when_the_service_gives_up(service: Service, endpoint: FakeEndpoint, failure: str) -> None:
    """Failed only if every attempt was certainly not processed: no pivot, and the run goes on; else unknown, and the pivot."""
    replies, outcome, attempts = FAILURES[failure]
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    await wire(service, endpoint, *replies, max_retries=1)
    answer = await executed(service, "s", step=2)
    is_applied = outcome == "unknown"
    assert (answer["state"], answer["outcome"]) == ("unknown" if is_applied else "failed", outcome)
    assert len(endpoint.received) == attempts
    assert await step_kinds(service, "s", 2) == ["INTENT", "FAILED", *(["PIVOT"] if is_applied else [])]
    session = await service.agent.session("s")
    assert (session["state"], session["pivoted"], session["clean"]) == ("active", is_applied, not is_applied)
    assert session["effects"][1]["error"] == session["effects"][1]["action"]["last_error"]
    ended = await at_rest(service, "s")
    if is_applied:
        assert (ended["state"], ended["halt_reason"]) == ("halted", "failed_after_pivot")
        assert len(endpoint.received) == attempts
    else:
        assert (ended["state"], ended["clean"]) == ("compensated", True)
        assert [request.path for request in endpoint.received[attempts:]] == ["/undo"]


async def test_effect_failed_when_the_endpoint_was_never_reached(services: StartService) -> None:
    """Nobody listens there, or the address has been forbidden since: certainly not processed, and the run can end well."""
    service = await services(has_orchestrator=False)
    action = {"url": "http://127.0.0.1:9/wire", "max_retries": 1}
    await service.admin.register("wire", reversibility="irreversible", action=action)
    for name, error, egress_allow in (("denied", "egress_denied", "10.0.0.0/8"), ("refused", "connect", "127.0.0.0/8")):
        await approved(service, name)
        (await service.operator.resume(name, 1, PAYLOAD)).raise_for_status()
        async with open_service(service.database_url, has_api=False, egress_allow=egress_allow):
            effect = await service.agent.effect(name, 1, wait_s=WAIT_SECONDS)
        assert (effect["state"], effect["outcome"]) == ("failed", "not_applied")
        assert effect["error"].startswith(f"{error}: ")
        assert await step_kinds(service, name) == ["INTENT", "FAILED"]
        assert (await service.agent.complete(name)).json()["state"] == "completed"


async def test_location_is_asked_when_the_call_is_only_accepted(service: Service, endpoint: FakeEndpoint) -> None:
    """202 with a Location: polled until it is final, its answer is the result; without one the same bytes are sent again."""
    await wire(service, endpoint, Reply(status=202, headers={"Location": "/progress"}))
    endpoint.script("/progress", Reply(status=202), Reply(status=503), Reply(body=b'{"id":"t-1"}'))
    answer = await executed(service, "located")
    assert (answer["state"], answer["result"]) == ("committed", {"id": "t-1"})
    assert [(request.method, request.path) for request in endpoint.received] == [("POST", "/wire"), *[("GET", "/progress")] * 3]
    endpoint.script("/wire", Reply(status=202), Reply(status=202), OK)
    assert (await executed(service, "unlocated"))["result"] == "transfer-ok"
    again = [request for request in endpoint.received if request.header("Countermand-Session") == "unlocated"]
    assert ([request.method for request in again], len({(request.key, request.body) for request in again})) == (["POST"] * 3, 1)


async def test_resume_answers_with_what_is_so_when_its_wait_is_over(service: Service, endpoint: FakeEndpoint) -> None:
    """Not done yet: 202, where to look, and how it stands; the same request later gets the end of it, anybody else the state."""
    held = asyncio.Event()
    await wire(service, endpoint, Reply(gate=held, body=b'"transfer-ok"'))
    await approved(service, "s")
    first = await service.operator.resume("s", 1, PAYLOAD, idempotency_key="resume")
    assert (first.status_code, first.headers["Location"]) == (202, "/v1/sessions/s/effects/1")
    assert (first.json()["decision"], first.json()["state"], first.json()["result"]) == ("in_flight", "executing", None)
    await endpoint.wait_for_requests(1)
    waited = await service.operator.resume("s", 1, PAYLOAD, idempotency_key="resume", wait_s=1)
    assert (waited.status_code, waited.text, waited.headers["Location"]) == (202, first.text, first.headers["Location"])
    assert code(await service.admin.resume("s", 1, PAYLOAD, idempotency_key="resume")) == (409, "already_released")
    held.set()
    done = await service.operator.resume("s", 1, PAYLOAD, idempotency_key="resume", wait_s=WAIT_SECONDS)
    assert (done.status_code, done.json()["decision"], done.json()["result"]) == (200, "executed", "transfer-ok")
    assert code(await service.operator.resume("s", 1, PAYLOAD)) == (409, "already_released")
    assert len(endpoint.received) == 1


async def test_report_is_refused_while_the_service_executes_the_call(service: Service, endpoint: FakeEndpoint) -> None:
    """Neither the agent nor who released it can say what comes of it; nothing new irreversible, no completion meanwhile."""
    held = asyncio.Event()
    await wire(service, endpoint, Reply(gate=held, status=500), Reply(status=500), max_retries=1)
    await approved(service, "s")
    (await service.operator.resume("s", 1, PAYLOAD)).raise_for_status()
    await endpoint.wait_for_requests(1)
    for client in (service.agent, service.operator):
        assert code(await client.commit("s", 1, "transfer-ok")) == (409, "runs_as_action")
        assert code(await client.fail_effect("s", 1, "not_applied")) == (409, "runs_as_action")
    assert code(await service.agent.complete("s")) == (409, "unsettled_effects")
    other = await service.agent.intercept("s", step_index=2, tool="wire", payload=PAYLOAD)
    assert code(other) == (409, "unsettled_effects")
    assert (await service.agent.session("s"))["state"] == "active"
    assert (await do_step(service.agent, "s", 3, endpoint.url("/undo")))["decision"] == "execute", "what can be undone may go on"
    held.set()
    assert (await service.agent.effect("s", 1, wait_s=WAIT_SECONDS))["state"] == "unknown"
    for client in (service.agent, service.operator):
        assert code(await client.fail_effect("s", 1, "not_applied")) == (409, "runs_as_action"), "who never ran it cannot take it back"
    settled = await service.operator.post("/sessions/s/effects/1/settle", {"reason": "seen in the bank", "outcome": "committed"})
    assert (settled.status_code, settled.json()["state"]) == (200, "committed"), "an operator who has looked may say so"


async def test_run_fails_when_it_names_a_call_that_the_service_executes(service: Service, endpoint: FakeEndpoint) -> None:
    """Who gives up because of such a call gives up: what is said of the call is left to the service, the run fails all the same."""
    held = asyncio.Event()
    await wire(service, endpoint, Reply(gate=held, status=422))
    await approved(service, "s")
    (await service.operator.resume("s", 1, PAYLOAD)).raise_for_status()
    await endpoint.wait_for_requests(1)
    named = await service.agent.fail("s", effect={"step_index": 1, "outcome": "unknown"})
    assert (named.status_code, named.json()["state"]) == (202, "failed")
    held.set()
    assert (await at_rest(service, "s"))["state"] == "compensated"


# How the request that was in flight when the run failed ends, and what becomes of the run.
IN_FLIGHT: dict[str, tuple[Reply, str, str, list[str]]] = {
    "done": (OK, "committed", "halted", []),
    "refused": (Reply(status=422), "failed", "compensated", ["/undo/3", "/undo/1"]),
    "busy": (Reply(status=503), "failed", "compensated", ["/undo/3", "/undo/1"]),
    "broken": (Reply(status=500), "unknown", "halted", []),
    "reset": (Reply(mode=Mode.RESET_AFTER_PROCESSING), "unknown", "halted", []),
}


@pytest.mark.parametrize("end", IN_FLIGHT)
async def test_pivot_is_judged_when_the_action_in_flight_has_ended(service: Service, endpoint: FakeEndpoint, end: str) -> None:
    """The run fails while the request is on its way: no other attempt, nothing undone before its end is known, then judged."""
    reply, effect_state, session_state, undone = IN_FLIGHT[end]
    held = asyncio.Event()
    await wire(service, endpoint, Reply(gate=held, status=reply.status, mode=reply.mode, body=reply.body), OK)
    await do_step(service.agent, "s", 1, endpoint.url("/undo/1"))
    await approved(service, "s", 2)
    (await service.operator.resume("s", 2, PAYLOAD)).raise_for_status()
    await endpoint.wait_for_requests(1)
    (await do_step(service.agent, "s", 3, endpoint.url("/undo/3")))
    failed = await service.agent.fail("s")
    assert (failed.status_code, failed.json()["state"], failed.json()["effects"][1]["state"]) == (202, "failed", "executing")
    assert code(await service.agent.commit("s", 2, "transfer-ok")) == (409, "session_not_active")
    assert len(endpoint.received) == 1
    held.set()
    session = await at_rest(service, "s")
    assert (session["state"], session["effects"][1]["state"]) == (session_state, effect_state)
    assert session["halt_reason"] == ("failed_after_pivot" if session_state == "halted" else None)
    assert (session["pivoted"], session["clean"]) == (session_state == "halted", session_state != "halted")
    assert [request.path for request in endpoint.received] == ["/wire", *undone]
    assert len(endpoint.requests("/wire")) == 1, "no new attempt after the run has failed"
    verified = await service.auditor.get("/sessions/s/journal/verify")
    assert verified.json()["valid"] is True


async def until_put_off(service: Service, name: str) -> None:
    """Return once a session's call has had its first attempt, and waits for the next."""
    async with owner_connection(service.database_url) as connection:
        await wait_until(
            connection,
            f"EXISTS (SELECT FROM outgoing_calls WHERE session_id = '{name}' AND attempts = 1 AND NOT is_attempt_open "
            "AND leased_by IS NULL)",
        )


@pytest.mark.parametrize(("status", "effect_state", "session_state"), [(503, "failed", "compensated"), (500, "unknown", "halted")])
async def test_no_attempt_is_made_when_the_run_fails_between_two(
    service: Service, endpoint: FakeEndpoint, status: int, effect_state: str, session_state: str
) -> None:
    """Put off for an hour: the run need not wait for that; what is known now is what the first attempt left."""
    await wire(service, endpoint, Reply(status=status, headers={"Retry-After": "3600"}), OK)
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    await approved(service, "s", 2)
    (await service.operator.resume("s", 2, PAYLOAD)).raise_for_status()
    await until_put_off(service, "s")
    session = await at_rest(service, "s")
    assert (session["state"], session["effects"][1]["state"]) == (session_state, effect_state)
    assert session["effects"][1]["action"]["next_attempt_at"] is None
    assert (await call_of(service.database_url, "s", 2))["due_at"] is None
    assert [request.path for request in endpoint.received] == ["/wire", *(["/undo"] if session_state == "compensated" else [])]


async def test_nothing_is_sent_when_the_run_failed_before_the_first_attempt(services: StartService, endpoint: FakeEndpoint) -> None:
    """Released, and nobody has begun it: it will not begin any more, and what went before is undone."""
    service = await services(has_orchestrator=False)
    await wire(service, endpoint, OK)
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    await approved(service, "s", 2)
    (await service.operator.resume("s", 2, PAYLOAD)).raise_for_status()
    failed = (await service.agent.fail("s")).json()
    assert (failed["state"], failed["effects"][1]["state"], failed["effects"][1]["outcome"]) == ("failed", "failed", "not_applied")
    await services(has_api=False)
    session = await at_rest(service, "s")
    assert (session["state"], session["clean"], session["pivoted"]) == ("compensated", True, False)
    assert [request.path for request in endpoint.received] == ["/undo"]


@pytest.mark.parametrize(("reply", "effect_state"), [(OK, "committed"), (Reply(status=404), "unknown")])
async def test_accepted_call_is_asked_for_when_the_run_has_failed(
    service: Service, endpoint: FakeEndpoint, reply: Reply, effect_state: str
) -> None:
    """A call that was accepted is on its way: its Location is asked to the end, which is judged; nothing is posted again."""
    held = asyncio.Event()
    await wire(service, endpoint, Reply(status=202, headers={"Location": "/progress"}), OK)
    endpoint.script("/progress", Reply(status=202), Reply(status=202, gate=held), Reply(status=503), reply)
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    await approved(service, "s", 2)
    (await service.operator.resume("s", 2, PAYLOAD)).raise_for_status()
    await endpoint.wait_for_requests(3)
    assert (await service.agent.fail("s")).json()["state"] == "failed"
    held.set()
    session = await at_rest(service, "s")
    assert (session["state"], session["halt_reason"]) == ("halted", "failed_after_pivot")
    assert session["effects"][1]["state"] == effect_state
    assert [request.path for request in endpoint.received] == ["/wire", *["/progress"] * 4]


async def test_accepted_call_is_awaited_when_the_run_fails_between_two_questions(service: Service, endpoint: FakeEndpoint) -> None:
    """Nothing is on its way now, but the endpoint is at it: the run is not judged before the call's own end is known."""
    await wire(service, endpoint, Reply(status=202, headers={"Location": "/progress"}), OK)
    endpoint.script("/progress", Reply(status=202, headers={"Retry-After": "3600"}), Reply(status=202), OK)
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    await approved(service, "s", 2)
    (await service.operator.resume("s", 2, PAYLOAD)).raise_for_status()
    await endpoint.wait_for_answers(2)
    await until_put_off(service, "s")
    failed = (await service.agent.fail("s")).json()
    assert (failed["state"], failed["effects"][1]["state"], failed["pivoted"]) == ("failed", "executing", False)
    await make_due(service.database_url, "s")
    session = await at_rest(service, "s")
    assert (session["state"], session["halt_reason"], session["effects"][1]["state"]) == ("halted", "failed_after_pivot", "committed")
    assert [request.path for request in endpoint.received] == ["/wire", *["/progress"] * 3]


async def test_action_is_given_up_when_its_deadline_is_over(service: Service, endpoint: FakeEndpoint) -> None:
    """Accepted again and again and never done: at the call's deadline it is unknown, and it is said why."""
    await wire(service, endpoint, Reply(status=202), deadline_ms=300)
    answer = await executed(service, "s")
    assert answer["state"] == "unknown"
    assert answer["error"].startswith("accepted but never finished")
    assert await step_kinds(service, "s") == ["INTENT", "FAILED", "PIVOT"]


async def mail(service: Service, endpoint: FakeEndpoint, name: str = "mail", **members: Any) -> None:
    """Register a tool that can be undone, has to be approved, and is executed by the service."""
    registered = await service.admin.register(
        name,
        reversibility="compensatable",
        approval={"required": True},
        compensation=undo_at(endpoint.url("/recall"), args={"mail": {"$ref": "result#/mail_id"}}),
        **members,
    )
    registered.raise_for_status()


async def test_undo_is_there_from_the_release_on_when_an_approved_call_can_be_undone(service: Service, endpoint: FakeEndpoint) -> None:
    """No undo for what only waits; from the release on there is one, which the service's own result is bound to."""
    await mail(service, endpoint, action={"url": endpoint.url("/mail"), "timeout_ms": UNHURRIED_MS})
    held = asyncio.Event()
    endpoint.script("/mail", Reply(gate=held, body=b'{"mail_id":"m-1"}'))
    await approved(service, "s", tool="mail")
    assert (await service.agent.session("s"))["undo_stack"] == []
    (await service.operator.resume("s", 1, PAYLOAD)).raise_for_status()
    await endpoint.wait_for_requests(1)
    (entry,) = (await service.agent.session("s"))["undo_stack"]
    assert (entry["state"], entry["step_index"], entry["undo_id"]) == ("pending", 1, (await service.agent.effect("s", 1))["undo_id"])
    held.set()
    assert (await service.agent.effect("s", 1, wait_s=WAIT_SECONDS))["state"] == "committed"
    session = await at_rest(service, "s")
    assert (session["state"], session["pivoted"], session["clean"]) == ("compensated", False, True)
    forward, undo = endpoint.received
    assert (forward.key, forward.body) == (session["effects"][0]["forward_key"], PAYLOAD.encode())
    assert (undo.path, undo.key, undo.body) == ("/recall", f"undo-{entry['undo_id']}", b'{"mail":"m-1"}')
    assert undo.header("Countermand-Outcome") == "committed"


async def test_undo_comes_with_execute_when_an_approved_call_can_be_undone_and_the_caller_runs_it(
    service: Service, endpoint: FakeEndpoint
) -> None:
    """Without an action the resume answers like an intercept: run it, its undo is registered."""
    await mail(service, endpoint)
    await approved(service, "s", tool="mail")
    released = (await service.agent.resume("s", 1, PAYLOAD)).json()
    (entry,) = (await service.agent.session("s"))["undo_stack"]
    assert (released["decision"], released["undo_id"], entry["state"]) == ("execute", entry["undo_id"], "pending")
    intent = next(each for each in await service.auditor.journal("s") if each["kind"] == "INTENT")
    assert sorted(intent["content"]) == ["args", "payload"]
    (await service.agent.commit("s", 1, {"mail_id": "m-1"})).raise_for_status()
    assert (await at_rest(service, "s"))["state"] == "compensated"
    assert [(request.path, request.body) for request in endpoint.received] == [("/recall", b'{"mail":"m-1"}')]


async def test_run_is_unwound_when_the_last_of_its_actions_has_ended(service: Service, endpoint: FakeEndpoint) -> None:
    """Two in flight when the run fails: the first one's end changes nothing yet; the second did nothing, so only the first is undone."""
    held = {name: asyncio.Event() for name in ("first", "second")}
    for name, reply in (("first", Reply(body=b'{"mail_id":"m-1"}')), ("second", Reply(status=422))):
        endpoint.script(f"/{name}", Reply(gate=held[name], status=reply.status, body=reply.body))
        await mail(service, endpoint, name, action={"url": endpoint.url(f"/{name}"), "timeout_ms": UNHURRIED_MS})
    for step, name in enumerate(held, start=1):
        await approved(service, "s", step, tool=name)
        (await service.operator.resume("s", step, PAYLOAD)).raise_for_status()
    await endpoint.wait_for_requests(2)
    failed = (await service.agent.fail("s")).json()
    assert (failed["state"], [effect["state"] for effect in failed["effects"]]) == ("failed", ["executing"] * 2)
    held["first"].set()
    assert (await service.agent.effect("s", 1, wait_s=WAIT_SECONDS))["state"] == "committed"
    assert (await service.agent.session("s"))["state"] == "failed"
    held["second"].set()
    session = await at_rest(service, "s")
    assert (session["state"], [effect["state"] for effect in session["effects"]]) == ("compensated", ["compensated", "failed"])
    assert [entry["state"] for entry in session["undo_stack"]] == ["skipped", "compensated"]
    assert [request.path for request in endpoint.received[2:]] == ["/recall"]


async def test_version_that_was_approved_is_executed_when_the_tool_is_registered_anew(service: Service, endpoint: FakeEndpoint) -> None:
    """Where the call goes is part of what a person approved: a newer version, or none, changes nothing for it."""
    await wire(service, endpoint, OK)
    for name in ("renewed", "deleted"):
        await park(service.agent, name, 1, PAYLOAD, tool="wire")
    moved = {"reversibility": "irreversible", "action": {"url": endpoint.url("/elsewhere")}}
    (await service.admin.register("wire", **moved)).raise_for_status()
    items = (await service.operator.get("/approvals", params={"state": "pending"})).json()["items"]
    assert [(item["tool_version"], item["action_url"]) for item in items] == [(1, endpoint.url("/wire"))] * 2
    for name in ("renewed", "deleted"):
        if name == "deleted":
            (await service.admin.request("DELETE", "/v1/tools/wire")).raise_for_status()
        (await service.operator.approve(name, 1)).raise_for_status()
        done = await service.operator.resume(name, 1, PAYLOAD, wait_s=WAIT_SECONDS)
        assert (done.json()["decision"], done.json()["result"]) == ("executed", "transfer-ok")
    assert [request.path for request in endpoint.received] == ["/wire", "/wire"]


LET_BE_SILENT_SQL = "UPDATE sessions SET active_at = active_at - make_interval(secs => idle_seconds)"
LET_BE_OVER_SQL = "UPDATE sessions SET deadline_at = clock_timestamp()"


async def sweep(service: Service) -> None:
    """Have every session judged that seems overdue, by the service's own parts."""
    await deadlines_of(service).sweep()


async def test_silence_is_no_end_while_an_action_runs(services: StartService, endpoint: FakeEndpoint) -> None:
    """Nobody has anything to say while the service works; the deadline holds all the same, and the request in flight is awaited."""
    service = await services(**NEVER)
    held = asyncio.Event()
    await wire(service, endpoint, Reply(gate=held, body=b'"transfer-ok"'))
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    await approved(service, "s", 2)
    (await service.operator.resume("s", 2, PAYLOAD)).raise_for_status()
    await endpoint.wait_for_requests(1)
    await fetch(service.database_url, LET_BE_SILENT_SQL)
    await sweep(service)
    assert (await service.agent.session("s"))["state"] == "active"
    await fetch(service.database_url, LET_BE_OVER_SQL)
    await sweep(service)
    await sweep(service)
    session = await service.agent.session("s")
    assert (session["state"], session["effects"][1]["state"]) == ("failed", "executing")
    held.set()
    session = await at_rest(service, "s")
    assert (session["state"], session["effects"][1]["state"]) == ("halted", "committed")
    assert [request.path for request in endpoint.received] == ["/wire"]


async def test_silence_counts_again_when_the_action_has_ended(services: StartService, endpoint: FakeEndpoint) -> None:
    """The end of an action is a sign of life; from then on the agent has its idle time."""
    service = await services(**NEVER)
    await wire(service, endpoint, OK)
    await executed(service, "s")
    await sweep(service)
    assert (await service.agent.session("s"))["state"] == "active"
    await fetch(service.database_url, LET_BE_SILENT_SQL)
    await sweep(service)
    assert (await service.agent.session("s"))["halt_reason"] == "failed_after_pivot"


async def test_one_sender_lives_when_two_replicas_execute_actions(services: StartService, endpoint: FakeEndpoint) -> None:
    """Twenty actions shared by two replicas are sent once each; one that takes longer than the lease is not begun by the other."""
    replicas = [await services(lease_seconds=3, database_connections=10) for _ in range(2)]
    held = asyncio.Event()
    await wire(replicas[0], endpoint, Reply(gate=held, body=b'"transfer-ok"'))
    names = [f"s{number}" for number in range(20)]
    for number, name in enumerate(names):
        await approved(replicas[number % 2], name)
    for number, name in enumerate(names):
        (await replicas[number % 2].operator.resume(name, 1, PAYLOAD)).raise_for_status()
    await endpoint.wait_for_requests(len(names))
    async with owner_connection(replicas[0].database_url) as connection:
        ends_at = await connection.fetchval("SELECT max(leased_until) FROM outgoing_calls")
        await wait_until(connection, f"clock_timestamp() > '{ends_at.isoformat()}'::timestamptz + interval '0.5 s'")
    assert len(endpoint.received) == len(names)
    held.set()
    effects = await asyncio.gather(*(replicas[0].agent.effect(name, 1, wait_s=WAIT_SECONDS) for name in names))
    assert {effect["state"] for effect in effects} == {"committed"}
    assert sorted(request.key or "" for request in endpoint.received) == sorted(effect["forward_key"] for effect in effects)
    workers = await fetch(replicas[0].database_url, "SELECT FROM outgoing_calls WHERE attempts <> 1")
    assert workers == []
