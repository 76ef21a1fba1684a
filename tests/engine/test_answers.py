"""Every answer of an endpoint, through the whole service: what it is taken for, what is sent next, and the class a person reads."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trustme

from tests.conftest import StartService
from tests.factories import JsonObject, Service, do_step
from tests.fakes import FakeEndpoint, Mode, Received, Reply
from tests.probes import PATIENCE_SECONDS, call_of, fetch, rest

OK = Reply()
BUSY = Reply(status=409)
NAME = "billing.test"  # RFC 2606: no resolver knows it


async def unwound(service: Service, endpoint: FakeEndpoint, name: str, *replies: Reply, **compensation: Any) -> JsonObject:
    """Run a session whose only undo meets these replies, and return it at rest."""
    endpoint.script(f"/{name}", *replies)
    await do_step(service.agent, name, 1, endpoint.url(f"/{name}"), args={"name": name}, **compensation)
    return await rest(service.agent, name)


def posts(endpoint: FakeEndpoint, name: str) -> list[Received]:
    """Return the undos that reached an endpoint for a session, polls left out."""
    return [request for request in endpoint.requests(f"/{name}") if request.method == "POST"]


def entry_of(session: JsonObject) -> JsonObject:
    """Return the newest entry of a session's undo stack."""
    entry: JsonObject = session["undo_stack"][0]
    return entry


class Answer(NamedTuple):
    """An answer that leaves the undo undone, and how `last_error` begins when no retry is left; `status` is the one shown."""

    reply: Reply
    error: str
    status: int | None = None


def with_status(status: int) -> Answer:
    """Return a plain answer of that status with a word in its body."""
    return Answer(Reply(status=status, body=b"not now"), f"http {status}: not now", status)


RETRIED: Mapping[str, Answer] = {
    **{f"status-{status}": with_status(status) for status in (408, 425, 429, 500, 501, 502, 503, 504, 507, 599)},
    "no-final-status": Answer(Reply(status=799), "protocol: http 799 is no final answer", 799),
    "reset-before-processing": Answer(Reply(mode=Mode.RESET_BEFORE_REPLY), "reset: "),
    "reset-after-processing": Answer(Reply(mode=Mode.RESET_AFTER_PROCESSING), "reset: "),
    "reset-in-body": Answer(Reply(mode=Mode.RESET_IN_BODY), "reset: "),
    "closed-unanswered": Answer(Reply(mode=Mode.CLOSE_WITHOUT_REPLY), "reset: closed by the endpoint before an answer"),
    "hangs": Answer(Reply(mode=Mode.HANG), "timeout: no complete answer within 0.6 s"),
    "drips-its-body": Answer(Reply(mode=Mode.DRIP), "timeout: no complete answer within 0.6 s (after status 200)"),
    "drips-its-head": Answer(Reply(mode=Mode.DRIP_HEAD), "timeout: no complete answer within 0.6 s"),
    "continues-for-ever": Answer(Reply(mode=Mode.ENDLESS_CONTINUE), "protocol: more than 16 interim answers"),
    "headers-for-ever": Answer(Reply(mode=Mode.HEADER_FLOOD), "protocol: "),
    "announces-too-much": Answer(Reply(mode=Mode.WRONG_LENGTH), "protocol: "),
    "speaks-another-protocol": Answer(Reply(mode=Mode.NOT_HTTP), "protocol: "),
    "gzip-refusal": Answer(Reply(status=503, mode=Mode.GZIP, body=b"x" * 10_000), "http 503: (a body in gzip, not shown)", 503),
    "endless-refusal": Answer(Reply(status=500, mode=Mode.ENDLESS), "http 500: xxx", 500),
}
TIMEOUT = {name: {"timeout_ms": 600} for name in ("hangs", "drips-its-body", "drips-its-head")}


@pytest.fixture
async def service(services: StartService) -> Service:
    """Run a service on which each call pays for itself, though many find their endpoint away on purpose."""
    return await services(circuit_calls=0)


async def test_failure_shows_its_class_when_retries_are_used_up(service: Service, endpoint: FakeEndpoint) -> None:
    """Whatever goes wrong, one request went out, the session halts, and its class stands first in what a person reads."""
    sessions = await asyncio.gather(
        *(unwound(service, endpoint, name, answer.reply, max_retries=0, **TIMEOUT.get(name, {})) for name, answer in RETRIED.items())
    )
    for (name, answer), session in zip(RETRIED.items(), sessions, strict=True):
        entry = entry_of(session)
        assert (session["state"], session["halt_reason"], entry["state"]) == ("halted", "compensation_failed", "failed"), name
        assert entry["last_error"].startswith(answer.error), (name, entry["last_error"])
        assert len(entry["last_error"]) <= 2_048
        assert (entry["last_status"], entry["attempts"], len(posts(endpoint, name))) == (answer.status, 1, 1), name


async def test_undo_takes_place_once_when_the_endpoint_recovers(service: Service, endpoint: FakeEndpoint) -> None:
    """After any such failure the same bytes go out under the same key, and an endpoint that keeps the key undoes once."""
    sessions = await asyncio.gather(
        *(unwound(service, endpoint, name, answer.reply, OK, **TIMEOUT.get(name, {})) for name, answer in RETRIED.items())
    )
    for name, session in zip(RETRIED, sessions, strict=True):
        entry, sent = entry_of(session), posts(endpoint, name)
        assert (session["state"], entry["attempts"], entry["last_status"], entry["last_error"]) == ("compensated", 2, 200, None), name
        assert {(request.key, request.body) for request in sent} == {(f"undo-{entry['undo_id']}", f'{{"name":"{name}"}}'.encode())}
        assert (len(sent), endpoint.applications_of(sent[0].key)) == (2, 1), name


DONE: Mapping[str, Reply] = {
    **{f"status-{status}": Reply(status=status) for status in (200, 201, 203, 204, 205, 206, 207, 226, 299)},
    "gzip": Reply(mode=Mode.GZIP),
    "chunked": Reply(mode=Mode.CHUNKED),
    "until-closed": Reply(mode=Mode.CLOSE_DELIMITED),
    "after-an-interim-answer": Reply(mode=Mode.INTERIM),
    "endless": Reply(mode=Mode.ENDLESS),
    "more-than-announced": Reply(mode=Mode.EXTRA_BYTES),
    "no-json": Reply(body=b"\xff\x00<html>", headers={"Content-Type": "text/html"}),
}


async def test_undo_is_done_when_the_answer_is_a_success(service: Service, endpoint: FakeEndpoint) -> None:
    """Any 2xx but 202 is the end, whatever its body is: packed, endless, no JSON."""
    sessions = await asyncio.gather(*(unwound(service, endpoint, name, reply, BUSY) for name, reply in DONE.items()))
    for (name, reply), session in zip(DONE.items(), sessions, strict=True):
        entry = entry_of(session)
        assert (session["state"], session["clean"], len(posts(endpoint, name))) == ("compensated", True, 1), (name, entry["last_error"])
        assert (entry["last_status"], entry["last_error"], entry["attempts"]) == (reply.status, None, 1)


async def test_redirect_names_its_host_and_no_more_when_it_is_refused(service: Service, endpoint: FakeEndpoint) -> None:
    """Nothing is followed, no path or query of the target is repeated, and a page of rubbish in Location does no harm."""
    table = {
        "https://Other.Example:8443/steal?token=canary": "http 307 to other.example: redirects are not followed",
        "/relative?token=canary": "http 307: redirects are not followed",
        "http://[": "http 307: redirects are not followed",
        "": "http 307: redirects are not followed",
    }
    for number, (location, expected) in enumerate(table.items()):
        session = await unwound(service, endpoint, f"r{number}", Reply(status=307, headers={"Location": location}, body=b""))
        assert (session["state"], entry_of(session)["last_error"]) == ("halted", expected)
        assert "canary" not in (await service.operator.get(f"/sessions/r{number}")).text
    assert len(endpoint.received) == len(table)


async def test_busy_answers_are_told_from_refusals_when_they_come_early_or_late(service: Service, endpoint: FakeEndpoint) -> None:
    """408, 425 and 429 are retried wherever they come; 409 is retried once something may be running, and then as long as it does."""
    unknown = Reply(mode=Mode.RESET_AFTER_PROCESSING)
    table: dict[str, tuple[tuple[Reply, ...], str, int]] = {
        "all-kinds": ((Reply(status=429), Reply(status=425), Reply(status=408), OK), "compensated", 4),
        "late-429": ((Reply(status=500), Reply(status=503), Reply(status=429), OK), "compensated", 4),
        "busy-thrice": ((unknown, BUSY, BUSY, BUSY, OK), "halted", 4),  # busy or not, a retry is a retry: three of them
        "busy-twice": ((unknown, BUSY, BUSY, OK), "compensated", 4),
        "not-started-then-no": ((unknown, Reply(status=404), OK), "halted", 2),  # not found is an answer to this very request
        "patient-409": ((Reply(status=409, headers={"Retry-After": "0"}), BUSY, OK), "halted", 2),
        "rubbish-409": ((Reply(status=409, headers={"Retry-After": "later"}), OK), "halted", 1),
    }
    sessions = await asyncio.gather(*(unwound(service, endpoint, name, *replies) for name, (replies, _, _) in table.items()))
    found = {name: (session["state"], len(posts(endpoint, name))) for name, session in zip(table, sessions, strict=True)}
    assert found == {name: (state, count) for name, (_, state, count) in table.items()}


async def test_descriptors_lists_override_when_a_status_is_listed(service: Service, endpoint: FakeEndpoint) -> None:
    """`retry_on` uses up the budget like any retry, beats `compensated_on`, and neither speaks of polls."""
    listed = {"retry_on": [409, 422], "compensated_on": [404, 410, 422, 500]}
    gone = await unwound(service, endpoint, "gone", Reply(status=410, body=b"no such credit"), **listed)
    assert (gone["state"], entry_of(gone)["last_status"], entry_of(gone)["last_error"]) == ("compensated", 410, None)
    busy = await unwound(service, endpoint, "busy", BUSY, BUSY, OK, **listed)
    assert (busy["state"], len(posts(endpoint, "busy"))) == ("compensated", 3)
    both = await unwound(service, endpoint, "both", Reply(status=422), max_retries=2, **listed)
    assert (both["state"], len(posts(endpoint, "both")), entry_of(both)["last_error"]) == ("halted", 3, "http 422: {}")
    strange = await unwound(service, endpoint, "strange", Reply(status=500), **listed)
    assert (strange["state"], len(posts(endpoint, "strange"))) == ("compensated", 1)
    endpoint.script("/jobs/1", Reply(status=404))
    polled = await unwound(service, endpoint, "polled", Reply(status=202, headers={"Location": "/jobs/1"}), **listed)
    assert (polled["state"], entry_of(polled)["last_status"]) == ("halted", 404)


async def test_location_may_be_relative_or_elsewhere_when_it_may_be_called(service: Service, endpoint: FakeEndpoint) -> None:
    """A poll goes where Location says, as seen from the undo's URL; another allowed origin is one too, a forbidden one is never asked."""
    async with FakeEndpoint({"/elsewhere": [Reply(status=202), OK]}) as other:
        endpoint.script("/nested/jobs/1", OK)
        endpoint.script("/nested/undo", Reply(status=202, headers={"Location": "jobs/1?x=%2F"}))
        await do_step(service.agent, "relative", 1, endpoint.url("/nested/undo"))
        assert (await rest(service.agent, "relative"))["state"] == "compensated"
        assert [request.target for request in endpoint.received] == ["/nested/undo", "/nested/jobs/1?x=%2F"]

        accepted = Reply(status=202, headers={"Location": other.url("/elsewhere")})
        elsewhere = await unwound(service, endpoint, "elsewhere", accepted)
        assert (elsewhere["state"], [request.method for request in other.received]) == ("compensated", ["GET", "GET"])
        assert len(posts(endpoint, "elsewhere")) == 1

        forbidden = Reply(status=202, headers={"Location": f"http://10.0.0.1:{other.port}/elsewhere"})
        refused = await unwound(service, endpoint, "forbidden", forbidden)
        assert (refused["state"], refused["halt_reason"]) == ("halted", "egress_denied")
        assert entry_of(refused)["last_error"].startswith("asking the Location of a 202: egress_denied: ")
        assert len(other.received) == 2


async def test_accepted_and_never_finished_is_told_apart_when_the_deadline_is_over(service: Service, endpoint: FakeEndpoint) -> None:
    """Who reads `deadline_exceeded` learns whether the endpoint was ever reached: took it, failed while being asked, or was only busy."""
    job = Reply(status=202, headers={"Location": "/jobs/1"})
    endpoint.script("/jobs/1", Reply(status=202), Reply(status=503, body=b"moment"))
    later = Reply(status=503, headers={"Retry-After": "60"}, body=b"later")
    resting = await asyncio.gather(
        unwound(service, endpoint, "polled", job, deadline_ms=700),
        unwound(service, endpoint, "resent", Reply(status=202, body=b""), deadline_ms=700, max_retries=0),
        unwound(service, endpoint, "busy", later, deadline_ms=700),
    )
    assert {(session["state"], session["halt_reason"]) for session in resting} == {("halted", "deadline_exceeded")}
    assert [entry_of(session)["last_error"] for session in resting] == [
        "accepted but never finished; the last answer was: asking the Location of a 202: http 503: moment",
        "accepted but never finished; the last answer was: http 202",
        "http 503: later",
    ]
    assert len(endpoint.requests("/jobs/1")) > 1
    assert len(posts(endpoint, "polled")) == 1
    assert len(posts(endpoint, "resent")) > 1
    failed = [entry for entry in await service.operator.journal("polled") if entry["kind"] == "COMPENSATION_FAILED"]
    assert "accepted but never finished" in failed[0]["body"]


async def test_wait_is_what_the_endpoint_asks_within_an_hour(service: Service, endpoint: FakeEndpoint) -> None:
    """Seconds, all forms of date and absurd numbers: the next attempt is due then, an hour at most, and others do not wait for it."""
    (row,) = await fetch(service.database_url, "SELECT clock_timestamp() AS now")
    now: datetime = row["now"]
    ahead = now + timedelta(seconds=600)
    table = {
        "seconds": ("429", "600", 600),
        "date": ("503", format_datetime(ahead, usegmt=True), 600),
        "old-date": ("429", ahead.strftime("%A, %d-%b-%y %H:%M:%S GMT"), 600),
        "asctime": ("503", ahead.strftime("%a %b %e %H:%M:%S %Y"), 600),
        "day": ("429", "86400", 3_600),
        "digits": ("503", "9" * 400, 3_600),
        "years": ("429", format_datetime(now + timedelta(days=4_000), usegmt=True), 3_600),
        "accepted": ("202", "600", 600),
    }
    for name, (status, value, _) in table.items():
        endpoint.script(f"/{name}", Reply(status=int(status), headers={"Retry-After": value}))
        await do_step(service.agent, name, 1, endpoint.url(f"/{name}"))
        (await service.agent.fail(name)).raise_for_status()
    await endpoint.wait_for_answers(len(table))
    assert (await unwound(service, endpoint, "other", OK))["state"] == "compensated"
    for name, (_, _, expected) in table.items():
        call = await released_call(service, name)
        waits = (call["due_at"] - now).total_seconds()
        assert expected - 2 <= waits <= expected + PATIENCE_SECONDS, (name, waits)
        assert (call["attempts"], call["failures"]) == (1, int(name != "accepted"))


async def released_call(service: Service, name: str) -> Any:
    """Return the call of a session once its answer is recorded."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (call := await call_of(service.database_url, name, 1))["is_attempt_open"]:
            pass
    return call


async def test_attempt_does_not_come_early_when_a_second_is_asked_for(service: Service, endpoint: FakeEndpoint) -> None:
    """A short Retry-After is waited out where it came, by the endpoint's own clock."""
    session = await unwound(service, endpoint, "patient", Reply(status=429, headers={"Retry-After": "1"}), OK)
    one, two = posts(endpoint, "patient")
    assert session["state"] == "compensated"
    assert one.ended_at is not None
    assert two.started_at - one.ended_at >= 0.99


@pytest.fixture
async def addresses(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Be the machine's resolver for names under `.test`: what stands in the table at the moment of asking."""
    table: dict[str, list[str]] = {}
    loop = asyncio.get_running_loop()
    ask_system = loop.getaddrinfo

    async def look_up(host: Any, port: Any, **options: Any) -> Any:
        if not str(host).endswith(".test"):
            return await ask_system(host, port, **options)
        if host not in table:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in table[host]]

    monkeypatch.setattr(loop, "getaddrinfo", look_up)
    return table


async def failing(service: Service, name: str, url: str, **compensation: Any) -> None:
    """Fail a session of one undo, and return once two attempts of it are counted."""
    await do_step(service.agent, name, 1, url, max_retries=100, **compensation)
    (await service.agent.fail(name)).raise_for_status()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while entry_of(await service.agent.session(name))["attempts"] < 2:
            pass


async def test_undo_arrives_when_a_name_begins_to_resolve(
    service: Service, endpoint: FakeEndpoint, addresses: dict[str, list[str]]
) -> None:
    """A name without an address is retried and shown as `dns`; nothing was sent, so the endpoint sees one request."""
    url = f"http://{NAME}:{endpoint.port}/undo"
    await failing(service, "s", url)
    assert entry_of(await service.agent.session("s"))["last_error"] in {None, f"dns: {NAME}: Name or service not known"}
    addresses[NAME] = ["127.0.0.1"]
    session = await rest(service.agent, "s")
    assert session["state"] == "compensated"
    (request,) = endpoint.received
    assert request.header("Host") == f"{NAME}:{endpoint.port}"
    assert request.header("Countermand-Attempt") == str(entry_of(session)["attempts"])
    await do_step(service.agent, "never", 1, f"http://nobody.test:{endpoint.port}/undo", max_retries=1)
    never = await rest(service.agent, "never")
    assert (never["state"], entry_of(never)["last_error"]) == ("halted", "dns: nobody.test: Name or service not known")


async def test_undo_stays_outside_when_a_name_begins_to_lead_inside(
    service: Service, endpoint: FakeEndpoint, addresses: dict[str, list[str]]
) -> None:
    """A name is judged by its addresses at every connect: one that turns to a private address ends the unwind unsent."""
    url = f"http://{NAME}:{endpoint.port}/undo"
    await failing(service, "s", url)
    addresses[NAME] = ["127.0.0.1", "10.0.0.1"]
    session = await rest(service.agent, "s")
    assert (session["state"], session["halt_reason"]) == ("halted", "egress_denied")
    assert entry_of(session)["last_error"].startswith("egress_denied: ")
    assert endpoint.connections == 0


async def test_undo_arrives_when_a_closed_port_opens(service: Service) -> None:
    """A refused connection is retried and shown as `connect`."""
    async with FakeEndpoint() as gone:
        url, port = gone.url("/undo"), gone.port
    await failing(service, "s", url)
    async with FakeEndpoint(port=port) as opened:
        session = await rest(service.agent, "s")
        assert session["state"] == "compensated"
        (request,) = opened.received
        assert request.header("Countermand-Attempt") == str(entry_of(session)["attempts"])


@pytest.fixture
def authority(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> trustme.CA:
    """Make an authority that the machine trusts."""
    authority = trustme.CA()
    file = tmp_path / "authorities.pem"
    authority.cert_pem.write_to_path(str(file))
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    return authority


@asynccontextmanager
async def secured(issuer: trustme.CA, name: str) -> AsyncIterator[FakeEndpoint]:
    """Run an endpoint with a certificate for `name`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issuer.issue_cert(name).configure_cert(context)
    async with FakeEndpoint(ssl_context=context) as endpoint:
        yield endpoint


async def test_nothing_is_sent_when_the_certificate_is_not_good(
    authority: trustme.CA, services: StartService, endpoint: FakeEndpoint, addresses: dict[str, list[str]]
) -> None:
    """Who cannot prove its name gets no undo, not in clear either: retried, then halted as `tls`; who can, gets it."""
    service = await services()
    addresses[NAME] = ["127.0.0.1"]
    async with secured(authority, NAME) as good, secured(authority, "other.test") as misnamed, secured(trustme.CA(), NAME) as unknown:
        table: dict[str, tuple[FakeEndpoint, Callable[[str], bool]]] = {
            "good": (good, lambda error: not error),
            "misnamed": (misnamed, lambda error: error.startswith("tls: billing.test: certificate: Hostname mismatch")),
            "unknown": (unknown, lambda error: error.startswith("tls: billing.test: certificate: ")),
            "in-the-clear": (endpoint, lambda error: error == "timeout: no connection within 0.5 s"),
        }
        for name, (server, is_expected) in table.items():
            await do_step(service.agent, name, 1, f"https://{NAME}:{server.port}/undo", max_retries=1, timeout_ms=500)
            session = await rest(service.agent, name)
            entry = entry_of(session)
            assert session["state"] == ("compensated" if name == "good" else "halted"), (name, entry["last_error"])
            assert is_expected(entry["last_error"] or ""), (name, entry["last_error"])
            assert entry["attempts"] == (1 if name == "good" else 2)
        assert [len(server.received) for server, _ in table.values()] == [1, 0, 0, 0]
