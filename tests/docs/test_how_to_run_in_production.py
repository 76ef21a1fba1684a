"""What the how-to says of databases, keys and restores holds. Must not deploy: tests/storage/test_login_roles.py has the logins."""

import asyncio
import os
import re
import subprocess
from pathlib import Path
from uuid import uuid4

import yaml

from app.cli.embedded_postgres import find_binaries
from app.domain.keys import read_key
from app.domain.model import Role
from app.settings import Settings
from tests.conftest import StartService, execute
from tests.docs.documents import documents, read
from tests.factories import do_step, owner_connection
from tests.fakes import FakeEndpoint
from tests.golden import REPOSITORY

DOCUMENT = read(REPOSITORY / "docs/how-to/run-in-production.md")
ALERTS = REPOSITORY / "docs/reference/telemetry/alerts.yml"

# Not the service's settings: what its commands, and the commands that it shows, take from the environment.
OF_COMMANDS = {"COUNTERMAND_URL", "COUNTERMAND_KEY", "COUNTERMAND_ADMIN_KEY_FILE", *(f"COUNTERMAND_{role.name}_KEY" for role in Role)}


def statements(word: str) -> str:
    """Return the block of SQL that begins with this word."""
    (found,) = (block.text for block in DOCUMENT.blocks if block.language == "sql" and block.text.startswith(word))
    return found


def test_variables_in_documents_are_settings_or_taken_by_commands() -> None:
    """A setting that was renamed, or never was, is not recommended anywhere."""
    settings = {f"COUNTERMAND_{name.upper()}" for name in Settings.model_fields}
    named = {(document.name, name) for document in documents() for name in re.findall(r"\bCOUNTERMAND_[A-Z_]+[A-Z]\b", document.text)}
    assert {(where, name) for where, name in named if name not in settings | OF_COMMANDS} == set()


def test_secrets_name_the_host_when_they_are_changed_as_shown(tmp_path: Path) -> None:
    """The host's name alone is changed, not the scheme, which holds the same word."""
    (shown,) = (block.text for block in DOCUMENT.blocks if block.text.startswith("deploy/make-secrets"))
    make_and_change = "\n".join(shown.splitlines()[:2]).replace(" secrets", f" {tmp_path}")
    subprocess.run(["/bin/sh", "-euc", make_and_change], cwd=REPOSITORY, check=True, capture_output=True)
    urls = {path.name: path.read_text(encoding="utf-8").strip() for path in tmp_path.glob("*_database_url")}
    assert urls.keys() == {"owner_database_url", "service_database_url"}
    for name, url in urls.items():
        login = f"countermand_{name.partition('_')[0]}"
        assert re.fullmatch(rf"postgresql://{login}:[0-9a-f]{{48}}@db\.internal:5432/countermand", url), name
    assert {path.name for path in tmp_path.iterdir()} == {*urls, "postgres_password"}


def test_alerts_that_are_named_are_there() -> None:
    """What is to be loaded first can be."""
    rules = {rule["alert"] for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]}
    named = set(re.findall(r"`(Countermand[A-Z]\w+)`", DOCUMENT.prose))
    assert named
    assert named <= rules


async def test_key_is_refused_when_it_is_revoked_as_shown(services: StartService) -> None:
    """The statement takes one key out of use, within seconds, and no other."""
    service = await services()
    leaked = read_key(service.agent.key)
    assert leaked is not None
    assert service.agent.key.startswith(f"cm_{leaked.key_id}_")
    assert (await service.agent.get("/sessions")).status_code == 200
    statement = statements("UPDATE").replace("0123456789ab", leaked.key_id)
    async with owner_connection(service.database_url) as connection:
        assert await connection.execute(statement) == "UPDATE 1"
    async with asyncio.timeout(10):
        while (await service.agent.get("/sessions")).status_code != 401:
            pass  # asked again: what was said of the key a moment ago is good for a moment
    assert (await service.operator.get("/sessions")).status_code == 200


async def test_dump_is_whole_when_the_login_for_backups_makes_it(services: StartService, tmp_path: Path) -> None:
    """Without BYPASSRLS a dump fails: whoever has the login as shown gets every org's rows."""
    service = await services()
    login = f"backup_{uuid4().hex}"
    database = service.database_url.partition("?")[0].rpartition("/")[2]
    shown = statements("CREATE ROLE").replace("countermand_backup", login).replace("DATABASE countermand ", f'DATABASE "{database}" ')
    dump = tmp_path / "dump.sql"
    named = os.environ.get("COUNTERMAND_TEST_POSTGRES_BIN_DIR")
    program = find_binaries(Path(named) if named else None) / "pg_dump"
    await execute(service.database_url, shown)
    try:
        url = re.sub(r"//[^@]*@", f"//{login}@", service.database_url)
        words: list[str | Path] = [program, "--no-password", "--dbname", url, "--file", dump]
        made = subprocess.run(words, check=False, capture_output=True, text=True)  # noqa: ASYNC221 (nothing else goes on here)
    finally:
        await execute(service.database_url, f'REVOKE CONNECT ON DATABASE "{database}" FROM {login}')
        await execute(service.database_url, f"DROP ROLE {login}")
    assert made.returncode == 0, made.stderr
    key = read_key(service.agent.key)
    assert key is not None
    assert key.key_id in dump.read_text(encoding="utf-8")


async def test_run_is_closed_without_an_undo_when_no_orchestrator_runs(services: StartService, endpoint: FakeEndpoint) -> None:
    """After a restore: fail, halt, resolve end a run that was completed long ago; nothing is sent, then or later."""
    reader = await services(has_orchestrator=False)
    await do_step(reader.agent, "run-1", 1, endpoint.url("/undo"))
    answers = [
        await reader.operator.fail("run-1", error="restored; it was completed", wait_s=1),  # an orchestrator would undo it meanwhile
        await reader.operator.post("/sessions/run-1/halt", {"reason": "restored; it was completed"}),
        await reader.operator.post("/sessions/run-1/resolve", {"reason": "restored; it was completed"}),
    ]
    assert [answer.json()["state"] for answer in answers] == ["failed", "halted", "resolved"]
    worker = await services()
    await do_step(worker.agent, "run-2", 1, endpoint.url("/undo/other"))
    await worker.agent.fail("run-2", wait_s=10)
    assert {request.path for request in endpoint.received} == {"/undo/other"}
