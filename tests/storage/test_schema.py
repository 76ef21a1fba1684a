"""The schema is what the migrations say, one way up and down, commented, and with the domain's words. Must not test rows."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from enum import StrEnum
from uuid import uuid4

import asyncpg
import pytest

from app.cli.migrating import downgrade, migrate
from app.domain.model import (
    ApprovalState,
    CallKind,
    EffectState,
    EntryKind,
    HaltReason,
    Outcome,
    Reversibility,
    Role,
    SessionState,
    UndoState,
)
from app.main import SCHEMA_REVISION
from tests.conftest import execute, with_database
from tests.factories import owner_connection
from tests.golden import REPOSITORY, kept_text
from tests.storage.dumping import dump_schema

GOLDEN = "migrations/schema.sql"


@pytest.fixture
def empty_database_url(cluster_url: str) -> Iterator[str]:
    """Make a database that no migration has seen."""
    name = f"empty_{uuid4().hex}"
    asyncio.run(execute(cluster_url, f'CREATE DATABASE "{name}"'))
    yield with_database(cluster_url, name)
    asyncio.run(execute(cluster_url, f'DROP DATABASE "{name}" WITH (FORCE)'))


@pytest.mark.golden
def test_schema_is_the_golden_file_when_migrated_to_head(empty_database_url: str) -> None:
    """What people read is what the migrations make, on every Postgres."""
    migrate(empty_database_url)
    current = dump_schema(empty_database_url)
    assert kept_text(GOLDEN, current) == current, "run `make schema` and review the difference"


def test_schema_is_the_same_when_it_went_down_and_up_again(empty_database_url: str) -> None:
    """Down leaves nothing behind but the list of revisions, and up makes the same from that."""
    migrate(empty_database_url)
    first = dump_schema(empty_database_url)
    downgrade(empty_database_url, "base")
    down = dump_schema(empty_database_url)
    migrate(empty_database_url)
    assert dump_schema(empty_database_url) == first
    assert down.count("CREATE ") == 1
    assert "CREATE TABLE alembic_version" in down
    assert "GRANT" not in down


def test_migrate_changes_nothing_when_the_schema_is_at_head(empty_database_url: str) -> None:
    """A second migrate is harmless, and the service knows the revision it leaves."""
    migrate(empty_database_url)
    first = dump_schema(empty_database_url)
    migrate(empty_database_url)
    assert dump_schema(empty_database_url) == first
    assert asyncio.run(read_value(empty_database_url, "SELECT version_num FROM alembic_version")) == SCHEMA_REVISION


def test_migrate_is_safe_when_several_run_at_once(empty_database_url: str) -> None:
    """Replicas that start together wait for one another."""
    program = "import sys; from app.cli.migrating import migrate; migrate(sys.argv[1])"
    command = [sys.executable, "-c", program, empty_database_url]
    together = [subprocess.Popen(command, cwd=REPOSITORY) for _ in range(2)]
    assert [process.wait(timeout=60) for process in together] == [0, 0]
    assert asyncio.run(read_value(empty_database_url, "SELECT count(*) FROM alembic_version")) == 1
    assert asyncio.run(read_value(empty_database_url, "SELECT count(*) FROM sessions")) == 0


def test_migrate_works_when_the_cluster_has_another_such_database(empty_database_url: str, template: str) -> None:
    """The roles belong to the cluster and are there already; they can neither log in nor own anything."""
    migrate(empty_database_url)
    roles = "SELECT count(*) FROM pg_roles WHERE rolname ~ '^countermand_' AND NOT rolcanlogin AND NOT rolsuper AND NOT rolbypassrls"
    owned = "SELECT count(*) FROM pg_class WHERE pg_get_userbyid(relowner) ~ '^countermand_'"
    assert asyncio.run(read_value(empty_database_url, roles)) == 3
    assert asyncio.run(read_value(empty_database_url, owned)) == 0


async def read_value(url: str, sql: str) -> object:
    """Return one value."""
    async with owner_connection(url) as connection:
        return await connection.fetchval(sql)


UNCOMMENTED_SQL = """
SELECT c.relname || coalesce('.' || a.attname, '') AS name
FROM pg_class AS c
LEFT JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p', 'v') AND c.relname <> 'alembic_version'
  AND (col_description(c.oid, a.attnum) IS NULL OR obj_description(c.oid, 'pg_class') IS NULL)
"""


async def test_every_table_and_column_has_a_comment(database_url: str) -> None:
    """Whoever looks into the database is told what they see."""
    async with owner_connection(database_url) as connection:
        assert [row["name"] for row in await connection.fetch(UNCOMMENTED_SQL)] == []


ENUMS: dict[str, type[StrEnum]] = {
    "key_role": Role,
    "reversibility": Reversibility,
    "session_state": SessionState,
    "halt_reason": HaltReason,
    "effect_state": EffectState,
    "outcome": Outcome,
    "approval_state": ApprovalState,
    "call_kind": CallKind,
    "undo_state": UndoState,
    "entry_kind": EntryKind,
}


async def test_enums_hold_the_domains_words(database_url: str) -> None:
    """One word per thing on every floor: no type of the database knows more or less than the domain."""
    async with owner_connection(database_url) as connection:
        rows = await connection.fetch(
            "SELECT t.typname, array_agg(e.enumlabel::text ORDER BY e.enumsortorder) AS labels "
            "FROM pg_type AS t JOIN pg_enum AS e ON e.enumtypid = t.oid GROUP BY t.typname"
        )
    assert {row["typname"]: row["labels"] for row in rows} == {name: list(words) for name, words in ENUMS.items()}


# One good row per table, as SQL expressions; each violation below changes as little of it as it can.
HASH = "decode(repeat('00', 32), 'hex')"
SHORT_HASH = "decode('00', 'hex')"
GOOD: dict[str, dict[str, str]] = {
    "orgs": {"org": "'acme'"},
    "keys": {
        "org": "'acme'", "key_id": "'0123456789ab'", "secret_sha256": HASH, "role": "'agent'", "subject": "'robot-1'",
    },
    "sessions": {
        "org": "'acme'", "session_id": "'run-1'", "owner": "'robot-1'", "agent": "'robot'", "metadata": "'{}'", "state": "'active'",
        "halt_reason": "NULL", "clean": "true", "pivoted": "false", "late_effect": "false", "last_step": "0", "idle_seconds": "60",
        "halted_at": "NULL", "halt_ordered": "false",
        "created_at": "now()", "updated_at": "now()", "active_at": "now()", "version": "0", "revision": "0", "journal_seq": "0",
        "journal_hash": HASH, "journal_at": "NULL",
    },
    "effect_log": {
        "org": "'acme'", "session_id": "'run-1'", "step_index": "1", "effect_id": "gen_random_uuid()", "tool": "'issue_credit'",
        "reversibility": "'compensatable'", "state": "'executing'", "outcome": "NULL", "payload": "'{}'", "payload_sha256": HASH,
        "request_key": "'k-1'", "request_sha256": HASH, "attempt": "1", "registered_at": "now()", "executed_at": "NULL", "version": "1",
    },
    "approvals": {
        "org": "'acme'", "session_id": "'run-1'", "step_index": "1", "state": "'pending'", "requested_by": "'robot-1'",
        "requested_at": "now()", "expires_at": "now() + interval '1 hour'", "ttl_seconds": "3600", "decided_at": "NULL",
        "decided_by": "NULL", "is_continued": "false", "released_at": "NULL", "released_to": "NULL", "release_key": "NULL",
    },
    "undo_stack": {
        "org": "'acme'", "session_id": "'run-1'", "stack_position": "1", "undo_id": "gen_random_uuid()", "state": "'pending'",
        "compensation": "'{}'", "by_hand": "false", "registered_at": "now()", "compensated_at": "NULL",
    },
    "outgoing_calls": {
        "org": "'acme'", "session_id": "'run-1'", "call_id": "gen_random_uuid()", "kind": "'undo'", "step_index": "1",
        "destination": "'a.example:443'",
        "url": "NULL", "body": "NULL", "outcome": "NULL", "attempts": "0", "failures": "0", "interrupted": "0", "polls": "0",
        "is_attempt_open": "false", "may_be_processing": "false", "last_status": "NULL", "due_at": "now()", "first_sent_at": "NULL",
        "deadline_at": "now()", "leased_by": "NULL", "leased_until": "NULL", "epoch": "0",
    },
    "journal": {
        "org": "'acme'", "session_id": "'run-1'", "seq": "1", "kind": "'OPENED'", "step": "NULL", "actor": "'agent:robot-1'",
        "at": "'2026-01-02T03:04:05.000006Z'", "body": "'{}'", "prev_hash": HASH, "hash": HASH,
    },
    "tools": {
        "org": "'acme'", "name": "'issue_credit'", "version": "1", "definition": "'{}'", "is_deleted": "false", "created_by": "'root-1'",
    },
    "remembered_answers": {
        "org": "'acme'", "subject": "'robot-1'", "request": "'POST /v1/x'", "request_key": "'k-1'", "session_id": "'run-1'",
        "request_sha256": HASH, "status": "200", "body": "'{}'",
    },
    "circuits": {
        "org": "'acme'", "destination": "'a.example:443'", "probe_at": "now()", "probes": "0", "probe_session_id": "NULL",
        "probe_call_id": "NULL", "last_error": "'http 503'",
    },
    "pauses": {"org": "'acme'", "destination": "'a.example:443'", "paused_by": "'operator:o'", "reason": "'moving'"},
}  # fmt: skip
SENT = {"first_sent_at": "now()", "url": "'https://a.example/'", "body": "'{}'", "outcome": "'unknown'", "attempts": "1"}
ACTION = {"kind": "'action'"}
DECIDED = {"decided_at": "now()", "decided_by": "'boss-1'"}
RELEASED = DECIDED | {"state": "'released'", "released_at": "now()", "released_to": "'boss-1'"}
COMMITTED = {"state": "'committed'", "outcome": "'committed'", "executed_at": "now()"}

# The rule that must refuse -> rows to try: table, and what differs from the good one.
VIOLATIONS: dict[str, list[tuple[str, dict[str, str]]]] = {
    "org_name_check": [("orgs", {"org": text}) for text in ("''", "'Acme'", "'-a'", "'a-'", "'a b'", "repeat('a', 64)", "E'a\\n'")],
    "keys_key_id_check": [("keys", {"key_id": "'0123456789AB'"}), ("keys", {"key_id": "''"})],
    "keys_secret_sha256_check": [("keys", {"secret_sha256": SHORT_HASH})],
    "keys_subject_check": [("keys", {"subject": "''"}), ("keys", {"subject": "repeat('x', 201)"})],
    "sessions_session_id_check": [("sessions", {"session_id": text}) for text in ("''", "'a b'", "'a/b'", "repeat('x', 201)", "E'a\\n'")],
    "sessions_metadata_check": [("sessions", {"metadata": "convert_to(repeat('x', 16385), 'UTF8')"})],
    "sessions_last_step_check": [("sessions", {"last_step": "-1"})],
    "sessions_idle_seconds_check": [("sessions", {"idle_seconds": "0"})],
    "sessions_check": [("sessions", {"updated_at": "now() - interval '1 microsecond'"})],
    "sessions_version_check": [("sessions", {"version": "-1"})],
    "sessions_revision_check": [("sessions", {"revision": "-1"})],
    "sessions_journal_seq_check": [("sessions", {"journal_seq": "-1", "journal_at": "now()"})],
    "sessions_journal_hash_check": [("sessions", {"journal_hash": SHORT_HASH})],
    "sessions_check1": [("sessions", {"journal_seq": "1"}), ("sessions", {"journal_at": "now()"})],
    "sessions_check2": [("sessions", {"state": "'halted'"})],
    "sessions_check3": [
        ("sessions", {"state": f"'{state}'", "halt_reason": "'operator'"}) for state in ("active", "awaiting_approval", "completed")
    ],
    "sessions_check4": [
        ("sessions", {"state": "'halted'", "halt_reason": "'operator'"}),
        ("sessions", {"state": "'resolved'", "halt_reason": "'operator'"}),
        ("sessions", {"state": "'resolved'", "halted_at": "now()"}),
    ],
    "sessions_check5": [
        ("sessions", {"state": f"'{state}'", "halt_ordered": "true", "halted_at": "now()", "halt_reason": reason})
        for state, reason in (
            ("active", "NULL"),
            ("awaiting_approval", "NULL"),
            ("completed", "NULL"),
            ("compensated", "NULL"),
            ("halted", "'operator'"),
            ("resolved", "'operator'"),
        )
    ],
    "effect_log_step_index_check": [("effect_log", {"step_index": "0"})],
    "effect_log_tool_check": [("effect_log", {"tool": "''"}), ("effect_log", {"tool": "repeat('x', 201)"})],
    "effect_log_payload_check": [("effect_log", {"payload": "convert_to(repeat('x', 262145), 'UTF8')"})],
    "effect_log_payload_sha256_check": [("effect_log", {"payload_sha256": SHORT_HASH})],
    "effect_log_request_key_check": [("effect_log", {"request_key": "''"}), ("effect_log", {"request_key": "repeat('x', 256)"})],
    "effect_log_request_sha256_check": [("effect_log", {"request_sha256": SHORT_HASH})],
    "effect_log_attempt_check": [("effect_log", {"attempt": "0"})],
    "effect_log_version_check": [("effect_log", {"version": "0"})],
    "effect_log_check": [("effect_log", COMMITTED | {"executed_at": "now() - interval '1 microsecond'"})],
    "effect_log_check1": [
        ("effect_log", COMMITTED | {"executed_at": "NULL"}),
        ("effect_log", {"executed_at": "now()"}),
        ("effect_log", {"state": "'unknown'", "outcome": "'unknown'", "executed_at": "now()"}),
    ],
    "effect_log_check2": [("effect_log", {"state": "'committed'"}), ("effect_log", {"state": "'committed'", "outcome": "'unknown'"})],
    "effect_log_check3": [("effect_log", {"state": "'failed'"}), ("effect_log", {"state": "'failed'", "outcome": "'unknown'"})],
    "effect_log_check4": [("effect_log", {"state": "'unknown'"}), ("effect_log", {"state": "'unknown'", "outcome": "'not_applied'"})],
    "effect_log_check5": [
        ("effect_log", {"state": f"'{state}'", "outcome": "'unknown'"})
        for state in ("executing", "awaiting_approval", "approved", "rejected", "expired", "cancelled")
    ],
    "effect_log_check6": [
        ("effect_log", {"reversibility": "'irreversible'", "state": f"'{state}'", "outcome": "'unknown'"})
        for state in ("compensating", "compensated", "compensation_failed")
    ],
    "approvals_check": [("approvals", {"expires_at": "now()"})],
    "approvals_ttl_seconds_check": [("approvals", {"ttl_seconds": "0"})],
    "approvals_check1": [("approvals", DECIDED | {"state": "'approved'", "decided_at": "now() - interval '1 microsecond'"})],
    "approvals_check2": [("approvals", DECIDED | {"state": f"'{state}'", "decided_by": "'robot-1'"}) for state in ("approved", "rejected")],
    "approvals_check3": [
        ("approvals", RELEASED | {"released_at": "now() + interval '1 hour'"}),
        ("approvals", RELEASED | {"decided_at": "now() + interval '1 microsecond'"}),
    ],
    "approvals_release_key_check": [
        ("approvals", RELEASED | {"release_key": "''"}),
        ("approvals", RELEASED | {"release_key": "repeat('x', 301)"}),
    ],
    "approvals_check4": [
        ("approvals", {"state": "'cancelled'", "decided_at": "now()"}),
        ("approvals", {"state": "'cancelled'", "decided_by": "'boss-1'"}),
    ],
    "approvals_check5": [
        ("approvals", RELEASED | {"released_to": "NULL"}),
        ("approvals", {"state": "'expired'", "released_to": "'boss-1'"}),
    ],
    "approvals_check6": [
        ("approvals", DECIDED | {"state": "'released'"}),
        *(("approvals", RELEASED | {"state": f"'{state}'"}) for state in ApprovalState if state is not ApprovalState.RELEASED),
    ],
    "approvals_check7": [
        ("approvals", RELEASED | {"decided_at": "NULL", "decided_by": "NULL"}),
        *(("approvals", {"state": f"'{state}'"}) for state in ("approved", "rejected", "mismatched")),
    ],
    "approvals_check8": [("approvals", DECIDED)],
    "approvals_check9": [
        ("approvals", DECIDED | {"state": f"'{state}'", "is_continued": "true"})
        for state in ("approved", "expired", "cancelled", "mismatched")
    ],
    "undo_stack_stack_position_check": [("undo_stack", {"stack_position": "0"})],
    "undo_stack_check": [("undo_stack", {"state": "'compensated'", "compensated_at": "now() - interval '1 microsecond'"})],
    "undo_stack_check1": [("undo_stack", {"state": "'compensated'"}), ("undo_stack", {"compensated_at": "now()"})],
    "undo_stack_check2": [("undo_stack", {"by_hand": "true", "state": f"'{state}'"}) for state in ("pending", "running", "failed")],
    "outgoing_calls_attempts_check": [("outgoing_calls", SENT | {"attempts": "-1", "failures": "-1"})],
    "outgoing_calls_check": [("outgoing_calls", {"failures": "1"}), ("outgoing_calls", {"failures": "-1"})],
    "outgoing_calls_interrupted_check": [("outgoing_calls", {"interrupted": "-1"})],
    "schema_support_is_only_check": [("schema_support", {"is_only": "false", "oldest_revision": "'0001'"})],
    "outgoing_calls_polls_check": [("outgoing_calls", SENT | {"polls": "-1"})],
    "outgoing_calls_last_status_check": [("outgoing_calls", {"last_status": "99"}), ("outgoing_calls", {"last_status": "1000"})],
    "outgoing_calls_epoch_check": [("outgoing_calls", {"epoch": "-1"})],
    "outgoing_calls_check2": [("outgoing_calls", SENT | {"url": "NULL"})],
    "outgoing_calls_check3": [("outgoing_calls", SENT | {"body": "NULL"})],
    "outgoing_calls_check4": [
        ("outgoing_calls", SENT | {"outcome": "NULL"}),
        ("outgoing_calls", {"outcome": "'unknown'"}),
        ("outgoing_calls", SENT | ACTION),
        ("outgoing_calls", ACTION | {"outcome": "'committed'"}),
    ],
    "outgoing_calls_check5": [("outgoing_calls", SENT | {"attempts": "0"})],
    "outgoing_calls_check6": [("outgoing_calls", {"leased_by": "'w'"}), ("outgoing_calls", {"leased_until": "now()"})],
    "journal_seq_check": [("journal", {"seq": "0"})],
    "journal_step_check": [("journal", {"step": "0"})],
    "journal_at_check": [("journal", {"at": text}) for text in ("''", "'2026-01-02T03:04:05Z'", "'2026-01-02 03:04:05.000006+00'")],
    "journal_prev_hash_check": [("journal", {"prev_hash": SHORT_HASH})],
    "journal_hash_check": [("journal", {"hash": SHORT_HASH})],
    "effect_log_tool_version_check": [("effect_log", {"tool_version": "0"})],
    "tools_name_check": [("tools", {"name": "''"}), ("tools", {"name": "repeat('x', 201)"})],
    "tools_version_check": [("tools", {"version": "0"})],
    "remembered_answers_request_key_check": [
        ("remembered_answers", {"request_key": "''"}),
        ("remembered_answers", {"request_key": "repeat('x', 256)"}),
    ],
    "remembered_answers_request_sha256_check": [("remembered_answers", {"request_sha256": SHORT_HASH})],
    "remembered_answers_status_check": [("remembered_answers", {"status": "199"}), ("remembered_answers", {"status": "300"})],
    "remembered_answers_org_session_id_fkey": [("remembered_answers", {"session_id": "'run-2'"})],
    "keys_org_fkey": [("keys", {"org": "'nobody'", "key_id": "'ba9876543210'"})],
    "effect_log_org_session_id_fkey": [("effect_log", {"session_id": "'run-2'"}), ("effect_log", {"org": "'beta'"})],
    "approvals_org_session_id_step_index_fkey": [("approvals", {"step_index": "3"})],
    "undo_stack_org_session_id_stack_position_fkey": [("undo_stack", {"stack_position": "3"})],
    "outgoing_calls_org_session_id_step_index_fkey": [("outgoing_calls", {"step_index": "3", "due_at": "NULL"})],
    "circuits_destination_check": [("circuits", {"destination": "''"})],
    "circuits_probes_check": [("circuits", {"destination": "'b.example:443'", "probes": "-1"})],
    "circuits_check": [
        ("circuits", {"destination": "'b.example:443'", "probe_session_id": "'run-1'"}),
        ("circuits", {"destination": "'b.example:443'", "probe_call_id": "gen_random_uuid()"}),
    ],
    "pauses_destination_check": [("pauses", {"destination": "''"})],
    "pauses_reason_check": [("pauses", {"destination": "NULL", "reason": "''"})],
    "pauses_check": [("pauses", {"org": "NULL"})],
    "pauses_org_fkey": [("pauses", {"org": "'nobody'"})],
    "pauses_once": [("pauses", {}), ("pauses", {"paused_by": "'operator:p'"})],
    "keys_key_id_key": [("keys", {"org": "'beta'"})],
    "outgoing_calls_by_step": [("outgoing_calls", {"due_at": "NULL"})],
    "outgoing_calls_one_undo_due": [("outgoing_calls", {"step_index": "2"})],
    "effect_log_by_request_key": [("effect_log", {"step_index": "4"})],
    "journal_decisions": [
        ("journal", {"seq": "3", "kind": "'APPROVED'", "step": "1"}),
        ("journal", {"seq": "3", "kind": "'REJECTED'", "step": "1"}),
    ],
}
# What stands beside the good rows while others are tried.
BESIDE: list[tuple[str, dict[str, str]]] = [
    ("effect_log", {"step_index": "2", "request_key": "NULL"}),
    ("journal", {"seq": "2", "kind": "'APPROVED'", "step": "1"}),
]
# Rows that no rule may refuse, each tried by itself: a rule too many is as wrong as one too few.
ACCEPTED: list[tuple[str, dict[str, str]]] = [
    *(("approvals", DECIDED | {"step_index": "2", "state": f"'{state}'"}) for state in ("approved", "rejected", "mismatched")),
    ("approvals", DECIDED | {"step_index": "2", "state": "'rejected'", "is_continued": "true"}),
    *(("approvals", {"step_index": "2", "state": f"'{state}'"}) for state in ("pending", "expired", "cancelled")),
    *(("approvals", DECIDED | {"step_index": "2", "state": f"'{state}'"}) for state in ("expired", "cancelled")),
    ("approvals", RELEASED | {"step_index": "2"}),
    ("approvals", RELEASED | {"step_index": "2", "release_key": "repeat('x', 300)"}),
    ("approvals", RELEASED | {"step_index": "2", "released_at": "now() + interval '1 hour' - interval '1 microsecond'"}),
    ("outgoing_calls", ACTION),
    ("outgoing_calls", ACTION | {"interrupted": "3"}),
    ("outgoing_calls", ACTION | SENT | {"outcome": "NULL"}),
    ("outgoing_calls", ACTION | {"step_index": "2"}),
    ("journal", {"seq": "3", "kind": "'APPROVED'", "step": "2"}),
    ("journal", {"seq": "3", "kind": "'REJECTED'", "step": "2"}),
    *(("journal", {"seq": "3", "kind": f"'{kind}'", "step": "1"}) for kind in ("EXPIRED", "PAYLOAD_MISMATCH", "CANCELLED", "INTENT")),
    *(
        ("sessions", {"session_id": "'run-9'", "state": f"'{state}'", "halted_at": "now()", "halt_reason": "'operator'"})
        for state in ("halted", "resolved", "compensating")
    ),
    *(("sessions", {"session_id": "'run-9'", "state": f"'{state}'", "halt_ordered": "true"}) for state in ("failed", "compensating")),
]
RULES_SQL = """
SELECT conname AS name FROM pg_constraint
WHERE connamespace = 'public'::regnamespace AND contype IN ('c', 'f', 'u', 'x')
"""


def insert(table: str, changes: dict[str, str]) -> str:
    """Write the INSERT of a good row with some columns changed."""
    row = GOOD.get(table, {}) | changes
    return f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join(row.values())})"


async def test_database_refuses_when_a_row_breaks_a_rule(database_url: str) -> None:
    """Each rule of the schema refuses, by its name, rows that break it and nothing else; no rule is without such a row."""
    async with owner_connection(database_url) as connection:
        known = {row["name"] for row in await connection.fetch(RULES_SQL)}
        assert known <= VIOLATIONS.keys(), "a rule without a row that breaks it"
        for table in GOOD:
            await connection.execute(insert(table, {}))
        for table, changes in BESIDE:
            await connection.execute(insert(table, changes))
        for rule, rows in VIOLATIONS.items():
            for table, changes in rows:
                broken = await refused_by(connection, insert(table, changes))
                assert broken == rule, f"{table} {changes}: refused by {broken}"
        for table, changes in ACCEPTED:
            assert await refused_by(connection, insert(table, changes)) is None, f"{table} {changes}"


async def refused_by(connection: "asyncpg.Connection[asyncpg.Record]", statement: str) -> str | None:
    """Try a statement, deferred rules included, and return the rule that refuses it; nothing is kept."""
    try:
        await connection.execute(f"BEGIN; SET CONSTRAINTS ALL IMMEDIATE; {statement}")
    except asyncpg.IntegrityConstraintViolationError as refused:
        return refused.constraint_name
    finally:
        await connection.execute("ROLLBACK")
    return None


async def test_one_undo_of_a_session_is_due_when_the_transaction_ends(database_url: str) -> None:
    """Within a transaction the due time may pass from one undo to the next; at its end one has it. Actions may be due together."""
    async with owner_connection(database_url) as connection:
        for table in GOOD:
            await connection.execute(insert(table, {}))
        await connection.execute(insert("effect_log", {"step_index": "2", "request_key": "NULL"}))
        async with connection.transaction():
            await connection.execute(insert("outgoing_calls", {"step_index": "2"}))
            await connection.execute("UPDATE outgoing_calls SET due_at = NULL WHERE step_index = 1")
        for step in ("1", "2"):
            await connection.execute(insert("outgoing_calls", ACTION | {"step_index": step}))
        assert await connection.fetchval("SELECT count(*) FROM outgoing_calls WHERE due_at IS NOT NULL") == 3
        with pytest.raises(asyncpg.ExclusionViolationError):
            await connection.execute("UPDATE outgoing_calls SET due_at = now()")
