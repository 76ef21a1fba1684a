"""The operator's verbs over what automation has left: retry, skip, unwind, halt, resolve, settle. Must not decide anything itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.domain import operations
from app.domain.draft import Draft
from app.domain.egress import EgressPolicy
from app.domain.errors import Forbidden, NotFound, SagaError
from app.domain.model import CallKind, OutgoingCall, Role, SessionId, StepIndex, UndoId, UndoState
from app.domain.operations import Retry, Settle, Skip, Stack
from app.domain.outcomes import Reported
from app.domain.unwinding import StackItem
from app.engine import verbs
from app.engine.verbs import Answer, Ask, Verbs
from app.storage import calls, sessions
from app.storage.database import Transaction
from app.storage.sessions import Locked, LockedEffect, Wanted
from app.storage.views import SessionView

Render = Callable[[SessionView], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """The verbs of operators; `egress` judges a destination that is said to have moved."""

    verbs: Verbs
    egress: EgressPolicy

    async def retry(self, ask: Ask, undo_id: UndoId, order: Retry, render: Render) -> Answer:
        """Have an undo tried again and the unwind go on from there.

        Raises:
            NotFound: no such undo. Forbidden: a new URL from somebody who is no admin. Conflict: not halted, settled, or not its turn.
        """
        if order.url is not None and ask.principal.role is not Role.ADMIN:
            raise Forbidden("role_not_allowed", "only an admin may send an undo to another URL", role=ask.principal.role)

        async def decide(tx: Transaction, draft: Draft, locked: Locked) -> SagaError | None:
            target = await _find_undo(tx, ask.session_id, undo_id)
            item = _with_call(target, await calls.lock_calls(tx, ask.session_id, [undo_id]))
            return operations.retry(draft, item, await _stack(tx, locked), order, self.egress)

        return await self.verbs.on_session(ask, Wanted(failed=True, top=True), decide, render, status=202)

    async def skip(self, ask: Ask, undo_id: UndoId, order: Skip, render: Render) -> Answer:
        """Take an undo out of the unwind.

        Raises:
            NotFound: no such undo. Conflict: not halted, or settled.
        """

        async def decide(tx: Transaction, draft: Draft, locked: Locked) -> SagaError | None:
            del locked
            return operations.skip(draft, verbs.reported(await _find_undo(tx, ask.session_id, undo_id)), order)

        return await self.verbs.on_session(ask, Wanted(), decide, render, status=200)

    async def unwind(self, ask: Ask, reason: str, render: Render) -> Answer:
        """Let the unwind of a halted session go on, past the pivot too.

        Raises:
            NotFound: no such session. Conflict: not halted.
        """

        async def decide(tx: Transaction, draft: Draft, locked: Locked) -> SagaError | None:
            return operations.unwind(draft, await _stack(tx, locked), reason)

        return await self.verbs.on_session(ask, Wanted(failed=True, top=True), decide, render, status=202)

    async def halt(self, ask: Ask, reason: str, render: Render) -> Answer:
        """Stop an unwind at its next boundary.

        Raises:
            NotFound: no such session. Conflict: it is not unwinding.
        """

        async def decide(tx: Transaction, draft: Draft, locked: Locked) -> SagaError | None:
            del locked
            due = await calls.lock_calls(tx, ask.session_id, [])
            undo = next((call for call in due if call.kind is CallKind.UNDO), None)
            running = None if undo is None else _with_call(await _find_step(tx, ask.session_id, undo.step_index), [undo])
            is_action_in_flight = any(call.kind is CallKind.ACTION for call in due)
            return operations.halt(draft, running, reason, is_action_in_flight=is_action_in_flight)

        return await self.verbs.on_session(ask, Wanted(), decide, render, status=202)

    async def resolve(self, ask: Ask, reason: str, render: Render) -> Answer:
        """Close a halted session as it stands.

        Raises:
            NotFound: no such session. Conflict: not halted.
        """

        async def decide(tx: Transaction, draft: Draft, locked: Locked) -> SagaError | None:
            del tx, locked
            return operations.resolve(draft, reason)

        return await self.verbs.on_session(ask, Wanted(), decide, render, status=200)

    async def settle(self, ask: Ask, step: StepIndex, order: Settle, render: Callable[[Reported], bytes]) -> Answer:
        """Say what is known of a call whose outcome was unknown.

        Raises:
            NotFound: no such effect. Conflict: it is not unknown, or its session is neither active nor halted.
        """

        async def decide(tx: Transaction, draft: Draft, locked: Locked, seen: Reported) -> Reported | SagaError:
            del tx
            return operations.settle(draft, seen, [found.effect for found in locked.effects], order)

        return await self.verbs.on_effect(ask, Wanted(step=step, irreversible=True), decide, render)


async def _find_undo(tx: Transaction, session_id: SessionId, undo_id: UndoId) -> LockedEffect:
    position = await sessions.position_of(tx, session_id, undo_id)
    if position is None:
        raise NotFound("undo_not_found", f"session {session_id} has no undo {undo_id}", session_id=session_id, undo_id=str(undo_id))
    return await _find_step(tx, session_id, position)


async def _find_step(tx: Transaction, session_id: SessionId, step: StepIndex) -> LockedEffect:
    locked = await sessions.lock(tx, session_id, Wanted(step=step))
    found = None if locked is None else locked.at_step(step)
    if found is None:
        raise AssertionError(f"step {step} of session {session_id} is there, its session being locked")
    return found


async def _stack(tx: Transaction, locked: Locked) -> Stack:
    """Return what is unsettled, with its calls."""
    unsettled = [found for found in locked.effects if found.undo_entry is not None and found.undo_entry.state in operations.UNSETTLED_UNDO]
    ids = [found.undo_entry.undo_id for found in unsettled if found.undo_entry is not None]
    due = await calls.lock_calls(tx, locked.session.session_id, ids)
    items = [_with_call(found, due) for found in unsettled]
    pending = [item for item in items if item.entry.state is UndoState.PENDING]
    return Stack(
        failed=[item for item in items if item.entry.state is UndoState.FAILED],
        top=max(pending, key=lambda item: item.entry.stack_position, default=None),
    )


def _with_call(found: LockedEffect, due: Sequence[OutgoingCall]) -> StackItem:
    if found.undo_entry is None:
        raise AssertionError(f"step {found.effect.step_index} has an undo entry")
    call = next((call for call in due if call.call_id == found.undo_entry.undo_id), None)
    return StackItem(entry=found.undo_entry, effect=found.effect, call=call)
