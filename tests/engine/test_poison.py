"""Rows and calls that crash whoever works on them: their own session is a person's after so many tries, and all others go on."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from app.domain.model import CallId, CallKind, OrgName, SessionId
from app.domain.sending import POISON_AFTER_INTERRUPTED
from app.storage import poison
from app.storage.claims import Claim
from app.storage.database import open_database
from tests.conftest import StartService
from tests.factories import JsonObject, Service, deadlines_of, do_step, park
from tests.fakes import FakeEndpoint
from tests.halts import WIRE, Night
from tests.operators import escalation, order
from tests.probes import PATIENCE_SECONDS, call_of, fetch, make_due, rest, spoil

BAD_DESCRIPTOR_SQL = "UPDATE undo_stack SET compensation = 'rubbish' WHERE session_id = $1 AND stack_position = $2"
# The service itself can write no such trace context; continuing it fails when the request is put together.
BAD_TRACE_SQL = "UPDATE effect_log SET traceparent = 'rubbish' WHERE session_id = $1 AND step_index = $2"
GONE_SQL = "DELETE FROM effect_log WHERE session_id = $1 AND step_index = $2"
HELD_SQL = """
SELECT interrupted, due_at > clock_timestamp(), leased_by FROM outgoing_calls WHERE session_id = $1 AND due_at IS NOT NULL
"""
DUE_SQL = "UPDATE outgoing_calls SET due_at = clock_timestamp() WHERE session_id = $1 AND due_at IS NOT NULL"
OVERDUE_SQL = "UPDATE sessions SET deadline_at = clock_timestamp() WHERE session_id = ANY ($1)"
NEVER = {"sweep_seconds": 3_600}


@pytest.fixture
def night(service: Service, endpoint: FakeEndpoint) -> Night:
    """Return one service and one endpoint on which things go wrong."""
    return Night(service=service, endpoint=endpoint)


async def crashed(database_url: str, name: str, times: int) -> None:
    """Return once the due call of a session has crashed its worker so often, and was put down if that is too often.

    The wait after each crash but the last is over at once.
    """
    async with asyncio.timeout(PATIENCE_SECONDS):
        while rows := await fetch(database_url, HELD_SQL, name):  # every look is a round trip
            (count, is_later, held_by) = rows[0]
            if held_by is not None or not is_later:
                continue
            if count == times and times < POISON_AFTER_INTERRUPTED:
                return
            if count < times:
                await fetch(database_url, DUE_SQL, name)


async def look(night: Night, name: str) -> tuple[JsonObject, JsonObject]:
    """Return a halted session and what its operator is given."""
    session = await night.service.agent.session(name)
    assert (session["state"], session["halt_reason"]) == ("halted", "poison")
    package = await escalation(night.service.operator, name)
    assert package["reason"] == "poison"
    return session, package


async def is_whole(night: Night, name: str) -> bool:
    """Tell whether a session's journal verifies."""
    verified: dict[str, Any] = (await night.service.operator.get(f"/sessions/{name}/journal/verify")).json()
    return bool(verified["valid"])


async def resolve(night: Night, name: str) -> None:
    """Close a session as it stands."""
    (await order(night.service.operator, name, "resolve")).raise_for_status()
    assert (await night.service.agent.session(name))["state"] == "resolved"


async def test_session_is_a_persons_when_a_descriptor_cannot_be_read(night: Night) -> None:
    """What is above it is undone and stays so, nothing is sent for it, and the person sees which one it is and gets past it."""
    database_url = night.service.database_url
    await night.run("s", 3)
    await spoil(database_url, BAD_DESCRIPTOR_SQL, "s", 2)
    await night.failed("s")
    session, package = await look(night, "s")
    assert [entry["state"] for entry in session["undo_stack"]] == ["compensated", "pending", "pending"]
    assert [request.path for request in night.endpoint.received] == ["/s/3"]
    assert session["undo_stack"][1]["description"].startswith("unreadable")
    assert {one["step_index"]: one["sentence"] for one in package["not_undone"]}[2].startswith("not sent: what is kept of its undo cannot")
    assert {(move["name"], move["body"].get("by_hand")) for move in package["moves"]} >= {
        ("skip", True),
        ("unwind", None),
        ("resolve", None),
    }
    assert "retry" not in {move["name"] for move in package["moves"]}, "it would halt again at once"
    undo = session["undo_stack"][1]["undo_id"]
    (await order(night.service.operator, "s", f"undo/{undo}/skip", by_hand=True)).raise_for_status()
    (await order(night.service.operator, "s", "unwind")).raise_for_status()
    assert (await night.failed("s"))["state"] == "compensated"
    assert [request.path for request in night.endpoint.received] == ["/s/3", "/s/1"]
    assert await is_whole(night, "s")


async def test_session_is_a_persons_when_a_call_crashes_its_worker_again_and_again(services: StartService, endpoint: FakeEndpoint) -> None:
    """Each crash is counted and waited for, longer each time; after so many nothing more is tried, and other sessions never wait."""
    service = await services(lease_seconds=3_600)  # whatever happens, happens before a lease runs out
    night = Night(service=service, endpoint=endpoint)
    await night.run("s", 2)
    await spoil(service.database_url, BAD_TRACE_SQL, "s", 2)
    (await service.agent.fail("s")).raise_for_status()
    for times in range(1, POISON_AFTER_INTERRUPTED):
        ((before,),) = await fetch(service.database_url, "SELECT clock_timestamp()")
        await crashed(service.database_url, "s", times)
        call = await call_of(service.database_url, "s", 2)
        assert (call["attempts"], call["interrupted"], call["is_attempt_open"], call["failures"]) == (times, times, False, 0)
        ((after,),) = await fetch(service.database_url, "SELECT clock_timestamp()")
        waits = timedelta(seconds=min(60, 2 ** (times - 1)))
        assert times == 1 or before + waits < call["due_at"] < after + waits, times
        assert (await service.agent.session("s"))["state"] == "compensating"
    await night.run("other", 1)
    assert (await night.failed("other"))["state"] == "compensated"
    await make_due(service.database_url, "s")
    await night.failed("s")
    session, package = await look(night, "s")
    assert [entry["state"] for entry in session["undo_stack"]] == ["failed", "pending"]
    assert [effect["state"] for effect in session["effects"]] == ["committed", "compensation_failed"]
    assert (session["undo_stack"][0]["attempts"], session["undo_stack"][0]["next_attempt_at"]) == (POISON_AFTER_INTERRUPTED, None)
    assert "crashed over it (ValueError)" in session["undo_stack"][0]["last_error"]
    assert (await service.operator.kinds("s"))[-2:] == ["COMPENSATION_FAILED", "HALTED"]
    assert await is_whole(night, "s")
    assert [request.path for request in endpoint.received] == ["/other/1"]
    assert {move["name"] for move in package["moves"]} == {"retry", "skip", "unwind", "resolve"}
    # The defect is mended: the operator has it tried again, under the same key, and the unwind goes on.
    await spoil(service.database_url, "UPDATE effect_log SET traceparent = NULL WHERE session_id = 's'")
    (await order(service.operator, "s", "unwind")).raise_for_status()
    assert (await night.failed("s"))["state"] == "compensated"


async def test_session_is_a_persons_when_the_rows_of_a_call_are_gone(services: StartService, endpoint: FakeEndpoint) -> None:
    """Even where nothing can be read of what a call is about, its session is halted by its own row, and can be looked at and closed."""
    service = await services(has_orchestrator=False)
    night = Night(service=service, endpoint=endpoint)
    await night.run("s", 2)
    (await service.agent.fail("s")).raise_for_status()
    await spoil(service.database_url, GONE_SQL, "s", 2)
    await services(has_api=False)
    await crashed(service.database_url, "s", POISON_AFTER_INTERRUPTED)
    await look(night, "s")
    await resolve(night, "s")
    assert await is_whole(night, "s")


async def test_session_is_a_persons_when_an_action_crashes_its_worker(service: Service, endpoint: FakeEndpoint) -> None:
    """A run in mid-course is halted: what the service was executing is unknown and the pivot, who is asked is not asked any more."""
    night = Night(service=service, endpoint=endpoint)
    definition = {"approval": {"required": True}, "action": {"url": endpoint.url("/wire")}, "reversibility": "irreversible"}
    (await service.admin.register("wire", **definition)).raise_for_status()
    await night.run("s", 1)
    await park(service.agent, "s", 2, WIRE, "wire")
    (await service.operator.approve("s", 2)).raise_for_status()
    await spoil(service.database_url, BAD_TRACE_SQL, "s", 2)
    (await service.agent.resume("s", 2, WIRE)).raise_for_status()
    (await service.admin.register("ask", reversibility="read_only", approval={"required": True})).raise_for_status()
    await park(service.agent, "s", 3, WIRE, "ask")
    await crashed(service.database_url, "s", POISON_AFTER_INTERRUPTED)
    session, package = await look(night, "s")
    assert [effect["state"] for effect in session["effects"]] == ["committed", "unknown", "cancelled"]
    assert [effect["approval"]["state"] for effect in session["effects"][1:]] == ["released", "cancelled"]
    assert (session["pivoted"], session["clean"], session["undo_stack"][0]["state"]) == (True, False, "pending")
    kinds = await service.operator.kinds("s")
    assert kinds[kinds.index("SESSION_FAILED") :] == ["SESSION_FAILED", "PIVOT", "CANCELLED", "HALTED"]
    assert {move["name"] for move in package["moves"]} == {"settle", "retry", "skip", "unwind", "resolve"}
    assert [one["step_index"] for one in package["cannot_be_undone"]] == [2]
    settled = {"outcome": "not_applied"}
    (await order(service.operator, "s", "effects/2/settle", **settled)).raise_for_status()
    (await order(service.operator, "s", "unwind")).raise_for_status()
    assert (await night.failed("s"))["state"] == "compensated"
    assert [request.path for request in endpoint.received] == ["/s/1"]
    assert await is_whole(night, "s")


async def test_crash_is_not_counted_when_somebody_newer_owns_the_call(services: StartService, endpoint: FakeEndpoint) -> None:
    """A worker that lost its lease says nothing about the call any more, crashed or not."""
    service = await services(has_orchestrator=False)
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    (await service.agent.fail("s")).raise_for_status()
    call = await call_of(service.database_url, "s", 1)
    claim = Claim(
        org=OrgName("acme"),
        session_id=SessionId("s"),
        call_id=CallId(call["call_id"]),
        kind=CallKind.UNDO,
        destination=call["destination"],
        epoch=call["epoch"] + 1,
    )
    async with open_database(service.database_url, size=1, application_name="tests") as database, database.transaction(claim.org) as tx:
        assert await poison.count_crash(tx, claim, "it broke") is None
    assert await call_of(service.database_url, "s", 1) == call


async def test_session_is_a_persons_when_it_cannot_be_judged_at_its_deadline(services: StartService, endpoint: FakeEndpoint) -> None:
    """Sweep after sweep crashes over it, until it is halted unread; the sessions beside it are failed at the first."""
    service = await services(**NEVER)
    night = Night(service=service, endpoint=endpoint)
    await night.run("s", 2)
    await night.run("t", 1)
    await night.open_step("s", 3)
    await fetch(service.database_url, "ALTER TYPE effect_state ADD VALUE 'unheard_of'")  # as a newer version might
    await spoil(service.database_url, "UPDATE effect_log SET state = 'unheard_of' WHERE session_id = 's' AND step_index = 2")
    await fetch(service.database_url, OVERDUE_SQL, ["s", "t"])
    sweeper = deadlines_of(service)
    for _ in range(POISON_AFTER_INTERRUPTED):
        await sweeper.sweep()
        assert (await service.agent.session("s"))["state"] == "active"
    assert (await rest(service.agent, "t"))["state"] == "compensated"
    await sweeper.sweep()
    session, package = await look(night, "s")
    assert (session["unreadable_steps"], package["unreadable_steps"]) == ([2], [2])
    assert [effect["state"] for effect in session["effects"]] == ["committed", "unknown"]
    assert (await service.operator.kinds("s"))[-2:] == ["SESSION_FAILED", "HALTED"]
    await resolve(night, "s")
    assert await is_whole(night, "s")


# What is kept as JSON or text and is not, and how it is shown.
SPOILT = {
    "result": ("UPDATE effect_log SET result = '{' WHERE session_id = 's' AND step_index = 1", "{"),
    "payload": ("UPDATE effect_log SET payload = '\\xff' WHERE session_id = 's' AND step_index = 1", "\ufffd"),
    "metadata": ("UPDATE sessions SET metadata = '{' WHERE session_id = 's'", "{"),
}


@pytest.mark.parametrize("member", SPOILT)
async def test_escalation_is_read_when_what_it_shows_was_spoilt(night: Night, member: str) -> None:
    """Whoever is called at night sees the rest, and can close the session."""
    await night.refused("s", 2)
    sql, shown = SPOILT[member]
    await spoil(night.service.database_url, sql)
    package = await escalation(night.service.operator, "s")
    found = package if member == "metadata" else package["steps"][0]
    assert found[member] == shown
    await resolve(night, "s")
