"""Liveness and readiness: what is said when the database, its schema or the loop is not there."""

import httpx
import pytest

from app.main import SCHEMA_REVISION, create_app
from app.settings import Settings
from tests.conftest import StartService
from tests.factories import Service, open_service
from tests.probes import fetch


async def health(service: Service, path: str) -> httpx.Response:
    """Ask without a key."""
    return await service.agent.http.get(path)


async def test_service_is_alive_and_ready_without_a_key_when_all_is_well(service: Service) -> None:
    """Probes need no key and name every part."""
    assert (await health(service, "/livez")).json() == {"status": "ok", "checks": {}}
    ready = await health(service, "/readyz")
    assert (ready.status_code, ready.json()) == (200, {"status": "ok", "checks": {"database": "ok", "orchestrator": "ok"}})


async def test_service_is_not_ready_when_the_schema_is_another(service: Service) -> None:
    """Another revision is named with what to do; the process itself is alive, and ready again afterwards."""
    await fetch(service.database_url, "UPDATE alembic_version SET version_num = '0000'")
    response = await health(service, "/readyz")
    assert (response.status_code, response.headers["content-type"]) == (503, "application/problem+json")
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["code"] == "not_ready"
    assert "countermand migrate" in response.json()["checks"]["database"]
    assert (await health(service, "/livez")).status_code == 200
    await fetch(service.database_url, "UPDATE alembic_version SET version_num = $1", SCHEMA_REVISION)
    again = await health(service, "/readyz")
    assert again.status_code == 200, again.text


# A schema newer than the code: the oldest code that it serves -> what is said of it; None: the service is ready.
NEWER: list[tuple[str, str | None]] = [
    ("0001", None),
    (SCHEMA_REVISION, None),
    ("9998", f"schema revision is 9999, which serves code of revision 9998 and newer; this is {SCHEMA_REVISION}"),
    ("9999", f"schema revision is 9999, which serves code of revision 9999 and newer; this is {SCHEMA_REVISION}"),
]


@pytest.mark.parametrize(("oldest", "said"), NEWER)
async def test_service_is_ready_when_a_newer_schema_still_serves_it(service: Service, oldest: str, said: str | None) -> None:
    """The schema goes first in an upgrade: replicas that are not replaced yet stay ready, unless it took something away from them."""
    await fetch(service.database_url, "UPDATE alembic_version SET version_num = '9999'")
    await fetch(service.database_url, "UPDATE schema_support SET oldest_revision = $1", oldest)
    response = await health(service, "/readyz")
    assert response.status_code == (200 if said is None else 503), response.text
    assert said is None or said in response.json()["checks"]["database"]


async def test_service_is_not_ready_when_a_newer_schema_does_not_say_what_it_serves(service: Service) -> None:
    """Nobody assumes what is not said."""
    await fetch(service.database_url, "UPDATE alembic_version SET version_num = '9999'")
    await fetch(service.database_url, "DROP TABLE schema_support")
    assert (await health(service, "/readyz")).status_code == 503


async def test_service_is_not_ready_when_the_loop_is_stopped(service: Service) -> None:
    """A process that stops claiming says so, so that nobody counts on it."""
    service.app.state.engine.orchestrator.stop()
    response = await health(service, "/readyz")
    assert response.status_code == 503
    assert response.json()["checks"]["database"] == "ok"
    assert response.json()["checks"]["orchestrator"] != "ok"
    assert (await health(service, "/livez")).status_code == 200


async def test_answers_are_503_when_the_database_is_away() -> None:
    """Liveness does not depend on the database; everything else says to come back."""
    app = create_app(Settings(_env_file=None), "postgresql://nobody@127.0.0.1:1/nothing")
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://countermand.test") as client,
    ):
        assert (await client.get("/livez")).status_code == 200
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["code"], ready.json()["checks"]["database"]) == (503, "not_ready", "unreachable")
        key = f"cm_{'0' * 12}_{'0' * 64}"
        refused = await client.post("/v1/sessions/s/fail", json={"error": "x"}, headers={"Authorization": f"Bearer {key}"})
        assert (refused.status_code, refused.json()["code"]) == (503, "storage_unavailable")
        assert int(refused.headers["retry-after"]) >= 1


async def test_service_recovers_when_its_connections_were_cut(services: StartService) -> None:
    """Each broken connection costs at most one refusal, never a 500, and nothing that was refused was stored."""
    service = await services()
    await service.agent.put("/sessions/s")
    cut = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'countermand%' AND datname = current_database()"
    )
    await fetch(service.database_url, cut)
    refusals = 0
    while (answer := await service.agent.intercept("s", step_index=1, reversibility="read_only")).status_code == 503:
        refusals += 1
        assert (await health(service, "/livez")).status_code == 200
    assert answer.status_code == 201
    assert refusals <= 10
    assert (await health(service, "/readyz")).status_code == 200


async def test_halves_of_the_service_have_what_they_need_when_run_apart(services: StartService, database_url: str) -> None:
    """An API without a loop is ready; a loop without an API answers probes and nothing else."""
    api = await services(has_orchestrator=False)
    assert (await health(api, "/readyz")).json()["checks"]["orchestrator"] == "ok"
    async with open_service(database_url, has_api=False) as loop:
        assert (await health(loop, "/readyz")).status_code == 200
        assert (await loop.agent.get("/sessions/s")).status_code == 404
