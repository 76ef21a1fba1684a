"""Old and new versions over one schema: code that the schema no longer serves sends nothing. Must not migrate."""

import asyncio

import structlog
from structlog.typing import EventDict

from app.main import SCHEMA_REVISION
from tests.conftest import StartService
from tests.factories import do_step, owner_connection
from tests.fakes import FakeEndpoint
from tests.faults.gates import wait_until
from tests.probes import fetch

LOOPS = 2
IDLE_SQL = "UPDATE sessions SET active_at = active_at - interval '2 days' WHERE session_id = 'silent'"


async def test_nothing_is_sent_when_the_schema_no_longer_serves_this_code(
    services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """What a newer version has written this one may misread; a replica that still runs leaves it all alone, until it is served again."""
    api = await services(has_orchestrator=False)
    for name in ("failed", "silent"):
        await do_step(api.agent, name, 1, endpoint.url(f"/{name}"))
    (await api.agent.fail("failed")).raise_for_status()
    await fetch(database_url, IDLE_SQL)
    await fetch(database_url, "UPDATE alembic_version SET version_num = '9999'")
    await fetch(database_url, "UPDATE schema_support SET oldest_revision = '9998'")
    refused = asyncio.Semaphore(0)

    def hear(_logger: object, _method: str, event: EventDict) -> EventDict:
        if event["event"] == "schema_refused":
            refused.release()
        return event

    with structlog.testing.capture_logs(processors=[hear]):
        old_api = await services(sweep_seconds=0.05, poll_seconds=0.05)
        async with asyncio.timeout(10):  # both loops have looked: for calls that are due, and for sessions that are overdue
            for _ in range(LOOPS):
                await refused.acquire()
    assert endpoint.received == []
    answer = await old_api.agent.intercept("another", step_index=1, reversibility="read_only")
    assert (answer.status_code, answer.json()["code"]) == (503, "schema_missing")
    assert {row["state"] for row in await fetch(database_url, "SELECT state::text FROM sessions")} == {"failed", "active"}
    await fetch(database_url, "UPDATE alembic_version SET version_num = $1", SCHEMA_REVISION)
    async with owner_connection(database_url) as connection:
        await wait_until(connection, "NOT EXISTS (SELECT FROM sessions WHERE state <> 'compensated')")
