"""Write what decisions changed, all of it in one statement. Must not decide: every row is guarded by what the decision saw."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from app.domain import compensation
from app.domain.draft import Change, Changes
from app.domain.model import Effect, OutgoingCall, SessionId, UndoEntry
from app.storage.database import Transaction, WriteConflict

Row = TypeVar("Row", Effect, UndoEntry, OutgoingCall)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Who keeps the calls that a write leaves due, and for how long (seconds) from now."""

    worker: str
    seconds: float


# $1 org; $2 worker and $3 lease seconds (both NULL for writers that are no worker); then one array per column and table.
# The foreign keys and the one-call-due constraint are checked after the statement, so the order of its parts does not matter.
WRITE_SQL = """
WITH session AS (
  UPDATE sessions AS s
  SET
    state = c.state::session_state, halt_reason = c.halt_reason::halt_reason, clean = c.clean, pivoted = c.pivoted,
    late_effect = c.late_effect, last_step = c.last_step, failed_at = c.failed_at, updated_at = c.updated_at,
    active_at = c.active_at, version = c.version, revision = c.revision, journal_seq = c.journal_seq,
    journal_hash = c.journal_hash, journal_at = c.journal_at
  FROM unnest(
    $4::text[], $5::text[], $6::bigint[], $7::text[], $8::text[], $9::boolean[], $10::boolean[], $11::boolean[], $12::integer[],
    $13::timestamptz[], $14::timestamptz[], $15::timestamptz[], $16::bigint[], $17::bigint[], $18::bigint[], $19::bytea[],
    $20::timestamptz[]
  ) AS c (
    session_id, state_before, revision_before, state, halt_reason, clean, pivoted, late_effect, last_step,
    failed_at, updated_at, active_at, version, revision, journal_seq, journal_hash,
    journal_at
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
    $21::text[], $22::integer[], $23::uuid[], $24::text[], $25::text[], $26::text[], $27::text[], $28::bytea[], $29::bytea[],
    $30::bytea[], $31::text[], $32::text[], $33::bytea[], $34::integer[], $35::text[], $36::timestamptz[], $37::timestamptz[],
    $38::bigint[], $39::integer[]
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
    $40::text[], $41::integer[], $42::text[], $43::bigint[], $44::text[], $45::text[], $46::bytea[], $47::text[], $48::integer[],
    $49::timestamptz[], $50::bigint[]
  ) AS c (
    session_id, step_index, state_before, version_before, state, outcome, result, error, attempt, executed_at, version
  )
  WHERE e.org = $1 AND e.session_id = c.session_id AND e.step_index = c.step_index
    AND e.state = c.state_before::effect_state AND e.version = c.version_before
  RETURNING e.step_index
),
new_approvals AS (
  INSERT INTO approvals (org, session_id, step_index, requested_by, requested_at, expires_at)
  SELECT $1, c.session_id, c.step_index, c.requested_by, c.requested_at, c.expires_at
  FROM unnest($51::text[], $52::integer[], $53::text[], $54::timestamptz[], $55::timestamptz[])
    AS c (session_id, step_index, requested_by, requested_at, expires_at)
  RETURNING step_index
),
new_undo_entries AS (
  INSERT INTO undo_stack (org, session_id, stack_position, undo_id, state, compensation, by_hand, registered_at, compensated_at)
  SELECT
    $1, c.session_id, c.stack_position, c.undo_id, c.state::undo_state, c.compensation, c.by_hand, c.registered_at, c.compensated_at
  FROM unnest(
    $56::text[], $57::integer[], $58::uuid[], $59::text[], $60::bytea[], $61::boolean[], $62::timestamptz[], $63::timestamptz[]
  ) AS c (session_id, stack_position, undo_id, state, compensation, by_hand, registered_at, compensated_at)
  RETURNING stack_position
),
moved_undo_entries AS (
  UPDATE undo_stack AS u
  SET state = c.state::undo_state, by_hand = c.by_hand, compensated_at = c.compensated_at
  FROM unnest($64::text[], $65::integer[], $66::text[], $67::text[], $68::boolean[], $69::timestamptz[])
    AS c (session_id, stack_position, state_before, state, by_hand, compensated_at)
  WHERE u.org = $1 AND u.session_id = c.session_id AND u.stack_position = c.stack_position AND u.state = c.state_before::undo_state
  RETURNING u.stack_position
),
new_calls AS (
  INSERT INTO outgoing_calls (
    org, session_id, call_id, step_index, destination, url, body, outcome, attempts, failures, interrupted, polls, is_attempt_open,
    may_be_processing, poll_url, last_status, last_error, due_at, first_sent_at, deadline_at, leased_by, leased_until, epoch
  )
  SELECT
    $1, c.session_id, c.call_id, c.step_index, c.destination, c.url, c.body, c.outcome::outcome, c.attempts, c.failures, c.interrupted,
    c.polls, c.is_attempt_open, c.may_be_processing, c.poll_url, c.last_status, c.last_error, c.due_at, c.first_sent_at, c.deadline_at,
    CASE WHEN c.due_at IS NOT NULL THEN $2::text END,
    CASE WHEN c.due_at IS NOT NULL THEN clock_timestamp() + make_interval(secs => $3) END,
    c.epoch
  FROM unnest(
    $70::text[], $71::uuid[], $72::integer[], $73::text[], $74::text[], $75::bytea[], $76::text[], $77::integer[], $78::integer[],
    $79::integer[], $80::integer[], $81::boolean[], $82::boolean[], $83::text[], $84::integer[], $85::text[], $86::timestamptz[],
    $87::timestamptz[], $88::timestamptz[], $89::bigint[]
  ) AS c (
    session_id, call_id, step_index, destination, url, body, outcome, attempts, failures, interrupted, polls, is_attempt_open,
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
    leased_by = CASE WHEN c.due_at IS NOT NULL THEN coalesce($2, o.leased_by) END,
    leased_until = CASE WHEN c.due_at IS NOT NULL THEN coalesce(clock_timestamp() + make_interval(secs => $3), o.leased_until) END
  FROM unnest(
    $90::text[], $91::uuid[], $92::text[], $93::text[], $94::bytea[], $95::text[], $96::integer[], $97::integer[], $98::integer[],
    $99::integer[], $100::boolean[], $101::boolean[], $102::text[], $103::integer[], $104::text[], $105::timestamptz[],
    $106::timestamptz[], $107::bigint[]
  ) AS c (
    session_id, call_id, destination, url, body, outcome, attempts, failures, interrupted, polls, is_attempt_open, may_be_processing,
    poll_url, last_status, last_error, due_at, first_sent_at, epoch_before
  )
  WHERE o.org = $1 AND o.session_id = c.session_id AND o.call_id = c.call_id AND o.epoch = c.epoch_before
  RETURNING o.call_id
),
entries AS (
  INSERT INTO journal (org, session_id, seq, kind, step, actor, at, body, content, prev_hash, hash)
  SELECT $1, c.session_id, c.seq, c.kind::entry_kind, c.step, c.actor, c.at, c.body, c.content, c.prev_hash, c.hash
  FROM unnest(
    $108::text[], $109::bigint[], $110::text[], $111::integer[], $112::text[], $113::text[], $114::bytea[], $115::bytea[], $116::bytea[],
    $117::bytea[]
  ) AS c (session_id, seq, kind, step, actor, at, body, content, prev_hash, hash)
  RETURNING seq
)
SELECT
  (SELECT count(*) FROM session) AS sessions,
  (SELECT count(*) FROM new_effects) + (SELECT count(*) FROM moved_effects) AS effects,
  (SELECT count(*) FROM new_approvals) AS approvals,
  (SELECT count(*) FROM new_undo_entries) + (SELECT count(*) FROM moved_undo_entries) AS undo_entries,
  (SELECT count(*) FROM new_calls) + (SELECT count(*) FROM moved_calls) AS calls,
  (SELECT count(*) FROM entries) AS entries,
  (SELECT count(pg_notify('countermand_moved', $1 || '/' || moved.session_id)) FROM unnest($118::text[]) AS moved (session_id)) AS moved,
  CASE WHEN $119 THEN pg_notify('countermand_due', '') IS NOT NULL END AS woken
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
        *_session_columns(batch),
        *_new_effect_columns(batch),
        *_moved_effect_columns(batch),
        *_approval_columns(batch),
        *_new_undo_columns(batch),
        *_moved_undo_columns(batch),
        *_new_call_columns(batch),
        *_moved_call_columns(batch),
        *_entry_columns(batch),
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


def _columns(rows: Iterable[tuple[Any, ...]], width: int) -> tuple[list[Any], ...]:
    """Turn rows into columns; `width` empty ones where there are no rows."""
    columns = tuple(list(column) for column in zip(*rows, strict=True))
    return columns or tuple([] for _ in range(width))


def _new(batch: Sequence[Changes], kind: type[Row]) -> Iterable[tuple[SessionId, Row]]:
    for changes in batch:
        for change in _changes_of(changes, kind):
            if change.before is None:
                yield changes.after.session_id, change.after


def _moved(batch: Sequence[Changes], kind: type[Row]) -> Iterable[tuple[SessionId, Row, Row]]:
    for changes in batch:
        for change in _changes_of(changes, kind):
            if change.before is not None:
                yield changes.after.session_id, change.before, change.after


def _changes_of(changes: Changes, kind: type[Row]) -> Sequence[Change[Row]]:
    by_kind: dict[type, Any] = {Effect: changes.effects, UndoEntry: changes.undo_entries, OutgoingCall: changes.calls}
    found: Sequence[Change[Row]] = by_kind[kind]
    return found


def _session_columns(batch: Sequence[Changes]) -> tuple[list[Any], ...]:
    rows = (
        (
            changes.after.session_id,
            changes.before.state,
            changes.before.revision,
            changes.after.state,
            changes.after.halt_reason,
            changes.after.clean,
            changes.after.pivoted,
            changes.after.late_effect,
            changes.after.last_step,
            changes.after.failed_at,
            changes.after.updated_at,
            changes.after.active_at,
            changes.after.version,
            changes.after.revision,
            changes.after.head.seq,
            changes.after.head.digest,
            changes.after.head.at,
        )
        for changes in batch
    )
    return _columns(rows, 17)


def _new_effect_columns(batch: Sequence[Changes]) -> tuple[list[Any], ...]:
    rows = (
        (
            session_id,
            effect.step_index,
            effect.effect_id,
            effect.tool,
            effect.reversibility,
            effect.state,
            effect.outcome,
            effect.payload,
            effect.payload_sha256,
            effect.result,
            effect.error,
            effect.request_key,
            effect.request_sha256,
            effect.attempt,
            effect.traceparent,
            effect.registered_at,
            effect.executed_at,
            effect.version,
            effect.tool_version,
        )
        for session_id, effect in _new(batch, Effect)
    )
    return _columns(rows, 19)


def _moved_effect_columns(batch: Sequence[Changes]) -> tuple[list[Any], ...]:
    rows = (
        (
            session_id,
            after.step_index,
            before.state,
            before.version,
            after.state,
            after.outcome,
            after.result,
            after.error,
            after.attempt,
            after.executed_at,
            after.version,
        )
        for session_id, before, after in _moved(batch, Effect)
    )
    return _columns(rows, 11)


def _approval_columns(batch: Sequence[Changes]) -> tuple[list[Any], ...]:
    rows = (
        (changes.after.session_id, approval.step_index, approval.requested_by, approval.requested_at, approval.expires_at)
        for changes in batch
        for approval in changes.approvals
    )
    return _columns(rows, 5)


def _new_undo_columns(batch: Sequence[Changes]) -> tuple[list[Any], ...]:
    rows = (
        (
            session_id,
            entry.stack_position,
            entry.undo_id,
            entry.state,
            compensation.write(entry.compensation),
            entry.by_hand,
            entry.registered_at,
            entry.compensated_at,
        )
        for session_id, entry in _new(batch, UndoEntry)
    )
    return _columns(rows, 8)


def _moved_undo_columns(batch: Sequence[Changes]) -> tuple[list[Any], ...]:
    rows = (
        (session_id, after.stack_position, before.state, after.state, after.by_hand, after.compensated_at)
        for session_id, before, after in _moved(batch, UndoEntry)
    )
    return _columns(rows, 6)


def _new_call_columns(batch: Sequence[Changes]) -> tuple[list[Any], ...]:
    rows = (
        (
            session_id,
            call.call_id,
            call.step_index,
            call.destination,
            call.url,
            call.body,
            call.outcome,
            call.attempts,
            call.failures,
            call.interrupted,
            call.polls,
            call.is_attempt_open,
            call.may_be_processing,
            call.poll_url,
            call.last_status,
            call.last_error,
            call.due_at,
            call.first_sent_at,
            call.deadline_at,
            call.epoch,
        )
        for session_id, call in _new(batch, OutgoingCall)
    )
    return _columns(rows, 20)


def _moved_call_columns(batch: Sequence[Changes]) -> tuple[list[Any], ...]:
    rows = (
        (
            session_id,
            after.call_id,
            after.destination,
            after.url,
            after.body,
            after.outcome,
            after.attempts,
            after.failures,
            after.interrupted,
            after.polls,
            after.is_attempt_open,
            after.may_be_processing,
            after.poll_url,
            after.last_status,
            after.last_error,
            after.due_at,
            after.first_sent_at,
            before.epoch,
        )
        for session_id, before, after in _moved(batch, OutgoingCall)
    )
    return _columns(rows, 18)


def _entry_columns(batch: Sequence[Changes]) -> tuple[list[Any], ...]:
    rows = (
        (
            changes.after.session_id,
            entry.seq,
            entry.kind,
            entry.step,
            entry.actor,
            entry.at,
            entry.body,
            entry.content,
            entry.prev_hash,
            entry.digest,
        )
        for changes in batch
        for entry in changes.entries
    )
    return _columns(rows, 10)
