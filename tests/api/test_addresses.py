"""Addresses that people paste: ids that survive a client, commands that lead where the service is reached. Must not test the orders."""

import pytest

from tests.conftest import StartService
from tests.factories import Service, do_step, park
from tests.fakes import FakeEndpoint, Reply

PUBLIC_URL = "https://countermand.example/saga"


@pytest.mark.parametrize("name", ["%2e", "%2e%2e"])
async def test_session_is_refused_when_clients_would_take_its_id_out_of_the_path(service: Service, name: str) -> None:
    """Curl and browsers resolve `.` and `..` before they send: nobody could approve or resolve a session of that name."""
    answer = await service.agent.intercept(name, tool="wire", step_index=1, payload="{}", reversibility="irreversible")
    assert answer.status_code in {404, 422}
    assert (await service.operator.get("/approvals")).json()["items"] == []


@pytest.mark.parametrize("name", ["...", ".a", "..a", "a..", "-", "x" * 200])
async def test_session_is_taken_when_its_id_only_looks_like_a_path(service: Service, name: str) -> None:
    """Every other id of the contract's letters is one."""
    await park(service.agent, name, 1, "{}")


async def test_commands_lead_to_the_public_address_when_one_is_set(services: StartService, endpoint: FakeEndpoint) -> None:
    """Behind a TLS proxy the service sees plain HTTP: the key must not be sent where the request seemed to come in."""
    service = await services(public_url=PUBLIC_URL)
    endpoint.script("/undo", Reply(status=422))
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    (await service.agent.fail("s", wait_s=20)).raise_for_status()
    package = (await service.operator.get("/sessions/s/escalation")).json()
    assert package["moves"]
    assert all(move["url"].startswith(f"{PUBLIC_URL}/v1/sessions/s/") and move["url"] in move["curl"] for move in package["moves"])
    assert package["error"] == "the run failed"


async def test_evidence_does_not_outrun_an_operator_when_an_agent_keeps_reporting(services: StartService, endpoint: FakeEndpoint) -> None:
    """Late reports are kept, and cut where they are shown; they do not move the version that a command is bound to."""
    service = await services()
    endpoint.script("/undo", Reply(status=422))
    await do_step(service.agent, "s", 1, endpoint.url("/undo"), {"id": 0})
    (await service.agent.fail("s", wait_s=20)).raise_for_status()
    before = await service.operator.get("/sessions/s")
    for number in range(3):
        assert (await service.agent.commit("s", 1, {"id": number + 1, "noise": "x" * 5_000})).status_code == 409
    assert (await service.auditor.kinds("s")).count("LATE_COMMIT") == 3
    package = await service.operator.get("/sessions/s/escalation")
    assert package.headers["ETag"] == before.headers["ETag"]
    late = [entry for entry in package.json()["decisions"] if entry["kind"] == "LATE_COMMIT"]
    assert all(entry["contents"]["result"].endswith("(cut; the journal has all of it)") for entry in late)
    resolved = await service.operator.post("/sessions/s/resolve", {"reason": "seen to"}, headers={"If-Match": before.headers["ETag"]})
    assert (resolved.status_code, resolved.json()["state"]) == (200, "resolved")


async def test_session_is_not_clean_when_a_late_report_contradicts_what_a_person_settled(service: Service, endpoint: FakeEndpoint) -> None:
    """On a halted session a report moves nothing; but what then ends as compensated must not look as if all had gone well."""
    undo = {"on_unknown": "escalate"}
    await service.agent.intercept("s", step_index=1, compensation={"url": endpoint.url("/undo"), "args": {}, **undo})
    (await service.agent.fail("s", wait_s=20)).raise_for_status()
    settled = await service.operator.post("/sessions/s/effects/1/settle", {"reason": "not there", "outcome": "not_applied"})
    assert settled.status_code == 200
    assert (await service.agent.commit("s", 1, {"id": 7})).status_code == 409
    ended = await service.operator.post("/sessions/s/unwind", {"reason": "go on"}, params={"wait_s": 20})
    assert (ended.json()["state"], ended.json()["clean"]) == ("compensated", False)
