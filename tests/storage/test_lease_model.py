"""Claims, leases and epochs keep their laws whatever workers and time do: the real statements against a small model of who may write.

Must not sleep or move a clock: leases and waits are made older in the database.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from app.domain import unwinding
from app.domain.draft import Draft
from app.domain.model import CallId, SessionId
from app.domain.retry import Attempt
from app.domain.sending import Move, Send, Wait
from app.storage import calls, changes, claims
from app.storage.changes import Lease
from app.storage.claims import Claim
from app.storage.database import Database, WriteConflict, open_database
from tests.conftest import execute
from tests.factories import owner_connection
from tests.storage.acts import ACME, begin, claim, do_steps, fail, surroundings, undoing

WORKERS = 2
LEASE_SECONDS = 30.0
EXAMPLES = 25
STEPS = 30
STATUSES = (200, 200, 503, 404)  # done, waited for, given up for good

CLEAR_SQL = "SET session_replication_role = replica; DELETE FROM journal; DELETE FROM outgoing_calls; DELETE FROM undo_stack; \
DELETE FROM effect_log; DELETE FROM sessions; SET session_replication_role = origin"
# Longer than a lease and than any wait that an answer asked for.
AGE_SQL = """
UPDATE outgoing_calls SET leased_until = leased_until - interval '1 h', due_at = due_at - interval '1 h'
"""
CALLS_SQL = """
SELECT call_id, epoch, leased_by, leased_until, due_at IS NOT NULL AND due_at <= clock_timestamp() AS is_due FROM outgoing_calls
"""
EVERYTHING_SQL = """
SELECT
  (SELECT array_agg(s::text ORDER BY s::text) FROM sessions AS s),
  (SELECT array_agg(c::text ORDER BY c::text) FROM outgoing_calls AS c),
  (SELECT array_agg(u::text ORDER BY u::text) FROM undo_stack AS u),
  (SELECT array_agg(e::text ORDER BY e::text) FROM effect_log AS e),
  (SELECT count(*) FROM journal)
"""

Result = TypeVar("Result")
Rows: TypeAlias = dict[CallId, asyncpg.Record]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A database with the service's pool and the owner's eyes, driven from outside any loop."""

    run: Callable[[Coroutine[Any, Any, Any]], Any]
    database: Database
    owner: "asyncpg.Connection[asyncpg.Record]"


@dataclass(eq=False, slots=True, kw_only=True)
class Held:
    """What one task of a worker believes it holds; `is_sent`: it waits for the answer to an attempt that it counted.

    `is_lost`: its last write went through, and it has not heard so.
    """

    lease: Lease
    claim: Claim
    is_sent: bool = False
    is_lost: bool = False


class Leases(RuleBasedStateMachine):
    """Workers that claim, count, send, record, renew, give back, stall and die in any order, while time passes."""

    def __init__(self, bench: Bench) -> None:
        """Start with an empty database and workers that hold nothing."""
        super().__init__()
        self.bench = bench
        self.held: list[Held] = []
        self.leased: set[CallId] = set()  # by a lease that has not run out
        self.epochs: dict[CallId, int] = {}
        self.lives = dict.fromkeys(range(1, WORKERS + 1), 0)
        self.sessions = 0
        bench.run(bench.owner.execute(CLEAR_SQL))

    @initialize(steps=st.integers(2, 3))
    def begin_with_one(self, steps: int) -> None:
        """Have something to unwind from the start, and somebody at it."""
        self.fail_a_session(steps)
        self._claim(self._lease(1), 5)

    @precondition(lambda self: self.sessions < 2)
    @rule(steps=st.integers(2, 3))
    def fail_a_session(self, steps: int) -> None:
        """Let a run fail: its newest undo is due and nobody's."""
        self.sessions += 1
        session_id = SessionId(f"run-{self.sessions}")
        self.bench.run(do_steps(self.bench.database, session_id, steps))
        self.bench.run(fail(self.bench.database, session_id))

    @rule(worker=st.integers(1, WORKERS), limit=st.integers(1, 5))
    def claim(self, worker: int, limit: int) -> None:
        """Claim: exactly what is due and under no living lease, each with the next epoch."""
        self._claim(self._lease(worker), limit)

    def _claim(self, lease: Lease, limit: int) -> None:
        before = self._calls()
        free = {call_id for call_id, row in before.items() if row["is_due"] and call_id not in self.leased}
        claimed = self.bench.run(claim(self.bench.database, lease, limit))
        assert {one.call_id for one in claimed} <= free, "a living lease was taken over"
        assert len(claimed) == min(limit, len(free)), "a call that nobody holds was not to be had"
        for one in claimed:
            assert one.epoch == before[one.call_id]["epoch"] + 1
            self._note(Held(lease=lease, claim=one))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 20), status=st.sampled_from(STATUSES), hears=st.booleans())
    def go_on(self, which: int, status: int, *, hears: bool) -> None:
        """Count an attempt before it is sent, or record its answer, however late that is, and hear of the commit or not."""
        self._go_on(self._pick(which), status, hears=hears)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 20))
    def renew(self, which: int) -> None:
        """Renew all that a worker holds: it keeps what nobody newer owns, and touches nothing else."""
        worker = self._pick(which).lease.worker
        mine = [held for held in self.held if held.lease.worker == worker]
        before = self._calls()
        kept = self.bench.run(self._renew([held.claim for held in mine]))
        after = self._calls()
        current = {held.claim for held in mine if self._is_current(held)}
        assert kept == current
        touched = {one.call_id for one in current}
        assert {call_id for call_id in before if before[call_id]["leased_until"] != after[call_id]["leased_until"]} <= touched
        self.leased |= {call_id for call_id in touched if after[call_id]["leased_by"] is not None}
        for held in [held for held in mine if held.claim not in kept]:
            self._give_back(held)

    @precondition(lambda self: len(self.held) > 1)
    @rule(which=st.integers(0, 20), does_know=st.booleans())
    def let_go(self, which: int, *, does_know: bool) -> None:
        """Hand a call back, or whatever is held of its session by a task that lost track of it."""
        held = self._pick(which)
        if does_know:
            self._release(held)
        else:
            self._give_back(held)

    @precondition(lambda self: len(self.held) > 1)
    @rule(worker=st.integers(1, WORKERS))
    def crash(self, worker: int) -> None:
        """Let a worker die: it knows nothing any more, and comes again under another name."""
        died = self._lease(worker).worker
        self.held = [held for held in self.held if held.lease.worker != died]
        self.lives[worker] += 1

    @rule(worker=st.integers(1, WORKERS))
    def overtake(self, worker: int) -> None:
        """Let everybody stall for longer than a lease while one worker goes on: what it claims, others still believe they hold."""
        self.pass_time()
        self._claim(self._lease(worker), 5)

    @precondition(lambda self: self.leased)
    @rule()
    def pass_time(self) -> None:
        """Let every lease run out and every wait be over: all who hold something have stalled."""
        self.bench.run(self.bench.owner.execute(AGE_SQL))
        self.leased.clear()

    @invariant()
    def one_may_write(self) -> None:
        """Of all who believe they hold a call at most one can write it, epochs only grow, and the lease is where the model says."""
        rows = self._calls()
        for call_id, row in rows.items():
            assert row["epoch"] >= self.epochs.get(call_id, 0), "an epoch shrank"
            self.epochs[call_id] = row["epoch"]
            assert sum(held.claim.call_id == call_id and held.claim.epoch == row["epoch"] for held in self.held) <= 1
        assert self.leased <= {call_id for call_id, row in rows.items() if row["leased_by"] is not None}

    def teardown(self) -> None:
        """Whatever has happened, one worker can finish every session when time has passed."""
        self.held.clear()
        for _ in range(20):
            self.pass_time()
            lease = self._lease(1)
            for one in self.bench.run(claim(self.bench.database, lease, 10)):
                held = Held(lease=lease, claim=one)
                self._note(held)
                while held in self.held:
                    self._go_on(held, 200)
            if not any(row["is_due"] for row in self._calls().values()):
                return
        raise AssertionError("the sessions do not come to rest")

    def _lease(self, worker: int) -> Lease:
        return Lease(worker=f"worker-{worker}-{self.lives[worker]}", seconds=LEASE_SECONDS)

    def _pick(self, which: int) -> Held:
        """Pick any, but every other time one that somebody has overtaken: those are what the laws are about."""
        overtaken = [held for held in self.held if not self._is_current(held)]
        found = overtaken if overtaken and which % 2 else self.held
        return found[which // 2 % len(found)]

    def _is_current(self, held: Held) -> bool:
        return held.claim.epoch == self.epochs.get(held.claim.call_id, 0)

    def _calls(self) -> Rows:
        return {CallId(row["call_id"]): row for row in self.bench.run(self.bench.owner.fetch(CALLS_SQL))}

    def _note(self, held: Held) -> None:
        self.held.append(held)
        self.leased.add(held.claim.call_id)
        self.epochs[held.claim.call_id] = held.claim.epoch

    def _go_on(self, held: Held, status: int, *, hears: bool = True) -> None:
        if held.is_lost:
            self._give_back(held)
            return
        move = self._write(held, self._record(held, status) if held.is_sent else begin(self.bench.database, held.claim, held.lease))
        if move is not None:
            self._follow(held, move, hears=hears or not held.is_sent)

    def _write(self, held: Held, writing: Coroutine[Any, Any, Move]) -> Move | None:
        """Write as a worker: it succeeds exactly for the newest epoch, and otherwise changes nothing at all."""
        is_current = self._is_current(held)
        before = None if is_current else self.bench.run(self.bench.owner.fetchrow(EVERYTHING_SQL))
        try:
            move: Move = self.bench.run(writing)
        except WriteConflict:
            assert not is_current, "the owner of a call was refused"
            assert self.bench.run(self.bench.owner.fetchrow(EVERYTHING_SQL)) == before, "a late write left something behind"
            self._give_back(held)
            return None
        assert is_current, "a write of an old epoch went through"
        return move

    def _follow(self, held: Held, move: Move, *, hears: bool) -> None:
        """Go on as the worker does: with the session's next call, or a wait that is handed back, or not at all."""
        self.leased.discard(held.claim.call_id)
        match move:
            case Send(call=call) | Wait(call=call) if not hears:
                self.leased.add(call.call_id)
                held.is_lost = True
            case Send(call=call):
                self.leased.add(call.call_id)
                held.claim = replace(held.claim, call_id=call.call_id, epoch=call.epoch, destination=call.destination)
                held.is_sent = True
            case Wait(call=call):
                held.claim = replace(held.claim, call_id=call.call_id, epoch=call.epoch, destination=call.destination)
                self._release(held)
            case _:
                self.held.remove(held)

    def _release(self, held: Held) -> None:
        self._let_go(held, self._released(held.claim))

    def _give_back(self, held: Held) -> None:
        self._let_go(held, self._given_back(held))

    def _let_go(self, held: Held, letting_go: Coroutine[Any, Any, None]) -> None:
        """Let go: nothing that another task holds is taken from it."""
        self.held.remove(held)
        before = self._calls()
        self.bench.run(letting_go)
        after = self._calls()
        self.leased -= {call_id for call_id in before if before[call_id]["leased_by"] and not after[call_id]["leased_by"]}
        for other in self.held:
            call_id = other.claim.call_id
            assert not self._is_current(other) or before[call_id]["leased_by"] == after[call_id]["leased_by"], "a lease was taken away"

    async def _record(self, held: Held, status: int) -> Move:
        """Record as `Unwind` does; an attempt that somebody newer closed is no longer this worker's to write."""
        answer = Attempt(
            status=status,
            failure=None,
            was_sent=True,
            retry_after="60" if status == 503 else None,
            location=None,
            detail="",
            duration_ms=1,
        )
        async with self.bench.database.transaction(ACME) as tx:
            locked = await calls.lock_call(tx, held.claim)
            if not locked.work.call.is_attempt_open:
                raise WriteConflict
            draft = Draft(locked.session, surroundings(locked.now))
            move = unwinding.record(draft, replace(undoing(locked), may_go_on=True), answer, 1.0)
            await changes.write(tx, [draft.changes()], lease=held.lease)
        return move

    async def _renew(self, held: list[Claim]) -> set[Claim]:
        async with self.bench.database.dispatch() as connection:
            return await claims.renew(connection, held, LEASE_SECONDS)

    async def _released(self, one: Claim) -> None:
        async with self.bench.database.dispatch() as connection:
            await claims.release(connection, [one])

    async def _given_back(self, held: Held) -> None:
        async with self.bench.database.transaction(ACME) as tx:
            await claims.give_back(tx, held.claim, held.lease.worker)


@pytest.mark.timeout(300)
def test_leases_keep_their_laws_when_workers_stall_die_and_come_late(database_url: str) -> None:
    """Any order of claims, writes, renewals, crashes and time: one writer at most, late writes are void, nothing is stuck."""
    with asyncio.Runner() as runner:
        # Nothing crashes here that could lose a commit; waiting for the disk would only make the model smaller.
        runner.run(execute(database_url, f'ALTER DATABASE "{urlsplit(database_url).path[1:]}" SET synchronous_commit = off'))
        opened = open_database(database_url, size=1, application_name="tests model")
        looking = owner_connection(database_url)
        bench = Bench(run=runner.run, database=runner.run(opened.__aenter__()), owner=runner.run(looking.__aenter__()))

        class OnTheBench(Leases):
            """The machine that Hypothesis makes anew for each example, on the one database."""

            def __init__(self) -> None:
                super().__init__(bench)

        try:
            run_state_machine_as_test(
                OnTheBench,
                settings=settings(
                    max_examples=EXAMPLES,
                    stateful_step_count=STEPS,
                    deadline=None,
                    derandomize=True,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                    report_multiple_bugs=False,
                    phases=[Phase.generate],  # a failure's steps are few enough to read, and making them fewer takes minutes
                ),
            )
        finally:
            runner.run(looking.__aexit__(None, None, None))
            runner.run(opened.__aexit__(None, None, None))
