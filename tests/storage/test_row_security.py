"""One org never meets another's rows, the journal only grows, and the roles may do what they must. Must not test the API's answers."""

from collections.abc import Awaitable
from typing import Any

import asyncpg
import pytest

from app.domain.model import Reversibility, Role, SessionState, StepIndex
from app.domain.tools import Definition, Tool
from app.storage import answers, circuits, pauses, tools
from app.storage.answers import KeptAnswer, RepeatableRequest
from app.storage.database import Database, StorageUnavailable, open_database
from tests.domain.world import command
from tests.factories import make_principal_key, owner_connection
from tests.storage.acts import ACME, BETA, RUN, agent_of, do_steps, fail, verbs

TABLES = (
    "orgs", "keys", "sessions", "effect_log", "approvals", "undo_stack", "outgoing_calls", "journal", "tools", "remembered_answers",
    "circuits", "pauses",
)  # fmt: skip
OF_NO_ORG = {"alembic_version", "schema_support"}
OTHER_SESSION = "run-2"
DESTINATION = "ledger.example:443"
# What a tenant may not do to the other's rows: each must be refused, or meet no row.
UPDATES = {
    "keys": "revoked_at = now()",
    "sessions": "revision = 99",
    "effect_log": "attempt = 99",
    "approvals": "release_key = 'k-99'",
    "undo_stack": "by_hand = false",
    "outgoing_calls": "epoch = 99",
    "circuits": "last_error = 'x'",
}
# What a tenant takes away of its own, and never of the other's.
HOLDS = ("circuits", "pauses")
MISTAKES = (asyncpg.UndefinedObjectError, asyncpg.CheckViolationError)


async def fill(database: Database, database_url: str) -> None:
    """Give both orgs rows in every table, under the same session ids."""
    for org in (ACME, BETA):
        await make_principal_key(database_url, Role.AGENT, "robot-1", org)
        await do_steps(database, RUN, 1, org)
        await fail(database, RUN, org)
        parked = command(step_index=StepIndex(1), reversibility=Reversibility.IRREVERSIBLE, compensation=None)
        await verbs(database).intercept(agent_of(org), OTHER_SESSION, parked)  # type: ignore[arg-type]  # text is as good as its NewType
        async with database.transaction(org) as tx:
            definition = Definition(reversibility=Reversibility.READ_ONLY)
            await tools.add(tx, Tool(name="get_order", version=1, definition=definition), "root-1", is_deleted=False)
            request = RepeatableRequest(subject="robot-1", request="POST /v1/x", key="k-1", sha256=bytes(32))
            await answers.keep_many(tx, [KeptAnswer(session_id=RUN, request=request, status=200, body=b"{}")])
            await circuits.open_circuit(tx, DESTINATION, 1.0, "http 503")
            await pauses.pause(tx, DESTINATION, "operator:o", "moving")


async def rows_of(database_url: str, org: str) -> dict[str, list[str]]:
    """Return every row of an org, past row-level security."""
    async with owner_connection(database_url) as connection:
        return {table: sorted(map(repr, await connection.fetch(f"SELECT * FROM {table} WHERE org = $1", org))) for table in TABLES}


async def test_tables_are_under_forced_row_security_when_they_hold_rows_of_orgs(database_url: str) -> None:
    """A new table without a policy is found here."""
    async with owner_connection(database_url) as connection:
        rows = await connection.fetch(
            "SELECT relname, relrowsecurity AND relforcerowsecurity AS is_forced FROM pg_class "
            "WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')"
        )
    assert {row["relname"] for row in rows} == {*TABLES, *OF_NO_ORG}
    assert {row["relname"] for row in rows if not row["is_forced"]} == OF_NO_ORG


async def test_org_sees_and_changes_only_its_own_rows_when_it_names_anothers(database: Database, database_url: str) -> None:
    """Even a statement that forgets the org, or names the wrong one, meets no foreign row; writing one is an error."""
    await fill(database, database_url)
    before = await rows_of(database_url, BETA)
    assert all(before.values()), "every table has a row to be protected"
    for table in TABLES:
        async with database.transaction(ACME) as tx:
            assert {row["org"] for row in await tx.connection.fetch(f"SELECT org FROM {table}")} == {ACME}
            assert await tx.connection.fetch(f"SELECT org FROM {table} WHERE org = $1", BETA) == []
        if table in UPDATES:
            async with database.transaction(ACME) as tx:
                assert await tx.connection.execute(f"UPDATE {table} SET {UPDATES[table]} WHERE org = 'beta'") == "UPDATE 0"
        if table in HOLDS:
            async with database.transaction(ACME) as tx:
                assert await tx.connection.execute(f"DELETE FROM {table} WHERE org = 'beta'") == "DELETE 0"
        copied = f"SELECT (r).* FROM (SELECT jsonb_populate_record(t, '{FOREIGN}') AS r FROM {table} AS t) AS s"
        await check_refused(run_as(database, f"INSERT INTO {table} {copied}"), "row-level security")
    for table in ("sessions", "effect_log", "undo_stack", "outgoing_calls"):
        await check_refused(run_as(database, f"UPDATE {table} SET org = 'beta'"), "row-level security")
    assert await rows_of(database_url, BETA) == before


FOREIGN = '{"org": "beta"}'


async def run_as(database: Database, statement: str, org: Any = ACME) -> None:
    """Run one statement in a transaction of an org."""
    async with database.transaction(org) as tx:
        await tx.connection.execute(statement)


async def check_refused(attempt: Awaitable[object], reason: str) -> None:
    """Assert that the database refuses an attempt for want of a privilege."""
    with pytest.raises((asyncpg.InsufficientPrivilegeError, StorageUnavailable)) as refused:
        await attempt
    # A transaction may say it in its own words; the database's own are the cause then.
    error = refused.value.__cause__ if isinstance(refused.value, StorageUnavailable) else refused.value
    assert isinstance(error, asyncpg.InsufficientPrivilegeError)
    assert reason in str(error)


async def run_outside(database: Database, statement: str) -> None:
    """Run one statement in a transaction without an org."""
    async with database.outside_orgs() as connection:
        await connection.execute(statement)


@pytest.mark.parametrize("table", TABLES)
async def test_statement_fails_when_no_org_was_named(database: Database, database_url: str, table: str) -> None:
    """Forgetting the org is an error, on a fresh connection as on one that served an org before: never an empty answer."""
    await fill(database, database_url)
    await database.close()
    async with open_database(database_url, size=1, application_name="tests") as fresh:
        with pytest.raises(MISTAKES):
            await run_outside(fresh, f"SELECT count(*) FROM {table}")
        await run_as(fresh, f"SELECT count(*) FROM {table}")
        with pytest.raises(MISTAKES):
            await run_outside(fresh, f"SELECT count(*) FROM {table}")


@pytest.mark.parametrize("org", ["", "Acme", "a'; DROP TABLE orgs; --", "-a", "a-", "a" * 64, "a\n", "\u0430cme"])
async def test_transaction_refuses_when_the_org_has_no_orgs_name(database: Database, org: Any) -> None:
    """The name goes into a statement's text, so it is checked before."""
    with pytest.raises(ValueError, match="not an org name"):
        await run_as(database, "SELECT 1", org)


DISPATCHER_COLUMNS = {
    *(("keys", column, "SELECT") for column in ("org", "key_id", "secret_sha256", "role", "subject", "created_at", "revoked_at")),
    *(
        ("outgoing_calls", column, "SELECT")
        for column in (
            "org",
            "session_id",
            "call_id",
            "kind",
            "destination",
            "attempts",
            "due_at",
            "deadline_at",
            "leased_by",
            "leased_until",
            "epoch",
        )
    ),
    *(("circuits", column, "SELECT") for column in ("org", "destination", "probe_at", "probes", "probe_session_id", "probe_call_id")),
    *(("circuits", column, "UPDATE") for column in ("probe_at", "probes", "probe_session_id", "probe_call_id")),
    *(("pauses", column, "SELECT") for column in ("org", "destination")),
    *(("pauses", column, "INSERT") for column in ("org", "destination", "paused_at", "paused_by", "reason")),
    *(("approvals", column, "SELECT") for column in ("org", "session_id", "state", "expires_at")),
    *(
        ("sessions", column, "SELECT")
        for column in (
            "org",
            "session_id",
            "state",
            "idle_seconds",
            "active_at",
            "deadline_at",
            "created_at",
            "failed_at",
            "halted_at",
        )
    ),
    *(("outgoing_calls", column, "UPDATE") for column in ("leased_by", "leased_until", "epoch")),
}
RUNTIME_TABLES = {
    "alembic_version": {"SELECT"},
    "schema_support": {"SELECT"},
    "orgs": {"SELECT", "INSERT"},
    "keys": {"SELECT", "INSERT"},
    "sessions": {"SELECT", "INSERT", "UPDATE"},
    "effect_log": {"SELECT", "INSERT", "UPDATE"},
    "approvals": {"SELECT", "INSERT"},
    "undo_stack": {"SELECT", "INSERT", "UPDATE"},
    "outgoing_calls": {"SELECT", "INSERT", "UPDATE"},
    "journal": {"SELECT", "INSERT"},
    "tools": {"SELECT", "INSERT"},
    "remembered_answers": {"SELECT", "INSERT"},
    "circuits": {"SELECT", "INSERT", "DELETE"},
    "pauses": {"SELECT", "INSERT", "DELETE"},
}
# Of these the runtime role may change some columns only: what was asked, of whom and until when is never rewritten.
RUNTIME_UPDATES = {
    *(("keys", column) for column in ("revoked_at",)),
    *(("circuits", column) for column in ("probe_at", "last_error")),
    *(
        ("approvals", column)
        for column in (
            "state", "decided_at", "decided_by", "claimed_approver", "reason", "is_continued", "released_at", "released_to", "release_key",
        )
    ),
}  # fmt: skip
PRUNER_TABLES = {"orgs": {"SELECT"}, "sessions": {"DELETE"}, "journal": {"DELETE"}}
PRUNER_COLUMNS = {
    *(("orgs", column, "SELECT") for column in ("org", "created_at")),
    *(
        ("sessions", column, "SELECT")
        for column in ("org", "session_id", "state", "clean", "last_step", "created_at", "active_at")
    ),
    ("sessions", "org", "UPDATE"),
    *(("remembered_answers", column, "SELECT") for column in ("org", "session_id", "answered_at")),
    *(("journal", column, "SELECT") for column in ("org", "session_id")),
}  # fmt: skip
COLUMN_PRIVILEGES_SQL = """
SELECT c.relname AS table_name, a.attname AS column_name, p.privilege
FROM pg_class AS c
JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'REFERENCES']) AS p (privilege)
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND has_column_privilege($1, c.oid, a.attnum, p.privilege)
"""
TABLE_PRIVILEGES_SQL = """
SELECT c.relname AS table_name, p.privilege
FROM pg_class AS c
CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER']) AS p (privilege)
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND has_table_privilege($1, c.oid, p.privilege)
"""


async def test_roles_hold_the_privileges_they_need_and_no_others(database_url: str) -> None:
    """Only the pruner deletes what happened, nobody truncates; the dispatcher sees when calls are due and whose keys are; no payloads."""
    async with owner_connection(database_url) as connection:
        columns = await connection.fetch(COLUMN_PRIVILEGES_SQL, "countermand_dispatcher")
        tables = await connection.fetch(TABLE_PRIVILEGES_SQL, "countermand_runtime")
        dispatchers = await connection.fetch(TABLE_PRIVILEGES_SQL, "countermand_dispatcher")
        runtime = await connection.fetch(COLUMN_PRIVILEGES_SQL, "countermand_runtime")
        pruner_columns = await connection.fetch(COLUMN_PRIVILEGES_SQL, "countermand_pruner")
        pruner_tables = await connection.fetch(TABLE_PRIVILEGES_SQL, "countermand_pruner")
    assert {tuple(row.values()) for row in columns} == DISPATCHER_COLUMNS
    assert {row["table_name"] for row in dispatchers if row["privilege"] == "DELETE"} == set(HOLDS)
    assert {tuple(row.values()) for row in pruner_columns} == PRUNER_COLUMNS
    for found, expected in ((tables, RUNTIME_TABLES), (pruner_tables, PRUNER_TABLES)):
        assert {(row["table_name"], row["privilege"]) for row in found} == {
            (table, privilege) for table, privileges in expected.items() for privilege in privileges
        }
    updates = {(row["table_name"], row["column_name"]) for row in runtime if row["privilege"] == "UPDATE"}
    assert {(table, column) for table, column in updates if "UPDATE" not in RUNTIME_TABLES[table]} == RUNTIME_UPDATES


async def test_dispatcher_is_refused_when_it_looks_beyond_its_columns(database: Database, database_url: str) -> None:
    """The one role that sees every org sees nothing worth stealing in them, and its rights end with its transaction."""
    await fill(database, database_url)
    async with database.dispatch() as connection:
        assert {row["org"] for row in await connection.fetch("SELECT org FROM outgoing_calls")} == {ACME, BETA}
    for statement in (
        "SELECT body FROM outgoing_calls",
        "SELECT * FROM outgoing_calls",
        "SELECT metadata FROM sessions",
        "SELECT definition FROM tools",
        "SELECT body FROM remembered_answers",
        "SELECT payload FROM effect_log",
        "SELECT reason FROM approvals",
        "SELECT last_error FROM circuits",
        "SELECT reason FROM pauses",
        "SELECT decided_by FROM approvals",
        "UPDATE approvals SET state = 'approved'",
        "SELECT content FROM journal",
        "UPDATE outgoing_calls SET due_at = NULL",
        "UPDATE keys SET revoked_at = NULL",
        "DELETE FROM outgoing_calls",
    ):
        await check_refused(dispatch(database, statement), "permission denied")
    with pytest.raises(MISTAKES):
        await run_outside(database, "SELECT org FROM outgoing_calls")


async def test_everything_is_paused_by_the_dispatcher_alone_when_orgs_may_only_see_it(database: Database, database_url: str) -> None:
    """One tenant must not stop all others, nor let go on what their operator has stopped; the dispatcher touches no tenant's own pause."""
    await fill(database, database_url)
    everything = "INSERT INTO pauses (org, paused_by, reason) VALUES (NULL, 'somebody', 'r')"
    await check_refused(run_as(database, everything), "row-level security")
    await check_refused(dispatch(database, everything.replace("NULL", "'acme'")), "row-level security")
    await dispatch(database, everything)
    async with database.transaction(ACME) as tx:
        assert await tx.connection.execute("DELETE FROM pauses WHERE org IS NULL") == "DELETE 0"
        assert {row["org"] for row in await tx.connection.fetch("SELECT org FROM pauses")} == {ACME, None}
    with pytest.raises(MISTAKES):
        await run_outside(database, "SELECT count(*) FROM pauses")
    async with database.dispatch() as connection:
        assert await connection.execute("DELETE FROM pauses") == "DELETE 1"


async def test_question_stays_as_it_was_put_when_the_service_decides_it(database: Database, database_url: str) -> None:
    """Whoever may write a decision may not make it one about another call, another requester or a later expiry."""
    await fill(database, database_url)
    before = await rows_of(database_url, ACME)
    for change in (
        "session_id = 'run-1'",
        "step_index = 2",
        "requested_by = 'nobody'",
        "requested_at = now() - interval '1 s'",
        "expires_at = expires_at + interval '1 year'",
        "ttl_seconds = 1",
    ):
        await check_refused(run_as(database, f"UPDATE approvals SET {change}"), "permission denied")
    for statement in ("DELETE FROM approvals", "TRUNCATE approvals"):
        await check_refused(run_as(database, statement), "permission denied")
    assert await rows_of(database_url, ACME) == before


async def dispatch(database: Database, statement: str) -> None:
    """Run one statement as the dispatcher."""
    async with database.dispatch() as connection:
        await connection.execute(statement)


# What a change of the journal's rows would be, one column at a time.
JOURNAL_CHANGES = [
    "org = 'beta'", "session_id = 'x'", "seq = seq + 100", "kind = 'HALTED'", "step = 7", "actor = 'x'",
    "at = '2026-01-02T03:04:05.000006Z'",
    "body = '{}'", "prev_hash = decode(repeat('01', 32), 'hex')", "hash = decode(repeat('01', 32), 'hex')", "content = '{}'",
    "content = content || '\\x20'", "content = NULL, body = '{}'", "content = NULL, step = 7", "seq = seq",
]  # fmt: skip


async def test_journal_refuses_when_anyone_changes_or_removes_entries(database: Database, database_url: str) -> None:
    """The service has no privilege to; the owner meets the trigger; what is there stays as it was hashed."""
    await fill(database, database_url)
    before = await rows_of(database_url, ACME)
    spoils = [*(f"UPDATE journal SET {change}" for change in JOURNAL_CHANGES), "DELETE FROM journal", "TRUNCATE journal"]
    for statement in spoils:
        await check_refused(run_as(database, statement), "permission denied")
        async with owner_connection(database_url) as owner:
            with pytest.raises(asyncpg.RestrictViolationError, match="insert-only"):
                await owner.execute(statement)
    assert await rows_of(database_url, ACME) == before


async def test_journal_lets_contents_go_when_they_are_erased(database: Database, database_url: str) -> None:
    """Personal data can be erased, and only so: the hashed parts stay, and nothing can be put in its place."""
    await fill(database, database_url)
    async with owner_connection(database_url) as owner:
        kept = await owner.fetch("SELECT org, seq, kind, body, hash FROM journal ORDER BY org, session_id, seq")
        assert await owner.fetchval("SELECT count(*) FROM journal WHERE content IS NOT NULL") > 0
        await owner.execute("UPDATE journal SET content = NULL")
        assert await owner.fetchval("SELECT count(*) FROM journal WHERE content IS NOT NULL") == 0
        assert await owner.fetch("SELECT org, seq, kind, body, hash FROM journal ORDER BY org, session_id, seq") == kept
        with pytest.raises(asyncpg.RestrictViolationError):
            await owner.execute("UPDATE journal SET content = '{}'")


async def prune(database: Database, statement: str, org: Any = ACME) -> str:
    """Run one statement as the pruner and return what became of it."""
    async with database.prune(org) as connection:
        return str(await connection.execute(statement))


async def end(database_url: str, session_id: str, state: str, *, clean: bool = True) -> None:
    """Let a session of the first org have come to an end, by the owner's hand."""
    sql = "UPDATE sessions SET state = $2, clean = $3, halted_at = now(), halt_reason = $4 WHERE org = 'acme' AND session_id = $1"
    async with owner_connection(database_url) as owner:
        await owner.execute(sql, session_id, state, clean, None if state in {"completed", "active", "awaiting_approval"} else "operator")


async def is_let_go(database: Database, session_id: str) -> bool:
    """Tell whether the pruner could delete a session; it stays."""
    try:
        await prune(database, f"SAVEPOINT before; DELETE FROM sessions WHERE session_id = '{session_id}'; ROLLBACK TO SAVEPOINT before")
    except asyncpg.RestrictViolationError:
        return False
    return True


# Every state, and whether a session in it may be deleted where it is clean, and where it is not.
DELETABLE = dict.fromkeys(SessionState, (False, False)) | {
    SessionState.COMPLETED: (True, True),
    SessionState.COMPENSATED: (True, False),
}


async def test_session_is_deleted_when_it_is_the_pruners_and_has_ended_well(database: Database, database_url: str) -> None:
    """Whatever the program asks, the database lets go only what no person may still have to look at; everything of it goes along."""
    await fill(database, database_url)
    other = await rows_of(database_url, BETA)
    for state, expected in DELETABLE.items():
        for is_clean, may_go in zip((True, False), expected, strict=True):
            await end(database_url, RUN, state, clean=is_clean)
            assert await is_let_go(database, RUN) is may_go, (state, is_clean)
    await end(database_url, RUN, "completed")
    async with owner_connection(database_url) as owner:
        with pytest.raises(asyncpg.RestrictViolationError):
            await owner.execute("DELETE FROM sessions WHERE org = 'acme' AND session_id = 'run-1'")
    await check_refused(run_as(database, "DELETE FROM sessions"), "permission denied")
    assert await prune(database, "DELETE FROM sessions WHERE session_id = 'run-1'") == "DELETE 1"
    left = await rows_of(database_url, ACME)
    of_a_session = {table: [row for row in rows if RUN in row] for table, rows in left.items() if table != "journal"}
    assert not any(of_a_session.values())
    assert left["sessions"], "the other one is there"
    assert await rows_of(database_url, BETA) == other


async def test_journal_goes_when_its_session_is_gone(database: Database, database_url: str) -> None:
    """Before that nobody deletes an entry; afterwards only the pruner does, and no table of its own making stands for the sessions."""
    await fill(database, database_url)
    entries = f"DELETE FROM journal WHERE session_id = '{RUN}'"
    with pytest.raises(asyncpg.RestrictViolationError, match="insert-only"):
        await prune(database, entries)
    with pytest.raises(asyncpg.RestrictViolationError, match="insert-only"):
        await prune(database, f"CREATE TEMP TABLE sessions (org text, session_id text); {entries}")
    await end(database_url, RUN, "completed")
    await prune(database, f"DELETE FROM sessions WHERE session_id = '{RUN}'")
    async with owner_connection(database_url) as owner:
        with pytest.raises(asyncpg.RestrictViolationError, match="insert-only"):
            await owner.execute(f"{entries} AND org = 'acme'")
    await check_refused(run_as(database, entries), "permission denied")
    count = len([row for row in (await rows_of(database_url, ACME))["journal"] if RUN in row])
    assert count > 0
    assert await prune(database, entries) == f"DELETE {count}"
    assert await prune(database, "DELETE FROM journal WHERE org = 'beta'") == "DELETE 0"


async def test_pruner_is_refused_when_it_does_more_than_delete(database: Database, database_url: str) -> None:
    """The one role that may delete reads nothing that a session did, changes nothing, and meets one org at a time."""
    await fill(database, database_url)
    async with database.prune(ACME) as connection:
        assert {row["org"] for row in await connection.fetch("SELECT org FROM sessions")} == {ACME}
    async with database.prune(None) as connection:
        assert {row["org"] for row in await connection.fetch("SELECT org FROM orgs")} == {ACME, BETA}
    for statement in (
        "SELECT metadata FROM sessions",
        "SELECT payload FROM effect_log",
        "SELECT body FROM journal",
        "SELECT body FROM remembered_answers",
        "SELECT secret_sha256 FROM keys",
        "UPDATE sessions SET state = 'completed'",
        "UPDATE sessions SET active_at = now() - interval '1 year'",
        "UPDATE journal SET content = NULL",
        "DELETE FROM effect_log",
        "DELETE FROM keys",
        "TRUNCATE journal",
    ):
        await check_refused(prune(database, statement), "permission denied")
    await check_refused(prune(database, "UPDATE sessions SET org = 'beta'"), "row-level security")
    with pytest.raises(MISTAKES):
        await prune(database, "SELECT org FROM sessions", None)
