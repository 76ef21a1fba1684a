"""What comes after an undo is read with it, whatever has failed in between. Must not test what a worker makes of it."""

from dataclasses import replace

import pytest

from app.domain import unwinding
from app.domain.draft import Draft
from app.domain.egress import EgressPolicy
from app.domain.model import Principal, Role, StepIndex, UndoId
from app.domain.operations import Retry
from app.domain.sending import Move, Yield
from app.engine.operations import Operations
from app.engine.verbs import Ask, Verbs
from app.storage import calls, changes
from app.storage.claims import Claim
from app.storage.database import Database
from tests.domain.world import answered, command, new_compensation
from tests.factories import new_events
from tests.storage.acts import ACME, RESULT, RUN, agent_of, begin, claim, fail, surroundings, undoing, verbs

OPERATOR = Principal(org=ACME, role=Role.OPERATOR, subject="ada", key_id="0123456789ab")


async def do_step(database: Database, step: int, *, independent: bool) -> UndoId:
    """Do one undoable step, and return the undo's id."""
    asked = command(step_index=StepIndex(step), compensation=new_compensation(independent=independent))
    decision = await verbs(database).intercept(agent_of(ACME), RUN, asked)
    await verbs(database).commit(Ask(principal=agent_of(ACME), session_id=RUN), StepIndex(step), RESULT, lambda _: b"")
    undo_id: UndoId = decision.undo_entry.undo_id  # type: ignore[union-attr]  # it goes ahead
    return undo_id


async def refuse(database: Database, claimed: Claim) -> Move:
    """Let the endpoint refuse a claimed undo for good; the next one is due then, if there is one, for whoever claims it."""
    await begin(database, claimed)
    async with database.transaction(ACME) as tx:
        locked = await calls.lock_call(tx, claimed)
        draft = Draft(locked.session, surroundings(locked.now))
        move = unwinding.record(draft, replace(undoing(locked), may_go_on=False), answered(400), 0.5)
        await changes.write(tx, [draft.changes()])
    return move


def operations(database: Database) -> Operations:
    """Return the operator's verbs."""
    return Operations(verbs=Verbs(database=database, events=new_events()), egress=EgressPolicy())


def ask() -> Ask:
    """Ask as the operator."""
    return Ask(principal=OPERATOR, session_id=RUN)


@pytest.mark.parametrize("is_independent", [False, True])
async def test_undo_below_is_held_up_when_one_between_has_failed(database: Database, is_independent: bool) -> None:
    """The retried undo of step 3 comes with step 1 as its next only where the failed one of step 2 was declared independent."""
    await do_step(database, 1, independent=False)
    await do_step(database, 2, independent=is_independent)
    newest = await do_step(database, 3, independent=True)
    await fail(database)
    (claimed,) = await claim(database)
    below = await refuse(database, claimed)
    assert isinstance(below, Yield)
    move = await refuse(database, replace(claimed, call_id=below.call.call_id, epoch=below.call.epoch))
    if isinstance(move, Yield):  # the unwind would go on to step 1: an operator stops it there
        await operations(database).halt(ask(), "wait", lambda _: b"")
    await operations(database).retry(ask(), newest, Retry(reason="mended"), lambda _: b"")
    (claimed,) = await claim(database)
    async with database.transaction(ACME) as tx:
        work = undoing(await calls.lock_call(tx, claimed))
    assert work.item.entry.stack_position == 3
    position = None if work.below is None else work.below.entry.stack_position
    assert (position, work.has_failed_entries) == ((1, False) if is_independent else (None, True))
