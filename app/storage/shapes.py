"""Turn the changes of decisions into rows, in the shapes that the database reads many of at once. Must not choose what is written.

Each function's rows are of the type that migration 0007 made for them, column by column.
"""

from collections.abc import Iterator
from typing import Any

from app.domain import compensation
from app.domain.draft import Changes


def session_row(changes: Changes) -> tuple[Any, ...]:
    """Return the session, as `session_written`; the revision is the one after that which the decision saw."""
    session = changes.after
    return (
        session.session_id,
        session.owner,
        session.agent,
        session.metadata,
        session.state,
        session.halt_reason,
        session.clean,
        session.pivoted,
        session.late_effect,
        session.last_step,
        session.idle_seconds,
        session.deadline_at,
        session.failed_at,
        session.halted_at,
        session.halt_ordered,
        session.created_at,
        session.updated_at,
        session.active_at,
        session.version,
        changes.before.revision + 1,
        session.head.seq,
        session.head.digest,
        session.head.at,
    )


def effect_rows(changes: Changes) -> Iterator[tuple[Any, ...]]:
    """Yield the effects, as `effect_written`; the version is the one after that which the decision saw."""
    for change in changes.effects:
        effect = change.after
        yield (
            changes.after.session_id,
            effect.step_index,
            effect.effect_id,
            effect.tool,
            effect.tool_version,
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
            1 if change.before is None else change.before.version + 1,
        )


def approval_rows(changes: Changes) -> Iterator[tuple[Any, ...]]:
    """Yield the questions to people, as `approval_written`."""
    for change in changes.approvals:
        approval = change.after
        yield (
            changes.after.session_id,
            approval.step_index,
            approval.state,
            approval.requested_by,
            approval.requested_at,
            approval.expires_at,
            approval.ttl_seconds,
            approval.decided_at,
            approval.decided_by,
            approval.claimed_approver,
            approval.reason,
            approval.is_continued,
            approval.released_at,
            approval.released_to,
            approval.release_key,
        )


def undo_rows(changes: Changes) -> Iterator[tuple[Any, ...]]:
    """Yield the undo entries, as `undo_written`."""
    for change in changes.undo_entries:
        entry = change.after
        yield (
            changes.after.session_id,
            entry.stack_position,
            entry.undo_id,
            entry.state,
            compensation.write(entry.compensation),
            entry.by_hand,
            entry.registered_at,
            entry.compensated_at,
        )


def call_rows(changes: Changes) -> Iterator[tuple[Any, ...]]:
    """Yield the outgoing calls, as `call_written`; the epoch is that which the decision knew."""
    for change in changes.calls:
        call = change.after
        yield (
            changes.after.session_id,
            call.call_id,
            call.kind,
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
            call.epoch if change.before is None else change.before.epoch,
        )


def entry_rows(changes: Changes) -> Iterator[tuple[Any, ...]]:
    """Yield the journal entries, as `entry_written`."""
    for entry in changes.entries:
        yield (
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
