"""Group commit: what is asked while a write is in flight shares the next transaction, and nothing else. Must not measure speed."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from uuid import uuid4

import asyncpg
import pytest
import structlog

from app.domain.errors import Invalid, SagaError, Unavailable
from app.domain.intercept import Execute, InterceptCommand
from app.domain.model import OrgName, SessionId, StepIndex
from app.engine.forward import Forward, SessionOptions
from app.engine.group import GroupCommit
from app.engine.verbs import Answer, Ask, Verbs
from app.storage import batches
from app.storage.answers import RepeatableRequest
from app.storage.database import Database, StorageUnavailable, open_database
from tests.domain.world import command, new_compensation
from tests.factories import new_events, owner_connection
from tests.probes import fetch
from tests.storage.acts import ACME, BETA, RESULT, RULES, STEP, agent_of

FIRST = SessionId("first")
OTHERS = [SessionId(f"other-{index}") for index in range(5)]


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """Open a pool on the test's own database."""
    async with open_database(database_url, size=6, application_name="tests group") as opened:
        yield opened


@asynccontextmanager
async def grouped(database: Database, *, lanes: int = 1, max_waiting: int = 100) -> AsyncIterator[Forward]:
    """Run lanes, and return the agent's verbs that use them."""
    events = new_events()
    group = GroupCommit(database=database, events=events, lock=batches.lock_steps, lanes=lanes, max_waiting=max_waiting)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(group.run())
        yield Forward(verbs=Verbs(database=database, events=events), rules=RULES, idle_seconds=600, group=group)
        running.cancel()


@asynccontextmanager
async def writes_held(database_url: str) -> AsyncIterator[None]:
    """Let no journal entry be written inside the block: a batch that was begun stays in flight."""
    async with owner_connection(database_url) as owner, owner.transaction():
        await owner.execute("LOCK TABLE journal IN EXCLUSIVE MODE")
        yield


async def until_held(database_url: str, count: int = 1) -> None:
    """Return once so many writers wait for the journal."""
    sql = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'journal'::regclass"
    async with asyncio.timeout(10), owner_connection(database_url) as owner:
        while await owner.fetchval(sql) < count:
            await owner.execute("SELECT pg_sleep(0.01)")


def call(step: int = 1, **members: object) -> InterceptCommand:
    """Return an intercept of an undoable call."""
    return command(step_index=StepIndex(step), compensation=new_compensation(), **members)


def intercept(forward: Forward, session_id: SessionId, step: int = 1, org: OrgName = ACME) -> "asyncio.Task[object]":
    """Ask for an undoable call."""
    return asyncio.create_task(_intercept(forward, session_id, step, org))


async def _intercept(forward: Forward, session_id: SessionId, step: int, org: OrgName) -> object:
    return await forward.intercept(agent_of(org), session_id, call(step))


async def transactions_of(database_url: str, sessions: list[SessionId]) -> list[int]:
    """Return the numbers of the transactions that wrote the newest entry of each session's journal."""
    sql = "SELECT DISTINCT ON (session_id) session_id, xmin::text::bigint AS written_by FROM journal ORDER BY session_id, seq DESC"
    written = {row["session_id"]: row["written_by"] for row in await fetch(database_url, sql)}
    return [written[session_id] for session_id in sessions]


async def test_calls_share_a_transaction_when_they_are_asked_for_while_a_write_is_in_flight(database: Database, database_url: str) -> None:
    """One commit makes all of them durable, and each is answered after it."""
    async with grouped(database) as forward:
        async with writes_held(database_url):
            first = intercept(forward, FIRST)
            await until_held(database_url)
            others = [intercept(forward, session_id) for session_id in OTHERS]
            await asyncio.wait(others, timeout=0.1)
            assert not any(task.done() for task in [first, *others]), "answered before the commit"
        decisions = await asyncio.gather(first, *others)
    assert all(isinstance(decision, Execute) and decision.is_new for decision in decisions)
    by_first, *by_others = await transactions_of(database_url, [FIRST, *OTHERS])
    assert len(set(by_others)) == 1
    assert by_first not in by_others


async def test_only_the_bad_call_is_refused_when_it_shares_a_transaction(database: Database, database_url: str) -> None:
    """What may not go ahead is told so, and leaves nothing; the others go ahead together."""
    async with grouped(database) as forward:
        async with writes_held(database_url):
            first = intercept(forward, FIRST)
            await until_held(database_url)
            good = intercept(forward, OTHERS[0])
            bad = asyncio.create_task(forward.intercept(agent_of(ACME), OTHERS[1], command(compensation=None)))
            also_good = intercept(forward, OTHERS[2])
            await asyncio.wait([good, bad, also_good], timeout=0.05)
        await asyncio.gather(first, good, also_good)
        with pytest.raises(Invalid):
            await bad
    assert len(set(await transactions_of(database_url, [OTHERS[0], OTHERS[2]]))) == 1
    assert [
        row["session_id"] for row in await fetch(database_url, f"SELECT session_id FROM sessions WHERE session_id = '{OTHERS[1]}'")
    ] == []


async def test_others_are_answered_when_one_session_is_locked_by_somebody_else(database: Database, database_url: str) -> None:
    """A batch waits for nobody's lock: the one whose session is held waits by itself, and is answered once it is free."""
    async with grouped(database) as forward:
        await asyncio.gather(intercept(forward, OTHERS[0]), intercept(forward, OTHERS[1]))
        async with owner_connection(database_url) as owner, owner.transaction():
            await owner.execute("SELECT FROM sessions WHERE session_id = $1 FOR NO KEY UPDATE", OTHERS[0])
            held, free = intercept(forward, OTHERS[0], 2), intercept(forward, OTHERS[1], 2)
            async with asyncio.timeout(10):
                await free
            assert not held.done()
        assert isinstance(await held, Execute)


async def test_calls_of_one_session_keep_their_order_when_many_are_asked_for_at_once(database: Database, database_url: str) -> None:
    """Of one session one part is in a batch at a time, the oldest first: steps 1 to 8 all find the one before them there."""
    async with grouped(database, lanes=2) as forward:
        async with writes_held(database_url):
            tasks = [intercept(forward, FIRST, step) for step in range(1, 9)]
            await until_held(database_url)
        decisions = await asyncio.gather(*tasks)
    assert all(isinstance(decision, Execute) for decision in decisions)
    rows = await fetch(database_url, "SELECT step FROM journal WHERE kind = 'INTENT' ORDER BY seq")
    assert [row["step"] for row in rows] == list(range(1, 9))


async def test_others_are_answered_when_one_is_cancelled(database: Database, database_url: str) -> None:
    """Somebody who hangs up, before its batch begins or while it is written, takes nobody along."""
    async with grouped(database) as forward:
        async with writes_held(database_url):
            gone_while_written = intercept(forward, FIRST)
            await until_held(database_url)
            gone_before, stays = intercept(forward, OTHERS[0]), intercept(forward, OTHERS[1])
            await asyncio.wait([stays], timeout=0.05)
            gone_while_written.cancel()
            gone_before.cancel()
        assert isinstance(await stays, Execute)
        for gone in (gone_while_written, gone_before):
            with pytest.raises(asyncio.CancelledError):
                await gone
        # What was being written stands, and is found again; what had not begun never does.
        assert isinstance(await intercept(forward, OTHERS[2]), Execute)
    stored = {row["session_id"] for row in await fetch(database_url, "SELECT session_id FROM effect_log")}
    assert stored == {FIRST, OTHERS[1], OTHERS[2]}


async def test_more_are_sent_away_when_enough_are_waiting(database: Database, database_url: str) -> None:
    """The queue is bounded: beyond it the answer is 503 with the time to ask again, at once, and nothing was done.

    One org has half of it at most, so that its crowd leaves room to the others; it is told once.
    """
    async with grouped(database, max_waiting=4) as forward:
        with structlog.testing.capture_logs() as logs:
            async with writes_held(database_url):
                first = intercept(forward, FIRST)
                await until_held(database_url)
                waiting: list[asyncio.Task[object]] = []
                for org in (ACME, BETA):
                    waiting += [intercept(forward, session_id, org=org) for session_id in OTHERS[:2]]
                    await asyncio.wait(waiting, timeout=0.05)
                    with pytest.raises(Unavailable) as refused:
                        await forward.intercept(agent_of(org), OTHERS[2], call())
                    assert (refused.value.code, refused.value.retry_after_seconds) == ("busy", 1)
            decisions = await asyncio.gather(first, *waiting)
        assert [type(decision) for decision in decisions] == [Execute] * 5
        assert [line["waiting"] for line in logs if line["event"] == "queue_full"] == [2]
        assert [type(await intercept(forward, OTHERS[2], org=org)) for org in (ACME, BETA)] == [Execute] * 2, "there is room again"


@pytest.mark.parametrize(("patience_seconds", "told"), [(0.0, StorageUnavailable), (60.0, Execute)])
async def test_who_waited_long_enough_is_told_when_a_batch_fails(
    database: Database, database_url: str, monkeypatch: pytest.MonkeyPatch, patience_seconds: float, told: type
) -> None:
    """Nobody waits for one failing batch after another; who came a moment ago is served by the next."""
    monkeypatch.setattr(Database, "patience_seconds", patience_seconds)
    async with grouped(database) as forward:
        async with writes_held(database_url):
            first = intercept(forward, FIRST)
            await until_held(database_url)
            waiting = [intercept(forward, session_id, org=org) for session_id in OTHERS[:2] for org in (ACME, BETA)]
            await asyncio.wait(waiting, timeout=0.05)
            async with owner_connection(database_url) as owner:
                await owner.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE NOT granted AND relation = 'journal'::regclass")
            with pytest.raises(StorageUnavailable):
                await first
            answering = asyncio.gather(*waiting, return_exceptions=True)
            if told is StorageUnavailable:
                await answering
        assert [type(answer) for answer in await answering] == [told] * 4
        assert isinstance(await intercept(forward, FIRST), Execute)


async def test_every_call_goes_ahead_when_two_replicas_open_one_session_at_once(database: Database, database_url: str) -> None:
    """The later one's whole batch is undone, and each of it is done by itself: the conflicting call and the innocent one."""
    async with grouped(database) as here, grouped(database) as there:
        async with writes_held(database_url):
            ours = [intercept(here, FIRST, 1), intercept(here, OTHERS[0])]
            theirs = [intercept(there, FIRST, 1), intercept(there, OTHERS[1])]
            await until_held(database_url, 2)
        decisions = await asyncio.gather(*ours, *theirs)
    kinds = sorted(type(decision).__name__ for decision in decisions)
    assert kinds == ["Execute", "Execute", "Execute", "InFlight"]
    counts = await fetch(database_url, "SELECT session_id, count(*) AS steps FROM effect_log GROUP BY session_id")
    assert {row["session_id"]: row["steps"] for row in counts} == {FIRST: 1, OTHERS[0]: 1, OTHERS[1]: 1}


async def test_orgs_never_share_a_transaction(database: Database, database_url: str) -> None:
    """Row-level security is of one org at a time, so a batch is."""
    async with grouped(database) as forward:
        async with writes_held(database_url):
            first = intercept(forward, FIRST)
            await until_held(database_url)
            mixed = [intercept(forward, session_id, org=org) for session_id in OTHERS[:2] for org in (ACME, BETA)]
            await asyncio.wait(mixed, timeout=0.05)
        await asyncio.gather(first, *mixed)
    rows = await fetch(database_url, "SELECT xmin::text AS written_by, count(DISTINCT org) AS orgs FROM journal GROUP BY xmin::text")
    assert {row["orgs"] for row in rows} == {1}


async def test_all_are_told_when_the_database_goes_away(database: Database, database_url: str) -> None:
    """Whether it took effect is unknown to each of them alike; the next call finds another connection."""
    async with grouped(database) as forward:
        async with writes_held(database_url):
            tasks = [intercept(forward, session_id) for session_id in OTHERS]
            await until_held(database_url)
            async with owner_connection(database_url) as owner:
                ours = "application_name = 'tests group' AND datname = current_database()"
                await owner.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {ours}")
            told = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(answer, StorageUnavailable) for answer in told)
        assert all(isinstance(answer, SagaError | Execute) for answer in told)
        assert isinstance(await intercept(forward, FIRST), Execute)


async def test_reports_share_a_transaction_and_each_has_its_own_answer(database: Database, database_url: str) -> None:
    """Commits, a run's failure and its good end go together; a report that contradicts is refused alone."""
    async with grouped(database) as forward:
        await asyncio.gather(*(intercept(forward, session_id) for session_id in OTHERS))
        asks = [Ask(principal=agent_of(ACME), session_id=session_id) for session_id in OTHERS]
        await forward.commit(asks[1], StepIndex(1), RESULT, lambda _: b"")
        async with writes_held(database_url):
            first = intercept(forward, FIRST)
            await until_held(database_url)
            commit = asyncio.create_task(forward.commit(asks[0], StepIndex(1), RESULT, lambda seen: seen.effect.state.encode()))
            other = asyncio.create_task(forward.commit(asks[1], StepIndex(1), b'"another"', lambda _: b""))
            fail = asyncio.create_task(forward.fail_session(asks[2], "it broke", None, lambda view: view.session.state.encode()))
            unsettled = asyncio.create_task(forward.complete(asks[3], lambda _: b""))
            await asyncio.wait([commit, other, fail, unsettled], timeout=0.1)
        await first
        assert (await commit).body == b"committed"
        assert (await fail).body == b"failed"
        for task, code in ((other, "result_differs"), (unsettled, "unsettled_effects")):
            with pytest.raises(SagaError) as refused:
                await task
            assert refused.value.code == code
    assert len(set(await transactions_of(database_url, [OTHERS[0], OTHERS[2]]))) == 1


def keyed(session_id: SessionId, request: str, key: str, sha256: bytes = bytes(32)) -> Ask:
    """Return a request that names itself."""
    principal = agent_of(ACME)
    repeatable = RepeatableRequest(subject=principal.subject, request=request, key=key, sha256=sha256)
    return Ask(principal=principal, session_id=session_id, repeatable=repeatable)


async def test_named_reports_share_a_transaction_and_have_their_first_answer_again(database: Database, database_url: str) -> None:
    """A key costs a report neither its place in the batch nor its answer: repeated with others, it changes nothing any more."""

    def reports(forward: Forward, key: str, sha256: bytes) -> list[Coroutine[object, object, Answer]]:
        commit, fail, complete = (keyed(OTHERS[at], verb, key, sha256) for at, verb in enumerate(("commit", "fail", "complete")))
        return [
            forward.commit(commit, STEP, RESULT, lambda _: b"committed"),
            forward.fail_session(fail, "it broke", None, lambda view: view.session.state.encode()),
            forward.complete(complete, lambda view: view.session.state.encode()),
        ]

    async def together(forward: Forward, key: str, sha256: bytes = bytes(32)) -> list[Answer | BaseException]:
        async with writes_held(database_url):
            first = intercept(forward, SessionId(f"before-{key}-{sha256[0]}-{uuid4()}"))
            await until_held(database_url)
            tasks = [asyncio.create_task(report) for report in reports(forward, key, sha256)]
            await asyncio.wait(tasks, timeout=0.1)
        await first
        return await asyncio.gather(*tasks, return_exceptions=True)

    async with grouped(database) as forward:
        await asyncio.gather(*(intercept(forward, session_id) for session_id in OTHERS[:2]))
        await forward.open(agent_of(ACME), OTHERS[2], SessionOptions())
        told = await together(forward, "k")
        assert told == [Answer(status=200, body=b"committed"), Answer(status=202, body=b"failed"), Answer(status=200, body=b"completed")]
        assert len(set(await transactions_of(database_url, OTHERS[:3]))) == 1
        before = await fetch(database_url, "SELECT session_id, version, revision FROM sessions WHERE session_id LIKE 'other-%' ORDER BY 1")
        assert await together(forward, "k") == [replace(answer, is_replayed=True) for answer in told if isinstance(answer, Answer)]
        reused = await together(forward, "k", bytes([1]) * 32)
        assert [getattr(refusal, "code", refusal) for refusal in reused] == ["key_reused"] * 3
        after = await fetch(database_url, "SELECT session_id, version, revision FROM sessions WHERE session_id LIKE 'other-%' ORDER BY 1")
    assert after == before
    assert len(await fetch(database_url, "SELECT FROM remembered_answers")) == 3


async def test_twins_of_a_named_report_have_one_answer_when_they_come_at_once(database: Database, database_url: str) -> None:
    """The later one finds what the earlier was answered; of two replicas, too."""
    async with grouped(database) as here, grouped(database) as there:
        await intercept(here, FIRST)
        async with writes_held(database_url):
            twins = [
                asyncio.create_task(forward.commit(keyed(FIRST, "commit", "k"), STEP, RESULT, lambda _: b"committed"))
                for forward in (here, here, there)
            ]
            await until_held(database_url)
            await asyncio.wait(twins, timeout=0.1)
        answers = await asyncio.gather(*twins)
    assert sorted(answer.is_replayed for answer in answers) == [False, True, True]
    assert {answer.body for answer in answers} == {b"committed"}
    assert len(await fetch(database_url, "SELECT FROM journal WHERE kind = 'EXECUTED'")) == 1


async def test_nothing_stays_of_a_batch_when_it_ends_in_the_middle(database: Database, database_url: str) -> None:
    """The lanes are stopped while they write: the callers are let go, and nothing half-written is there."""
    events = new_events()
    group = GroupCommit(database=database, events=events, lock=batches.lock_steps, lanes=1)
    forward = Forward(verbs=Verbs(database=database, events=events), rules=RULES, idle_seconds=600, group=group)
    running = asyncio.create_task(group.run())
    async with writes_held(database_url):
        tasks = [intercept(forward, FIRST), intercept(forward, OTHERS[0])]
        await until_held(database_url)
        running.cancel()
        told = await asyncio.gather(running, *tasks, return_exceptions=True)
    assert all(isinstance(answer, asyncio.CancelledError) for answer in told)
    connection = await asyncpg.connect(database_url)
    try:
        assert await connection.fetchval("SELECT count(*) FROM effect_log") == await connection.fetchval("SELECT count(*) FROM undo_stack")
        assert await connection.fetchval("SELECT count(*) FROM sessions") in {0, 1, 2}
    finally:
        await connection.close()


async def test_next_call_goes_ahead_when_the_database_closed_an_idle_connection(database: Database, database_url: str) -> None:
    """A lane that kept its connection through a restart of the database takes another, and nobody is sent away for it."""
    async with grouped(database) as forward:
        await intercept(forward, FIRST)
        async with owner_connection(database_url) as owner:
            ours = "application_name = 'tests group' AND datname = current_database()"
            await owner.execute(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE {ours}")
        async with database.dispatch() as connection:  # the loop has heard of the end by now
            assert await connection.fetchval("SELECT 1") == 1
        assert isinstance(await intercept(forward, OTHERS[0]), Execute)


async def test_lanes_go_on_when_no_connection_was_to_be_had_for_one_of_them(database_url: str) -> None:
    """Who waits for a connection in vain is told so; whose session is being written just now waits for that, and nothing spins."""
    async with (
        open_database(database_url, size=1, application_name="tests group", acquire_seconds=0.1) as database,
        grouped(database, lanes=2) as forward,
    ):
        async with writes_held(database_url):
            first = intercept(forward, FIRST)
            await until_held(database_url)
            behind, other = intercept(forward, FIRST, 2), intercept(forward, OTHERS[0])
            with pytest.raises(StorageUnavailable):
                await other
            assert not behind.done()
        assert isinstance(await first, Execute)
        assert isinstance(await behind, Execute)
