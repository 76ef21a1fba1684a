"""May this call go ahead? One intercept against what is known of its session. Must not write: the draft keeps account."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import TypeAlias, assert_never

from app.domain import bindings, egress
from app.domain.draft import Draft
from app.domain.egress import EgressPolicy, UrlRefused
from app.domain.errors import Conflict, Invalid, SagaError
from app.domain.journal import time_text
from app.domain.json_text import dump
from app.domain.model import (
    MAX_STEP_INDEX,
    Approval,
    Compensation,
    Effect,
    EffectId,
    EffectState,
    EntryKind,
    Reversibility,
    SessionState,
    StepIndex,
    UndoEntry,
    UndoId,
    UndoState,
)
from app.domain.references import BadReference

MAX_OPEN_REFERENCES = 32  # so that binding a result of a megabyte stays affordable; real descriptors have one to three


@dataclass(frozen=True, slots=True, kw_only=True)
class InterceptCommand:
    """One intercept as asked: `payload` is the exact UTF-8 bytes of the call's arguments.

    `reversibility` and `compensation` are the inline ones. `request_sha256` is the fingerprint of the whole request.
    """

    tool: str
    payload: bytes
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
    """The rows that an intercept meets: the effect at its step, the one under its key, and those not settled yet."""

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
        return _repeat(seen.under_key, seen, is_same_request=True)
    if seen.at_step is not None:
        if not _is_same_call(seen.at_step, command):
            return Refuse(error=_step_reused(seen.at_step))
        return _repeat(seen.at_step, seen, is_same_request=False)
    return _new(draft, command, seen, rules)


def _is_same_call(effect: Effect, command: InterceptCommand) -> bool:
    return effect.tool == command.tool and effect.payload_sha256 == sha256(command.payload).digest()


def _repeat(effect: Effect, seen: Seen, *, is_same_request: bool) -> Decision:
    match effect.state:
        case EffectState.EXECUTING if is_same_request:
            return Execute(effect=effect, undo_entry=seen.undo_of_repeat, is_new=False)
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


def _new(draft: Draft, command: InterceptCommand, seen: Seen, rules: InterceptRules) -> Decision:
    refusal = may_take_effects(draft)
    if refusal is not None:
        return Refuse(error=refusal)
    try:
        step = _step(draft.session.last_step, command.step_index)
        reversibility = _classify(command, rules)
        _check_urls(command, rules)
    except SagaError as error:
        return Refuse(error=error)
    if reversibility is Reversibility.IRREVERSIBLE:
        if seen.unsettled:
            return Refuse(error=_unsettled(seen.unsettled))
        return _park(draft, command, step, rules)
    return _register(draft, command, step, reversibility)


def may_take_effects(draft: Draft) -> SagaError | None:
    """Say why the session takes no new effect, or None if it does."""
    session = draft.session
    match session.state:
        case SessionState.ACTIVE:
            return None
        case SessionState.AWAITING_APPROVAL:
            return Conflict(
                "session_awaiting_approval",
                f"session {session.session_id} waits for a person to decide an earlier call; do not run the tool",
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


def _classify(command: InterceptCommand, rules: InterceptRules) -> Reversibility:
    """Say what it takes to undo the call: for a tool nobody registered, what stands inline, else irreversible (fail closed)."""
    inline, compensation = command.reversibility, command.compensation
    if not rules.is_inline_allowed and (compensation is not None or inline not in {None, Reversibility.IRREVERSIBLE}):
        raise Invalid(
            "inline_not_allowed",
            f"tool {command.tool!r} is not registered and this deployment takes no inline class or compensation",
            errors=[{"pointer": "/compensation" if compensation else "/reversibility", "detail": "not allowed inline"}],
        )
    # A call that says how to undo itself and nothing else is what the second seed calls the default: compensatable.
    reversibility = inline or (Reversibility.COMPENSATABLE if compensation else Reversibility.IRREVERSIBLE)
    match reversibility:
        case Reversibility.REVERSIBLE | Reversibility.COMPENSATABLE:
            if compensation is None:
                raise Invalid(
                    "tool_needs_compensation",
                    f"a {reversibility} call needs a compensation, and none was given",
                    errors=[{"pointer": "/compensation", "detail": "required for this reversibility"}],
                )
        case Reversibility.READ_ONLY | Reversibility.IRREVERSIBLE:
            if compensation is not None:
                raise Invalid(
                    "compensation_not_allowed",
                    f"a {reversibility} call has no compensation, and one was given",
                    errors=[{"pointer": "/compensation", "detail": f"not allowed for {reversibility}"}],
                )
        case _:
            assert_never(reversibility)
    return reversibility


def _check_urls(command: InterceptCommand, rules: InterceptRules) -> None:
    """Refuse an undo address that could never be called now, not at undo."""
    compensation = command.compensation
    if compensation is None:
        return
    urls = {"/compensation/url": compensation.url}
    if compensation.unknown is not None and compensation.unknown.url is not None:
        urls["/compensation/unknown/url"] = compensation.unknown.url
    for pointer, url in urls.items():
        try:
            egress.check_url(url, rules.egress)
        except UrlRefused as refused:
            raise Invalid(
                "url_refused",
                f"the undo could never be sent there: {refused.detail}",
                reason=refused.reason,
                errors=[{"pointer": pointer, "detail": refused.detail}],
            ) from refused


def _register(draft: Draft, command: InterceptCommand, step: StepIndex, reversibility: Reversibility) -> Decision:
    compensation = command.compensation
    effect = _effect(draft, command, step, reversibility, EffectState.EXECUTING)
    undo_entry: UndoEntry | None = None
    if compensation is not None:
        refusal = _unbindable(compensation, effect)
        if refusal is not None:
            return Refuse(error=refusal)
        undo_entry = UndoEntry(
            undo_id=UndoId(draft.new_id()),
            stack_position=step,
            state=UndoState.PENDING,
            compensation=compensation,
            by_hand=False,
            registered_at=draft.now,
            compensated_at=None,
        )
    draft.open()
    draft.change_session(last_step=step)
    draft.add_effect(effect)
    if undo_entry is not None:
        draft.add_undo_entry(undo_entry)
    draft.record(EntryKind.INTENT, step, body=_told(effect, undo_entry), contents=_contents(effect, undo_entry))
    return Execute(effect=effect, undo_entry=undo_entry, is_new=True)


def _park(draft: Draft, command: InterceptCommand, step: StepIndex, rules: InterceptRules) -> Decision:
    effect = _effect(draft, command, step, Reversibility.IRREVERSIBLE, EffectState.AWAITING_APPROVAL)
    approval = Approval(
        step_index=step,
        requested_by=draft.session.owner,  # only the owner's agents can ask
        requested_at=draft.now,
        expires_at=draft.now + timedelta(seconds=rules.approval_ttl_seconds),
    )
    draft.open()
    draft.move_session(SessionState.AWAITING_APPROVAL, last_step=step)
    draft.add_effect(effect)
    draft.ask_approval(approval)
    draft.record(
        EntryKind.AWAITING_APPROVAL,
        step,
        body=_told(effect, None) | {"expires_at": time_text(approval.expires_at)},
        contents=_contents(effect, None),
    )
    return AwaitApproval(effect=effect, approval=approval)


def _effect(draft: Draft, command: InterceptCommand, step: StepIndex, reversibility: Reversibility, state: EffectState) -> Effect:
    return Effect(
        step_index=step,
        effect_id=EffectId(draft.new_id()),
        tool=command.tool,
        reversibility=reversibility,
        state=state,
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


def _told(effect: Effect, undo_entry: UndoEntry | None) -> dict[str, object]:
    body: dict[str, object] = {
        "effect_id": str(effect.effect_id),
        "tool": effect.tool,
        "reversibility": effect.reversibility.value,
        "forward_key": effect.forward_key,
    }
    if undo_entry is not None:
        body |= {"undo_id": str(undo_entry.undo_id), "undo_url": undo_entry.compensation.url}
    return body


def _contents(effect: Effect, undo_entry: UndoEntry | None) -> dict[str, bytes]:
    contents = {"payload": effect.payload}
    if undo_entry is not None:
        contents["args"] = undo_entry.compensation.args
    return contents


def _unbindable(compensation: Compensation, effect: Effect) -> SagaError | None:
    """Say which reference cannot be bound now and never will be; `result#` ones wait for the commit."""
    templates = {"/compensation/args": compensation.args}
    if compensation.unknown is not None:
        templates["/compensation/unknown/args"] = compensation.unknown.args
    for pointer, args in templates.items():
        try:
            bound = bindings.bind_args(args, effect)
        except BadReference as bad:
            return Invalid("bad_reference", bad.detail, errors=[{"pointer": pointer + bad.pointer, "detail": bad.detail}])
        if bound.missing:
            errors = [{"pointer": pointer + missing.where, "detail": f"{missing} leads nowhere"} for missing in bound.missing]
            return Invalid("unresolved_reference", "a reference into the payload or the effect leads nowhere", errors=errors)
        if len(bound.open) + len(bound.missing) > MAX_OPEN_REFERENCES:
            detail = f"expected at most {MAX_OPEN_REFERENCES} references into the result"
            return Invalid("args_too_large", detail, errors=[{"pointer": pointer, "detail": detail}])
        if len(dump(bound.args)) > bindings.MAX_BOUND_ARGS_BYTES:
            detail = f"the bound args are more than {bindings.MAX_BOUND_ARGS_BYTES} bytes"
            return Invalid("args_too_large", detail, errors=[{"pointer": pointer, "detail": detail}])
    return None


def _unsettled(effects: Sequence[Effect]) -> SagaError:
    steps = [{"step_index": effect.step_index, "tool": effect.tool, "state": effect.state.value} for effect in effects]
    return Conflict(
        "unsettled_effects",
        "an irreversible call has to wait until every earlier effect is committed or failed; do not run the tool",
        unsettled=steps,
    )


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
