"""The agent's verbs: open, intercept, commit, fail. Must not answer before its transaction is committed, nor decide anything itself."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from app.domain import intercept, outcomes
from app.domain.access import may_see, session_not_found
from app.domain.draft import Changes, Draft, Surroundings
from app.domain.errors import Conflict, NotFound, SagaError
from app.domain.intercept import InterceptCommand, InterceptRules, Refuse, Seen
from app.domain.model import EffectState, Principal, Reversibility, Session, SessionId, StepIndex
from app.domain.outcomes import FailReport, Reported
from app.engine.events import announce
from app.storage import changes as storage_changes
from app.storage import sessions
from app.storage.database import Database, Transaction
from app.storage.sessions import Locked, LockedEffect, NewSession, Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """What a PUT says of a session; None = not said. `metadata` is compact JSON text."""

    agent: str | None = None
    metadata: bytes | None = None
    idle_seconds: int | None = None
    deadline_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFailure:
    """The call that made a run fail."""

    step_index: StepIndex
    report: FailReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """The verbs over one database; `idle_seconds` is what a session gets that names none."""

    database: Database
    rules: InterceptRules
    idle_seconds: int
    random_bytes: Callable[[int], bytes] = secrets.token_bytes

    async def open(self, principal: Principal, session_id: SessionId, options: SessionOptions) -> bool:
        """Open a session, or find it there with the same options (False).

        Raises:
            NotFound: another agent's session. Conflict: it is there with other options.
        """
        async with self.database.transaction(principal.org) as tx:
            locked = await self._lock_or_open(tx, principal, session_id, Wanted(), options)
            draft = self._draft(locked, principal)
            draft.open()
            if draft.is_empty:
                _refuse_other_options(locked.session, options)
                return False
            written = await _write(tx, draft)
        announce(written)
        return True

    async def intercept(self, principal: Principal, session_id: SessionId, command: InterceptCommand) -> intercept.Decision:
        """Ask before doing; a new effect and its undo are durable when this returns.

        Raises:
            NotFound: another agent's session. SagaError: the call is refused and nothing is stored.
        """
        may_park = command.compensation is None and command.reversibility in {None, Reversibility.IRREVERSIBLE}
        wanted = Wanted(step=command.step_index, request_key=command.request_key, open=may_park)
        written = None
        async with self.database.transaction(principal.org) as tx:
            locked = await self._lock_or_open(tx, principal, session_id, wanted, SessionOptions())
            draft = self._draft(locked, principal)
            decision = intercept.decide(draft, command, _seen(locked, command), self.rules)
            if isinstance(decision, Refuse):
                raise decision.error
            if not draft.is_empty:
                written = await _write(tx, draft)
        if written is not None:
            announce(written)
        return decision

    async def commit(self, principal: Principal, session_id: SessionId, step: StepIndex, result: bytes) -> Reported:
        """Take the report that a call happened; `result` is compact JSON text.

        Raises:
            NotFound: no such effect for this caller. Conflict: too late, or it contradicts what is known.
        """
        return await self._report(principal, session_id, step, lambda draft, seen: outcomes.commit(draft, seen, result))

    async def fail_effect(self, principal: Principal, session_id: SessionId, step: StepIndex, report: FailReport) -> Reported:
        """Take the report that one call failed; the session goes on.

        Raises:
            NotFound: no such effect for this caller. Conflict: too late, or it contradicts what is known.
        """
        return await self._report(principal, session_id, step, lambda draft, seen: outcomes.fail_effect(draft, seen, report))

    async def fail_session(self, principal: Principal, session_id: SessionId, error: str, named: NamedFailure | None) -> None:
        """Fail a run: its newest undo is due when this returns. A repeat changes nothing.

        Raises:
            NotFound: no such session or effect for this caller. Conflict: completed, or `named` contradicts what is known.
        """
        written = None
        async with self.database.transaction(principal.org) as tx:
            wanted = Wanted(step=named.step_index if named else None, open=True, top=True)
            locked = await _lock(tx, principal, session_id, wanted)
            draft = self._draft(locked, principal)
            refusal = _fail(draft, locked, error, named)
            if refusal is not None:
                raise refusal
            if not draft.is_empty:
                written = await _write(tx, draft)
        if written is not None:
            announce(written)

    async def _report(
        self,
        principal: Principal,
        session_id: SessionId,
        step: StepIndex,
        decide: Callable[[Draft, Reported], Reported | SagaError],
    ) -> Reported:
        written = None
        async with self.database.transaction(principal.org) as tx:
            locked = await _lock(tx, principal, session_id, Wanted(step=step))
            seen = _effect_at(locked, step)
            draft = self._draft(locked, principal)
            decided = decide(draft, Reported(effect=seen.effect, undo_entry=seen.undo_entry))
            if not draft.is_empty:  # a refusal may leave evidence, which is committed before it is answered
                written = await _write(tx, draft)
        if written is not None:
            announce(written)
        if isinstance(decided, SagaError):
            raise decided
        return decided

    async def _lock_or_open(
        self, tx: Transaction, principal: Principal, session_id: SessionId, wanted: Wanted, options: SessionOptions
    ) -> Locked:
        locked = await sessions.lock(tx, session_id, wanted)
        if locked is None:
            new = NewSession(
                session_id=session_id,
                owner=principal.subject,
                agent=principal.subject if options.agent is None else options.agent,
                metadata=b"{}" if options.metadata is None else options.metadata,
                idle_seconds=self.idle_seconds if options.idle_seconds is None else options.idle_seconds,
                deadline_at=options.deadline_at,
            )
            await sessions.open_session(tx, new)
            locked = await sessions.lock(tx, session_id, wanted)
        return _visible(locked, principal, session_id)

    def _draft(self, locked: Locked, principal: Principal) -> Draft:
        actor = f"{principal.role}:{principal.subject}"
        return Draft(locked.session, Surroundings(now=locked.now, actor=actor, random_bytes=self.random_bytes))


async def _lock(tx: Transaction, principal: Principal, session_id: SessionId, wanted: Wanted) -> Locked:
    return _visible(await sessions.lock(tx, session_id, wanted), principal, session_id)


def _visible(locked: Locked | None, principal: Principal, session_id: SessionId) -> Locked:
    if locked is None or not may_see(principal, locked.session):
        raise session_not_found(session_id)
    return locked


async def _write(tx: Transaction, draft: Draft) -> Changes:
    changes = draft.changes()
    await storage_changes.write(tx, [changes])
    return changes


def _effect_at(locked: Locked, step: StepIndex) -> LockedEffect:
    found = locked.at_step(step)
    if found is None:
        raise effect_not_found(locked.session.session_id, step)
    return found


def effect_not_found(session_id: SessionId, step: StepIndex) -> NotFound:
    """Return the answer for a step that a visible session does not have."""
    return NotFound("effect_not_found", f"session {session_id} has no step {step}", session_id=session_id, step_index=step)


def _seen(locked: Locked, command: InterceptCommand) -> Seen:
    at_step, under_key = locked.at_step(command.step_index), locked.under_key(command.request_key)
    repeat = under_key or at_step
    return Seen(
        at_step=at_step.effect if at_step else None,
        under_key=under_key.effect if under_key else None,
        unsettled=[
            found.effect
            for found in locked.effects
            if found.effect.state in {EffectState.EXECUTING, EffectState.UNKNOWN}
            and found.effect.reversibility is not Reversibility.READ_ONLY
        ],
        undo_of_repeat=repeat.undo_entry if repeat else None,
        approval_of_repeat=repeat.approval if repeat else None,
    )


def _fail(draft: Draft, locked: Locked, error: str, named: NamedFailure | None) -> SagaError | None:
    known = {found.effect.step_index: Reported(effect=found.effect, undo_entry=found.undo_entry) for found in locked.effects}
    if named is not None and draft.session.state in outcomes.REPORTING_STATES:
        if named.step_index not in known:
            return effect_not_found(draft.session.session_id, named.step_index)
        reported = outcomes.fail_effect(draft, known[named.step_index], named.report)
        if isinstance(reported, SagaError):
            return reported
        known[named.step_index] = reported
    return outcomes.fail_session(draft, error, list(known.values()))


def _refuse_other_options(session: Session, options: SessionOptions) -> None:
    asked = {"agent": options.agent, "metadata": options.metadata, "idle_seconds": options.idle_seconds, "deadline_at": options.deadline_at}
    differing = [name for name, value in asked.items() if value is not None and value != getattr(session, name)]
    if differing:
        raise Conflict(
            "session_differs",
            f"session {session.session_id} was opened with other values of {', '.join(differing)}",
            errors=[{"pointer": f"/{name}", "detail": "differs from what the session was opened with"} for name in differing],
        )
