"""Read-only projections for GETs, as the caller may see them. Must not lock or write, and always asks whose the session is."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from app.domain.access import may_see, session_not_found
from app.domain.errors import NotFound
from app.domain.model import Approval, Effect, OutgoingCall, Principal, Role, Session, SessionId, SessionState, StepIndex, UndoEntry
from app.storage.database import Transaction
from app.storage.rows import approval_of, call_of, effect_of, session_of, undo_entry_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One step: the effect, and its approval, undo entry and outgoing call where there are any."""

    effect: Effect
    approval: Approval | None
    undo_entry: UndoEntry | None
    call: OutgoingCall | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """A session with all of its steps, by ascending step_index."""

    session: Session
    steps: Sequence[StepView]


SESSION_SQL = """
SELECT
  session_id, owner, agent, metadata, state::text, halt_reason::text, clean, pivoted, late_effect, last_step, idle_seconds, deadline_at,
  failed_at, created_at, updated_at, active_at, version, revision, journal_seq, journal_hash, journal_at
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
  a.requested_by AS a_requested_by, a.requested_at AS a_requested_at, a.expires_at AS a_expires_at,
  u.undo_id AS u_undo_id, u.stack_position AS u_stack_position, u.state::text AS u_state, u.compensation AS u_compensation,
  u.by_hand AS u_by_hand, u.registered_at AS u_registered_at, u.compensated_at AS u_compensated_at,
  c.call_id AS c_call_id, c.step_index AS c_step_index, c.destination AS c_destination, c.url AS c_url, c.body AS c_body,
  c.outcome::text AS c_outcome, c.attempts AS c_attempts, c.failures AS c_failures, c.interrupted AS c_interrupted, c.polls AS c_polls,
  c.is_attempt_open AS c_is_attempt_open, c.may_be_processing AS c_may_be_processing, c.poll_url AS c_poll_url,
  c.last_status AS c_last_status, c.last_error AS c_last_error, c.due_at AS c_due_at, c.first_sent_at AS c_first_sent_at,
  c.deadline_at AS c_deadline_at, c.epoch AS c_epoch
FROM effect_log AS e
LEFT JOIN LATERAL (
  SELECT requested_by, requested_at, expires_at
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
    call_id, step_index, destination, url, body, outcome, attempts, failures, interrupted, polls, is_attempt_open, may_be_processing,
    poll_url, last_status, last_error, due_at, first_sent_at, deadline_at, epoch
  FROM outgoing_calls
  WHERE org = $1 AND session_id = $2 AND step_index BETWEEN e.step_index AND e.step_index
  ORDER BY step_index
  LIMIT 1
) AS c ON true
WHERE e.org = $1 AND e.session_id = $2 AND ($3::integer IS NULL OR e.step_index = $3)
ORDER BY e.step_index DESC
LIMIT $4
"""
MAX_STEPS_SHOWN = 10_000  # the newest ones; a session that large is looked at through its journal, which has pages


async def session_view(tx: Transaction, principal: Principal, session_id: SessionId) -> SessionView:
    """Return a session with its steps.

    Raises:
        NotFound: not there, or not the caller's to see.
    """
    found = await session(tx, principal, session_id)
    return SessionView(session=found, steps=await _steps(tx, session_id, None))


async def step_view(tx: Transaction, principal: Principal, session_id: SessionId, step: StepIndex) -> StepView:
    """Return one step.

    Raises:
        NotFound: not there, or not the caller's to see.
    """
    await session(tx, principal, session_id)
    steps = await _steps(tx, session_id, step)
    if not steps:
        raise NotFound("effect_not_found", f"session {session_id} has no step {step}", session_id=session_id, step_index=step)
    return steps[0]


async def _steps(tx: Transaction, session_id: SessionId, step: StepIndex | None) -> list[StepView]:
    rows = await tx.connection.fetch(STEPS_SQL, tx.org, session_id, step, MAX_STEPS_SHOWN)
    return [
        StepView(
            effect=effect_of(row),
            approval=approval_of(row),
            undo_entry=undo_entry_of(row),
            call=None if row["c_call_id"] is None else call_of(row),
        )
        for row in reversed(rows)
    ]


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
  s.idle_seconds, s.deadline_at, s.failed_at, s.created_at, s.updated_at, s.active_at, s.version, s.revision, s.journal_seq,
  s.journal_hash, s.journal_at
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
