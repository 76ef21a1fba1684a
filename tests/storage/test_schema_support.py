"""A newer schema serves the code that it says it serves: it takes nothing away, and knows its statements. Must not test the newest code."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from app.cli.manners import SetupError
from app.cli.migrating import MIGRATIONS, downgrade, migrate
from app.main import SCHEMA_REVISION
from app.storage.database import open_database, read_oldest_revision
from tests.conftest import execute, with_database
from tests.factories import owner_connection
from tests.golden import REPOSITORY, kept_text
from tests.storage.dumping import dump_schema
from tests.storage.test_statements import as_its_role, check, statements

FOLDER = "migrations/statements"
FIRST_SUPPORT = "0006"  # before it a schema served the code that it was made for, and no other
STATEMENT = re.compile(r"^-- (\w+_SQL)\n(.*?);\n", re.MULTILINE | re.DOTALL)


def written(found: dict[str, str]) -> str:
    """Return a golden file's text."""
    head = "-- What the code of one revision asks the database: `make schema` rewrites the newest file, the older ones stay as they are.\n"
    return head + "".join(f"\n-- {name}\n{text.strip()};\n" for name, text in sorted(found.items()))


def revisions() -> list[str]:
    """Return every revision, oldest first."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    return sorted(script.revision for script in ScriptDirectory.from_config(config).walk_revisions())


@pytest.fixture
def empty_database_url(cluster_url: str, template: str) -> Iterator[str]:
    """Make a database that no migration has seen."""
    assert template, "the roles belong to the cluster"
    name = f"empty_{uuid4().hex}"
    asyncio.run(execute(cluster_url, f'CREATE DATABASE "{name}"'))
    yield with_database(cluster_url, name)
    asyncio.run(execute(cluster_url, f'DROP DATABASE "{name}" WITH (FORCE)'))


def read(url: str, sql: str) -> list[tuple[Any, ...]]:
    """Return the rows of one statement."""

    async def fetch() -> list[tuple[Any, ...]]:
        async with owner_connection(url) as connection:
            return [tuple(row) for row in await connection.fetch(sql)]

    return asyncio.run(fetch())


@pytest.mark.golden
def test_statements_are_the_golden_file_of_their_revision() -> None:
    """What this revision's code asks is kept, for the schemas that come after it."""
    current = written(statements())
    assert kept_text(f"{FOLDER}/{SCHEMA_REVISION}.sql", current) == current, "run `make schema` and review the difference"
    assert dict(STATEMENT.findall(current)) == {name: text.strip() for name, text in statements().items()}


async def test_statements_of_older_code_run_when_the_schema_says_that_it_serves_it(database_url: str) -> None:
    """While replicas are replaced the older ones go on: each statement of theirs is one that the newest schema knows and allows."""
    async with open_database(database_url, size=2, application_name="tests") as database:
        oldest = await read_oldest_revision(database)
        assert oldest is not None
        served = [revision for revision in revisions() if oldest <= revision < SCHEMA_REVISION]
        for revision in served:
            kept = STATEMENT.findall((REPOSITORY / FOLDER / f"{revision}.sql").read_text(encoding="utf-8"))
            assert len(kept) >= 15, revision
            for name, text in kept:
                async with as_its_role(database, name) as connection:
                    await check(connection, name, text)


COLUMNS_SQL = """
SELECT c.relname::text, a.attname::text, format_type(a.atttypid, a.atttypmod)
FROM pg_class AS c
JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r'
"""
DEMANDED_SQL = """
SELECT c.relname::text, a.attname::text
FROM pg_class AS c
JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND a.attnotnull AND NOT a.atthasdef
"""
# By what it says, since the names of unnamed rules are counted.
RULES_SQL = """
SELECT conrelid::regclass::text, pg_get_constraintdef(oid) FROM pg_constraint
WHERE connamespace = 'public'::regnamespace AND contype IN ('c', 'f', 'u', 'x') AND conrelid <> 0
UNION ALL
SELECT indrelid::regclass::text, pg_get_indexdef(indexrelid) FROM pg_index
WHERE indisunique AND indrelid IN (SELECT oid FROM pg_class WHERE relnamespace = 'public'::regnamespace)
"""
WORDS_SQL = """
SELECT t.typname::text, e.enumlabel::text FROM pg_enum AS e JOIN pg_type AS t ON t.oid = e.enumtypid
"""
# A rule that lets through whatever the one that it replaces did: rule -> why older code lives with it.
WIDER = {
    ("outgoing_calls", "CHECK ((interrupted >= 0))"): "the older one bounded it from above as well",
    ("sessions", "CHECK (((length(session_id) <= 200) AND (session_id ~ '^[A-Za-z0-9._:-]+$'::text)))"): "the same names, checked faster",
}


def test_schema_is_only_added_to_when_it_still_serves_older_code(empty_database_url: str) -> None:
    """No column gone or of another type, none demanded, no word and no rule that older code does not know: else it is a contraction."""
    url = empty_database_url
    migrate(url)
    ((oldest,),) = read(url, "SELECT oldest_revision FROM schema_support")
    columns, demanded, rules, words = (set(read(url, sql)) for sql in (COLUMNS_SQL, DEMANDED_SQL, RULES_SQL, WORDS_SQL))
    downgrade(url, "base")  # and up again: a way back that forgets something must not hide it
    migrate(url, oldest)
    older = set(read(url, COLUMNS_SQL))
    tables = {table for table, *_ in older}
    assert older <= columns
    assert {one for one in demanded - set(read(url, DEMANDED_SQL)) if one[0] in tables} == set()
    assert {one for one in rules - set(read(url, RULES_SQL)) - WIDER.keys() if one[0] in tables} == set()
    assert words == set(read(url, WORDS_SQL))


def test_support_is_said_anew_when_each_migration_runs(empty_database_url: str) -> None:
    """Whoever writes a migration says which code it leaves behind; on the way back the older word holds again."""
    said: dict[str, object] = {}
    for revision in revisions():
        migrate(empty_database_url, revision)
        if revision >= FIRST_SUPPORT:
            ((said[revision],),) = read(empty_database_url, "SELECT oldest_revision FROM schema_support")
            text = next((MIGRATIONS / "versions").glob(f"{revision}_*.py")).read_text(encoding="utf-8")
            assert text.count("schema_support") >= 2, f"{revision} has to say which code it serves, up and down"
    assert all(str(oldest) <= revision for revision, oldest in said.items())
    assert sorted(map(str, said.values())) == list(map(str, said.values()))
    for revision in sorted(said, reverse=True):
        downgrade(empty_database_url, revision)
        assert read(empty_database_url, "SELECT oldest_revision FROM schema_support") == [(said[revision],)]


def test_migrate_changes_nothing_when_the_schema_is_newer_than_the_program(empty_database_url: str) -> None:
    """An older program says what it found: it may serve such a schema, or is told that it may not; it never touches it."""
    migrate(empty_database_url)
    for oldest, is_served in ((SCHEMA_REVISION, True), ("9998", False)):
        change = f"UPDATE alembic_version SET version_num = '9999'; UPDATE schema_support SET oldest_revision = '{oldest}'"
        asyncio.run(execute(empty_database_url, change))
        schema = dump_schema(empty_database_url)
        if is_served:
            assert migrate(empty_database_url) == "9999"
        else:
            with pytest.raises(SetupError, match=f"9999.* 9998.* {SCHEMA_REVISION}"):
                migrate(empty_database_url)
        assert dump_schema(empty_database_url) == schema
        assert read(empty_database_url, "SELECT version_num FROM alembic_version") == [("9999",)]
