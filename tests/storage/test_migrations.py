"""What migrations do to the rows that are there, run by an owner whom row-level security binds. Must not test an empty schema."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import pytest

from app.cli.migrating import downgrade, migrate
from app.domain.model import ApprovalState, CallKind, EffectState, SessionId, SessionState
from app.storage import sessions, views
from app.storage.database import open_database
from app.storage.sessions import Wanted
from app.storage.views import SessionFilter
from tests.conftest import execute, with_database
from tests.factories import owner_connection
from tests.probes import claim_due
from tests.storage.acts import ACME, BETA, LEASE, agent_of
from tests.storage.dumping import dump_schema

TABLES = ("sessions", "effect_log", "approvals", "undo_stack", "outgoing_calls", "journal")
PARKED, CANCELLED, HALTED, UNWINDING = (SessionId(name) for name in ("parked", "cancelled", "halted", "unwinding"))

# What a service at revision 0002 may have left, in two orgs under the same names: a call that waits for a person, one whose question
# ended with its session, a session that a person owns, one whose undo is due, and an empty one.
ROWS_AT_0002_SQL = """
INSERT INTO sessions (
  org, session_id, owner, agent, metadata, state, halt_reason, clean, pivoted, late_effect, last_step, idle_seconds, created_at, updated_at,
  active_at, version, revision, journal_seq, journal_hash, journal_at
)
SELECT
  org, session_id, 'robot-1', 'robot', '{}', state::session_state, halt_reason::halt_reason, true, false, false, 1, 600, moment,
  moment + interval '7 s', moment + interval '7 s', 1, 1, 1, decode(repeat('00', 32), 'hex'), moment
FROM
  unnest(ARRAY['acme', 'beta']) AS org,
  clock_timestamp() AS moment,
  (
    VALUES
      ('parked', 'awaiting_approval', NULL),
      ('cancelled', 'compensated', NULL),
      ('halted', 'halted', 'compensation_failed'),
      ('unwinding', 'failed', NULL),
      ('untouched', 'active', NULL)
  ) AS kinds (session_id, state, halt_reason);

INSERT INTO effect_log (
  org, session_id, step_index, effect_id, tool, reversibility, state, outcome, payload, payload_sha256, request_sha256, attempt,
  registered_at, executed_at, version
)
SELECT
  org, session_id, 1, gen_random_uuid(), 'issue_credit', reversibility::reversibility, effect_state::effect_state, outcome::outcome, '{}',
  journal_hash, journal_hash, 1, created_at, CASE outcome WHEN 'committed' THEN created_at END, 1
FROM sessions
JOIN (
  VALUES
    ('parked', 'irreversible', 'awaiting_approval', NULL),
    ('cancelled', 'irreversible', 'cancelled', NULL),
    ('halted', 'compensatable', 'compensation_failed', 'committed'),
    ('unwinding', 'compensatable', 'committed', 'committed')
) AS kinds (session_id, reversibility, effect_state, outcome) USING (session_id);

INSERT INTO approvals (org, session_id, step_index, requested_by, requested_at, expires_at)
SELECT org, session_id, step_index, 'robot-1', registered_at, registered_at + interval '2 h'
FROM effect_log
WHERE reversibility = 'irreversible';

INSERT INTO undo_stack (org, session_id, stack_position, undo_id, state, compensation, by_hand, registered_at)
SELECT
  org, session_id, step_index, gen_random_uuid(), CASE session_id WHEN 'halted' THEN 'failed' ELSE 'pending' END::undo_state,
  convert_to(
    '{"url":"https://ledger.example/undo","args":{},"description":"","unknown":null,"on_unknown":"compensate","independent":false,'
    || '"max_retries":3,"initial_interval_ms":100,"multiplier":2,"max_interval_ms":5000,"timeout_ms":10000,"deadline_ms":86400000,'
    || '"retry_on":[],"compensated_on":[]}', 'UTF8'
  ),
  false, registered_at
FROM effect_log
WHERE reversibility = 'compensatable';

INSERT INTO outgoing_calls (
  org, session_id, call_id, step_index, destination, url, body, outcome, attempts, failures, interrupted, polls, is_attempt_open,
  may_be_processing, last_status, due_at, first_sent_at, deadline_at, epoch
)
SELECT
  org, session_id, undo_id, stack_position, 'ledger.example:443', 'https://ledger.example/undo', '{}', 'committed', 1, 1, 0, 0, false,
  false, 400, CASE session_id WHEN 'unwinding' THEN registered_at END, registered_at, registered_at + interval '1 day', 1
FROM undo_stack;

INSERT INTO journal (org, session_id, seq, kind, actor, at, body, prev_hash, hash)
SELECT org, session_id, 1, 'OPENED', 'agent:robot-1', '2026-01-02T03:04:05.000006Z', '{}', journal_hash, journal_hash
FROM sessions;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A database at revision 0002 with rows; `url` is its owner's, who is no superuser, `superuser_url` looks past row-level security."""

    url: str
    superuser_url: str


@pytest.fixture
def owned(cluster_url: str, template: str) -> Iterator[Owned]:
    """Make a database and an owner for it who may make roles and nothing else; the roles of the schema are there already."""
    assert template, "the roles belong to the cluster"
    name = f"owned_{uuid4().hex}"
    asyncio.run(execute(cluster_url, f"CREATE ROLE {name} LOGIN CREATEROLE NOSUPERUSER NOBYPASSRLS"))
    asyncio.run(execute(cluster_url, f"GRANT countermand_runtime, countermand_dispatcher, countermand_pruner TO {name} WITH ADMIN OPTION"))
    asyncio.run(execute(cluster_url, f"CREATE DATABASE {name} OWNER {name}"))
    superuser_url = with_database(cluster_url, name)
    parts = urlsplit(superuser_url)
    url = urlunsplit(parts._replace(netloc=f"{name}@{parts.netloc.rpartition('@')[2]}"))
    migrate(url, "0002")
    asyncio.run(execute(superuser_url, ROWS_AT_0002_SQL))
    yield Owned(url=url, superuser_url=superuser_url)
    asyncio.run(execute(cluster_url, f"DROP DATABASE {name} WITH (FORCE)"))
    asyncio.run(execute(cluster_url, f"DROP ROLE {name}"))


def rows_of(url: str) -> dict[str, list[dict[str, Any]]]:
    """Return every row of every org, past row-level security."""

    async def read() -> dict[str, list[dict[str, Any]]]:
        async with owner_connection(url) as connection:
            return {
                table: [dict(row) for row in await connection.fetch(f"SELECT * FROM {table} ORDER BY org, session_id")] for table in TABLES
            }

    return asyncio.run(read())


def test_new_columns_are_filled_for_every_org_when_the_owner_is_no_superuser(owned: Owned) -> None:
    """Forced row-level security would blind the owner to all rows: each org's are filled all the same, and nothing else is touched."""
    before = rows_of(owned.superuser_url)
    assert {row["org"] for table in TABLES for row in before[table]} == {"acme", "beta"}
    migrate(owned.url, "0003")
    after = rows_of(owned.superuser_url)
    for table in TABLES:
        assert [{name: row[name] for name in old} for old, row in zip(before[table], after[table], strict=True)] == before[table]
    told = {(row["org"], row["session_id"]): (row["state"], row["ttl_seconds"], row["is_continued"]) for row in after["approvals"]}
    assert told == {
        (org, session_id): (state, 7_200, False)
        for org in ("acme", "beta")
        for session_id, state in ((PARKED, "pending"), (CANCELLED, "cancelled"))
    }
    assert {name for row in after["approvals"] for name, value in row.items() if value is None} == {
        "decided_at", "decided_by", "claimed_approver", "reason", "released_at", "released_to", "release_key",
    }  # fmt: skip
    assert [row["kind"] for row in after["outgoing_calls"]] == ["undo"] * 4
    for row in after["sessions"]:
        assert row["halted_at"] == (row["updated_at"] if row["session_id"] == HALTED else None)
        assert row["halt_ordered"] is False


def test_storage_reads_what_the_older_service_left_when_it_was_migrated(owned: Owned) -> None:
    """Parked calls can be decided, halted sessions can be ordered on, and the undo that was due is claimed: by each org for itself."""
    migrate(owned.url)

    async def read() -> None:
        async with open_database(owned.url, size=1, application_name="tests") as database:
            async with database.dispatch() as connection:
                claimed = await claim_due(connection, LEASE)
            assert {(claim.org, claim.session_id, claim.kind) for claim in claimed} == {
                (org, UNWINDING, CallKind.UNDO) for org in (ACME, BETA)
            }
            for org in (ACME, BETA):
                async with database.transaction(org) as tx:
                    parked = await sessions.lock(tx, PARKED, Wanted(open=True))
                    assert parked is not None
                    (found,) = parked.effects
                    assert found.approval is not None
                    assert (found.effect.state, found.approval.state) == (EffectState.AWAITING_APPROVAL, ApprovalState.PENDING)
                    (waiting,) = await views.approvals(tx, ApprovalState.PENDING, None, 10)
                    assert waiting.session_id == PARKED
                    (halted,) = await views.halted(tx, None, None, 10)
                    assert halted.session.session_id == HALTED
                    listed = await views.sessions(tx, agent_of(org), SessionFilter(state=SessionState.HALTED), None, 10)
                    assert [session.halted_at for session in listed] == [halted.session.updated_at]

    asyncio.run(read())


def test_schema_and_rows_are_the_old_ones_when_it_goes_back(owned: Owned) -> None:
    """A deployment that goes back finds what it had, and may come again."""
    schema, rows = dump_schema(owned.superuser_url), rows_of(owned.superuser_url)
    migrate(owned.url, "0003")
    newer = dump_schema(owned.superuser_url), rows_of(owned.superuser_url)
    downgrade(owned.url, "0002")
    assert dump_schema(owned.superuser_url) == schema
    assert rows_of(owned.superuser_url) == rows
    migrate(owned.url, "0003")
    assert (dump_schema(owned.superuser_url), rows_of(owned.superuser_url)) == newer


ACTION_SQL = """
INSERT INTO outgoing_calls (
  org, session_id, call_id, kind, step_index, destination, url, body, attempts, failures, interrupted, polls, is_attempt_open,
  may_be_processing, due_at, first_sent_at, deadline_at, epoch
)
SELECT
  org, session_id, effect_id, 'action', step_index, 'a.example:443', %s, %s, %s, 0, 0, 0, false, false, registered_at, %s, registered_at, 0
FROM effect_log
WHERE org = 'beta' AND session_id = 'parked'
"""


@pytest.mark.parametrize(
    "sent",
    [("NULL", "NULL", "0", "NULL"), ("'https://a.example/'", "'{}'", "1", "registered_at")],
    ids=["unsent", "sent"],
)
def test_going_back_is_refused_when_the_service_executes_calls_itself(owned: Owned, sent: tuple[str, ...]) -> None:
    """The older service would take an action for an undo: the database stays as it is."""
    migrate(owned.url, "0003")
    asyncio.run(execute(owned.superuser_url, ACTION_SQL % sent))
    schema, rows = dump_schema(owned.superuser_url), rows_of(owned.superuser_url)
    with pytest.raises(Exception, match="outgoing_calls_only_undos"):
        downgrade(owned.url, "0002")
    assert (dump_schema(owned.superuser_url), rows_of(owned.superuser_url)) == (schema, rows)
