"""Reporting what happened: commit and fail, in time, twice, and too late, over HTTP."""

import asyncio

import httpx

from tests.conftest import StartService
from tests.factories import JsonObject, Service, do_step, undo_at
from tests.fakes import FakeEndpoint, Reply
from tests.probes import rest, row_counts


def code(response: httpx.Response) -> tuple[int, str]:
    """Return status and problem code of a refusal."""
    return response.status_code, response.json()["code"]


async def start(service: Service, endpoint: FakeEndpoint, session_id: str = "s", steps: int = 1, **compensation: object) -> None:
    """Let some undoable calls be under way."""
    for step in range(1, steps + 1):
        undo = undo_at(endpoint.url(f"/{step}"), **compensation)
        (await service.agent.intercept(session_id, step_index=step, compensation=undo)).raise_for_status()


async def test_commit_is_kept_once_when_it_is_repeated(service: Service, endpoint: FakeEndpoint) -> None:
    """The same result again is the same answer; another one is refused and the first stays."""
    await start(service, endpoint)
    first = await service.agent.commit("s", 1, {"credit_id": "cr_1", "amount": 2500})
    assert (first.status_code, first.json()["state"], first.json()["outcome"]) == (200, "committed", "committed")
    again = await service.agent.commit("s", 1, {"credit_id": "cr_1", "amount": 2500})
    assert (again.status_code, again.text) == (200, first.text)
    other = await service.agent.commit("s", 1, {"credit_id": "cr_2"})
    assert code(other) == (409, "result_differs")
    assert (await service.agent.get("/sessions/s/effects/1")).text == first.text
    assert (await service.operator.kinds("s")) == ["OPENED", "INTENT", "EXECUTED"]
    null = await service.agent.post("/sessions/s/effects/1/commit", {})
    assert code(null) == (409, "result_differs")


async def test_failed_call_is_taken_out_of_the_unwind_when_it_was_not_applied(service: Service, endpoint: FakeEndpoint) -> None:
    """`not_applied` skips the entry and the session goes on; repeats are harmless; a contradiction is refused."""
    await start(service, endpoint, steps=2)
    failed = await service.agent.fail_effect("s", 2, "not_applied", "card declined")
    assert (failed.status_code, failed.json()["state"], failed.json()["error"]) == (200, "failed", "card declined")
    assert (await service.agent.fail_effect("s", 2, "not_applied", "card declined")).text == failed.text
    assert code(await service.agent.fail_effect("s", 2, "unknown")) == (409, "not_executing")
    session = await service.agent.session("s")
    assert (session["state"], [entry["state"] for entry in session["undo_stack"]]) == ("active", ["skipped", "pending"])
    assert await service.operator.kinds("s") == ["OPENED", "INTENT", "INTENT", "FAILED", "SKIPPED"]
    assert (await rest(service.agent, "s"))["state"] == "compensated"
    assert [request.path for request in endpoint.received] == ["/1"]


async def test_session_goes_to_a_person_when_a_call_happened_after_all(service: Service, endpoint: FakeEndpoint) -> None:
    """`not_applied`, then a commit: the undo is gone, so the commit is evidence, and the failing run halts unwound."""
    await start(service, endpoint, steps=2)
    (await service.agent.fail_effect("s", 2, "not_applied", "no answer")).raise_for_status()
    assert code(await service.agent.commit("s", 2, {"n": 2})) == (409, "not_executing")
    assert (await service.operator.kinds("s"))[-1] == "LATE_COMMIT"
    session = await rest(service.agent, "s")
    assert (session["state"], session["halt_reason"], session["clean"]) == ("halted", "late_effect", False)
    assert [entry["state"] for entry in session["undo_stack"]] == ["skipped", "pending"]  # type: ignore[attr-defined]  # JSON
    assert endpoint.received == []


async def test_unknown_outcome_may_be_settled_when_the_session_is_active(service: Service, endpoint: FakeEndpoint) -> None:
    """An unknown call can still be committed, or failed, as long as the run goes on; unknown is the default."""
    await start(service, endpoint, steps=2)
    for step in (1, 2):
        unknown = await service.agent.post(f"/sessions/s/effects/{step}/fail", {"error": "timeout"})
        assert (unknown.status_code, unknown.json()["state"], unknown.json()["outcome"]) == (200, "unknown", "unknown")
    committed = await service.agent.commit("s", 1, {"n": 1})
    assert (committed.json()["state"], committed.json()["error"]) == ("committed", None)
    assert (await service.agent.fail_effect("s", 2, "not_applied")).json()["state"] == "failed"
    assert code(await service.agent.fail_effect("s", 1, "not_applied")) == (409, "not_executing")
    assert (await service.agent.session("s"))["state"] == "active"


async def test_step_is_not_found_when_nobody_asked_for_it(service: Service, endpoint: FakeEndpoint) -> None:
    """Reports on steps or sessions that are not there change nothing."""
    await start(service, endpoint)
    before = await row_counts(service.database_url)
    assert code(await service.agent.commit("s", 9)) == (404, "effect_not_found")
    assert code(await service.agent.fail_effect("s", 9)) == (404, "effect_not_found")
    assert code(await service.agent.fail("s", effect={"step_index": 9})) == (404, "effect_not_found")
    assert code(await service.agent.commit("ghost", 1)) == (404, "session_not_found")
    assert code(await service.agent.fail("ghost")) == (404, "session_not_found")
    assert await row_counts(service.database_url) == before
    assert (await service.agent.session("s"))["state"] == "active"


async def test_failing_call_is_named_with_the_run(service: Service, endpoint: FakeEndpoint) -> None:
    """`not_applied` skips the named entry though it is the top; `unknown`, the default, has it undone and marked."""
    await start(service, endpoint, "skips", steps=3)
    for step in (1, 2):
        await service.agent.commit("skips", step)
    answer = await service.agent.fail(
        "skips", wait_s=20, effect={"step_index": 3, "outcome": "not_applied", "error": "the mail service is down"}
    )
    assert answer.json()["state"] == "compensated"
    assert [entry["state"] for entry in answer.json()["undo_stack"]] == ["skipped", "compensated", "compensated"]
    assert answer.json()["effects"][2]["error"] == "the mail service is down"
    assert [request.path for request in endpoint.received] == ["/2", "/1"]

    await start(service, endpoint, "undoes", steps=2)
    await service.agent.commit("undoes", 1)
    answer = await service.agent.fail("undoes", wait_s=20, effect={"step_index": 2})
    assert answer.json()["state"] == "compensated"
    told = [(request.path, request.header("Countermand-Outcome")) for request in endpoint.received[2:]]
    assert told == [("/2", "unknown"), ("/1", "committed")]
    kinds = await service.operator.kinds("undoes")
    assert kinds.index("FAILED") < kinds.index("SESSION_FAILED")


async def test_only_call_of_a_run_is_skipped_when_it_was_not_applied(service: Service, endpoint: FakeEndpoint) -> None:
    """Nothing is left to undo, so the session is compensated without a request."""
    await start(service, endpoint)
    answer = await service.agent.fail("s", effect={"step_index": 1, "outcome": "not_applied"})
    assert answer.json()["state"] == "compensated"
    assert endpoint.received == []


async def test_named_call_stays_committed_when_the_run_is_failed_with_a_contradiction(service: Service, endpoint: FakeEndpoint) -> None:
    """A run is not failed on a report that contradicts what is known of the call."""
    await do_step(service.agent, "s", 1, endpoint.url("/1"))
    before = await row_counts(service.database_url)
    answer = await service.agent.fail("s", effect={"step_index": 1, "outcome": "not_applied"})
    assert code(answer) == (409, "not_executing")
    assert await row_counts(service.database_url) == before
    assert (await service.agent.session("s"))["state"] == "active"


async def test_late_commit_is_used_when_its_undo_was_not_sent_yet(service: Service, endpoint: FakeEndpoint) -> None:
    """The report is refused and journaled, binds the references of the pending undo, and marks it as committed."""
    gate = asyncio.Event()
    endpoint.script("/2", Reply(gate=gate))
    args = {"id": {"$ref": "result#/id"}}
    await start(service, endpoint, steps=2, args=args, unknown={"args": {"find": True}})
    await service.agent.fail("s")
    await endpoint.wait_for_requests(1)
    late = await service.agent.commit("s", 1, {"id": "cr_1"})
    assert code(late) == (409, "session_not_active")
    assert (late.json()["state"], late.json()["effect_state"]) == ("compensating", "unknown")
    assert code(await service.agent.commit("s", 1, {"id": "cr_1"})) == (409, "session_not_active")
    gate.set()
    session: JsonObject = await rest(service.agent, "s")
    assert (session["state"], session["clean"]) == ("compensated", True)
    upper, lower = endpoint.received
    assert (upper.body, upper.header("Countermand-Outcome")) == (b'{"find":true}', "unknown")
    assert (lower.body, lower.header("Countermand-Outcome")) == (b'{"id":"cr_1"}', "committed")
    assert (await service.operator.kinds("s")).count("LATE_COMMIT") == 1
    assert session["effects"][0]["result"] == {"id": "cr_1"}


async def test_late_commit_halts_the_session_when_its_undo_was_sent(service: Service, endpoint: FakeEndpoint) -> None:
    """The undo may have met nothing: the call in flight is finished, nothing more is sent, a person is told."""
    gate = asyncio.Event()
    endpoint.script("/2", Reply(status=503, gate=gate), Reply())
    await start(service, endpoint, steps=2)
    await service.agent.fail("s")
    await endpoint.wait_for_requests(1)
    late = await service.agent.commit("s", 2, {"id": "cr_2"})
    assert (code(late), late.json()["effect_state"]) == ((409, "session_not_active"), "compensating")
    gate.set()
    session: JsonObject = await rest(service.agent, "s")
    assert (session["state"], session["halt_reason"], session["clean"]) == ("halted", "late_effect", False)
    assert [request.path for request in endpoint.received] == ["/2", "/2"]
    assert [entry["state"] for entry in session["undo_stack"]] == ["compensated", "pending"]
    contents = [entry["content"] for entry in await service.operator.journal("s") if entry["kind"] == "LATE_COMMIT"]
    assert [content["result"]["text"] for content in contents] == ['{"id":"cr_2"}']
    assert (await service.operator.kinds("s"))[-1] == "HALTED"


async def test_late_commit_halts_the_session_when_all_was_undone(service: Service, endpoint: FakeEndpoint) -> None:
    """A session at rest is handed to a person; what was known to have happened before changes nothing."""
    await start(service, endpoint, steps=2)
    await service.agent.commit("s", 1, {"n": 1})
    assert (await rest(service.agent, "s"))["state"] == "compensated"
    known = await service.agent.commit("s", 1, {"n": 1})
    assert code(known) == (409, "session_not_active")
    assert (await service.agent.session("s"))["state"] == "compensated"
    late = await service.agent.commit("s", 2, {"n": 2})
    assert (code(late), late.json()["state"]) == ((409, "session_not_active"), "compensated")
    session = await service.agent.session("s")
    assert (session["state"], session["halt_reason"], session["clean"]) == ("halted", "late_effect", False)
    assert (await service.operator.kinds("s"))[-2:] == ["LATE_COMMIT", "HALTED"]
    await service.agent.commit("s", 2, {"n": 3})
    assert (await service.agent.session("s"))["state"] == "halted"
    assert (await service.operator.kinds("s"))[-1] == "LATE_COMMIT"
    assert len(endpoint.received) == 2


async def test_late_fail_skips_the_entry_when_it_is_still_pending(service: Service, endpoint: FakeEndpoint) -> None:
    """`not_applied` about a call whose undo was not sent yet saves that undo; about one that was sent, it is only recorded."""
    gate = asyncio.Event()
    endpoint.script("/3", Reply(gate=gate))
    await start(service, endpoint, steps=3)
    await service.agent.fail("s")
    await endpoint.wait_for_requests(1)
    for step in (2, 3):
        assert code(await service.agent.fail_effect("s", step, "not_applied")) == (409, "session_not_active")
    gate.set()
    session: JsonObject = await rest(service.agent, "s")
    assert session["state"] == "compensated"
    assert [request.path for request in endpoint.received] == ["/3", "/1"]
    assert [entry["state"] for entry in session["undo_stack"]] == ["compensated", "skipped", "compensated"]
    kinds = await service.operator.kinds("s")
    assert (kinds.count("LATE_FAIL"), kinds.count("SKIPPED")) == (2, 1)


async def test_late_fail_skips_the_entry_that_is_due_when_nothing_was_sent(services: StartService, endpoint: FakeEndpoint) -> None:
    """Even the entry whose call is due already is skipped as long as its first attempt was not made."""
    service = await services(has_orchestrator=False)
    await start(service, endpoint, steps=2)
    assert (await service.agent.fail("s")).json()["state"] == "failed"
    assert code(await service.agent.fail_effect("s", 2, "not_applied")) == (409, "session_not_active")
    session = await service.agent.session("s")
    assert [entry["state"] for entry in session["undo_stack"]] == ["skipped", "pending"]
    await services(has_api=False)
    assert (await rest(service.agent, "s"))["state"] == "compensated"
    assert [request.path for request in endpoint.received] == ["/1"]
