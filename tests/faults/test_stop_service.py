"""Stop the service while an undo is in flight, politely or by a pause that outlasts its lease: another goes on.

Must not wait for a lease where none has to run out.
"""

import asyncio
from time import monotonic

import pytest

from tests.factories import owner_connection
from tests.fakes import FakeEndpoint, Reply
from tests.faults.conftest import StartProcess
from tests.faults.gates import hold_sessions
from tests.faults.judgement import assert_undone, do_steps, requests_of
from tests.faults.processes import UNHURRIED_MS, ServiceProcess
from tests.probes import fetch

LONG_LEASE_SECONDS = 60.0  # whoever goes on within the test did not wait for it to run out
END_GRACE_SECONDS = 10.0


async def _at_work(database_url: str, replicas: list[ServiceProcess]) -> tuple[ServiceProcess, ServiceProcess]:
    """Return the replica that holds the call in flight, and the other one."""
    async with owner_connection(database_url) as connection:
        worker = await connection.fetchval("SELECT leased_by FROM outgoing_calls WHERE is_attempt_open")
    first, second = replicas
    return (first, second) if f":{first.pid}:" in worker else (second, first)


@pytest.mark.parametrize("does_end", [True, False])
async def test_another_replica_goes_on_at_once_when_one_is_told_to_stop(
    processes: StartProcess, database_url: str, *, does_end: bool
) -> None:
    """SIGTERM in mid-unwind: an attempt that ends in time is recorded, one that does not is handed back; the exit code is 0."""
    settings = {"lease_seconds": LONG_LEASE_SECONDS, "grace_seconds": END_GRACE_SECONDS if does_end else 1.0}
    replicas = list(await asyncio.gather(processes(**settings), processes(**settings)))
    held = asyncio.Event()
    async with FakeEndpoint({"/undo/3": [Reply(gate=held), Reply()]}) as endpoint:
        keys = await do_steps(replicas[0].agent, endpoint, "run", 3)
        await replicas[0].agent.fail("run")
        await endpoint.wait_for_requests(1)
        stopping, other = await _at_work(database_url, replicas)
        stopping.terminate()
        if does_end:
            held.set()
        assert await stopping.exit_code() == 0
        stopped_at = monotonic()
        await assert_undone(other.agent, other.auditor, endpoint, "run", keys)
        assert monotonic() - stopped_at < LONG_LEASE_SECONDS / 2
        held.set()
        requests = requests_of(endpoint, keys)
    assert len(requests) == (3 if does_end else 4)
    assert stopping.crashes + other.crashes == []


async def _freeze(database_url: str, replica: ServiceProcess) -> None:
    """Stop a replica where it holds no lock: between two transactions, of which it has one whenever it renews its leases."""
    sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE $1 AND state <> 'idle'"
    async with asyncio.timeout(10):
        while True:
            replica.freeze()
            if not (await fetch(database_url, sql, f"%:{replica.pid}:%"))[0]["count"]:
                return
            replica.thaw()


async def test_a_stalled_replica_changes_nothing_when_another_has_taken_over(processes: StartProcess, database_url: str) -> None:
    """SIGSTOP past the lease with an undo in flight: the other sends the same bytes, and what the first learns afterwards is void."""
    settings = {"attempt_timeout_ms": UNHURRIED_MS}
    replicas = list(await asyncio.gather(processes(**settings), processes(**settings)))
    first_answer, second_answer = asyncio.Event(), asyncio.Event()
    async with FakeEndpoint({"/undo/2": [Reply(gate=first_answer), Reply(gate=second_answer)]}) as endpoint:
        keys = await do_steps(replicas[0].agent, endpoint, "run", 2)
        await replicas[0].agent.fail("run")
        await endpoint.wait_for_requests(1)
        stalled, other = await _at_work(database_url, replicas)
        await _freeze(database_url, stalled)
        await endpoint.wait_for_requests(2)
        first_answer.set()
        await endpoint.wait_for_answers(1)
        stalled.thaw()
        stalled.terminate()  # it ends only when it has dealt with the answer
        assert await stalled.exit_code() == 0
        session = await other.operator.session("run")
        assert len(endpoint.received) == 2, "the stalled replica went on with the next undo"
        assert [entry["state"] for entry in session["undo_stack"]] == ["running", "pending"]
        second_answer.set()
        await assert_undone(other.agent, other.auditor, endpoint, "run", keys)
        first, second, third = requests_of(endpoint, keys)
    assert (first.key, first.body, first.header("Countermand-Attempt")) == (second.key, second.body, "1")
    assert (second.header("Countermand-Attempt"), third.key) == ("2", keys[1])
    assert stalled.crashes + other.crashes == []


async def test_caller_is_asked_to_come_back_when_its_request_outlasts_the_grace(processes: StartProcess, database_url: str) -> None:
    """A verb that waits for a lock when the service has to end: 503 with Retry-After, not 500; nothing was done, asking again does it."""
    stopping, other = await asyncio.gather(processes(grace_seconds=1.0), processes())
    async with FakeEndpoint() as endpoint:
        keys = await do_steps(other.agent, endpoint, "run", 1)
        async with hold_sessions(database_url, "run") as hold:
            asking = asyncio.create_task(stopping.agent.fail("run"))
            await hold.until_waiting(1)
            stopping.terminate()
            answer = await asking
            assert await stopping.exit_code() == 0
        assert (answer.status_code, answer.headers["Content-Type"]) == (503, "application/problem+json"), answer.text
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.json()["code"] == "stopping"
        assert (await other.agent.session("run"))["state"] == "active"
        await assert_undone(other.agent, other.auditor, endpoint, "run", keys)
    assert stopping.crashes + other.crashes == []
