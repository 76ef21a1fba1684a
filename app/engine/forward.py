"""The agent's verbs: open, intercept, commit, fail, complete, touch. Must not answer before the commit, nor decide anything itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from app.domain import approval, intercept, outcomes
from app.domain.draft import Draft
from app.domain.errors import Conflict, Forbidden, SagaError
from app.domain.intercept import Decision, Execute, InterceptCommand, InterceptRules, Refuse, Seen
from app.domain.model import EffectState, OrgName, Principal, Reversibility, Role, Session, SessionId, SessionState, StepIndex
from app.domain.outcomes import FailReport, Reported
from app.engine import verbs
from app.engine.events import ORCHESTRATOR
from app.engine.group import ALONE, Alone, Decided, Done, GroupCommit
from app.engine.verbs import Answer, Ask, Verbs
from app.storage import sessions, views
from app.storage.answers import KeptAnswer
from app.storage.batches import Asked, Sighting
from app.storage.database import Database, Transaction
from app.storage.sessions import Locked, NewSession, Wanted, session_of_new
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
    """The agent's verbs; `idle_seconds` is what a session gets that names none. `group` None: each verb has a transaction of its own."""

    verbs: Verbs
    rules: InterceptRules
    idle_seconds: int
    group: GroupCommit[Asked, Sighting] | None = None

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

    async def intercept(self, principal: Principal, session_id: SessionId, command: InterceptCommand) -> Decision:
        """Ask before doing; a new effect and its undo are durable when this returns.

        Raises:
            NotFound: another agent's session. SagaError: the call is refused and nothing is stored.
        """
        wanted = Wanted(request_key=command.request_key, tool=command.tool)
        decide = partial(self._decide_new, principal, session_id, command)
        asked = Asked(session_id=session_id, wanted=wanted)
        done: Done[Decision] | Alone = await self._together(principal.org, asked, decide)
        return await self._intercept_alone(principal, session_id, command) if isinstance(done, Alone) else done.decided

    def _decide_new(
        self, principal: Principal, session_id: SessionId, command: InterceptCommand, sighting: Sighting
    ) -> tuple[Draft, Decision | SagaError] | Alone:
        """Decide a call that is new to its session and needs nobody's approval, as nearly all are."""
        if sighting.locked is None:
            new = self._new_session(principal, session_id, SessionOptions())
            locked = Locked(session=session_of_new(new, principal.org, sighting.now), now=sighting.now, effects=(), tool=sighting.tool)
        else:
            locked = verbs.visible(sighting.locked, principal, session_id)
        is_repeat = command.step_index is not None and command.step_index <= locked.session.last_step
        if is_repeat or intercept.needs_unsettled(command, locked.tool):
            return ALONE
        draft = self.verbs.draft(locked, principal)
        decision = intercept.decide(draft, command, _seen(locked, command), self.rules)
        if isinstance(decision, Refuse):
            raise decision.error
        return (draft, decision) if isinstance(decision, Execute) else ALONE

    async def _together(
        self,
        org: OrgName,
        asked: Asked,
        decide: Callable[[Sighting], tuple[Draft, Decided | SagaError] | Alone],
        keep: Callable[[Done[Decided]], KeptAnswer | None] | None = None,
    ) -> Done[Decided] | Alone:
        """Let a verb that is plain be written with others; ALONE: it was not, and nothing was done."""
        return ALONE if self.group is None else await self.group.ask(org, asked, decide, keep)

    async def _whole(
        self, ask: Ask, decide: Callable[[Draft, Sequence[Reported]], SagaError | None], render: Callable[[SessionView], bytes], status: int
    ) -> Answer | None:
        """Let a verb about a short and active session, without any question to a person, be written with others.

        None: it was not such a one, and nothing was done.
        """

        def decide_whole(sighting: Sighting) -> tuple[Draft, Sighting | Answer | SagaError] | Alone:
            locked = verbs.visible(sighting.locked, ask.principal, ask.session_id)
            before = verbs.replayed(ask, sighting.remembered)
            if before is not None:
                return self.verbs.draft(locked, ask.principal), before
            if locked.session.state is not SessionState.ACTIVE:
                return ALONE
            verbs.check_version(f"session {ask.session_id}", locked.session.version, ask)
            draft = self.verbs.draft(locked, ask.principal)
            refusal = decide(draft, [verbs.reported(found) for found in locked.effects])
            return draft, sighting if refusal is None else refusal

        answered: Answer | None = None

        def answer(done: Done[Sighting | Answer]) -> Answer:
            if isinstance(done.decided, Answer):
                return done.decided
            return Answer(status=status, body=render(views.view_of(done.decided, done.changes)))

        def keep(done: Done[Sighting | Answer]) -> KeptAnswer | None:
            nonlocal answered
            answered = answer(done)
            return verbs.kept(ask, answered)

        asked = Asked(session_id=ask.session_id, is_whole=True, repeatable=ask.repeatable)
        done = await self._together(ask.principal.org, asked, decide_whole, None if ask.repeatable is None else keep)
        return None if isinstance(done, Alone) else answered or answer(done)

    async def _intercept_alone(self, principal: Principal, session_id: SessionId, command: InterceptCommand) -> Decision:
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
        if ask.principal.role is Role.AGENT:
            asked = Asked(session_id=ask.session_id, wanted=Wanted(step=step), repeatable=ask.repeatable)
            decide_commit = partial(self._decide_commit, ask, step, result, render)
            committed = await self._together(ask.principal.org, asked, decide_commit, lambda done: verbs.kept(ask, done.decided))
            if not isinstance(committed, Alone):
                return committed.decided

        async def decide(tx: Transaction, draft: Draft, locked: Locked, seen: Reported) -> Reported | SagaError:
            del seen
            found = await _reported_by(ask.principal, tx, locked, step)
            return found if isinstance(found, SagaError) else outcomes.commit(draft, found, result)

        return await self.verbs.on_effect(ask, Wanted(step=step), decide, render)

    def _decide_commit(
        self, ask: Ask, step: StepIndex, result: bytes, render: Callable[[Reported], bytes], sighting: Sighting
    ) -> tuple[Draft, Answer | SagaError]:
        """Decide about the report of a call that nobody had to approve; a refusal may leave evidence, so it goes the same way."""
        locked = verbs.visible(sighting.locked, ask.principal, ask.session_id)
        draft = self.verbs.draft(locked, ask.principal)
        before = verbs.replayed(ask, sighting.remembered)
        if before is not None:
            return draft, before
        found = verbs.effect_at(locked, step)
        verbs.check_version(f"step {step}", found.effect.version, ask)
        decided = outcomes.commit(draft, verbs.reported(found), result)
        return draft, decided if isinstance(decided, SagaError) else Answer(status=200, body=render(decided))

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

    async def fail_session(
        self,
        ask: Ask,
        error: str,
        named: NamedFailure | None,
        render: Callable[[SessionView], bytes],
        *,
        is_answered_later: bool = False,
    ) -> Answer:
        """Fail a run: its newest undo is due when this returns. A repeat changes nothing.

        `is_answered_later`: a long session is not read and rendered for an answer that nobody gets.

        Raises:
            NotFound: no such session or effect for this caller. Conflict: completed, or `named` contradicts what is known.
        """
        answered = await self._whole(ask, lambda draft, seen: _fail(draft, seen, error, named), render, 202)
        if answered is not None:
            return answered
        wanted = Wanted(step=named.step_index if named else None, open=True, top=True, irreversible=named is not None)

        async def decide(tx: Transaction, draft: Draft, locked: Locked) -> SagaError | None:
            return _fail(draft, await verbs.known(tx, locked), error, named)

        return await self.verbs.on_session(ask, wanted, decide, None if is_answered_later else render, status=202)

    async def complete(self, ask: Ask, render: Callable[[SessionView], bytes]) -> Answer:
        """End a run that went well: nothing can unwind it any more. A repeat changes nothing.

        Raises:
            NotFound: no such session for this caller. Conflict: something is not settled, or the run has failed.
        """
        answered = await self._whole(ask, outcomes.complete, render, 200)
        if answered is not None:
            return answered

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
            await sessions.open_session(tx, self._new_session(principal, session_id, options))
            locked = await sessions.lock(tx, session_id, wanted)
        return verbs.visible(locked, principal, session_id)

    def _new_session(self, principal: Principal, session_id: SessionId, options: SessionOptions) -> NewSession:
        return NewSession(
            session_id=session_id,
            owner=principal.subject,
            agent=principal.subject if options.agent is None else options.agent,
            metadata=b"{}" if options.metadata is None else options.metadata,
            idle_seconds=self.idle_seconds if options.idle_seconds is None else options.idle_seconds,
            deadline_at=options.deadline_at,
        )


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
