"""What /metrics tells, checked against what is known otherwise: the journal, the log, the endpoint. Must not test the library's format."""

import asyncio
import re
from urllib.parse import urlsplit

import httpx
import pytest
import structlog
import yaml

from app.domain.model import EntryKind, HaltReason
from app.main import SCHEMA_REVISION, VERSION, create_app
from app.settings import Settings
from app.telemetry import FAMILIES
from tests.conftest import StartService
from tests.factories import Service, do_step, open_service, park
from tests.fakes import FakeEndpoint, Mode, Reply
from tests.golden import REPOSITORY
from tests.halts import LATER, Night
from tests.operators import is_handed_back
from tests.probes import fetch, rest, take_lease_away
from tests.scraping import Scrape, parsed, scrape

KINDS_SQL = "SELECT lower(kind::text) AS kind, count(*) AS count FROM journal GROUP BY kind"


@pytest.fixture
def night(service: Service, endpoint: FakeEndpoint) -> Night:
    """Return what can go wrong on one service and one endpoint."""
    return Night(service=service, endpoint=endpoint)


async def test_transitions_are_the_journals_when_sessions_went_different_ways(night: Night) -> None:
    """One append, one event, one count, of every kind that came up; the others are there as 0, so that their first is an increase."""
    with structlog.testing.capture_logs() as logs:
        await night.run("good", 1)
        (await night.service.agent.complete("good")).raise_for_status()
        await night.refused("refused")
        await night.pivoted("pivoted")
        journal = {row["kind"]: row["count"] for row in await fetch(night.service.database_url, KINDS_SQL)}
        told = await scrape(night.service)
    counted = told.by("kind", "countermand_transitions_total")
    assert set(counted) == {kind.value.lower() for kind in EntryKind}
    assert {kind: count for kind, count in counted.items() if count} == journal
    events = [event["event"] for event in logs if "seq" in event]
    assert {name: events.count(name) for name in set(events)} == journal
    halts = told.by("reason", "countermand_halts_total")
    assert set(halts) == {reason.value for reason in HaltReason}
    assert {reason for reason, count in halts.items() if count} == {"compensation_failed", "failed_after_pivot"}


async def test_verbs_are_timed_by_operation_and_class_when_they_are_answered(service: Service) -> None:
    """One observation per request under /v1, refusals among them; probes, scrapes and paths that are no verb leave no trace."""
    await service.agent.put("/sessions/s")
    for _ in range(3):
        await service.agent.get("/sessions/s")
    await service.agent.get("/sessions/nobody")
    await service.agent.http.head("/v1/sessions/s")
    await service.agent.get("/nonsense")
    await service.agent.http.get("/livez")
    told = await scrape(service)
    counts = {(labels["verb"], labels["outcome"]): value for labels, value in told.series("countermand_verb_seconds_count")}
    assert counts == {("openSession", "2xx"): 1, ("getSession", "2xx"): 3, ("getSession", "4xx"): 2}


async def test_attempts_are_counted_by_class_when_an_endpoint_answers_each_way(night: Night) -> None:
    """An operator sees from the class whether an endpoint is down, refuses, or is not there at all."""
    night.endpoint.script("/s/1", Reply(status=503), Reply(mode=Mode.CLOSE_WITHOUT_REPLY), Reply(status=202), Reply())
    await night.run("s", 1)
    await night.failed("s")
    await night.refused("refused", 1)
    told = await scrape(night.service)
    counted = {(labels["call"], labels["result"]): value for labels, value in told.series("countermand_attempts_total")}
    assert counted == {
        ("undo", "http_5xx"): 1,
        ("undo", "reset"): 1,
        ("undo", "http_202"): 1,
        ("undo", "http_2xx"): 1,
        ("undo", "http_4xx"): 1,
    }
    assert told.value("countermand_attempt_seconds_count", call="undo") == len(night.endpoint.received)


async def test_backlog_is_told_when_sessions_of_all_orgs_are_open(night: Night) -> None:
    """What a person has to look at, by state, with what waits for whom, and how soon a question expires."""
    service = night.service
    night.endpoint.script("/waits/1", LATER)
    await night.run("waits", 1)
    (await service.agent.fail("waits")).raise_for_status()
    await is_handed_back(service.database_url, "waits")
    await night.refused("halted", 1)
    await service.agent.put("/sessions/active")
    await park(service.agent, "asks", 1, "{}")
    await fetch(
        service.database_url,
        "UPDATE sessions SET halted_at = now() - interval '1 h', failed_at = now() - interval '2 h', created_at = now() - interval '3 h'",
    )
    told = await scrape(service)
    states = told.by("state", "countermand_sessions")
    assert states == {"active": 1, "awaiting_approval": 1, "failed": 0, "compensating": 1, "halted": 1}
    ages = {state: round(seconds / 3_600, 1) for state, seconds in told.by("state", "countermand_oldest_session_age_seconds").items()}
    assert ages == {"active": 3, "awaiting_approval": 3, "failed": 0, "compensating": 2, "halted": 1}
    expiry = told.value("countermand_first_approval_expiry_seconds")
    assert expiry is not None
    assert 259_000 < expiry <= 259_200
    assert told.value("countermand_database_up") == 1
    assert told.value("countermand_build_info", version=VERSION, schema_revision=SCHEMA_REVISION) == 1
    pools = {labels["pool"] for labels, _ in told.series("countermand_database_connections")}
    assert pools == {"api", "orchestrator"}
    for pool in pools:
        assert sum(value for labels, value in told.series("countermand_database_connections") if labels["pool"] == pool) == 5


async def test_scrape_names_no_tenant_when_tenants_were_busy(night: Night) -> None:
    """Labels are classes of our own; the one thing of a tenant's is where its calls go. Nothing tells when a series was made."""
    night.endpoint.script("/private-run/2", LATER)
    await night.run("private-run")
    (await night.service.agent.fail("private-run")).raise_for_status()
    await is_handed_back(night.service.database_url, "private-run")
    told = await scrape(night.service)
    (session,) = await fetch(night.service.database_url, "SELECT org, owner, agent FROM sessions")
    for text in ("private-run", "issue_credit", "take back", f'"{session["org"]}"', session["owner"], session["agent"], "_created"):
        assert text not in told.text
    names = {family.name: set(family.labels) for family in FAMILIES}
    for name, labels in told.samples:
        base = re.sub(r"_(bucket|sum|count)$", "", name) if name not in names else name
        assert {label for label, _ in labels} - {"le"} == names[base], name


async def test_scrape_is_answered_without_the_backlog_when_the_database_is_away() -> None:
    """The counters of a process are never more wanted than then."""
    app = create_app(Settings(_env_file=None), "postgresql://nobody@127.0.0.1:1/nothing")
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://countermand.test") as client,
    ):
        response = await client.get("/metrics")
    told = parsed(response.text)
    assert (response.status_code, response.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert told.value("countermand_database_up") == 0
    assert told.value("countermand_build_info", version=VERSION, schema_revision=SCHEMA_REVISION) == 1
    for name in ("sessions", "oldest_session_age_seconds", "calls_due", "calls_in_flight", "first_approval_expiry_seconds"):
        assert told.series(f"countermand_{name}") == []


async def test_lost_lease_and_interrupted_attempt_are_counted_when_a_call_was_taken_over(
    services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """Who lost the call says so once, and who found its attempt open says so once; meanwhile the call is in flight, and no longer due."""
    slow, newer = asyncio.Event(), asyncio.Event()
    endpoint.script("/top", Reply(gate=slow), Reply(gate=newer))
    api = await services(has_orchestrator=False, attempt_timeout_ms=60_000)
    await do_step(api.agent, "s", 1, endpoint.url("/top"))
    async with open_service(database_url, has_api=False, max_calls=1) as first:  # so that it cannot take its own call over
        (await api.agent.fail("s")).raise_for_status()
        await endpoint.wait_for_requests(1)
        await take_lease_away(database_url, "s")
        destination = urlsplit(endpoint.url()).netloc
        assert (await scrape(api)).value("countermand_calls_due", destination=destination) in {0, 1}  # the second may have been quick
        second = await services(has_api=False)
        await endpoint.wait_for_requests(2)
        told = await scrape(second)
        assert told.value("countermand_calls_in_flight", destination=destination) == 1
        assert told.value("countermand_calls_due", destination=destination) == 0
        assert told.value("countermand_attempts_total", call="undo", result="interrupted") == 1
        assert told.value("countermand_leases_lost_total") == 0
        slow.set()
        await endpoint.wait_for_answers(1)
    told = await scrape(first)
    assert told.value("countermand_leases_lost_total") == 1
    assert told.value("countermand_attempts_total", call="undo", result="interrupted") is None
    newer.set()
    assert (await rest(api.agent, "s"))["state"] == "compensated"


ALERTS = yaml.safe_load((REPOSITORY / "docs/reference/telemetry/alerts.yml").read_text(encoding="utf-8"))
# As much of PromQL as the first alert is written in; anything else is not understood, and the test says so.
EXPRESSION = re.compile(r'max\((?P<name>[a-z_]+)\{(?P<label>[a-z_]+)="(?P<value>[a-z_]+)"\}\) > (?P<limit>[0-9]+)')


def fires(alert: str, told: Scrape) -> bool:
    """Evaluate an alert's expression on one scrape: the greatest of the series that the selector picks, if any, against the limit."""
    (rule,) = (rule for group in ALERTS["groups"] for rule in group["rules"] if rule["alert"] == alert)
    found = EXPRESSION.fullmatch(rule["expr"])
    assert found is not None, rule["expr"]
    assert "for" not in rule, "one scrape is enough"
    picked = [value for labels, value in told.series(found["name"]) if labels[found["label"]] == found["value"]]
    return bool(picked) and max(picked) > float(found["limit"])


async def test_halted_alert_fires_when_a_session_is_halted(services: StartService, endpoint: FakeEndpoint) -> None:
    """The one alert that must wake somebody, from the service to the file that is loaded into Prometheus; any replica tells it."""
    night = Night(service=await services(), endpoint=endpoint)
    await night.run("good")
    assert not fires("CountermandSessionHalted", await scrape(night.service))
    await night.refused("s")
    replica = await services(has_orchestrator=False)
    assert fires("CountermandSessionHalted", await scrape(replica))
