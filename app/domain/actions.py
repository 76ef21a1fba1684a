"""An approved call that the service executes itself: what its attempts come to, and what follows. Must not send or wait.

After its session has failed no new attempt starts; the one in flight is awaited, and only then is it judged what can be undone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from app.domain import outcomes, sending
from app.domain.circuits import NOTHING_HELD, Held
from app.domain.draft import Draft
from app.domain.json_text import JsonFault, dump, parse
from app.domain.model import Action, Effect, EffectState, EntryKind, Outcome, OutgoingCall, SessionState, UndoState
from app.domain.outcomes import REPORTING_STATES, Reported
from app.domain.retry import Accepted, Attempt, Done, Permanent, Retry
from app.domain.sending import POISON_AFTER_INTERRUPTED, Move, Rest, Send, Wait, Yield
from app.domain.unwinding import StackItem


@dataclass(frozen=True, slots=True, kw_only=True)
class Acting:
    """An action that is due, and what its session's failure would have to know.

    `irreversible`: every irreversible effect of the session. `in_flight`: other calls that are executing; once the session has failed these
    are actions that are awaited too. `top`: the newest pending undo entries, this call's own and the next one at least. `held`: where
    nothing is sent now, except by a probe.
    """

    call: OutgoingCall
    seen: Reported
    action: Action
    irreversible: Sequence[Effect]
    in_flight: Sequence[Effect]
    top: Sequence[StackItem]
    held: Held = NOTHING_HELD
    is_probe: bool = False


def begin(draft: Draft, work: Acting) -> Move:
    """Decide what to do with a claimed action before anything is sent; an attempt to be sent is counted in the draft."""
    if work.seen.effect.state is not EffectState.EXECUTING:
        draft.change_call(work.call, due_at=None)
        return Rest()
    call = sending.close_interrupted(draft, work.call)
    work = replace(work, call=call)
    if call.interrupted >= POISON_AFTER_INTERRUPTED:
        return _give_up(draft, work)
    if draft.now >= call.deadline_at:
        return _give_up(draft, replace(work, call=sending.give_up_at_deadline(draft, call)))
    if not _may_go_on(draft, call):
        return _give_up(draft, work)
    if work.held.holds(call.destination, is_probe=work.is_probe):
        return Yield(call=call)
    if call.first_sent_at is None:
        call = sending.freeze(draft, call, work.action.url, work.seen.effect.payload, None)
    return Send(call=sending.count(draft, call), effect=work.seen.effect, policy=work.action.retry)


def record(draft: Draft, work: Acting, attempt: Attempt, unit: float, *, is_charged: bool = True) -> Move:
    """Decide what an attempt's answer means and what to do next; `unit` in [0, 1) is the jitter's die.

    `is_charged` False: if it is to be tried again, this attempt uses up none of the retries.
    """
    policy = work.action.retry
    call, verdict = sending.note(draft, work.call, attempt, policy)
    if work.seen.effect.state is not EffectState.EXECUTING:  # a read whose run was completed meanwhile: nobody waits for it
        draft.change_call(call, due_at=None)
        return Rest()
    work = replace(work, call=call)
    match verdict:
        case Done():
            return _succeed(draft, work, attempt)
        case Accepted():
            waiting = sending.poll_later(draft, call, policy, attempt, unit)
            return waiting if _may_go_on(draft, waiting.call) else _give_up(draft, replace(work, call=waiting.call))
        case Retry():
            tried = sending.retry_later(draft, call, policy, attempt, unit, is_charged=is_charged)
            if isinstance(tried, Wait):
                return tried if _may_go_on(draft, tried.call) else _give_up(draft, replace(work, call=tried.call))
            return _give_up(draft, replace(work, call=tried))
        case Permanent():
            return _give_up(draft, work)
        case _:
            assert_never(verdict)


def _may_go_on(draft: Draft, call: OutgoingCall) -> bool:
    """Tell whether more may be sent: once the session has failed, only the question what came of a call that was accepted."""
    return draft.session.state in REPORTING_STATES or call.poll_url is not None


def _succeed(draft: Draft, work: Acting, attempt: Attempt) -> Move:
    draft.change_call(work.call, due_at=None)
    result = _result_of(attempt)
    settled = outcomes.settle_committed(draft, work.seen, result)
    draft.record(
        EntryKind.EXECUTED,
        settled.effect.step_index,
        body={"effect_id": str(settled.effect.effect_id), "attempts": work.call.attempts, "status": work.call.last_status},
        contents={"result": result},
    )
    outcomes.pivot_if_irreversible(draft, settled.effect)
    return _conclude(draft, work, settled)


def _give_up(draft: Draft, work: Acting) -> Move:
    """Say what is known of a call that will not be tried again: nothing happened, if every attempt was certainly not processed."""
    call = draft.change_call(work.call, due_at=None)
    outcome = Outcome.UNKNOWN if call.may_be_processing else Outcome.NOT_APPLIED
    error = call.last_error or outcomes.NOT_SENT
    body = {
        "effect_id": str(work.seen.effect.effect_id),
        "outcome": outcome.value,
        "error": error,
        "attempts": call.attempts,
        "status": call.last_status,
    }
    draft.record(EntryKind.FAILED, call.step_index, body=body)
    if outcome is Outcome.UNKNOWN:
        return _conclude(draft, work, outcomes.settle_unknown(draft, work.seen, error))
    return _conclude(draft, work, outcomes.settle_not_applied(draft, work.seen, work.irreversible, error))


def _conclude(draft: Draft, work: Acting, settled: Reported) -> Move:
    """Go on with what waited for this call: the judgement of a session that has failed meanwhile."""
    if draft.session.state is not SessionState.FAILED or work.in_flight:
        return Rest()
    pending = [
        replace(item, effect=settled.effect) if item.effect.effect_id == settled.effect.effect_id else item
        for item in work.top
        if item.entry.state is UndoState.PENDING
    ]
    candidates = [item for item in pending if item.effect.state is not EffectState.FAILED]
    due = outcomes.judge(draft, max(candidates, key=lambda item: item.entry.stack_position, default=None))
    return Rest() if due is None else Yield(call=due)


def _result_of(attempt: Attempt) -> bytes:
    """Return the answer's body as compact JSON text; what is no JSON, or was cut, as a JSON string."""
    if not attempt.body:
        return b"null"
    try:
        return dump(parse(attempt.body))
    except JsonFault:
        return dump(attempt.body.decode("utf-8", "replace"))
