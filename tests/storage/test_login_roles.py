"""The users that deploy/roles.sql makes: one migrates, the other serves and owns nothing. Must not use the suite's own cluster.

Roles belong to a whole cluster, and the suite's has those of the first migration already.
"""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from app.cli.embedded_postgres import embedded_postgres, find_binaries
from app.cli.manners import SetupError
from app.cli.migrating import migrate
from app.cli.pruning import Bound, prune
from tests.factories import do_step, open_service, owner_connection
from tests.fakes import FakeEndpoint
from tests.golden import REPOSITORY
from tests.probes import fetch, rest

ROLES_SQL = REPOSITORY / "deploy/roles.sql"
MAKE_SECRETS = REPOSITORY / "deploy/make-secrets"
OWNER, SERVICE = USERS = ("countermand_owner", "countermand_service")
LOGINS_SQL = "SELECT rolname, rolsuper, rolcreaterole, rolcreatedb, rolbypassrls, rolinherit FROM pg_roles WHERE rolname = ANY($1)"
AGE_SQL = """
UPDATE sessions SET created_at = created_at - interval '31 days', active_at = active_at - interval '31 days' WHERE session_id = 'old'
"""
OWNED_SQL = """
SELECT objid FROM pg_shdepend
WHERE deptype = 'o' AND refclassid = 'pg_authid'::regclass AND refobjid = $1::regrole
"""

pytestmark = pytest.mark.database


def as_user(superuser_url: str, user: str) -> str:
    """Return the URL of the service's database for another user."""
    parts = urlsplit(superuser_url)
    return urlunsplit(parts._replace(netloc=f"{user}@", path="/countermand"))


@pytest.fixture(scope="module")
def superuser_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run an empty cluster and make the users there as docker-compose.yml does, from secrets made as its first line says."""
    named = os.environ.get("COUNTERMAND_TEST_POSTGRES_BIN_DIR")
    binaries = find_binaries(Path(named) if named else None)
    folder = tmp_path_factory.mktemp("login_roles")
    subprocess.run([MAKE_SECRETS, folder / "secrets"], check=True, capture_output=True)
    files = {f"{role}_DATABASE_URL_FILE": str(folder / "secrets" / f"{role.lower()}_database_url") for role in ("OWNER", "SERVICE")}
    with embedded_postgres(folder / "data", bin_dir=binaries) as url:
        psql: list[str | Path] = [binaries / "psql", "--no-psqlrc", "--no-password", "--dbname", url, "--file", ROLES_SQL]
        made = subprocess.run(psql, check=False, capture_output=True, text=True, env={"PATH": os.environ["PATH"]} | files)
        assert made.returncode == 0, made.stderr
        yield url


@pytest.fixture
async def service_url(superuser_url: str) -> str:
    """Migrate as the owner and return the URL of the user who serves."""
    await asyncio.to_thread(migrate, as_user(superuser_url, OWNER))
    return as_user(superuser_url, SERVICE)


async def test_users_have_no_power_beyond_their_work_when_they_are_made(service_url: str, superuser_url: str) -> None:
    """No superuser, nobody past row-level security; the one who serves owns nothing and has nothing without becoming a role."""
    async with owner_connection(superuser_url) as connection:
        found = {
            row["rolname"]: {name for name, value in row.items() if value is True} for row in await connection.fetch(LOGINS_SQL, USERS)
        }
    async with owner_connection(as_user(superuser_url, OWNER)) as connection:
        owned = {user: len(await connection.fetch(OWNED_SQL, user)) for user in USERS}
    assert found == {OWNER: {"rolcreaterole", "rolinherit"}, SERVICE: set()}
    assert owned[SERVICE] == 0
    assert owned[OWNER] > 0, "the look would see it"
    async with owner_connection(service_url) as connection:
        for statement in ("SELECT FROM sessions", "CREATE TABLE mine ()", "CREATE TEMP TABLE mine ()", "SET ROLE countermand_owner"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(statement)


async def test_session_is_unwound_when_the_service_logs_in_as_the_user_that_owns_nothing(service_url: str) -> None:
    """All that the service does is within the two roles: keys, verbs, the journal, claiming and sending an undo."""
    async with FakeEndpoint() as endpoint, open_service(service_url) as service:
        await do_step(service.agent, "run-1", 1, endpoint.url("/undo"))
        found = await rest(service.agent, "run-1")
        (request,) = await endpoint.wait_for_requests(1)
    assert found["state"] == "compensated"
    assert request.path == "/undo"


async def test_only_the_owner_prunes_when_the_users_are_two(service_url: str, superuser_url: str) -> None:
    """Whoever takes over the service cannot delete what happened; the user that migrates can, and takes every row of a session along."""
    async with FakeEndpoint() as endpoint, open_service(service_url) as service:
        await do_step(service.agent, "old", 1, endpoint.url("/undo"))
        assert (await service.agent.complete("old")).is_success
    await fetch(as_user(superuser_url, "postgres"), AGE_SQL)
    bound = Bound(days=30, org=None, is_dry_run=False)
    with pytest.raises(SetupError, match="GRANT countermand_pruner"):
        await asyncio.to_thread(prune, service_url, bound, 1)
    pruned = await asyncio.to_thread(prune, as_user(superuser_url, OWNER), bound, 1)
    assert sum(pruned.went.values()) == 1
    left = "SELECT FROM sessions WHERE session_id = 'old' UNION ALL SELECT FROM journal WHERE session_id = 'old'"
    assert await fetch(as_user(superuser_url, "postgres"), left) == []


async def test_passwords_are_those_of_the_urls_when_users_are_made(superuser_url: str) -> None:
    """The users can log in by what the secrets say: a password that was not found would be none, and no login."""
    async with owner_connection(superuser_url) as connection:
        kept = await connection.fetch("SELECT rolpassword FROM pg_authid WHERE rolname = ANY($1)", USERS)
    assert [row["rolpassword"][:14] for row in kept] == ["SCRAM-SHA-256$"] * len(USERS)
