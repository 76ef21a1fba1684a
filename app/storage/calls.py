"""Outgoing calls: lock one with what it undoes or executes, many of them, or several of a session. Must not decide when one is due."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import assert_never
from uuid import UUID

from asyncpg import Record

from app.domain import compensation, unwinding
from app.domain.actions import Acting
from app.domain.model import CallKind, Compensation, EffectState, OutgoingCall, Reversibility, Session, SessionId
from app.domain.outcomes import Reported
from app.domain.unwinding import StackItem, Undoing
from app.storage import destinations, sessions, tools
from app.storage.claims import Claim
from app.storage.database import Transaction
from app.storage.rows import call_of, effect_of, session_of, tool_of, undo_entry_of
from app.storage.sessions import Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedCall:
    """A locked session with the call to work on, and the moment, read after the lock."""

    session: Session
    now: datetime
    work: Undoing | Acting


@dataclass(frozen=True, slots=True, kw_only=True)
class SightedCall:
    """What was found of a claimed undo among many.

    `is_held`: it is gone, or somebody else has its session's lock, or had it a moment ago. `has_more`: something that failed lies between
    it and the next, and what that means takes more than comes along here. `locked` is None in both.
    """

    locked: LockedCall | None
    is_held: bool
    has_more: bool


# See sessions.LOCK_SQL for `seen_revision` and the moment. Two rows: the undo's own entry, then the newest pending one below it, each with
# its call: an entry that a person had retried, or that halted before, has one already.
# A planner that expects a session to be short reads the whole of it and filters, which makes unwinding a long one quadratic. So every row
# is found by its full key and nothing else: LIMIT 1 keeps a look-up apart from the joins around it, and the order by call_id, which only
# the primary key has, rules out the other index that begins with the session.
LOCK_CALL_SQL = """
WITH locked AS MATERIALIZED (
  SELECT
    session_id, owner, agent, metadata, state::text, halt_reason::text, clean, pivoted, late_effect, last_step, idle_seconds,
    deadline_at, failed_at, halted_at, halt_ordered, created_at, updated_at, active_at, version, revision, journal_seq, journal_hash,
    journal_at
  FROM sessions
  WHERE org = $1 AND session_id = $2
  FOR NO KEY UPDATE
),
called AS MATERIALIZED (
  SELECT step_index
  FROM outgoing_calls
  WHERE org = $1 AND session_id = $2 AND call_id BETWEEN $3 AND $3
  ORDER BY call_id
  LIMIT 1
),
below AS MATERIALIZED (
  SELECT stack_position
  FROM undo_stack
  WHERE org = $1 AND session_id = $2 AND state = 'pending' AND stack_position < (SELECT step_index FROM called)
  ORDER BY stack_position DESC
  LIMIT 1
),
places AS MATERIALIZED (
  SELECT step_index AS stack_position FROM called
  UNION ALL
  SELECT stack_position FROM below
)
SELECT
  l.session_id, l.owner, l.agent, l.metadata, l.state, l.halt_reason, l.clean, l.pivoted, l.late_effect, l.last_step, l.idle_seconds,
  l.deadline_at, l.failed_at, l.halted_at, l.halt_ordered, l.created_at, l.updated_at, l.active_at, l.version, l.revision,
  l.journal_seq, l.journal_hash, l.journal_at,
  clock_timestamp() AS now, seen.revision AS seen_revision,
  e.step_index AS e_step_index, e.effect_id AS e_effect_id, e.tool AS e_tool, e.tool_version AS e_tool_version,
  e.reversibility::text AS e_reversibility,
  e.state::text AS e_state, e.outcome::text AS e_outcome, e.payload AS e_payload, e.payload_sha256 AS e_payload_sha256,
  e.result AS e_result, e.error AS e_error, e.request_key AS e_request_key, e.request_sha256 AS e_request_sha256,
  e.attempt AS e_attempt, e.traceparent AS e_traceparent, e.registered_at AS e_registered_at, e.executed_at AS e_executed_at,
  e.version AS e_version,
  u.undo_id AS u_undo_id, u.stack_position AS u_stack_position, u.state::text AS u_state, u.compensation AS u_compensation,
  u.by_hand AS u_by_hand, u.registered_at AS u_registered_at, u.compensated_at AS u_compensated_at,
  c.call_id AS c_call_id, c.kind AS c_kind, c.step_index AS c_step_index, c.destination AS c_destination, c.url AS c_url, c.body AS c_body,
  c.outcome AS c_outcome, c.attempts AS c_attempts, c.failures AS c_failures, c.interrupted AS c_interrupted, c.polls AS c_polls,
  c.is_attempt_open AS c_is_attempt_open, c.may_be_processing AS c_may_be_processing, c.poll_url AS c_poll_url,
  c.last_status AS c_last_status, c.last_error AS c_last_error, c.due_at AS c_due_at, c.first_sent_at AS c_first_sent_at,
  c.deadline_at AS c_deadline_at, c.epoch AS c_epoch,
  t.version AS t_version, t.definition AS t_definition,
  CASE
    WHEN EXISTS (SELECT FROM below) THEN EXISTS (
      SELECT FROM undo_stack AS f
      WHERE f.org = $1 AND f.session_id = $2 AND f.state = 'failed'
        AND f.stack_position > (SELECT stack_position FROM below) AND f.stack_position < (SELECT step_index FROM called)
    )
    ELSE EXISTS (SELECT FROM undo_stack AS f WHERE f.org = $1 AND f.session_id = $2 AND f.state = 'failed')
  END AS has_failed_entries,
  ARRAY(SELECT destination FROM circuits WHERE org = $1) AS circuits,
  ARRAY(SELECT coalesce(destination, '') FROM pauses WHERE org = $1 OR org IS NULL) AS pauses
FROM locked AS l
JOIN sessions AS seen ON seen.org = $1 AND seen.session_id = $2
CROSS JOIN places AS p
CROSS JOIN LATERAL (
  SELECT undo_id, stack_position, state, compensation, by_hand, registered_at, compensated_at
  FROM undo_stack
  WHERE org = $1 AND session_id = $2 AND stack_position = p.stack_position
  LIMIT 1
) AS u
CROSS JOIN LATERAL (
  SELECT
    step_index, effect_id, tool, tool_version, reversibility, state, outcome, payload, payload_sha256, result, error, request_key,
    request_sha256, attempt, traceparent, registered_at, executed_at, version
  FROM effect_log
  WHERE org = $1 AND session_id = $2 AND step_index = p.stack_position
  LIMIT 1
) AS e
LEFT JOIN LATERAL (
  SELECT
    call_id, kind::text, step_index, destination, url, body, outcome::text, attempts, failures, interrupted, polls, is_attempt_open,
    may_be_processing, poll_url, last_status, last_error, due_at, first_sent_at, deadline_at, epoch
  FROM outgoing_calls
  WHERE org = $1 AND session_id = $2 AND call_id BETWEEN u.undo_id AND u.undo_id
  ORDER BY call_id
  LIMIT 1
) AS c ON true
LEFT JOIN LATERAL (
  SELECT version, definition, is_deleted
  FROM tools
  WHERE org = $1 AND name = e.tool AND e.tool_version IS NOT NULL
  ORDER BY version DESC
  LIMIT 1
) AS t ON NOT t.is_deleted
ORDER BY u.stack_position DESC
LIMIT 2
"""


async def lock_call(tx: Transaction, claim: Claim) -> LockedCall:
    """Lock a claimed call's session and read what the next move needs.

    The call carries the claim's epoch, whatever the row says: it is the write that finds out whether the lease still holds.

    Raises:
        LookupError: the call is gone.
    """
    match claim.kind:
        case CallKind.UNDO:
            return await _lock_undo(tx, claim)
        case CallKind.ACTION:
            return await _lock_action(tx, claim)
        case _:
            assert_never(claim.kind)


async def _lock_undo(tx: Transaction, claim: Claim) -> LockedCall:
    rows = await tx.connection.fetch(LOCK_CALL_SQL, tx.org, claim.session_id, claim.call_id)
    if rows and rows[0]["revision"] != rows[0]["seen_revision"]:
        rows = await tx.connection.fetch(LOCK_CALL_SQL, tx.org, claim.session_id, claim.call_id)
    if not rows:
        raise _gone(claim)
    locked = _undoing(tx, claim, rows)
    work = locked.work
    if isinstance(work, Undoing) and work.below is not None and rows[0]["has_failed_entries"]:
        below = unwinding.next_below(work.item, work.below, await _failed(tx, claim.session_id))
        return replace(locked, work=replace(work, below=below, has_failed_entries=below is None))
    return locked


def _undoing(tx: Transaction, claim: Claim, rows: Sequence[Record]) -> LockedCall:
    """Read an undo's own row and, where there is one, that of the newest pending entry below it."""
    items = [_stack_item(row) for row in rows]
    call = items[0].call
    if call is None or call.call_id != claim.call_id:
        raise _gone(claim)
    return LockedCall(
        session=session_of(rows[0], tx.org),
        now=rows[0]["now"],
        work=Undoing(
            call=call if call.epoch == claim.epoch else replace(call, epoch=claim.epoch),
            item=items[0],
            below=items[1] if len(items) > 1 else None,
            has_failed_entries=rows[0]["has_failed_entries"] and len(items) == 1,
            held=destinations.held_in(rows[0]),
        ),
    )


# As LOCK_CALL_SQL, for many sessions, each locked unless somebody has it. Two rows for each at most: its call's own place on the stack, and
# the one below. What failed is looked for between the two, or, where nothing is left below, on all of the stack.
LOCK_UNDOS_SQL = """
SELECT
  asked.call_id AS asked_call_id,
  l.session_id, l.owner, l.agent, l.metadata, l.state, l.halt_reason, l.clean, l.pivoted, l.late_effect, l.last_step, l.idle_seconds,
  l.deadline_at, l.failed_at, l.halted_at, l.halt_ordered, l.created_at, l.updated_at, l.active_at, l.version, l.revision,
  l.journal_seq, l.journal_hash, l.journal_at,
  clock_timestamp() AS now, seen.revision AS seen_revision,
  e.step_index AS e_step_index, e.effect_id AS e_effect_id, e.tool AS e_tool, e.tool_version AS e_tool_version,
  e.reversibility::text AS e_reversibility,
  e.state::text AS e_state, e.outcome::text AS e_outcome, e.payload AS e_payload, e.payload_sha256 AS e_payload_sha256,
  e.result AS e_result, e.error AS e_error, e.request_key AS e_request_key, e.request_sha256 AS e_request_sha256,
  e.attempt AS e_attempt, e.traceparent AS e_traceparent, e.registered_at AS e_registered_at, e.executed_at AS e_executed_at,
  e.version AS e_version,
  u.undo_id AS u_undo_id, u.stack_position AS u_stack_position, u.state::text AS u_state, u.compensation AS u_compensation,
  u.by_hand AS u_by_hand, u.registered_at AS u_registered_at, u.compensated_at AS u_compensated_at,
  c.call_id AS c_call_id, c.kind AS c_kind, c.step_index AS c_step_index, c.destination AS c_destination, c.url AS c_url, c.body AS c_body,
  c.outcome AS c_outcome, c.attempts AS c_attempts, c.failures AS c_failures, c.interrupted AS c_interrupted, c.polls AS c_polls,
  c.is_attempt_open AS c_is_attempt_open, c.may_be_processing AS c_may_be_processing, c.poll_url AS c_poll_url,
  c.last_status AS c_last_status, c.last_error AS c_last_error, c.due_at AS c_due_at, c.first_sent_at AS c_first_sent_at,
  c.deadline_at AS c_deadline_at, c.epoch AS c_epoch,
  t.version AS t_version, t.definition AS t_definition,
  failed.stack_position IS NOT NULL AS has_failed_entries,
  ARRAY(SELECT destination FROM circuits WHERE org = $1) AS circuits,
  ARRAY(SELECT coalesce(destination, '') FROM pauses WHERE org = $1 OR org IS NULL) AS pauses
FROM unnest($2::text[], $3::uuid[]) AS asked (session_id, call_id)
CROSS JOIN LATERAL (
  SELECT
    session_id, owner, agent, metadata, state::text, halt_reason::text, clean, pivoted, late_effect, last_step, idle_seconds,
    deadline_at, failed_at, halted_at, halt_ordered, created_at, updated_at, active_at, version, revision, journal_seq, journal_hash,
    journal_at
  FROM sessions
  WHERE org = $1 AND session_id = asked.session_id
  LIMIT 1
  FOR NO KEY UPDATE SKIP LOCKED
) AS l
CROSS JOIN LATERAL (
  SELECT revision
  FROM sessions
  WHERE org = $1 AND session_id = asked.session_id
  LIMIT 1
) AS seen
CROSS JOIN LATERAL (
  SELECT step_index
  FROM outgoing_calls
  WHERE org = $1 AND session_id = asked.session_id AND call_id BETWEEN asked.call_id AND asked.call_id
  ORDER BY call_id
  LIMIT 1
) AS called
LEFT JOIN LATERAL (
  SELECT stack_position
  FROM undo_stack
  WHERE org = $1 AND session_id = asked.session_id AND state = 'pending' AND stack_position < called.step_index
  ORDER BY stack_position DESC
  LIMIT 1
) AS below ON true
LEFT JOIN LATERAL (
  SELECT stack_position
  FROM undo_stack
  WHERE org = $1 AND session_id = asked.session_id AND state = 'failed'
    AND stack_position > coalesce(below.stack_position, 0)
    AND stack_position < CASE WHEN below.stack_position IS NULL THEN 2147483648 ELSE called.step_index::bigint END
  ORDER BY stack_position
  LIMIT 1
) AS failed ON true
CROSS JOIN LATERAL (VALUES (called.step_index), (below.stack_position)) AS p (stack_position)
CROSS JOIN LATERAL (
  SELECT undo_id, stack_position, state, compensation, by_hand, registered_at, compensated_at
  FROM undo_stack
  WHERE org = $1 AND session_id = asked.session_id AND stack_position = p.stack_position
  LIMIT 1
) AS u
CROSS JOIN LATERAL (
  SELECT
    step_index, effect_id, tool, tool_version, reversibility, state, outcome, payload, payload_sha256, result, error, request_key,
    request_sha256, attempt, traceparent, registered_at, executed_at, version
  FROM effect_log
  WHERE org = $1 AND session_id = asked.session_id AND step_index = p.stack_position
  LIMIT 1
) AS e
LEFT JOIN LATERAL (
  SELECT
    call_id, kind::text, step_index, destination, url, body, outcome::text, attempts, failures, interrupted, polls, is_attempt_open,
    may_be_processing, poll_url, last_status, last_error, due_at, first_sent_at, deadline_at, epoch
  FROM outgoing_calls
  WHERE org = $1 AND session_id = asked.session_id AND call_id BETWEEN u.undo_id AND u.undo_id
  ORDER BY call_id
  LIMIT 1
) AS c ON true
LEFT JOIN LATERAL (
  SELECT version, definition, is_deleted
  FROM tools
  WHERE org = $1 AND name = e.tool AND e.tool_version IS NOT NULL
  ORDER BY version DESC
  LIMIT 1
) AS t ON NOT t.is_deleted
"""


async def lock_undos(tx: Transaction, claims: Sequence[Claim]) -> list[SightedCall]:
    """Lock the sessions of claimed undos, one of each session, as `lock_call` does; those whose lock somebody has are passed over.

    Returns what was found for each, in the same order.
    """
    found: dict[UUID, list[Record]] = {}
    session_ids, call_ids = [claim.session_id for claim in claims], [claim.call_id for claim in claims]
    for row in await tx.connection.fetch(LOCK_UNDOS_SQL, tx.org, session_ids, call_ids):
        found.setdefault(row["asked_call_id"], []).append(row)
    return [_sighted(tx, claim, found.get(claim.call_id, [])) for claim in claims]


def _sighted(tx: Transaction, claim: Claim, rows: list[Record]) -> SightedCall:
    rows.sort(key=lambda row: -int(row["u_stack_position"]))
    if not rows or rows[0]["revision"] != rows[0]["seen_revision"] or rows[0]["c_call_id"] != claim.call_id:
        return SightedCall(locked=None, is_held=True, has_more=False)
    has_more = len(rows) > 1 and bool(rows[0]["has_failed_entries"])
    return SightedCall(locked=None if has_more else _undoing(tx, claim, rows), is_held=False, has_more=has_more)


async def _failed(tx: Transaction, session_id: SessionId) -> list[StackItem]:
    """Read what has failed of a session that is locked; rarely anything lies between an undo and the next."""
    locked = await sessions.lock(tx, session_id, Wanted(failed=True))
    found = [] if locked is None else locked.effects
    return [StackItem(entry=one.undo_entry, effect=one.effect) for one in found if one.undo_entry is not None]


def _stack_item(row: Record) -> StackItem:
    entry = undo_entry_of(row)
    if entry is None:
        raise AssertionError("joined to the undo stack")
    effect = effect_of(row)
    return StackItem(entry=entry, effect=effect, call=call_of(row), newest=_newest_of(effect.tool, row))


def _newest_of(name: str, row: Record) -> Compensation | None:
    """Return the undo as it is registered now; a registration that cannot be read must not spoil what else is read with it."""
    try:
        newest = tool_of(name, row)
    except (KeyError, TypeError, ValueError):
        return compensation.UNREADABLE
    return newest.definition.compensation if newest else None


async def _lock_action(tx: Transaction, claim: Claim) -> LockedCall:
    """Lock as every verb does: an action is a rare call, and what its end may have to know is what a failing session has to."""
    locked = await sessions.lock(tx, claim.session_id, Wanted(open=True, top=True, irreversible=True))
    call = next((found for found in await lock_calls(tx, claim.session_id, [claim.call_id]) if found.call_id == claim.call_id), None)
    if locked is None or call is None:
        raise _gone(claim)
    # The call stays with its effect also where somebody has settled that meanwhile.
    locked = locked.joined(await sessions.lock(tx, claim.session_id, Wanted(step=call.step_index)))
    found = locked.at_step(call.step_index)
    tool = None if found is None else await tools.find(tx, found.effect.tool, found.effect.tool_version)
    if found is None or tool is None or tool.tool.definition.action is None:
        raise _gone(claim)
    call = replace(call, epoch=claim.epoch)
    return LockedCall(
        session=locked.session,
        now=locked.now,
        work=Acting(
            call=call,
            seen=Reported(effect=found.effect, undo_entry=found.undo_entry, approval=found.approval, action=call),
            action=tool.tool.definition.action,
            irreversible=[one.effect for one in locked.effects if one.effect.reversibility is Reversibility.IRREVERSIBLE],
            in_flight=[one.effect for one in locked.effects if one.effect.state is EffectState.EXECUTING and one.effect != found.effect],
            top=[StackItem(entry=one.undo_entry, effect=one.effect) for one in locked.effects if one.undo_entry is not None],
            held=await destinations.held(tx),
        ),
    )


def _gone(claim: Claim) -> LookupError:
    return LookupError(f"call {claim.call_id} of session {claim.session_id} is gone")


# IS TRUE keeps the planner to the session's own rows: by the index of what is due it would read all that is due in the org.
LOCK_CALLS_SQL = """
SELECT
  call_id AS c_call_id, kind::text AS c_kind, step_index AS c_step_index, destination AS c_destination, url AS c_url, body AS c_body,
  outcome::text AS c_outcome, attempts AS c_attempts, failures AS c_failures, interrupted AS c_interrupted, polls AS c_polls,
  is_attempt_open AS c_is_attempt_open, may_be_processing AS c_may_be_processing, poll_url AS c_poll_url,
  last_status AS c_last_status, last_error AS c_last_error, due_at AS c_due_at, first_sent_at AS c_first_sent_at,
  deadline_at AS c_deadline_at, epoch AS c_epoch
FROM outgoing_calls
WHERE org = $1 AND session_id = $2 AND (due_at IS NOT NULL OR call_id = ANY ($3::uuid[])) IS TRUE
ORDER BY call_id
FOR NO KEY UPDATE
"""


async def lock_calls(tx: Transaction, session_id: SessionId, call_ids: Sequence[UUID]) -> list[OutgoingCall]:
    """Lock a session's calls that are due, and those named, so that nobody claims them meanwhile; the session is locked already."""
    rows = await tx.connection.fetch(LOCK_CALLS_SQL, tx.org, session_id, list(call_ids))
    return [call for row in rows if (call := call_of(row)) is not None]
