"""Bind a compensation's references for one effect, in one pass over what the descriptor said. Must not keep half-bound args.

Payload, effect and result never change once known, so binding at first send gives what binding earlier would have given; and because
the stored args are always the descriptor's own, nothing that a payload or a result holds is ever taken for a reference.
"""

from functools import lru_cache

from app.domain.compensation import KEPT
from app.domain.json_text import Json, JsonFault, dump, fits, parse
from app.domain.model import Compensation, Effect, Outcome
from app.domain.references import UNREADABLE, BadReference, Bound, Document, Reference, Source, bind

MAX_BOUND_ARGS_BYTES = 262_144  # what a payload may have (contract, section 6), so that binding cannot multiply it

MAX_REFERENCES = 32  # so that binding a result of a megabyte stays affordable; real descriptors have one to three

_REFERENCE_KEY = b'"$ref"'  # compact text never escapes these characters, so args without them hold no reference


def bind_args(args: bytes, effect: Effect) -> Bound:
    """Bind all that is known of `effect` into `args`; `result#` references stay open until the effect is committed.

    Raises:
        BadReference: something that looks like a reference is none.
    """
    if _REFERENCE_KEY not in args:
        return Bound(args=parse(args), open=(), missing=())
    documents: dict[Source, Document] = {}
    if b"payload#" in args:
        documents[Source.PAYLOAD] = _document(effect.payload)
    if b"effect#" in args:
        documents[Source.EFFECT] = _effect_document(effect)
    if effect.outcome is Outcome.COMMITTED and b"result#" in args:
        documents[Source.RESULT] = UNREADABLE if effect.result is None else _document(effect.result)
    return bind(_template(args), documents)


def binds_at_intercept(args: bytes) -> bool:
    """Tell whether checked args may hold a reference that is bound before the call is run."""
    return _REFERENCE_KEY in args and (b"payload#" in args or b"effect#" in args)


def check_template(args: bytes) -> None:
    """Refuse args whose references could never be bound.

    Raises:
        BadReference: something that looks like a reference is none, or there are too many.
    """
    found = bind(parse(args), {}).open if _REFERENCE_KEY in args else ()
    if len(found) > MAX_REFERENCES:
        raise BadReference(found[MAX_REFERENCES].where, f"expected at most {MAX_REFERENCES} references, found {len(found)}")


def unresolved(compensation: Compensation, effect: Effect) -> tuple[Reference, ...]:
    """Return the references that a committed effect's result does not satisfy."""
    return bind_args(compensation.args, effect).missing


def body_to_send(args: bytes, effect: Effect) -> bytes | None:
    """Return the exact bytes to send, or None where a reference is open, or the bytes would be too many: never half-filled."""
    bound = bind_args(args, effect)
    if bound.open or bound.missing:
        return None
    return dump(bound.args) if fits(bound.args, max_bytes=MAX_BOUND_ARGS_BYTES) else None


@lru_cache(KEPT)
def _template(args: bytes) -> Json:
    """Read a descriptor's args, which are the same for each call of a tool; nobody changes the tree."""
    return parse(args)


def _document(text: bytes) -> Document:
    try:
        return parse(text)
    except JsonFault:
        return UNREADABLE


def _effect_document(effect: Effect) -> Json:
    return {
        "effect_id": str(effect.effect_id),
        "forward_key": effect.forward_key,
        "step_index": effect.step_index,
        "tool": effect.tool,
        "payload_sha256": effect.payload_sha256.hex(),
    }
