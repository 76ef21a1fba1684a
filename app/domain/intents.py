"""Let a call go ahead: its undo entry goes on the stack, and the journal is told INTENT. Must not decide whether it may."""

from collections.abc import Mapping

from app.domain import bindings
from app.domain.draft import Draft
from app.domain.errors import Invalid, SagaError
from app.domain.json_text import fits
from app.domain.model import Compensation, Effect, EntryKind, UndoEntry, UndoId, UndoState


def intend(
    draft: Draft, effect: Effect, compensation: Compensation | None, told_besides: Mapping[str, object] | None = None
) -> UndoEntry | None:
    """Push the undo entry of a call that is about to be run, if it has an undo, and record INTENT."""
    entry: UndoEntry | None = None
    if compensation is not None:
        entry = UndoEntry(
            undo_id=UndoId(draft.new_id()),
            stack_position=effect.step_index,
            state=UndoState.PENDING,
            compensation=compensation,
            by_hand=False,
            registered_at=draft.now,
            compensated_at=None,
        )
        draft.add_undo_entry(entry)
    record_intent(draft, effect, entry, told_besides)
    return entry


def record_intent(draft: Draft, effect: Effect, entry: UndoEntry | None, told_besides: Mapping[str, object] | None = None) -> None:
    """Tell the journal that somebody is told to execute: the first time, or once more."""
    body = told(effect)
    contents = {"payload": effect.payload}
    if entry is not None:
        body |= {"undo_id": str(entry.undo_id), "undo_url": entry.compensation.url}
        contents["args"] = entry.compensation.args
    draft.record(EntryKind.INTENT, effect.step_index, body=body | dict(told_besides or {}), contents=contents)


def told(effect: Effect) -> dict[str, object]:
    """Return what the journal says of a call whenever it is asked for, decided about or told to execute."""
    return {
        "effect_id": str(effect.effect_id),
        "tool": effect.tool,
        "tool_version": effect.tool_version,
        "attempt": effect.attempt,
        "reversibility": effect.reversibility.value,
        "forward_key": effect.forward_key,
    }


def unbindable(compensation: Compensation, effect: Effect) -> SagaError | None:
    """Say which reference cannot be bound now and never will be; `result#` ones wait for the commit."""
    templates = {"/compensation/args": compensation.args}
    if compensation.unknown is not None:
        templates["/compensation/unknown/args"] = compensation.unknown.args
    for pointer, args in templates.items():
        if not bindings.binds_at_intercept(args) and len(args) <= bindings.MAX_BOUND_ARGS_BYTES:
            continue
        bound = bindings.bind_args(args, effect)
        if bound.missing:
            errors = [{"pointer": pointer + missing.where, "detail": f"{missing} leads nowhere"} for missing in bound.missing]
            return Invalid("unresolved_reference", "a reference into the payload or the effect leads nowhere", errors=errors)
        if not fits(bound.args, max_bytes=bindings.MAX_BOUND_ARGS_BYTES):
            detail = f"the bound args are more than {bindings.MAX_BOUND_ARGS_BYTES} bytes, or nest too deep"
            return Invalid("args_too_large", detail, errors=[{"pointer": pointer, "detail": detail}])
    return None
