"""May this call go ahead? One intercept against what is known of its session. Must not write: the draft keeps account."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import TypeAlias, assert_never

from app.domain import intents, tools
from app.domain.draft import Draft
from app.domain.egress import EgressPolicy
from app.domain.errors import Conflict, Invalid, SagaError
from app.domain.journal import time_text
from app.domain.model import (
    MAX_STEP_INDEX,
    Approval,
    ApprovalState,
    Compensation,
    Effect,
    EffectId,
    EffectState,
    EntryKind,
    Reversibility,
    SessionState,
    StepIndex,
    UndoEntry,
)
from app.domain.outcomes import is_past_deadline, past_deadline, unsettled_effects
from app.domain.payload_schema import faults_of_payload
from app.domain.tools import Definition, Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class InterceptCommand:
    """One intercept as asked: `payload` is the exact UTF-8 bytes of the call's arguments, `payload_pointer` where they stood.

    `reversibility` and `compensation` are the inline ones. `request_sha256` is the fingerprint of the whole request.
    """

    tool: str
    payload: bytes
    payload_pointer: str
    step_index: StepIndex | None
    reversibility: Reversibility | None
    compensation: Compensation | None
    request_key: str | None
    request_sha256: bytes
    traceparent: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InterceptRules:
    """What this deployment allows: inline descriptors, undo addresses, how long a question stays open (seconds)."""

    is_inline_allowed: bool
    egress: EgressPolicy
    approval_ttl_seconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What an intercept meets: its tool, the effect at its step, the one under its key, and those not settled yet."""

    tool: Tool | None
    at_step: Effect | None
    under_key: Effect | None
    unsettled: Sequence[Effect]
    undo_of_repeat: UndoEntry | None
    approval_of_repeat: Approval | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Execute:
    """Run the tool now: its undo is registered. `is_new` False: the same answer again, because the first was lost."""

    effect: Effect
    undo_entry: UndoEntry | None
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitApproval:
    """Do not run the tool: a person has to approve it first."""

    effect: Effect
    approval: Approval


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Do not run the tool: it ran, and this was its result."""

    effect: Effect


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Do not run the tool: somebody was told to, and has not reported yet."""

    effect: Effect


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Do not run the tool."""

    error: SagaError


Decision: TypeAlias = Execute | AwaitApproval | Replay | InFlight | Refuse


def decide(draft: Draft, command: InterceptCommand, seen: Seen, rules: InterceptRules) -> Decision:
    """Decide one intercept; a new effect and its undo are in the draft afterwards."""
    if seen.under_key is not None:
        if seen.under_key.request_sha256 != command.request_sha256:
            return Refuse(error=_key_reused(seen.under_key))
        return _repeat(draft, seen.under_key, seen, is_same_request=True)
    if seen.at_step is not None:
        if not _is_same_call(seen.at_step, command):
            return Refuse(error=_step_reused(seen.at_step))
        return _repeat(draft, seen.at_step, seen, is_same_request=False)
    return _new(draft, command, seen, rules)


def needs_unsettled(command: InterceptCommand, tool: Tool | None) -> bool:
    """Tell whether this may be an irreversible call, which is decided on with the effects that are not settled yet."""
    if command.reversibility is Reversibility.IRREVERSIBLE:
        return True
    if tool is not None:
        return tool.definition.reversibility is Reversibility.IRREVERSIBLE
    return command.reversibility is None and command.compensation is None


def _is_same_call(effect: Effect, command: InterceptCommand) -> bool:
    return effect.tool == command.tool and effect.payload_sha256 == sha256(command.payload).digest()


def _repeat(draft: Draft, effect: Effect, seen: Seen, *, is_same_request: bool) -> Decision:
    match effect.state:
        case EffectState.EXECUTING if seen.approval_of_repeat is not None:
            return InFlight(effect=effect)  # released once, by a resume: asking again for it lets nothing go ahead
        case EffectState.EXECUTING if is_same_request:
            return Execute(effect=effect, undo_entry=seen.undo_of_repeat, is_new=False)
        case EffectState.EXECUTING if _is_idempotent(effect, seen.tool):
            return _execute_again(draft, effect, seen)
        case EffectState.EXECUTING:
            return InFlight(effect=effect)
        case EffectState.COMMITTED:
            return Replay(effect=effect)
        case EffectState.AWAITING_APPROVAL | EffectState.APPROVED:
            if seen.approval_of_repeat is None:
                raise AssertionError(f"effect {effect.effect_id} waits for approval without a request for one")
            return AwaitApproval(effect=effect, approval=seen.approval_of_repeat)
        case (
            EffectState.FAILED
            | EffectState.UNKNOWN
            | EffectState.REJECTED
            | EffectState.EXPIRED
            | EffectState.CANCELLED
            | EffectState.COMPENSATING
            | EffectState.COMPENSATED
            | EffectState.COMPENSATION_FAILED
        ):
            return Refuse(error=_step_settled(effect))
        case _:
            assert_never(effect.state)


def _is_idempotent(effect: Effect, tool: Tool | None) -> bool:
    """Tell whether the version that the call was decided on is the newest, and says that repeating it does no harm."""
    return tool is not None and tool.version == effect.tool_version and tool.definition.is_idempotent


def _execute_again(draft: Draft, effect: Effect, seen: Seen) -> Decision:
    """Tell a caller that lost track to run the tool again: it is registered as safe to repeat."""
    again = draft.change_effect(effect, attempt=effect.attempt + 1)
    intents.record_intent(draft, again, seen.undo_of_repeat)
    return Execute(effect=again, undo_entry=seen.undo_of_repeat, is_new=False)


def _new(draft: Draft, command: InterceptCommand, seen: Seen, rules: InterceptRules) -> Decision:
    refusal = may_take_effects(draft)
    if refusal is not None:
        return Refuse(error=refusal)
    try:
        step = _step(draft.session.last_step, command.step_index)
        plan = _plan(command, seen.tool, rules)
    except SagaError as error:
        return Refuse(error=error)
    if plan.reversibility is Reversibility.IRREVERSIBLE and seen.unsettled:
        sentence = "an irreversible call has to wait until every earlier effect is committed or failed; do not run the tool"
        return Refuse(error=unsettled_effects(seen.unsettled, sentence))
    effect = _effect(draft, command, step, plan)
    refusal = None if plan.compensation is None else intents.unbindable(plan.compensation, effect)
    if refusal is not None:
        return Refuse(error=refusal)
    if plan.must_be_approved:
        return _park(draft, effect, plan.approval_ttl_seconds)
    return _register(draft, effect, plan.compensation)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """How a new call is to be treated."""

    reversibility: Reversibility
    compensation: Compensation | None
    must_be_approved: bool
    approval_ttl_seconds: int
    tool_version: int | None


def may_take_effects(draft: Draft) -> SagaError | None:
    """Say why the session takes no new effect, or None if it does."""
    session = draft.session
    match session.state:
        case SessionState.ACTIVE:
            return past_deadline(session) if is_past_deadline(draft) else None
        case SessionState.AWAITING_APPROVAL:
            return Conflict(
                "session_awaiting_approval",
                f"step {session.last_step} of session {session.session_id} waits for a person, or, once approved, for its resume; "
                "do not run the tool",
                state=session.state,
            )
        case _:
            return Conflict(
                "session_not_active",
                f"session {session.session_id} is {session.state}; do not run the tool",
                state=session.state,
            )


def _step(last_step: int, asked: StepIndex | None) -> StepIndex:
    if asked is not None and asked <= last_step:
        raise Invalid(
            "step_out_of_order",
            f"step_index {asked} is not greater than {last_step}, the greatest of this session",
            last_step=last_step,
            errors=[{"pointer": "/step_index", "detail": f"expected more than {last_step}"}],
        )
    step = last_step + 1 if asked is None else asked
    if step > MAX_STEP_INDEX:
        raise Invalid("step_out_of_order", f"the session has used its greatest step_index, {MAX_STEP_INDEX}", last_step=last_step)
    return StepIndex(step)


def _plan(command: InterceptCommand, tool: Tool | None, rules: InterceptRules) -> _Plan:
    """Say how a call is to be treated: as registered; else as described inline, where allowed; else as irreversible (fail closed)."""
    if tool is not None:
        return _plan_registered(command, tool, rules)
    inline, compensation = command.reversibility, command.compensation
    if not rules.is_inline_allowed and (compensation is not None or inline not in {None, Reversibility.IRREVERSIBLE}):
        pointer = "/reversibility" if compensation is None else "/compensation"
        raise _invalid("inline_not_allowed", pointer, f"tool {command.tool!r} is not registered, and nothing may be described inline")
    # A call that says how to undo itself and nothing else is what the second seed calls the default: compensatable.
    reversibility = inline or (Reversibility.COMPENSATABLE if compensation else Reversibility.IRREVERSIBLE)
    definition = Definition(reversibility=reversibility, compensation=compensation)
    refusal = tools.check(definition, rules.egress)
    if refusal is not None:
        raise refusal
    return _Plan(
        reversibility=reversibility,
        compensation=compensation,
        must_be_approved=definition.must_be_approved,
        approval_ttl_seconds=rules.approval_ttl_seconds,
        tool_version=None,
    )


def _plan_registered(command: InterceptCommand, tool: Tool, rules: InterceptRules) -> _Plan:
    definition = tool.definition
    if command.compensation is not None:
        raise _invalid("inline_not_allowed", "/compensation", f"tool {tool.name!r} is registered; its undo is the registered one")
    reversibility = command.reversibility or definition.reversibility
    if _CAUTION.index(reversibility) < _CAUTION.index(definition.reversibility):
        detail = f"tool {tool.name!r} is registered as {definition.reversibility}; a call may raise that, not lower it to {reversibility}"
        raise _invalid("reversibility_lowered", "/reversibility", detail)
    is_irreversible = reversibility is Reversibility.IRREVERSIBLE
    if definition.compensation is None and reversibility in {Reversibility.REVERSIBLE, Reversibility.COMPENSATABLE}:
        raise _invalid(
            "tool_needs_compensation", "/reversibility", f"tool {tool.name!r} has no compensation, so it cannot be {reversibility}"
        )
    _check_payload(command, tool)
    is_raised_to_irreversible = is_irreversible and definition.reversibility is not Reversibility.IRREVERSIBLE
    approval = definition.approval
    return _Plan(
        reversibility=reversibility,
        compensation=None if is_irreversible else definition.compensation,
        must_be_approved=is_raised_to_irreversible or definition.must_be_approved,
        approval_ttl_seconds=(approval.ttl_seconds if approval else None) or rules.approval_ttl_seconds,
        tool_version=tool.version,
    )


_CAUTION = (Reversibility.READ_ONLY, Reversibility.REVERSIBLE, Reversibility.COMPENSATABLE, Reversibility.IRREVERSIBLE)
"""From the least to the most careful treatment."""


def _check_payload(command: InterceptCommand, tool: Tool) -> None:
    if tool.definition.payload_schema is None:
        return
    faults = faults_of_payload(tool.definition.payload_schema, command.payload)
    if faults:
        raise Invalid(
            "payload_schema",
            f"the payload does not fit the schema of tool {tool.name!r}, version {tool.version}; do not run the tool",
            tool_version=tool.version,
            errors=[{"pointer": f"{command.payload_pointer}{fault.pointer}", "detail": fault.detail} for fault in faults],
        )


def _register(draft: Draft, effect: Effect, compensation: Compensation | None) -> Decision:
    draft.open()
    draft.change_session(last_step=effect.step_index)
    draft.add_effect(effect)
    return Execute(effect=effect, undo_entry=intents.intend(draft, effect, compensation), is_new=True)


def _park(draft: Draft, effect: Effect, ttl_seconds: int) -> Decision:
    question = Approval(
        step_index=effect.step_index,
        state=ApprovalState.PENDING,
        requested_by=draft.session.owner,  # only the owner's agents can ask
        requested_at=draft.now,
        expires_at=draft.now + timedelta(seconds=ttl_seconds),
        ttl_seconds=ttl_seconds,
    )
    draft.open()
    draft.move_session(SessionState.AWAITING_APPROVAL, last_step=effect.step_index)
    draft.add_effect(effect)
    draft.ask_approval(question)
    draft.record(
        EntryKind.AWAITING_APPROVAL,
        effect.step_index,
        body=intents.told(effect) | {"expires_at": time_text(question.expires_at), "ttl_seconds": ttl_seconds},
        contents={"payload": effect.payload},
    )
    return AwaitApproval(effect=effect, approval=question)


def _effect(draft: Draft, command: InterceptCommand, step: StepIndex, plan: _Plan) -> Effect:
    return Effect(
        step_index=step,
        effect_id=EffectId(draft.new_id()),
        tool=command.tool,
        tool_version=plan.tool_version,
        reversibility=plan.reversibility,
        state=EffectState.AWAITING_APPROVAL if plan.must_be_approved else EffectState.EXECUTING,
        outcome=None,
        payload=command.payload,
        payload_sha256=sha256(command.payload).digest(),
        result=None,
        error=None,
        request_key=command.request_key,
        request_sha256=command.request_sha256,
        attempt=1,
        traceparent=command.traceparent,
        registered_at=draft.now,
        executed_at=None,
        version=1,
    )


def _invalid(code: str, pointer: str, detail: str) -> Invalid:
    return Invalid(code, detail, errors=[{"pointer": pointer, "detail": detail}])


def _key_reused(effect: Effect) -> SagaError:
    return Invalid(
        "key_reused",
        f"this Idempotency-Key belongs to another request, the one that became step {effect.step_index}",
        step_index=effect.step_index,
    )


def _step_reused(effect: Effect) -> SagaError:
    return Conflict(
        "step_reused",
        f"step {effect.step_index} is another call: tool {effect.tool!r}, payload {effect.payload_sha256.hex()}",
        step_index=effect.step_index,
        tool=effect.tool,
        payload_sha256=effect.payload_sha256.hex(),
    )


def _step_settled(effect: Effect) -> SagaError:
    return Conflict(
        "step_settled",
        f"step {effect.step_index} is {effect.state}; take a new step",
        step_index=effect.step_index,
        state=effect.state.value,
        reason=effect.error,
    )
