"""Open a session, and lock one together with what a decision about it needs. Must not write anything but the empty row of a new one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from asyncpg import Record

from app.domain.model import (
    Approval,
    Effect,
    JournalHead,
    OrgName,
    Session,
    SessionId,
    SessionState,
    StepIndex,
    UndoEntry,
    UndoId,
)
from app.domain.tools import Tool
from app.storage.database import Connection, Transaction
from app.storage.rows import approval_of, effect_of, session_of, tool_of, undo_entry_of

GENESIS = bytes(32)  # the hash before the first journal entry (docs/reference/journal-format.md)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSession:
    """What the opener says of a session; None = not said."""

    session_id: SessionId
    owner: str
    agent: str
    metadata: bytes
    idle_seconds: int | None
    deadline_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which effects a decision needs beside the session.

    `step` and `request_key`: those named. `open`: all not settled (executing, unknown, awaiting_approval, approved). `pending`: all whose
    undo entry is pending; `failed`: all whose undo entry is failed. `irreversible`: all of that class. `tool`: the newest registration
    under that name comes along.
    `top`: the two whose undo entries are the newest pending: a report that comes along may settle the first.
    """

    step: StepIndex | None = None
    request_key: str | None = None
    open: bool = False
    top: bool = False
    pending: bool = False
    failed: bool = False
    irreversible: bool = False
    tool: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedEffect:
    """An effect with its undo entry and its approval, if it has them."""

    effect: Effect
    undo_entry: UndoEntry | None
    approval: Approval | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """A session whose row is locked until the transaction ends, the wanted effects, and the moment, read after the lock."""

    session: Session
    now: datetime
    effects: Sequence[LockedEffect]
    tool: Tool | None

    def joined(self, other: "Locked | None") -> "Locked":
        """Return this with the effects that `other`, read later under the same lock, has besides."""
        known = {locked.effect.step_index for locked in self.effects}
        more = [] if other is None else [locked for locked in other.effects if locked.effect.step_index not in known]
        return replace(self, effects=(*self.effects, *more))

    def at_step(self, step: StepIndex | None) -> LockedEffect | None:
        """Return the effect at `step`, if it is there."""
        return next((locked for locked in self.effects if locked.effect.step_index == step), None)

    def under_key(self, request_key: str | None) -> LockedEffect | None:
        """Return the effect that was asked for under `request_key`, if it is there."""
        if request_key is None:
            return None
        return next((locked for locked in self.effects if locked.effect.request_key == request_key), None)


OPEN_SQL = """
INSERT INTO sessions (
  org, session_id, owner, agent, metadata, state, clean, pivoted, late_effect, last_step, idle_seconds, deadline_at,
  halt_ordered, created_at, updated_at, active_at, version, revision, journal_seq, journal_hash
)
SELECT $1, $2, $3, $4, $5, 'active', true, false, false, 0, $6, $7, false, moment, moment, moment, 0, 0, 0, $8
FROM clock_timestamp() AS moment
ON CONFLICT (org, session_id) DO NOTHING
RETURNING session_id
"""


async def open_session(tx: Transaction, new: NewSession) -> bool:
    """Insert an empty session (nothing journaled yet) unless there is one; waits for a twin that is opening it, and returns False then."""
    opened = await tx.connection.fetchval(
        OPEN_SQL, tx.org, new.session_id, new.owner, new.agent, new.metadata, new.idle_seconds, new.deadline_at, GENESIS
    )
    return opened is not None


def session_of_new(new: NewSession, org: OrgName, now: datetime) -> Session:
    """Return the session that `open_session` would insert, for a decision whose write inserts it."""
    return Session(
        org=org,
        session_id=new.session_id,
        owner=new.owner,
        agent=new.agent,
        metadata=new.metadata,
        state=SessionState.ACTIVE,
        halt_reason=None,
        clean=True,
        pivoted=False,
        late_effect=False,
        last_step=0,
        idle_seconds=new.idle_seconds,
        deadline_at=new.deadline_at,
        failed_at=None,
        halted_at=None,
        halt_ordered=False,
        created_at=now,
        updated_at=now,
        active_at=now,
        version=0,
        revision=0,
        head=JournalHead(seq=0, digest=GENESIS, at=None),
    )


# The lock may be waited for, but everything else in the statement is read as of its start. `seen_revision` is what the session's revision
# was then: where it differs from the locked row's, another writer came first, and the statement is simply run again under the lock.
# The moment is taken above the locking node, so after the wait. Rows are found by their full key: see calls.LOCK_CALL_SQL.
LOCK_SQL = """
WITH locked AS MATERIALIZED (
  SELECT
    session_id, owner, agent, metadata, state::text, halt_reason::text, clean, pivoted, late_effect, last_step, idle_seconds,
    deadline_at, failed_at, halted_at, halt_ordered, created_at, updated_at, active_at, version, revision, journal_seq, journal_hash,
    journal_at
  FROM sessions
  WHERE org = $1 AND session_id = $2
  FOR NO KEY UPDATE
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
  a.state::text AS a_state, a.requested_by AS a_requested_by, a.requested_at AS a_requested_at, a.expires_at AS a_expires_at,
  a.ttl_seconds AS a_ttl_seconds, a.decided_at AS a_decided_at, a.decided_by AS a_decided_by,
  a.claimed_approver AS a_claimed_approver, a.reason AS a_reason, a.is_continued AS a_is_continued,
  a.released_at AS a_released_at, a.released_to AS a_released_to, a.release_key AS a_release_key,
  t.version AS t_version, t.definition AS t_definition
FROM locked AS l
JOIN sessions AS seen ON seen.org = $1 AND seen.session_id = $2
LEFT JOIN LATERAL (
  SELECT step_index FROM effect_log
  WHERE org = $1 AND session_id = $2 AND step_index = $3
  UNION
  SELECT step_index FROM effect_log
  WHERE org = $1 AND session_id = $2 AND request_key = $4
  UNION
  SELECT step_index FROM effect_log
  WHERE $5 AND org = $1 AND session_id = $2 AND state IN ('executing', 'unknown', 'awaiting_approval', 'approved')
  UNION
  (
    SELECT stack_position FROM undo_stack
    WHERE $6 AND org = $1 AND session_id = $2 AND state = 'pending'
    ORDER BY stack_position DESC
    LIMIT 2
  )
  UNION
  SELECT stack_position FROM undo_stack
  WHERE $7 AND org = $1 AND session_id = $2 AND state = 'pending'
  UNION
  SELECT stack_position FROM undo_stack
  WHERE $10 AND org = $1 AND session_id = $2 AND state = 'failed'
  UNION
  SELECT step_index FROM effect_log
  WHERE $8 AND org = $1 AND session_id = $2 AND reversibility = 'irreversible'
) AS wanted ON true
LEFT JOIN LATERAL (
  SELECT
    step_index, effect_id, tool, tool_version, reversibility, state, outcome, payload, payload_sha256, result, error, request_key,
    request_sha256, attempt, traceparent, registered_at, executed_at, version
  FROM effect_log
  WHERE org = $1 AND session_id = $2 AND step_index = wanted.step_index
  LIMIT 1
) AS e ON true
LEFT JOIN LATERAL (
  SELECT undo_id, stack_position, state, compensation, by_hand, registered_at, compensated_at
  FROM undo_stack
  WHERE org = $1 AND session_id = $2 AND stack_position = wanted.step_index
  LIMIT 1
) AS u ON true
LEFT JOIN LATERAL (
  SELECT
    state, requested_by, requested_at, expires_at, ttl_seconds, decided_at, decided_by, claimed_approver, reason, is_continued,
    released_at, released_to, release_key
  FROM approvals
  WHERE org = $1 AND session_id = $2 AND step_index = wanted.step_index
  LIMIT 1
) AS a ON true
LEFT JOIN LATERAL (
  SELECT version, definition, is_deleted
  FROM tools
  WHERE org = $1 AND name = $9
  ORDER BY version DESC
  LIMIT 1
) AS t ON NOT t.is_deleted
ORDER BY e.step_index
"""


async def lock(tx: Transaction, session_id: SessionId, wanted: Wanted) -> Locked | None:
    """Lock a session's row (the first and only lock of every verb) and read what is wanted with it; None where there is no session."""
    arguments = (
        tx.org,
        session_id,
        wanted.step,
        wanted.request_key,
        wanted.open,
        wanted.top,
        wanted.pending,
        wanted.irreversible,
        wanted.tool,
        wanted.failed,
    )
    rows = await tx.connection.fetch(LOCK_SQL, *arguments)
    if rows and rows[0]["revision"] != rows[0]["seen_revision"]:
        rows = await tx.connection.fetch(LOCK_SQL, *arguments)
    if not rows:
        return None
    return Locked(
        session=session_of(rows[0], tx.org),
        now=rows[0]["now"],
        effects=tuple(_locked_effect(row) for row in rows if row["e_step_index"] is not None),
        tool=tool_of(wanted.tool, rows[0]) if wanted.tool is not None else None,
    )


def _locked_effect(row: Record) -> LockedEffect:
    return LockedEffect(effect=effect_of(row), undo_entry=undo_entry_of(row), approval=approval_of(row))


POSITION_SQL = """
SELECT stack_position
FROM undo_stack
WHERE org = $1 AND session_id = $2 AND undo_id = $3
LIMIT 1
"""


async def position_of(tx: Transaction, session_id: SessionId, undo_id: UndoId) -> StepIndex | None:
    """Return where on its session's stack an undo entry stands, which never changes."""
    position: StepIndex | None = await tx.connection.fetchval(POSITION_SQL, tx.org, session_id, undo_id)
    return position


# In the order of the index of active sessions, which the planner, blind to statistics behind row-level security, would not choose else.
# Open questions are found by the statement's time, which an index can be searched by; under the lock the clock is read again.
OVERDUE_SQL = """
(
  SELECT org, session_id
  FROM sessions
  WHERE state = 'active'
    AND (active_at + make_interval(secs => idle_seconds) <= clock_timestamp() OR deadline_at <= clock_timestamp())
  ORDER BY org, session_id
  LIMIT $1
)
UNION ALL
(
  SELECT org, session_id
  FROM approvals
  WHERE state IN ('pending', 'approved') AND expires_at <= statement_timestamp()
  ORDER BY expires_at
  LIMIT $1
)
"""


async def overdue(connection: Connection, limit: int) -> list[tuple[OrgName, SessionId]]:
    """Return sessions, of any org, that seem past their deadline, silent too long or asking a question for too long: to be judged again.

    Needs a dispatcher's connection.
    """
    rows = await connection.fetch(OVERDUE_SQL, limit)
    return [(OrgName(row["org"]), SessionId(row["session_id"])) for row in rows]
