"""A person's verbs about a parked call: approve, reject, resume. Must not answer before the commit, nor decide anything itself."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from app.domain import approval
from app.domain.approval import Approve, Parked, Reject, Released, Resume
from app.domain.draft import Draft
from app.domain.errors import SagaError
from app.domain.model import Principal, SessionId, StepIndex
from app.domain.outcomes import Reported
from app.engine import verbs
from app.engine.verbs import Answer, Ask, Verbs
from app.storage import journal, tools
from app.storage.database import Transaction
from app.storage.sessions import Locked, Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """The verbs about approvals."""

    verbs: Verbs

    async def approve(self, ask: Ask, step: StepIndex, decision: Approve, render: Callable[[Reported], bytes]) -> Answer:
        """Record a yes; nothing runs.

        Raises:
            NotFound: no such request. Forbidden: the requester's own subject. Conflict: decided, expired or cancelled already; other bytes
                were seen.
        """

        async def decide(tx: Transaction, draft: Draft, locked: Locked, seen: Reported) -> Reported | SagaError:
            return approval.approve(draft, seen, await verbs.known(tx, locked), decision)

        return await self.verbs.on_effect(ask, _wanted(step), decide, render)

    async def reject(self, ask: Ask, step: StepIndex, decision: Reject, render: Callable[[Reported], bytes]) -> Answer:
        """Record a no: the session fails and is unwound, or goes on.

        Raises:
            NotFound: no such request. Forbidden: the requester's own subject. Conflict: decided, expired or cancelled already.
        """

        async def decide(tx: Transaction, draft: Draft, locked: Locked, seen: Reported) -> Reported | SagaError:
            return approval.reject(draft, seen, await verbs.known(tx, locked), decision)

        return await self.verbs.on_effect(ask, _wanted(step), decide, render)

    async def resume(self, principal: Principal, session_id: SessionId, step: StepIndex, resume: Resume) -> Released:
        """Release an approved call, once; computed from the state each time, never from a remembered answer.

        Raises:
            NotFound: no such request. Conflict: not approved, other bytes, expired, or released already.
        """
        written = None
        async with self.verbs.database.transaction(principal.org) as tx:
            locked = await verbs.lock(tx, principal, session_id, _wanted(step))
            seen = verbs.reported(verbs.effect_at(locked, step))
            evidence = await journal.find_approved(tx, session_id, step)
            version = seen.effect.tool_version
            tool = None if version is None else await tools.find(tx, seen.effect.tool, version)
            draft = self.verbs.draft(locked, principal)
            definition = tool.tool.definition if tool else None
            if resume.request_key is not None:  # two keys of one subject in two roles are two principals
                resume = replace(resume, request_key=f"{principal.role}:{resume.request_key}")
            parked = Parked(seen=seen, known=await verbs.known(tx, locked), evidence=evidence, definition=definition)
            released = approval.release(draft, parked, resume)
            if not draft.is_empty:  # a refusal may leave evidence, which is committed before it is answered
                written = await verbs.write(tx, draft)
        if written is not None:
            self.verbs.events.announce(written)
        if isinstance(released, SagaError):
            raise released
        return released


def _wanted(step: StepIndex) -> Wanted:
    """Ask for the parked call, and for what failing its session takes."""
    return Wanted(step=step, open=True, top=True)
