"""When an undo is sent again and when it is given up: status codes, waits and budgets, with the endpoint's own log as witness."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from app.domain.egress import EgressPolicy
from app.engine.clock import SystemClock
from app.engine.outbound import Outbound
from app.engine.unwind import Holding, Unwind
from app.storage.changes import Lease
from app.storage.database import open_database
from tests.conftest import StartService
from tests.factories import JsonObject, Service, do_step, new_events, undo_at
from tests.fakes import FakeEndpoint, Mode, Received, Reply
from tests.probes import call_of, claim_due, fetch, make_due, rest

BUSY = Reply(status=409)
OK = Reply()


@dataclass(slots=True)
class ImpatientClock:
    """A clock whose sleeps are over at once, and which remembers them."""

    slept: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        """Return the machine's time."""
        return SystemClock().monotonic()

    async def sleep(self, seconds: float) -> None:
        """Note how long it would have been."""
        self.slept.append(seconds)


@pytest.fixture
async def service(services: StartService) -> Service:
    """Run a service on which each call pays for itself, though many find their endpoint away on purpose."""
    return await services(circuit_calls=0)


@asynccontextmanager
async def worker(database_url: str, clock: ImpatientClock, unit: float) -> AsyncIterator[Unwind]:
    """Open a runner of attempts whose die always shows `unit`."""
    async with (
        open_database(database_url, size=2, application_name="tests") as database,
        Outbound(EgressPolicy.parse("127.0.0.0/8"), clock=clock) as outbound,
    ):
        lease = Lease(worker="worker", seconds=30.0)
        yield Unwind(database=database, outbound=outbound, clock=clock, lease=lease, events=new_events(), random_unit=lambda: unit)


async def run_due_call(unwind: Unwind) -> None:
    """Claim the one call that is due and work on it until it rests or waits for long."""
    async with unwind.database.dispatch() as connection:
        (claim,) = await claim_due(connection, unwind.lease, 1)
    await unwind.run(Holding(claim=claim, has_room=lambda _: True))


async def unwound(service: Service, endpoint: FakeEndpoint, name: str, *replies: Reply, **compensation: object) -> JsonObject:
    """Run one session of two steps, the upper of which meets these replies, and return it at rest."""
    endpoint.script(f"/{name}", *replies)
    await do_step(service.agent, name, 1, endpoint.url("/below"))
    await do_step(service.agent, name, 2, endpoint.url(f"/{name}"), args={"name": name}, **compensation)
    return await rest(service.agent, name)


def sent(endpoint: FakeEndpoint, name: str) -> list[Received]:
    """Return what the upper undo of a session came to, POSTs alone."""
    return [request for request in endpoint.requests(f"/{name}") if request.method == "POST"]


async def test_attempts_share_key_and_bytes_when_the_endpoint_recovers(service: Service, endpoint: FakeEndpoint) -> None:
    """500, 500, 200: three POSTs under one key with the same bytes, numbered, then the entry below."""
    session = await unwound(service, endpoint, "recovers", Reply(status=500), Reply(status=500), OK)
    attempts = sent(endpoint, "recovers")
    assert [request.header("Countermand-Attempt") for request in attempts] == ["1", "2", "3"]
    assert {(request.key, request.body) for request in attempts} == {
        (f"undo-{session['undo_stack'][0]['undo_id']}", b'{"name":"recovers"}')
    }
    assert session["state"] == "compensated"
    top = session["undo_stack"][0]
    assert (top["attempts"], top["last_status"], top["last_error"], top["next_attempt_at"]) == (3, 200, None, None)
    assert [request.path for request in endpoint.received][-1] == "/below"
    assert (await service.operator.kinds("recovers")).count("COMPENSATING") == 2  # attempts are no transitions


PERMANENT = (300, 301, 302, 303, 307, 308, 400, 401, 403, 404, 405, 409, 410, 422, 451)


async def test_session_halts_after_one_attempt_when_the_answer_is_permanent(service: Service, endpoint: FakeEndpoint) -> None:
    """Refusals and redirects end the unwind at once: one POST, nothing followed, the rest pending, status and error shown."""
    location = {"Location": endpoint.url("/followed")}
    names = [f"status-{status}" for status in PERMANENT]
    sessions = await asyncio.gather(
        *(
            unwound(service, endpoint, name, Reply(status=status, headers=location, body=b"no such credit"))
            for name, status in zip(names, PERMANENT, strict=True)
        )
    )
    for name, status, session in zip(names, PERMANENT, sessions, strict=True):
        top, below = session["undo_stack"]
        assert len(sent(endpoint, name)) == 1, name
        assert (session["state"], session["halt_reason"]) == ("halted", "compensation_failed"), name
        assert (top["state"], top["attempts"], top["last_status"]) == ("failed", 1, status), name
        assert top["last_error"].startswith(f"http {status}")
        assert top["last_error"].endswith("no such credit")
        assert (below["state"], below["attempts"], below["next_attempt_at"]) == ("pending", 0, None), name
        assert [effect["state"] for effect in session["effects"]] == ["committed", "compensation_failed"], name
        assert (await service.operator.kinds(name))[-2:] == ["COMPENSATION_FAILED", "HALTED"], name
    assert endpoint.requests("/followed") == []
    assert endpoint.requests("/below") == []


async def test_session_halts_when_retries_are_used_up(service: Service, endpoint: FakeEndpoint) -> None:
    """A budget of n retries is 1 + n POSTs; the default is three retries."""
    budgets = {"none": 0, "two": 2, "default": None}
    sessions = await asyncio.gather(
        *(unwound(service, endpoint, name, Reply(status=503), max_retries=budget) for name, budget in budgets.items())
    )
    for (name, budget), session in zip(budgets.items(), sessions, strict=True):
        expected = 1 + (3 if budget is None else budget)
        assert len(sent(endpoint, name)) == expected, name
        assert (session["state"], session["halt_reason"]) == ("halted", "compensation_failed")
        assert [(entry["state"], entry["attempts"]) for entry in session["undo_stack"]] == [("failed", expected), ("pending", 0)]


async def test_session_halts_when_nobody_listens(service: Service, endpoint: FakeEndpoint) -> None:
    """Connections that are never made are retried within the budget, and their error is shown."""
    async with FakeEndpoint() as gone:
        url = gone.url("/undo")
    await do_step(service.agent, "s", 1, url, max_retries=1)
    session = await rest(service.agent, "s")
    assert session["state"] == "halted"
    entry = (await service.operator.session("s"))["undo_stack"][0]
    assert (entry["attempts"], entry["last_status"]) == (2, None)
    assert entry["last_error"].startswith("connect: ")


@pytest.mark.parametrize("unit", [0.0, 0.5, 0.999])
async def test_gaps_stay_within_the_jitter_bounds_when_attempts_fail(
    unit: float, services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """The wait before the n-th retry is the die's share of initial * multiplier ** (n - 1), capped."""
    service = await services(has_orchestrator=False)
    endpoint.script("/undo", *[Reply(status=500)] * 5, OK)
    intervals = {"initial_interval_ms": 100, "multiplier": 3, "max_interval_ms": 500, "max_retries": 5}
    await do_step(service.agent, "s", 1, endpoint.url("/undo"), **intervals)
    (await service.agent.fail("s")).raise_for_status()
    clock = ImpatientClock()
    async with worker(database_url, clock, unit) as unwind:
        await run_due_call(unwind)
    ceilings = [0.1, 0.3, 0.5, 0.5, 0.5]
    assert clock.slept == pytest.approx([unit * ceiling for ceiling in ceilings], abs=1e-5)
    assert len(endpoint.received) == 6
    assert (await service.agent.session("s"))["state"] == "compensated"


@pytest.mark.parametrize("status", [429, 503])
async def test_wait_outlives_the_process_when_the_endpoint_asks_for_20_seconds(
    status: int, services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """Retry-After gives slot and lease back; a process that starts meanwhile makes no early attempt, and goes on when it is time."""
    endpoint.script("/busy", Reply(status=status, headers={"Retry-After": "20"}), OK)
    first = await services(max_calls=1)
    await do_step(first.agent, "busy", 1, endpoint.url("/busy"))
    await first.agent.fail("busy")
    await endpoint.wait_for_answers(1)

    # The only slot is free for others, which proves that whatever the first call held is given back by now.
    await do_step(first.agent, "other", 1, endpoint.url("/other"))
    assert (await rest(first.agent, "other"))["state"] == "compensated"
    call = await call_of(database_url, "busy", 1)
    assert (call["leased_by"], call["leased_until"], call["is_attempt_open"]) == (None, None, False)
    (waits,) = await fetch(database_url, "SELECT due_at - clock_timestamp() AS seconds FROM outgoing_calls WHERE due_at IS NOT NULL")
    assert 10 < waits["seconds"].total_seconds() <= 20
    assert (await first.agent.session("busy"))["undo_stack"][0]["next_attempt_at"] is not None

    assert first.app.state.engine.orchestrator is not None
    first.app.state.engine.orchestrator.stop()
    second = await services(max_calls=1)
    await do_step(second.agent, "later", 1, endpoint.url("/later"))
    assert (await rest(second.agent, "later"))["state"] == "compensated"
    assert len(endpoint.requests("/busy")) == 1

    await make_due(database_url, "busy")
    assert (await rest(second.agent, "busy"))["state"] == "compensated"
    one, two = endpoint.requests("/busy")
    assert (one.key, one.body) == (two.key, two.body)
    assert [one.header("Countermand-Attempt"), two.header("Countermand-Attempt")] == ["1", "2"]


async def test_retry_after_is_heeded_only_when_it_is_one(service: Service, endpoint: FakeEndpoint) -> None:
    """Rubbish, the past and negative numbers ask for no wait; the own backoff holds."""
    values = ("soon", "-5", "1e3", "", "20 seconds", "Sun, 06 Nov 1994 08:49:37 GMT", "0x14", "NaN")
    sessions = await asyncio.gather(
        *(
            unwound(service, endpoint, f"rubbish-{number}", Reply(status=503, headers={"Retry-After": value}), OK)
            for number, value in enumerate(values)
        )
    )
    assert {session["state"] for session in sessions} == {"compensated"}
    assert [len(sent(endpoint, f"rubbish-{number}")) for number in range(len(values))] == [2] * len(values)


async def test_location_is_asked_until_final_when_the_answer_is_202(service: Service, endpoint: FakeEndpoint) -> None:
    """A 202 is not done: its Location is polled with GET, the undo is not sent again, entries below wait."""
    accepted = Reply(status=202, headers={"Location": "/jobs/7?full=1"})
    endpoint.script("/jobs/7", Reply(status=202), Reply(status=503), Reply(status=202), OK)
    session = await unwound(service, endpoint, "accepted", accepted)
    assert session["state"] == "compensated"
    assert [(request.method, request.target) for request in endpoint.received] == [
        ("POST", "/accepted"),
        *[("GET", "/jobs/7?full=1")] * 4,
        ("POST", "/below"),
    ]
    polls = endpoint.requests("/jobs/7")
    assert {(poll.key, poll.body, poll.header("Content-Type")) for poll in polls} == {(sent(endpoint, "accepted")[0].key, b"", None)}
    top = session["undo_stack"][0]
    assert (top["attempts"], top["last_status"]) == (1, 200)
    assert top["compensated_at"] is not None


async def test_poll_that_is_refused_halts_the_session_when_final(service: Service, endpoint: FakeEndpoint) -> None:
    """A job that is gone, or a Location where nothing may be sent, is for a person."""
    endpoint.script("/jobs/1", Reply(status=404))
    gone = await unwound(service, endpoint, "gone", Reply(status=202, headers={"Location": "/jobs/1"}))
    assert (gone["state"], gone["halt_reason"]) == ("halted", "compensation_failed")
    inside = await unwound(service, endpoint, "inside", Reply(status=202, headers={"Location": "http://169.254.169.254/latest"}))
    assert (inside["state"], inside["halt_reason"]) == ("halted", "egress_denied")
    assert endpoint.requests("/below") == []


@pytest.mark.parametrize("location", ["http://[", "ftp://nowhere/", "http://user:secret@127.0.0.1/"])
async def test_session_comes_to_rest_when_the_location_is_rubbish(location: str, service: Service, endpoint: FakeEndpoint) -> None:
    """An address that cannot be asked ends the call; it does not make the worker stumble for ever."""
    session = await unwound(service, endpoint, "rubbish", Reply(status=202, headers={"Location": location}), OK)
    assert session["state"] in {"compensated", "halted"}
    assert len(sent(endpoint, "rubbish")) <= 2


async def test_undo_is_sent_again_when_a_202_has_no_location(service: Service, endpoint: FakeEndpoint) -> None:
    """Without a Location the same bytes go out again under the same key; a 409 then means that the endpoint is at it."""
    session = await unwound(service, endpoint, "accepted", Reply(status=202), BUSY, Reply(status=202), OK)
    attempts = sent(endpoint, "accepted")
    assert len(attempts) == 4
    assert len({(request.key, request.body) for request in attempts}) == 1
    assert session["state"] == "compensated"
    assert endpoint.received[-1].path == "/below"


async def test_202_without_end_halts_when_the_deadline_is_over(service: Service, endpoint: FakeEndpoint) -> None:
    """No retry budget ends a 202; the entry's deadline does."""
    endpoint.script("/jobs/1", Reply(status=202))
    accepted = Reply(status=202, headers={"Location": "/jobs/1"})
    session = await unwound(service, endpoint, "endless", accepted, deadline_ms=1_500, max_retries=0)
    assert (session["state"], session["halt_reason"]) == ("halted", "deadline_exceeded")
    assert len(endpoint.requests("/jobs/1")) > 1


async def test_409_is_retried_only_when_the_endpoint_may_be_busy_with_it(service: Service, endpoint: FakeEndpoint) -> None:
    """After an unknown outcome, or with Retry-After, 409 says busy; after an answer that proves nothing was done, it is final."""
    table: dict[str, tuple[tuple[Reply, ...], str, int]] = {
        "after-500": ((Reply(status=500), BUSY, OK), "compensated", 3),
        "after-reset": ((Reply(mode=Mode.RESET_AFTER_PROCESSING), BUSY, OK), "compensated", 3),
        "after-408": ((Reply(status=408), BUSY, OK), "compensated", 3),
        "with-retry-after": ((Reply(status=409, headers={"Retry-After": "0"}), OK), "compensated", 2),
        "first": ((BUSY, OK), "halted", 1),
        "after-503": ((Reply(status=503), BUSY, OK), "halted", 2),
        "after-429": ((Reply(status=429), BUSY, OK), "halted", 2),
        "after-425": ((Reply(status=425), BUSY, OK), "halted", 2),
    }
    sessions = await asyncio.gather(*(unwound(service, endpoint, name, *replies) for name, (replies, _, _) in table.items()))
    found = {name: (session["state"], len(sent(endpoint, name))) for name, session in zip(table, sessions, strict=True)}
    assert found == {name: (state, count) for name, (_, state, count) in table.items()}


async def test_others_go_on_when_an_endpoint_hangs(services: StartService, endpoint: FakeEndpoint) -> None:
    """An attempt without an answer ends at its deadline with unknown outcome, so that a 409 is retried; others do not wait for it."""
    service = await services(max_calls=4)
    endpoint.script("/hangs", Reply(mode=Mode.HANG), BUSY, OK)
    await do_step(service.agent, "hangs", 1, endpoint.url("/hangs"), timeout_ms=1_500)
    await service.agent.fail("hangs")
    await endpoint.wait_for_requests(1)
    await do_step(service.agent, "other", 1, endpoint.url("/other"))
    assert (await rest(service.agent, "other"))["state"] == "compensated"
    assert len(endpoint.requests("/hangs")) == 1
    assert (await rest(service.agent, "hangs"))["state"] == "compensated"
    assert len(endpoint.requests("/hangs")) == 3
    assert endpoint.applications_of(endpoint.requests("/hangs")[0].key) <= 1


async def test_session_halts_when_the_entrys_deadline_is_over(service: Service, endpoint: FakeEndpoint) -> None:
    """A wait is cut at the deadline, and then a person is asked; nothing is sent after it."""
    session = await unwound(service, endpoint, "late", Reply(status=503, headers={"Retry-After": "60"}), deadline_ms=1_000)
    assert (session["state"], session["halt_reason"]) == ("halted", "deadline_exceeded")
    assert len(sent(endpoint, "late")) == 1
    assert [entry["state"] for entry in session["undo_stack"]] == ["failed", "pending"]


async def test_session_halts_when_the_address_is_no_longer_allowed(services: StartService, endpoint: FakeEndpoint) -> None:
    """An address that was allowed at intercept and is not at the send is never connected to."""
    allowing = await services(has_orchestrator=False)
    await do_step(allowing.agent, "s", 1, endpoint.url("/1"))
    await do_step(allowing.agent, "s", 2, endpoint.url("/2"))
    strict = await services(egress_allow="")
    session: JsonObject = await rest(strict.agent, "s")
    assert (session["state"], session["halt_reason"]) == ("halted", "egress_denied")
    top, below = session["undo_stack"]
    assert (top["state"], top["last_status"], below["state"]) == ("failed", None, "pending")
    assert top["last_error"].startswith("egress_denied")
    assert endpoint.connections == 0


async def test_descriptor_overrides_the_table_when_it_lists_a_status(service: Service, endpoint: FakeEndpoint) -> None:
    """`compensated_on` takes a 404 or 410 for done, `retry_on` tries a 400 again."""
    deleted = await unwound(service, endpoint, "deleted", Reply(status=404), compensated_on=[404, 410])
    assert (deleted["state"], deleted["undo_stack"][0]["last_status"]) == ("compensated", 404)
    stubborn = await unwound(service, endpoint, "stubborn", Reply(status=400), OK, retry_on=[400])
    assert (stubborn["state"], len(sent(endpoint, "stubborn"))) == ("compensated", 2)


async def test_session_halts_as_poison_when_its_attempts_never_end(
    services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """A call whose worker died ten times in mid-attempt is handed to a person instead of killing an eleventh."""
    service = await services(has_orchestrator=False)
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    await service.agent.intercept("t", step_index=1, compensation=undo_at(endpoint.url("/undo")))
    for name in ("s", "t"):
        (await service.agent.fail(name)).raise_for_status()
    died = "UPDATE outgoing_calls SET is_attempt_open = true, attempts = $2, interrupted = $3, first_sent_at = clock_timestamp(), "
    sent_sql = "url = $4, body = '{}', outcome = 'unknown' WHERE session_id = $1"
    for name, attempts in (("s", 10), ("t", 3)):
        await fetch(database_url, died + sent_sql, name, attempts, attempts - 1, endpoint.url("/undo"))
        await fetch(database_url, "UPDATE undo_stack SET state = 'running' WHERE session_id = $1", name)
        await fetch(database_url, "UPDATE effect_log SET state = 'compensating' WHERE session_id = $1", name)
        await fetch(database_url, "UPDATE sessions SET state = 'compensating' WHERE session_id = $1", name)
    await services(has_api=False)
    poisoned, recovered = await rest(service.agent, "s"), await rest(service.agent, "t")
    assert (poisoned["state"], poisoned["halt_reason"]) == ("halted", "poison")
    assert recovered["state"] == "compensated"
    (request,) = endpoint.received
    assert request.header("Countermand-Attempt") == "4"
    assert secrets.compare_digest(request.key or "", f"undo-{(await service.agent.session('t'))['undo_stack'][0]['undo_id']}")
