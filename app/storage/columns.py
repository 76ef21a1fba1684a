"""Turn the changes of decisions into the columns of the one statement that writes them. Must not hold SQL, nor choose what is written."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from app.domain import compensation
from app.domain.draft import Change, Changes
from app.domain.model import Approval, CallId, Effect, OutgoingCall, StepIndex, UndoEntry

Row = TypeVar("Row", Effect, UndoEntry, OutgoingCall, Approval)


def columns_of(changes: Changes) -> list[list[Any]]:
    """Return one array per column and table, in the order of the parameters of `changes.WRITE_SQL` from $9 on."""
    return [
        *_session_columns(changes),
        *_new_effect_columns(changes),
        *_moved_effect_columns(changes),
        *_new_approval_columns(changes),
        *_moved_approval_columns(changes),
        *_new_undo_columns(changes),
        *_moved_undo_columns(changes),
        *_new_call_columns(changes),
        *_moved_call_columns(changes),
        *_entry_columns(changes),
    ]


def bounds_of(changes: Changes) -> list[StepIndex | CallId | None]:
    """Return the lowest and the highest of the steps that are moved, then of the calls; None where none is."""
    steps = [after.step_index for _, after in _moved(changes, Effect)]
    steps += [after.step_index for _, after in _moved(changes, Approval)]
    steps += [after.stack_position for _, after in _moved(changes, UndoEntry)]
    calls = [after.call_id for _, after in _moved(changes, OutgoingCall)]
    return [min(steps, default=None), max(steps, default=None), min(calls, default=None), max(calls, default=None)]


def _columns(rows: Iterable[tuple[Any, ...]], width: int) -> tuple[list[Any], ...]:
    """Turn rows into columns; `width` empty ones where there are no rows."""
    columns = tuple(list(column) for column in zip(*rows, strict=True))
    return columns or tuple([] for _ in range(width))


def _new(changes: Changes, kind: type[Row]) -> Iterable[Row]:
    for change in _changes_of(changes, kind):
        if change.before is None:
            yield change.after


def _moved(changes: Changes, kind: type[Row]) -> Iterable[tuple[Row, Row]]:
    for change in _changes_of(changes, kind):
        if change.before is not None:
            yield change.before, change.after


def _changes_of(changes: Changes, kind: type[Row]) -> Sequence[Change[Row]]:
    by_kind: dict[type, Any] = {
        Effect: changes.effects,
        UndoEntry: changes.undo_entries,
        OutgoingCall: changes.calls,
        Approval: changes.approvals,
    }
    found: Sequence[Change[Row]] = by_kind[kind]
    return found


def _session_columns(changes: Changes) -> tuple[list[Any], ...]:
    row = (
        changes.before.state,
        changes.before.revision,
        changes.after.state,
        changes.after.halt_reason,
        changes.after.clean,
        changes.after.pivoted,
        changes.after.late_effect,
        changes.after.last_step,
        changes.after.failed_at,
        changes.after.halted_at,
        changes.after.halt_ordered,
        changes.after.updated_at,
        changes.after.active_at,
        changes.after.version,
        changes.after.revision,
        changes.after.head.seq,
        changes.after.head.digest,
        changes.after.head.at,
    )
    return tuple([value] for value in row)


def _new_effect_columns(changes: Changes) -> tuple[list[Any], ...]:
    rows = (
        (
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
        for effect in _new(changes, Effect)
    )
    return _columns(rows, 18)


def _moved_effect_columns(changes: Changes) -> tuple[list[Any], ...]:
    rows = (
        (
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
        for before, after in _moved(changes, Effect)
    )
    return _columns(rows, 10)


def _new_approval_columns(changes: Changes) -> tuple[list[Any], ...]:
    rows = (
        (
            approval.step_index,
            approval.state,
            approval.requested_by,
            approval.requested_at,
            approval.expires_at,
            approval.ttl_seconds,
        )
        for approval in _new(changes, Approval)
    )
    return _columns(rows, 6)


def _moved_approval_columns(changes: Changes) -> tuple[list[Any], ...]:
    rows = (
        (
            after.step_index,
            before.state,
            after.state,
            after.decided_at,
            after.decided_by,
            after.claimed_approver,
            after.reason,
            after.is_continued,
            after.released_at,
            after.released_to,
            after.release_key,
        )
        for before, after in _moved(changes, Approval)
    )
    return _columns(rows, 11)


def _new_undo_columns(changes: Changes) -> tuple[list[Any], ...]:
    rows = (
        (
            entry.stack_position,
            entry.undo_id,
            entry.state,
            compensation.write(entry.compensation),
            entry.by_hand,
            entry.registered_at,
            entry.compensated_at,
        )
        for entry in _new(changes, UndoEntry)
    )
    return _columns(rows, 7)


def _moved_undo_columns(changes: Changes) -> tuple[list[Any], ...]:
    rows = (
        (after.stack_position, before.state, after.state, after.by_hand, after.compensated_at)
        for before, after in _moved(changes, UndoEntry)
    )
    return _columns(rows, 5)


def _new_call_columns(changes: Changes) -> tuple[list[Any], ...]:
    rows = (
        (
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
            call.epoch,
        )
        for call in _new(changes, OutgoingCall)
    )
    return _columns(rows, 20)


def _moved_call_columns(changes: Changes) -> tuple[list[Any], ...]:
    rows = (
        (
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
            after.deadline_at,
            before.epoch,
        )
        for before, after in _moved(changes, OutgoingCall)
    )
    return _columns(rows, 18)


def _entry_columns(changes: Changes) -> tuple[list[Any], ...]:
    rows = (
        (
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
        for entry in changes.entries
    )
    return _columns(rows, 9)
