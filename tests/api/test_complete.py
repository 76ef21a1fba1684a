"""The end of a run that went well: what it waits for, what it makes final, and that nothing is ever undone after it."""

import asyncio

import httpx

from app.domain.model import Role
from tests.factories import Service, do_step, undo_at
from tests.fakes import FakeEndpoint
from tests.probes import fetch, rest, row_counts


def code(response: httpx.Response) -> tuple[int, str]:
    """Return status and code of a refusal."""
    return response.status_code, response.json()["code"]


async def test_run_is_not_complete_when_something_is_not_settled(service: Service, endpoint: FakeEndpoint) -> None:
    """Executing, unknown and awaiting calls are listed, reads are not; once all is settled it completes."""
    undo = undo_at(endpoint.url("/undo"))
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    await service.agent.intercept("s", step_index=2, compensation=undo)
    await service.agent.intercept("s", step_index=3, reversibility="read_only", tool="look")
    await service.agent.intercept("s", step_index=4, compensation=undo)
    await service.agent.fail_effect("s", 4, "unknown")
    before = await row_counts(service.database_url)
    refused = await service.agent.complete("s")
    assert code(refused) == (409, "unsettled_effects")
    assert refused.json()["unsettled"] == [
        {"step_index": 2, "tool": "issue_credit", "state": "executing"},
        {"step_index": 4, "tool": "issue_credit", "state": "unknown"},
    ]
    await service.agent.commit("s", 2)
    assert [item["step_index"] for item in (await service.agent.complete("s")).json()["unsettled"]] == [4]
    assert (await row_counts(service.database_url))["journal"] == before["journal"] + 1
    await service.agent.fail_effect("s", 4, "not_applied")
    assert (await service.agent.complete("s")).json()["state"] == "completed"

    await service.agent.intercept("parked", step_index=1, reversibility="irreversible")
    waiting = await service.agent.complete("parked")
    assert (code(waiting), [item["state"] for item in waiting.json()["unsettled"]]) == ((409, "unsettled_effects"), ["awaiting_approval"])


async def test_nothing_is_ever_undone_when_a_run_is_complete(service: Service, endpoint: FakeEndpoint) -> None:
    """Entries are skipped, an open read is closed, every later report is refused without a trace, repeats are harmless."""
    for step in (1, 2):
        await do_step(service.agent, "s", step, endpoint.url(f"/{step}"))
    await service.agent.intercept("s", step_index=3, reversibility="read_only")
    await service.agent.intercept("s", step_index=4, compensation=undo_at(endpoint.url("/4")))
    await service.agent.fail_effect("s", 4, "not_applied")
    completed = await service.agent.complete("s")
    session = completed.json()
    assert (completed.status_code, session["state"], session["clean"]) == (200, "completed", True)
    assert [entry["state"] for entry in session["undo_stack"]] == ["skipped"] * 3
    assert [effect["state"] for effect in session["effects"]] == ["committed", "committed", "failed", "failed"]
    told = [(entry["kind"], entry["step"]) for entry in await service.operator.journal("s")]
    assert sorted(told[-3:-1]) == [("SKIPPED", 1), ("SKIPPED", 2)]
    assert told[-1] == ("COMPLETED", None)

    before = await row_counts(service.database_url)
    again = await service.agent.complete("s")
    assert (again.status_code, again.json()) == (200, session)
    for response in (
        await service.agent.fail("s"),
        await service.operator.fail("s"),
        await service.agent.fail("s", effect={"step_index": 1}),
        await service.agent.commit("s", 1, {"other": 1}),
        await service.agent.commit("s", 3, {}),
        await service.agent.fail_effect("s", 2, "not_applied"),
        await service.agent.touch("s"),
        await service.agent.intercept("s", step_index=9, compensation=undo_at(endpoint.url("/9"))),
    ):
        assert (code(response), response.json()["state"]) == ((409, "session_not_active"), "completed")
    assert await row_counts(service.database_url) == before
    assert await fetch(service.database_url, "SELECT call_id FROM outgoing_calls") == []
    assert endpoint.received == []
    assert (await service.auditor.get("/sessions/s/journal/verify")).json()["valid"]


async def test_run_cannot_complete_when_it_has_failed(service: Service, endpoint: FakeEndpoint) -> None:
    """An unwound or halted run stays what it is."""
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    await rest(service.agent, "s")
    late = await service.agent.complete("s")
    assert (code(late), late.json()["state"]) == ((409, "session_not_active"), "compensated")
    await service.agent.intercept("h", step_index=1, compensation=undo_at(endpoint.url("/undo"), on_unknown="escalate"))
    await rest(service.agent, "h")
    assert (await service.agent.complete("h")).json()["state"] == "halted"


async def test_completion_is_the_agents_own(service: Service) -> None:
    """Only the agent that opened the run may say that it went well; an empty run may complete."""
    (await service.agent.put("/sessions/s")).raise_for_status()
    assert code(await service.operator.complete("s")) == (403, "role_not_allowed")
    assert code(await service.auditor.complete("none")) == (403, "role_not_allowed")
    other = await service.client(Role.AGENT, "agent-2")
    assert code(await other.complete("s")) == (404, "session_not_found")
    assert code(await service.agent.complete("none")) == (404, "session_not_found")
    assert (await service.agent.post("/sessions/s/complete", {"note": "x"})).status_code == 422
    assert (await service.agent.complete("s")).json()["state"] == "completed"
    assert await service.operator.kinds("s") == ["OPENED", "COMPLETED"]


async def test_completed_run_is_not_clean_when_something_irreversible_stands(service: Service) -> None:
    """It went well, and still there is something in the world that cannot be taken back."""
    await service.admin.register("mail", reversibility="irreversible", approval={"required": False})
    await service.agent.intercept("s", tool="mail", step_index=1)
    await service.agent.commit("s", 1, {})
    session = (await service.agent.complete("s")).json()
    assert (session["state"], session["pivoted"], session["clean"]) == ("completed", True, False)


async def test_run_ends_one_way_when_complete_and_fail_race(service: Service, endpoint: FakeEndpoint) -> None:
    """Completed with nothing undone, or failed with everything undone once: never a mixture."""
    names = [f"s{number}" for number in range(20)]
    await asyncio.gather(*(do_step(service.agent, name, 1, endpoint.url(f"/{name}")) for name in names))
    calls = [call for name in names for call in (service.agent.complete(name), service.agent.fail(name))]
    await asyncio.gather(*calls)
    for name in names:
        session = (await service.agent.fail(name, wait_s=25)).json()
        undos = len(endpoint.requests(f"/{name}"))
        state = (await service.agent.session(name))["state"]
        assert (state, undos) in {("completed", 0), ("compensated", 1)}
        assert session.get("state") == state
