"""Write what decisions changed, all of it in one statement. Must not decide: every row is guarded by what the decision saw."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from app.domain.draft import Changes
from app.storage import shapes
from app.storage.database import Transaction, WriteConflict


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Who keeps the calls that a write leaves due, and for how long (seconds) from now."""

    worker: str
    seconds: float


# Every row is put where it belongs by its primary key, be it new or read under this transaction's lock: an insertion that meets its row
# changes it. Nothing is joined, so that no plan, whatever it expects of a table, reads more than what is written.
# What the decision saw is named where rows meet: a session's revision, which every write under its lock counts, an effect's version, that
# a question or an undo entry is the same and still open, a call's epoch.
# The foreign keys and the one-undo-due constraint are checked after the statement, so the order of its parts does not matter.
# $1 org, checked as its type says, once and not for every row; $2 worker and $3 lease seconds, both NULL for writers that are no worker;
# $4 to $9 rows; $10 sessions whose waiters are woken; $11 whether the orchestrators are.
WRITE_SQL = """
WITH put_sessions AS (
  INSERT INTO sessions AS s (
    org, session_id, owner, agent, metadata, state, halt_reason, clean, pivoted, late_effect, last_step, idle_seconds, deadline_at,
    failed_at, halted_at, halt_ordered, created_at, updated_at, active_at, version, revision, journal_seq, journal_hash, journal_at
  )
  SELECT
    $1::org_name, session_id, owner, agent, metadata, state, halt_reason, clean, pivoted, late_effect, last_step, idle_seconds, deadline_at,
    failed_at, halted_at, halt_ordered, created_at, updated_at, active_at, version, revision, journal_seq, journal_hash, journal_at
  FROM unnest($4::session_written[])
  ON CONFLICT (org, session_id) DO UPDATE
  SET
    state = EXCLUDED.state, halt_reason = EXCLUDED.halt_reason, clean = EXCLUDED.clean, pivoted = EXCLUDED.pivoted,
    late_effect = EXCLUDED.late_effect, last_step = EXCLUDED.last_step, failed_at = EXCLUDED.failed_at, halted_at = EXCLUDED.halted_at,
    halt_ordered = EXCLUDED.halt_ordered, updated_at = EXCLUDED.updated_at, active_at = EXCLUDED.active_at, version = EXCLUDED.version,
    revision = EXCLUDED.revision, journal_seq = EXCLUDED.journal_seq, journal_hash = EXCLUDED.journal_hash,
    journal_at = EXCLUDED.journal_at
  WHERE s.revision = EXCLUDED.revision - 1
  RETURNING session_id
),
put_effects AS (
  INSERT INTO effect_log AS e (
    org, session_id, step_index, effect_id, tool, tool_version, reversibility, state, outcome, payload, payload_sha256, result, error,
    request_key, request_sha256, attempt, traceparent, registered_at, executed_at, version
  )
  SELECT
    $1::org_name, session_id, step_index, effect_id, tool, tool_version, reversibility, state, outcome, payload, payload_sha256, result,
    error, request_key, request_sha256, attempt, traceparent, registered_at, executed_at, version
  FROM unnest($5::effect_written[])
  ON CONFLICT (org, session_id, step_index) DO UPDATE
  SET
    state = EXCLUDED.state, outcome = EXCLUDED.outcome, result = EXCLUDED.result, error = EXCLUDED.error, attempt = EXCLUDED.attempt,
    executed_at = EXCLUDED.executed_at, version = EXCLUDED.version
  WHERE e.effect_id = EXCLUDED.effect_id AND e.version = EXCLUDED.version - 1
  RETURNING step_index
),
put_approvals AS (
  INSERT INTO approvals AS a (
    org, session_id, step_index, state, requested_by, requested_at, expires_at, ttl_seconds, decided_at, decided_by, claimed_approver,
    reason, is_continued, released_at, released_to, release_key
  )
  SELECT
    $1::org_name, session_id, step_index, state, requested_by, requested_at, expires_at, ttl_seconds, decided_at, decided_by,
    claimed_approver, reason, is_continued, released_at, released_to, release_key
  FROM unnest($6::approval_written[])
  ON CONFLICT (org, session_id, step_index) DO UPDATE
  SET
    state = EXCLUDED.state, decided_at = EXCLUDED.decided_at, decided_by = EXCLUDED.decided_by,
    claimed_approver = EXCLUDED.claimed_approver, reason = EXCLUDED.reason, is_continued = EXCLUDED.is_continued,
    released_at = EXCLUDED.released_at, released_to = EXCLUDED.released_to, release_key = EXCLUDED.release_key
  WHERE a.requested_at = EXCLUDED.requested_at AND a.state IN ('pending', 'approved')
  RETURNING step_index
),
put_undo_entries AS (
  INSERT INTO undo_stack AS u (org, session_id, stack_position, undo_id, state, compensation, by_hand, registered_at, compensated_at)
  SELECT $1::org_name, session_id, stack_position, undo_id, state, compensation, by_hand, registered_at, compensated_at
  FROM unnest($7::undo_written[])
  ON CONFLICT (org, session_id, stack_position) DO UPDATE
  SET state = EXCLUDED.state, by_hand = EXCLUDED.by_hand, compensated_at = EXCLUDED.compensated_at
  WHERE u.undo_id = EXCLUDED.undo_id AND u.state NOT IN ('compensated', 'skipped')
  RETURNING stack_position
),
put_calls AS (
  INSERT INTO outgoing_calls AS o (
    org, session_id, call_id, kind, step_index, destination, url, body, outcome, attempts, failures, interrupted, polls, is_attempt_open,
    may_be_processing, poll_url, last_status, last_error, due_at, first_sent_at, deadline_at, leased_by, leased_until, epoch
  )
  SELECT
    $1::org_name, session_id, call_id, kind, step_index, destination, url, body, outcome, attempts, failures, interrupted, polls,
    is_attempt_open, may_be_processing, poll_url, last_status, last_error, due_at, first_sent_at, deadline_at,
    CASE WHEN due_at IS NOT NULL THEN $2::text END,
    CASE WHEN due_at IS NOT NULL THEN clock_timestamp() + make_interval(secs => $3) END,
    epoch
  FROM unnest($8::call_written[])
  ON CONFLICT (org, session_id, call_id) DO UPDATE
  SET
    destination = EXCLUDED.destination, url = EXCLUDED.url, body = EXCLUDED.body, outcome = EXCLUDED.outcome,
    attempts = EXCLUDED.attempts, failures = EXCLUDED.failures, interrupted = EXCLUDED.interrupted, polls = EXCLUDED.polls,
    is_attempt_open = EXCLUDED.is_attempt_open, may_be_processing = EXCLUDED.may_be_processing, poll_url = EXCLUDED.poll_url,
    last_status = EXCLUDED.last_status, last_error = EXCLUDED.last_error, due_at = EXCLUDED.due_at,
    first_sent_at = EXCLUDED.first_sent_at, deadline_at = EXCLUDED.deadline_at,
    leased_by = CASE WHEN EXCLUDED.due_at IS NOT NULL THEN coalesce(EXCLUDED.leased_by, o.leased_by) END,
    leased_until = CASE WHEN EXCLUDED.due_at IS NOT NULL THEN coalesce(EXCLUDED.leased_until, o.leased_until) END
  WHERE o.epoch = EXCLUDED.epoch
  RETURNING call_id
),
entries AS (
  INSERT INTO journal (org, session_id, seq, kind, step, actor, at, body, content, prev_hash, hash)
  SELECT $1::org_name, session_id, seq, kind, step, actor, at, body, content, prev_hash, hash
  FROM unnest($9::entry_written[])
  RETURNING seq
)
SELECT
  (SELECT count(*) FROM put_sessions) AS sessions,
  (SELECT count(*) FROM put_effects) AS effects,
  (SELECT count(*) FROM put_approvals) AS approvals,
  (SELECT count(*) FROM put_undo_entries) AS undo_entries,
  (SELECT count(*) FROM put_calls) AS calls,
  (SELECT count(*) FROM entries) AS entries,
  (SELECT count(pg_notify('countermand_moved', $1 || '/' || moved)) FROM unnest($10::text[]) AS moved) AS moved,
  CASE WHEN $11 THEN pg_notify('countermand_due', '') IS NOT NULL END AS woken
"""


async def write(tx: Transaction, changes: Sequence[Changes], *, lease: Lease | None = None) -> None:
    """Write the changes of sessions, each of which this transaction has locked, or opens.

    Calls that stay due are leased to `lease.worker`; without a lease they keep theirs, and new ones wait for the orchestrator, which is
    woken. Notifications go out with the commit.

    Raises:
        WriteConflict: a guard did not hold (for a call: a newer epoch owns it); the transaction must be rolled back.
    """
    rows = (
        [shapes.session_row(one) for one in changes],
        list(chain.from_iterable(map(shapes.effect_rows, changes))),
        list(chain.from_iterable(map(shapes.approval_rows, changes))),
        list(chain.from_iterable(map(shapes.undo_rows, changes))),
        list(chain.from_iterable(map(shapes.call_rows, changes))),
        list(chain.from_iterable(map(shapes.entry_rows, changes))),
    )
    row = await tx.connection.fetchrow(
        WRITE_SQL,
        tx.org,
        lease.worker if lease else None,
        lease.seconds if lease else None,
        *rows,
        [one.after.session_id for one in changes if one.wakes_waiters],
        lease is None and any(change.after.due_at is not None for one in changes for change in one.calls),
    )
    expected = tuple(map(len, rows))
    written = None if row is None else tuple(row)[: len(rows)]
    if written != expected:
        sessions = ", ".join(one.after.session_id for one in changes)
        raise WriteConflict(f"expected to write {expected} rows, the guards let through {written}, for {sessions} of {tx.org}")
