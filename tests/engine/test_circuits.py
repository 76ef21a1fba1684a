"""Outages on running services: nobody's retries are used up, few requests are sent, and everything goes on when it is over.

Endpoint, database and journal are the witnesses. Must not wait for a probe's time: the database's is aged instead.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest
import structlog

from app.domain.model import Role
from app.engine.unwind import Holding
from app.storage import claims
from tests.conftest import StartService
from tests.engine.test_retries import ImpatientClock, worker
from tests.factories import ORG, Client, JsonObject, Service, do_step, open_service
from tests.fakes import FakeEndpoint, Mode, Received, Reply
from tests.probes import PATIENCE_SECONDS, call_of, fetch, make_due, rest, take_lease_away

AWAY = Reply(status=503)
PROBE_NOW_SQL = "UPDATE circuits SET probe_at = clock_timestamp()"
OPEN_SQL = """
INSERT INTO circuits (org, destination, probe_at, last_error)
VALUES ($1, $2, clock_timestamp() + make_interval(secs => $3), 'http 503')
"""
HELD_SQL = "SELECT count(*) AS held FROM outgoing_calls WHERE leased_by IS NOT NULL"
LATER = 3_600  # seconds; no test lasts so long


@dataclass(slots=True)
class Weather:
    """What an endpoint answers now, whatever is asked."""

    reply: Reply

    def __call__(self, _request: Received) -> Reply:
        """Return that."""
        return self.reply


def destination(endpoint: FakeEndpoint) -> str:
    """Return host:port."""
    return urlsplit(endpoint.url()).netloc


async def open_circuit(database_url: str, endpoint: FakeEndpoint, org: str = ORG, seconds: float = LATER) -> None:
    """Hold an endpoint for away, and let it be probed after so many seconds."""
    await fetch(database_url, OPEN_SQL, org, destination(endpoint), seconds)


async def until(database_url: str, sql: str, is_enough: Callable[[JsonObject], bool]) -> None:
    """Look at one row again and again until it is as it should be; every look is a round trip."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not is_enough(dict((await fetch(database_url, sql))[0])):
            pass


async def until_quiet(database_url: str) -> None:
    """Return once a circuit is open and no call is in anybody's hands."""
    sql = f"SELECT (SELECT count(*) FROM circuits) AS open, ({HELD_SQL}) AS held"
    await until(database_url, sql, lambda row: row["open"] == 1 and row["held"] == 0)


async def requests_and_probes(database_url: str, endpoint: FakeEndpoint) -> tuple[int, int]:
    """Return how many requests there were that were no probe, and how many that were, at a moment when nobody is at any."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            await until_quiet(database_url)
            (before,) = await fetch(database_url, "SELECT probes FROM circuits")
            received = len(endpoint.received)
            (after,) = await fetch(database_url, f"SELECT probes, ({HELD_SQL}) AS held FROM circuits")
            if before["probes"] == after["probes"] and after["held"] == 0:  # no probe has begun meanwhile
                return received - after["probes"], after["probes"]


async def failed(service: Service, name: str, url: str, steps: int = 1, **compensation: object) -> None:
    """Do undoable steps and fail the run."""
    for step in range(1, steps + 1):
        await do_step(service.agent, name, step, url, **compensation)
    (await service.agent.fail(name)).raise_for_status()


SESSIONS, STEPS, PROBES, BUDGET, PER_DESTINATION, CALLS = 60, 2, 4, 3, 16, 5


async def test_herd_is_undone_when_its_destination_was_away(services: StartService, endpoint: FakeEndpoint, database_url: str) -> None:
    """Two replicas, sixty sessions, one outage: no session is halted, the endpoint is left alone but for probes, and then all is undone."""
    weather = Weather(AWAY)
    endpoint.script("/undo", weather)
    api = await services(has_orchestrator=False, database_connections=10)
    names = [f"s-{number}" for number in range(SESSIONS)]
    for chunk in (names[start : start + 10] for start in range(0, SESSIONS, 10)):
        await asyncio.gather(*(failed(api, name, endpoint.url("/undo"), STEPS) for name in chunk))
    for _ in range(2):
        await services(has_api=False, circuit_calls=CALLS, max_calls_per_destination=PER_DESTINATION)

    # Each replica has as many in flight as it may; the first few are tried again before it knows. From then on each request is a probe.
    burst, probes = await requests_and_probes(database_url, endpoint)
    assert burst <= 2 * (PER_DESTINATION + (CALLS - 1) * BUDGET)
    while probes < PROBES:
        await fetch(database_url, PROBE_NOW_SQL)
        await endpoint.wait_for_answers(burst + probes + 1, PATIENCE_SECONDS)
        others, probes = await requests_and_probes(database_url, endpoint)
        assert others == burst
    (charged,) = await fetch(database_url, "SELECT sum(failures) AS all, max(failures) AS most FROM outgoing_calls")
    assert charged["most"] <= BUDGET
    assert charged["all"] <= 2 * (CALLS - 1) * (BUDGET + 1)

    weather.reply = Reply()
    await fetch(database_url, PROBE_NOW_SQL)
    found = await asyncio.gather(*(rest(api.agent, name) for name in names))
    assert Counter(session["state"] for session in found) == {"compensated": SESSIONS}
    assert all(session["clean"] for session in found)
    assert await fetch(database_url, "SELECT FROM circuits") == []
    keys = {request.key for request in endpoint.received}
    assert len(keys) == SESSIONS * STEPS
    assert all(endpoint.applications_of(key) == 1 for key in keys)
    kinds = await fetch(database_url, "SELECT kind::text, count(*) AS count FROM journal GROUP BY kind")
    told = {row["kind"]: row["count"] for row in kinds}
    assert (told["COMPENSATED"], told["UNWOUND"], told.get("HALTED"), told.get("COMPENSATION_FAILED")) == (
        SESSIONS * STEPS, SESSIONS, None, None,
    )  # fmt: skip


@pytest.mark.parametrize("status", [500, 400])
async def test_circuit_stays_closed_when_the_destination_answers_no(status: int, services: StartService, endpoint: FakeEndpoint) -> None:
    """Answers about calls use up their calls' budgets, as ever, however many say the same."""
    service = await services(circuit_calls=1)
    endpoint.script("/undo", Reply(status=status))
    names = [f"s-{number}" for number in range(8)]
    for name in names:
        await failed(service, name, endpoint.url("/undo"), max_retries=1)
    found = await asyncio.gather(*(rest(service.agent, name) for name in names))
    assert {(session["state"], session["halt_reason"]) for session in found} == {("halted", "compensation_failed")}
    stacks = [(await service.agent.session(name))["undo_stack"] for name in names]
    keys = {f"undo-{entry['undo_id']}" for (entry,) in stacks}
    sent = Counter(request.key for request in endpoint.received if request.key in keys)
    assert sent == dict.fromkeys(keys, 2 if status == 500 else 1), [row.headers for row in endpoint.received]
    assert await fetch(service.database_url, "SELECT FROM circuits") == []


async def test_budget_is_used_up_when_one_call_alone_finds_an_outage(service: Service, endpoint: FakeEndpoint) -> None:
    """The contract's number holds for a single session: four requests, and a person is called."""
    endpoint.script("/undo", AWAY)
    await failed(service, "s", endpoint.url("/undo"))
    session = await rest(service.agent, "s")
    assert (session["state"], session["halt_reason"], len(endpoint.received)) == ("halted", "compensation_failed", 4)
    assert await fetch(service.database_url, "SELECT FROM circuits") == []


async def test_budget_is_used_up_when_circuits_are_switched_off(services: StartService, endpoint: FakeEndpoint) -> None:
    """0 = never, however many calls find the destination away."""
    service = await services(circuit_calls=0)
    endpoint.script("/undo", AWAY)
    names = [f"s-{number}" for number in range(8)]
    for name in names:
        await failed(service, name, endpoint.url("/undo"), max_retries=1)
    found = await asyncio.gather(*(rest(service.agent, name) for name in names))
    assert {session["state"] for session in found} == {"halted"}
    assert len(endpoint.received) == 2 * len(names)


async def test_other_org_goes_on_when_one_finds_the_same_destination_away(
    services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """What one tenant's calls find is no reason to hold another's: they may not even ask for the same thing."""
    service = await services()
    other = Service(**{**_members(service), "agent": await service.client(Role.AGENT, "robot-2", "beta")})
    await open_circuit(database_url, endpoint)
    await failed(service, "held", endpoint.url("/held"))
    await failed(other, "free", endpoint.url("/free"))
    assert (await rest(other.agent, "free"))["state"] == "compensated"
    assert endpoint.requests("/held") == []
    assert len(await fetch(database_url, "SELECT FROM circuits")) == 1


def _members(service: Service) -> JsonObject:
    return {name: getattr(service, name) for name in ("app", "database_url", "agent", "operator", "auditor", "admin")}


async def test_nothing_is_sent_when_a_replica_finds_the_circuit_open(
    services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """Who did not see the outage honours it; a session that comes to that destination waits there, until somebody says that it is back."""
    async with FakeEndpoint() as elsewhere:
        service = await services()
        await open_circuit(database_url, endpoint)
        await do_step(service.agent, "s", 1, endpoint.url("/below"))
        await do_step(service.agent, "s", 2, elsewhere.url("/top"))
        (await service.agent.fail("s")).raise_for_status()
        await elsewhere.wait_for_answers(1)
        sql = "SELECT count(*) AS waiting FROM outgoing_calls WHERE due_at IS NOT NULL AND step_index = 1 AND leased_by IS NULL"
        await until(database_url, sql, lambda row: row["waiting"] == 1)
        await failed(service, "marker", elsewhere.url("/marker"))
        assert (await rest(service.agent, "marker"))["state"] == "compensated"
    assert endpoint.received == []
    session = await service.agent.session("s")
    assert (session["state"], [entry["state"] for entry in session["undo_stack"]]) == ("compensating", ["compensated", "pending"])
    assert session["held_by"] == "circuit"
    with structlog.testing.capture_logs() as logs:
        answer = await service.operator.post(f"/destinations/{destination(endpoint)}/resume", {"reason": "it is back"})
        assert answer.json() == {"destination": destination(endpoint), "paused": None}
        assert (await rest(service.agent, "s"))["state"] == "compensated"
    told = [event for event in logs if event["event"].startswith("circuit")]
    assert told == [{"event": "circuit_closed", "log_level": "info", "org": ORG, "destination": destination(endpoint)}]


async def test_operator_is_told_once_when_a_circuit_opens(services: StartService, endpoint: FakeEndpoint, database_url: str) -> None:
    """One warning and one row for an outage, not one for each call that finds it."""
    endpoint.script("/undo", Reply(mode=Mode.CLOSE_WITHOUT_REPLY))
    api = await services(has_orchestrator=False)
    for number in range(8):
        await failed(api, f"s-{number}", endpoint.url("/undo"))
    with structlog.testing.capture_logs() as logs:
        await services(has_api=False, circuit_calls=3)
        await until_quiet(database_url)
    told = [event for event in logs if event["event"].startswith("circuit")]
    assert told == [{"event": "circuit_opened", "log_level": "warning", "org": ORG, "destination": destination(endpoint)}]
    (row,) = await fetch(database_url, "SELECT last_error, probe_at - opened_at AS first FROM circuits")
    assert row["last_error"].startswith("reset: ")
    assert 0.4 < row["first"].total_seconds() <= 1.1
    (item,) = (await api.operator.get("/destinations")).json()["items"]
    assert (item["due"] + item["in_flight"], item["circuit"]["last_error"]) == (8, row["last_error"])


async def test_destination_is_probed_again_when_a_probe_died_with_its_process(
    services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """A probe that nobody will answer for holds the others until its lease is over, and no longer."""
    gate = asyncio.Event()
    endpoint.script("/undo", Reply(status=503, gate=gate), Reply())
    api = await services(has_orchestrator=False, attempt_timeout_ms=60_000)
    for name in ("s", "t"):
        await failed(api, name, endpoint.url("/undo"))
    await open_circuit(database_url, endpoint, seconds=0)
    async with AsyncExitStack() as dying:
        first = await dying.enter_async_context(open_service(database_url, has_api=False, max_calls=1, grace_seconds=0.05))
        await endpoint.wait_for_requests(1)
        await fetch(database_url, PROBE_NOW_SQL)
        await services(has_api=False)
        async with FakeEndpoint() as elsewhere:
            await failed(api, "marker", elsewhere.url("/marker"))
            assert (await rest(api.agent, "marker"))["state"] == "compensated"
        assert len(endpoint.received) == 1, "one at a time"
        await take_lease_away(database_url, "s")
        await endpoint.wait_for_requests(2)
        assert {(await rest(api.agent, name))["state"] for name in ("s", "t")} == {"compensated"}
        assert first.app.state.engine.orchestrator is not None
        gate.set()
    assert (await call_of(database_url, "s", 1))["interrupted"] == 1


async def test_probe_uses_up_no_budget_when_it_finds_the_outage(services: StartService, endpoint: FakeEndpoint, database_url: str) -> None:
    """Not even a call that may never be retried is given up: it was the destination that failed, however often it was asked."""
    weather = Weather(AWAY)
    endpoint.script("/undo", weather)
    service = await services()
    await open_circuit(database_url, endpoint)
    await failed(service, "s", endpoint.url("/undo"), max_retries=0)
    for number in range(3):
        await fetch(database_url, PROBE_NOW_SQL)
        await endpoint.wait_for_answers(number + 1)
        await until_quiet(database_url)
    call = await call_of(database_url, "s", 1)
    assert (call["failures"], call["attempts"] >= 3) == (0, True)
    weather.reply = Reply()
    await fetch(database_url, PROBE_NOW_SQL)
    assert (await rest(service.agent, "s"))["state"] == "compensated"


async def test_slot_is_given_back_at_once_when_a_probe_finds_the_outage(
    services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """Waiting where it is would only end in finding that the destination is still held; who comes back to it takes turns with others."""
    service = await services(has_orchestrator=False)
    endpoint.script("/undo", AWAY)
    await failed(service, "s", endpoint.url("/undo"))
    await open_circuit(database_url, endpoint, seconds=0)
    clock = ImpatientClock()
    async with worker(database_url, clock, 0.5) as unwind:
        async with unwind.database.dispatch() as connection:
            (queue,) = await claims.look(connection, None, 10, 10)
            (claim,) = await claims.claim_probes(connection, unwind.lease, [(queue, 600.0)])
        await unwind.run(Holding(claim=claim, has_room=lambda _: True))
    call = await call_of(database_url, "s", 1)
    assert (clock.slept, call["leased_by"], call["attempts"], len(endpoint.received)) == ([], None, 1, 1)


async def test_poison_calls_do_not_hold_a_circuit_open(services: StartService, endpoint: FakeEndpoint, database_url: str) -> None:
    """Calls that fail whatever happens are tried in turn with the others; once one is answered each pays for itself."""
    endpoint.script("/poison", AWAY)
    service = await services()
    await open_circuit(database_url, endpoint)
    for number in range(3):
        await failed(service, f"poison-{number}", endpoint.url("/poison"))
    await failed(service, "good", endpoint.url("/good"))
    for number in range(4):
        await fetch(database_url, PROBE_NOW_SQL)
        await endpoint.wait_for_answers(number + 1)
    assert [request.path for request in endpoint.received[:4]] == ["/poison"] * 3 + ["/good"]
    assert (await rest(service.agent, "good"))["state"] == "compensated"
    found = [await rest(service.agent, f"poison-{number}") for number in range(3)]
    assert {(session["state"], session["halt_reason"]) for session in found} == {("halted", "compensation_failed")}


async def test_session_halts_at_its_deadline_when_its_destination_is_held(
    services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """Nothing waits silently for ever: a person gets it though not one request was sent, in an outage as in a pause."""
    service = await services()
    await open_circuit(database_url, endpoint)
    await failed(service, "s", endpoint.url("/undo"), steps=2, deadline_ms=300)
    await fetch(database_url, "UPDATE outgoing_calls SET deadline_at = clock_timestamp()")
    session = await rest(service.agent, "s")
    assert (session["state"], session["halt_reason"], endpoint.received) == ("halted", "deadline_exceeded", [])
    await fetch(database_url, "DELETE FROM circuits")
    (await service.operator.post("/pause", {"reason": "planned"})).raise_for_status()
    await failed(service, "t", endpoint.url("/undo"))
    await fetch(database_url, "UPDATE outgoing_calls SET deadline_at = clock_timestamp()")
    session = await rest(service.agent, "t")
    assert (session["state"], session["halt_reason"], endpoint.received) == ("halted", "deadline_exceeded", [])


async def test_destination_is_not_run_over_when_it_is_back(services: StartService, endpoint: FakeEndpoint, database_url: str) -> None:
    """After the probe one call goes there, and a second only when that one is answered."""
    gate = asyncio.Event()
    endpoint.script("/undo", Reply(), Reply(gate=gate), Reply())
    service = await services(attempt_timeout_ms=60_000)
    await open_circuit(database_url, endpoint)
    for number in range(6):
        await failed(service, f"s-{number}", endpoint.url("/undo"))
    async with FakeEndpoint() as elsewhere:
        await failed(service, "look", elsewhere.url("/look"))
        assert (await rest(service.agent, "look"))["state"] == "compensated"
        await fetch(database_url, PROBE_NOW_SQL)
        await endpoint.wait_for_requests(2)
        await failed(service, "marker", elsewhere.url("/marker"))
        assert (await rest(service.agent, "marker"))["state"] == "compensated"
    assert len(endpoint.received) == 2
    gate.set()
    found = await asyncio.gather(*(rest(service.agent, f"s-{number}") for number in range(6)))
    assert {session["state"] for session in found} == {"compensated"}
    assert len(endpoint.received) == 6


async def test_call_is_sent_again_when_the_outage_is_over_before_its_wait(
    services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """A probe that was refused with Retry-After waits for as long as it was told; another one probes meanwhile."""
    endpoint.script("/busy", Reply(status=503, headers={"Retry-After": "600"}), Reply())
    service = await services()
    await open_circuit(database_url, endpoint)
    await failed(service, "busy", endpoint.url("/busy"))
    await fetch(database_url, PROBE_NOW_SQL)
    await endpoint.wait_for_answers(1)
    await failed(service, "good", endpoint.url("/good"))
    await fetch(database_url, PROBE_NOW_SQL)
    assert (await rest(service.agent, "good"))["state"] == "compensated"
    await make_due(database_url, "busy")
    assert (await rest(service.agent, "busy"))["state"] == "compensated"
    call = await call_of(database_url, "busy", 1)
    assert (call["attempts"], call["failures"]) == (2, 0)


async def test_small_org_is_served_when_a_large_one_has_a_herd(services: StartService, endpoint: FakeEndpoint) -> None:
    """Older calls of another tenant, more than there is room for, to the same destination: the newcomer is next all the same."""
    gates = {f"/{number}": asyncio.Event() for number in range(8)}
    for path, gate in gates.items():
        endpoint.script(path, Reply(gate=gate))
    service = await services(max_calls=4, max_calls_per_org=4, max_calls_per_destination=4, attempt_timeout_ms=60_000)
    other: Client = await service.client(Role.AGENT, "robot-2", "beta")
    for path in gates:
        await failed(service, path.removeprefix("/"), endpoint.url(path))
    await endpoint.wait_for_requests(4)
    await do_step(other, "small", 1, endpoint.url("/small"))
    (await other.fail("small")).raise_for_status()
    gates[endpoint.received[0].path].set()
    assert (await rest(other, "small"))["state"] == "compensated"
    assert [request.path for request in endpoint.received].index("/small") == 4
    for gate in gates.values():
        gate.set()


async def test_org_leaves_slots_to_others_when_its_calls_hang(services: StartService, endpoint: FakeEndpoint) -> None:
    """No tenant takes every slot of a process, whatever its endpoints do."""
    gate = asyncio.Event()
    service = await services(max_calls=4, max_calls_per_org=2, max_calls_per_destination=4, attempt_timeout_ms=60_000)
    other = await service.client(Role.AGENT, "robot-2", "beta")
    endpoint.script("/hangs", Reply(gate=gate))
    for number in range(4):
        await failed(service, f"s-{number}", endpoint.url("/hangs"))
    await endpoint.wait_for_requests(2)
    await do_step(other, "small", 1, endpoint.url("/small"))
    (await other.fail("small")).raise_for_status()
    assert (await rest(other, "small"))["state"] == "compensated"
    assert len(endpoint.requests("/hangs")) == 2
    gate.set()
    assert {(await rest(service.agent, f"s-{number}"))["state"] for number in range(4)} == {"compensated"}


async def test_circuit_is_closed_when_nothing_waits_for_it(services: StartService, endpoint: FakeEndpoint, database_url: str) -> None:
    """The last call was halted by its deadline: nobody is told for ever that the destination is away."""
    service = await services()
    await open_circuit(database_url, endpoint)
    assert service.app.state.engine.orchestrator is not None
    with structlog.testing.capture_logs() as logs:
        await service.app.state.engine.orchestrator.drop_idle_circuits()
    assert await fetch(database_url, "SELECT FROM circuits") == []
    assert [event["event"] for event in logs] == ["circuit_closed"]
