"""Write what decisions changed, all of it in one statement. Must not decide: every row is guarded by what the decision saw."""

from dataclasses import dataclass

from app.domain.draft import Changes
from app.storage.columns import bounds_of, columns_of
from app.storage.database import Transaction, WriteConflict


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Who keeps the calls that a write leaves due, and for how long (seconds) from now."""

    worker: str
    seconds: float


# $1 org, $2 session; $3 worker and $4 lease seconds (both NULL for writers that are no worker); $5 to $8 the lowest and the highest of the
# steps and of the calls that are moved (NULL where none is); then one array per column and table; at the end whom to wake.
# Those bounds say nothing new about which rows are meant, but without a join: a planner that expects little of a session, or on a new
# database of an org, would read all of it and throw away what does not join, for each undo again (see calls.LOCK_CALL_SQL).
# The foreign keys and the one-undo-due constraint are checked after the statement, so the order of its parts does not matter.
WRITE_SQL = """
WITH session AS (
  UPDATE sessions AS s
  SET
    state = c.state::session_state, halt_reason = c.halt_reason::halt_reason, clean = c.clean, pivoted = c.pivoted,
    late_effect = c.late_effect, last_step = c.last_step, failed_at = c.failed_at, halted_at = c.halted_at,
    halt_ordered = c.halt_ordered, updated_at = c.updated_at, active_at = c.active_at, version = c.version, revision = c.revision,
    journal_seq = c.journal_seq,
    journal_hash = c.journal_hash, journal_at = c.journal_at
  FROM unnest(
    $9::text[], $10::bigint[], $11::text[], $12::text[], $13::boolean[], $14::boolean[], $15::boolean[], $16::integer[],
    $17::timestamptz[], $18::timestamptz[], $19::boolean[], $20::timestamptz[], $21::timestamptz[], $22::bigint[], $23::bigint[],
    $24::bigint[], $25::bytea[],
    $26::timestamptz[]
  ) AS c (
    state_before, revision_before, state, halt_reason, clean, pivoted, late_effect, last_step,
    failed_at, halted_at, halt_ordered, updated_at, active_at, version, revision, journal_seq, journal_hash, journal_at
  )
  WHERE s.org = $1 AND s.session_id = $2 AND s.state = c.state_before::session_state AND s.revision = c.revision_before
  RETURNING s.session_id
),
new_effects AS (
  INSERT INTO effect_log (
    org, session_id, step_index, effect_id, tool, reversibility, state, outcome, payload, payload_sha256, result, error,
    request_key, request_sha256, attempt, traceparent, registered_at, executed_at, version, tool_version
  )
  SELECT
    $1, $2, c.step_index, c.effect_id, c.tool, c.reversibility::reversibility, c.state::effect_state, c.outcome::outcome,
    c.payload, c.payload_sha256, c.result, c.error, c.request_key, c.request_sha256, c.attempt, c.traceparent, c.registered_at,
    c.executed_at, c.version, c.tool_version
  FROM unnest(
    $27::integer[], $28::uuid[], $29::text[], $30::text[], $31::text[], $32::text[], $33::bytea[], $34::bytea[],
    $35::bytea[], $36::text[], $37::text[], $38::bytea[], $39::integer[], $40::text[], $41::timestamptz[], $42::timestamptz[],
    $43::bigint[], $44::integer[]
  ) AS c (
    step_index, effect_id, tool, reversibility, state, outcome, payload, payload_sha256, result, error, request_key,
    request_sha256, attempt, traceparent, registered_at, executed_at, version, tool_version
  )
  RETURNING step_index
),
moved_effects AS (
  UPDATE effect_log AS e
  SET
    state = c.state::effect_state, outcome = c.outcome::outcome, result = c.result, error = c.error, attempt = c.attempt,
    executed_at = c.executed_at, version = c.version
  FROM unnest(
    $45::integer[], $46::text[], $47::bigint[], $48::text[], $49::text[], $50::bytea[], $51::text[], $52::integer[],
    $53::timestamptz[], $54::bigint[]
  ) AS c (
    step_index, state_before, version_before, state, outcome, result, error, attempt, executed_at, version
  )
  WHERE e.org = $1 AND e.session_id = $2 AND e.step_index BETWEEN $5 AND $6 AND e.step_index = c.step_index
    AND e.state = c.state_before::effect_state AND e.version = c.version_before
  RETURNING e.step_index
),
new_approvals AS (
  INSERT INTO approvals (org, session_id, step_index, state, requested_by, requested_at, expires_at, ttl_seconds, is_continued)
  SELECT $1, $2, c.step_index, c.state::approval_state, c.requested_by, c.requested_at, c.expires_at, c.ttl_seconds, false
  FROM unnest($55::integer[], $56::text[], $57::text[], $58::timestamptz[], $59::timestamptz[], $60::integer[])
    AS c (step_index, state, requested_by, requested_at, expires_at, ttl_seconds)
  RETURNING step_index
),
moved_approvals AS (
  UPDATE approvals AS a
  SET
    state = c.state::approval_state, decided_at = c.decided_at, decided_by = c.decided_by, claimed_approver = c.claimed_approver,
    reason = c.reason, is_continued = c.is_continued, released_at = c.released_at, released_to = c.released_to,
    release_key = c.release_key
  FROM unnest(
    $61::integer[], $62::text[], $63::text[], $64::timestamptz[], $65::text[], $66::text[], $67::text[], $68::boolean[],
    $69::timestamptz[], $70::text[], $71::text[]
  ) AS c (
    step_index, state_before, state, decided_at, decided_by, claimed_approver, reason, is_continued, released_at, released_to,
    release_key
  )
  WHERE a.org = $1 AND a.session_id = $2 AND a.step_index BETWEEN $5 AND $6 AND a.step_index = c.step_index
    AND a.state = c.state_before::approval_state
  RETURNING a.step_index
),
new_undo_entries AS (
  INSERT INTO undo_stack (org, session_id, stack_position, undo_id, state, compensation, by_hand, registered_at, compensated_at)
  SELECT
    $1, $2, c.stack_position, c.undo_id, c.state::undo_state, c.compensation, c.by_hand, c.registered_at, c.compensated_at
  FROM unnest(
    $72::integer[], $73::uuid[], $74::text[], $75::bytea[], $76::boolean[], $77::timestamptz[], $78::timestamptz[]
  ) AS c (stack_position, undo_id, state, compensation, by_hand, registered_at, compensated_at)
  RETURNING stack_position
),
moved_undo_entries AS (
  UPDATE undo_stack AS u
  SET state = c.state::undo_state, by_hand = c.by_hand, compensated_at = c.compensated_at
  FROM unnest($79::integer[], $80::text[], $81::text[], $82::boolean[], $83::timestamptz[])
    AS c (stack_position, state_before, state, by_hand, compensated_at)
  WHERE u.org = $1 AND u.session_id = $2 AND u.stack_position BETWEEN $5 AND $6 AND u.stack_position = c.stack_position
    AND u.state = c.state_before::undo_state
  RETURNING u.stack_position
),
new_calls AS (
  INSERT INTO outgoing_calls (
    org, session_id, call_id, kind, step_index, destination, url, body, outcome, attempts, failures, interrupted, polls, is_attempt_open,
    may_be_processing, poll_url, last_status, last_error, due_at, first_sent_at, deadline_at, leased_by, leased_until, epoch
  )
  SELECT
    $1, $2, c.call_id, c.kind::call_kind, c.step_index, c.destination, c.url, c.body, c.outcome::outcome, c.attempts, c.failures,
    c.interrupted, c.polls, c.is_attempt_open, c.may_be_processing, c.poll_url, c.last_status, c.last_error, c.due_at, c.first_sent_at,
    c.deadline_at,
    CASE WHEN c.due_at IS NOT NULL THEN $3::text END,
    CASE WHEN c.due_at IS NOT NULL THEN clock_timestamp() + make_interval(secs => $4) END,
    c.epoch
  FROM unnest(
    $84::uuid[], $85::text[], $86::integer[], $87::text[], $88::text[], $89::bytea[], $90::text[], $91::integer[],
    $92::integer[],
    $93::integer[], $94::integer[], $95::boolean[], $96::boolean[], $97::text[], $98::integer[], $99::text[], $100::timestamptz[],
    $101::timestamptz[], $102::timestamptz[], $103::bigint[]
  ) AS c (
    call_id, kind, step_index, destination, url, body, outcome, attempts, failures, interrupted, polls, is_attempt_open,
    may_be_processing, poll_url, last_status, last_error, due_at, first_sent_at, deadline_at, epoch
  )
  RETURNING call_id
),
moved_calls AS (
  UPDATE outgoing_calls AS o
  SET
    destination = c.destination, url = c.url, body = c.body, outcome = c.outcome::outcome, attempts = c.attempts, failures = c.failures,
    interrupted = c.interrupted, polls = c.polls, is_attempt_open = c.is_attempt_open, may_be_processing = c.may_be_processing,
    poll_url = c.poll_url, last_status = c.last_status, last_error = c.last_error, due_at = c.due_at, first_sent_at = c.first_sent_at,
    deadline_at = c.deadline_at,
    leased_by = CASE WHEN c.due_at IS NOT NULL THEN coalesce($3, o.leased_by) END,
    leased_until = CASE WHEN c.due_at IS NOT NULL THEN coalesce(clock_timestamp() + make_interval(secs => $4), o.leased_until) END
  FROM unnest(
    $104::uuid[], $105::text[], $106::text[], $107::bytea[], $108::text[], $109::integer[], $110::integer[], $111::integer[],
    $112::integer[], $113::boolean[], $114::boolean[], $115::text[], $116::integer[], $117::text[], $118::timestamptz[],
    $119::timestamptz[], $120::timestamptz[], $121::bigint[]
  ) AS c (
    call_id, destination, url, body, outcome, attempts, failures, interrupted, polls, is_attempt_open, may_be_processing,
    poll_url, last_status, last_error, due_at, first_sent_at, deadline_at, epoch_before
  )
  WHERE o.org = $1 AND o.session_id = $2 AND o.call_id BETWEEN $7 AND $8 AND o.call_id = c.call_id
    AND o.epoch = c.epoch_before
  RETURNING o.call_id
),
entries AS (
  INSERT INTO journal (org, session_id, seq, kind, step, actor, at, body, content, prev_hash, hash)
  SELECT $1, $2, c.seq, c.kind::entry_kind, c.step, c.actor, c.at, c.body, c.content, c.prev_hash, c.hash
  FROM unnest(
    $122::bigint[], $123::text[], $124::integer[], $125::text[], $126::text[], $127::bytea[], $128::bytea[], $129::bytea[],
    $130::bytea[]
  ) AS c (seq, kind, step, actor, at, body, content, prev_hash, hash)
  RETURNING seq
)
SELECT
  (SELECT count(*) FROM session) AS sessions,
  (SELECT count(*) FROM new_effects) + (SELECT count(*) FROM moved_effects) AS effects,
  (SELECT count(*) FROM new_approvals) + (SELECT count(*) FROM moved_approvals) AS approvals,
  (SELECT count(*) FROM new_undo_entries) + (SELECT count(*) FROM moved_undo_entries) AS undo_entries,
  (SELECT count(*) FROM new_calls) + (SELECT count(*) FROM moved_calls) AS calls,
  (SELECT count(*) FROM entries) AS entries,
  CASE WHEN $131 THEN pg_notify('countermand_moved', $1 || '/' || $2) IS NOT NULL END AS moved,
  CASE WHEN $132 THEN pg_notify('countermand_due', '') IS NOT NULL END AS woken
"""


async def write(tx: Transaction, changes: Changes, *, lease: Lease | None = None) -> None:
    """Write the changes of one session, locked before by this transaction.

    Calls that stay due are leased to `lease.worker`; without a lease they keep theirs, and new ones wait for the orchestrator, which is
    woken. Notifications go out with the commit.

    Raises:
        WriteConflict: a guard did not hold (for a call: a newer epoch owns it); the transaction must be rolled back.
    """
    arguments = [
        tx.org,
        changes.after.session_id,
        lease.worker if lease else None,
        lease.seconds if lease else None,
        *bounds_of(changes),
        *columns_of(changes),
        changes.wakes_waiters,
        lease is None and any(change.after.due_at is not None for change in changes.calls),
    ]
    row = await tx.connection.fetchrow(WRITE_SQL, *arguments)
    if row is None:
        raise AssertionError("a SELECT without FROM returns one row")
    expected = {
        "sessions": 1,
        "effects": len(changes.effects),
        "approvals": len(changes.approvals),
        "undo_entries": len(changes.undo_entries),
        "calls": len(changes.calls),
        "entries": len(changes.entries),
    }
    written = {name: row[name] for name in expected}
    if written != expected:
        message = f"expected to write {expected}, the guards let through {written}, for session {changes.after.session_id} of {tx.org}"
        raise WriteConflict(message)
