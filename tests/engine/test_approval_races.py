"""Decisions that meet at a session's lock: whoever waited there is judged by what is so when it is their turn. One order, one decision."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from random import Random
from typing import Any, NamedTuple

import httpx
import pytest

from app.domain.model import OrgName, Role, SessionId
from tests.conftest import StartService
from tests.factories import ORG, Client, Service, park
from tests.fakes import FakeEndpoint, Reply
from tests.faults.gates import WAITERS, hold_sessions, wait_until
from tests.probes import PATIENCE_SECONDS, fetch

PAYLOAD = '{"amount":"100","to":"alice"}'
API_ONLY = {"has_orchestrator": False, "sweep_seconds": 3_600}
AT_ONCE = 100
POOL = 16  # connections of each replica: what can wait for a lock at once
TIME_LEFT_SECONDS = 0.5  # for a request to begin to wait before its time is over
BATCHES = 40
ROUNDS_PER_BATCH = 6
FIRST_FAILURES = 4  # in one of so many sessions the failure waits first

# As any writer does: whoever waits reads again what was written meanwhile.
MOVE_EXPIRY_SQL = """
WITH moved AS (
  UPDATE approvals AS a
  SET expires_at = greatest(a.requested_at + interval '1 us', clock_timestamp() + make_interval(secs => near.seconds))
  FROM unnest($1::text[], $2::float8[]) AS near (session_id, seconds)
  WHERE a.session_id = near.session_id
)
UPDATE sessions
SET revision = revision + 1
WHERE session_id = ANY ($1::text[])
"""


def code(response: httpx.Response) -> tuple[int, str]:
    """Return a refusal's status and code, or the decision of an answer."""
    body = response.json()
    return response.status_code, body.get("code") or body.get("decision") or body["state"]


async def patiently(ask: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    """Ask; ask again while the service says that it cannot now."""
    while (answer := await ask()).status_code == 503:
        assert "Retry-After" in answer.headers
    return answer


async def approved(service: Service, name: str, **asked: Any) -> None:
    """Have a call at step 1 of a new session approved."""
    await park(service.agent, name, 1, PAYLOAD, **asked)
    (await service.operator.approve(name, 1)).raise_for_status()


async def test_lost_answer_is_not_given_to_another_role_of_the_same_subject(service: Service) -> None:
    """An agent's and an operator's key are two principals, also where one person holds both: one release, one `execute`."""
    await park(service.agent, "s", 1, PAYLOAD)
    (await service.operator.approve("s", 1)).raise_for_status()
    twin = await service.client(Role.OPERATOR, "agent-1")
    first = await twin.post("/sessions/s/effects/1/resume", {"payload": PAYLOAD}, headers={"Idempotency-Key": "go"})
    assert first.json()["decision"] == "execute"
    second = await service.agent.post("/sessions/s/effects/1/resume", {"payload": PAYLOAD}, headers={"Idempotency-Key": "go"})
    assert (second.status_code, second.json()["code"]) == (409, "already_released")
    again = await twin.post("/sessions/s/effects/1/resume", {"payload": PAYLOAD}, headers={"Idempotency-Key": "go"})
    assert again.json() == first.json()


async def test_one_release_is_given_when_a_hundred_resume_at_once_on_two_replicas(services: StartService) -> None:
    """Dozens wait for the lock, the rest behind them: one may run it, 99 are told that it was released and to whom; one INTENT."""
    replicas = [await services(**API_ONLY, database_connections=POOL) for _ in range(2)]
    await approved(replicas[0], "s")
    callers: list[tuple[Client, str]] = []
    for number in range(AT_ONCE):
        replica = replicas[number % 2]
        client = (replica.agent, replica.operator, replica.admin)[number % 3]
        callers.append((client, f"resume-{number}"))
    async with asyncio.TaskGroup() as group, hold_sessions(replicas[0].database_url, "s") as lock:
        asking = [
            group.create_task(patiently(lambda client=client, key=key: client.resume("s", 1, PAYLOAD, idempotency_key=key)))  # type: ignore[misc]  # bound now
            for client, key in callers
        ]
        await lock.until_waiting(2 * POOL)
    answers = [task.result() for task in asking]
    assert Counter(map(code, answers)) == {(200, "execute"): 1, (409, "already_released"): AT_ONCE - 1}
    winner = next(number for number, answer in enumerate(answers) if answer.status_code == 200)
    released_to = ("agent-1", "operator-1", "admin-1")[winner % 3]
    late = [answer.json() for answer in answers if answer.status_code == 409]
    assert {(body["state"], body["released_to"]) for body in late} == {("executing", released_to)}
    assert (await replicas[0].auditor.kinds("s")).count("INTENT") == 1

    client, key = callers[winner]
    for number, (other, other_key) in enumerate(callers):
        if number == winner:
            continue
        assert code(await other.resume("s", 1, PAYLOAD, idempotency_key=other_key)) == (409, "already_released")
        if number % 3 != winner % 3:
            assert code(await other.resume("s", 1, PAYLOAD, idempotency_key=key)) == (409, "already_released"), "another's key"
    assert (await client.resume("s", 1, PAYLOAD, idempotency_key=key)).text == answers[winner].text, "the lost answer"


async def test_lost_answer_is_given_again_to_whom_it_was_meant_for_alone(services: StartService) -> None:
    """Principal, key and bytes have to be those of the release, and only while the call is executing."""
    first, second = await services(**API_ONLY), await services(**API_ONLY)
    await approved(first, "s")
    released = await first.operator.resume("s", 1, PAYLOAD, idempotency_key="mine")
    assert code(released) == (200, "execute")
    for service in (first, second):
        assert (await service.operator.resume("s", 1, PAYLOAD, idempotency_key="mine")).text == released.text
        assert (await service.operator.resume("s", 1, PAYLOAD, idempotency_key='"mine"')).text == released.text
        for late in (
            await service.operator.resume("s", 1, PAYLOAD),
            await service.operator.resume("s", 1, PAYLOAD, idempotency_key="other"),
            await service.operator.resume("s", 1, f"{PAYLOAD} ", idempotency_key="mine"),
            await service.admin.resume("s", 1, PAYLOAD, idempotency_key="mine"),
            await service.agent.resume("s", 1, PAYLOAD, idempotency_key="mine"),
        ):
            assert code(late) == (409, "already_released")
            assert (late.json()["state"], late.json()["released_to"]) == ("executing", "operator-1")
    assert (await first.agent.session("s"))["state"] == "active"
    (await second.operator.commit("s", 1, "transfer-ok")).raise_for_status()
    late = await first.operator.resume("s", 1, PAYLOAD, idempotency_key="mine")
    assert (code(late), late.json()["state"]) == ((409, "already_released"), "committed")
    kinds = await first.auditor.kinds("s")
    assert (kinds.count("INTENT"), kinds.count("APPROVED"), kinds.count("PAYLOAD_MISMATCH")) == (1, 1, 0)


async def test_nobody_can_have_it_again_when_it_was_released_without_a_key(services: StartService) -> None:
    """No key names no request: a second resume of the same principal is another one."""
    service = await services(**API_ONLY)
    await approved(service, "s")
    assert code(await service.operator.resume("s", 1, PAYLOAD)) == (200, "execute")
    for key in (None, "later"):
        assert code(await service.operator.resume("s", 1, PAYLOAD, idempotency_key=key)) == (409, "already_released")


async def test_endpoint_is_called_once_when_many_resume_an_action_at_once(services: StartService, endpoint: FakeEndpoint) -> None:
    """Released by one of forty on two replicas that both execute actions: one request, and its result for whoever released it."""
    replicas = [await services(database_connections=POOL) for _ in range(2)]
    endpoint.script("/wire", Reply(body=b'"transfer-ok"'))
    await replicas[0].admin.register("wire", reversibility="irreversible", action={"url": endpoint.url("/wire")})
    await approved(replicas[0], "s", tool="wire")
    answers = await asyncio.gather(
        *(
            patiently(lambda n=n: replicas[n % 2].operator.resume("s", 1, PAYLOAD, idempotency_key=f"resume-{n}", wait_s=20))  # type: ignore[misc]  # bound now
            for n in range(40)
        )
    )
    assert Counter(map(code, answers)) == {(200, "executed"): 1, (409, "already_released"): 39}
    assert [request.body for request in endpoint.received] == [PAYLOAD.encode()]
    kinds = await replicas[0].auditor.kinds("s")
    assert (kinds.count("INTENT"), kinds.count("EXECUTED")) == (1, 1)


Verb = Callable[[Service, str], Coroutine[Any, Any, httpx.Response]]
VERBS: dict[str, Verb] = {
    "approve": lambda service, name: service.operator.approve(name, 1),
    "reject": lambda service, name: service.admin.reject(name, 1),
    "resume": lambda service, name: service.agent.resume(name, 1, PAYLOAD),
    # Under a key, so that it takes its place in the row at once: a plain one is tried together with others before it waits by itself.
    "fail": lambda service, name: service.agent.post(
        f"/sessions/{name}/fail", {"error": "the run failed"}, headers={"Idempotency-Key": "once"}
    ),
}


@pytest.mark.parametrize(
    ("verb", "refusal", "part"),
    [
        ("resume", (409, "approval_expired"), "expired"),
        ("approve", (409, "already_decided"), "expired"),
        ("reject", (409, "already_decided"), "expired"),
    ],
)
async def test_verb_is_refused_when_its_time_was_over_before_its_turn(
    services: StartService, verb: str, refusal: tuple[int, str], part: str
) -> None:
    """Asked in time, behind a lock that a stuck client holds until the question has expired: the moment of the turn counts."""
    service = await services(**API_ONLY)
    await (approved if verb == "resume" else parked)(service, "s")
    async with asyncio.TaskGroup() as group, hold_sessions(service.database_url, "s") as lock:
        sql = "UPDATE approvals SET expires_at = clock_timestamp() + make_interval(secs => $1) RETURNING expires_at"
        ((expires_at,),) = await fetch(service.database_url, sql, TIME_LEFT_SECONDS)
        asking = group.create_task(VERBS[verb](service, "s"))
        await lock.until_waiting(1)
        began_at = await lock.watcher.fetchval(WAITERS.format(what="min(xact_start)"))
        assert began_at < expires_at, "it began to wait in time"
        await wait_until(lock.watcher, f"clock_timestamp() >= '{expires_at.isoformat()}'")
    late = asking.result()
    assert code(late) == refusal
    assert part in late.json()["detail"]
    effect = await service.agent.effect("s", 1)
    assert (effect["state"], effect["approval"]["state"], effect["released_to"]) == ("expired", "expired", None)
    kinds = await service.auditor.kinds("s")
    assert [kinds.count(kind) for kind in ("EXPIRED", "INTENT", "REJECTED", "SESSION_FAILED")] == [1, 0, 0, 1]
    assert kinds.count("APPROVED") == (verb == "resume")


async def parked(service: Service, name: str) -> None:
    """Have a call at step 1 of a new session wait for a person."""
    await park(service.agent, name, 1, PAYLOAD)


class Outcome(NamedTuple):
    """Where approval, effect and session stand at the end."""

    approval: str
    effect: str
    session: str


# Every order that there can be, as the journal tells it after the question was put.
OUTCOMES: dict[tuple[str, ...], Outcome] = {
    ("REJECTED", "SESSION_FAILED", "UNWOUND"): Outcome("rejected", "rejected", "compensated"),
    ("EXPIRED", "SESSION_FAILED", "UNWOUND"): Outcome("expired", "expired", "compensated"),
    ("SESSION_FAILED", "CANCELLED", "UNWOUND"): Outcome("cancelled", "cancelled", "compensated"),
    ("APPROVED", "EXPIRED", "SESSION_FAILED", "UNWOUND"): Outcome("expired", "expired", "compensated"),
    ("APPROVED", "SESSION_FAILED", "CANCELLED", "UNWOUND"): Outcome("cancelled", "cancelled", "compensated"),
    ("APPROVED", "INTENT", "SESSION_FAILED", "PIVOT", "HALTED"): Outcome("released", "unknown", "halted"),
}
ENTRY_OF = {"approve": "APPROVED", "reject": "REJECTED", "resume": "INTENT", "fail": "SESSION_FAILED"}
REFUSALS = {
    "approve": {(409, "already_decided")},
    "reject": {(409, "already_decided")},
    "resume": {(409, "not_approved"), (409, "already_decided"), (409, "approval_expired")},
}

STANDING_SQL = """
SELECT
  s.session_id, a.state::text AS approval, e.state::text AS effect, s.state::text AS session, a.decided_by, a.released_to,
  (SELECT array_agg(j.kind::text ORDER BY j.seq) FROM journal AS j WHERE j.org = s.org AND j.session_id = s.session_id) AS kinds
FROM sessions AS s
JOIN effect_log AS e USING (org, session_id)
JOIN approvals AS a USING (org, session_id, step_index)
WHERE s.session_id = ANY ($1::text[])
"""


async def test_one_decision_is_taken_when_all_verbs_wait_for_one_lock(services: StartService) -> None:
    """Approve, reject, resume, expire and fail queue up behind a held lock, hundreds of times, about when the time is over.

    Whatever their order, the journal tells one of six stories, and answers and rows tell the same one.
    """
    replicas = [await services(**API_ONLY, database_connections=POOL) for _ in range(2)]
    dice = Random(4921)
    seen: Counter[tuple[str, ...]] = Counter()
    for batch in range(BATCHES):
        names = [f"round-{batch}-{number}" for number in range(ROUNDS_PER_BATCH)]
        await asyncio.gather(*(park(replicas[0].agent, name, 1, PAYLOAD) for name in names))
        answers = await _race(replicas, names, dice)
        rows = await fetch(replicas[0].database_url, STANDING_SQL, names)
        for row in rows:
            story = tuple(row["kinds"][2:])
            assert story in OUTCOMES, row["kinds"]
            _assert_agreed(row, story, answers[row["session_id"]])
            seen[story] += 1
    assert sum(seen.values()) == BATCHES * ROUNDS_PER_BATCH
    assert {story[0] for story in seen} == {story[0] for story in OUTCOMES}, seen
    verified = [await replicas[0].auditor.get(f"/sessions/round-{batch}-0/journal/verify") for batch in range(0, BATCHES, 10)]
    assert all(answer.json()["valid"] for answer in verified)


async def _race(replicas: list[Service], names: list[str], dice: Random) -> dict[str, dict[str, httpx.Response]]:
    """Let all verbs of some sessions meet at held locks; their time is over long ago, in an hour, or in a moment.

    A failure tries to go with others before it waits for a lock; so some of them are the first to wait.
    """
    nearness = [dice.choice((-1.0, 3_600.0, dice.uniform(0, 0.05))) for _ in names]
    acts = [(name, verb) for name in names for verb in (*VERBS, "expire")]
    dice.shuffle(acts)
    early = [(name, "fail") for name in names[::FIRST_FAILURES]]
    acts = [*early, *(act for act in acts if act not in early)]
    asking: dict[tuple[str, str], asyncio.Task[httpx.Response]] = {}
    async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as group, hold_sessions(replicas[0].database_url, *names) as lock:
        for number, (name, verb) in enumerate(acts):
            replica = replicas[number % 2]
            if verb == "expire":
                group.create_task(replica.app.state.engine.forward.time_out(OrgName(ORG), SessionId(name)))
            else:
                asking[name, verb] = group.create_task(_ask(replica, verb, name))
            if number + 1 == len(early):
                await lock.until_waiting(len(early))
        await lock.until_waiting(len(acts))
        await lock.connection.execute(MOVE_EXPIRY_SQL, names, nearness)
    return {name: {verb: task.result() for (of, verb), task in asking.items() if of == name} for name in names}


async def _ask(replica: Service, verb: str, name: str) -> httpx.Response:
    return await patiently(lambda: VERBS[verb](replica, name))


def _assert_agreed(row: Any, story: tuple[str, ...], answers: dict[str, httpx.Response]) -> None:
    """Hold rows and answers against the story that the journal tells."""
    assert (row["approval"], row["effect"], row["session"]) == OUTCOMES[story]
    decided_by = {"APPROVED": "operator-1", "REJECTED": "admin-1"}.get(story[0])
    assert (row["decided_by"], row["released_to"]) == (decided_by, "agent-1" if "INTENT" in story else None)
    for verb, answer in answers.items():
        is_taken = ENTRY_OF[verb] in story
        if not is_taken or answer.status_code == 409:
            assert not is_taken, (verb, story, answer.text)
            assert code(answer) in REFUSALS[verb], (verb, story, answer.text)
        else:
            assert answer.is_success, (verb, story, answer.text)
