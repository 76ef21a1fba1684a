"""The promises that hang on one statement each, provoked without a race. Must stay quick: the mutants run it again and again."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from app.domain.egress import EgressPolicy
from app.domain.model import EntryKind, OrgName
from app.engine.clock import SystemClock
from app.engine.outbound import Outbound
from app.engine.unwind import Holding, LeaseLost, Unwind
from app.storage.changes import Lease
from app.storage.claims import Claim
from app.storage.database import open_database
from tests.conftest import StartService
from tests.factories import ORG, Client, do_step, new_events, owner_connection, park, undo_at
from tests.fakes import FakeEndpoint, Reply
from tests.faults.gates import Place, hold_sessions, shut_gate
from tests.faults.judgement import assert_undone, do_steps
from tests.probes import claim_due, fetch, spoil

# How long an answer that must not come is waited for: many times what one takes.
SILENCE_SECONDS = 0.3

Verb = Callable[[Client], Coroutine[Any, Any, httpx.Response]]
UNDO = undo_at("http://127.0.0.1:9/undo")
VERBS: dict[str, tuple[EntryKind, int | None, Verb]] = {
    "intercept": (EntryKind.INTENT, 2, lambda agent: agent.intercept("run", step_index=2, compensation=UNDO)),
    "commit": (EntryKind.EXECUTED, 1, lambda agent: agent.commit("run", 1, {"credit_id": "cr_1"})),
    "fail_effect": (EntryKind.FAILED, 1, lambda agent: agent.fail_effect("run", 1)),
    "fail_session": (EntryKind.SESSION_FAILED, None, lambda agent: agent.fail("run")),
}


@pytest.mark.parametrize("verb", VERBS)
async def test_nothing_is_answered_when_the_commit_has_not_ended(verb: str, services: StartService, database_url: str) -> None:
    """A transaction held inside its COMMIT: no answer leaves; once it is through, the answer comes and the change is there."""
    kind, step, ask = VERBS[verb]
    service = await services(has_orchestrator=False)
    assert (await service.agent.intercept("run", step_index=1, compensation=UNDO)).status_code == 201
    async with shut_gate(database_url, "run", kind, step, Place.COMMIT) as gate:
        asking = asyncio.create_task(ask(service.agent))
        await gate.is_reached()
        answered, _ = await asyncio.wait({asking}, timeout=SILENCE_SECONDS)
        assert not answered, "answered before the commit"
        await gate.open()
        answer = await asking
    assert answer.is_success
    assert (await service.auditor.kinds("run"))[-1] == kind


async def test_undos_run_newest_first_when_a_session_fails(services: StartService, endpoint: FakeEndpoint) -> None:
    """Four steps; the endpoint's own log is the witness."""
    service = await services()
    keys = await do_steps(service.agent, endpoint, "run", 4)
    await assert_undone(service.agent, service.auditor, endpoint, "run", keys)
    assert endpoint.max_concurrency == 1


async def test_one_key_and_one_body_are_sent_when_an_undo_is_retried(services: StartService, endpoint: FakeEndpoint) -> None:
    """500, 502, 503, 200: four requests that differ in nothing but the attempt they announce."""
    service = await services()
    endpoint.script("/undo/1", Reply(status=500), Reply(status=502), Reply(status=503), Reply())
    keys = await do_steps(service.agent, endpoint, "run", 1)
    await service.agent.fail("run", wait_s=20)
    assert [request.key for request in endpoint.received] == keys * 4, "one key for all attempts"
    await assert_undone(service.agent, service.auditor, endpoint, "run", keys)
    assert [request.header("Countermand-Attempt") for request in endpoint.received] == ["1", "2", "3", "4"]


async def test_lower_entries_wait_when_an_undo_is_only_accepted(services: StartService, endpoint: FakeEndpoint) -> None:
    """202 is not done: its Location is asked until it is, and only then comes the next undo."""
    service = await services()
    endpoint.script("/undo/2", Reply(status=202, headers={"Location": "/progress"}))
    endpoint.script("/progress", Reply(status=202), Reply(status=200))
    await do_steps(service.agent, endpoint, "run", 2)
    session = (await service.agent.fail("run", wait_s=20)).json()
    assert session["state"] == "compensated"
    assert [request.path for request in endpoint.received] == ["/undo/2", "/progress", "/progress", "/undo/1"], "202 is not done"


async def test_an_answer_is_void_when_a_newer_epoch_owns_the_call(
    services: StartService, database_url: str, endpoint: FakeEndpoint
) -> None:
    """Two workers' attempts of one undo in flight at once: the older one's answer settles nothing and starts nothing."""
    service = await services(has_orchestrator=False)
    older_answer, newer_answer = asyncio.Event(), asyncio.Event()
    endpoint.script("/undo/2", Reply(gate=older_answer), Reply(gate=newer_answer))
    keys = await do_steps(service.agent, endpoint, "run", 2)
    await service.agent.fail("run")
    async with _worker(database_url, "older") as older, _worker(database_url, "newer") as newer, asyncio.TaskGroup() as group:
        late = group.create_task(_loses_its_lease(older, await _claim(older)))
        await endpoint.wait_for_requests(1)
        assert await _claims(newer) == [], "one live sender at a time"
        async with owner_connection(database_url) as connection:
            await connection.execute("UPDATE outgoing_calls SET leased_until = clock_timestamp() WHERE leased_until IS NOT NULL")
        current = group.create_task(_loses_its_lease(newer, await _claim(newer)))
        await endpoint.wait_for_requests(2)
        before = await service.auditor.journal("run")
        older_answer.set()
        assert await late, "an older epoch may not write"
        assert await service.auditor.journal("run") == before
        assert len(endpoint.received) == 2
        newer_answer.set()
        assert not await current
    await assert_undone(service.agent, service.auditor, endpoint, "run", keys)


async def test_the_frozen_bytes_are_sent_when_the_result_comes_after_the_first_attempt(
    services: StartService, endpoint: FakeEndpoint
) -> None:
    """An undo sent as of unknown outcome keeps its bytes and outcome, although the missing result arrives between two attempts."""
    service = await services()
    late = asyncio.Event()
    endpoint.script("/undo/1", Reply(status=503, gate=late), Reply())
    args = {"credit_id": {"$ref": "result#/credit_id"}}
    unknown = {"args": {"find_by": {"$ref": "effect#/forward_key"}}}
    told = await service.agent.intercept("run", step_index=1, compensation=undo_at(endpoint.url("/undo/1"), args=args, unknown=unknown))
    await service.agent.fail("run")
    await endpoint.wait_for_requests(1)
    assert (await service.agent.commit("run", 1, {"credit_id": "cr_1"})).status_code == 409
    late.set()
    first, second = await endpoint.wait_for_requests(2)
    assert [first.body, second.body] == [f'{{"find_by":"{told.json()["forward_key"]}"}}'.encode()] * 2, "frozen at the first send"
    assert first.header("Countermand-Outcome") == second.header("Countermand-Outcome") == "unknown"
    halted = (await service.agent.fail("run", wait_s=20)).json()
    assert (halted["state"], halted["halt_reason"]) == ("halted", "late_effect")


async def test_a_conflict_is_waited_out_when_an_earlier_attempt_may_still_run(services: StartService, endpoint: FakeEndpoint) -> None:
    """409 after a 500 means that the endpoint is still busy with the first attempt; 409 alone is final."""
    service = await services()
    endpoint.script("/busy", Reply(status=500), Reply(status=409), Reply())
    endpoint.script("/refuses", Reply(status=409))
    await do_step(service.agent, "busy", 1, endpoint.url("/busy"))
    await do_step(service.agent, "refuses", 1, endpoint.url("/refuses"))
    busy = (await service.agent.fail("busy", wait_s=20)).json()
    refused = (await service.agent.fail("refuses", wait_s=20)).json()
    assert (busy["state"], len(endpoint.requests("/busy"))) == ("compensated", 3), "409 while it may still run is no refusal"
    assert (refused["state"], refused["halt_reason"]) == ("halted", "compensation_failed")
    assert len(endpoint.requests("/refuses")) == 1


PAYLOAD = '{"amount":"100","to":"alice"}'


def refusal(answer: httpx.Response) -> tuple[int, str | None]:
    """Return status and code; None where it is no refusal."""
    return answer.status_code, answer.json().get("code")


async def test_nothing_is_released_when_other_bytes_are_presented(services: StartService, endpoint: FakeEndpoint) -> None:
    """One digit more: refused, told in the journal, and what the run did before is undone."""
    service = await services()
    keys = await do_steps(service.agent, endpoint, "run", 1)
    await park(service.agent, "run", 2, PAYLOAD)
    (await service.operator.approve("run", 2)).raise_for_status()
    answer = await service.agent.resume("run", 2, PAYLOAD.replace("100", "1000"))
    assert refusal(answer) == (409, "payload_changed"), "only the approved bytes go ahead"
    assert "PAYLOAD_MISMATCH" in await service.auditor.kinds("run")
    await assert_undone(service.agent, service.auditor, endpoint, "run", keys)


DECISIONS: dict[str, tuple[EntryKind, Verb]] = {
    "approve": (EntryKind.APPROVED, lambda operator: operator.approve("run", 1)),
    "reject": (EntryKind.REJECTED, lambda operator: operator.reject("run", 1, then="continue")),
    "resume": (EntryKind.INTENT, lambda operator: operator.resume("run", 1, PAYLOAD)),
}


@pytest.mark.parametrize("verb", DECISIONS)
async def test_nothing_is_said_of_a_decision_when_its_commit_has_not_ended(verb: str, services: StartService, database_url: str) -> None:
    """Neither the person nor the one who resumes is answered, nor is anybody else shown it, while it could still be undone."""
    kind, decide = DECISIONS[verb]
    service = await services(has_orchestrator=False)
    await park(service.agent, "run", 1, PAYLOAD)
    if verb == "resume":
        (await service.operator.approve("run", 1)).raise_for_status()
    before = await service.operator.effect("run", 1)
    async with shut_gate(database_url, "run", kind, 1, Place.COMMIT) as gate:
        deciding = asyncio.create_task(decide(service.operator))
        await gate.is_reached()
        answered, _ = await asyncio.wait({deciding}, timeout=SILENCE_SECONDS)
        assert not answered, "answered before the commit"
        assert await service.operator.effect("run", 1) == before
        await gate.open()
        assert (await deciding).status_code == 200
    assert (await service.auditor.kinds("run"))[-1] == kind


SAY_APPROVED_SQL = """
WITH approval AS (
  UPDATE approvals SET state = 'approved', decided_at = clock_timestamp(), decided_by = 'forger'
)
UPDATE effect_log SET state = 'approved'
"""
# As good a copy as can be had without the chain: the very bytes that were asked about, under the next number.
PUT_BESIDE_SQL = """
INSERT INTO journal (org, session_id, seq, kind, step, actor, at, body, content, prev_hash, hash)
SELECT org, session_id, seq + 1, 'APPROVED', step, 'operator:forger', at, body, content, hash, sha256(hash)
FROM journal
WHERE kind = 'AWAITING_APPROVAL'
"""


async def test_nothing_is_released_when_the_journal_has_no_approval(services: StartService, database_url: str) -> None:
    """Rows that say approved are no approval, and neither is an entry that somebody put beside the chain."""
    service = await services(has_orchestrator=False)
    await park(service.agent, "run", 1, PAYLOAD)
    for forge in (SAY_APPROVED_SQL, PUT_BESIDE_SQL):
        await spoil(database_url, forge)
        assert (await service.operator.effect("run", 1))["state"] == "approved"
        for client in (service.agent, service.operator):
            answer = await client.resume("run", 1, PAYLOAD)
            assert refusal(answer) == (409, "not_approved"), "no APPROVED entry, no release"
        assert (await service.agent.session("run"))["state"] == "awaiting_approval"


async def test_nothing_is_approved_when_it_is_not_pending(services: StartService, database_url: str) -> None:
    """Cancelled, rejected, expired, approved, released: whatever has been said stands, and is told to whoever comes after it."""
    service = await services(has_orchestrator=False, sweep_seconds=3_600)
    acts: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
        "cancelled": lambda: service.agent.fail("cancelled"),
        "rejected": lambda: service.operator.reject("rejected", 1),
        "expired": lambda: fetch(database_url, "UPDATE approvals SET expires_at = clock_timestamp() WHERE session_id = 'expired'"),
        "approved": lambda: service.operator.approve("approved", 1),
    }
    for state, act in acts.items():
        await park(service.agent, state, 1, PAYLOAD)
        await act()
        answer = await service.admin.approve(state, 1)
        assert refusal(answer) == (409, "already_decided"), "only a pending question can be answered"
        assert answer.json()["state"] == state
        assert (await service.auditor.kinds(state)).count("APPROVED") == (state == "approved")
    (await service.agent.resume("approved", 1, PAYLOAD)).raise_for_status()
    assert (await service.admin.approve("approved", 1)).json()["state"] == "released"


async def test_nothing_is_released_when_its_turn_comes_after_the_expiry(services: StartService, database_url: str) -> None:
    """The request began before the moment, and waited for the session's lock until after it."""
    service = await services(has_orchestrator=False, sweep_seconds=3_600)
    await park(service.agent, "run", 1, PAYLOAD)
    (await service.operator.approve("run", 1)).raise_for_status()
    async with asyncio.TaskGroup() as group, hold_sessions(database_url, "run") as hold:
        asking = group.create_task(service.agent.resume("run", 1, PAYLOAD))
        await hold.until_waiting(1)
        await hold.connection.execute("UPDATE approvals SET expires_at = clock_timestamp()")
        await hold.connection.execute("UPDATE sessions SET revision = revision + 1")
    assert refusal(asking.result()) == (409, "approval_expired"), "the moment of the turn counts"
    assert (await service.agent.effect("run", 1))["state"] == "expired"


ORG_TABLES = ("orgs", "keys", "sessions", "effect_log", "approvals", "undo_stack", "outgoing_calls", "journal")


async def test_rows_are_out_of_sight_when_they_are_another_orgs(services: StartService, database_url: str, endpoint: FakeEndpoint) -> None:
    """Row-level security alone, without any predicate of ours: an org sees its own rows in every table, another sees none of them."""
    service = await services()
    keys = await do_steps(service.agent, endpoint, "run", 1)
    await assert_undone(service.agent, service.auditor, endpoint, "run", keys)
    await park(service.agent, "waits", 1, PAYLOAD)
    seen: dict[str, set[str]] = {}
    async with open_database(database_url, size=1, application_name="tests") as database:
        for org in (ORG, "globex"):
            async with database.transaction(OrgName(org)) as tx:
                seen[org] = {table for table in ORG_TABLES if await tx.connection.fetchval(f"SELECT count(*) FROM {table}")}
    assert seen == {ORG: set(ORG_TABLES), "globex": set()}


@asynccontextmanager
async def _worker(database_url: str, name: str) -> AsyncIterator[Unwind]:
    """Make the half of an orchestrator that works on a call it is given."""
    clock = SystemClock()
    async with (
        open_database(database_url, size=2, application_name=name) as database,
        Outbound(EgressPolicy.parse("127.0.0.0/8"), clock=clock) as outbound,
    ):
        yield Unwind(database=database, outbound=outbound, clock=clock, lease=Lease(worker=name, seconds=30.0), events=new_events())


async def _loses_its_lease(worker: Unwind, holding: Holding) -> bool:
    try:
        await worker.run(holding)
    except LeaseLost:
        return True
    return False


async def _claim(worker: Unwind) -> Holding:
    (claim,) = await _claims(worker)
    return Holding(claim=claim, has_room=lambda _: True)


async def _claims(worker: Unwind) -> list[Claim]:
    async with worker.database.dispatch() as connection:
        return await claim_due(connection, worker.lease, 1)
