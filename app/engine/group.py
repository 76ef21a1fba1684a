"""Group commit: what is asked while a write is in flight is written together by the next transaction. Must not decide anything.

Each part is answered only after the commit of the transaction that holds it, and is isolated: a part that is refused, that meets a
session which somebody else has locked, or that cannot be written, goes its own way and harms no other (docs/decisions/0028).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Generic, Protocol, TypeVar

import structlog

from app.domain.draft import Changes, Draft
from app.domain.errors import SagaError, Unavailable
from app.domain.model import OrgName, SessionId
from app.engine.events import Events
from app.storage import answers as storage_answers
from app.storage import changes as storage_changes
from app.storage.answers import KeptAnswer
from app.storage.changes import Lease
from app.storage.database import Database, HeldConnection, StorageUnavailable, Transaction

MAX_PARTS = 64  # in one transaction; past some 32 a part costs the database no less
MAX_WAITING = 2_000  # parts in all, half of them of one org: what is beyond would wait for longer than a caller should
LANES = 2  # transactions at once: while one waits for its commit to reach the disk, the next is made ready


class Named(Protocol):
    """What is asked for, of one session."""

    @property
    def session_id(self) -> SessionId:
        """The session that is locked for it."""


class Seen(Protocol):
    """What was found for it."""

    @property
    def is_held(self) -> bool:
        """Whether the session could not be locked at once."""

    @property
    def has_more(self) -> bool:
        """Whether a decision takes more than was read."""


Asked = TypeVar("Asked", bound=Named)
Sighting = TypeVar("Sighting", bound=Seen)
Decided = TypeVar("Decided")
_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Alone:
    """This part cannot be decided with what a batch reads, or could not be written with the others: it has to be done by itself."""


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class Done(Generic[Decided]):
    """What was decided, and what was written for it; None: nothing had to be."""

    decided: Decided
    changes: Changes | None


class _NothingWritten(Exception):
    """Ends a transaction of which nothing has to become durable, and nobody's answer hangs on its end."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Part(Generic[Asked, Sighting]):
    """One decision about one session, and who waits for it."""

    asked: Asked
    decide: Callable[[Sighting], tuple[Draft, Any] | Alone]
    keep: Callable[[Done[Any]], KeptAnswer | None] | None
    answer: "asyncio.Future[Any]"
    asked_at: float  # by the loop's clock


@dataclass(slots=True, kw_only=True)
class GroupCommit(Generic[Asked, Sighting]):
    """Queues of parts by org, and the lanes that write them: `run()` once, `ask()` from anywhere in its loop.

    `lock` locks what is asked for, each session once, without waiting for a lock, and returns what it finds in the same order. `lease`
    keeps the calls that are left due, where it is a worker that decides.
    """

    database: Database
    events: Events
    lock: Callable[[Transaction, Sequence[Asked]], Awaitable[Sequence[Sighting]]]
    lease: Lease | None = None
    lanes: int = LANES
    max_waiting: int = MAX_WAITING
    _queues: dict[OrgName, deque[_Part[Asked, Sighting]]] = field(default_factory=dict)
    _turns: deque[OrgName] = field(default_factory=deque)  # orgs that have something to be taken, each once, in turn
    _busy: dict[OrgName, set[SessionId]] = field(default_factory=dict)  # sessions of a batch in flight: theirs keep their order
    _waiting: int = 0
    _is_full: bool = False
    _idle: deque["asyncio.Future[None]"] = field(default_factory=deque)

    async def ask(
        self,
        org: OrgName,
        asked: Asked,
        decide: Callable[[Sighting], tuple[Draft, Decided | SagaError] | Alone],
        keep: Callable[[Done[Decided]], KeptAnswer | None] | None = None,
    ) -> Done[Decided] | Alone:
        """Decide with the session locked, write what was decided, and return the decision once that is committed.

        `decide` gets what was found; it returns the draft with the decision, or with a refusal that leaves evidence, says that it needs
        more than that, or raises a refusal with which nothing is written. It must not wait for anything. `keep` says what of it is to be
        remembered for a repeat of the request, in the same transaction.

        Raises:
            Unavailable: `busy`, too many are waiting; nothing was done. SagaError: what `decide` refused.
        """
        if self._waiting >= self.max_waiting or len(self._queues.get(org, ())) >= self.max_waiting // 2:
            self._tell_full(org)
            raise Unavailable("busy", f"{self._waiting} requests wait to be written; nothing was done, try again")
        loop = asyncio.get_running_loop()
        part: _Part[Asked, Sighting] = _Part(asked=asked, decide=decide, keep=keep, answer=loop.create_future(), asked_at=loop.time())
        self._waiting += 1
        self._queues.setdefault(org, deque()).append(part)
        self._offer(org)
        answer: Done[Decided] | Alone = await part.answer
        return answer

    def _tell_full(self, org: OrgName) -> None:
        """Count a refusal, and log the first of many."""
        self.events.telemetry.count_busy()
        if not self._is_full:
            self._is_full = True
            _log.warning("queue_full", org=org, waiting=self._waiting)

    async def run(self) -> None:
        """Write what is asked until cancelled; who still waits then is cancelled as well."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.lanes):
                    group.create_task(self._lane())
        finally:
            for queue in self._queues.values():
                for part in queue:
                    part.answer.cancel()

    async def _lane(self) -> None:
        """Write batch after batch over one connection, until there is nothing more or one could not be written."""
        while True:
            await self._something()
            try:
                async with self.database.held() as held:
                    while self._turns and not held.is_closed and await self._write_next(held):
                        pass
            except StorageUnavailable as error:  # who waits has waited for as long as a caller should
                self._refuse_all(error)

    async def _something(self) -> None:
        """Wait until an org has something to be taken."""
        while not self._turns:
            idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            await idle

    async def _write_next(self, held: HeldConnection) -> bool:
        """Write a batch of the org whose turn it is; tell whether the connection is good for another."""
        org = self._turns.popleft()
        parts = self._take(org)
        return await self._commit(held, org, parts) if parts else True

    def _refuse_all(self, error: StorageUnavailable) -> None:
        while self._turns:
            org = self._turns.popleft()
            parts = self._take(org)
            if parts:  # else all that is left waits for sessions of a batch in flight, whose end puts the org in turn again
                _refuse(parts, error)
                self._end(org, parts)

    def _refuse_patient(self, error: SagaError) -> None:
        """Refuse who has waited for as long as a caller should, rather than let them wait for one more batch to fail."""
        latest = asyncio.get_running_loop().time() - self.database.patience_seconds
        for org, queue in list(self._queues.items()):
            old = list(takewhile(lambda part: part.asked_at <= latest, queue))
            for _ in old:
                queue.popleft()
            self._waiting -= len(old)
            _refuse(old, error)
            if not queue:
                del self._queues[org]
                self._turns = deque(each for each in self._turns if each != org)

    def _offer(self, org: OrgName) -> None:
        """Put an org in turn, unless it is there, and wake a lane."""
        if org not in self._turns:
            self._turns.append(org)
        while self._idle:
            idle = self._idle.popleft()
            if not idle.done():
                idle.set_result(None)
                return

    def _take(self, org: OrgName) -> list[_Part[Asked, Sighting]]:
        """Take an org's oldest parts, one per session; what is left waits for its session, or for the org's next turn."""
        queue, busy = self._queues[org], self._busy.setdefault(org, set())
        taken: list[_Part[Asked, Sighting]] = []
        left: deque[_Part[Asked, Sighting]] = deque()
        held = set(busy)
        while queue and len(taken) < MAX_PARTS:
            part = queue.popleft()
            if part.answer.done():  # nobody waits for it any more
                self._waiting -= 1
            elif part.asked.session_id in held:
                left.append(part)
            else:
                taken.append(part)
                held.add(part.asked.session_id)
        has_more = bool(queue)
        left.extend(queue)
        if left:
            self._queues[org] = left
        else:
            del self._queues[org]
        busy.update(part.asked.session_id for part in taken)
        self._waiting -= len(taken)
        if self._waiting < self.max_waiting // 4:
            self._is_full = False
        if has_more:
            self._offer(org)
        return taken

    async def _commit(self, held: HeldConnection, org: OrgName, parts: Sequence[_Part[Asked, Sighting]]) -> bool:
        """Run one transaction for these parts, and answer each; tell whether it went well."""
        try:
            answers = await self._write(held, org, parts)
        except SagaError as error:  # the database is away: that is so for all of them, and for whoever has waited long enough
            _refuse(parts, error)
            self._refuse_patient(error)
        except Exception as error:  # noqa: BLE001 - the lane's edge: alone, each part tells by itself what is wrong with it
            _log.info("batch_undone", org=org, parts=len(parts), reason=type(error).__name__)
            _answer(parts, [ALONE] * len(parts))
        except BaseException:
            for part in parts:
                part.answer.cancel()
            raise
        else:
            _answer(parts, answers)
            return True
        finally:
            self._end(org, parts)
        return False

    def _end(self, org: OrgName, parts: Sequence[_Part[Asked, Sighting]]) -> None:
        """Let the next parts of these sessions be taken."""
        self._busy[org].difference_update(part.asked.session_id for part in parts)
        if not self._busy[org]:
            del self._busy[org]
        if org in self._queues:
            self._offer(org)

    async def _write(self, held: HeldConnection, org: OrgName, parts: Sequence[_Part[Asked, Sighting]]) -> list[Any]:
        ordered = sorted(parts, key=lambda part: part.asked.session_id)
        answers: dict[int, Any] = {}
        written: list[Changes] = []
        kept: list[KeptAnswer] = []
        with suppress(_NothingWritten):
            async with held.transaction(org) as tx:
                sightings = await self.lock(tx, [part.asked for part in ordered])
                for part, sighting in zip(ordered, sightings, strict=True):
                    answers[id(part)], changes = _decide(part, sighting)
                    if changes is not None:
                        written.append(changes)
                    kept += _kept(part, answers[id(part)])
                if not (written or kept):
                    raise _NothingWritten
                if written:
                    await storage_changes.write(tx, written, lease=self.lease)
                if kept:
                    await storage_answers.keep_many(tx, kept)
        for changes in written:
            self.events.announce(changes)
        return [answers[id(part)] for part in parts]


def _decide(part: _Part[Asked, Sighting], sighting: Sighting) -> tuple[Any, Changes | None]:
    """Return the answer that a part will have, or its refusal, and what is to be written for it."""
    if sighting.is_held or sighting.has_more or part.answer.done():  # nobody waits for it any more
        return ALONE, None
    try:
        decided = part.decide(sighting)
    except SagaError as refusal:
        return refusal, None
    except Exception:  # noqa: BLE001 - one part that cannot be decided must not take the others along: alone it will tell why
        return ALONE, None
    if isinstance(decided, Alone):
        return ALONE, None
    draft, answer = decided
    changes = None if draft.is_empty else draft.changes()
    return (answer if isinstance(answer, SagaError) else Done(answer, changes)), changes


def _kept(part: _Part[Any, Any], answer: object) -> list[KeptAnswer]:
    """Return what is to be remembered of an answer, which is at most one."""
    kept = part.keep(answer) if part.keep is not None and isinstance(answer, Done) else None
    return [] if kept is None else [kept]


def _answer(parts: Sequence[_Part[Any, Any]], answers: Sequence[Any]) -> None:
    for part, answer in zip(parts, answers, strict=True):
        if part.answer.done():
            continue
        if isinstance(answer, SagaError):
            part.answer.set_exception(answer)
        else:
            part.answer.set_result(answer)


def _refuse(parts: Sequence[_Part[Any, Any]], error: SagaError) -> None:
    for part in parts:
        if not part.answer.done():
            part.answer.set_exception(error)
