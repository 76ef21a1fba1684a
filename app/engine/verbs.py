"""The shape that every verb has: lock, know a repeat, decide, write, commit, then answer. Must not decide anything itself."""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from app.domain.access import may_see, session_not_found
from app.domain.draft import Changes, Draft, Surroundings
from app.domain.errors import Invalid, NotFound, SagaError, Stale
from app.domain.model import CallKind, Principal, SessionId, StepIndex
from app.domain.outcomes import MOVABLE_OUTCOMES, Reported
from app.engine.events import Events
from app.storage import answers, calls, sessions, views
from app.storage import changes as storage_changes
from app.storage.answers import KeptAnswer, RememberedAnswer, RepeatableRequest
from app.storage.database import Database, Transaction
from app.storage.sessions import Locked, LockedEffect, Wanted
from app.storage.views import SessionView


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Who asks something of which session.

    `repeatable` names the request, so that a repeat is known; `versions` are those, of the session or of the effect, that the caller saw.
    """

    principal: Principal
    session_id: SessionId
    repeatable: RepeatableRequest | None = None
    versions: frozenset[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a verb is answered with; `is_replayed`: the same request had this answer before, and nothing was done now."""

    status: int
    body: bytes
    is_replayed: bool = False


EffectDecision: TypeAlias = Callable[[Transaction, Draft, Locked, Reported], Awaitable[Reported | SagaError]]
SessionDecision: TypeAlias = Callable[[Transaction, Draft, Locked], Awaitable[SagaError | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verbs:
    """What all verbs share, over one database; `events` is told what was committed."""

    database: Database
    events: Events
    random_bytes: Callable[[int], bytes] = secrets.token_bytes

    async def on_effect(self, ask: Ask, wanted: Wanted, decide: EffectDecision, render: Callable[[Reported], bytes]) -> Answer:
        """Run a verb about the effect at `wanted.step`; it is answered with the effect as it is then.

        Raises:
            NotFound: no such effect for this caller. Stale: another version than the caller saw. SagaError: what the decision refuses.
        """
        written = refusal = answer = None
        async with self.database.transaction(ask.principal.org) as tx:
            locked = await lock(tx, ask.principal, ask.session_id, wanted)
            replayed = await _replay(tx, ask)
            if replayed is not None:
                return replayed
            found = effect_at(locked, wanted.step)
            check_version(f"step {wanted.step}", found.effect.version, ask)
            draft = self.draft(locked, ask.principal)
            decided = await decide(tx, draft, locked, reported(found))
            if not draft.is_empty:  # a refusal may leave evidence, which is committed before it is answered
                written = await write(tx, draft)
            if isinstance(decided, SagaError):
                refusal = decided
            else:
                answer = await _remember(tx, ask, Answer(status=200, body=render(decided)))
        if written is not None:
            self.events.announce(written)
        if answer is None:
            raise refusal or AssertionError("either an answer or a refusal")
        return answer

    async def on_session(
        self, ask: Ask, wanted: Wanted, decide: SessionDecision, render: Callable[[SessionView], bytes] | None, *, status: int
    ) -> Answer:
        """Run a verb about a session; it is answered with the session as it is then, or with nothing, where that will be looked at later.

        Raises:
            NotFound: no such session for this caller. Stale: another version than the caller saw. SagaError: what the decision refuses.
        """
        written = answer = None
        async with self.database.transaction(ask.principal.org) as tx:
            locked = await lock(tx, ask.principal, ask.session_id, wanted)
            replayed = await _replay(tx, ask)
            if replayed is not None:
                return replayed
            check_version(f"session {ask.session_id}", locked.session.version, ask)
            draft = self.draft(locked, ask.principal)
            refusal = await decide(tx, draft, locked)
            if not draft.is_empty:
                written = await write(tx, draft)
            if refusal is None:
                body = b"" if render is None else render(await views.session_view(tx, ask.principal, ask.session_id))
                answer = await _remember(tx, ask, Answer(status=status, body=body))
        if written is not None:
            self.events.announce(written)
        if answer is None:
            raise refusal or AssertionError("either an answer or a refusal")
        return answer

    def draft(self, locked: Locked, principal: Principal) -> Draft:
        """Open the account of a decision that a caller asked for."""
        return self.draft_as(f"{principal.role}:{principal.subject}", locked)

    def draft_as(self, actor: str, locked: Locked) -> Draft:
        """Open the account of a decision that `actor` causes."""
        return Draft(locked.session, Surroundings(now=locked.now, actor=actor, random_bytes=self.random_bytes))


async def lock(tx: Transaction, principal: Principal, session_id: SessionId, wanted: Wanted) -> Locked:
    """Lock a session that the caller may see.

    Raises:
        NotFound: it is not there, or not the caller's to see.
    """
    return visible(await sessions.lock(tx, session_id, wanted), principal, session_id)


def visible(locked: Locked | None, principal: Principal, session_id: SessionId) -> Locked:
    """Return what was locked, if it is there for this caller."""
    if locked is None or not may_see(principal, locked.session):
        raise session_not_found(session_id)
    return locked


async def write(tx: Transaction, draft: Draft) -> Changes:
    """Seal an account and write it."""
    changes = draft.changes()
    await storage_changes.write(tx, [changes])
    return changes


def effect_at(locked: Locked, step: StepIndex | None) -> LockedEffect:
    """Return the effect at `step`.

    Raises:
        NotFound: a visible session has no such step.
    """
    found = locked.at_step(step)
    if found is None:
        raise effect_not_found(locked.session.session_id, step)
    return found


def effect_not_found(session_id: SessionId, step: StepIndex | None) -> NotFound:
    """Return the answer for a step that a visible session does not have."""
    return NotFound("effect_not_found", f"session {session_id} has no step {step}", session_id=session_id, step_index=step)


def reported(found: LockedEffect) -> Reported:
    """Return what the domain needs of a locked effect."""
    return Reported(effect=found.effect, undo_entry=found.undo_entry, approval=found.approval)


async def known(tx: Transaction, locked: Locked) -> list[Reported]:
    """Return what is known of the locked effects, with the service's own calls of those that may still turn out one way or the other.

    Where such a call is under way, every pending undo entry comes along: several may turn out not to have happened at once.
    """
    seen = [reported(found) for found in locked.effects]
    released = [one.effect.effect_id for one in seen if one.approval is not None and one.effect.state in MOVABLE_OUTCOMES]
    if not released:
        return seen
    session_id = locked.session.session_id
    found = await calls.lock_calls(tx, session_id, released)
    actions = {call.step_index: call for call in found if call.kind is CallKind.ACTION}
    if any(call.due_at is not None for call in actions.values()):
        all_pending = locked.joined(await sessions.lock(tx, session_id, Wanted(pending=True)))
        seen = [reported(one) for one in all_pending.effects]
    return [replace(one, action=actions.get(one.effect.step_index)) for one in seen]


async def _replay(tx: Transaction, ask: Ask) -> Answer | None:
    if ask.repeatable is None:
        return None
    found = await answers.find_many(tx, [(ask.session_id, ask.repeatable)])
    return replayed(ask, found.get(ask.session_id))


def replayed(ask: Ask, remembered: RememberedAnswer | None) -> Answer | None:
    """Return the answer that the same request had before.

    Raises:
        Invalid: `key_reused`, the key belongs to another request.
    """
    if ask.repeatable is None or remembered is None:
        return None
    if remembered.request_sha256 != ask.repeatable.sha256:
        raise Invalid("key_reused", "this Idempotency-Key belongs to another request of the same method and path")
    return Answer(status=remembered.status, body=remembered.body, is_replayed=True)


def kept(ask: Ask, answer: Answer) -> KeptAnswer | None:
    """Return what is to be remembered for a repeat of the request; None where it does not name itself, or is a repeat."""
    if ask.repeatable is None or answer.is_replayed:
        return None
    return KeptAnswer(session_id=ask.session_id, request=ask.repeatable, status=answer.status, body=answer.body)


async def _remember(tx: Transaction, ask: Ask, answer: Answer) -> Answer:
    to_keep = kept(ask, answer)
    if to_keep is not None:
        await answers.keep_many(tx, [to_keep])
    return answer


def check_version(what: str, version: int, ask: Ask) -> None:
    """Refuse what was asked of another version than the current one.

    Raises:
        Stale: `version_differs`.
    """
    if ask.versions is not None and version not in ask.versions:
        raise Stale("version_differs", f"{what} is at version {version} by now", current_version=version)
