"""Count crashes over a call, and put a session's work down, by the columns that cannot be spoilt. Must not read what a row holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.domain.model import EffectId, EffectState, SessionId, StepIndex, UndoId
from app.domain.poison import MAX_WAIT_SECONDS, OPEN_STATES, Ended, OpenStep
from app.storage.claims import Claim
from app.storage.database import Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """How often workers have crashed over a call, or lost its attempts, by now; `was_attempt_open`: this one took an attempt along."""

    count: int
    was_attempt_open: bool


# Counted where an attempt without an end is counted, and such a one is closed with it, so that none counts twice.
COUNT_CRASH_SQL = """
WITH crashed AS (
  SELECT org, session_id, call_id, is_attempt_open
  FROM outgoing_calls
  WHERE org = $1 AND session_id = $2 AND call_id = $3 AND epoch = $4 AND due_at IS NOT NULL
  FOR NO KEY UPDATE
)
UPDATE outgoing_calls AS o
SET
  interrupted = o.interrupted + 1,
  is_attempt_open = false,
  may_be_processing = o.may_be_processing OR o.is_attempt_open,
  last_error = $5,
  due_at = greatest(o.due_at, clock_timestamp() + make_interval(secs => least($6, power(2, least(o.interrupted, 30))))),
  leased_by = NULL,
  leased_until = NULL
FROM crashed AS c
WHERE o.org = c.org AND o.session_id = c.session_id AND o.call_id = c.call_id
RETURNING o.interrupted, c.is_attempt_open
"""


async def count_crash(tx: Transaction, claim: Claim, error: str) -> Crash | None:
    """Count a crash over a claimed call and put it off, longer each time; its session is locked. None where the lease is lost.

    `error` is what people are shown.
    """
    row = await tx.connection.fetchrow(
        COUNT_CRASH_SQL, tx.org, claim.session_id, claim.call_id, claim.epoch, error, MAX_WAIT_SECONDS
    )  # fmt: skip
    return None if row is None else Crash(count=row["interrupted"], was_attempt_open=row["is_attempt_open"])


OPEN_STEPS_SQL = """
SELECT
  e.step_index, e.effect_id, e.state::text, e.reversibility = 'read_only' AS is_read, e.reversibility = 'irreversible' AS is_irreversible,
  u.undo_id, c.attempts, c.last_status, c.last_error
FROM effect_log AS e
LEFT JOIN undo_stack AS u ON u.org = $1 AND u.session_id = $2 AND u.stack_position = e.step_index
LEFT JOIN outgoing_calls AS c ON c.org = $1 AND c.session_id = $2 AND c.call_id = u.undo_id
WHERE e.org = $1 AND e.session_id = $2 AND e.state = ANY ($3::effect_state[])
ORDER BY e.step_index
"""


async def open_steps(tx: Transaction, session_id: SessionId) -> list[OpenStep]:
    """Return what is open of a session that is locked."""
    rows = await tx.connection.fetch(OPEN_STEPS_SQL, tx.org, session_id, OPEN_STATES)
    return [
        OpenStep(
            step_index=StepIndex(row["step_index"]),
            effect_id=EffectId(row["effect_id"]),
            state=EffectState(row["state"]),
            is_read=row["is_read"],
            is_irreversible=row["is_irreversible"],
            undo_id=None if row["undo_id"] is None else UndoId(row["undo_id"]),
            attempts=row["attempts"],
            status=row["last_status"],
            error=row["last_error"],
        )
        for row in rows
    ]


# Entries, questions and calls follow their effects; a call is put down whatever its effect, and by whomever it is held. For IS TRUE see
# calls.LOCK_CALLS_SQL.
PUT_DOWN_SQL = """
WITH ended AS (
  SELECT step_index, state_before::effect_state, state::effect_state, outcome::outcome
  FROM unnest($3::integer[], $4::text[], $5::text[], $6::text[]) AS c (step_index, state_before, state, outcome)
),
effects AS (
  UPDATE effect_log AS e
  SET state = c.state, outcome = coalesce(c.outcome, e.outcome), version = e.version + 1
  FROM ended AS c
  WHERE e.org = $1 AND e.session_id = $2 AND e.step_index = c.step_index AND e.state = c.state_before
  RETURNING e.step_index
),
undo_entries AS (
  UPDATE undo_stack AS u
  SET state = 'failed'
  FROM ended AS c
  WHERE u.org = $1 AND u.session_id = $2 AND u.stack_position = c.step_index
    AND u.state = 'running' AND c.state = 'compensation_failed'
  RETURNING u.stack_position
),
questions AS (
  UPDATE approvals AS a
  SET state = 'cancelled'
  FROM ended AS c
  WHERE a.org = $1 AND a.session_id = $2 AND a.step_index = c.step_index
    AND a.state IN ('pending', 'approved') AND c.state = 'cancelled'
  RETURNING a.step_index
),
calls AS (
  UPDATE outgoing_calls
  SET
    due_at = NULL, leased_by = NULL, leased_until = NULL, is_attempt_open = false, may_be_processing = may_be_processing OR is_attempt_open
  WHERE org = $1 AND session_id = $2 AND (due_at IS NOT NULL) IS TRUE
  RETURNING call_id
)
SELECT
  (SELECT count(*) FROM effects) AS effects,
  (SELECT count(*) FROM undo_entries) AS undo_entries,
  (SELECT count(*) FROM questions) AS questions,
  (SELECT count(*) FROM calls) AS calls
"""


async def put_down(tx: Transaction, session_id: SessionId, ended: Sequence[Ended]) -> None:
    """Leave a locked session's open effects where they were said to end, and take every call of it out of the work."""
    await tx.connection.fetchrow(
        PUT_DOWN_SQL,
        tx.org,
        session_id,
        [one.step.step_index for one in ended],
        [one.step.state for one in ended],
        [one.state for one in ended],
        [one.outcome for one in ended],
    )
