"""Many at once: repeats, parallel calls, failing runs, replicas. Whatever the order, nothing is executed and forgotten or undone twice."""

import asyncio
from collections import Counter
from random import Random
from typing import Any

import httpx
from starlette.types import Message, Receive, Scope, Send

from tests.conftest import StartService
from tests.factories import Client, JsonObject, Service, do_step, undo_at
from tests.fakes import FakeEndpoint
from tests.probes import fetch, rest, through

ROUNDS = 200
ROUNDS_AT_ONCE = 10


async def test_undo_is_in_the_database_before_the_client_has_its_answer(service: Service, endpoint: FakeEndpoint) -> None:
    """At the moment the answer's first byte is about to leave, another connection sees effect and undo."""
    seen: list[tuple[int, int, int, int]] = []

    async def looking_app(scope: Scope, receive: Receive, send: Send) -> None:
        async def look_first(message: Message) -> None:
            if message["type"] == "http.response.start":
                sql = (
                    "SELECT (SELECT count(*) FROM undo_stack) AS undos, (SELECT count(*) FROM effect_log) AS effects, "
                    "(SELECT count(*) FROM journal WHERE kind = 'INTENT') AS intents"
                )
                (row,) = await fetch(service.database_url, sql)
                seen.append((message["status"], row["undos"], row["effects"], row["intents"]))
            await send(message)

        await service.app(scope, receive, look_first)

    client = through(looking_app, service.agent)
    for step in (1, 2):
        await client.intercept("s", step_index=step, compensation=undo_at(endpoint.url("/undo")))
    assert seen == [(201, 1, 1, 1), (201, 2, 2, 2)]


async def test_one_execute_is_given_when_ten_ask_at_once_with_one_key(service: Service, endpoint: FakeEndpoint) -> None:
    """Ten twins under one Idempotency-Key get the same answer, and one effect is stored."""
    answers = await asyncio.gather(
        *(patient_intercept(service.agent, "s", "twin", compensation=undo_at(endpoint.url("/undo"))) for _ in range(10))
    )
    assert [answer.status_code for answer in answers] == [201] * 10
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].json()["decision"] == "execute"
    assert len((await service.agent.session("s"))["effects"]) == 1
    assert (await service.operator.kinds("s")) == ["OPENED", "INTENT"]


async def test_one_execute_is_given_when_ten_ask_at_once_without_a_key(service: Service, endpoint: FakeEndpoint) -> None:
    """Without a key nine of ten are told that it is in flight."""
    undo = undo_at(endpoint.url("/undo"))
    answers = await asyncio.gather(*(patient_intercept(service.agent, "s", None, step_index=1, compensation=undo) for _ in range(10)))
    assert Counter((answer.status_code, answer.json()["decision"]) for answer in answers) == {(201, "execute"): 1, (200, "in_flight"): 9}
    assert len({answer.json()["effect_id"] for answer in answers}) == 1
    assert (await service.operator.kinds("s")) == ["OPENED", "INTENT"]


async def test_positions_are_dense_when_parallel_calls_name_no_step(services: StartService, endpoint: FakeEndpoint) -> None:
    """Twenty calls at once on two replicas get the positions 1 to 20, and are undone in their reverse whatever was committed first."""
    replicas = [await services(), await services()]
    answers = await asyncio.gather(
        *(
            patient_intercept(replicas[n % 2].agent, "s", f"call-{n}", args={"n": n}, compensation=undo_at(endpoint.url("/undo")))
            for n in range(20)
        )
    )
    bodies = [answer.json() for answer in answers]
    assert sorted(body["step_index"] for body in bodies) == list(range(1, 21))
    repeated = await patient_intercept(replicas[1].agent, "s", "call-7", args={"n": 7}, compensation=undo_at(endpoint.url("/undo")))
    assert (repeated.status_code, repeated.json()) == (201, bodies[7])

    steps = list(range(1, 21))
    Random(7).shuffle(steps)
    for step in steps[:15]:
        (await replicas[step % 2].agent.commit("s", step)).raise_for_status()
    assert (await rest(replicas[0].agent, "s"))["state"] == "compensated"
    assert [request.header("Countermand-Step") for request in endpoint.received] == [str(step) for step in range(20, 0, -1)]
    assert len({request.key for request in endpoint.received}) == 20


async def test_every_undo_happens_once_when_fifty_fail_the_run_on_two_replicas(services: StartService, endpoint: FakeEndpoint) -> None:
    """All fifty are answered, one SESSION_FAILED is told, each of the undos is sent once."""
    replicas = [await services(database_connections=10), await services(database_connections=10)]
    for step in range(1, 6):
        await do_step(replicas[0].agent, "s", step, endpoint.url(f"/{step}"))
    answers = await asyncio.gather(*(patiently(replicas[n % 2].agent, "s") for n in range(50)))
    assert {answer.status_code for answer in answers} == {202}
    assert (await rest(replicas[1].agent, "s"))["state"] == "compensated"
    assert [request.path for request in endpoint.received] == ["/5", "/4", "/3", "/2", "/1"]
    assert set(Counter(request.key for request in endpoint.received).values()) == {1}
    kinds = Counter(await replicas[0].operator.kinds("s"))
    assert (kinds["SESSION_FAILED"], kinds["COMPENSATING"], kinds["COMPENSATED"], kinds["UNWOUND"]) == (1, 5, 5, 1)


async def test_every_undo_happens_once_when_two_replicas_unwind_many_sessions(services: StartService, endpoint: FakeEndpoint) -> None:
    """Two orchestrators share fifty sessions that fail at once, and send nothing twice."""
    replicas = [await services(database_connections=10), await services(database_connections=10)]
    names = [f"s{number}" for number in range(50)]
    for name in names:
        await do_step(replicas[0].agent, name, 1, endpoint.url("/undo"))
    answers = await asyncio.gather(*(patiently(replicas[n % 2].agent, name) for n, name in enumerate(names)))
    assert {answer.status_code for answer in answers} == {202}
    found = [await rest(replicas[0].agent, name) for name in names]
    assert {session["state"] for session in found} == {"compensated"}
    assert set(Counter(request.key for request in endpoint.received).values()) == {1}
    assert len(endpoint.received) == 50


async def test_call_is_refused_or_undone_when_it_races_the_end_of_its_run(services: StartService, endpoint: FakeEndpoint) -> None:
    """A commit, an intercept and a fail at once, hundreds of times on two replicas: nothing is executed and forgotten."""
    replicas = [await services(database_connections=10), await services(database_connections=10)]
    random = Random(4921)
    for first in range(0, ROUNDS, ROUNDS_AT_ONCE):
        names = [f"round-{number}" for number in range(first, first + ROUNDS_AT_ONCE)]
        sessions = await asyncio.gather(*(race(replicas, endpoint, name, random) for name in names))
        for name, session in zip(names, sessions, strict=True):
            expect_undone(endpoint, name, session)
    seen = Counter(session_state for (session_state,) in await fetch(replicas[0].database_url, "SELECT state::text FROM sessions"))
    assert sum(seen.values()) == ROUNDS
    chains = await asyncio.gather(*(replicas[0].operator.get(f"/sessions/round-{n}/journal/verify") for n in range(0, ROUNDS, 20)))
    assert all(chain.json()["valid"] for chain in chains)


async def race(replicas: list[Service], endpoint: FakeEndpoint, name: str, random: Random) -> JsonObject:
    """Let the end of a run, a report about its first call and a second call meet; return the session at rest and what was answered."""
    undo = undo_at(endpoint.url("/undo"))
    (await patient_intercept(replicas[0].agent, name, None, step_index=1, compensation=undo)).raise_for_status()
    verbs: list[Any] = [
        ("commit", lambda agent: agent.commit(name, 1, {"n": 1})),
        ("intercept", lambda agent: agent.intercept(name, step_index=2, compensation=undo)),
        ("fail", lambda agent: agent.fail(name)),
    ]
    random.shuffle(verbs)
    answers = await asyncio.gather(*(verb(random.choice(replicas).agent) for _, verb in verbs))
    statuses = {verb: answer.status_code for (verb, _), answer in zip(verbs, answers, strict=True)}
    session: JsonObject = await rest(replicas[0].agent, name)
    return {**session, "answers": statuses}


def expect_undone(endpoint: FakeEndpoint, name: str, session: JsonObject) -> None:
    """Hold the answers, the session and the endpoint's log against one another."""
    statuses = session["answers"]
    assert statuses["fail"] in {202, 503}
    assert statuses["intercept"] in {201, 409, 503}
    assert statuses["commit"] in {200, 409, 503}
    told = {effect["step_index"] for effect in session["effects"]}
    if statuses["intercept"] != 503:
        assert told == ({1, 2} if statuses["intercept"] == 201 else {1})
    assert {entry["step_index"] for entry in session["undo_stack"]} == told
    undone = [
        int(request.header("Countermand-Step") or 0) for request in endpoint.received if request.header("Countermand-Session") == name
    ]
    if session["state"] == "halted":
        # A commit that came after its undo had been sent: a person is told.
        assert (session["halt_reason"], statuses["commit"], undone[-1]) == ("late_effect", 409, 1)
    else:
        assert session["state"] == "compensated"
    assert undone == sorted(told, reverse=True)
    assert {entry["state"] for entry in session["undo_stack"]} == {"compensated"}


async def patiently(agent: Client, name: str) -> httpx.Response:
    """Fail a run; ask again while the service says that it cannot now."""
    while (answer := await agent.fail(name)).status_code == 503:
        assert "Retry-After" in answer.headers
    return answer


async def patient_intercept(agent: Client, name: str, key: str | None, **body: Any) -> httpx.Response:
    """Intercept; ask again while the service says that it cannot now."""
    while (answer := await agent.intercept(name, idempotency_key=key, **body)).status_code == 503:
        assert "Retry-After" in answer.headers
    return answer
