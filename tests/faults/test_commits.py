"""COMMIT's answer was lost, or COMMIT was: a client cannot tell, asks again under its key, and meets no conflict with itself.

Must not have anything else write through the proxy: the one connection that is cut is the verb's own.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx
import pytest

from app.domain.model import EntryKind
from tests.conftest import StartService
from tests.factories import Client, JsonObject, Service, do_step, open_service, owner_connection, park, undo_at
from tests.fakes import FakeEndpoint, Reply
from tests.faults.gates import wait_until
from tests.faults.proxy import WRITES_OF_ORGS, Cut, open_proxy
from tests.probes import fetch

PAYLOAD = '{ "amount":100.00, "to":"alice"}'
UNDO = undo_at("http://127.0.0.1:9/undo")
NEVER_SENT = {"args": {"amount": 2500}, "tool": "issue_credit", "compensation": UNDO}

Prepare = Callable[[Service, FakeEndpoint], Awaitable[None]]


async def nothing(_service: Service, _endpoint: FakeEndpoint) -> None:
    """Have no session yet."""


async def begun(service: Service, _endpoint: FakeEndpoint) -> None:
    """Have one call that is being executed."""
    (await service.agent.intercept("run", step_index=1, compensation=UNDO)).raise_for_status()


async def done(service: Service, endpoint: FakeEndpoint) -> None:
    """Have one call that happened."""
    await do_step(service.agent, "run", 1, endpoint.url("/undo"))


async def parked(service: Service, _endpoint: FakeEndpoint) -> None:
    """Have one call that waits for a person."""
    await park(service.agent, "run", 1, PAYLOAD)


async def approved(service: Service, endpoint: FakeEndpoint) -> None:
    """Have one call that a person has approved."""
    await parked(service, endpoint)
    (await service.operator.approve("run", 1)).raise_for_status()


async def halted(service: Service, endpoint: FakeEndpoint) -> None:
    """Have a session whose undo was refused."""
    endpoint.script("/undo", Reply(status=400), Reply())
    await done(service, endpoint)
    assert (await service.agent.fail("run", wait_s=20)).json()["state"] == "halted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """What is asked, by whom, of a session made ready for it, and the one entry that it leaves."""

    prepare: Prepare
    role: str
    path: str
    body: JsonObject
    leaves: EntryKind


REASON = {"reason": "it was looked into"}
VERBS: dict[str, Verb] = {
    "intercept": Verb(prepare=nothing, role="agent", path="/intercept", body={**NEVER_SENT, "step_index": 1}, leaves=EntryKind.INTENT),
    "intercept_unnumbered": Verb(prepare=nothing, role="agent", path="/intercept", body=NEVER_SENT, leaves=EntryKind.INTENT),
    "park": Verb(prepare=nothing, role="agent", path="/intercept", body={"tool": "wire", "args": {}}, leaves=EntryKind.AWAITING_APPROVAL),
    "commit": Verb(prepare=begun, role="agent", path="/effects/1/commit", body={"result": {"credit": 1}}, leaves=EntryKind.EXECUTED),
    "fail_effect": Verb(prepare=begun, role="agent", path="/effects/1/fail", body={"error": "it broke"}, leaves=EntryKind.FAILED),
    "fail": Verb(prepare=done, role="agent", path="/fail", body={"error": "the run failed"}, leaves=EntryKind.SESSION_FAILED),
    "complete": Verb(prepare=done, role="agent", path="/complete", body={}, leaves=EntryKind.COMPLETED),
    "approve": Verb(prepare=parked, role="operator", path="/effects/1/approve", body=REASON, leaves=EntryKind.APPROVED),
    "reject": Verb(prepare=parked, role="operator", path="/effects/1/reject", body=REASON, leaves=EntryKind.REJECTED),
    "resume": Verb(prepare=approved, role="agent", path="/effects/1/resume", body={"payload": PAYLOAD}, leaves=EntryKind.INTENT),
    "unwind": Verb(prepare=halted, role="operator", path="/unwind", body=REASON, leaves=EntryKind.UNWIND_ORDERED),
    "resolve": Verb(prepare=halted, role="operator", path="/resolve", body=REASON, leaves=EntryKind.RESOLVED),
}
IN_TRANSACTION = "EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%')"


async def ask(client: Client, verb: Verb) -> httpx.Response:
    """Ask, each time under the same key."""
    return await client.post(f"/sessions/run{verb.path}", verb.body, headers={"Idempotency-Key": "the-one"})


async def left(database_url: str, verb: Verb) -> int:
    """Count the entries of the kind that a verb leaves."""
    return len(await fetch(database_url, "SELECT FROM journal WHERE kind = $1", verb.leaves))


@pytest.mark.parametrize("cut", Cut)
@pytest.mark.parametrize("name", VERBS)
async def test_verb_is_done_once_when_its_commit_was_lost(
    name: str, cut: Cut, services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """503 the first time, whatever became of it; then the answer, the same again after that, and one entry in the journal."""
    verb = VERBS[name]
    elsewhere = await services(has_orchestrator=verb.prepare is halted)
    await verb.prepare(elsewhere, endpoint)
    async with open_proxy(database_url) as proxy, open_service(proxy.url, has_orchestrator=False) as service:
        client: Client = getattr(service, verb.role)
        proxy.arm(cut, begun=WRITES_OF_ORGS)
        lost = await ask(client, verb)
        assert await left(database_url, verb) == (cut is Cut.AFTER), "the cut was where it should be"
        answers = [await ask(client, verb) for _ in range(2)]
        assert dict(proxy.done) == {cut.value: 1}
    assert (lost.status_code, lost.json()["code"]) == (503, "storage_unavailable")
    assert int(lost.headers["Retry-After"]) >= 1
    assert [answer.is_success for answer in answers] == [True, True], [answer.text for answer in answers]
    assert answers[0].text == answers[1].text
    assert await left(database_url, verb) == 1
    assert (await elsewhere.auditor.get("/sessions/run/journal/verify")).json()["valid"] is True
    async with owner_connection(database_url) as connection:
        await wait_until(connection, f"NOT {IN_TRANSACTION}")
