"""What one outgoing call goes through whatever it is for: attempts, their answers, waits, giving up. Must not know what follows from it."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeAlias

from app.domain import egress, retry
from app.domain.draft import Draft
from app.domain.egress import absolute_location
from app.domain.model import CallId, CallKind, Effect, Outcome, OutgoingCall, RetryPolicy, StepIndex
from app.domain.retry import MAX_ERROR_CHARACTERS, Accepted, Attempt, Done, Failure, Permanent, Retry, Verdict

DESTINATION = r"[a-z0-9._:-]{1,260}:[1-9][0-9]{0,4}"
"""What `destination_of` makes of every URL that may be called: another name is one that no call ever has."""

NEVER_SENT = "never sent: its deadline passed while it was held or waited for its turn"

POISON_AFTER_INTERRUPTED = 10
"""Attempts of one call without a recorded end after which it is held to be what kills the worker: no more of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send this call now: its attempt is counted. `is_poll`: ask the 202's Location instead."""

    call: OutgoingCall
    effect: Effect
    policy: RetryPolicy

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
    """A call is due, but not for this worker now: it is stopping, the destination has no room or is held, the call is of another kind."""

    call: OutgoingCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """Nothing more to do for this session."""


Move: TypeAlias = Send | Wait | Yield | Rest


def new_call(call_id: CallId, kind: CallKind, step: StepIndex, url: str, due_at: datetime, policy: RetryPolicy) -> OutgoingCall:  # noqa: PLR0913, PLR0917 - what every call has from the start
    """Return a call that is due and was never sent; `url` says only where there has to be room for it."""
    return OutgoingCall(
        call_id=call_id,
        kind=kind,
        step_index=step,
        destination=destination_of(url),
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
        due_at=due_at,
        first_sent_at=None,
        deadline_at=due_at + timedelta(milliseconds=policy.deadline_ms),
        epoch=0,
    )


def destination_of(url: str) -> str:
    """Return `host:port` in canonical form, by which calls in flight are limited, held and shown, however the URL spells it."""
    return egress.destination_of(url)


def freeze(draft: Draft, call: OutgoingCall, url: str, body: bytes, outcome: Outcome | None) -> OutgoingCall:
    """Fix URL, bytes and outcome for every attempt there will ever be."""
    return draft.change_call(call, url=url, body=body, outcome=outcome, destination=destination_of(url), first_sent_at=draft.now)


def count(draft: Draft, call: OutgoingCall) -> OutgoingCall:
    """Count the attempt, or the poll, that is about to be sent."""
    is_poll = call.poll_url is not None
    return draft.change_call(call, is_attempt_open=True, attempts=call.attempts + (not is_poll), polls=call.polls + is_poll)


def close_interrupted(draft: Draft, call: OutgoingCall) -> OutgoingCall:
    """Take an attempt that was counted and whose end nobody recorded for one with unknown outcome."""
    if not call.is_attempt_open:
        return call
    return draft.change_call(
        call,
        is_attempt_open=False,
        interrupted=call.interrupted + 1,
        may_be_processing=True,
        last_error=f"{Failure.INTERRUPTED}: the end of attempt {call.attempts} was never recorded",
    )


def note(draft: Draft, call: OutgoingCall, attempt: Attempt, policy: RetryPolicy) -> tuple[OutgoingCall, Verdict]:
    """Write down what came of an attempt and say what it means."""
    is_poll = call.poll_url is not None
    verdict = retry.judge_poll(attempt) if is_poll else retry.judge(attempt, policy, may_be_processing=call.may_be_processing)
    # Who answered 202 may still be at it, as may one whose answer was lost: a 409 to the next attempt says so.
    is_outcome_unknown = isinstance(verdict, Accepted) or (isinstance(verdict, Retry | Permanent) and verdict.is_outcome_unknown)
    noted = draft.change_call(
        call,
        is_attempt_open=False,
        last_status=attempt.status,
        last_error=None if isinstance(verdict, Done) else _last_error(attempt, is_poll=is_poll),
        may_be_processing=call.may_be_processing or is_outcome_unknown,
    )
    return noted, verdict


def retry_later(  # noqa: PLR0913 - what is tried again, by which rule, and why
    draft: Draft, call: OutgoingCall, policy: RetryPolicy, attempt: Attempt, unit: float, *, is_charged: bool
) -> Wait | OutgoingCall:
    """Say when to try again, or return the call where its budget is used up. `unit` is the jitter's die.

    Asking a Location costs none, nor does an attempt that is not charged: it is the destination that is away, not this call that fails.
    """
    if call.poll_url is not None:
        return _wait(draft, call, policy, call.polls, attempt, unit)
    if not is_charged:
        return _wait(draft, call, policy, call.failures, attempt, unit)
    call = draft.change_call(call, failures=call.failures + 1)
    if call.failures > policy.max_retries:
        return call
    return _wait(draft, call, policy, call.failures, attempt, unit)


def poll_later(draft: Draft, call: OutgoingCall, policy: RetryPolicy, attempt: Attempt, unit: float) -> Wait:
    """Take a 202, which is not an end: ask its Location, or send again under the same key, until the call's deadline."""
    if call.poll_url is None and attempt.location and call.url is not None:
        call = draft.change_call(call, poll_url=absolute_location(call.url, attempt.location))
    return _wait(draft, call, policy, max(call.polls, call.attempts, 1), attempt, unit)


def _wait(draft: Draft, call: OutgoingCall, policy: RetryPolicy, tries: int, attempt: Attempt, unit: float) -> Wait:  # noqa: PLR0913, PLR0917 - one line of arithmetic
    seconds = retry.wait_seconds(policy, tries, unit, attempt.retry_after, draft.now)
    due_at = min(draft.now + timedelta(seconds=seconds), call.deadline_at)
    call = draft.change_call(call, due_at=due_at)
    return Wait(call=call, seconds=(due_at - draft.now).total_seconds())


def give_up_at_deadline(draft: Draft, call: OutgoingCall) -> OutgoingCall:
    """Say of a call that its endpoint took and never ended, and of one never sent, that it is so: it tells whom to ask."""
    if call.attempts == 0:
        return draft.change_call(call, last_error=NEVER_SENT)
    if call.poll_url is None and call.last_status != 202:
        return call
    return draft.change_call(call, last_error=f"accepted but never finished; the last answer was: {call.last_error}"[:MAX_ERROR_CHARACTERS])


def refill(draft: Draft, call: OutgoingCall, policy: RetryPolicy, url: str | None = None) -> OutgoingCall:
    """Give a call that was given up a fresh budget: due now, same key, same bytes; `url` where its destination has moved."""
    moved = {} if url is None else {"url": url, "destination": destination_of(url)}
    return draft.change_call(
        call,
        failures=0,
        interrupted=0,
        poll_url=None,
        due_at=draft.now,
        deadline_at=draft.now + timedelta(milliseconds=policy.deadline_ms),
        **moved,
    )


def _last_error(attempt: Attempt, *, is_poll: bool) -> str:
    told = retry.last_error(attempt)
    return f"asking the Location of a 202: {told}"[:MAX_ERROR_CHARACTERS] if is_poll else told
