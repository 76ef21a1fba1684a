"""What a person gets when automation has stopped: what is, why, and what can be ordered now. Must not change anything."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType
from typing import assert_never

from app.domain import operations, unwinding
from app.domain.model import Effect, EffectState, HaltReason, Outcome, Reversibility, Session, SessionState, StepIndex, UndoState
from app.domain.unwinding import StackItem

REASONS: Mapping[HaltReason, str] = MappingProxyType(
    {
        HaltReason.COMPENSATION_FAILED: "An undo failed for good: its endpoint refused it, or every retry was used up.",
        HaltReason.DEADLINE_EXCEEDED: "An undo was not finished by its deadline: it was held until then, or its endpoint may be at it.",
        HaltReason.FAILED_AFTER_PIVOT: "The run failed after something irreversible went ahead, or may have; nothing was undone.",
        HaltReason.UNRESOLVED_REFERENCE: "An undo needs something that the call's result does not have, so it cannot be sent.",
        HaltReason.UNKNOWN_OUTCOME: "Nobody knows whether a call happened, and its tool says that a person has to find out first.",
        HaltReason.LATE_EFFECT: "A call turned out to have happened although it was undone, or reported as not applied, before.",
        HaltReason.EGRESS_DENIED: "An undo's address may not be reached from here: it is not public, and not on the allow list.",
        HaltReason.OPERATOR: "An operator stopped the unwind.",
        HaltReason.POISON: "Working on it crashed the worker again and again, or what is kept of an undo cannot be read.",
    }
)

ADVICE: Mapping[HaltReason, str] = MappingProxyType(
    {
        HaltReason.COMPENSATION_FAILED: "Mend what the endpoint complains about and retry; or undo it by other means, skip it, and unwind.",
        HaltReason.DEADLINE_EXCEEDED: "Never sent: retry. Sent: ask the endpoint's owner; if it was done, skip it as by hand and unwind.",
        HaltReason.FAILED_AFTER_PIVOT: "Decide whether what came before the irreversible step is undone all the same: unwind, or resolve.",
        HaltReason.UNRESOLVED_REFERENCE: "Undo the step by other means and skip it as by hand, or settle it with its result; then unwind.",
        HaltReason.UNKNOWN_OUTCOME: "Look in the tool's own records, settle the step as committed or not_applied, then unwind.",
        HaltReason.LATE_EFFECT: "Look at the LATE_COMMIT below, undo that effect by other means, then unwind what is left, or resolve.",
        HaltReason.EGRESS_DENIED: "Have the address allowed (COUNTERMAND_EGRESS_ALLOW) and retry, or an admin retry with a new url.",
        HaltReason.OPERATOR: "When the cause is gone, let the unwind go on; or resolve.",
        HaltReason.POISON: "Look for call_crashed and timeout_crashed in the logs before you retry; or undo by other means, skip, unwind.",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One order that is open now: `path` below the session, its body without the reason, and the version of what it is about.

    `warning`: what the person has to know before ordering it. `needs_result`: the body has to say what the tool returned, too.
    """

    name: str
    title: str
    consequence: str
    path: str
    version: int
    body: Mapping[str, object] = field(default_factory=dict)
    warning: str | None = None
    needs_result: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Everything that there is to know of a session: its effects and stack by ascending step, and the moment.

    `late_steps`: those that were reported as committed when the run was over, or after they had been reported as not applied.
    """

    session: Session
    effects: Sequence[Effect]
    stack: Sequence[StackItem]
    late_steps: Collection[StepIndex]
    now: datetime

    @property
    def unsettled(self) -> list[StackItem]:
        """What is left of the stack, newest first."""
        return [item for item in reversed(self.stack) if item.entry.state in operations.UNSETTLED_UNDO]

    def happened(self, effect: Effect) -> bool:
        """Tell whether a call happened, or may have, whatever was said of it first."""
        return effect.outcome in {Outcome.COMMITTED, Outcome.UNKNOWN} or effect.step_index in self.late_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One step as far as undoing goes, in a sentence."""

    effect: Effect
    description: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Escalation:
    """The package: why, what to do, what was undone, what was not, what cannot be, and the moves that are open."""

    explanation: str
    advice: str
    undone: Sequence[Judged]
    not_undone: Sequence[Judged]
    cannot_be_undone: Sequence[Judged]
    moves: Sequence[Move]


def escalate(found: Found) -> Escalation | None:
    """Make the package of a session that a person owns, or owned until it was resolved; None where it is no person's."""
    session = found.session
    if session.state not in {SessionState.HALTED, SessionState.RESOLVED} or session.halt_reason is None:
        return None
    judged = [(_standing(item), _judge(found, item)) for item in reversed(found.stack)]
    irreversible = [_judge_irreversible(effect) for effect in found.effects if _stands(found, effect)]
    let_stand = [one for state, one in judged if state in {UndoState.SKIPPED, None} and found.happened(one.effect)]
    return Escalation(
        explanation=REASONS[session.halt_reason],
        advice=ADVICE[session.halt_reason],
        undone=[one for state, one in judged if state is UndoState.COMPENSATED],
        not_undone=[one for state, one in judged if state in operations.UNSETTLED_UNDO],
        cannot_be_undone=[*irreversible, *let_stand],
        moves=_moves(found) if session.state is SessionState.HALTED else (),
    )


def _standing(item: StackItem) -> UndoState | None:
    """Return where an entry stands; None for one that was undone before its effect came: that effect stands, and its undo is spent."""
    is_spent = item.entry.state is UndoState.COMPENSATED and not item.entry.by_hand and _was_sent_too_early(item)
    return None if is_spent else item.entry.state


def _stands(found: Found, effect: Effect) -> bool:
    return effect.reversibility is Reversibility.IRREVERSIBLE and found.happened(effect)


def _judge_irreversible(effect: Effect) -> Judged:
    match effect.outcome:
        case Outcome.COMMITTED:
            went = "went ahead"
        case Outcome.NOT_APPLIED:
            went = f"went ahead: {_CONTRADICTED}"
        case _:
            went = "may have gone ahead"
    return Judged(effect=effect, description="", sentence=f"irreversible, and it {went}")


_UNREADABLE = "what is kept of its undo cannot be read; undo it by other means and skip it"
_CONTRADICTED = "it was reported as not applied first, and as committed after that"


def _judge(found: Found, item: StackItem) -> Judged:
    return Judged(effect=item.effect, description=item.entry.compensation.description, sentence=_sentence(found, item))


def _sentence(found: Found, item: StackItem) -> str:
    attempts = item.call.attempts if item.call else 0
    match item.entry.state:
        case UndoState.COMPENSATED:
            return _how_undone(item, attempts)
        case UndoState.FAILED:
            return f"given up after {_times(attempts)}; the last said: {item.call.last_error if item.call else None}"
        case UndoState.PENDING if attempts:
            return f"waits to be tried again; {_times(attempts)} so far"
        case UndoState.PENDING:
            return _why_not_sent(found, item)
        case UndoState.SKIPPED:
            return _why_left_out(found, item.effect)
        case UndoState.RUNNING:
            return "being sent"
        case _:
            assert_never(item.entry.state)


def _how_undone(item: StackItem, attempts: int) -> str:
    if item.entry.by_hand:
        return "undone by hand"
    said = f"its endpoint said so after {_times(attempts)}"
    return f"{said}, but that the call happened was reported only after that" if _was_sent_too_early(item) else said


def _why_not_sent(found: Found, item: StackItem) -> str:
    if item.effect.outcome is Outcome.UNKNOWN and item.effect.step_index in found.late_steps:
        return "not sent; a late report says that the call happened: settle it as committed, with the result that was reported"
    obstacle = _obstacle(item)
    return "not sent yet" if obstacle is None else f"not sent: {obstacle}"


def _why_left_out(found: Found, effect: Effect) -> str:
    if effect.outcome is not Outcome.NOT_APPLIED:
        return "an operator let it stand"
    if found.happened(effect):
        return f"{_CONTRADICTED}, when its undo was out of the unwind: undo it by other means"
    return "not applied, so there is nothing to undo"


def _was_sent_too_early(item: StackItem) -> bool:
    """Tell whether an undo went out when nobody knew of its effect: it may have met nothing."""
    return item.call is not None and item.call.outcome is Outcome.UNKNOWN and item.effect.outcome is Outcome.COMMITTED


def _obstacle(item: StackItem) -> str | None:
    """Say why an entry would halt the unwind again at once: one that cannot be read, or cannot be sent for the first time."""
    if not item.entry.compensation.is_readable:
        return _UNREADABLE
    if item.entry.state is not UndoState.PENDING or (item.call is not None and item.call.first_sent_at is not None):
        return None
    found = unwinding.sendable(item)
    match found:
        case HaltReason.UNKNOWN_OUTCOME:
            return "its outcome is unknown; settle the step first"
        case HaltReason.UNRESOLVED_REFERENCE:
            return "its undo needs what the result does not have; undo it by other means and skip it"
        case HaltReason.POISON:
            return _UNREADABLE
        case _:
            return None


def _moves(found: Found) -> list[Move]:
    session, unsettled = found.session, found.unsettled
    items = {item.entry.stack_position: item for item in found.stack}
    moves: list[Move] = []
    for effect in found.effects:
        if effect.state is EffectState.UNKNOWN:
            moves += _settle_moves(effect, items.get(effect.step_index))
    for item in unsettled:
        if operations.may_retry(item, unsettled) and _obstacle(item) is None:
            moves.append(_retry_move(found, item))
    for item in unsettled:
        moves += _skip_moves(session, item)
    moves.append(_unwind_move(found))
    left = f"nothing of {_steps(unsettled)} is undone" if unsettled else "nothing is left that can be undone from here"
    moves.append(
        Move(
            name="resolve",
            title="Close the session as it stands",
            consequence=f"{left}; the session is resolved, for good",
            path="/resolve",
            version=session.version,
        )
    )
    return moves


def _settle_moves(effect: Effect, item: StackItem | None) -> list[Move]:
    step, path = effect.step_index, f"/effects/{effect.step_index}/settle"
    if item is None:
        happened, nothing = "it counts as committed, and stands", "there is nothing of it that could stand"
    else:
        happened, nothing = "it counts as committed; its undo will be told so", "its undo is taken out of the unwind"
    needs_result = item is not None and _needs_result(item)
    return [
        Move(
            name="settle",
            title=f"Step {step} ({effect.tool}) did happen",
            consequence=happened,
            path=path,
            version=effect.version,
            body={"outcome": "committed"},
            warning="its undo cannot be sent without what the tool returned: put that, as JSON, into RESULT" if needs_result else None,
            needs_result=needs_result,
        ),
        Move(
            name="settle",
            title=f"Step {step} ({effect.tool}) did not happen",
            consequence=nothing,
            path=path,
            version=effect.version,
            body={"outcome": "not_applied"},
        ),
    ]


def _needs_result(item: StackItem) -> bool:
    """Tell whether an undo could not be sent if its call were known to have happened, and nothing more."""
    if item.entry.state is not UndoState.PENDING:
        return False
    happened = replace(item, effect=replace(item.effect, outcome=Outcome.COMMITTED, result=None))
    return unwinding.sendable(happened) is HaltReason.UNRESOLVED_REFERENCE


def _retry_move(found: Found, item: StackItem) -> Move:
    entry, call = item.entry, item.call
    if call is not None and call.first_sent_at is not None:
        title = f"Try the undo of step {entry.stack_position} again"
        consequence = f"sent to {call.url} under the same key, {entry.idempotency_key}, with the same bytes; the unwind goes on from there"
    else:
        title = f"Send the undo of step {entry.stack_position}"
        consequence = f"sent for the first time, under the key {entry.idempotency_key}; the unwind goes on from there"
    return Move(
        name="retry",
        title=f"{title}{_what(item)}",
        consequence=consequence,
        path=f"/undo/{entry.undo_id}/retry",
        version=found.session.version,
        warning=_forgotten(found, item),
    )


def _forgotten(found: Found, item: StackItem) -> str | None:
    """Warn of an undo whose endpoint may take a repeat for a new call."""
    if item.call is None or not operations.may_key_be_forgotten(found.now, item):
        return None
    return (
        f"first sent at {item.call.first_sent_at:%Y-%m-%d %H:%M} UTC, more than 24 h ago: its endpoint may have forgotten the key, "
        "and could undo twice"
    )


def _skip_moves(session: Session, item: StackItem) -> list[Move]:
    entry, path = item.entry, f"/undo/{item.entry.undo_id}/skip"
    return [
        Move(
            name="skip",
            title=f"Step {entry.stack_position} was undone by hand{_what(item)}",
            consequence="it counts as compensated; nothing is sent until you unwind",
            path=path,
            version=session.version,
            body={"by_hand": True},
        ),
        Move(
            name="skip",
            title=f"Let step {entry.stack_position} stand{_what(item)}",
            consequence="it is not undone; nothing is sent until you unwind",
            path=path,
            version=session.version,
        ),
    ]


def _unwind_move(found: Found) -> Move:
    unsettled = found.unsettled
    obstacles = [f"it will halt again at step {item.entry.stack_position}: {why}" for item in unsettled if (why := _obstacle(item))]
    forgotten = [f"step {item.entry.stack_position} was {why}" for item in unsettled if (why := _forgotten(found, item))]
    if unsettled:
        title = f"Undo what is left: {_steps(unsettled)}, newest first"
        consequence = "undos that failed are tried again under the same key; what is irreversible stands"
    else:
        title = "Close the session: nothing is left that can be undone from here"
        consequence = "it ends as compensated; `clean` says whether everything was undone by itself"
    return Move(
        name="unwind",
        title=title,
        consequence=consequence,
        path="/unwind",
        version=found.session.version,
        warning="; ".join([*forgotten, *obstacles[:1]]) or None,
    )


def _what(item: StackItem) -> str:
    description = item.entry.compensation.description
    return f": {description}" if description else ""


def _times(attempts: int) -> str:
    return "1 attempt" if attempts == 1 else f"{attempts} attempts"


def _steps(items: Sequence[StackItem]) -> str:
    """Name them as a person would: `step 1`, or `steps 2, 1`."""
    named = ", ".join(str(item.entry.stack_position) for item in items)
    return f"step {named}" if len(items) == 1 else f"steps {named}"
