"""One claimed call after another of one session: count, send, record, until there is nothing to send now. Must not outlive its lease.

What is counted and recorded while a write is in flight is written together by the next one; what is not plain, each by itself.
"""

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import assert_never

import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from app.domain import actions, circuits, retry, unwinding
from app.domain.actions import Acting
from app.domain.circuits import Change, Held, Rules, Sight
from app.domain.draft import Changes, Draft, Surroundings
from app.domain.errors import SagaError
from app.domain.model import CallKind
from app.domain.retry import Attempt
from app.domain.sending import Move, Rest, Send, Wait, Yield
from app.domain.unwinding import Undoing
from app.engine.circuits import Circuits
from app.engine.clock import Clock
from app.engine.events import ORCHESTRATOR, Events
from app.engine.group import ALONE, Alone, Decided, Done, GroupCommit
from app.engine.outbound import Outbound, OutgoingRequest
from app.storage import calls, claims
from app.storage import changes as storage_changes
from app.storage import circuits as storage_circuits
from app.storage.calls import LockedCall, SightedCall
from app.storage.changes import Lease
from app.storage.claims import Claim
from app.storage.database import Database, StorageUnavailable, Transaction, WriteConflict

USER_AGENT = "countermand"
IN_PLACE_SECONDS = 2.0
"""Waits up to this long are slept under the lease; longer ones give it back, and the call's due time in the database holds them."""

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class LeaseLost(Exception):
    """The call belongs to a newer epoch: whatever this worker knows of it changes nothing any more."""


@dataclass(slots=True, kw_only=True)
class Holding:
    """What a worker holds now: the claim moves on to the next call of the session under the same lease.

    `has_room` tells whether one more call may go to a destination; `reserved` is one that this worker is about to move on to.
    """

    claim: Claim
    has_room: Callable[[str], bool]
    is_stopping: bool = False
    reserved: str | None = None

    def may_go_on(self, destination: str | None) -> bool:
        """Tell whether the worker may take the session's next call, and keep a place for it at its destination.

        Whoever only came to give up a late call has no place of its own to go on with.
        """
        if self.is_stopping or self.claim.is_late:
            return False
        if destination is None or destination == self.claim.destination:
            return True
        if not self.has_room(destination):
            return False
        self.reserved = destination
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """What a claimed call begins with; `was_interrupted`: its last attempt's end was never recorded."""

    move: Move
    kind: CallKind
    was_interrupted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwind:
    """The runner of single attempts over one database. `group` None: each write has a transaction of its own."""

    database: Database
    outbound: Outbound
    clock: Clock
    lease: Lease
    events: Events
    group: GroupCommit[Claim, SightedCall] | None = None
    circuits: Circuits = field(default_factory=lambda: Circuits(rules=Rules(calls=0, limit=1)))
    random_bytes: Callable[[int], bytes] = secrets.token_bytes
    random_unit: Callable[[], float] = field(default=secrets.SystemRandom().random)

    async def run(self, holding: Holding) -> None:
        """Work on a session from a claimed call on, until it rests, or waits for longer than a moment, or the worker is stopping.

        Raises:
            LeaseLost: somebody newer owns the call. StorageUnavailable: the database is away; the lease will run out.
        """
        move = await self._begin(holding)
        while True:
            match move:
                case Send():
                    attempt = await self._send(holding.claim, move)
                    move = await self._record(holding, attempt, circuits.sight(move.call, move.policy, attempt))
                case Wait():
                    if not await self._may_resume_after(holding, move.seconds):
                        await self._release(holding.claim)
                        return
                    move = await self._begin(holding)
                case Yield():
                    await self._release(holding.claim)
                    return
                case Rest():
                    return
                case _:
                    assert_never(move)

    async def write_together(self) -> None:
        """Write what is counted and recorded at the same time until cancelled; to go on for as long as anything runs."""
        if self.group is not None:
            await self.group.run()

    async def _begin(self, holding: Holding) -> Move:
        """Decide what to do with a claimed call, and count the attempt that is to be sent."""
        try:
            begun = await self._together(holding.claim, partial(self._decide_begin, holding))
            if isinstance(begun, Alone):
                begun = await self._begin_alone(holding)
            _follow(holding, begun.move)
        finally:
            holding.reserved = None
        if begun.was_interrupted:
            self.events.telemetry.count_interrupted(begun.kind.value)
        return begun.move

    async def _begin_alone(self, holding: Holding) -> _Begun:
        async with self.database.transaction(holding.claim.org) as tx:
            draft, begun = self._decide_begin(holding, await calls.lock_call(tx, holding.claim))
            written = None if draft.is_empty else await self._write(tx, draft)
        if written is not None:
            self.events.announce(written)
        return begun

    def _decide_begin(self, holding: Holding, locked: LockedCall) -> tuple[Draft, _Begun]:
        draft, call = self._draft(locked), locked.work.call
        return draft, _Begun(move=_begin(draft, locked.work, holding), kind=call.kind, was_interrupted=call.is_attempt_open)

    async def _together(self, claim: Claim, decide: Callable[[LockedCall], tuple[Draft, Decided] | Alone]) -> Decided | Alone:
        """Let a plain undo be written with others; ALONE: it was not, and nothing was done."""
        if self.group is None or claim.kind is not CallKind.UNDO:
            return ALONE

        def decide_sighted(sighting: SightedCall) -> tuple[Draft, Decided | SagaError] | Alone:
            return ALONE if sighting.locked is None else decide(sighting.locked)

        done: Done[Decided] | Alone = await self.group.ask(claim.org, claim, decide_sighted)
        return ALONE if isinstance(done, Alone) else done.decided

    async def _record(self, holding: Holding, attempt: Attempt, seen: Sight) -> Move:
        """Write down an answer; while the database is away, keep trying as long as the lease lasts, so that the answer is not lost."""
        self.circuits.see(holding.claim.place, holding.claim.call_id, seen)
        with suppress(StorageUnavailable):
            return await self._record_once(holding, attempt, seen)
        async for trial in AsyncRetrying(
            retry=retry_if_exception_type(StorageUnavailable),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            stop=stop_after_delay(self.lease.seconds),
            sleep=self.clock.sleep,
            reraise=True,
        ):
            with trial:
                return await self._record_once(holding, attempt, seen)
        raise AssertionError("tenacity returns or raises")

    async def _record_once(self, holding: Holding, attempt: Attempt, seen: Sight) -> Move:
        try:
            move = await self._together(holding.claim, partial(self._decide_plain, holding, attempt, seen))
            if isinstance(move, Alone):
                return await self._record_alone(holding, attempt, seen)
            _follow(holding, move)
        finally:
            holding.reserved = None
        return move

    def _decide_plain(self, holding: Holding, attempt: Attempt, seen: Sight, locked: LockedCall) -> tuple[Draft, Move] | Alone:
        """Decide what follows for an attempt of which nothing follows for its destination."""
        if not locked.work.call.is_attempt_open:
            return ALONE
        draft = self._draft(locked)
        move, change = self._judge(holding, draft, locked.work, attempt, seen)
        return (draft, move) if change is Change.NONE else ALONE

    async def _record_alone(self, holding: Holding, attempt: Attempt, seen: Sight) -> Move:
        claim = holding.claim
        async with self.database.transaction(claim.org) as tx:
            locked = await calls.lock_call(tx, claim)
            if not locked.work.call.is_attempt_open:
                # A commit whose answer was lost has recorded it already, or somebody newer took the attempt for interrupted.
                self.events.announce_state(locked.session)
                raise LeaseLost
            draft = self._draft(locked)
            move, change = self._judge(holding, draft, locked.work, attempt, seen)
            written = await self._write(tx, draft)
            is_changed = await self._change_circuit(tx, claim.destination, change, attempt)
        _follow(holding, move)
        self.events.announce(written)
        if is_changed:
            self.events.announce_circuit(claim.place, change)
        return move

    def _judge(self, holding: Holding, draft: Draft, work: Undoing | Acting, attempt: Attempt, seen: Sight) -> tuple[Move, Change]:
        """Decide what follows for the call, and what for its destination's circuit."""
        claim, rules = holding.claim, self.circuits.rules
        standing, is_open = self.circuits.standing(claim.place), claim.destination in work.held.circuits
        change = circuits.change(seen, standing, rules, is_open=is_open, is_probe=claim.is_probe)
        is_charged = circuits.is_charged(seen, standing, rules, is_open=is_open)
        held = _held_after(work.held, claim.destination, change)
        match work:
            case Undoing():
                undoing = replace(work, held=held, may_go_on=holding.may_go_on(unwinding.next_destination(work)))
                move = unwinding.record(draft, undoing, attempt, self.random_unit(), is_charged=is_charged)
            case Acting():
                move = actions.record(draft, replace(work, held=held), attempt, self.random_unit(), is_charged=is_charged)
            case _:
                assert_never(work)
        if isinstance(move, Wait) and held.holds(claim.destination):  # it would wake only to find that it may not be sent
            return Yield(call=move.call), change
        return move, change

    async def _change_circuit(self, tx: Transaction, destination: str, change: Change, attempt: Attempt) -> bool:
        """Write what an attempt told of its destination, after the call: whoever probes locks these in the same order."""
        match change:
            case Change.OPEN:
                seconds = circuits.probe_seconds(0, self.random_unit())
                return await storage_circuits.open_circuit(tx, destination, seconds, retry.last_error(attempt))
            case Change.CLOSE:
                return await storage_circuits.close(tx, destination)
            case Change.NOTE:
                await storage_circuits.note(tx, destination, retry.last_error(attempt))
                return False
            case Change.NONE:
                return False
            case _:
                assert_never(change)

    async def _write(self, tx: Transaction, draft: Draft) -> Changes:
        changes = draft.changes()
        try:
            await storage_changes.write(tx, [changes], lease=self.lease)
        except WriteConflict as conflict:
            raise LeaseLost from conflict
        return changes

    async def _may_resume_after(self, holding: Holding, seconds: float) -> bool:
        if seconds > IN_PLACE_SECONDS:
            return False
        await self.clock.sleep(seconds)
        return not holding.is_stopping

    async def give_back(self, claim: Claim) -> None:
        """Give back what is held of a session after losing track of it; while the database is away, try as long as it matters.

        Raises:
            StorageUnavailable: it stayed away; the lease will run out.
        """
        async for trial in AsyncRetrying(
            retry=retry_if_exception_type(StorageUnavailable),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            stop=stop_after_delay(self.lease.seconds),
            sleep=self.clock.sleep,
            reraise=True,
        ):
            with trial:
                async with self.database.transaction(claim.org) as tx:
                    await claims.give_back(tx, claim, self.lease.worker)

    async def _release(self, claim: Claim) -> None:
        async with self.database.dispatch() as connection:
            await claims.release(connection, [claim])

    async def _send(self, claim: Claim, move: Send) -> Attempt:
        call, effect = move.call, move.effect
        if call.url is None or call.body is None:
            raise AssertionError(f"call {call.call_id} is to be sent and not frozen")
        headers = {
            "Idempotency-Key": call.idempotency_key,
            "Countermand-Session": claim.session_id,
            "Countermand-Step": str(call.step_index),
            "Countermand-Effect": str(effect.effect_id),
            "Countermand-Attempt": str(call.attempts),
            "traceparent": self._traceparent(effect.traceparent),
            "User-Agent": USER_AGENT,
        }
        if call.outcome is not None:
            headers["Countermand-Outcome"] = call.outcome.value
        if not move.is_poll:
            headers["Content-Type"] = "application/json"
        attempt = await self.outbound.send(
            OutgoingRequest(
                method="GET" if move.is_poll else "POST",
                url=call.poll_url or call.url,
                headers=headers,
                body=b"" if move.is_poll else call.body,
                timeout_seconds=move.policy.timeout_ms / 1000,
            )
        )
        self.events.telemetry.observe_attempt(call.kind.value, _result_of(attempt), attempt.duration_ms / 1_000)
        _log.info(
            "attempt_ended",
            org=claim.org,
            session_id=claim.session_id,
            step=call.step_index,
            call=call.kind.value,
            undo_id=str(call.call_id) if call.kind is CallKind.UNDO else None,
            attempt=call.attempts,
            status=attempt.status,
            failure=attempt.failure,
            duration_ms=attempt.duration_ms,
        )
        return attempt

    def _draft(self, locked: LockedCall) -> Draft:
        return Draft(locked.session, Surroundings(now=locked.now, actor=ORCHESTRATOR, random_bytes=self.random_bytes))

    def _traceparent(self, incoming: str | None) -> str:
        """Continue the trace that the intercept came with, under a span of our own (W3C Trace Context)."""
        version, trace_id, flags = "00", self.random_bytes(16).hex(), "01"
        if incoming is not None:
            _, trace_id, _, flags = incoming.split("-")[:4]
        return f"{version}-{trace_id}-{self.random_bytes(8).hex()}-{flags}"


def _result_of(attempt: Attempt) -> str:
    """Return the class of what came of an attempt; 202 stands for itself, since it is no end."""
    if attempt.status is None:
        return str(attempt.failure)
    # Whatever is above 599 is judged as a 5xx is.
    return "http_202" if attempt.status == 202 else f"http_{min(attempt.status // 100, 5)}xx"


def _begin(draft: Draft, work: Undoing | Acting, holding: Holding) -> Move:
    is_probe = holding.claim.is_probe
    match work:
        case Undoing():
            may_go_on = holding.may_go_on(unwinding.next_destination(work))
            return unwinding.begin(draft, replace(work, is_probe=is_probe, may_go_on=may_go_on))
        case Acting():
            return actions.begin(draft, replace(work, is_probe=is_probe))
        case _:
            assert_never(work)


def _held_after(held: Held, destination: str, change: Change) -> Held:
    """Return what takes nothing once a circuit has opened or closed."""
    match change:
        case Change.OPEN:
            return replace(held, circuits=held.circuits | {destination})
        case Change.CLOSE:
            return replace(held, circuits=held.circuits - {destination})
        case _:
            return held


def _follow(holding: Holding, move: Move) -> None:
    """Let the claim move on with the session's call, which was written under the same lease; a probe is one attempt."""
    if isinstance(move, Rest):
        return
    claim, call = holding.claim, move.call
    is_probe = claim.is_probe and isinstance(move, Send) and call.call_id == claim.call_id
    holding.claim = replace(claim, call_id=call.call_id, kind=call.kind, destination=call.destination, epoch=call.epoch, is_probe=is_probe)
