"""Read-only projections for GETs, as the caller may see them. Must not lock or write, and always asks whose the session is."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from asyncpg import Record

from app.domain.access import may_see, session_not_found
from app.domain.circuits import Hold
from app.domain.draft import Changes
from app.domain.errors import NotFound
from app.domain.model import (
    MAX_STEP_INDEX,
    Approval,
    ApprovalState,
    Effect,
    EffectState,
    HaltReason,
    OutgoingCall,
    Principal,
    Role,
    Session,
    SessionId,
    SessionState,
    StepIndex,
    UndoEntry,
)
from app.storage import destinations
from app.storage.batches import Sighting
from app.storage.database import Transaction
from app.storage.rows import approval_of, call_of, effect_of, session_of, tool_of, undo_entry_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One step: the effect, and its approval, undo entry, the undo's call and the action's where there are any."""

    effect: Effect
    approval: Approval | None
    undo_entry: UndoEntry | None
    call: OutgoingCall | None
    action: OutgoingCall | None = None

    @property
    def is_in_progress(self) -> bool:
        """Tell whether the service is executing this call and has not come to an end with it."""
        return self.effect.state is EffectState.EXECUTING and self.action is not None

    @property
    def is_waiting(self) -> bool:
        """Tell whether a caller has to wait for what becomes of the call: for a person, or for the service."""
        return self.effect.state is EffectState.AWAITING_APPROVAL or self.is_in_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """A session with all of its steps, by ascending step_index.

    `unreadable`: those whose rows are not such as this code knows. `held_by`: what keeps a call of it that is due from being sent.
    """

    session: Session
    steps: Sequence[StepView]
    unreadable: Sequence[StepIndex] = ()
    held_by: Hold | None = None


SESSION_SQL = """
SELECT
  session_id, owner, agent, metadata, state::text, halt_reason::text, clean, pivoted, late_effect, last_step, idle_seconds, deadline_at,
  failed_at, halted_at, halt_ordered, created_at, updated_at, active_at, version, revision, journal_seq, journal_hash, journal_at
FROM sessions
WHERE org = $1 AND session_id = $2
LIMIT 1
"""


async def session(tx: Transaction, principal: Principal, session_id: SessionId) -> Session:
    """Return a session's own row.

    Raises:
        NotFound: not there, or not the caller's to see.
    """
    row = await tx.connection.fetchrow(SESSION_SQL, tx.org, session_id)
    found = None if row is None else session_of(row, tx.org)
    if found is None or not may_see(principal, found):
        raise session_not_found(session_id)
    return found


# Each step's rows are found by their full key, or looking at a long session would be quadratic: see calls.LOCK_CALL_SQL.
STEPS_SQL = """
SELECT
  e.step_index AS e_step_index, e.effect_id AS e_effect_id, e.tool AS e_tool, e.tool_version AS e_tool_version,
  e.reversibility::text AS e_reversibility,
  e.state::text AS e_state, e.outcome::text AS e_outcome, e.payload AS e_payload, e.payload_sha256 AS e_payload_sha256,
  e.result AS e_result, e.error AS e_error, e.request_key AS e_request_key, e.request_sha256 AS e_request_sha256,
  e.attempt AS e_attempt, e.traceparent AS e_traceparent, e.registered_at AS e_registered_at, e.executed_at AS e_executed_at,
  e.version AS e_version,
  a.state::text AS a_state, a.requested_by AS a_requested_by, a.requested_at AS a_requested_at, a.expires_at AS a_expires_at,
  a.ttl_seconds AS a_ttl_seconds, a.decided_at AS a_decided_at, a.decided_by AS a_decided_by,
  a.claimed_approver AS a_claimed_approver, a.reason AS a_reason, a.is_continued AS a_is_continued,
  a.released_at AS a_released_at, a.released_to AS a_released_to, a.release_key AS a_release_key,
  u.undo_id AS u_undo_id, u.stack_position AS u_stack_position, u.state::text AS u_state, u.compensation AS u_compensation,
  u.by_hand AS u_by_hand, u.registered_at AS u_registered_at, u.compensated_at AS u_compensated_at,
  c.call_id AS c_call_id, c.kind AS c_kind, c.step_index AS c_step_index, c.destination AS c_destination, c.url AS c_url, c.body AS c_body,
  c.outcome::text AS c_outcome, c.attempts AS c_attempts, c.failures AS c_failures, c.interrupted AS c_interrupted, c.polls AS c_polls,
  c.is_attempt_open AS c_is_attempt_open, c.may_be_processing AS c_may_be_processing, c.poll_url AS c_poll_url,
  c.last_status AS c_last_status, c.last_error AS c_last_error, c.due_at AS c_due_at, c.first_sent_at AS c_first_sent_at,
  c.deadline_at AS c_deadline_at, c.epoch AS c_epoch,
  x.call_id AS x_call_id, x.kind AS x_kind, x.step_index AS x_step_index, x.destination AS x_destination, x.url AS x_url, x.body AS x_body,
  x.outcome::text AS x_outcome, x.attempts AS x_attempts, x.failures AS x_failures, x.interrupted AS x_interrupted, x.polls AS x_polls,
  x.is_attempt_open AS x_is_attempt_open, x.may_be_processing AS x_may_be_processing, x.poll_url AS x_poll_url,
  x.last_status AS x_last_status, x.last_error AS x_last_error, x.due_at AS x_due_at, x.first_sent_at AS x_first_sent_at,
  x.deadline_at AS x_deadline_at, x.epoch AS x_epoch
FROM effect_log AS e
LEFT JOIN LATERAL (
  SELECT
    state, requested_by, requested_at, expires_at, ttl_seconds, decided_at, decided_by, claimed_approver, reason, is_continued,
    released_at, released_to, release_key
  FROM approvals
  WHERE org = $1 AND session_id = $2 AND step_index = e.step_index
  LIMIT 1
) AS a ON true
LEFT JOIN LATERAL (
  SELECT undo_id, stack_position, state, compensation, by_hand, registered_at, compensated_at
  FROM undo_stack
  WHERE org = $1 AND session_id = $2 AND stack_position = e.step_index
  LIMIT 1
) AS u ON true
LEFT JOIN LATERAL (
  SELECT
    call_id, kind::text, step_index, destination, url, body, outcome, attempts, failures, interrupted, polls, is_attempt_open,
    may_be_processing, poll_url, last_status, last_error, due_at, first_sent_at, deadline_at, epoch
  FROM outgoing_calls
  WHERE org = $1 AND session_id = $2 AND step_index BETWEEN e.step_index AND e.step_index AND kind = 'undo'
  ORDER BY step_index
  LIMIT 1
) AS c ON true
LEFT JOIN LATERAL (
  SELECT
    call_id, kind::text, step_index, destination, url, body, outcome, attempts, failures, interrupted, polls, is_attempt_open,
    may_be_processing, poll_url, last_status, last_error, due_at, first_sent_at, deadline_at, epoch
  FROM outgoing_calls
  WHERE org = $1 AND session_id = $2 AND step_index BETWEEN e.step_index AND e.step_index AND kind = 'action'
  ORDER BY step_index
  LIMIT 1
) AS x ON true
WHERE e.org = $1 AND e.session_id = $2 AND e.step_index BETWEEN $3 AND $4
ORDER BY e.step_index DESC
LIMIT $5
"""
MAX_STEPS_SHOWN = 10_000  # the newest ones; a session that large is looked at through its journal, which has pages


async def session_view(tx: Transaction, principal: Principal, session_id: SessionId) -> SessionView:
    """Return a session with its steps.

    Raises:
        NotFound: not there, or not the caller's to see.
    """
    return await with_steps(tx, await session(tx, principal, session_id))


async def with_steps(tx: Transaction, found: Session) -> SessionView:
    """Return a session whose row was read, with its steps."""
    steps, unreadable = [], []
    for row in await _step_rows(tx, found.session_id, None):
        try:
            steps.append(_step_view(row))
        except (KeyError, TypeError, ValueError):  # whoever has to look at the session has to see the rest of it
            unreadable.append(StepIndex(row["e_step_index"]))
    return SessionView(session=found, steps=steps, unreadable=unreadable, held_by=await _held_by(tx, steps))


async def _held_by(tx: Transaction, steps: Sequence[StepView]) -> Hold | None:
    due = [call for step in steps for call in (step.call, step.action) if call is not None and call.due_at is not None]
    if not due:
        return None
    held = await destinations.held(tx)
    return next((hold for call in due if (hold := held.by(call.destination)) is not None), None)


def view_of(sighting: Sighting, changes: Changes | None) -> SessionView:
    """Return a session that was read whole, as its decision left it; what is due of it was made due by that."""
    if sighting.locked is None:
        raise AssertionError("a session that is not there was not decided on")
    session = sighting.locked.session if changes is None else changes.after
    effects = {} if changes is None else {change.after.step_index: change.after for change in changes.effects}
    entries = {} if changes is None else {change.after.stack_position: change.after for change in changes.undo_entries}
    made = {} if changes is None else {change.after.step_index: change.after for change in changes.calls}
    steps = []
    for seen in sighting.locked.effects:
        step = seen.effect.step_index
        steps.append(
            StepView(
                effect=effects.get(step, seen.effect),
                approval=None,
                undo_entry=entries.get(step, seen.undo_entry),
                call=made.get(step),
            )
        )
    due = [call for call in made.values() if call.due_at is not None]
    held_by = next((hold for call in due if (hold := sighting.held.by(call.destination)) is not None), None)
    return SessionView(session=session, steps=steps, held_by=held_by)


async def step_view(tx: Transaction, principal: Principal, session_id: SessionId, step: StepIndex) -> StepView:
    """Return one step.

    Raises:
        NotFound: not there, or not the caller's to see.
    """
    await session(tx, principal, session_id)
    rows = await _step_rows(tx, session_id, step)
    if not rows:
        raise NotFound("effect_not_found", f"session {session_id} has no step {step}", session_id=session_id, step_index=step)
    return _step_view(rows[0])


async def _step_rows(tx: Transaction, session_id: SessionId, step: StepIndex | None) -> list[Record]:
    first, last = (1, MAX_STEP_INDEX) if step is None else (step, step)
    rows = await tx.connection.fetch(STEPS_SQL, tx.org, session_id, first, last, MAX_STEPS_SHOWN)
    return list(reversed(rows))


def _step_view(row: Record) -> StepView:
    return StepView(
        effect=effect_of(row), approval=approval_of(row), undo_entry=undo_entry_of(row), call=call_of(row), action=call_of(row, "x_")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFilter:
    """Which sessions a list shows; None = any."""

    state: SessionState | None = None
    tool: str | None = None
    agent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in a list of sessions the next page begins: after this one."""

    created_at: datetime
    session_id: SessionId


SESSIONS_SQL = """
SELECT
  s.session_id, s.owner, s.agent, s.metadata, s.state::text, s.halt_reason::text, s.clean, s.pivoted, s.late_effect, s.last_step,
  s.idle_seconds, s.deadline_at, s.failed_at, s.halted_at, s.halt_ordered, s.created_at, s.updated_at, s.active_at, s.version,
  s.revision, s.journal_seq, s.journal_hash, s.journal_at
FROM sessions AS s
WHERE s.org = $1
  AND ($2::text IS NULL OR s.owner = $2)
  AND ($3::text IS NULL OR s.state = $3::session_state)
  AND ($4::text IS NULL OR s.agent = $4)
  AND ($5::text IS NULL OR EXISTS (
    SELECT FROM effect_log AS e WHERE e.org = $1 AND e.session_id = s.session_id AND e.tool = $5
  ))
  AND ($6::timestamptz IS NULL OR s.created_at < $6 OR (s.created_at = $6 AND s.session_id > $7))
ORDER BY s.created_at DESC, s.session_id
LIMIT $8
"""


async def sessions(tx: Transaction, principal: Principal, wanted: SessionFilter, after: Place | None, limit: int) -> list[Session]:
    """Return up to `limit` sessions that the caller may see, newest first, without their steps."""
    owner = principal.subject if principal.role is Role.AGENT else None
    place = (after.created_at, after.session_id) if after else (None, None)
    rows = await tx.connection.fetch(SESSIONS_SQL, tx.org, owner, wanted.state, wanted.agent, wanted.tool, *place, limit)
    return [session_of(row, tx.org) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalPlace:
    """Where in a list of approvals the next page begins: after this one."""

    requested_at: datetime
    session_id: SessionId
    step_index: StepIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalItem:
    """One question to a person: the call with all that is known of it, its session, and what the agent calls itself.

    `action_url`: where the service will send the call once it is released; None: whoever resumes it runs it.
    """

    session_id: SessionId
    agent: str
    action_url: str | None
    step: StepView
    place: ApprovalPlace


# What is past its time is not open any more, whether or not the sweep has been there. The open ones are few among all that were ever
# asked, so they have an index of their own: behind row-level security no index is searched by a state that is a parameter, because
# comparing enums is not leakproof. What goes with a question is found by its full key: see calls.LOCK_CALL_SQL.
APPROVALS_SQL = """
WITH page AS MATERIALIZED (
  (
    SELECT session_id, step_index, requested_at
    FROM approvals
    WHERE $2::text IN ('pending', 'approved')
      AND org = $1
      AND state IN ('pending', 'approved')
      AND state = $2::approval_state
      AND expires_at > clock_timestamp()
      AND ($3::timestamptz IS NULL OR (requested_at, session_id, step_index) > ($3, $4, $5::bigint))
    ORDER BY requested_at, session_id, step_index
    LIMIT $6
  )
  UNION ALL
  (
    SELECT session_id, step_index, requested_at
    FROM approvals
    WHERE ($2::text IS NULL OR $2::text NOT IN ('pending', 'approved'))
      AND org = $1
      AND ($2::text IS NULL OR state = $2::approval_state)
      AND ($3::timestamptz IS NULL OR (requested_at, session_id, step_index) > ($3, $4, $5::bigint))
    ORDER BY requested_at, session_id, step_index
    LIMIT $6
  )
)
SELECT p.session_id, p.step_index, p.requested_at, s.agent, t.version AS t_version, t.definition AS t_definition
FROM page AS p
CROSS JOIN LATERAL (
  SELECT agent
  FROM sessions
  WHERE org = $1 AND session_id = p.session_id
  LIMIT 1
) AS s
CROSS JOIN LATERAL (
  SELECT tool, tool_version
  FROM effect_log
  WHERE org = $1 AND session_id = p.session_id AND step_index = p.step_index
  LIMIT 1
) AS e
LEFT JOIN LATERAL (
  SELECT version, definition
  FROM tools
  WHERE org = $1 AND name = e.tool AND version = e.tool_version
  LIMIT 1
) AS t ON true
ORDER BY p.requested_at, p.session_id, p.step_index
LIMIT $6
"""


async def approvals(tx: Transaction, state: ApprovalState | None, after: ApprovalPlace | None, limit: int) -> list[ApprovalItem]:
    """Return up to `limit` questions of the org, oldest first."""
    place = (after.requested_at, after.session_id, after.step_index) if after else (None, None, None)
    rows = await tx.connection.fetch(APPROVALS_SQL, tx.org, state, *place, limit)
    return [await _approval_item(tx, row) for row in rows]


async def _approval_item(tx: Transaction, row: Record) -> ApprovalItem:
    place = ApprovalPlace(requested_at=row["requested_at"], session_id=row["session_id"], step_index=row["step_index"])
    (step_row,) = await _step_rows(tx, place.session_id, place.step_index)
    step = _step_view(step_row)
    tool = tool_of(step.effect.tool, row)
    action = tool.definition.action if tool else None
    return ApprovalItem(session_id=place.session_id, agent=row["agent"], action_url=action.url if action else None, step=step, place=place)


@dataclass(frozen=True, slots=True, kw_only=True)
class HaltedSession:
    """A session that waits for a person, and for how long by now (seconds)."""

    session: Session
    age_seconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HaltCount:
    """How many sessions wait for a person for one reason, and the oldest of them."""

    reason: HaltReason
    count: int
    oldest_halted_at: datetime
    oldest_age_seconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HaltPlace:
    """Where in a list of halted sessions the next page begins: after this one."""

    halted_at: datetime
    session_id: SessionId


HALTED_SQL = """
SELECT
  session_id, owner, agent, metadata, state::text, halt_reason::text, clean, pivoted, late_effect, last_step, idle_seconds, deadline_at,
  failed_at, halted_at, halt_ordered, created_at, updated_at, active_at, version, revision, journal_seq, journal_hash, journal_at,
  extract(epoch FROM clock_timestamp() - halted_at)::bigint AS age_seconds
FROM sessions
WHERE org = $1
  AND state = 'halted'
  AND ($2::text IS NULL OR halt_reason = $2::halt_reason)
  AND ($3::timestamptz IS NULL OR (halted_at, session_id) > ($3, $4))
ORDER BY halted_at, session_id
LIMIT $5
"""


async def halted(tx: Transaction, reason: HaltReason | None, after: HaltPlace | None, limit: int) -> list[HaltedSession]:
    """Return up to `limit` sessions of the org that wait for a person, the longest waiting first."""
    place = (after.halted_at, after.session_id) if after else (None, None)
    rows = await tx.connection.fetch(HALTED_SQL, tx.org, reason, *place, limit)
    return [HaltedSession(session=session_of(row, tx.org), age_seconds=max(0, row["age_seconds"])) for row in rows]


HALT_COUNTS_SQL = """
SELECT
  halt_reason::text, count(*) AS count, min(halted_at) AS oldest_halted_at,
  extract(epoch FROM clock_timestamp() - min(halted_at))::bigint AS oldest_age_seconds
FROM sessions
WHERE org = $1 AND state = 'halted'
GROUP BY halt_reason
ORDER BY min(halted_at)
LIMIT 100
"""


async def halt_counts(tx: Transaction) -> list[HaltCount]:
    """Return how many sessions of the org wait for a person, by reason."""
    rows = await tx.connection.fetch(HALT_COUNTS_SQL, tx.org)
    return [
        HaltCount(
            reason=HaltReason(row["halt_reason"]),
            count=row["count"],
            oldest_halted_at=row["oldest_halted_at"],
            oldest_age_seconds=max(0, row["oldest_age_seconds"]),
        )
        for row in rows
    ]


NOW_SQL = """
SELECT clock_timestamp()
"""


async def now(tx: Transaction) -> datetime:
    """Return the database's time."""
    moment: datetime = await tx.connection.fetchval(NOW_SQL)
    return moment
