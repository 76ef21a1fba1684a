"""A person's decision about a parked call, and the one release it allows. Must not trust a stored state where the journal can be asked.

Approving is not executing: approve leaves the session waiting; resume presents the bytes, and exactly the approved ones go ahead, once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from app.domain import intents, journal, outcomes, sending
from app.domain.draft import Draft
from app.domain.errors import Conflict, Forbidden, NotFound, SagaError
from app.domain.journal import Sealed, time_text
from app.domain.model import (
    Action,
    Approval,
    ApprovalState,
    CallId,
    CallKind,
    Effect,
    EffectState,
    EntryKind,
    OutgoingCall,
    Reversibility,
    Session,
    SessionState,
)
from app.domain.outcomes import Reported
from app.domain.tools import Definition

GATE = "approval-gate"
"""Who the second seed's journal says has decided; ours names the person as the actor and keeps the gate's name in the body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Approve:
    """A yes. `by` is the authenticated subject, `claimed_approver` whom the request names; `payload_sha256` what that person saw."""

    by: str
    reason: str | None = None
    claimed_approver: str | None = None
    payload_sha256: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """A no, with its reason. `is_continued`: the session goes on without this call; else it fails and is unwound."""

    by: str
    reason: str
    claimed_approver: str | None = None
    is_continued: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The APPROVED entry as the journal has it, and the hash that whatever follows it names as its predecessor's."""

    entry: Sealed
    linked_by: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """What a resume meets: the call, what failing its session takes, the journal's word, and the tool's version that was seen at intercept.

    What that version says of undo and action holds, whatever was registered since.
    """

    seen: Reported
    known: Sequence[Reported]
    evidence: Evidence | None
    definition: Definition | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Who presents which bytes, under which Idempotency-Key."""

    by: str
    payload: bytes
    request_key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The call goes ahead: `reported` is to be run by whom it was released to, or, where there is an action, by the service."""

    reported: Reported
    is_action: bool


def approve(draft: Draft, seen: Reported, known: Sequence[Reported], decision: Approve) -> Reported | SagaError:
    """Record a person's yes; nothing runs. The same person's repeat changes nothing.

    `known` is what failing the session needs, should the question turn out to be too old.
    """
    asked = _asked(draft.session, seen)
    if isinstance(asked, SagaError):
        return asked
    if decision.by == asked.requested_by:
        return _same_subject(asked)
    if decision.payload_sha256 is not None and decision.payload_sha256 != seen.effect.payload_sha256:
        return _payload_differs(seen.effect)
    if asked.state in {ApprovalState.APPROVED, ApprovalState.RELEASED} and asked.decided_by == decision.by:
        return seen
    if asked.state is not ApprovalState.PENDING:
        return _already_decided(asked)
    if draft.now >= asked.expires_at:
        return _already_decided(_expire(draft, seen, asked, known))
    approved = draft.change_approval(
        asked,
        ApprovalState.APPROVED,
        decided_at=draft.now,
        decided_by=decision.by,
        claimed_approver=decision.claimed_approver,
        reason=decision.reason,
    )
    effect = draft.move_effect(seen.effect, EffectState.APPROVED)
    draft.record(EntryKind.APPROVED, effect.step_index, body=_decided(effect, approved, decision.by), contents={"payload": effect.payload})
    return replace(seen, effect=effect, approval=approved)


def reject(draft: Draft, seen: Reported, known: Sequence[Reported], decision: Reject) -> Reported | SagaError:
    """Record a person's no: the session fails and is unwound, or goes on without the call. The same person's repeat changes nothing."""
    asked = _asked(draft.session, seen)
    if isinstance(asked, SagaError):
        return asked
    if decision.by == asked.requested_by:
        return _same_subject(asked)
    is_repeat = asked.decided_by == decision.by and asked.is_continued is decision.is_continued
    if asked.state is ApprovalState.REJECTED and is_repeat:
        return seen
    if asked.state is not ApprovalState.PENDING:
        return _already_decided(asked)
    if draft.now >= asked.expires_at:
        return _already_decided(_expire(draft, seen, asked, known))
    rejected = draft.change_approval(
        asked,
        ApprovalState.REJECTED,
        decided_at=draft.now,
        decided_by=decision.by,
        claimed_approver=decision.claimed_approver,
        reason=decision.reason,
        is_continued=decision.is_continued,
    )
    effect = draft.move_effect(seen.effect, EffectState.REJECTED, error=f"rejected: {decision.reason}")
    then = {"then": "continue" if decision.is_continued else "unwind"}
    draft.record(
        EntryKind.REJECTED, effect.step_index, body=_decided(effect, rejected, decision.by) | then, contents={"payload": effect.payload}
    )
    settled = replace(seen, effect=effect, approval=rejected)
    if decision.is_continued:
        draft.move_session(SessionState.ACTIVE)
    else:
        outcomes.fail_session(draft, f"step {effect.step_index} was rejected: {decision.reason}", _with(known, settled))
    return settled


def release(draft: Draft, parked: Parked, resume: Resume) -> Released | SagaError:
    """Let exactly the approved bytes go ahead, once, and say to whom; the session is active again. Fails closed on every doubt."""
    seen, known, evidence = parked.seen, parked.known, parked.evidence
    asked = _asked(draft.session, seen)
    if isinstance(asked, SagaError):
        return asked
    if evidence is None or not _stands(draft.session, seen.effect, evidence):
        return _not_approved(seen.effect, asked)
    if asked.released_at is not None:
        return _released_before(parked, asked, resume)
    if asked.state is not ApprovalState.APPROVED:
        return _approval_expired(asked) if asked.state is ApprovalState.EXPIRED else _already_decided(asked)
    if not _is_what_was_approved(seen.effect, evidence, resume.payload):
        return _mismatch(draft, seen, asked, known, resume)
    if draft.now >= asked.expires_at:
        return _approval_expired(_expire(draft, seen, asked, known))
    if outcomes.is_past_deadline(draft):
        outcomes.fail_session(draft, outcomes.AGENT_TIMEOUT, known)
        return outcomes.past_deadline(draft.session)
    return _let_go(draft, parked, asked, evidence, resume)


def expire(draft: Draft, known: Sequence[Reported]) -> None:
    """End a question that nobody answered in time, or whose answer nobody used; anything else, one just decided above all, stays."""
    for seen in known:
        asked = seen.approval
        if asked is not None and asked.state in {ApprovalState.PENDING, ApprovalState.APPROVED} and draft.now >= asked.expires_at:
            _expire(draft, seen, asked, known)
            return


def message(effect: Effect, asked: Approval) -> str:
    """Return what a model, or a person, is told of a parked call (the second seed's text while it waits)."""
    tool = f"Tool '{effect.tool}'"
    match asked.state:
        case ApprovalState.PENDING:
            return f"[AWAITING_APPROVAL] {tool} requires human approval"
        case ApprovalState.APPROVED:
            return (
                f"[APPROVED] {tool} was approved and has not run; resume it with exactly its payload before {time_text(asked.expires_at)}"
            )
        case ApprovalState.RELEASED:
            return f"[RELEASED] {tool} was released once; it is {effect.state}"
        case ApprovalState.REJECTED | ApprovalState.MISMATCHED:
            return f"[REJECTED] {tool} did not run: {effect.error}"
        case ApprovalState.EXPIRED:
            return f"[EXPIRED] {tool} did not run: {effect.error}"
        case ApprovalState.CANCELLED:
            return f"[CANCELLED] {tool} did not run: its session failed before it was released"
        case _:
            assert_never(asked.state)


def _asked(session: Session, seen: Reported) -> Approval | SagaError:
    if seen.approval is None:
        step = seen.effect.step_index
        return NotFound(
            "approval_not_found",
            f"step {step} of session {session.session_id} never asked for approval",
            session_id=session.session_id,
            step_index=step,
        )
    return seen.approval


def _decided(effect: Effect, asked: Approval, by: str) -> dict[str, object]:
    """Return what a decision's entry says beside who and when: what was decided about, and under which rule."""
    return intents.told(effect) | {
        "gate": GATE,
        "approver": by,
        "claimed_approver": asked.claimed_approver,
        "reason": asked.reason,
        "requested_by": asked.requested_by,
        "expires_at": time_text(asked.expires_at),
        "ttl_seconds": asked.ttl_seconds,
    }


def _stands(session: Session, effect: Effect, evidence: Evidence) -> bool:
    """Tell whether the entry is about this call, and an unchanged link of the chain, not one that somebody put beside it."""
    entry = evidence.entry
    is_about_it = entry.kind == EntryKind.APPROVED and entry.step == effect.step_index
    is_unchanged = entry.digest == journal.compute_digest(session.org, session.session_id, entry)
    return is_about_it and is_unchanged and evidence.linked_by == entry.digest


def _is_what_was_approved(effect: Effect, evidence: Evidence, payload: bytes) -> bool:
    """Compare byte for byte with what is kept, and by fingerprint with what was approved."""
    return payload == effect.payload and journal.has_content(evidence.entry, "payload", payload)


def _let_go(draft: Draft, parked: Parked, asked: Approval, evidence: Evidence, resume: Resume) -> Released:
    seen, definition = parked.seen, parked.definition
    action = definition.action if definition else None
    is_undoable = seen.effect.reversibility in {Reversibility.REVERSIBLE, Reversibility.COMPENSATABLE}
    released = draft.change_approval(
        asked, ApprovalState.RELEASED, released_at=draft.now, released_to=resume.by, release_key=resume.request_key
    )
    effect = draft.move_effect(seen.effect, EffectState.EXECUTING)
    draft.move_session(SessionState.ACTIVE)
    told = {"released_to": resume.by, "approved_seq": evidence.entry.seq, "action_url": action.url if action else None}
    entry = intents.intend(draft, effect, definition.compensation if definition and is_undoable else None, told)
    if action is not None:
        draft.add_call(_call_of(draft, effect, action))
    return Released(reported=replace(seen, effect=effect, approval=released, undo_entry=entry), is_action=action is not None)


def _call_of(draft: Draft, effect: Effect, action: Action) -> OutgoingCall:
    return sending.new_call(CallId(effect.effect_id), CallKind.ACTION, effect.step_index, action.url, draft.now, action.retry)


def _released_before(parked: Parked, asked: Approval, resume: Resume) -> Released | SagaError:
    """Give the releasing principal the answer that was lost; anybody else, and any other request, learns only that it is done."""
    seen, definition = parked.seen, parked.definition
    is_lost_answer = (
        resume.request_key is not None
        and (asked.release_key, asked.released_to) == (resume.request_key, resume.by)
        and resume.payload == seen.effect.payload
    )
    is_action = definition is not None and definition.action is not None
    if is_lost_answer and (is_action or seen.effect.state is EffectState.EXECUTING):
        return Released(reported=seen, is_action=is_action)
    return Conflict(
        "already_released",
        f"step {seen.effect.step_index} was released to {asked.released_to}; it is {seen.effect.state}",
        step_index=seen.effect.step_index,
        state=seen.effect.state.value,
        released_to=asked.released_to,
        released_at=None if asked.released_at is None else time_text(asked.released_at),
    )


def _mismatch(draft: Draft, seen: Reported, asked: Approval, known: Sequence[Reported], resume: Resume) -> SagaError:
    """Consume the approval: what was about to run is not what a person has seen."""
    step = seen.effect.step_index
    sentence = f"the payload of step {step} has changed since it was approved; it was not run, and cannot be resumed any more"
    consumed = draft.change_approval(asked, ApprovalState.MISMATCHED)
    effect = draft.move_effect(seen.effect, EffectState.REJECTED, error="the payload presented at resume was not the approved one")
    draft.record(EntryKind.PAYLOAD_MISMATCH, step, body=intents.told(effect), contents={"presented": resume.payload})
    settled = replace(seen, effect=effect, approval=consumed)
    outcomes.fail_session(draft, f"the payload of step {step} was not the approved one", _with(known, settled))
    return Conflict("payload_changed", sentence, step_index=step)


def _expire(draft: Draft, seen: Reported, asked: Approval, known: Sequence[Reported]) -> Approval:
    """End a question: as after a rejection the session fails, but nobody said no."""
    was = "nobody decided" if asked.state is ApprovalState.PENDING else "it was approved, but not resumed"
    error = f"{was} before {time_text(asked.expires_at)}"
    expired = draft.change_approval(asked, ApprovalState.EXPIRED)
    effect = draft.move_effect(seen.effect, EffectState.EXPIRED, error=error)
    draft.record(
        EntryKind.EXPIRED,
        effect.step_index,
        body=intents.told(effect) | {"expires_at": time_text(asked.expires_at), "was": asked.state.value},
    )
    settled = replace(seen, effect=effect, approval=expired)
    outcomes.fail_session(draft, f"the approval of step {effect.step_index} expired: {error}", _with(known, settled))
    return expired


def _with(known: Sequence[Reported], settled: Reported) -> list[Reported]:
    return [settled, *(seen for seen in known if seen.effect.step_index != settled.effect.step_index)]


def _same_subject(asked: Approval) -> Forbidden:
    return Forbidden(
        "same_subject",
        f"step {asked.step_index} was asked for by {asked.requested_by}; somebody else has to decide it",
        step_index=asked.step_index,
        requested_by=asked.requested_by,
    )


def _payload_differs(effect: Effect) -> Conflict:
    return Conflict(
        "payload_differs",
        f"the payload of step {effect.step_index} has the fingerprint {effect.payload_sha256.hex()}; nothing was decided",
        step_index=effect.step_index,
        payload_sha256=effect.payload_sha256.hex(),
    )


def _already_decided(asked: Approval) -> Conflict:
    is_persons = asked.state in {ApprovalState.APPROVED, ApprovalState.RELEASED, ApprovalState.REJECTED}
    decided_by = asked.decided_by if is_persons else None  # what became of it later was not that person's doing
    by = f" by {decided_by}" if decided_by else ""
    return Conflict(
        "already_decided",
        f"the approval of step {asked.step_index} is {asked.state}{by} already",
        step_index=asked.step_index,
        state=asked.state.value,
        decided_by=decided_by,
    )


def _not_approved(effect: Effect, asked: Approval) -> Conflict:
    return Conflict(
        "not_approved",
        f"no approval of step {effect.step_index} is recorded in the journal; the request is {asked.state}",
        step_index=effect.step_index,
        state=asked.state.value,
    )


def _approval_expired(asked: Approval) -> Conflict:
    return Conflict(
        "approval_expired",
        f"the approval of step {asked.step_index} expired at {time_text(asked.expires_at)}; it was not run",
        step_index=asked.step_index,
        expires_at=time_text(asked.expires_at),
    )
