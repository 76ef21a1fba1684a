"""The agent's verbs: open, intercept, commit, fail, complete, touch. Must not answer before the commit, nor decide anything itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from app.domain import approval, intercept, outcomes
from app.domain.draft import Draft
from app.domain.errors import Conflict, Forbidden, SagaError
from app.domain.intercept import Execute, InterceptCommand, InterceptRules, Refuse, Seen
from app.domain.model import EffectState, OrgName, Principal, Reversibility, Role, Session, SessionId, StepIndex
from app.domain.outcomes import FailReport, Reported
from app.engine import verbs
from app.engine.events import ORCHESTRATOR
from app.engine.verbs import Answer, Ask, Verbs
from app.storage import sessions
from app.storage.database import Database, Transaction
from app.storage.sessions import Locked, NewSession, Wanted
from app.storage.views import SessionView


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
    """The agent's verbs; `idle_seconds` is what a session gets that names none."""

    verbs: Verbs
    rules: InterceptRules
    idle_seconds: int

    @property
    def database(self) -> Database:
        """The one database."""
        return self.verbs.database

    async def open(self, principal: Principal, session_id: SessionId, options: SessionOptions) -> bool:
        """Open a session, or find it there with the same options (False).

        Raises:
            NotFound: another agent's session. Conflict: it is there with other options.
        """
        async with self.database.transaction(principal.org) as tx:
            locked = await self._lock_or_open(tx, principal, session_id, Wanted(), options)
            draft = self.verbs.draft(locked, principal)
            draft.open()
            if draft.is_empty:
                _refuse_other_options(locked.session, options)
                return False
            written = await verbs.write(tx, draft)
        self.verbs.events.announce(written)
        return True

    async def intercept(self, principal: Principal, session_id: SessionId, command: InterceptCommand) -> intercept.Decision:
        """Ask before doing; a new effect and its undo are durable when this returns.

        Raises:
            NotFound: another agent's session. SagaError: the call is refused and nothing is stored.
        """
        wanted = Wanted(step=command.step_index, request_key=command.request_key, tool=command.tool)
        written = None
        async with self.database.transaction(principal.org) as tx:
            locked = await self._lock_or_open(tx, principal, session_id, wanted, SessionOptions())
            if intercept.needs_unsettled(command, locked.tool):
                locked = locked.joined(await sessions.lock(tx, session_id, Wanted(open=True)))
            draft = self.verbs.draft(locked, principal)
            decision = intercept.decide(draft, command, _seen(locked, command), self.rules)
            if isinstance(decision, Refuse):
                raise decision.error
            if not draft.is_empty or isinstance(decision, Execute):  # told to run again, the agent is alive
                written = await verbs.write(tx, draft)
        if written is not None:
            self.verbs.events.announce(written)
        return decision

    async def commit(self, ask: Ask, step: StepIndex, result: bytes, render: Callable[[Reported], bytes]) -> Answer:
        """Take the report that a call happened; `result` is compact JSON text.

        Raises:
            NotFound: no such effect for this caller. Forbidden: an operator it was not released to. Conflict: too late, or it contradicts
                what is known.
        """

        async def decide(tx: Transaction, draft: Draft, locked: Locked, seen: Reported) -> Reported | SagaError:
            del seen
            found = await _reported_by(ask.principal, tx, locked, step)
            return found if isinstance(found, SagaError) else outcomes.commit(draft, found, result)

        return await self.verbs.on_effect(ask, Wanted(step=step), decide, render)

    async def fail_effect(self, ask: Ask, step: StepIndex, report: FailReport, render: Callable[[Reported], bytes]) -> Answer:
        """Take the report that one call failed; the session goes on.

        Raises:
            NotFound: no such effect for this caller. Forbidden: an operator it was not released to. Conflict: too late, or it contradicts
                what is known.
        """

        async def decide(tx: Transaction, draft: Draft, locked: Locked, seen: Reported) -> Reported | SagaError:
            del seen
            found = await _reported_by(ask.principal, tx, locked, step)
            if isinstance(found, SagaError):
                return found
            return outcomes.fail_effect(draft, found, report, [other.effect for other in locked.effects])

        return await self.verbs.on_effect(ask, Wanted(step=step, irreversible=True), decide, render)

    async def fail_session(self, ask: Ask, error: str, named: NamedFailure | None, render: Callable[[SessionView], bytes]) -> Answer:
        """Fail a run: its newest undo is due when this returns. A repeat changes nothing.

        Raises:
            NotFound: no such session or effect for this caller. Conflict: completed, or `named` contradicts what is known.
        """
        wanted = Wanted(step=named.step_index if named else None, open=True, top=True, irreversible=named is not None)

        async def decide(tx: Transaction, draft: Draft, locked: Locked) -> SagaError | None:
            return _fail(draft, await verbs.known(tx, locked), error, named)

        return await self.verbs.on_session(ask, wanted, decide, render, status=202)

    async def complete(self, ask: Ask, render: Callable[[SessionView], bytes]) -> Answer:
        """End a run that went well: nothing can unwind it any more. A repeat changes nothing.

        Raises:
            NotFound: no such session for this caller. Conflict: something is not settled, or the run has failed.
        """

        async def decide(tx: Transaction, draft: Draft, locked: Locked) -> SagaError | None:
            return outcomes.complete(draft, await verbs.known(tx, locked))

        return await self.verbs.on_session(ask, Wanted(open=True, pending=True), decide, render, status=200)

    async def touch(self, principal: Principal, session_id: SessionId) -> Session:
        """Take a sign of life and return the session.

        Raises:
            NotFound: no such session for this caller. Conflict: the session has ended.
        """
        async with self.database.transaction(principal.org) as tx:
            locked = await verbs.lock(tx, principal, session_id, Wanted())
            draft = self.verbs.draft(locked, principal)
            refusal = outcomes.touch(draft)
            if refusal is not None:
                raise refusal
            return (await verbs.write(tx, draft)).after

    async def time_out(self, org: OrgName, session_id: SessionId) -> None:
        """Judge a session that seemed to be out of time, or whose question seemed to have expired, again now that it is locked."""
        written = None
        async with self.database.transaction(org) as tx:
            locked = await sessions.lock(tx, session_id, Wanted(open=True, top=True))
            if locked is None:
                return
            draft = self.verbs.draft_as(ORCHESTRATOR, locked)
            known = await verbs.known(tx, locked)
            approval.expire(draft, known)
            outcomes.time_out(draft, known)
            if not draft.is_empty:
                written = await verbs.write(tx, draft)
        if written is not None:
            self.verbs.events.announce(written)

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
        return verbs.visible(locked, principal, session_id)


async def _reported_by(principal: Principal, tx: Transaction, locked: Locked, step: StepIndex) -> Reported | SagaError:
    """Return the effect that a caller reports on; an operator may only where it was released to them."""
    found = next(seen for seen in await verbs.known(tx, locked) if seen.effect.step_index == step)
    released_to = found.approval.released_to if found.approval else None
    if principal.role is Role.AGENT or principal.subject == released_to:
        return found
    return Forbidden(
        "not_released_to_you",
        f"step {step} was not released to {principal.subject}; only its agent, or whom it was released to, can report on it",
        step_index=step,
        released_to=released_to,
    )


def _seen(locked: Locked, command: InterceptCommand) -> Seen:
    at_step, under_key = locked.at_step(command.step_index), locked.under_key(command.request_key)
    repeat = under_key or at_step
    return Seen(
        tool=locked.tool,
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


def _fail(draft: Draft, seen: Sequence[Reported], error: str, named: NamedFailure | None) -> SagaError | None:
    by_step = {one.effect.step_index: one for one in seen}
    if named is not None and draft.session.state in outcomes.REPORTING_STATES:
        if named.step_index not in by_step:
            return verbs.effect_not_found(draft.session.session_id, named.step_index)
        if by_step[named.step_index].action is None:  # of a call that the service executes, the service sees for itself what became
            reported = outcomes.fail_effect(draft, by_step[named.step_index], named.report, [one.effect for one in seen])
            if isinstance(reported, SagaError):
                return reported
            by_step[named.step_index] = reported
    return outcomes.fail_session(draft, error, list(by_step.values()))


def _refuse_other_options(session: Session, options: SessionOptions) -> None:
    asked = {"agent": options.agent, "metadata": options.metadata, "idle_seconds": options.idle_seconds, "deadline_at": options.deadline_at}
    differing = [name for name, value in asked.items() if value is not None and value != getattr(session, name)]
    if differing:
        raise Conflict(
            "session_differs",
            f"session {session.session_id} was opened with other values of {', '.join(differing)}",
            errors=[{"pointer": f"/{name}", "detail": "differs from what the session was opened with"} for name in differing],
        )
