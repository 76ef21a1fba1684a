"""A person's decision over HTTP: the second seed's story, the list, who may decide what, and what decides nothing. Must not race."""

import json
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any

import httpx
import pytest

from app.domain.model import Role
from tests.conftest import StartService
from tests.factories import Client, JsonObject, Service, do_step, park
from tests.fakes import FakeEndpoint
from tests.probes import fetch, rest

PAYLOAD = '{"amount":"100","to":"alice"}'
OTHER_PAYLOAD = '{"amount":"999999","to":"mallory"}'
MANAGER = "manager@company.com"
NEVER = {"sweep_seconds": 3_600}  # the service's own sweep happens once, at its start
TIMES = 10
STEP = "/sessions/s/effects/1"

# Whatever a read could have touched: the rows themselves, signs of life included.
STANDING_SQL = """
SELECT
  (SELECT json_agg(s ORDER BY s.session_id) FROM sessions AS s)::text AS sessions,
  (SELECT json_agg(e ORDER BY e.session_id, e.step_index) FROM effect_log AS e)::text AS effects,
  (SELECT json_agg(a ORDER BY a.session_id, a.step_index) FROM approvals AS a)::text AS approvals,
  (SELECT count(*) FROM journal) AS entries,
  (SELECT count(*) FROM outgoing_calls) AS calls
"""
LET_EXPIRE_SQL = "UPDATE approvals SET expires_at = requested_at + interval '1 us' WHERE session_id = ANY ($1::text[])"


def code(response: httpx.Response) -> tuple[int, str]:
    """Return status and code of a refusal."""
    return response.status_code, response.json()["code"]


async def standing(service: Service) -> dict[str, Any]:
    """Return everything that is stored of sessions and what was asked in them."""
    (row,) = await fetch(service.database_url, STANDING_SQL)
    return dict(row)


def told(entry: JsonObject) -> tuple[str, str]:
    """Return kind and first content of an entry, as the second seed prints them."""
    contents = [content["text"] for content in (entry["content"] or {}).values()]
    return entry["kind"], contents[0] if contents else ""


async def test_journal_holds_the_second_seeds_entries_when_its_story_is_told(service: Service, endpoint: FakeEndpoint) -> None:
    """Reserve, ask, approve, resume, report: the seed's five entries in its order, among ours of steps 1 and 2, with the approver."""
    manager = await service.client(Role.OPERATOR, MANAGER)
    await do_step(service.agent, "transfer-77", 1, endpoint.url("/undo"), {"sku": "SKU-9"})
    asked = await service.agent.intercept("transfer-77", tool="sendWireTransfer", step_index=2, payload=PAYLOAD)
    assert asked.status_code == 202
    assert asked.json()["message"] == "[AWAITING_APPROVAL] Tool 'sendWireTransfer' requires human approval"
    assert (asked.headers["Location"], asked.headers["Retry-After"]) == ("/v1/sessions/transfer-77/effects/2", "5")
    assert (await service.agent.session("transfer-77"))["state"] == "awaiting_approval"

    (item,) = (await manager.get("/approvals", params={"state": "pending"})).json()["items"]
    approved = await manager.approve(item["session_id"], item["step_index"], approver="somebody@else.example")
    assert (approved.status_code, approved.json()["state"]) == (200, "approved")
    assert (await service.agent.session("transfer-77"))["state"] == "awaiting_approval"
    released = await service.agent.resume("transfer-77", 2, item["payload"])
    assert (released.status_code, released.json()["decision"], released.json()["payload"]) == (200, "execute", PAYLOAD)
    assert (await service.agent.session("transfer-77"))["state"] == "active"
    (await service.agent.commit("transfer-77", 2, "transfer-ok")).raise_for_status()

    journal = await service.auditor.journal("transfer-77")
    assert [(entry["step"], entry["kind"]) for entry in journal] == [
        (None, "OPENED"),
        (1, "INTENT"),
        (1, "EXECUTED"),
        (2, "AWAITING_APPROVAL"),
        (2, "APPROVED"),
        (2, "INTENT"),
        (2, "EXECUTED"),
        (2, "PIVOT"),
    ]
    seed = [told(entry) for entry in journal[2:7]]
    assert seed == [
        ("EXECUTED", '{"sku":"SKU-9"}'),
        ("AWAITING_APPROVAL", PAYLOAD),
        ("APPROVED", PAYLOAD),
        ("INTENT", PAYLOAD),
        ("EXECUTED", '"transfer-ok"'),
    ]
    decision = json.loads(journal[4]["body"])
    assert (journal[4]["actor"], decision["gate"], decision["approver"]) == (f"operator:{MANAGER}", "approval-gate", MANAGER)
    assert decision["claimed_approver"] == "somebody@else.example"
    assert (decision["tool"], decision["requested_by"], decision["ttl_seconds"]) == ("sendWireTransfer", "agent-1", 259_200)
    assert (await service.auditor.get("/sessions/transfer-77/journal/verify")).json()["valid"] is True


async def test_decision_names_rule_and_version_when_the_tool_is_registered(service: Service) -> None:
    """The policy in force is on the chain: the tool's version and how long the question was to stay open."""
    for ttl_seconds in (60, 90):
        await service.admin.register("wire", reversibility="irreversible", approval={"required": True, "ttl_seconds": ttl_seconds})
    await park(service.agent, "s", 1, PAYLOAD, tool="wire")
    await service.admin.register("wire", reversibility="irreversible", approval={"required": True, "ttl_seconds": 5})
    effect = (await service.operator.approve("s", 1, reason="checked with the bank")).json()
    asked, decided = [json.loads(entry["body"]) for entry in await service.auditor.journal("s") if entry["step"] == 1]
    assert {(body["tool_version"], body["ttl_seconds"], body["expires_at"]) for body in (asked, decided)} == {
        (2, 90, effect["approval"]["expires_at"])
    }
    assert (decided["reason"], effect["approval"]["reason"]) == ("checked with the bank", "checked with the bank")
    assert (effect["approval"]["decided_by"], effect["approval"]["requested_by"]) == ("operator-1", "agent-1")


async def test_list_shows_what_waits_when_an_operator_looks(services: StartService) -> None:
    """Oldest first, filtered by state, a page at a time; each item is the effect with its session and its agent."""
    service = await services(**NEVER)
    names = [f"s{number}" for number in range(5)]
    for name in names:
        await park(service.agent, name, 1, PAYLOAD)
    (await service.operator.approve("s1", 1)).raise_for_status()
    (await service.operator.reject("s3", 1)).raise_for_status()
    await fetch(service.database_url, LET_EXPIRE_SQL, ["s4"])

    async def listed(client: Client, **params: Any) -> list[str]:
        found, cursor = [], None
        while True:
            response = await client.get("/approvals", params={**params, **({"cursor": cursor} if cursor else {})})
            assert response.status_code == 200
            found += [item["session_id"] for item in response.json()["items"]]
            cursor = response.json()["next_cursor"]
            if cursor is None:
                return found

    for client in (service.operator, service.auditor, service.admin):
        assert await listed(client, limit=2) == names
        assert await listed(client, state="pending", limit=1) == ["s0", "s2"], "what is past its time waits for nobody"
    assert await listed(service.operator, state="approved") == ["s1"]
    assert await listed(service.operator, state="rejected") == ["s3"]
    assert await listed(service.operator, state="released") == []
    (first, *_) = (await service.operator.get("/approvals")).json()["items"]
    effect = (await service.operator.get("/sessions/s0/effects/1")).json()
    assert {name: first[name] for name in effect} == effect
    assert (first["session_id"], first["agent"]) == ("s0", "agent-1")
    assert first["payload_sha256"] == sha256(PAYLOAD.encode()).hexdigest()


async def test_list_is_refused_when_it_is_not_the_callers(service: Service) -> None:
    """Agents have no business there, another org sees nothing of it, and what cannot be meant is refused."""
    await park(service.agent, "s", 1, PAYLOAD)
    stranger = await service.client(Role.OPERATOR, "operator-1", org="globex")
    assert code(await service.agent.get("/approvals")) == (403, "role_not_allowed")
    assert (await stranger.get("/approvals")).json() == {"items": [], "next_cursor": None}
    assert code(await service.operator.get("/approvals", params={"cursor": "rubbish"})) == (400, "bad_cursor")
    for params in ({"state": "waiting"}, {"limit": "0"}, {"limit": "201"}, {"action": "approve"}):
        assert (await service.operator.get("/approvals", params=params)).status_code == 422, params


async def test_nobody_decides_what_the_role_or_the_person_may_not(service: Service) -> None:
    """Agents and auditors are refused by role, the requester's own subject in any role, strangers see nothing; nothing moves."""
    await park(service.agent, "s", 1, PAYLOAD)
    before = await standing(service)
    selves = [await service.client(role, "agent-1") for role in (Role.OPERATOR, Role.ADMIN)]
    stranger = await service.client(Role.OPERATOR, "operator-1", org="globex")
    other_agent = await service.client(Role.AGENT, "agent-2")
    for client, refusal in (
        (service.agent, (403, "role_not_allowed")),
        (service.auditor, (403, "role_not_allowed")),
        (other_agent, (403, "role_not_allowed")),
        *((itself, (403, "same_subject")) for itself in selves),
        (stranger, (404, "session_not_found")),
    ):
        assert code(await client.approve("s", 1, approver=MANAGER)) == refusal
        assert code(await client.reject("s", 1, approver=MANAGER)) == refusal
    assert code(await other_agent.resume("s", 1, PAYLOAD)) == (404, "session_not_found")
    assert code(await stranger.resume("s", 1, PAYLOAD)) == (404, "session_not_found")
    assert code(await service.auditor.resume("s", 1, PAYLOAD)) == (403, "role_not_allowed")
    assert await standing(service) == before

    (await service.admin.approve("s", 1)).raise_for_status()
    released = await selves[0].resume("s", 1, PAYLOAD)
    assert (released.status_code, released.json()["decision"]) == (200, "execute"), "who asked may run what another approved"


async def test_decision_is_refused_when_there_is_no_such_question(service: Service, endpoint: FakeEndpoint) -> None:
    """No session, no step, and a step that never asked are told apart; a path that cannot name a step is invalid."""
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    verbs: list[Callable[[str, int], Awaitable[httpx.Response]]] = [
        service.operator.approve,
        service.operator.reject,
        lambda session_id, step: service.operator.resume(session_id, step, PAYLOAD),
    ]
    for verb in verbs:
        assert code(await verb("none", 1)) == (404, "session_not_found")
        assert code(await verb("s", 9)) == (404, "effect_not_found")
        assert code(await verb("s", 1)) == (404, "approval_not_found")
        assert (await verb("s", 0)).status_code == 422
    assert (await service.agent.session("s"))["state"] == "active"


async def test_first_decision_stands_when_others_follow(service: Service) -> None:
    """Approve and reject act on a pending question alone: the same person's repeat is harmless, anybody else is told how it stands."""
    await park(service.agent, "yes", 1, PAYLOAD)
    approved = await service.operator.approve("yes", 1)
    assert (await service.operator.approve("yes", 1)).text == approved.text
    for verb in (service.admin.approve, service.admin.reject, service.operator.reject):
        late = await verb("yes", 1)
        assert code(late) == (409, "already_decided")
        assert (late.json()["state"], late.json()["decided_by"]) == ("approved", "operator-1")

    await park(service.agent, "no", 1, PAYLOAD)
    rejected = await service.operator.reject("no", 1)
    assert (rejected.status_code, rejected.json()["state"]) == (200, "rejected")
    again = await service.operator.reject("no", 1)
    assert (again.status_code, again.json()["approval"]) == (200, rejected.json()["approval"])
    assert code(await service.operator.reject("no", 1, then="continue")) == (409, "already_decided")
    for verb in (service.operator.approve, service.admin.approve, service.admin.reject):
        late = await verb("no", 1)
        assert code(late) == (409, "already_decided")
        assert (late.json()["state"], late.json()["decided_by"]) == ("rejected", "operator-1")
    for name, kind in (("yes", "APPROVED"), ("no", "REJECTED")):
        kinds = await service.auditor.kinds(name)
        assert [each for each in kinds if each in {"APPROVED", "REJECTED"}] == [kind]


async def test_nothing_is_decided_when_another_payload_was_looked_at(service: Service) -> None:
    """A fingerprint beside the yes that is not the payload's changes nothing; the right one is taken."""
    asked = await park(service.agent, "s", 1, PAYLOAD)
    before = await standing(service)
    wrong = sha256(OTHER_PAYLOAD.encode()).hexdigest()
    refused = await service.operator.approve("s", 1, payload_sha256=wrong)
    assert code(refused) == (409, "payload_differs")
    assert refused.json()["payload_sha256"] == asked["payload_sha256"]
    assert (await service.operator.approve("s", 1, payload_sha256="not a hash")).status_code == 422
    assert await standing(service) == before
    assert (await service.operator.approve("s", 1, payload_sha256=asked["payload_sha256"])).status_code == 200


async def test_resume_fails_closed_at_each_stage(service: Service) -> None:
    """Pending: not approved, and nothing is consumed; approved: released once; released: only told how it stands, whatever the bytes."""
    await park(service.agent, "s", 1, PAYLOAD)
    for payload in (PAYLOAD, OTHER_PAYLOAD):
        early = await service.agent.resume("s", 1, payload)
        assert code(early) == (409, "not_approved")
        assert early.json()["state"] == "pending"
    (await service.operator.approve("s", 1)).raise_for_status()
    released = await service.operator.resume("s", 1, PAYLOAD)
    effect = (await service.operator.get(STEP)).json()
    assert released.json() == {
        "decision": "execute",
        "session_id": "s",
        "step_index": 1,
        "effect_id": effect["effect_id"],
        "undo_id": None,
        "forward_key": f"effect-{effect['effect_id']}",
        "payload": PAYLOAD,
        "payload_sha256": sha256(PAYLOAD.encode()).hexdigest(),
        "attempt": 1,
    }
    assert (effect["state"], effect["released_to"], effect["approval"]["state"]) == ("executing", "operator-1", "released")
    for client, payload in ((service.operator, PAYLOAD), (service.agent, PAYLOAD), (service.agent, OTHER_PAYLOAD)):
        again = await client.resume("s", 1, payload)
        assert code(again) == (409, "already_released")
        assert (again.json()["state"], again.json()["released_to"]) == ("executing", "operator-1")
    assert (await service.agent.session("s"))["state"] == "active"
    assert (await service.auditor.kinds("s")) == ["OPENED", "AWAITING_APPROVAL", "APPROVED", "INTENT"]


async def test_result_is_reported_by_whom_it_was_released_to_or_the_agent(service: Service) -> None:
    """The operator who was told to execute says what came of it; any other operator is refused, the session's agent is not."""
    for name, reporter in (("a", service.operator), ("b", service.agent)):
        await park(service.agent, name, 1, PAYLOAD)
        (await service.operator.approve(name, 1)).raise_for_status()
        (await service.operator.resume(name, 1, PAYLOAD)).raise_for_status()
        assert code(await service.admin.commit(name, 1, "ok")) == (403, "not_released_to_you")
        assert code(await service.admin.fail_effect(name, 1)) == (403, "not_released_to_you")
        committed = await reporter.commit(name, 1, "ok")
        assert (committed.status_code, committed.json()["state"], committed.json()["result"]) == (200, "committed", "ok")
        late = await service.operator.resume(name, 1, PAYLOAD)
        assert (code(late), late.json()["state"]) == ((409, "already_released"), "committed")
    session = await service.agent.session("a")
    assert (session["state"], session["pivoted"], session["clean"]) == ("active", True, False)


FORGED: list[JsonObject] = [{"approved": True}, {"status": "approved"}, {"verdict": "execute"}, {"approver": MANAGER}]


@pytest.mark.parametrize("forged", FORGED, ids=lambda forged: next(iter(forged)))
async def test_nothing_moves_when_a_caller_claims_a_decision_in_a_body(service: Service, forged: JsonObject) -> None:
    """Intercept, commit and resume know no such member: 422 that names it, nothing stored, the call still pending, then not approved."""
    fresh = await service.agent.intercept("forged", tool="send_wire_transfer", step_index=1, payload=PAYLOAD, **forged)
    assert fresh.status_code == 422
    assert (await service.agent.get("/sessions/forged")).status_code == 404
    await park(service.agent, "s", 1, PAYLOAD)
    before = await standing(service)
    (member,) = forged
    bodies: dict[str, JsonObject] = {
        "/sessions/s/intercept": {"tool": "send_wire_transfer", "step_index": 1, "payload": PAYLOAD},
        f"{STEP}/commit": {"result": "transfer-ok"},
        f"{STEP}/resume": {"payload": PAYLOAD},
    }
    for path, body in bodies.items():
        refused = await service.agent.post(path, {**body, **forged})
        assert refused.status_code == 422, path
        assert [error["pointer"] for error in refused.json()["errors"]] == [f"/{member}"]
        plain = await service.agent.post(path, body, params={member: "true"})
        assert plain.status_code in {400, 422}, path
    assert await standing(service) == before
    assert code(await service.agent.resume("s", 1, PAYLOAD)) == (409, "not_approved")
    assert code(await service.agent.commit("s", 1, "transfer-ok")) == (409, "not_executing")
    assert (await service.agent.effect("s", 1))["approval"]["state"] == "pending"


async def test_an_approval_satisfies_its_own_step_and_session_alone(service: Service) -> None:
    """The same tool with the same bytes, asked for at steps 1 and 10 and in another session: the yes to step 10 is nobody else's."""
    await park(service.agent, "s", 1, PAYLOAD)
    (await service.operator.reject("s", 1, then="continue")).raise_for_status()
    await park(service.agent, "s", 10, PAYLOAD)
    await park(service.agent, "t", 10, PAYLOAD)
    (await service.operator.approve("s", 10)).raise_for_status()
    assert code(await service.agent.resume("s", 1, PAYLOAD)) == (409, "not_approved")
    assert code(await service.agent.resume("t", 10, PAYLOAD)) == (409, "not_approved")
    assert (await service.agent.effect("t", 10))["state"] == "awaiting_approval"
    for step in (10, 11):
        assert (await service.agent.resume("s", step, PAYLOAD)).json()["decision"] == "execute"
        (await service.agent.commit("s", step, "transfer-ok")).raise_for_status()
        if step == 10:
            await park(service.agent, "s", 11, PAYLOAD)
            assert code(await service.agent.resume("s", 11, PAYLOAD)) == (409, "not_approved"), "10 was approved, 11 is not"
            (await service.operator.approve("s", 11)).raise_for_status()


async def test_decision_is_refused_when_it_was_made_on_another_version(service: Service) -> None:
    """If-Match on approve and reject compares the effect's ETag: what moved since is not decided on unseen."""
    await park(service.agent, "s", 1, PAYLOAD)
    seen = (await service.operator.get(STEP)).headers["ETag"]
    before = await standing(service)
    for verb, body in (("approve", {}), ("reject", {"reason": "no"})):
        stale = await service.operator.post(f"{STEP}/{verb}", body, headers={"If-Match": '"v999"'})
        assert code(stale) == (412, "version_differs")
    assert await standing(service) == before
    assert (await service.operator.post(f"{STEP}/approve", {}, headers={"If-Match": seen})).status_code == 200
    assert code(await service.admin.post(f"{STEP}/reject", {"reason": "no"}, headers={"If-Match": seen})) == (412, "version_differs")
    assert (await service.operator.get(STEP)).headers["ETag"] != seen


@pytest.mark.parametrize("verb", ["approve", "reject"])
async def test_repeat_is_answered_as_the_first_time_when_it_has_the_same_key(service: Service, verb: str) -> None:
    """The stored answer comes again, also when If-Match no longer holds; another body is refused, another person's key is theirs."""
    await park(service.agent, "s", 1, PAYLOAD)
    body = {"reason": "because"}
    headers = {"Idempotency-Key": "decision-1", "If-Match": (await service.operator.get(STEP)).headers["ETag"]}
    first = await service.operator.post(f"{STEP}/{verb}", body, headers=headers)
    assert (first.status_code, "Idempotent-Replayed" in first.headers) == (200, False)
    entries = await service.auditor.journal("s")
    again = await service.operator.post(f"{STEP}/{verb}", body, headers=headers)
    assert (again.status_code, again.text, again.headers["Idempotent-Replayed"]) == (200, first.text, "true")
    other = await service.operator.post(f"{STEP}/{verb}", {"reason": "another"}, headers=headers)
    assert code(other) == (422, "key_reused")
    theirs = await service.admin.post(f"{STEP}/{verb}", body, headers={"Idempotency-Key": "decision-1"})
    assert code(theirs) == (409, "already_decided")
    assert await service.auditor.journal("s") == entries


LINKS = (
    "/approvals",
    "/approvals?state=pending",
    "/sessions",
    "/sessions/s",
    STEP,
    f"{STEP}?wait_s=0",
    "/sessions/s/journal",
    "/sessions/s/journal/verify",
)
VERBS = (f"{STEP}/approve", f"{STEP}/reject", f"{STEP}/resume", f"{STEP}/commit")


async def test_nothing_is_decided_when_every_link_is_got_again_and_again(services: StartService) -> None:
    """A mail scanner opens all there is, ten times, by GET and HEAD, with an action in the query too: no byte moves, a POST works."""
    service = await services(**NEVER)
    await park(service.agent, "s", 1, PAYLOAD)
    before = await standing(service)
    for _ in range(TIMES):
        for method in ("GET", "HEAD"):
            for link in LINKS:
                plain = await service.operator.request(method, f"/v1{link}")
                assert plain.status_code == 200, link
                forged = await service.operator.request(method, f"/v1{link}{'&' if '?' in link else '?'}action=approve")
                assert forged.status_code in {400, 422}, link
            for verb in VERBS:
                assert (await service.operator.request(method, f"/v1{verb}")).status_code == 405, verb
    assert await standing(service) == before
    assert (await service.operator.approve("s", 1)).json()["state"] == "approved"


async def test_question_ends_when_its_time_is_over_and_nobody_sweeps(services: StartService, endpoint: FakeEndpoint) -> None:
    """Approve and reject after the moment are refused as expired, EXPIRED is told once, no decision is, and the earlier step is undone."""
    service = await services(**NEVER)
    for name, verb in (("approve", service.operator.approve), ("reject", service.operator.reject)):
        await do_step(service.agent, name, 1, endpoint.url(f"/{name}"))
        await park(service.agent, name, 2, PAYLOAD)
        await fetch(service.database_url, LET_EXPIRE_SQL, [name])
        late = await verb(name, 2)
        assert (code(late), late.json()["state"]) == ((409, "already_decided"), "expired")
        assert code(await verb(name, 2)) == (409, "already_decided")
        effect = await service.agent.effect(name, 2)
        assert (effect["state"], effect["approval"]["state"], effect["approval"]["decided_by"]) == ("expired", "expired", None)
        assert (await rest(service.agent, name))["state"] == "compensated"
        assert [request.path for request in endpoint.requests(f"/{name}")] == [f"/{name}"]
        kinds = await service.auditor.kinds(name)
        assert [kinds.count(kind) for kind in ("EXPIRED", "APPROVED", "REJECTED", "SESSION_FAILED")] == [1, 0, 0, 1]


async def test_release_is_refused_when_its_time_is_over(services: StartService, endpoint: FakeEndpoint) -> None:
    """Approved a millisecond before the end and resumed after it: expired, told so each time, and nothing runs."""
    service = await services(**NEVER)
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    await park(service.agent, "s", 2, PAYLOAD)
    (await service.operator.approve("s", 2)).raise_for_status()
    await fetch(service.database_url, "UPDATE approvals SET expires_at = decided_at + interval '1 ms'")
    for _ in range(2):
        late = await service.agent.resume("s", 2, PAYLOAD, idempotency_key="resume-1")
        assert code(late) == (409, "approval_expired")
    effect = await service.agent.effect("s", 2)
    assert (effect["state"], effect["approval"]["state"], effect["approval"]["decided_by"]) == ("expired", "expired", "operator-1")
    assert effect["released_to"] is None
    assert (await rest(service.agent, "s"))["state"] == "compensated"
    kinds = await service.auditor.kinds("s")
    assert (kinds.count("EXPIRED"), kinds.count("INTENT")) == (1, 1)
    assert code(await service.operator.approve("s", 2)) == (409, "already_decided")


async def test_session_goes_on_when_a_rejection_says_so(service: Service, endpoint: FakeEndpoint) -> None:
    """`then: continue`: the agent is told the reason, nothing is undone, the rejected call never runs, and the run can still end well."""
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    await park(service.agent, "s", 2, PAYLOAD)
    rejected = await service.operator.reject("s", 2, "do not mail this customer", then="continue")
    assert (rejected.status_code, rejected.json()["state"]) == (200, "rejected")
    effect = await service.agent.effect("s", 2)
    assert "do not mail this customer" in effect["approval"]["message"]
    assert (await service.agent.session("s"))["state"] == "active"
    body = json.loads(next(entry["body"] for entry in await service.auditor.journal("s") if entry["kind"] == "REJECTED"))
    assert (body["then"], body["approver"], body["reason"]) == ("continue", "operator-1", "do not mail this customer")

    settled = await service.agent.intercept("s", tool="send_wire_transfer", step_index=2, payload=PAYLOAD)
    assert (code(settled), settled.json()["state"]) == ((409, "step_settled"), "rejected")
    assert code(await service.agent.resume("s", 2, PAYLOAD)) == (409, "not_approved")
    assert code(await service.agent.commit("s", 2, "transfer-ok")) == (409, "not_executing")
    await do_step(service.agent, "s", 3, endpoint.url("/undo"))
    completed = await service.agent.complete("s")
    assert (completed.status_code, completed.json()["state"], completed.json()["clean"]) == (200, "completed", False)
    assert "LATE_COMMIT" in await service.auditor.kinds("s"), "that the rejected call is said to have happened leaves a trace"
    assert endpoint.received == []
