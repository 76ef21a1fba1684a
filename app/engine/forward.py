"""The agent's verbs: open, intercept, commit, fail, complete, touch. Must not answer before the commit, nor decide anything itself."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from app.domain import intercept, outcomes
from app.domain.access import may_see, session_not_found
from app.domain.draft import Changes, Draft, Surroundings
from app.domain.errors import Conflict, Invalid, NotFound, SagaError, Stale
from app.domain.intercept import Execute, InterceptCommand, InterceptRules, Refuse, Seen
from app.domain.model import EffectState, OrgName, Principal, Reversibility, Session, SessionId, StepIndex
from app.domain.outcomes import FailReport, Reported
from app.engine.events import ORCHESTRATOR, announce
from app.storage import answers, sessions, views
from app.storage import changes as storage_changes
from app.storage.answers import RepeatableRequest
from app.storage.database import Database, Transaction
from app.storage.sessions import Locked, LockedEffect, NewSession, Wanted
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
        wanted = Wanted(step=command.step_index, request_key=command.request_key, tool=command.tool)
        written = None
        async with self.database.transaction(principal.org) as tx:
            locked = await self._lock_or_open(tx, principal, session_id, wanted, SessionOptions())
            if intercept.needs_unsettled(command, locked.tool):
                locked = locked.joined(await sessions.lock(tx, session_id, Wanted(open=True)))
            draft = self._draft(locked, principal)
            decision = intercept.decide(draft, command, _seen(locked, command), self.rules)
            if isinstance(decision, Refuse):
                raise decision.error
            if not draft.is_empty or isinstance(decision, Execute):  # told to run again, the agent is alive
                written = await _write(tx, draft)
        if written is not None:
            announce(written)
        return decision

    async def commit(self, ask: Ask, step: StepIndex, result: bytes, render: Callable[[Reported], bytes]) -> Answer:
        """Take the report that a call happened; `result` is compact JSON text.

        Raises:
            NotFound: no such effect for this caller. Conflict: too late, or it contradicts what is known.
        """

        def decide(draft: Draft, locked: Locked, seen: Reported) -> Reported | SagaError:
            del locked
            return outcomes.commit(draft, seen, result)

        return await self._report(ask, Wanted(step=step), decide, render)

    async def fail_effect(self, ask: Ask, step: StepIndex, report: FailReport, render: Callable[[Reported], bytes]) -> Answer:
        """Take the report that one call failed; the session goes on.

        Raises:
            NotFound: no such effect for this caller. Conflict: too late, or it contradicts what is known.
        """

        def decide(draft: Draft, locked: Locked, seen: Reported) -> Reported | SagaError:
            return outcomes.fail_effect(draft, seen, report, [found.effect for found in locked.effects])

        return await self._report(ask, Wanted(step=step, irreversible=True), decide, render)

    async def fail_session(self, ask: Ask, error: str, named: NamedFailure | None, render: Callable[[SessionView], bytes]) -> Answer:
        """Fail a run: its newest undo is due when this returns. A repeat changes nothing.

        Raises:
            NotFound: no such session or effect for this caller. Conflict: completed, or `named` contradicts what is known.
        """
        wanted = Wanted(step=named.step_index if named else None, open=True, top=True, irreversible=named is not None)

        def decide(draft: Draft, locked: Locked) -> SagaError | None:
            return _fail(draft, locked, error, named)

        return await self._end(ask, wanted, decide, render, status=202)

    async def complete(self, ask: Ask, render: Callable[[SessionView], bytes]) -> Answer:
        """End a run that went well: nothing can unwind it any more. A repeat changes nothing.

        Raises:
            NotFound: no such session for this caller. Conflict: something is not settled, or the run has failed.
        """

        def decide(draft: Draft, locked: Locked) -> SagaError | None:
            return outcomes.complete(draft, _known(locked))

        return await self._end(ask, Wanted(open=True, pending=True), decide, render, status=200)

    async def touch(self, principal: Principal, session_id: SessionId) -> Session:
        """Take a sign of life and return the session.

        Raises:
            NotFound: no such session for this caller. Conflict: the session has ended.
        """
        async with self.database.transaction(principal.org) as tx:
            locked = await _lock(tx, principal, session_id, Wanted())
            draft = self._draft(locked, principal)
            refusal = outcomes.touch(draft)
            if refusal is not None:
                raise refusal
            return (await _write(tx, draft)).after

    async def time_out(self, org: OrgName, session_id: SessionId) -> None:
        """Fail a session that seemed to be out of time, if it still is, now that it is locked."""
        written = None
        async with self.database.transaction(org) as tx:
            locked = await sessions.lock(tx, session_id, Wanted(open=True, top=True))
            if locked is None:
                return
            surroundings = Surroundings(now=locked.now, actor=ORCHESTRATOR, random_bytes=self.random_bytes)
            draft = Draft(locked.session, surroundings)
            outcomes.time_out(draft, _known(locked))
            if not draft.is_empty:
                written = await _write(tx, draft)
        if written is not None:
            announce(written)

    async def _report(
        self,
        ask: Ask,
        wanted: Wanted,
        decide: Callable[[Draft, Locked, Reported], Reported | SagaError],
        render: Callable[[Reported], bytes],
    ) -> Answer:
        written = refusal = None
        async with self.database.transaction(ask.principal.org) as tx:
            locked = await _lock(tx, ask.principal, ask.session_id, wanted)
            replayed = await _replay(tx, ask)
            if replayed is not None:
                return replayed
            found = _effect_at(locked, wanted.step)
            _check_version(f"step {wanted.step}", found.effect.version, ask)
            draft = self._draft(locked, ask.principal)
            decided = decide(draft, locked, _reported(found))
            if not draft.is_empty:  # a refusal may leave evidence, which is committed before it is answered
                written = await _write(tx, draft)
            if isinstance(decided, SagaError):
                refusal = decided
                answer = None
            else:
                answer = await _remember(tx, ask, Answer(status=200, body=render(decided)))
        if written is not None:
            announce(written)
        if refusal is not None or answer is None:
            raise refusal or AssertionError("either an answer or a refusal")
        return answer

    async def _end(
        self,
        ask: Ask,
        wanted: Wanted,
        decide: Callable[[Draft, Locked], SagaError | None],
        render: Callable[[SessionView], bytes],
        *,
        status: int,
    ) -> Answer:
        written = None
        async with self.database.transaction(ask.principal.org) as tx:
            locked = await _lock(tx, ask.principal, ask.session_id, wanted)
            replayed = await _replay(tx, ask)
            if replayed is not None:
                return replayed
            _check_version(f"session {ask.session_id}", locked.session.version, ask)
            draft = self._draft(locked, ask.principal)
            refusal = decide(draft, locked)
            if refusal is not None:
                raise refusal
            if not draft.is_empty:
                written = await _write(tx, draft)
            view = await views.session_view(tx, ask.principal, ask.session_id)
            answer = await _remember(tx, ask, Answer(status=status, body=render(view)))
        if written is not None:
            announce(written)
        return answer

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


async def _replay(tx: Transaction, ask: Ask) -> Answer | None:
    if ask.repeatable is None:
        return None
    remembered = await answers.find(tx, ask.session_id, ask.repeatable)
    if remembered is None:
        return None
    if remembered.request_sha256 != ask.repeatable.sha256:
        raise Invalid("key_reused", "this Idempotency-Key belongs to another request of the same method and path")
    return Answer(status=remembered.status, body=remembered.body, is_replayed=True)


async def _remember(tx: Transaction, ask: Ask, answer: Answer) -> Answer:
    if ask.repeatable is not None:
        await answers.keep(tx, ask.session_id, ask.repeatable, answer.status, answer.body)
    return answer


def _check_version(what: str, version: int, ask: Ask) -> None:
    if ask.versions is not None and version not in ask.versions:
        raise Stale("version_differs", f"{what} is at version {version} by now", current_version=version)


def _effect_at(locked: Locked, step: StepIndex | None) -> LockedEffect:
    found = locked.at_step(step)
    if found is None:
        raise effect_not_found(locked.session.session_id, step)
    return found


def effect_not_found(session_id: SessionId, step: StepIndex | None) -> NotFound:
    """Return the answer for a step that a visible session does not have."""
    return NotFound("effect_not_found", f"session {session_id} has no step {step}", session_id=session_id, step_index=step)


def _reported(locked: LockedEffect) -> Reported:
    return Reported(effect=locked.effect, undo_entry=locked.undo_entry, approval=locked.approval)


def _known(locked: Locked) -> list[Reported]:
    return [_reported(found) for found in locked.effects]


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


def _fail(draft: Draft, locked: Locked, error: str, named: NamedFailure | None) -> SagaError | None:
    known = {found.effect.step_index: _reported(found) for found in locked.effects}
    if named is not None and draft.session.state in outcomes.REPORTING_STATES:
        if named.step_index not in known:
            return effect_not_found(draft.session.session_id, named.step_index)
        irreversible = [seen.effect for seen in known.values()]
        reported = outcomes.fail_effect(draft, known[named.step_index], named.report, irreversible)
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
