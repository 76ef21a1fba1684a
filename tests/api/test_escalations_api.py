"""What waits for a person: the list, and the package that makes a task of it. Must not walk the ways out: see test_ways_out.py."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.domain.escalation import ADVICE, REASONS
from app.domain.model import HaltReason, Role
from tests.factories import Client, JsonObject, Service, park, undo_at
from tests.fakes import FakeEndpoint, Reply
from tests.halts import REFUSED, WIRE, Night
from tests.operators import Shell, ShellError, escalation, move_of, open_shell, order, paste, send, steps_of
from tests.probes import fetch, row_counts

PIVOT, REFUSAL = "failed_after_pivot", "compensation_failed"
# Names that RFC 3986 allows, and so are believed; and such as none may have.
HOSTILE_NAMES = ("evil;curl", "evil&curl&", "evil$(curl)", "evil'$(curl)'", "evil'';curl;''", "$IFS", "$PATH", "(curl)", "*", "!!")
HOSTILE_HOSTS = ("evil`curl`", "evil|curl", "evil>run", 'evil";curl;"', "evil' ;curl ", "-o run", "\\", "[evil", "évil")
HOSTILE_TEXT = "'; touch run; \"$(touch run)`touch run`${IFS}\\\n| touch run # \x1b[2J"


@pytest.fixture
def night(service: Service, endpoint: FakeEndpoint) -> Night:
    """Return one service and one endpoint on which things go wrong."""
    return Night(service=service, endpoint=endpoint)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Return the shell that a person would paste into, which finds nothing to run but curl."""
    return open_shell(tmp_path, "bash")


def code(response: httpx.Response) -> tuple[int, str]:
    """Return status and code of a refusal."""
    return response.status_code, response.json()["code"]


async def listed(client: Client, **params: Any) -> JsonObject:
    """Return one page of what waits for a person."""
    response = await client.get("/escalations", params=params)
    response.raise_for_status()
    found: JsonObject = response.json()
    return found


async def age(database_url: str, name: str, hours: int) -> None:
    """Let a session have been halted so many hours ago."""
    await fetch(database_url, "UPDATE sessions SET halted_at = halted_at - make_interval(hours => $2) WHERE session_id = $1", name, hours)


def sentences(judged: list[JsonObject]) -> dict[int, str]:
    """Return what is said of each step."""
    return {one["step_index"]: one["sentence"] for one in judged}


def names_of(package: JsonObject) -> list[tuple[str, str]]:
    """Return the moves as name and title, in order."""
    return [(move["name"], move["title"]) for move in package["moves"]]


async def test_list_has_who_waits_longest_first_and_counts_by_reason(night: Night) -> None:
    """A page at a time, by reason or all; the counts are over everything, with the age of the oldest; what nobody has to look at is out."""
    operator, database_url = night.service.operator, night.service.database_url
    empty = await listed(operator)
    assert empty == {"items": [], "counts": [], "next_cursor": None}
    for hours, (name, halt) in enumerate({"a": night.pivoted, "b": night.refused, "c": night.refused, "d": night.pivoted}.items()):
        await halt(name, 1 if halt == night.refused else 2)
        await age(database_url, name, hours)
    await night.refused("resolved", 1)
    (await order(operator, "resolved", "resolve")).raise_for_status()
    await night.run("active", 1)
    await night.run("compensated", 1)
    await night.failed("compensated")

    found = await listed(operator)
    assert [(item["session_id"], item["reason"]) for item in found["items"]] == [
        ("d", PIVOT),
        ("c", REFUSAL),
        ("b", REFUSAL),
        ("a", PIVOT),
    ]
    assert found["next_cursor"] is None
    assert [item["age_seconds"] // 3_600 for item in found["items"]] == [3, 2, 1, 0]
    assert [(count["reason"], count["count"], count["oldest_age_seconds"] // 3_600) for count in found["counts"]] == [
        (PIVOT, 2, 3),
        (REFUSAL, 2, 2),
    ]
    assert [count["oldest_halted_at"] for count in found["counts"]] == [item["halted_at"] for item in found["items"][:2]]
    top = found["items"][0]
    assert (top["agent"], top["pivoted"], top["explanation"]) == ("agent-1", True, REASONS[HaltReason.FAILED_AFTER_PIVOT])
    assert (await operator.get(top["url"].removeprefix("/v1"))).json()["session_id"] == "d"

    first = await listed(operator, limit=3)
    second = await listed(operator, limit=3, cursor=first["next_cursor"])
    assert [item["session_id"] for item in (*first["items"], *second["items"])] == ["d", "c", "b", "a"]
    assert (second["next_cursor"], first["counts"][0]["count"], second["counts"][0]["count"]) == (None, 2, 2)
    refused = await listed(operator, reason=REFUSAL, limit=1)
    rest = await listed(operator, reason=REFUSAL, limit=1, cursor=refused["next_cursor"])
    assert [item["session_id"] for item in (*refused["items"], *rest["items"])] == ["c", "b"]
    assert (await listed(operator, reason="poison"))["items"] == []
    for wrong in ({"cursor": "nonsense"}, {"cursor": "MSB4"}):
        assert code(await operator.get("/escalations", params=wrong)) == (400, "bad_cursor")
    for wrong in ({"reason": "boredom"}, {"limit": "0"}, {"limit": "201"}, {"state": "halted"}):
        assert (await operator.get("/escalations", params=wrong)).status_code == 422, wrong


async def test_escalations_are_read_by_operators_and_auditors_of_the_org_alone(night: Night) -> None:
    """No agent reads what is held against it, and another org's troubles are not there."""
    service = night.service
    await night.refused("s", 1)
    before = await row_counts(service.database_url)
    for client in (service.operator, service.auditor, service.admin):
        assert [item["session_id"] for item in (await listed(client))["items"]] == ["s"]
        assert (await escalation(client, "s"))["session_id"] == "s"
    for path in ("/escalations", "/sessions/s/escalation", "/sessions/ghost/escalation"):
        assert code(await service.agent.get(path)) == (403, "role_not_allowed")
    for role in (Role.OPERATOR, Role.AUDITOR, Role.ADMIN):
        stranger = await service.client(role, "somebody", "globex")
        assert (await listed(stranger)) == {"items": [], "counts": [], "next_cursor": None}
        assert code(await stranger.get("/sessions/s/escalation")) == (404, "session_not_found")
    assert code(await service.operator.get("/sessions/ghost/escalation")) == (404, "session_not_found")
    assert await row_counts(service.database_url) == before


async def test_escalation_is_not_found_when_nobody_has_to_look(night: Night) -> None:
    """While a session runs, unwinds or is at its end there is no task, and the answer says where it stands."""
    operator = night.service.operator
    gate = asyncio.Event()
    await night.run("active", 1)
    await park(night.service.agent, "awaiting_approval", 1, WIRE)
    await night.run("completed", 1)
    (await night.service.agent.complete("completed")).raise_for_status()
    await night.run("compensated", 1)
    await night.failed("compensated")
    night.endpoint.script("/compensating/1", Reply(gate=gate))
    await night.run("compensating", 1)
    (await night.service.agent.fail("compensating")).raise_for_status()
    await night.reached("compensating")
    for state in ("active", "awaiting_approval", "completed", "compensated", "compensating"):
        missing = await operator.get(f"/sessions/{state}/escalation")
        assert (code(missing), missing.json()["state"]) == ((404, "escalation_not_found"), state)
    gate.set()


async def halt_refunds(night: Night) -> JsonObject:
    """Halt a session of six steps at its fourth: the sixth was undone, the fifth did nothing; return it."""
    agent = night.service.agent
    (await agent.put("/sessions/s", {"agent": "refund-bot", "metadata": {"order": 4921}})).raise_for_status()
    night.endpoint.script("/s/4", Reply(status=503), Reply(status=400, body=b"period is closed"))
    await night.run("s", 4)
    await night.open_step("s", 5)
    (await agent.fail_effect("s", 5, "not_applied")).raise_for_status()
    await night.step("s", 6)
    await agent.fail("s", error="the mail service is down")
    return await night.failed("s")


async def test_package_tells_what_is_and_why_when_a_session_is_halted(night: Night) -> None:
    """Reason, advice, whose run it was, what was undone, what was not and why, what cannot be, and who decided what."""
    halted = await halt_refunds(night)
    package = await escalation(night.service.operator, "s")
    assert (package["state"], package["reason"], package["explanation"], package["advice"]) == (
        "halted",
        REFUSAL,
        REASONS[HaltReason.COMPENSATION_FAILED],
        ADVICE[HaltReason.COMPENSATION_FAILED],
    )
    whose = [package[name] for name in ("agent", "owner", "metadata", "clean", "pivoted")]
    assert whose == ["refund-bot", "agent-1", {"order": 4921}, True, False]
    assert package["created_at"] < package["failed_at"] < package["halted_at"]
    assert sentences(package["undone"]) == {6: "its endpoint said so after 1 attempt"}
    assert sentences(package["not_undone"]) == {
        4: f"given up after 2 attempts; the last said: {halted['undo_stack'][2]['last_error']}",
        3: "not sent yet",
        2: "not sent yet",
        1: "not sent yet",
    }
    top = package["not_undone"][0]
    assert "period is closed" in top["sentence"]
    assert (top["step_index"], top["tool"], top["description"]) == (4, "issue_credit", "take back s-4")
    assert package["cannot_be_undone"] == []
    assert [(entry["kind"], entry["step"], entry["actor"]) for entry in package["decisions"]] == [
        ("SESSION_FAILED", None, "agent:agent-1"),
        ("COMPENSATION_FAILED", 4, "orchestrator"),
        ("HALTED", None, "orchestrator"),
    ]
    assert package["decisions"][0]["details"]["error"] == "the mail service is down"


async def test_package_shows_every_step_and_undo_when_a_session_is_halted(night: Night) -> None:
    """Each step as it stands with its times, each undo with the key and the very bytes that are sent for it, under the session's ETag."""
    operator = night.service.operator
    session = await halt_refunds(night)
    response = await operator.get("/sessions/s/escalation")
    assert response.headers["ETag"] == (await operator.get("/sessions/s")).headers["ETag"]
    package = response.json()
    assert [step["step_index"] for step in package["steps"]] == [1, 2, 3, 4, 5, 6]
    for step, effect in zip(package["steps"], session["effects"], strict=True):
        assert {name: step[name] for name in effect} == effect
        assert (step["executed_at"] is not None) == (step["outcome"] == "committed")
        assert step["registered_at"] > package["created_at"]
    for shown, entry in zip(package["undo_stack"], session["undo_stack"], strict=True):
        assert {name: shown[name] for name in entry} == entry
        assert shown["idempotency_key"] == f"undo-{entry['undo_id']}"
    failed = package["undo_stack"][2]
    (first, _) = night.endpoint.requests("/s/4")
    assert (failed["idempotency_key"], failed["body"]) == (first.key, first.body.decode())
    assert (failed["attempts"], failed["last_status"], failed["independent"]) == (2, 400, False)
    assert failed["first_sent_at"] is not None
    assert [(entry["first_sent_at"], entry["body"]) for entry in package["undo_stack"][3:]] == [(None, None)] * 3


async def test_package_says_what_cannot_be_undone_and_who_allowed_it_when_the_pivot_is_past(night: Night) -> None:
    """What is irreversible is named, with the person who approved it and the bytes that were approved."""
    operator = night.service.operator
    await night.run("s", 1)
    await park(night.service.agent, "s", 2, WIRE)
    (await operator.approve("s", 2, reason="checked", approver="the boss")).raise_for_status()
    (await night.service.agent.resume("s", 2, WIRE)).raise_for_status()
    await night.failed("s")
    package = await escalation(operator, "s")
    assert (package["reason"], package["pivoted"], package["clean"]) == (PIVOT, True, False)
    assert sentences(package["cannot_be_undone"]) == {2: "irreversible, and it may have gone ahead"}
    approved = next(entry for entry in package["decisions"] if entry["kind"] == "APPROVED")
    assert (approved["actor"], approved["details"]["reason"], approved["contents"]) == ("operator:operator-1", "checked", {"payload": WIRE})
    assert [entry["kind"] for entry in package["decisions"]] == ["APPROVED", "SESSION_FAILED", "PIVOT", "HALTED"]
    assert names_of(package) == [
        ("settle", "Step 2 (send_wire_transfer) did happen"),
        ("settle", "Step 2 (send_wire_transfer) did not happen"),
        ("retry", "Send the undo of step 1: take back s-1"),
        ("skip", "Step 1 was undone by hand: take back s-1"),
        ("skip", "Let step 1 stand: take back s-1"),
        ("unwind", "Undo what is left: step 1, newest first"),
        ("resolve", "Close the session as it stands"),
    ]
    (await order(operator, "s", "effects/2/settle", outcome="committed")).raise_for_status()
    assert sentences((await escalation(operator, "s"))["cannot_be_undone"]) == {2: "irreversible, and it went ahead"}


async def test_package_says_what_the_reports_contradict_when_an_effect_came_late(night: Night) -> None:
    """Nobody has to compare reports and times at night: which undo may have met nothing, and what nothing will undo, is said."""
    operator, agent = night.service.operator, night.service.agent
    await night.late("undone")
    assert sentences((await escalation(operator, "undone"))["cannot_be_undone"]) == {
        2: "its endpoint said so after 1 attempt, but that the call happened was reported only after that"
    }

    for name, step in (("skipped", 1), ("wired", 2)):
        await night.open_step(name, 1)
        if name == "wired":
            (await agent.commit(name, 1)).raise_for_status()
            await night.released(name, 2)
        (await agent.fail_effect(name, step, "not_applied")).raise_for_status()
        assert code(await agent.commit(name, step, {"id": "after all"})) == (409, "not_executing")
        await night.failed(name)
    skipped, wired = await escalation(operator, "skipped"), await escalation(operator, "wired")
    contradicted = "it was reported as not applied first, and as committed after that"
    assert (skipped["reason"], sentences(skipped["cannot_be_undone"])) == (
        "late_effect",
        {1: f"{contradicted}, when its undo was out of the unwind: undo it by other means"},
    )
    assert (wired["reason"], sentences(wired["cannot_be_undone"])) == (PIVOT, {2: f"irreversible, and it went ahead: {contradicted}"})
    (late,) = [entry for entry in wired["decisions"] if entry["kind"] == "LATE_COMMIT"]
    assert (late["step"], late["contents"]) == (2, {"result": '{"id":"after all"}'})

    await night.open_step("unsent", 1, on_unknown="escalate", args={"id": {"$ref": "result#/id"}})
    await night.failed("unsent")
    assert code(await agent.commit("unsent", 1, {"id": 7})) == (409, "session_not_active")
    assert sentences((await escalation(operator, "unsent"))["not_undone"]) == {
        1: "not sent; a late report says that the call happened: settle it as committed, with the result that was reported"
    }


async def test_moves_are_those_that_would_help_when_an_undo_cannot_be_sent(night: Night) -> None:
    """A retry that would halt again at once is not offered, the unwind says where it would; what an order needs besides is asked for."""
    operator = night.service.operator
    await night.run("unresolved", 1)
    await night.step("unresolved", 2, args={"id": {"$ref": "result#/number"}})
    await night.failed("unresolved")
    package = await escalation(operator, "unresolved")
    assert [name for name, _ in names_of(package)] == ["skip", "skip", "skip", "skip", "unwind", "resolve"]
    assert move_of(package, "unwind")["warning"] == (
        "it will halt again at step 2: its undo needs what the result does not have; undo it by other means and skip it"
    )
    (await order(operator, "unresolved", f"undo/{package['undo_stack'][0]['undo_id']}/skip")).raise_for_status()
    package = await escalation(operator, "unresolved")
    assert [name for name, _ in names_of(package)] == ["retry", "skip", "skip", "unwind", "resolve"]
    assert move_of(package, "unwind")["warning"] is None
    assert sentences(package["cannot_be_undone"]) == {2: "an operator let it stand"}
    assert move_of(package, "retry", 1)["consequence"].startswith("sent for the first time, under the key undo-")

    references: JsonObject = {"args": {"id": {"$ref": "result#/id"}}}
    undos: dict[str, JsonObject] = {
        "needs": references,
        "finds": references | {"unknown": {"args": {"key": {"$ref": "effect#/forward_key"}}}},
        "takes": {"args": {"all": True}},
    }
    for name, members in undos.items():
        await night.open_step(name, 1, on_unknown="escalate", **members)
        await night.failed(name)
        package = await escalation(operator, name)
        assert [move for move, _ in names_of(package)] == ["settle", "settle", "skip", "skip", "unwind", "resolve"], name
        happened = move_of(package, "settle", 1, outcome="committed")
        assert ("RESULT" in (happened["warning"] or ""), "${RESULT:?" in happened["curl"]) == (name == "needs", name == "needs"), name
        assert "RESULT" not in move_of(package, "settle", 1, outcome="not_applied")["curl"]


async def test_resolved_session_can_still_be_read_and_has_no_moves(night: Night) -> None:
    """Who closed it and why is told; there is nothing more to order."""
    operator = night.service.operator
    await night.refused("s", 2)
    before = await escalation(operator, "s")
    (await order(operator, "s", "resolve", "written off")).raise_for_status()
    package = await escalation(night.service.auditor, "s")
    assert (package["state"], package["moves"]) == ("resolved", [])
    for name in ("reason", "explanation", "halted_at", "not_undone", "steps", "undo_stack"):
        assert package[name] == before[name]
    closed = package["decisions"][-1]
    assert (closed["kind"], closed["actor"], closed["details"]["reason"]) == ("RESOLVED", "operator:operator-1", "written off")


async def test_move_is_refused_when_something_has_happened_since_it_was_read(night: Night, shell: Shell) -> None:
    """A person acts on what the page showed or not at all; read again, the same order goes through, and pasted twice it is given once."""
    operator = night.service.operator
    await night.refused("s", 2)
    stale = await escalation(operator, "s")
    (await order(operator, "s", f"undo/{stale['undo_stack'][1]['undo_id']}/skip", by_hand=True)).raise_for_status()
    before = await row_counts(night.service.database_url)
    for move in stale["moves"]:
        assert code(await paste(shell, operator, move["curl"], "because")) == (412, "version_differs"), move["title"]
    assert await row_counts(night.service.database_url) == before

    move = move_of(await escalation(operator, "s"), "retry", 2)
    first = await paste(shell, operator, move["curl"], "because")
    assert (first.status_code, "Idempotent-Replayed" in first.headers) == (202, False)
    await night.failed("s")
    again = await paste(shell, operator, move["curl"], "because")
    assert (again.status_code, again.content, again.headers["Idempotent-Replayed"]) == (202, first.content, "true")
    assert steps_of(night.endpoint, "s") == [2, 2]


async def test_curl_runs_nothing_but_curl_whatever_hosts_and_tenants_say(night: Night, shell: Shell) -> None:
    """Nothing of a request, a tool or a payload breaks out of the command; the reason and the key come from the environment alone."""
    operator, agent = night.service.operator, night.service.agent
    night.endpoint.script("/s/1", REFUSED)
    (await agent.put("/sessions/s", {"agent": HOSTILE_TEXT, "metadata": {HOSTILE_TEXT: HOSTILE_TEXT}})).raise_for_status()
    undo = undo_at(night.url("s", 1) + "?%27%22$(touch%20run)", description=HOSTILE_TEXT, args={HOSTILE_TEXT: HOSTILE_TEXT})
    (await agent.intercept("s", step_index=1, payload=HOSTILE_TEXT, compensation=undo)).raise_for_status()
    (await agent.fail_effect("s", 1, error=HOSTILE_TEXT)).raise_for_status()
    await agent.fail("s", error=HOSTILE_TEXT)
    await night.failed("s")
    for host in (*HOSTILE_NAMES, *HOSTILE_HOSTS):
        response = await operator.get("/sessions/s/escalation", headers={"Host": host.encode()})
        assert response.status_code == 200, host
        moves = response.json()["moves"]
        assert [move["name"] for move in moves] == ["retry", "skip", "skip", "unwind", "resolve"], host
        assert host not in HOSTILE_NAMES or all(move["url"].startswith(f"http://{host}/v1/sessions/s/") for move in moves), host
        for move in moves:
            (arguments,) = await shell.run(move["curl"], COUNTERMAND_KEY="cm_key", REASON="it's $(touch run) `touch run`")
            assert arguments[:4] == ["-sS", "-X", "POST", move["url"]], host
            assert arguments[4:6] == ["-H", "Authorization: Bearer cm_key"]
            assert arguments[-2:] == ["-d", httpx.Request("POST", "http://x", json=said(move)).content.decode()]
            assert len(arguments) == 14
    assert sorted(path.name for path in shell.path.iterdir()) == ["curl"]


def said(move: JsonObject) -> JsonObject:
    """Return what a move's command says in its body."""
    return {**move["body"], "reason": "it's $(touch run) `touch run`"}


async def test_curl_is_not_run_when_the_key_or_the_reason_is_missing(night: Night, shell: Shell) -> None:
    """Nobody orders anything without saying why; the shell says what is missing before it runs anything."""
    operator = night.service.operator
    await night.refused("s", 1)
    for move in (await escalation(operator, "s"))["moves"]:
        for environment in ({}, {"COUNTERMAND_KEY": "cm_key"}, {"COUNTERMAND_KEY": "cm_key", "REASON": ""}):
            with pytest.raises(ShellError, match=r"REASON: say why|COUNTERMAND_KEY: an operator key"):
                await shell.run(move["curl"], **environment)
    broken = move_of(await escalation(operator, "s"), "resolve")["curl"]
    (arguments,) = await shell.run(broken, COUNTERMAND_KEY=operator.key, REASON='x","by_hand":"')
    assert (await send(operator, arguments)).status_code in {400, 422}
    assert (await operator.session("s"))["state"] == "halted"
