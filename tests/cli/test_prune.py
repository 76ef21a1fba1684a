"""What `prune` deletes and what stays, beside a service that runs, and interrupted anywhere. Must not test the database's own rule."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app.cli import pruning
from app.cli.manners import SetupError
from app.cli.pruning import Bound, Pruned
from app.domain.model import OrgName, Role
from app.settings import Settings
from app.storage import retention
from tests.conftest import StartService, execute
from tests.factories import Service, do_step, owner_connection, park
from tests.fakes import FakeEndpoint
from tests.golden import REPOSITORY
from tests.halts import Night
from tests.operators import order
from tests.probes import PATIENCE_SECONDS, fetch

TTL_SECONDS = 3_600
TABLES = ("sessions", "effect_log", "approvals", "undo_stack", "outgoing_calls", "remembered_answers", "journal")
AGE_SQL = """
UPDATE sessions SET
  created_at = created_at - make_interval(days => $2), updated_at = updated_at - make_interval(days => $2),
  active_at = active_at - make_interval(days => $2)
WHERE session_id = ANY ($1)
"""
AGE_ANSWERS_SQL = "UPDATE remembered_answers SET answered_at = answered_at - make_interval(days => $2) WHERE session_id = ANY ($1)"
WAITING_SQL = """
SELECT count(*) AS waiting FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'countermand prune' AND wait_event_type = 'Lock'
"""


async def age(database_url: str, days: int, *names: str) -> None:
    """Let sessions, and all that was answered about them, be so many days older."""
    for sql in (AGE_SQL, AGE_ANSWERS_SQL):
        await fetch(database_url, sql, names, days)


async def rows_of(database_url: str, name: str, org: str = "acme") -> dict[str, int]:
    """Count the rows of a session, table by table."""
    async with owner_connection(database_url) as connection:
        return {
            table: await connection.fetchval(f"SELECT count(*) FROM {table} WHERE org = $1 AND session_id = $2", org, name)
            for table in TABLES
        }


async def names_left(database_url: str) -> set[str]:
    """Return which sessions there are."""
    return {row["session_id"] for row in await fetch(database_url, "SELECT session_id FROM sessions")}


async def prune(database_url: str, days: int = 30, org: str | None = None, *, dry_run: bool = False) -> Pruned:
    """Prune as the command does."""
    bound = Bound(days=days, org=None if org is None else OrgName(org), is_dry_run=dry_run)
    return await asyncio.to_thread(pruning.prune, database_url, bound, TTL_SECONDS)


async def complete(service: Service, endpoint: FakeEndpoint, *names: str) -> None:
    """Run sessions that end well, one undoable step each."""
    for name in names:
        await do_step(service.agent, name, 1, endpoint.url("/undo"))
        (await service.agent.complete(name, headers={"Idempotency-Key": f"{name}-end"})).raise_for_status()


async def every_ending(service: Service, endpoint: FakeEndpoint) -> set[str]:
    """Bring a session to each state, and return the names of those that may go one day."""
    night = Night(service=service, endpoint=endpoint)
    await complete(service, endpoint, "completed")
    await night.run("compensated", 2)
    await night.failed("compensated")
    await night.refused("halted", 1)
    await night.refused("resolved", 1)
    (await order(service.operator, "resolved", "resolve")).raise_for_status()
    skipped = await night.refused("unclean", 1)
    (await order(service.operator, "unclean", f"undo/{skipped['undo_stack'][0]['undo_id']}/skip")).raise_for_status()
    (await order(service.operator, "unclean", "unwind")).raise_for_status()
    assert (await night.failed("unclean"))["state"] == "compensated"
    await night.run("active", 1)
    await park(service.agent, "awaiting", 1, "{}")
    return {"completed", "compensated"}


async def test_only_sessions_that_ended_well_go_when_they_are_old(services: StartService, endpoint: FakeEndpoint) -> None:
    """All rows of these, in every table; what a person had, or may have, a hand in stays, and is counted; so does what is younger."""
    service = await services(sweep_seconds=3_600)  # those that are active are silent too long in the end
    url = service.database_url
    goes = await every_ending(service, endpoint)
    names = await names_left(url)
    await complete(service, endpoint, "young")
    await age(url, 31, *names)
    await age(url, 29, "young")
    before = {name: await rows_of(url, name) for name in names | {"young"}}
    assert {table for name in goes for table, count in before[name].items() if count} == set(TABLES) - {"approvals"}

    tried = await prune(url, dry_run=True)
    assert {name: await rows_of(url, name) for name in before} == before
    pruned = await prune(url)
    assert {name for name in before if any((await rows_of(url, name)).values())} == set(before) - goes
    assert {name: await rows_of(url, name) for name in set(before) - goes} == {name: before[name] for name in set(before) - goes}
    assert json.loads(pruned.as_json()) == {
        "sessions": 2, "kept": 2, "orgs": {"acme": {"sessions": 2, "kept": 2}}, "older_than_days": 30, "dry_run": False,
    }  # fmt: skip
    assert json.loads(tried.as_json()) == {**json.loads(pruned.as_json()), "dry_run": True}
    assert pruned.as_text().splitlines() == [
        "acme: 2 deleted, 2 kept (resolved, or not clean)",
        "2 sessions that ended more than 30 days ago deleted, 2 kept",
    ]
    again = await prune(url)
    assert (sum(again.went.values()), sum(again.kept.values())) == (0, 2)


async def test_session_with_an_approval_goes_wholly_when_it_is_old(service: Service, endpoint: FakeEndpoint) -> None:
    """Questions and decisions go along; a pivot does not keep a run that was completed."""
    await Night(service=service, endpoint=endpoint).released("wire", 1)
    (await service.agent.commit("wire", 1, {"sent": True})).raise_for_status()
    (await service.agent.complete("wire")).raise_for_status()
    await age(service.database_url, 31, "wire")
    assert (await rows_of(service.database_url, "wire"))["approvals"] == 1
    await prune(service.database_url)
    assert not any((await rows_of(service.database_url, "wire")).values())


async def test_session_stays_when_it_was_answered_about_lately(service: Service, endpoint: FakeEndpoint) -> None:
    """An Idempotency-Key is kept for its time, though the session ended long before it was used."""
    url = service.database_url
    await complete(service, endpoint, "asked")
    await age(url, 31, "asked")
    (await service.agent.complete("asked", headers={"Idempotency-Key": "again"})).raise_for_status()
    await prune(url)
    assert await names_left(url) == {"asked"}
    await fetch(url, AGE_ANSWERS_SQL, ["asked"], 31)
    await prune(url)
    assert await names_left(url) == set()


async def test_session_starts_clean_when_its_id_is_used_again(service: Service, endpoint: FakeEndpoint) -> None:
    """A chain of its own from zeros, no step and no remembered answer of the one before."""
    await complete(service, endpoint, "again")
    first = await service.operator.journal("again")
    await age(service.database_url, 31, "again")
    await prune(service.database_url)
    assert (await service.agent.get("/sessions/again")).status_code == 404
    await complete(service, endpoint, "again")
    second = await service.operator.journal("again")
    assert [(entry["seq"], entry["kind"]) for entry in second] == [(entry["seq"], entry["kind"]) for entry in first]
    assert second[0]["prev_hash"] == "0" * 64
    assert second[-1]["hash"] != first[-1]["hash"]
    verified = (await service.operator.get("/sessions/again/journal/verify")).json()
    assert (verified["valid"], verified["entry_count"]) == (True, len(second))
    effect = await service.agent.effect("again", 1)
    assert (effect["state"], effect["attempt"]) == ("committed", 1)


async def test_other_orgs_stay_when_one_is_named(services: StartService, endpoint: FakeEndpoint) -> None:
    """The same ids in another org are other sessions."""
    service = await services()
    other = await service.client(Role.AGENT, "agent-1", "beta")
    await complete(service, endpoint, "run")
    (await other.put("/sessions/run")).raise_for_status()
    (await other.complete("run")).raise_for_status()
    await age(service.database_url, 31, "run")
    before = await rows_of(service.database_url, "run", "beta")
    pruned = await prune(service.database_url, org="acme")
    assert pruned.went == {"acme": 1}
    assert not any((await rows_of(service.database_url, "run")).values())
    assert await rows_of(service.database_url, "run", "beta") == before
    pruned = await prune(service.database_url)
    assert pruned.went == {"acme": 0, "beta": 1}


async def test_all_go_when_they_are_more_than_a_batch(
    service: Service, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Batch after batch until none is left; one that is longer than a batch may be goes alone."""
    names = [f"s{number}" for number in range(5)]
    await complete(service, endpoint, *names)
    await age(service.database_url, 31, *names)
    await fetch(service.database_url, "UPDATE sessions SET last_step = 1000 WHERE session_id IN ('s1', 's4')")
    monkeypatch.setattr(retention, "MAX_SESSIONS", 3)
    monkeypatch.setattr(retention, "MAX_STEPS", 10)
    assert (await prune(service.database_url)).went == {"acme": 5}
    assert await names_left(service.database_url) == set()


@asynccontextmanager
async def held(database_url: str, name: str) -> AsyncIterator[None]:
    """Hold a session's lock, as somebody who works on it does."""
    async with owner_connection(database_url) as connection, connection.transaction():
        await connection.execute("SELECT FROM sessions WHERE session_id = $1 FOR NO KEY UPDATE", name)
        yield


async def test_nobody_waits_when_a_session_is_being_worked_on(service: Service, endpoint: FakeEndpoint) -> None:
    """What somebody holds is left for the next time; everything else goes, and the service goes on meanwhile."""
    await complete(service, endpoint, "held", "free")
    await age(service.database_url, 31, "held", "free")
    async with held(service.database_url, "held"):
        assert (await prune(service.database_url)).went == {"acme": 1}
        await complete(service, endpoint, "meanwhile")
    assert await names_left(service.database_url) == {"held", "meanwhile"}
    assert (await prune(service.database_url)).went == {"acme": 1}


async def test_service_opens_the_session_anew_when_it_is_deleted_under_its_hands(service: Service, endpoint: FakeEndpoint) -> None:
    """An intercept that meets a session while it goes waits for that, and begins the next one under the id."""
    url = service.database_url
    await complete(service, endpoint, "run")
    await age(url, 31, "run")
    async with owner_connection(url) as connection, connection.transaction():
        await connection.execute("LOCK TABLE journal IN SHARE MODE")  # reads go on; whoever deletes or inserts waits
        pruning_it = asyncio.create_task(prune(url))
        await until_waiting(url)
        asking = asyncio.create_task(service.agent.intercept("run", step_index=1, reversibility="read_only"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(await fetch(url, "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")) < 2:
                pass  # every look is a round trip
    assert (await pruning_it).went == {"acme": 1}
    assert (await asking).status_code == 201
    assert await service.operator.kinds("run") == ["OPENED", "INTENT"]


async def until_waiting(database_url: str) -> None:
    """Return once a prune, which may have to start first, waits for a lock."""
    async with asyncio.timeout(2 * PATIENCE_SECONDS):
        while (await fetch(database_url, WAITING_SQL))[0]["waiting"] == 0:
            pass  # every look is a round trip


def command(database_url: str, *words: str, **settings: str) -> tuple[list[str], dict[str, Any]]:
    """Return the command line of a prune and what to run it with."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COUNTERMAND_")}
    environment |= {f"COUNTERMAND_{name}": value for name, value in {"DATABASE_URL": database_url, **settings}.items()}
    return [sys.executable, "-m", "app", "prune", *words], {"cwd": REPOSITORY, "env": environment}


# Whatever it waits for when it is killed: to look, to have deleted the session, to have deleted all of it.
@pytest.mark.parametrize("table", ["remembered_answers", "outgoing_calls", "journal"])
async def test_sessions_are_whole_when_the_prune_is_killed(service: Service, endpoint: FakeEndpoint, table: str) -> None:
    """Killed between two deletions it leaves every row, and the next one takes them all."""
    url = service.database_url
    await Night(service=service, endpoint=endpoint).run("undone", 2)
    await Night(service=service, endpoint=endpoint).failed("undone")
    await complete(service, endpoint, "run")
    await age(url, 31, "run", "undone")
    before = {name: await rows_of(url, name) for name in ("run", "undone")}
    words, options = command(url, "--older-than-days", "30")
    async with owner_connection(url) as connection, connection.transaction():
        await connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        process = await asyncio.create_subprocess_exec(*words, **options, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        await until_waiting(url)
        process.kill()
        await process.wait()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await fetch(url, "SELECT FROM pg_stat_activity WHERE application_name = 'countermand prune'"):
            pass  # the server finds out when it next writes to it
    assert {name: await rows_of(url, name) for name in before} == before
    assert (await prune(url)).went == {"acme": 2}
    assert [sum((await rows_of(url, name)).values()) for name in before] == [0, 0]


async def test_command_prints_counts_as_json_and_takes_its_bound_from_the_setting(service: Service, endpoint: FakeEndpoint) -> None:
    """What a scheduler runs: one line of JSON, exit code 0."""
    await complete(service, endpoint, "run")
    await age(service.database_url, 31, "run")
    words, options = command(service.database_url, "--output", "json", RETENTION_DAYS="30")
    process = await asyncio.create_subprocess_exec(*words, **options, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    printed, complaint = await process.communicate()
    assert (process.returncode, complaint) == (0, b"")
    assert json.loads(printed)["sessions"] == 1


def settings(**given: Any) -> Settings:
    """Return settings that come from nowhere else."""
    return Settings(_env_file=None, **given)


@pytest.mark.parametrize(
    ("given", "days", "org", "said"),
    [
        ({}, None, None, "--older-than-days, or COUNTERMAND_RETENTION_DAYS"),
        ({}, 0, None, "24 hours"),
        ({}, -1, None, "24 hours"),
        ({}, 10**9, None, "expected 1 to"),
        ({}, 30, "Not An Org", "is no org name"),
    ],
)
def test_nothing_is_guessed_when_the_bound_is_missing_or_cannot_be(
    given: dict[str, Any], days: int | None, org: str | None, said: str
) -> None:  # fmt: skip
    """Deleting is not what a default decides."""
    with pytest.raises(SetupError, match=said):
        pruning.bound_of(settings(**given), days=days, org=org, is_dry_run=False)


def test_option_goes_before_the_setting_when_both_are_given() -> None:
    """The setting is the deployment's default."""
    assert pruning.bound_of(settings(retention_days=90), days=None, org=None, is_dry_run=False).days == 90
    assert pruning.bound_of(settings(retention_days=90), days=30, org=None, is_dry_run=False).days == 30


async def test_bound_is_refused_when_a_question_may_be_open_for_longer(service: Service, endpoint: FakeEndpoint) -> None:
    """By the deployment's rule, or by a tool's of any org that is concerned; nothing goes then."""
    url = service.database_url
    await complete(service, endpoint, "run")
    await age(url, 31, "run")
    bound = Bound(days=2, org=None, is_dry_run=False)
    with pytest.raises(SetupError, match="COUNTERMAND_APPROVAL_TTL_SECONDS"):
        await asyncio.to_thread(pruning.prune, url, bound, 2 * 86_400 + 1)
    approval = {"required": True, "ttl_seconds": 2 * 86_400 + 1}
    (await service.admin.register("wire", reversibility="irreversible", approval=approval)).raise_for_status()
    with pytest.raises(SetupError, match="tool wire of org acme"):
        await prune(url, 2)
    with pytest.raises(SetupError, match="no org 'beta'"):
        await prune(url, 30, "beta")
    assert await names_left(url) == {"run"}
    (await service.admin.request("DELETE", "/v1/tools/wire")).raise_for_status()
    assert (await prune(url, 2)).went == {"acme": 1}


async def test_login_user_is_told_what_it_lacks_when_it_may_not_prune(database_url: str, cluster_url: str) -> None:
    """A deployment may keep the right to delete from the user that serves."""
    name = f"server_{os.getpid()}"
    await execute(cluster_url, f"CREATE ROLE {name} LOGIN NOINHERIT; GRANT countermand_runtime, countermand_dispatcher TO {name}")
    try:
        with pytest.raises(SetupError, match="GRANT countermand_pruner"):
            await prune(database_url.replace("postgres@", f"{name}@", 1))
    finally:
        await execute(cluster_url, f"DROP ROLE {name}")


def test_command_is_refused_when_no_database_is_named(tmp_path: Path) -> None:
    """On a new database of its own it would say that there is nothing to delete."""
    words, options = command("")
    environment = {name: value for name, value in options["env"].items() if name != "COUNTERMAND_DATABASE_URL"}
    more = {**options, "env": environment | {"PYTHONPATH": str(REPOSITORY)}, "cwd": tmp_path}
    done = subprocess.run([*words, "--older-than-days", "90"], **more, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("countermand: COUNTERMAND_DATABASE_URL: name the service's database")
    assert list(tmp_path.iterdir()) == []


def test_command_is_refused_in_one_line_when_no_bound_is_given(tmp_path: Path) -> None:
    """Before the database is looked for."""
    words, options = command("postgresql://nobody@127.0.0.1:1/nothing")
    done = subprocess.run(words, **options, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("countermand: say how old")
