"""A draft keeps account: versions, times, ids, what was before. Must not test decisions."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import journal
from app.domain.draft import Draft, Surroundings
from app.domain.journal import GENESIS
from app.domain.model import (
    ApprovalState,
    EffectState,
    EntryKind,
    HaltReason,
    JournalHead,
    SessionState,
    StepIndex,
    UndoState,
)
from app.domain.states import IllegalMoveError
from tests.domain.world import (
    ACTOR,
    START,
    kinds_of,
    new_action_call,
    new_approval,
    new_call,
    new_draft,
    new_effect,
    new_entry,
    new_session,
)

STEP = StepIndex(1)


def test_draft_is_empty_when_nothing_was_done_or_only_looked_at() -> None:
    """An empty draft is what a repeat leaves, and is not written."""
    draft = new_draft(new_session())
    assert draft.is_empty
    assert draft.changes().entries == ()
    assert draft.is_empty


@pytest.mark.parametrize(
    "touch",
    [
        lambda draft: draft.move_session(SessionState.FAILED),
        lambda draft: draft.change_session(clean=False),
        lambda draft: draft.add_effect(new_effect()),
        lambda draft: draft.move_effect(new_effect(), EffectState.COMMITTED),
        lambda draft: draft.change_effect(new_effect(), attempt=2),
        lambda draft: draft.add_undo_entry(new_entry()),
        lambda draft: draft.move_undo_entry(new_entry(), UndoState.SKIPPED),
        lambda draft: draft.add_call(new_call()),
        lambda draft: draft.change_call(new_call(), due_at=None),
        lambda draft: draft.ask_approval(new_approval()),
        lambda draft: draft.change_approval(new_approval(), ApprovalState.EXPIRED),
        lambda draft: draft.record(EntryKind.LATE_FAIL),
        lambda draft: draft.open(),
    ],
)
def test_draft_is_not_empty_when_anything_was_touched(touch: Any) -> None:
    """Whatever a decision does is something to write."""
    draft = new_draft(new_session())
    touch(draft)
    assert not draft.is_empty


def test_changes_keep_the_first_before_when_a_row_moves_twice() -> None:
    """The guard names what was read, the write what came of it; versions count decisions, not moves."""
    draft = new_draft(new_session())
    seen = new_effect(version=4)
    draft.move_effect(draft.move_effect(seen, EffectState.UNKNOWN), EffectState.COMPENSATING)
    added = new_effect(EffectState.EXECUTING, 2)
    draft.add_effect(added)
    draft.move_effect(added, EffectState.FAILED)
    first, second = draft.changes().effects
    assert (first.before, first.after.state, first.after.version) == (seen, EffectState.COMPENSATING, 5)
    assert (second.before, second.after.state, second.after.version) == (None, EffectState.FAILED, 1)


def test_draft_refuses_when_a_move_is_not_in_the_tables() -> None:
    """Moves go through the tables, whoever asks; a refused one leaves no trace."""
    draft = new_draft(new_session())
    with pytest.raises(IllegalMoveError):
        draft.move_session(SessionState.COMPENSATED)
    with pytest.raises(IllegalMoveError):
        draft.move_effect(new_effect(EffectState.COMPENSATED), EffectState.COMMITTED)
    with pytest.raises(IllegalMoveError):
        draft.move_undo_entry(new_entry(UndoState.SKIPPED), UndoState.RUNNING)
    assert draft.is_empty


# What was touched -> whether callers see it: leases, attempts and heartbeats do not move the ETag.
VISIBLE: list[tuple[str, Any, bool]] = [
    ("nothing", lambda draft: draft.now, False),
    ("a call", lambda draft: draft.change_call(new_call(), attempts=1), False),
    ("an effect", lambda draft: draft.change_effect(new_effect(), attempt=2), True),
    ("an entry", lambda draft: draft.move_undo_entry(new_entry(), UndoState.SKIPPED), True),
    ("the journal", lambda draft: draft.record(EntryKind.HALT_ORDERED), True),
    ("a report that moves nothing", lambda draft: draft.record(EntryKind.LATE_FAIL), False),
    ("a mark", lambda draft: draft.change_session(clean=False), True),
]


@pytest.mark.parametrize(("what", "touch", "is_visible"), VISIBLE)
def test_version_counts_what_callers_see_and_revision_every_write(what: str, touch: Any, is_visible: bool) -> None:
    """The ETag stands still while a worker retries; the revision never does."""
    later = START + timedelta(seconds=9)
    draft = new_draft(new_session(version=3, revision=8), later)
    touch(draft)
    after = draft.changes().after
    assert (after.version, after.revision, after.active_at) == (3 + is_visible, 9, later), what
    assert after.updated_at == (later if is_visible else START)


# What was touched -> whether somebody waits for it: a session's move, a decision, the end of an action.
AWAITED: list[tuple[str, Any, bool]] = [
    ("nothing", lambda draft: draft.now, False),
    ("a session that goes on", lambda draft: draft.move_session(SessionState.FAILED), False),
    ("a session that comes to rest", lambda draft: draft.move_session(SessionState.COMPLETED), True),
    ("a mark", lambda draft: draft.change_session(clean=False), False),
    ("an effect", lambda draft: draft.move_effect(new_effect(), EffectState.COMMITTED), False),
    ("an entry", lambda draft: draft.move_undo_entry(new_entry(), UndoState.SKIPPED), False),
    ("the journal", lambda draft: draft.record(EntryKind.LATE_FAIL), False),
    ("a question that is put", lambda draft: draft.ask_approval(new_approval()), False),
    ("a question's answer", lambda draft: draft.change_approval(new_approval(), ApprovalState.APPROVED), True),
    ("an action that begins", lambda draft: draft.add_call(new_action_call()), False),
    ("an action that goes on", lambda draft: draft.change_call(new_action_call(), attempts=1), False),
    ("an action that ends", lambda draft: draft.change_call(new_action_call(), due_at=None), True),
    ("an undo that ends", lambda draft: draft.change_call(new_call(), due_at=None), False),
]


@pytest.mark.parametrize(("what", "touch", "is_awaited"), AWAITED)
def test_waiters_are_woken_when_what_they_wait_for_has_moved(what: str, touch: Any, is_awaited: bool) -> None:
    """Who polls long is told at once, and not for every attempt of a worker."""
    draft = new_draft(new_session())
    touch(draft)
    assert draft.changes().wakes_waiters is is_awaited, what


@given(st.integers(-5_000, 5_000))
def test_time_never_runs_backwards_when_the_database_clock_does(seconds: int) -> None:
    """Entries, rows and ids take the later of the clock and the newest entry."""
    head = JournalHead(seq=1, digest=bytes([7]) * 32, at=START)
    draft = new_draft(new_session(head=head), START + timedelta(seconds=seconds))
    draft.record(EntryKind.HALT_ORDERED)
    after = draft.changes().after
    expected = START + timedelta(seconds=max(seconds, 0))
    assert draft.now == expected
    assert (after.head.at, after.updated_at, after.active_at) == (expected, expected, expected)


@given(st.binary(min_size=10, max_size=10), st.datetimes(min_value=START.replace(tzinfo=None)))
def test_new_id_is_a_uuid7_when_the_dice_fall_anyhow(dice: bytes, moment: Any) -> None:
    """RFC 9562: version 7, variant 10, the first 48 bits are Unix milliseconds, so that ids sort by time."""
    now = moment.replace(tzinfo=START.tzinfo)
    made = Draft(new_session(), Surroundings(now=now, actor=ACTOR, random_bytes=lambda count: dice[:count])).new_id()
    assert (made.version, made.variant) == (7, "specified in RFC 4122")
    assert made.int >> 80 == int(now.timestamp() * 1000)
    assert made.bytes[6] & 0x0F == dice[0] & 0x0F
    assert made.bytes[9:] == dice[3:]


def test_open_is_recorded_when_nothing_else_ever_was() -> None:
    """OPENED is the first entry of every journal and of no other place."""
    first, later = new_draft(new_session()), new_draft(new_session(head=JournalHead(seq=1, digest=bytes([7]) * 32, at=START)))
    first.open()
    later.open()
    assert kinds_of(first) == [EntryKind.OPENED]
    assert later.is_empty


def test_changes_chain_their_entries_when_there_are_several() -> None:
    """All entries of one decision are links of the session's chain, under the actor and at the moment of the decision."""
    draft = new_draft(new_session())
    draft.open()
    draft.record(EntryKind.INTENT, STEP, contents={"payload": b"secret"})
    draft.move_session(SessionState.HALTED, halt_reason=HaltReason.OPERATOR)
    draft.record(EntryKind.HALTED)
    changes = draft.changes()
    session = changes.after
    assert [entry.seq for entry in changes.entries] == [1, 2, 3]
    assert {entry.actor for entry in changes.entries} == {ACTOR}
    assert changes.entries[0].prev_hash == GENESIS
    assert b"secret" not in changes.entries[1].body
    assert journal.verify(session.org, session.session_id, changes.entries, session.head).valid
    assert replace(session, head=changes.before.head) != changes.before
