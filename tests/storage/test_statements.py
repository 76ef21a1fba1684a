"""Every statement of storage is one the database knows, may be run by its role, and finds rows by index. Must not test what it returns."""

import importlib
import json
import pkgutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest

import app.storage
from app.storage.database import Connection, Database
from tests.factories import owner_connection
from tests.storage.acts import ACME

# Statements that run as the dispatcher, over all orgs, or as the pruner; all others run as the runtime role, within one org.
DISPATCHERS = {
    "LOOK_SQL",
    "PICK_DUE_SQL",
    "PICK_LATE_SQL",
    "PICK_PROBES_SQL",
    "LEASE_SQL",
    "DROP_IDLE_SQL",
    "OPEN_CIRCUITS_SQL",
    "PAUSES_SQL",
    "PAUSE_EVERYTHING_SQL",
    "RESUME_EVERYTHING_SQL",
    "RENEW_SQL",
    "RELEASE_SQL",
    "FIND_KEY_SQL",
    "OVERDUE_SQL",
    "OPEN_SESSIONS_SQL",
    "OPEN_CALLS_SQL",
    "FIRST_EXPIRY_SQL",
}
PRUNERS = {"ORGS_SQL", "PRUNABLE_SQL", "DELETE_SESSIONS_SQL", "DELETE_JOURNAL_SQL", "COUNT_PAST_SQL"}
# Not a query: nothing to explain.
UTILITY = {"BECOME_DISPATCHER_SQL"}  # of older code


@asynccontextmanager
async def as_its_role(database: Database, name: str) -> AsyncIterator[Connection]:
    """Begin a transaction as the role that a statement is run by."""
    if name in DISPATCHERS:
        async with database.dispatch() as connection:
            yield connection
    elif name in PRUNERS:
        async with database.prune(ACME) as connection:
            yield connection
    else:
        async with database.transaction(ACME) as tx:
            yield tx.connection


def statements() -> dict[str, str]:
    """Return every statement that storage holds, by name."""
    found: dict[str, str] = {}
    for module in pkgutil.walk_packages(app.storage.__path__, "app.storage."):
        members = vars(importlib.import_module(module.name))
        found |= {name: text for name, text in members.items() if name.endswith("_SQL") and isinstance(text, str)}
    return found


def test_statements_are_found_when_storage_is_searched() -> None:
    """The search sees what is there: an empty search would let every test below pass."""
    assert len(statements()) >= 15
    assert statements().keys() >= DISPATCHERS | PRUNERS


@pytest.mark.parametrize("name", sorted(statements()))
async def test_statement_is_prepared_and_allowed_when_its_role_runs_it(database: Database, name: str) -> None:
    """A wrong column, type or privilege is found here and not by a caller; EXPLAIN asks for the privileges without running anything."""
    async with as_its_role(database, name) as connection:
        await check(connection, name, statements()[name])


async def check(connection: Connection, name: str, text: str) -> None:
    """Prepare a statement, and explain it with NULL for every parameter."""
    if name in UTILITY:
        await connection.execute(text)
        return
    prepared = await connection.prepare(text)
    await connection.fetch(f"EXPLAIN {text}", *(None for _ in prepared.get_parameters()))


# Many sessions of three steps, and one, run-7, that is long: what is read for one step must not grow with its session.
SEED_SQL = """
INSERT INTO sessions (
  org, session_id, owner, agent, metadata, state, halt_reason, clean, pivoted, late_effect, last_step, halted_at, halt_ordered, created_at,
  updated_at, active_at, version, revision, journal_seq, journal_hash, journal_at
)
SELECT
  org, 'run-' || run, 'robot-1', 'robot', '{}',
  CASE WHEN run % 50 = 0 THEN 'halted'::session_state WHEN run % 50 = 1 THEN 'active' ELSE 'compensating' END,
  CASE WHEN run % 50 = 0 THEN 'operator'::halt_reason END,
  true, false, false, CASE WHEN run = 7 THEN 300 ELSE 3 END, CASE WHEN run % 50 = 0 THEN now() - run * interval '1 s' END, false,
  now() - run * interval '1 s', now(), now(), 1, 1, 3, decode(repeat('00', 32), 'hex'), now()
FROM unnest(ARRAY['acme', 'beta']) AS org, generate_series(1, 2000) AS run;

-- Most sessions have ended.
INSERT INTO sessions (
  org, session_id, owner, agent, metadata, state, clean, pivoted, late_effect, last_step, halt_ordered, created_at, updated_at, active_at,
  version, revision, journal_seq, journal_hash, journal_at
)
SELECT
  org, 'ended-' || run, 'robot-1', 'robot', '{}', 'completed', true, false, false, 0, false, now() - run * interval '1 s', now(), now(), 1,
  1, 3, decode(repeat('00', 32), 'hex'), now()
FROM unnest(ARRAY['acme', 'beta']) AS org, generate_series(1, 20000) AS run;

INSERT INTO effect_log (
  org, session_id, step_index, effect_id, tool, reversibility, state, outcome, payload, payload_sha256, request_key, request_sha256,
  attempt, registered_at, executed_at, version
)
SELECT
  s.org, s.session_id, step, gen_random_uuid(), 'issue_credit', 'compensatable', 'committed', 'committed', '{}', s.journal_hash,
  'key-' || step, s.journal_hash, 1, now(), now(), 1
FROM sessions AS s, generate_series(1, s.last_step) AS step;

INSERT INTO approvals (
  org, session_id, step_index, state, requested_by, requested_at, expires_at, ttl_seconds, decided_at, decided_by, is_continued,
  released_at, released_to
)
SELECT
  org, session_id, step_index, CASE WHEN is_open THEN 'pending' ELSE 'released' END::approval_state, 'robot-1', registered_at,
  registered_at + interval '1 h', 3600, CASE WHEN NOT is_open THEN registered_at END, CASE WHEN NOT is_open THEN 'boss-1' END, false,
  CASE WHEN NOT is_open THEN registered_at END, CASE WHEN NOT is_open THEN 'boss-1' END
FROM effect_log, LATERAL (SELECT step_index = 3 AND session_id LIKE '%7') AS question (is_open);

INSERT INTO remembered_answers (org, session_id, subject, request, request_key, request_sha256, status, body)
SELECT org, session_id, 'robot-1', 'POST /v1/x', 'key-' || step_index, payload_sha256, 200, '{}' FROM effect_log;

INSERT INTO undo_stack (org, session_id, stack_position, undo_id, state, compensation, by_hand, registered_at)
SELECT org, session_id, step_index, gen_random_uuid(), 'pending', '{}', false, now() FROM effect_log;

INSERT INTO outgoing_calls (
  org, session_id, call_id, kind, step_index, destination, attempts, failures, interrupted, polls, is_attempt_open, may_be_processing,
  due_at, deadline_at, epoch
)
SELECT
  org, session_id, undo_id, 'undo', stack_position, 'a.example:443', 0, 0, 0, 0, false, false,
  CASE WHEN stack_position = 3 AND session_id LIKE '%7' THEN now() - interval '1 s' END, now(), 0
FROM undo_stack;

-- Of what is due, most waits for a destination that is away, some for one that is paused.
UPDATE outgoing_calls
SET
  destination = CASE WHEN session_id LIKE '%17' THEN 'paused.example:443' ELSE 'away.example:443' END,
  due_at = now() - interval '2 s', deadline_at = now() + interval '1 day'
WHERE step_index = 2 AND session_id NOT LIKE '%7' OR step_index = 3 AND session_id LIKE '%17';

INSERT INTO circuits (org, destination, probe_at, probes, last_error)
SELECT org, 'away.example:443', now() + interval '1 min', 3, 'http 503' FROM unnest(ARRAY['acme', 'beta']) AS org;

INSERT INTO orgs (org) VALUES ('acme'), ('beta');
INSERT INTO pauses (org, destination, paused_by, reason)
SELECT org, 'paused.example:443', 'operator:o', 'r' FROM unnest(ARRAY['acme', 'beta']) AS org;

INSERT INTO journal (org, session_id, seq, kind, step, actor, at, body, prev_hash, hash)
SELECT
  s.org, s.session_id, 3 * step + place, kind, step, 'agent:robot-1', '2026-01-02T03:04:05.000006Z', '{}', s.journal_hash, s.journal_hash
FROM
  sessions AS s,
  generate_series(1, s.last_step) AS step,
  unnest(ARRAY['AWAITING_APPROVAL', 'APPROVED', 'INTENT']::entry_kind[]) WITH ORDINALITY AS told (kind, place);
"""
RUN_7 = "'acme', 'run-7'"
CALL = "(SELECT call_id FROM outgoing_calls WHERE org = 'acme' AND session_id = 'run-7' AND step_index = 3)"
# What a write puts where it is already: one row of each table, as decisions leave them.
ROWS_SQL = """
SELECT array_to_string(
  ARRAY(
    SELECT quote_literal(ARRAY[ROW(
      s.session_id, s.owner, s.agent, s.metadata, s.state, s.halt_reason, s.clean, s.pivoted, s.late_effect, s.last_step, s.idle_seconds,
      s.deadline_at, s.failed_at, s.halted_at, s.halt_ordered, s.created_at, s.updated_at, s.active_at, s.version, s.revision + 1,
      s.journal_seq, s.journal_hash, s.journal_at
    )::session_written]::text)
    FROM sessions AS s WHERE s.org = 'acme' AND s.session_id = 'run-7'
    UNION ALL
    SELECT quote_literal(ARRAY[ROW(
      e.session_id, e.step_index, e.effect_id, e.tool, e.tool_version, e.reversibility, e.state, e.outcome, e.payload, e.payload_sha256,
      e.result, e.error, e.request_key, e.request_sha256, e.attempt, e.traceparent, e.registered_at, e.executed_at, e.version + 1
    )::effect_written]::text)
    FROM effect_log AS e WHERE e.org = 'acme' AND e.session_id = 'run-7' AND e.step_index = 3
    UNION ALL
    SELECT quote_literal(ARRAY[ROW(
      a.session_id, a.step_index, a.state, a.requested_by, a.requested_at, a.expires_at, a.ttl_seconds, a.decided_at, a.decided_by,
      a.claimed_approver, a.reason, a.is_continued, a.released_at, a.released_to, a.release_key
    )::approval_written]::text)
    FROM approvals AS a WHERE a.org = 'acme' AND a.session_id = 'run-7' AND a.step_index = 3
    UNION ALL
    SELECT quote_literal(ARRAY[ROW(
      u.session_id, u.stack_position, u.undo_id, u.state, u.compensation, u.by_hand, u.registered_at, u.compensated_at
    )::undo_written]::text)
    FROM undo_stack AS u WHERE u.org = 'acme' AND u.session_id = 'run-7' AND u.stack_position = 3
    UNION ALL
    SELECT quote_literal(ARRAY[ROW(
      c.session_id, c.call_id, c.kind, c.step_index, c.destination, c.url, c.body, c.outcome, c.attempts, c.failures, c.interrupted,
      c.polls, c.is_attempt_open, c.may_be_processing, c.poll_url, c.last_status, c.last_error, c.due_at, c.first_sent_at, c.deadline_at,
      c.epoch
    )::call_written]::text)
    FROM outgoing_calls AS c WHERE c.org = 'acme' AND c.session_id = 'run-7' AND c.step_index = 3
  ),
  ', '
)
"""
NO_ROWS = ", ".join(["'{}'"] * 5)
WRITE = "'acme', NULL, NULL, %rows%, '{}', '{}', false"
# The hot statements: their role's parameters as SQL, and the indexes that may serve them.
HOT: dict[str, tuple[str, set[str]]] = {
    "LOCK_SQL": (
        f"{RUN_7}, 3, 'key-3', true, true, true, true, 'issue_credit', true",
        {"sessions_pkey", "effect_log_pkey", "effect_log_by_request_key", "undo_stack_pkey", "approvals_pkey", "tools_pkey"},
    ),
    "LOCK_CALL_SQL": (
        f"{RUN_7}, '%call%'",
        {"sessions_pkey", "effect_log_pkey", "undo_stack_pkey", "outgoing_calls_pkey", "tools_pkey"},
    ),
    "LOCK_UNDOS_SQL": (
        "'acme', '{run-7,run-9}', '{%call%,%call%}'",
        {"sessions_pkey", "effect_log_pkey", "undo_stack_pkey", "outgoing_calls_pkey", "tools_pkey"},
    ),
    "WRITE_SQL": (WRITE, set()),
    "ALL_STEPS_SQL": ("'acme', '{run-9,run-11}', 33", {"effect_log_pkey", "undo_stack_pkey", "approvals_pkey"}),
    "LOCK_STEPS_SQL": (
        "'acme', '{\"(run-7,3,key-3,issue_credit)\",\"(run-9,2,key-2,issue_credit)\"}'",
        {"sessions_pkey", "effect_log_pkey", "effect_log_by_request_key", "undo_stack_pkey", "approvals_pkey", "tools_pkey"},
    ),
    "FIND_ANSWERS_SQL": (
        "'acme', '{run-7,run-9}', '{robot-1,robot-1}', '{POST /v1/x,POST /v1/x}', '{key-3,key-2}'",
        {"remembered_answers_pkey"},
    ),
    "LOCK_CALLS_SQL": (f"{RUN_7}, '{{%call%}}'", {"outgoing_calls_pkey", "outgoing_calls_by_step"}),
    "POSITION_SQL": (f"{RUN_7}, '%call%'", {"undo_stack_pkey"}),
    "APPROVED_SQL": (f"{RUN_7}, 3", {"journal_decisions", "sessions_pkey", "journal_pkey"}),
    "OVERDUE_SQL": ("100", {"sessions_active", "approvals_expiring"}),
    "OPEN_SESSIONS_SQL": ("", {"sessions_open"}),
    "OPEN_CALLS_SQL": ("20, 'other'", {"outgoing_calls_due", "outgoing_calls_ending"}),
    "FIRST_EXPIRY_SQL": ("", {"approvals_expiring"}),
    "LOOK_SQL": ("'', '', 200, 16", {"outgoing_calls_due", "outgoing_calls_pkey", "circuits_pkey", "pauses_once"}),
    "PICK_DUE_SQL": ("'{acme}', '{a.example:443}', '{10}'", {"outgoing_calls_due"}),
    "PICK_LATE_SQL": ("10", {"outgoing_calls_ending"}),
    "PICK_PROBES_SQL": ("'{acme}', '{away.example:443}', '{3}', '{2}'", {"outgoing_calls_due", "circuits_pkey"}),
    "LEASE_SQL": ("'{acme}', '{run-7}', '{%call%}', '{1}', 'worker-1', 30", {"outgoing_calls_pkey"}),
    "DROP_IDLE_SQL": ("", {"outgoing_calls_due"}),
    "DESTINATIONS_SQL": ("'acme', '', 50", {"outgoing_calls_due", "circuits_pkey", "pauses_once"}),
    "RENEW_SQL": ("'{acme}', '{run-7}', '{%call%}', '{1}', 30", {"outgoing_calls_pkey"}),
    "RELEASE_SQL": ("'{acme}', '{run-7}', '{%call%}', '{1}'", {"outgoing_calls_pkey"}),
    "GIVE_BACK_SQL": (f"{RUN_7}, 'worker-1', '%call%', 1", {"outgoing_calls_pkey", "outgoing_calls_by_step"}),
    "READ_JOURNAL_SQL": (f"{RUN_7}, 1, 500", {"journal_pkey"}),
    "SESSION_SQL": (RUN_7, {"sessions_pkey"}),
    "COUNT_CRASH_SQL": (f"{RUN_7}, '%call%', 1, 'it broke', 60", {"outgoing_calls_pkey"}),
    "OPEN_STEPS_SQL": (
        f"{RUN_7}, '{{executing}}'",
        {"effect_log_pkey", "undo_stack_pkey", "outgoing_calls_pkey", "effect_log_by_request_key", "outgoing_calls_by_step"},
    ),
    "PUT_DOWN_SQL": (
        f"{RUN_7}, '{{3}}', '{{executing}}', '{{unknown}}', '{{unknown}}'",
        {"effect_log_pkey", "undo_stack_pkey", "approvals_pkey", "outgoing_calls_pkey", "outgoing_calls_by_step"},
    ),
    "PRUNABLE_SQL": ("'acme', 30, 100", {"sessions_prunable", "remembered_answers_pkey"}),
    "STEPS_SQL": (
        f"{RUN_7}, 3, 3, 100",
        {"effect_log_pkey", "approvals_pkey", "undo_stack_pkey", "outgoing_calls_by_step"},
    ),
    "APPROVALS_SQL": (
        "'acme', 'pending', NULL, NULL, NULL, 5",
        {"approvals_open", "approvals_by_age", "sessions_pkey", "effect_log_pkey", "tools_pkey"},
    ),
    "HALTED_SQL": ("'acme', NULL, NULL, NULL, 5", {"sessions_halted"}),
    "HALT_COUNTS_SQL": ("'acme'", {"sessions_halted"}),
    "DECISIONS_SQL": (f"{RUN_7}, '{{HALTED,APPROVED}}', 5", {"journal_pkey", "journal_decisions"}),
    "SESSIONS_SQL": ("'acme', NULL, NULL, NULL, NULL, NULL, NULL, 50", {"sessions_by_age", "sessions_pkey", "effect_log_pkey"}),
}
# Which of a list's filters are given decides its plan: for its values alone.
PLANNED_FOR_VALUES_ONLY = {"SESSIONS_SQL"}
BIG_TABLES = {"sessions", "effect_log", "approvals", "undo_stack", "outgoing_calls", "journal"}
# Those that want a few rows, whatever else their session, or their org, has.
FEW = {
    name: HOT[name][0]
    for name in (
        "LOCK_CALL_SQL",
        "LOCK_UNDOS_SQL",
        "LOCK_STEPS_SQL",
        "ALL_STEPS_SQL",
        "FIND_ANSWERS_SQL",
        "WRITE_SQL",
        "APPROVED_SQL",
        "SESSION_SQL",
        "STEPS_SQL",
        "APPROVALS_SQL",
        "HALTED_SQL",
    )
} | {"LOCK_SQL": f"{RUN_7}, 3, 'key-3', false, true, false, false, 'issue_credit', false"}
# Those that want a few rows, whatever waits at destinations that are held.
BLOCKED = {
    "LOOK_SQL": "'', '', 200, 3",
    "PICK_DUE_SQL": "'{acme,beta}', '{a.example:443,a.example:443}', '{3,3}'",
    "PICK_LATE_SQL": "5",
}
MOST_ROWS_READ = 40  # by all of a statement's scans together; run-7 has 300 steps, the org 2,000 sessions and 6,000 questions


def scans(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how each table of a plan is read: its name with the index, or with `Seq Scan`."""
    if plan["Node Type"] == "Seq Scan":
        yield plan["Relation Name"], "Seq Scan"
    elif "Index Name" in plan:
        yield plan.get("Relation Name", plan["Index Name"]), plan["Index Name"]
    if plan.get("One-Time Filter") == "false":  # what is below is never executed
        return
    for inner in plan.get("Plans", ()):
        yield from scans(inner)


def rows_read(plan: dict[str, Any]) -> float:
    """Return how many rows all scans of an executed plan have looked at, those that a filter or a join threw away included."""
    own = plan["Actual Rows"] if "Relation Name" in plan or "Index Name" in plan else 0
    own += plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Join Filter", 0)
    read: float = own * plan["Actual Loops"]
    return read + sum(rows_read(inner) for inner in plan.get("Plans", ()))


async def explain(connection: Connection, name: str, values: str, mode: str, options: str = "FORMAT JSON") -> dict[str, Any]:
    """Plan a statement as the driver's prepared statements are planned."""
    await connection.execute(f"SET LOCAL plan_cache_mode = {mode}; PREPARE {name}_{mode} AS {statements()[name]}")
    plan = await explain_prepared(connection, f"{name}_{mode}", values, options)
    await connection.execute(f"DEALLOCATE {name}_{mode}")
    return plan


async def explain_prepared(connection: Connection, prepared: str, values: str, options: str) -> dict[str, Any]:
    """Return the plan of a statement that was prepared under a name."""
    told = await connection.fetchval(f"EXPLAIN ({options}) EXECUTE {prepared} {values and f'({values})'}")
    plan: dict[str, Any] = json.loads(told)[0]["Plan"]
    return plan


@dataclass(frozen=True)
class Filling:
    """What stands for `%call%` and `%rows%` in the values of a statement."""

    call_id: str
    rows: str

    def fill(self, values: str) -> str:
        """Put it there."""
        return values.replace("%call%", self.call_id).replace("%rows%", self.rows)


EMPTY = Filling(str(UUID(int=0)), NO_ROWS)


async def seed(database_url: str, *, is_analyzed: bool = True) -> Filling:
    """Fill the tables and return what is found there."""
    async with owner_connection(database_url) as owner:
        await owner.execute(f"{SEED_SQL} {'ANALYZE' if is_analyzed else ''}")
        return Filling(str(await owner.fetchval(f"SELECT {CALL}")), str(await owner.fetchval(ROWS_SQL)))


async def test_few_rows_are_read_when_their_session_or_their_org_has_many(database: Database, database_url: str) -> None:
    """An index that begins with the session is not enough: reading a long session once for each of its steps is quadratic."""
    found = await seed(database_url)
    for name, values in FEW.items():
        for mode in ("force_custom_plan", "force_generic_plan"):
            async with database.transaction(ACME) as tx:
                plan = await explain(tx.connection, name, found.fill(values), mode, "ANALYZE, FORMAT JSON")
            assert 0 < rows_read(plan) <= MOST_ROWS_READ, f"{name}, {mode}: {rows_read(plan)} rows"


async def test_few_rows_are_read_when_the_tables_have_grown_since_a_statement_was_planned(database: Database, database_url: str) -> None:
    """A service on a new database plans for empty tables, and its connections keep those plans until the statistics are renewed."""
    async with database.transaction(ACME) as tx:
        await tx.connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        for name, values in FEW.items():
            await tx.connection.execute(f"PREPARE {name} AS {statements()[name]}")
            await explain_prepared(tx.connection, name, EMPTY.fill(values), "FORMAT JSON")
        found = await seed(database_url, is_analyzed=False)
        for name, values in FEW.items():
            plan = await explain_prepared(tx.connection, name, found.fill(values), "ANALYZE, FORMAT JSON")
            assert 0 < rows_read(plan) <= MOST_ROWS_READ, f"{name}: {rows_read(plan)} rows"


async def test_hot_statements_use_their_indexes_when_the_tables_are_big(database: Database, database_url: str) -> None:
    """Thousands of sessions later every verb still reads a handful of rows, planned for its values or for any."""
    found = await seed(database_url)
    for name, (values, indexes) in HOT.items():
        modes = ["force_custom_plan"] if name in PLANNED_FOR_VALUES_ONLY else ["force_custom_plan", "force_generic_plan"]
        for mode in modes:
            filled = found.fill(values)
            async with as_its_role(database, name) as connection:
                plan = await explain(connection, name, filled, mode)
            used = set(scans(plan))
            assert not {table for table, how in used if how == "Seq Scan"} & BIG_TABLES, f"{name}, {mode}: {used}"
            assert {how for _, how in used if how != "Seq Scan"} <= indexes, f"{name}, {mode}: {used}"
            assert (name != "PICK_DUE_SQL") or ("outgoing_calls", "outgoing_calls_due") in used, f"{name}, {mode}: {used}"


async def test_blocked_calls_are_not_read_when_thousands_are_due(database: Database, database_url: str) -> None:
    """In an outage or a pause looking costs as much as there are destinations, and claiming as much as there is room."""
    await seed(database_url)
    for name, values in BLOCKED.items():
        for mode in ("force_custom_plan", "force_generic_plan"):
            async with database.dispatch() as connection:
                plan = await explain(connection, name, values, mode, "ANALYZE, FORMAT JSON")
            assert 0 < rows_read(plan) <= MOST_ROWS_READ, f"{name}, {mode}: {rows_read(plan)} rows"
