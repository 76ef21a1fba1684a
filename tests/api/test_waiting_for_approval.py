"""While a person is asked: what the agent is told and when, what stays shut, that no pause runs anything twice. Must not race."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any, NamedTuple

import httpx
import pytest

from tests.conftest import StartService
from tests.factories import Client, JsonObject, Service, deadlines_of, do_step, open_service, park, undo_at
from tests.fakes import FakeEndpoint, Reply
from tests.probes import fetch, rest

PAYLOAD = '{"amount":"100","to":"alice"}'
TOOL = "send_wire_transfer"
NEVER = {"sweep_seconds": 3_600}  # the service's own sweep happens once, at its start
LONG_WAIT_SECONDS = 55
AT_ONCE_SECONDS = 10.0  # beside the wait that was asked for, and generous beside what it takes
WAITERS = 10
TIMES = 5

LET_EXPIRE_SQL = "UPDATE approvals SET expires_at = requested_at + interval '1 us' WHERE session_id = $1"
BUSY_SQL = """
SELECT count(*) AS n
FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'countermand api%' AND state <> 'idle'
"""
ROWS_SQL = """
SELECT s.revision, s.active_at, e.version, a.state::text, (SELECT count(*) FROM outgoing_calls) AS calls
FROM sessions AS s, effect_log AS e, approvals AS a
"""


def code(response: httpx.Response) -> tuple[int, str]:
    """Return status and code of a refusal."""
    return response.status_code, response.json()["code"]


async def sweep(service: Service) -> None:
    """Have every session judged that seems overdue, by the service's own parts."""
    await deadlines_of(service).sweep()


async def approve(service: Service, name: str) -> None:
    """Say yes."""
    (await service.operator.approve(name, 1)).raise_for_status()


async def reject(service: Service, name: str) -> None:
    """Say no."""
    (await service.operator.reject(name, 1, "wrong account")).raise_for_status()


async def reject_and_continue(service: Service, name: str) -> None:
    """Say no to the call, and let the run go on."""
    (await service.operator.reject(name, 1, "not this customer", then="continue")).raise_for_status()


async def expire(service: Service, name: str) -> None:
    """Let the time of a question be over, and be noticed."""
    await fetch(service.database_url, LET_EXPIRE_SQL, name)
    await sweep(service)


async def expire_approved(service: Service, name: str) -> None:
    """Say yes, and let nobody use it in time."""
    await approve(service, name)
    await expire(service, name)


async def cancel(service: Service, name: str) -> None:
    """Let the run fail meanwhile."""
    (await service.agent.fail(name)).raise_for_status()


async def mismatch(service: Service, name: str) -> None:
    """Say yes, and present other bytes."""
    await approve(service, name)
    assert code(await service.agent.resume(name, 1, PAYLOAD.replace("100", "900"))) == (409, "payload_changed")


async def release(service: Service, name: str) -> None:
    """Say yes, and let it go ahead."""
    await approve(service, name)
    (await service.agent.resume(name, 1, PAYLOAD)).raise_for_status()


async def nothing(_service: Service, _name: str) -> None:
    """Let the question stand."""


class End(NamedTuple):
    """What becomes of a question, where its call stands then, and how the text about it begins and what else it says."""

    act: Callable[[Service, str], Awaitable[None]]
    state: str
    start: str
    part: str


ENDS = {
    "pending": End(nothing, "awaiting_approval", "[AWAITING_APPROVAL]", "requires human approval"),
    "approved": End(approve, "approved", "[APPROVED]", "has not run"),
    "released": End(release, "executing", "[RELEASED]", "it is executing"),
    "rejected": End(reject, "rejected", "[REJECTED]", "did not run: rejected: wrong account"),
    "continued": End(reject_and_continue, "rejected", "[REJECTED]", "did not run: rejected: not this customer"),
    "expired": End(expire, "expired", "[EXPIRED]", "did not run: nobody decided before"),
    "approved-and-expired": End(expire_approved, "expired", "[EXPIRED]", "did not run: it was approved, but not resumed before"),
    "cancelled": End(cancel, "cancelled", "[CANCELLED]", "did not run: its session failed"),
    "mismatched": End(mismatch, "rejected", "[REJECTED]", "did not run: the payload presented at resume was not the approved one"),
}


async def test_text_says_honestly_how_the_call_stands(services: StartService) -> None:
    """Each end of a question has a text of its own, and whatever did not run is said not to have run."""
    service = await services(**NEVER)
    texts: dict[str, str] = {}
    for name, end in ENDS.items():
        await park(service.agent, name, 1, PAYLOAD)
        await end.act(service, name)
        effect = await service.agent.effect(name, 1)
        texts[name] = effect["approval"]["message"]
        assert effect["state"] == end.state, name
        assert texts[name].startswith(f"{end.start} Tool '{TOOL}' "), name
        assert end.part in texts[name], name
    assert len(set(texts.values())) == len(ENDS)
    assert texts["pending"] == f"[AWAITING_APPROVAL] Tool '{TOOL}' requires human approval"


@pytest.mark.parametrize("name", ["approved", "rejected", "continued", "expired", "cancelled"])
async def test_agent_is_woken_at_once_when_its_question_ends(services: StartService, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The long poll on a parked call ends with the decision, on another replica too, not with the time it would have waited."""
    monkeypatch.setattr("app.engine.waits.LOOK_SECONDS", LONG_WAIT_SECONDS)  # nobody may find out by looking again
    service, other = await services(**NEVER), await services(**NEVER)
    asked = await park(service.agent, name, 1, PAYLOAD)
    waiting = [asyncio.create_task(each.agent.effect(name, 1, wait_s=LONG_WAIT_SECONDS)) for each in (service, other)]
    assert (await service.agent.effect(name, 1))["approval"]["message"] == asked["message"]
    assert [waiter.done() for waiter in waiting] == [False, False]
    await ENDS[name].act(service, name)
    async with asyncio.timeout(AT_ONCE_SECONDS):
        woken = await asyncio.gather(*waiting)
    assert [effect["state"] for effect in woken] == [ENDS[name].state] * 2
    assert all(effect["approval"]["message"].startswith(ENDS[name].start) for effect in woken)


async def test_agent_is_woken_at_once_when_the_action_ends(
    service: Service, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the service executes is waited for just like a decision: by the agent's poll, and by the resume that asked for it."""
    monkeypatch.setattr("app.engine.waits.LOOK_SECONDS", LONG_WAIT_SECONDS)
    held = asyncio.Event()
    endpoint.script("/wire", Reply(gate=held, body=b'"transfer-ok"'))
    action = {"url": endpoint.url("/wire"), "timeout_ms": 60_000}
    await service.admin.register("wire", reversibility="irreversible", action=action)
    await park(service.agent, "s", 1, PAYLOAD, tool="wire")
    await approve(service, "s")
    resuming = asyncio.create_task(service.operator.resume("s", 1, PAYLOAD, wait_s=LONG_WAIT_SECONDS))
    await endpoint.wait_for_requests(1)
    polling = asyncio.create_task(service.agent.effect("s", 1, wait_s=LONG_WAIT_SECONDS))
    assert (await service.agent.effect("s", 1))["state"] == "executing"
    assert (resuming.done(), polling.done()) == (False, False)
    held.set()
    async with asyncio.timeout(AT_ONCE_SECONDS):
        resumed, polled = await asyncio.gather(resuming, polling)
    assert (resumed.status_code, resumed.json()["decision"], resumed.json()["result"]) == (200, "executed", "transfer-ok")
    assert (polled["state"], polled["result"]) == ("committed", "transfer-ok")


async def test_nothing_goes_ahead_when_the_session_waits_for_a_person(service: Service, endpoint: FakeEndpoint) -> None:
    """No new call, no report, no completion while it waits, approved or not; nothing is there for the orchestrator."""
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    await park(service.agent, "s", 2, PAYLOAD)
    for state in ("awaiting_approval", "approved"):
        for step in (3, 4):
            other = await service.agent.intercept("s", step_index=step, compensation=undo_at(endpoint.url("/undo")))
            assert code(other) == (409, "session_awaiting_approval")
        read = await service.agent.intercept("s", step_index=3, tool="look", reversibility="read_only")
        assert code(read) == (409, "session_awaiting_approval")
        assert code(await service.agent.commit("s", 2, "transfer-ok")) == (409, "not_executing")
        assert code(await service.agent.fail_effect("s", 2, "not_applied")) == (409, "not_executing")
        unsettled = await service.agent.complete("s")
        assert code(unsettled) == (409, "unsettled_effects")
        assert unsettled.json()["unsettled"] == [{"step_index": 2, "tool": TOOL, "state": state}]
        assert (await service.agent.session("s"))["state"] == "awaiting_approval"
        assert await fetch(service.database_url, "SELECT FROM outgoing_calls") == []
        if state == "awaiting_approval":
            (await service.operator.approve("s", 2)).raise_for_status()
    assert len((await service.agent.session("s"))["effects"]) == 2
    assert endpoint.received == []


async def test_waiting_costs_no_connection_and_survives_a_restart(services: StartService, database_url: str) -> None:
    """Ten agents poll on a pool of two while others are served; the service ends and another begins: not a row has moved."""
    async with open_service(database_url, database_connections=2) as first:
        await park(first.agent, "s", 1, PAYLOAD)
        waiting = [asyncio.create_task(first.agent.effect("s", 1, wait_s=LONG_WAIT_SECONDS)) for _ in range(WAITERS)]
        assert [(await first.operator.get("/approvals")).status_code for _ in range(WAITERS)] == [200] * WAITERS
        assert [waiter.done() for waiter in waiting] == [False] * WAITERS
        assert [row["n"] for row in await fetch(database_url, BUSY_SQL)] == [0]
        shown = (await first.agent.get("/sessions/s/effects/1")).text
        before = await fetch(database_url, ROWS_SQL)
        journal = await first.auditor.journal("s")
        first.app.state.engine.stop()
        async with asyncio.timeout(AT_ONCE_SECONDS):
            assert [effect["state"] for effect in await asyncio.gather(*waiting)] == ["awaiting_approval"] * WAITERS
    second = await services()
    await sweep(second)
    assert (await second.agent.get("/sessions/s/effects/1")).text == shown
    assert await second.auditor.journal("s") == journal
    assert await fetch(database_url, ROWS_SQL) == before
    assert [item["session_id"] for item in (await second.operator.get("/approvals", params={"state": "pending"})).json()["items"]] == ["s"]
    await release(second, "s")


HOSTILE = "</pre><script>alert(1)</script>\u202e"  # what a page might run, and what turns the rest of a line around
LITERALS = ("1", "1.0", "100.00", "1e2", "-0", "true", "null", '"\\u0041"', '"\\/"', f'"{HOSTILE}"')


def nested(depth: int) -> str:
    """Return the text of an object of 30 fields that nest, unevenly spaced, the hostile one last."""
    text = f'"{HOSTILE}"'
    for level in range(depth, 0, -1):
        text = f'{{ "field_{level}" :{LITERALS[level % len(LITERALS)]},"inner_{level}":  {text}}}'
    return text


@pytest.mark.parametrize("member", ["payload", "args"])
async def test_person_sees_the_very_bytes_that_are_bound_when_the_call_is_large(service: Service, member: str) -> None:
    """D2: thirty nested fields, a hostile one last: list, effect and answer show the bytes sent, which hash to what is bound."""
    sent = nested(15)
    if member == "payload":
        asked = await park(service.agent, "s", 1, sent)
    else:
        body = f'{{"tool":"{TOOL}","step_index":1,"args":{sent}}}'.encode()
        headers = {"Authorization": f"Bearer {service.agent.key}", "Content-Type": "application/json"}
        asked = (await service.agent.http.post("/v1/sessions/s/intercept", content=body, headers=headers)).json()
    (item,) = (await service.operator.get("/approvals")).json()["items"]
    effect = await service.operator.effect("s", 1)
    assert len({asked["payload"], item["payload"], effect["payload"]}) == 1
    if member == "payload":
        assert item["payload"] == sent
    assert json.loads(item["payload"]) == json.loads(sent)
    assert HOSTILE in item["payload"]
    assert {asked["payload_sha256"], item["payload_sha256"]} == {sha256(item["payload"].encode()).hexdigest()}
    (await service.operator.approve("s", 1, payload_sha256=item["payload_sha256"])).raise_for_status()
    released = await service.agent.resume("s", 1, item["payload"])
    assert (released.status_code, released.json()["payload"]) == (200, item["payload"])


async def test_rejected_call_never_runs_whatever_is_tried(service: Service, endpoint: FakeEndpoint) -> None:
    """D5: after a no, resume, commit, approve and the same intercept in every form give no `execute`; what ran is undone once, LIFO."""
    for step in (1, 2):
        await do_step(service.agent, "s", step, endpoint.url(f"/undo/{step}"))
    asked: JsonObject = {"tool": TOOL, "step_index": 3, "payload": PAYLOAD}
    assert (await service.agent.intercept("s", idempotency_key="ask", **asked)).status_code == 202
    (await service.operator.reject("s", 3)).raise_for_status()
    for attempt in range(2):
        assert code(await service.agent.resume("s", 3, PAYLOAD)) == (409, "not_approved")
        assert code(await service.operator.resume("s", 3, PAYLOAD)) == (409, "not_approved")
        assert code(await service.agent.commit("s", 3, "transfer-ok")) == (409, "session_not_active")
        for operator in (service.operator, service.admin):
            assert code(await operator.approve("s", 3)) == (409, "already_decided")
        for key in ("ask", "another", None):
            again = await service.agent.intercept("s", idempotency_key=key, **asked)
            assert (code(again), again.json()["state"]) == ((409, "step_settled"), "rejected")
        anew = await service.agent.intercept("s", idempotency_key=f"new-{attempt}", **{**asked, "step_index": 4})
        assert code(anew) == (409, "session_not_active")
        session = await rest(service.agent, "s")
        assert (session["state"], session["clean"]) == ("compensated", False), "the rejected call is said to have happened"
    assert [request.path for request in endpoint.received] == ["/undo/2", "/undo/1"]
    effect = await service.agent.effect("s", 3)
    assert (effect["state"], effect["released_to"], effect["result"]) == ("rejected", None, None)
    assert [entry["kind"] for entry in await service.auditor.journal("s") if entry["step"] == 3 and entry["kind"] == "INTENT"] == []


async def ask_again(agent: Client, key: str | None, step: int, **asked: Any) -> list[httpx.Response]:
    """Intercept the same step several times."""
    return [await agent.intercept("s", idempotency_key=key, step_index=step, **asked) for _ in range(TIMES)]


@pytest.mark.parametrize("is_idempotent", [True, False])
@pytest.mark.parametrize("key", ["ask", "another", None])
async def test_nothing_runs_again_when_a_pause_comes_between(
    service: Service, endpoint: FakeEndpoint, key: str | None, *, is_idempotent: bool
) -> None:
    """D6: asked five times at every stage: one approval, one undo of the step before, and no second `execute` after the release."""
    await service.admin.register("wire", reversibility="irreversible", idempotent=is_idempotent)
    undo: JsonObject = {"compensation": undo_at(endpoint.url("/undo"))}
    first = await service.agent.intercept("s", idempotency_key="first", step_index=1, **undo)
    (await service.agent.commit("s", 1, {"id": 1})).raise_for_status()
    wire: JsonObject = {"tool": "wire", "payload": PAYLOAD}
    asked = await service.agent.intercept("s", idempotency_key="ask", step_index=2, **wire)

    async def repeats() -> list[httpx.Response]:
        earlier = await ask_again(service.agent, "first", 1, **undo)
        assert {(each.status_code, each.json()["decision"], each.json()["effect_id"]) for each in earlier} == {
            (200, "replay", first.json()["effect_id"])
        }
        return await ask_again(service.agent, key, 2, **wire)

    for text in ("[AWAITING_APPROVAL]", "[APPROVED]"):
        for each in await repeats():
            assert (each.status_code, each.json()["decision"]) == (202, "await_approval")
            assert each.json()["effect_id"] == asked.json()["effect_id"]
            assert each.json()["expires_at"] == asked.json()["expires_at"]
            assert each.json()["message"].startswith(text)
        if text == "[AWAITING_APPROVAL]":
            (await service.operator.approve("s", 2)).raise_for_status()
    (await service.operator.resume("s", 2, PAYLOAD, idempotency_key="resume")).raise_for_status()
    for each in await repeats():
        assert (each.status_code, each.json()["decision"]) == (200, "in_flight")
    (await service.operator.commit("s", 2, "transfer-ok")).raise_for_status()
    for each in await repeats():
        assert (each.status_code, each.json()["decision"], each.json()["result"]) == (200, "replay", "transfer-ok")
    session = await service.agent.session("s")
    assert [entry["undo_id"] for entry in session["undo_stack"]] == [first.json()["undo_id"]]
    assert [effect["attempt"] for effect in session["effects"]] == [1, 1]
    assert len((await service.operator.get("/approvals")).json()["items"]) == 1
    kinds = await service.auditor.kinds("s")
    assert [kinds.count(kind) for kind in ("AWAITING_APPROVAL", "APPROVED", "INTENT", "EXECUTED")] == [1, 1, 2, 2]
    assert endpoint.received == []
