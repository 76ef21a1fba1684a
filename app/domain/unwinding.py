"""Run the pending compensations newest first: what one due call does next, before and after each attempt. Must not send or wait."""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeAlias, assert_never
from urllib.parse import urlsplit

from app.domain import bindings, retry
from app.domain.draft import Draft
from app.domain.egress import absolute_location
from app.domain.model import (
    CallId,
    Compensation,
    Effect,
    EffectState,
    EntryKind,
    HaltReason,
    OnUnknown,
    Outcome,
    OutgoingCall,
    SessionState,
    UndoEntry,
    UndoState,
)
from app.domain.retry import MAX_ERROR_CHARACTERS, Accepted, Attempt, Done, Failure, Permanent, Retry
from app.domain.states import UNWINDING_STATES

POISON_AFTER_INTERRUPTED = 10
"""Attempts of one call without a recorded end after which it is held to be what kills the worker, and its session is halted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackItem:
    """One undo entry with the effect it undoes, and the tool's newest registration, whose URL an entry not sent yet goes to."""

    entry: UndoEntry
    effect: Effect
    newest: Compensation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A call that is due, what it undoes, and what comes after it.

    `below`: the newest pending item below. `has_failed_entries`: some entry failed and nothing is pending below. `may_go_on` False: the
    next entry becomes due, but this worker does not begin it.
    """

    call: OutgoingCall
    item: StackItem
    below: StackItem | None
    has_failed_entries: bool
    may_go_on: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send this call now: its attempt is counted. `is_poll`: ask the 202's Location instead."""

    call: OutgoingCall
    item: StackItem

    @property
    def is_poll(self) -> bool:
        """Tell whether this asks how an accepted call is getting on."""
        return self.call.poll_url is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Nothing to send for `seconds`."""

    call: OutgoingCall
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Yield:
    """The next call is due, but not for this worker now: it is stopping, or there is no room at the destination."""

    call: OutgoingCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """Nothing more to do for this session."""


Move: TypeAlias = Send | Wait | Yield | Rest


def start(draft: Draft, top: StackItem | None) -> None:
    """Begin the unwind of a session that has just failed: the newest pending entry becomes due.

    A session that is marked `late_effect` already goes to a person: something happened whose undo is gone.
    """
    if draft.session.late_effect:
        _halt_session(draft, HaltReason.LATE_EFFECT)
        return
    if top is None:
        _finish(draft, has_failed_entries=False)
        return
    draft.add_call(_due_call(draft, top))


def halt_after_pivot(draft: Draft) -> None:
    """Hand a session that failed past the pivot to a person; nothing of it is undone."""
    _halt_session(draft, HaltReason.FAILED_AFTER_PIVOT)


def halt_late(draft: Draft) -> None:
    """Hand a session that was at rest to a person: an effect it had undone turned out to have happened after that."""
    _halt_session(draft, HaltReason.LATE_EFFECT)


def begin(draft: Draft, work: Work) -> Move:
    """Decide what to do with a claimed call before anything is sent; an attempt to be sent is counted in the draft."""
    call, entry = work.call, work.item.entry
    if draft.session.state not in UNWINDING_STATES:
        draft.change_call(call, due_at=None)
        return Rest()
    if entry.state not in {UndoState.PENDING, UndoState.RUNNING}:
        draft.change_call(call, due_at=None)
        return _go_on(draft, work)
    if call.is_attempt_open:
        call = draft.change_call(
            call,
            is_attempt_open=False,
            interrupted=call.interrupted + 1,
            may_be_processing=True,
            last_error=f"{Failure.INTERRUPTED}: the end of attempt {call.attempts} was never recorded",
        )
        work = replace(work, call=call)
    if call.interrupted >= POISON_AFTER_INTERRUPTED:
        return _fail(draft, work, HaltReason.POISON)
    if draft.now >= call.deadline_at:
        return _give_up_at_deadline(draft, work)
    return _send(draft, work)


def record(draft: Draft, work: Work, attempt: Attempt, unit: float) -> Move:
    """Decide what an attempt's answer means and what to do next; `unit` in [0, 1) is the jitter's die."""
    policy = work.item.entry.compensation.retry
    call = work.call
    is_poll = call.poll_url is not None
    verdict = retry.judge_poll(attempt) if is_poll else retry.judge(attempt, policy, may_be_processing=call.may_be_processing)
    # Who answered 202 may still be at it, as may one whose answer was lost: a 409 to the next attempt says so.
    is_outcome_unknown = isinstance(verdict, Accepted) or (isinstance(verdict, Retry | Permanent) and verdict.is_outcome_unknown)
    call = draft.change_call(
        call,
        is_attempt_open=False,
        last_status=attempt.status,
        last_error=None if isinstance(verdict, Done) else _last_error(attempt, is_poll=is_poll),
        may_be_processing=call.may_be_processing or is_outcome_unknown,
    )
    work = replace(work, call=call)
    match verdict:
        case Done():
            return _succeed(draft, work)
        case Accepted():
            return _poll_later(draft, work, attempt, unit)
        case Retry():
            return _retry_later(draft, work, attempt, unit)
        case Permanent():
            is_denied = attempt.failure is Failure.EGRESS_DENIED
            return _fail(draft, work, HaltReason.EGRESS_DENIED if is_denied else HaltReason.COMPENSATION_FAILED)
        case _:
            assert_never(verdict)


def _last_error(attempt: Attempt, *, is_poll: bool) -> str:
    told = retry.last_error(attempt)
    return f"asking the Location of a 202: {told}"[: retry.MAX_ERROR_CHARACTERS] if is_poll else told


def _due_call(draft: Draft, item: StackItem) -> OutgoingCall:
    compensation = item.entry.compensation
    return OutgoingCall(
        call_id=CallId(item.entry.undo_id),
        step_index=item.entry.stack_position,
        destination=_destination(compensation.url),
        url=None,
        body=None,
        outcome=None,
        attempts=0,
        failures=0,
        interrupted=0,
        polls=0,
        is_attempt_open=False,
        may_be_processing=False,
        poll_url=None,
        last_status=None,
        last_error=None,
        due_at=draft.now,
        first_sent_at=None,
        deadline_at=draft.now + timedelta(milliseconds=compensation.retry.deadline_ms),
        epoch=0,
    )


def next_destination(work: Work) -> str | None:
    """Return where the session's next call goes if this one ends it; None where nothing is pending below."""
    if work.below is None:
        return None
    return _destination((work.below.newest or work.below.entry.compensation).url)


def _destination(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def _send(draft: Draft, work: Work) -> Move:
    item, call = work.item, work.call
    if call.first_sent_at is None:
        if draft.session.late_effect:
            return _halt(draft, call, HaltReason.LATE_EFFECT)
        frozen = _freeze(draft, work)
        if isinstance(frozen, HaltReason):
            return _halt(draft, call, frozen)
        call, item = frozen
    is_poll = call.poll_url is not None
    call = draft.change_call(call, is_attempt_open=True, attempts=call.attempts + (not is_poll), polls=call.polls + is_poll)
    return Send(call=call, item=item)


def _freeze(draft: Draft, work: Work) -> tuple[OutgoingCall, StackItem] | HaltReason:
    """Fix URL, bytes and outcome for every attempt there will ever be, and tell the journal that the undo begins."""
    entry, effect, compensation = work.item.entry, work.item.effect, work.item.entry.compensation
    outcome = Outcome.COMMITTED if effect.outcome is Outcome.COMMITTED else Outcome.UNKNOWN
    if outcome is Outcome.UNKNOWN and compensation.on_unknown is OnUnknown.ESCALATE:
        return HaltReason.UNKNOWN_OUTCOME
    newest = work.item.newest or compensation
    url, body = newest.url, bindings.body_to_send(compensation.args, effect)
    if body is None and compensation.unknown is not None:
        url = (newest.unknown.url if newest.unknown else compensation.unknown.url) or url
        body = bindings.body_to_send(compensation.unknown.args, effect)
    if body is None:
        return HaltReason.UNRESOLVED_REFERENCE
    if draft.session.state is SessionState.FAILED:
        draft.move_session(SessionState.COMPENSATING)
    item = replace(
        work.item,
        entry=draft.move_undo_entry(entry, UndoState.RUNNING),
        effect=draft.move_effect(effect, EffectState.COMPENSATING),
    )
    call = draft.change_call(work.call, url=url, body=body, outcome=outcome, destination=_destination(url), first_sent_at=draft.now)
    draft.record(
        EntryKind.COMPENSATING,
        entry.stack_position,
        body={"undo_id": str(entry.undo_id), "idempotency_key": entry.idempotency_key, "url": url, "outcome": outcome.value},
        contents={"args": body},
    )
    return call, item


def _succeed(draft: Draft, work: Work) -> Move:
    entry = work.item.entry
    draft.change_call(work.call, due_at=None)
    draft.move_undo_entry(entry, UndoState.COMPENSATED, compensated_at=draft.now)
    draft.move_effect(work.item.effect, EffectState.COMPENSATED)
    draft.record(
        EntryKind.COMPENSATED,
        entry.stack_position,
        body={"undo_id": str(entry.undo_id), "attempts": work.call.attempts, "status": work.call.last_status},
    )
    return _go_on(draft, work)


def _fail(draft: Draft, work: Work, reason: HaltReason) -> Move:
    """Give an entry up: a person owns it. An `independent` one lets the unwind go past it first."""
    entry = work.item.entry
    if entry.state is UndoState.PENDING:  # never sent: it stays as it is, for a person to look at
        return _halt(draft, work.call, reason)
    call = draft.change_call(work.call, due_at=None)
    draft.move_undo_entry(entry, UndoState.FAILED)
    draft.move_effect(work.item.effect, EffectState.COMPENSATION_FAILED)
    draft.record(
        EntryKind.COMPENSATION_FAILED,
        entry.stack_position,
        body={
            "undo_id": str(entry.undo_id),
            "reason": reason.value,
            "attempts": call.attempts,
            "status": call.last_status,
            "error": call.last_error,
        },
    )
    if entry.compensation.independent:
        return _go_on(draft, replace(work, has_failed_entries=True))
    return _halt(draft, call, reason)


def _give_up_at_deadline(draft: Draft, work: Work) -> Move:
    """Say of an undo that its endpoint took and never ended that it is so: whoever looks into it has to ask there, not here."""
    call = work.call
    if call.poll_url is not None or call.last_status == 202:
        call = draft.change_call(
            call, last_error=f"accepted but never finished; the last answer was: {call.last_error}"[:MAX_ERROR_CHARACTERS]
        )
    return _fail(draft, replace(work, call=call), HaltReason.DEADLINE_EXCEEDED)


def _go_on(draft: Draft, work: Work) -> Move:
    """Take the next entry, in the same breath and under the same lease."""
    if draft.session.late_effect:
        return _halt(draft, work.call, HaltReason.LATE_EFFECT)
    if work.below is None:
        _finish(draft, has_failed_entries=work.has_failed_entries)
        return Rest()
    call = _due_call(draft, work.below)
    draft.add_call(call)
    if not work.may_go_on:
        return Yield(call=call)
    return _send(draft, replace(work, call=call, item=work.below, below=None))


def _finish(draft: Draft, *, has_failed_entries: bool) -> None:
    if has_failed_entries:
        _halt_session(draft, HaltReason.COMPENSATION_FAILED)
        return
    if draft.session.state is SessionState.FAILED:  # nothing was ever sent: there was no entry, or a late report settled them all
        draft.move_session(SessionState.COMPENSATING)
    draft.move_session(SessionState.COMPENSATED)
    draft.record(EntryKind.UNWOUND)


def _halt(draft: Draft, call: OutgoingCall, reason: HaltReason) -> Rest:
    draft.change_call(call, due_at=None)
    _halt_session(draft, reason)
    return Rest()


def _halt_session(draft: Draft, reason: HaltReason) -> None:
    if draft.session.state is SessionState.FAILED:
        draft.move_session(SessionState.COMPENSATING)
    draft.move_session(SessionState.HALTED, halt_reason=reason)
    draft.record(EntryKind.HALTED, body={"reason": reason.value})


def _retry_later(draft: Draft, work: Work, attempt: Attempt, unit: float) -> Move:
    policy = work.item.entry.compensation.retry
    if work.call.poll_url is not None:
        return _wait(draft, work, work.call.polls, attempt, unit)
    failures = work.call.failures + 1
    call = draft.change_call(work.call, failures=failures)
    if failures > policy.max_retries:
        return _fail(draft, replace(work, call=call), HaltReason.COMPENSATION_FAILED)
    return _wait(draft, replace(work, call=call), failures, attempt, unit)


def _poll_later(draft: Draft, work: Work, attempt: Attempt, unit: float) -> Move:
    """Take a 202, which is not an end: ask its Location, or send again under the same key, until the entry's deadline."""
    call = work.call
    if call.poll_url is None and attempt.location and call.url is not None:
        call = draft.change_call(call, poll_url=absolute_location(call.url, attempt.location))
    return _wait(draft, replace(work, call=call), max(call.polls, call.attempts, 1), attempt, unit)


def _wait(draft: Draft, work: Work, tries: int, attempt: Attempt, unit: float) -> Move:
    policy = work.item.entry.compensation.retry
    seconds = retry.wait_seconds(policy, tries, unit, attempt.retry_after, draft.now)
    due_at = min(draft.now + timedelta(seconds=seconds), work.call.deadline_at)
    call = draft.change_call(work.call, due_at=due_at)
    return Wait(call=call, seconds=(due_at - draft.now).total_seconds())
