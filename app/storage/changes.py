"""Write what decisions changed, all of it in one statement. Must not decide: every row is guarded by what the decision saw."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.domain.draft import Changes
from app.storage.columns import columns_of
from app.storage.database import Transaction, WriteConflict


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Who keeps the calls that a write leaves due, and for how long (seconds) from now."""

    worker: str
    seconds: float


# $1 org; $2 worker and $3 lease seconds (both NULL for writers that are no worker); then one array per column and table.
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
    $4::text[], $5::text[], $6::bigint[], $7::text[], $8::text[], $9::boolean[], $10::boolean[], $11::boolean[], $12::integer[],
    $13::timestamptz[], $14::timestamptz[], $15::boolean[], $16::timestamptz[], $17::timestamptz[], $18::bigint[], $19::bigint[],
    $20::bigint[], $21::bytea[],
    $22::timestamptz[]
  ) AS c (
    session_id, state_before, revision_before, state, halt_reason, clean, pivoted, late_effect, last_step,
    failed_at, halted_at, halt_ordered, updated_at, active_at, version, revision, journal_seq, journal_hash, journal_at
  )
  WHERE s.org = $1 AND s.session_id = c.session_id AND s.state = c.state_before::session_state AND s.revision = c.revision_before
  RETURNING s.session_id
),
new_effects AS (
  INSERT INTO effect_log (
    org, session_id, step_index, effect_id, tool, reversibility, state, outcome, payload, payload_sha256, result, error,
    request_key, request_sha256, attempt, traceparent, registered_at, executed_at, version, tool_version
  )
  SELECT
    $1, c.session_id, c.step_index, c.effect_id, c.tool, c.reversibility::reversibility, c.state::effect_state, c.outcome::outcome,
    c.payload, c.payload_sha256, c.result, c.error, c.request_key, c.request_sha256, c.attempt, c.traceparent, c.registered_at,
    c.executed_at, c.version, c.tool_version
  FROM unnest(
    $23::text[], $24::integer[], $25::uuid[], $26::text[], $27::text[], $28::text[], $29::text[], $30::bytea[], $31::bytea[],
    $32::bytea[], $33::text[], $34::text[], $35::bytea[], $36::integer[], $37::text[], $38::timestamptz[], $39::timestamptz[],
    $40::bigint[], $41::integer[]
  ) AS c (
    session_id, step_index, effect_id, tool, reversibility, state, outcome, payload, payload_sha256, result, error, request_key,
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
    $42::text[], $43::integer[], $44::text[], $45::bigint[], $46::text[], $47::text[], $48::bytea[], $49::text[], $50::integer[],
    $51::timestamptz[], $52::bigint[]
  ) AS c (
    session_id, step_index, state_before, version_before, state, outcome, result, error, attempt, executed_at, version
  )
  WHERE e.org = $1 AND e.session_id = c.session_id AND e.step_index = c.step_index
    AND e.state = c.state_before::effect_state AND e.version = c.version_before
  RETURNING e.step_index
),
new_approvals AS (
  INSERT INTO approvals (org, session_id, step_index, state, requested_by, requested_at, expires_at, ttl_seconds, is_continued)
  SELECT $1, c.session_id, c.step_index, c.state::approval_state, c.requested_by, c.requested_at, c.expires_at, c.ttl_seconds, false
  FROM unnest($53::text[], $54::integer[], $55::text[], $56::text[], $57::timestamptz[], $58::timestamptz[], $59::integer[])
    AS c (session_id, step_index, state, requested_by, requested_at, expires_at, ttl_seconds)
  RETURNING step_index
),
moved_approvals AS (
  UPDATE approvals AS a
  SET
    state = c.state::approval_state, decided_at = c.decided_at, decided_by = c.decided_by, claimed_approver = c.claimed_approver,
    reason = c.reason, is_continued = c.is_continued, released_at = c.released_at, released_to = c.released_to,
    release_key = c.release_key
  FROM unnest(
    $60::text[], $61::integer[], $62::text[], $63::text[], $64::timestamptz[], $65::text[], $66::text[], $67::text[], $68::boolean[],
    $69::timestamptz[], $70::text[], $71::text[]
  ) AS c (
    session_id, step_index, state_before, state, decided_at, decided_by, claimed_approver, reason, is_continued, released_at, released_to,
    release_key
  )
  WHERE a.org = $1 AND a.session_id = c.session_id AND a.step_index = c.step_index AND a.state = c.state_before::approval_state
  RETURNING a.step_index
),
new_undo_entries AS (
  INSERT INTO undo_stack (org, session_id, stack_position, undo_id, state, compensation, by_hand, registered_at, compensated_at)
  SELECT
    $1, c.session_id, c.stack_position, c.undo_id, c.state::undo_state, c.compensation, c.by_hand, c.registered_at, c.compensated_at
  FROM unnest(
    $72::text[], $73::integer[], $74::uuid[], $75::text[], $76::bytea[], $77::boolean[], $78::timestamptz[], $79::timestamptz[]
  ) AS c (session_id, stack_position, undo_id, state, compensation, by_hand, registered_at, compensated_at)
  RETURNING stack_position
),
moved_undo_entries AS (
  UPDATE undo_stack AS u
  SET state = c.state::undo_state, by_hand = c.by_hand, compensated_at = c.compensated_at
  FROM unnest($80::text[], $81::integer[], $82::text[], $83::text[], $84::boolean[], $85::timestamptz[])
    AS c (session_id, stack_position, state_before, state, by_hand, compensated_at)
  WHERE u.org = $1 AND u.session_id = c.session_id AND u.stack_position = c.stack_position AND u.state = c.state_before::undo_state
  RETURNING u.stack_position
),
new_calls AS (
  INSERT INTO outgoing_calls (
    org, session_id, call_id, kind, step_index, destination, url, body, outcome, attempts, failures, interrupted, polls, is_attempt_open,
    may_be_processing, poll_url, last_status, last_error, due_at, first_sent_at, deadline_at, leased_by, leased_until, epoch
  )
  SELECT
    $1, c.session_id, c.call_id, c.kind::call_kind, c.step_index, c.destination, c.url, c.body, c.outcome::outcome, c.attempts, c.failures,
    c.interrupted, c.polls, c.is_attempt_open, c.may_be_processing, c.poll_url, c.last_status, c.last_error, c.due_at, c.first_sent_at,
    c.deadline_at,
    CASE WHEN c.due_at IS NOT NULL THEN $2::text END,
    CASE WHEN c.due_at IS NOT NULL THEN clock_timestamp() + make_interval(secs => $3) END,
    c.epoch
  FROM unnest(
    $86::text[], $87::uuid[], $88::text[], $89::integer[], $90::text[], $91::text[], $92::bytea[], $93::text[], $94::integer[],
    $95::integer[],
    $96::integer[], $97::integer[], $98::boolean[], $99::boolean[], $100::text[], $101::integer[], $102::text[], $103::timestamptz[],
    $104::timestamptz[], $105::timestamptz[], $106::bigint[]
  ) AS c (
    session_id, call_id, kind, step_index, destination, url, body, outcome, attempts, failures, interrupted, polls, is_attempt_open,
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
    leased_by = CASE WHEN c.due_at IS NOT NULL THEN coalesce($2, o.leased_by) END,
    leased_until = CASE WHEN c.due_at IS NOT NULL THEN coalesce(clock_timestamp() + make_interval(secs => $3), o.leased_until) END
  FROM unnest(
    $107::text[], $108::uuid[], $109::text[], $110::text[], $111::bytea[], $112::text[], $113::integer[], $114::integer[], $115::integer[],
    $116::integer[], $117::boolean[], $118::boolean[], $119::text[], $120::integer[], $121::text[], $122::timestamptz[],
    $123::timestamptz[], $124::timestamptz[], $125::bigint[]
  ) AS c (
    session_id, call_id, destination, url, body, outcome, attempts, failures, interrupted, polls, is_attempt_open, may_be_processing,
    poll_url, last_status, last_error, due_at, first_sent_at, deadline_at, epoch_before
  )
  WHERE o.org = $1 AND o.session_id = c.session_id AND o.call_id = c.call_id AND o.epoch = c.epoch_before
  RETURNING o.call_id
),
entries AS (
  INSERT INTO journal (org, session_id, seq, kind, step, actor, at, body, content, prev_hash, hash)
  SELECT $1, c.session_id, c.seq, c.kind::entry_kind, c.step, c.actor, c.at, c.body, c.content, c.prev_hash, c.hash
  FROM unnest(
    $126::text[], $127::bigint[], $128::text[], $129::integer[], $130::text[], $131::text[], $132::bytea[], $133::bytea[], $134::bytea[],
    $135::bytea[]
  ) AS c (session_id, seq, kind, step, actor, at, body, content, prev_hash, hash)
  RETURNING seq
)
SELECT
  (SELECT count(*) FROM session) AS sessions,
  (SELECT count(*) FROM new_effects) + (SELECT count(*) FROM moved_effects) AS effects,
  (SELECT count(*) FROM new_approvals) + (SELECT count(*) FROM moved_approvals) AS approvals,
  (SELECT count(*) FROM new_undo_entries) + (SELECT count(*) FROM moved_undo_entries) AS undo_entries,
  (SELECT count(*) FROM new_calls) + (SELECT count(*) FROM moved_calls) AS calls,
  (SELECT count(*) FROM entries) AS entries,
  (SELECT count(pg_notify('countermand_moved', $1 || '/' || moved.session_id)) FROM unnest($136::text[]) AS moved (session_id)) AS moved,
  CASE WHEN $137 THEN pg_notify('countermand_due', '') IS NOT NULL END AS woken
"""


async def write(tx: Transaction, batch: Sequence[Changes], *, lease: Lease | None = None) -> None:
    """Write the changes of several sessions of one org, each locked before by this transaction.

    Calls that stay due are leased to `lease.worker`; without a lease they keep theirs, and new ones wait for the orchestrator, which is
    woken. Notifications go out with the commit.

    Raises:
        WriteConflict: a guard did not hold (for a call: a newer epoch owns it); the transaction must be rolled back.
    """
    arguments = [
        tx.org,
        lease.worker if lease else None,
        lease.seconds if lease else None,
        *columns_of(batch),
        [changes.after.session_id for changes in batch if changes.wakes_waiters],
        lease is None and any(change.after.due_at is not None for changes in batch for change in changes.calls),
    ]
    row = await tx.connection.fetchrow(WRITE_SQL, *arguments)
    if row is None:
        raise AssertionError("a SELECT without FROM returns one row")
    expected = {
        "sessions": len(batch),
        "effects": sum(len(changes.effects) for changes in batch),
        "approvals": sum(len(changes.approvals) for changes in batch),
        "undo_entries": sum(len(changes.undo_entries) for changes in batch),
        "calls": sum(len(changes.calls) for changes in batch),
        "entries": sum(len(changes.entries) for changes in batch),
    }
    written = {name: row[name] for name in expected}
    if written != expected:
        sessions = ", ".join(changes.after.session_id for changes in batch)
        message = f"expected to write {expected}, the guards let through {written}, for sessions {sessions} of {tx.org}"
        raise WriteConflict(message)
