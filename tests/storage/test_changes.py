"""Writes are guarded by what their decision saw, several sessions go in one, and what was not written is not there."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from app.domain import approval, unwinding
from app.domain.approval import Approve
from app.domain.draft import Changes, Draft
from app.domain.model import Approval, ApprovalState, EffectId, EffectState, Reversibility, SessionId, SessionState, UndoId
from app.domain.outcomes import Reported
from app.domain.sending import Send, Wait
from app.engine.verbs import Ask
from app.storage import calls, changes, sessions, views
from app.storage.changes import Lease
from app.storage.database import DUE_CHANNEL, MOVED_CHANNEL, Database, Transaction, WriteConflict, listen
from app.storage.sessions import Wanted
from tests.domain.world import answered, command
from tests.factories import owner_connection
from tests.storage.acts import ACME, LEASE, RUN, STEP, agent_of, begin, claim, do_steps, fail, surroundings, undoing, verbs

OTHER = SessionId("run-2")
TABLES = ("sessions", "effect_log", "approvals", "undo_stack", "outgoing_calls", "journal")


class AbandonedError(Exception):
    """What a test raises to leave a transaction."""


async def all_rows(url: str) -> dict[str, list[str]]:
    """Return every row of every table."""
    async with owner_connection(url) as connection:
        return {table: sorted(map(repr, await connection.fetch(f"SELECT * FROM {table}"))) for table in TABLES}


async def draft_of(tx: Transaction, session_id: SessionId = RUN) -> tuple[Draft, sessions.Locked]:
    """Lock a session and begin a decision about it."""
    locked = await sessions.lock(tx, session_id, Wanted(open=True, top=True))
    assert locked is not None
    return Draft(locked.session, surroundings(locked.now)), locked


def stale(changed: Changes) -> dict[str, Changes]:
    """Return the same write with each of its guards spoilt, one at a time."""
    effect, entry, call = changed.effects[0], changed.undo_entries[0], changed.calls[0]
    assert effect.before is not None
    assert entry.before is not None
    assert call.before is not None
    return {
        "session revision": replace(changed, before=replace(changed.before, revision=changed.before.revision - 1)),
        "effect version": replace(changed, effects=(replace(effect, before=replace(effect.before, version=9)),)),
        "effect id": replace(changed, effects=(replace(effect, after=replace(effect.after, effect_id=EffectId(uuid4()))),)),
        "entry id": replace(changed, undo_entries=(replace(entry, after=replace(entry.after, undo_id=UndoId(uuid4()))),)),
        "epoch": replace(changed, calls=(replace(call, before=replace(call.before, epoch=call.before.epoch - 1)),)),
    }


async def test_write_refuses_and_writes_nothing_when_a_guard_does_not_hold(database: Database, database_url: str) -> None:
    """Revision, version, id and epoch: each by itself is enough to stop the whole decision."""
    await do_steps(database, RUN, 1)
    await fail(database)
    (claimed,) = await claim(database)
    before = await all_rows(database_url)
    async with database.transaction(ACME) as tx:
        locked = await calls.lock_call(tx, claimed)
        draft = Draft(locked.session, surroundings(locked.now))
        unwinding.begin(draft, undoing(locked))
    changed = draft.changes()
    for guard, wrong in stale(changed).items():
        with pytest.raises(WriteConflict):
            async with database.transaction(ACME) as tx:
                await changes.write(tx, [wrong], lease=LEASE)
        assert await all_rows(database_url) == before, f"something was written past the guard of {guard}"
    async with database.transaction(ACME) as tx:
        await changes.write(tx, [changed], lease=LEASE)
    assert await all_rows(database_url) != before


async def test_write_takes_a_decision_once_when_it_is_written_twice(database: Database) -> None:
    """Two decisions on the same reading cannot both stand, whoever wrote first."""
    await do_steps(database, RUN, 1)
    async with database.transaction(ACME) as tx:
        draft, _ = await draft_of(tx)
    draft.change_session(clean=False)
    async with database.transaction(ACME) as tx:
        await changes.write(tx, [draft.changes()])
    with pytest.raises(WriteConflict):
        async with database.transaction(ACME) as tx:
            await changes.write(tx, [draft.changes()])


async def park(database: Database) -> None:
    """Put a question to a person about step 1."""
    asked = command(reversibility=Reversibility.IRREVERSIBLE, compensation=None)
    await verbs(database).intercept(agent_of(ACME), RUN, asked)


async def decide(tx: Transaction) -> tuple[Changes, Approval]:
    """Lock the parked call and approve it."""
    draft, locked = await draft_of(tx)
    (found,) = locked.effects
    seen_by = Reported(effect=found.effect, undo_entry=None, approval=found.approval)
    approved = approval.approve(draft, seen_by, [seen_by], Approve(by="boss-1", reason="looks right", claimed_approver="the boss"))
    assert isinstance(approved, Reported)
    assert approved.approval is not None
    return draft.changes(), approved.approval


async def test_decision_is_not_written_when_the_question_is_another_than_it_saw(database: Database, database_url: str) -> None:
    """An answer to another question, or to one that has ended, changes nothing; where it fits, what is kept is what was decided."""
    await park(database)
    async with database.transaction(ACME) as tx:
        changed, decided = await decide(tx)
    before = await all_rows(database_url)
    (change,) = changed.approvals
    assert change.before is not None
    other = replace(change.after, requested_at=change.after.requested_at - timedelta(seconds=1))
    wrong = replace(changed, approvals=(replace(change, after=other),))
    with pytest.raises(WriteConflict):
        async with database.transaction(ACME) as tx:
            await changes.write(tx, [wrong])
    assert await all_rows(database_url) == before
    async with database.transaction(ACME) as tx:
        await changes.write(tx, [changed])
    async with database.transaction(ACME) as tx:
        _, locked = await draft_of(tx)
    assert [found.approval for found in locked.effects] == [decided]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (ApprovalState.REJECTED, {"is_continued": True, "reason": "no"}),
        (ApprovalState.CANCELLED, {}),
        (ApprovalState.RELEASED, {"released_to": "boss-2", "release_key": "k-9"}),
    ],
)
async def test_answer_comes_back_as_it_was_given_when_it_is_read(database: Database, state: ApprovalState, said: dict[str, Any]) -> None:
    """Every column of a decision and of a release is kept, and read where decisions are made and where they are shown."""
    await park(database)
    async with database.transaction(ACME) as tx:
        draft, locked = await draft_of(tx)
        (found,) = locked.effects
        assert found.approval is not None
        times = {"decided_at": draft.now, "released_at": draft.now if "released_to" in said else None}
        given = draft.change_approval(found.approval, state, decided_by="boss-1", claimed_approver="the boss", **times, **said)
        await changes.write(tx, [draft.changes()])
    async with database.transaction(ACME) as tx:
        _, locked = await draft_of(tx)
        shown = await views.step_view(tx, agent_of(ACME), RUN, STEP)
    assert [found.approval for found in locked.effects] == [given]
    assert shown.approval == given


async def test_rows_come_back_as_they_were_decided_when_they_are_read(database: Database) -> None:
    """What storage keeps and what the domain decided are the same values."""
    (done,) = await do_steps(database, RUN, 1, description="reverse it", independent=True)
    async with database.transaction(ACME) as tx:
        locked = await sessions.lock(tx, RUN, Wanted(step=STEP))
    assert locked is not None
    (found,) = locked.effects
    assert done.undo_entry == found.undo_entry
    assert replace(found.effect, state=done.effect.state, outcome=None, result=None, executed_at=None, version=1) == done.effect
    assert found.effect.state is EffectState.COMMITTED


# Who writes, and whether the call stays due -> whose lease it has afterwards.
LEASES: list[tuple[Lease | None, bool, str | None]] = [
    (LEASE, True, "worker-1"),
    (LEASE, False, None),
    (None, True, "worker-1"),
    (None, False, None),
    (Lease(worker="worker-2", seconds=5), True, "worker-2"),
]


@pytest.mark.parametrize(("lease", "is_due", "owner"), LEASES)
async def test_write_keeps_takes_or_drops_the_lease_when_a_call_changes(
    database: Database,
    database_url: str,
    lease: Lease | None,
    is_due: bool,
    owner: str | None,
) -> None:
    """A call that is due belongs to who is at it; one that is settled to nobody."""
    await do_steps(database, RUN, 1)
    await fail(database)
    (claimed,) = await claim(database)
    async with database.transaction(ACME) as tx:
        locked = await calls.lock_call(tx, claimed)
        draft = Draft(locked.session, surroundings(locked.now))
        draft.change_call(locked.work.call, due_at=locked.now if is_due else None)
        await changes.write(tx, [draft.changes()], lease=lease)
    async with owner_connection(database_url) as connection:
        row = await connection.fetchrow("SELECT leased_by, leased_until > clock_timestamp() AS lives, epoch FROM outgoing_calls")
    assert row is not None
    assert (row["leased_by"], row["lives"], row["epoch"]) == (owner, True if owner else None, 1)


async def test_a_call_survives_when_its_polls_are_cut_off_again_and_again(database: Database) -> None:
    """One attempt, answered 202, and workers that die while asking: each interruption is counted, and none breaks a rule."""
    await do_steps(database, RUN, 1)
    await fail(database)
    (claimed,) = await claim(database)
    assert isinstance(await begin(database, claimed), Send)
    async with database.transaction(ACME) as tx:
        locked = await calls.lock_call(tx, claimed)
        draft = Draft(locked.session, surroundings(locked.now))
        move = unwinding.record(draft, undoing(locked), answered(202, location="/jobs/7"), 0.5)
        await changes.write(tx, [draft.changes()], lease=LEASE)
    assert isinstance(move, Wait)
    for polls in range(1, 5):
        move = await begin(database, claimed)
        assert isinstance(move, Send)
        assert (move.call.attempts, move.call.polls, move.call.interrupted) == (1, polls, polls - 1)


async def write_and_abandon(database: Database) -> None:
    """Write that a session has failed, and roll it back."""
    async with database.transaction(ACME) as tx:
        draft, _ = await draft_of(tx)
        draft.move_session(SessionState.FAILED)
        await changes.write(tx, [draft.changes()])
        raise AbandonedError


async def test_write_tells_who_waits_and_wakes_the_orchestrator_when_it_commits(database: Database, database_url: str) -> None:
    """A session at rest is named on one channel; a call that nobody works on rings the other; before the commit there is silence."""
    heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    callbacks = {channel: partial(_hear, heard, channel) for channel in (MOVED_CHANNEL, DUE_CHANNEL)}
    async with listen(database_url, callbacks):
        await do_steps(database, RUN, 1)
        with pytest.raises(AbandonedError):
            await write_and_abandon(database)
        await fail(database)
        await do_steps(database, OTHER, 1)
        await verbs(database).complete(Ask(principal=agent_of(ACME), session_id=OTHER), lambda _: b"")
        async with asyncio.timeout(10):
            told = {await heard.get(), await heard.get()}
    assert told == {(MOVED_CHANNEL, f"acme/{OTHER}"), (DUE_CHANNEL, "")}
    assert heard.empty()


def _hear(heard: asyncio.Queue[tuple[str, str]], channel: str, payload: str) -> None:
    heard.put_nowait((channel, payload))


async def test_verbs_share_one_writer_when_an_intercept_is_refused(database: Database, database_url: str) -> None:
    """A refusal without evidence stores nothing, not even the session that it would have opened."""
    before = await all_rows(database_url)
    asked = command(compensation=None)
    with pytest.raises(Exception, match="needs a compensation"):
        await verbs(database).intercept(agent_of(ACME), SessionId("never"), asked)
    assert await all_rows(database_url) == before
