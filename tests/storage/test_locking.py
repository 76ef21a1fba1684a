"""Whoever waited for a session's lock decides on what the other wrote, at a moment after the wait. Must not test the decisions."""

import asyncio
from dataclasses import replace
from datetime import datetime

from app.domain import unwinding
from app.domain.circuits import Place
from app.domain.draft import Draft
from app.domain.intercept import Execute
from app.domain.model import EffectState, SessionId, SessionState, StepIndex
from app.domain.sending import Rest, Send
from app.engine.forward import Forward
from app.storage import calls, changes, claims, sessions
from app.storage.claims import Claim
from app.storage.database import Database
from app.storage.sessions import Wanted
from tests.domain.world import answered, command, new_compensation
from tests.factories import owner_connection
from tests.storage.acts import ACME, BETA, LEASE, RESULT, RUN, STEP, agent_of, begin, claim, do_steps, fail, surroundings, undoing, verbs

PATIENCE_SECONDS = 10.0
OTHER_RUN = SessionId("run-2")
WAITING_SQL = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"

END_LEASES_SQL = "UPDATE outgoing_calls SET leased_until = clock_timestamp() WHERE leased_until IS NOT NULL"


async def until_waiting(database_url: str, count: int = 1) -> None:
    """Return once so many connections wait for a lock; the database is asked again and again, which is what takes the time."""
    async with asyncio.timeout(PATIENCE_SECONDS), owner_connection(database_url) as connection:
        while await connection.fetchval(WAITING_SQL) < count:
            pass


async def moment(database_url: str) -> datetime:
    """Return the database's time."""
    async with owner_connection(database_url) as connection:
        told: datetime = await connection.fetchval("SELECT clock_timestamp()")
        return told


async def test_lock_reads_what_the_other_wrote_when_it_had_to_wait(database: Database, database_url: str) -> None:
    """A statement sees rows as of its start; the lock's winner wrote others since, and those are the ones to decide on."""
    await do_steps(database, RUN, 1)

    async def wait_and_read() -> sessions.Locked | None:
        async with database.transaction(ACME) as tx:
            return await sessions.lock(tx, RUN, Wanted(step=StepIndex(2), request_key="k-2", open=True, top=True))

    async with asyncio.TaskGroup() as group, database.transaction(ACME) as tx:
        locked = await sessions.lock(tx, RUN, Wanted())
        assert locked is not None
        waiting = group.create_task(wait_and_read())
        await until_waiting(database_url)
        draft = Draft(locked.session, surroundings(locked.now))
        draft.move_session(SessionState.FAILED, failed_at=locked.now)
        await changes.write(tx, [draft.changes()])
        before_commit = await moment(database_url)
    found = waiting.result()
    assert found is not None
    assert found.session.state is SessionState.FAILED
    assert found.session.revision == locked.session.revision + 1
    assert found.now > before_commit
    assert [each.effect.step_index for each in found.effects] == [1]


async def test_verb_sees_new_effects_when_it_waited_for_them(database: Database, database_url: str) -> None:
    """Twins of one intercept: the second waits for the first, and finds its effect, undo entry included."""
    await do_steps(database, RUN, 1)
    asked = command(step_index=StepIndex(2), request_key="k-2")
    async with asyncio.TaskGroup() as group, database.transaction(ACME) as tx:
        await sessions.lock(tx, RUN, Wanted())
        twins = [group.create_task(verbs(database).intercept(agent_of(ACME), RUN, asked)) for _ in range(2)]
        await until_waiting(database_url, 2)
    first, second = (twin.result() for twin in twins)
    assert isinstance(first, Execute)
    assert isinstance(second, Execute)
    assert {first.is_new, second.is_new} == {True, False}
    assert replace(first, is_new=False) == replace(second, is_new=False)


async def test_intercepts_get_different_steps_when_they_open_a_session_together(database: Database, database_url: str) -> None:
    """Nobody has the session's row before it is there; all wait for the opener, and each gets a place of its own."""
    forward: Forward = verbs(database)
    asked = [command(step_index=None, request_key=f"k-{number}") for number in range(8)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(forward.intercept(agent_of(ACME), RUN, each)) for each in asked]
    steps = sorted(task.result().effect.step_index for task in tasks)  # type: ignore[union-attr]  # all may go ahead
    assert steps == list(range(1, 9))
    async with owner_connection(database_url) as connection:
        assert await connection.fetchval("SELECT array_agg(seq ORDER BY seq) FROM journal") == list(range(1, 10))


async def test_lock_call_reads_what_a_late_commit_wrote_when_it_had_to_wait(database: Database, database_url: str) -> None:
    """A worker that waited for a late commit freezes bytes with the result in them."""
    undo = new_compensation(b'{"id":{"$ref":"result#/credit_id"}}')
    await verbs(database).intercept(agent_of(ACME), RUN, command(compensation=undo))
    await fail(database)
    (claimed,) = await claim(database)
    async with asyncio.TaskGroup() as group, database.transaction(ACME) as tx:
        locked = await sessions.lock(tx, RUN, Wanted(step=STEP))
        assert locked is not None
        waiting = group.create_task(begin(database, claimed))
        await until_waiting(database_url)
        draft = Draft(locked.session, surroundings(locked.now))
        (seen,) = locked.effects
        draft.move_effect(seen.effect, EffectState.COMMITTED, outcome="committed", result=RESULT, executed_at=draft.now)
        await changes.write(tx, [draft.changes()])
    move = waiting.result()
    assert isinstance(move, Send)
    assert move.call.body == b'{"id":"c-1"}'


async def test_lock_call_finds_the_entry_below_when_the_stack_goes_down(database: Database) -> None:
    """Newest first, one at a time: each call comes with its own entry and the next one below."""
    await do_steps(database, RUN, 3)
    await fail(database)
    (claimed,) = await claim(database)
    move = await begin(database, claimed)
    seen = []
    while not isinstance(move, Rest):
        claimed = replace(claimed, call_id=move.call.call_id, epoch=move.call.epoch)
        async with database.transaction(ACME) as tx:
            locked = await calls.lock_call(tx, claimed)
            draft, work = Draft(locked.session, surroundings(locked.now)), undoing(locked)
            move = unwinding.record(draft, work, answered(200), 0.5)
            await changes.write(tx, [draft.changes()], lease=LEASE)
        seen.append((work.item.entry.stack_position, work.item.effect.step_index, work.below and work.below.entry.stack_position))
    assert seen == [(3, 3, 2), (2, 2, 1), (1, 1, None)]


async def test_claim_gives_a_call_to_one_worker_when_several_ask(database: Database, database_url: str) -> None:
    """No call is leased twice, nobody waits for another's lock, and a lease that ran out is taken over with a newer epoch."""
    ids = [f"run-{number}" for number in range(6)]
    for session_id in ids:
        await do_steps(database, session_id, 1)  # type: ignore[arg-type]  # text is as good as its NewType
        await fail(database, session_id)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(claim(database, replace(LEASE, worker=f"worker-{number}"), 4)) for number in range(3)]
    claimed = [each for task in tasks for each in task.result()]
    assert sorted(each.session_id for each in claimed) == sorted({each.session_id for each in claimed})
    claimed += await claim(database)
    assert sorted(each.session_id for each in claimed) == ids
    assert {each.epoch for each in claimed} == {1}
    assert await claim(database) == []
    async with owner_connection(database_url) as connection:
        await connection.execute("UPDATE outgoing_calls SET leased_until = clock_timestamp() WHERE session_id = 'run-0'")
    (taken_over,) = await claim(database)
    assert (taken_over.session_id, taken_over.epoch) == ("run-0", 2)


async def test_claim_leaves_calls_alone_when_they_are_not_due_or_not_wanted(database: Database, database_url: str) -> None:
    """A due time in the future holds no slot, and what is allotted to one destination is not taken from another."""
    await do_steps(database, RUN, 1)
    await fail(database)
    async with database.dispatch() as connection:
        assert await claims.claim(connection, LEASE, {Place(org=ACME, destination="other.example:443"): 10}) == []
        assert await claims.claim(connection, LEASE, {Place(org=BETA, destination="ledger.example:443"): 10}) == []
    async with owner_connection(database_url) as connection:
        await connection.execute("UPDATE outgoing_calls SET due_at = clock_timestamp() + interval '1 h'")
    assert await claim(database) == []
    async with owner_connection(database_url) as connection:
        await connection.execute("UPDATE outgoing_calls SET due_at = clock_timestamp()")
    assert len(await claim(database)) == 1


async def test_leases_are_renewed_and_released_when_they_are_ones_own(database: Database, database_url: str) -> None:
    """A newer epoch owns the call: an older claim neither prolongs nor gives it back."""
    await do_steps(database, RUN, 1)
    await fail(database)
    (claimed,) = await claim(database, replace(LEASE, seconds=5))
    stale = replace(claimed, epoch=claimed.epoch - 1)
    async with database.dispatch() as connection:
        assert await claims.renew(connection, [stale], 60) == set()
        assert await claims.renew(connection, [claimed, stale], 60) == {claimed}
        await claims.release(connection, [stale])
    async with owner_connection(database_url) as connection:
        assert await connection.fetchval("SELECT leased_until > clock_timestamp() + interval '50 s' FROM outgoing_calls")
    async with database.dispatch() as connection:
        await claims.release(connection, [claimed])
    assert [each.epoch for each in await claim(database)] == [2]


async def go_on(database: Database, claimed: Claim) -> Claim:
    """Begin a claimed call and record that it was undone; return the claim on the session's next one, under the same lease."""
    await begin(database, claimed)
    async with database.transaction(ACME) as tx:
        locked = await calls.lock_call(tx, claimed)
        draft = Draft(locked.session, surroundings(locked.now))
        move = unwinding.record(draft, undoing(locked), answered(200), 0.5)
        await changes.write(tx, [draft.changes()], lease=LEASE)
    assert isinstance(move, Send)
    return replace(claimed, call_id=move.call.call_id, epoch=move.call.epoch)


async def give_back(database: Database, claimed: Claim, worker: str = LEASE.worker) -> None:
    """Give back what a worker that lost track may hold."""
    async with database.transaction(claimed.org) as tx:
        await claims.give_back(tx, claimed, worker)


async def test_claim_is_given_back_when_its_worker_lost_track(database: Database) -> None:
    """What is given back is claimed anew before the lease runs out; other sessions of the same worker keep theirs."""
    for session_id in (RUN, OTHER_RUN):
        await do_steps(database, session_id, 1)
        await fail(database, session_id)
    mine = {each.session_id: each for each in await claim(database)}
    await begin(database, mine[RUN])
    await give_back(database, mine[RUN])
    assert [(each.session_id, each.epoch) for each in await claim(database)] == [(RUN, 2)]


async def test_next_call_is_given_back_when_the_write_that_left_it_was_lost(database: Database) -> None:
    """The worker knows its old claim only; the call that its last write left under the same lease has epoch 0."""
    await do_steps(database, RUN, 2)
    await fail(database)
    (known,) = await claim(database)
    following = await go_on(database, known)
    assert following.epoch == 0
    assert await claim(database) == []
    await give_back(database, known)
    assert await claim(database) == [replace(following, epoch=1)]


async def test_nothing_is_given_back_when_it_is_another_workers(database: Database) -> None:
    """Neither the call that another one holds, nor the next one that another one's write left under its lease."""
    await do_steps(database, RUN, 2)
    await fail(database)
    (known,) = await claim(database)
    await give_back(database, known, "worker-2")
    assert await claim(database) == []
    following = await go_on(database, known)
    for claimed in (known, following):
        await give_back(database, claimed, "worker-2")
    assert await claim(database) == []


async def test_nothing_is_given_back_when_it_was_claimed_anew(database: Database, database_url: str) -> None:
    """The same worker may have claimed the call again, or the next one: that work is under way."""
    await do_steps(database, RUN, 2)
    await fail(database)
    (first,) = await claim(database)
    async with owner_connection(database_url) as connection:
        await connection.execute(END_LEASES_SQL)
    (again,) = await claim(database)
    assert again == replace(first, epoch=2)
    await give_back(database, first)
    assert await claim(database) == []

    await go_on(database, again)
    async with owner_connection(database_url) as connection:
        await connection.execute(END_LEASES_SQL)
    (following,) = await claim(database)
    assert following.epoch == 1
    await give_back(database, again)
    assert await claim(database) == []


async def test_nothing_is_given_back_when_another_task_of_the_worker_has_moved_on(database: Database, database_url: str) -> None:
    """A task that lost its call to another of the same worker takes nothing from that one: the next call is being sent."""
    await do_steps(database, RUN, 2)
    await fail(database)
    (lost,) = await claim(database)
    async with owner_connection(database_url) as connection:
        await connection.execute(END_LEASES_SQL)
    (again,) = await claim(database)
    assert (await go_on(database, again)).epoch == 0
    await give_back(database, lost)
    assert await claim(database) == []


async def test_nothing_is_given_back_when_another_task_of_the_worker_is_further_down(database: Database, database_url: str) -> None:
    """What a lost write left was claimed anew, and done: the call after it is not of that write."""
    await do_steps(database, RUN, 3)
    await fail(database)
    (known,) = await claim(database)
    await go_on(database, known)
    async with owner_connection(database_url) as connection:
        await connection.execute(END_LEASES_SQL)
    (following,) = await claim(database)
    assert (await go_on(database, following)).epoch == 0
    await give_back(database, known)
    assert await claim(database) == []
