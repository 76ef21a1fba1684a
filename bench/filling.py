"""Fill a database with many sessions: a few made through the service, multiplied by SQL. Must not make what the service could not have.

Copies differ in their names alone, and each has a journal whose hashes are its own (docs/reference/journal-format.md), so that they verify.
"""

from bench.stage import Endpoint, Stage, Tenant

PATTERNS = 10  # sessions made through the service
STEPS = 10
CONNECTIONS = 8
PREFIX = "pattern"
# Every table with rows of a session, parents first.
TABLES = ("sessions", "effect_log", "undo_stack")

# No triggers, of foreign keys neither: what is copied is known to fit.
BEGIN_SQL = """
SET session_replication_role = replica;
CREATE FUNCTION pg_temp.part(text) RETURNS bytea
    LANGUAGE sql IMMUTABLE
    RETURN int4send(octet_length(convert_to($1, 'UTF8'))) || convert_to($1, 'UTF8');
CREATE TEMP TABLE copies AS
SELECT s.session_id AS pattern, s.session_id || '-' || n AS copy
FROM sessions AS s, generate_series(1, {copies}) AS n
WHERE s.session_id LIKE 'pattern-%';
CREATE TEMP TABLE heads AS
SELECT pattern, copy, pg_temp.part(copy) AS name, decode(repeat('00', 32), 'hex') AS hash
FROM copies;
"""

# A column of all but the session's name; whatever a later schema adds is copied as it is.
COLUMNS_SQL = """
SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum)
FROM pg_attribute
WHERE attrelid = '{table}'::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = '' AND attname <> 'session_id'
"""

COPY_SQL = """
INSERT INTO {table} (session_id, {columns})
SELECT c.copy, {columns}
FROM {table} AS t
JOIN copies AS c ON c.pattern = t.session_id;
"""

# One entry of every copy: its hash is over the copy's name and the hash before it; what copies share of it is put together once.
JOURNAL_SQL = """
CREATE TEMP TABLE entries AS
WITH shared AS MATERIALIZED (
    SELECT
        j.*,
        pg_temp.part('countermand.journal.v1') || pg_temp.part(j.org) AS before_name,
        pg_temp.part(j.seq::text) || pg_temp.part(j.kind::text) || pg_temp.part(coalesce(j.step::text, '')) || pg_temp.part(j.actor)
            || pg_temp.part(j.at) || int4send(octet_length(j.body)) || j.body AS after_name
    FROM journal AS j
    WHERE j.seq = {seq}
)
SELECT
    j.org, h.copy AS session_id, j.seq, j.kind, j.step, j.actor, j.at, j.body, j.content, h.hash AS prev_hash,
    sha256(j.before_name || h.name || j.after_name || int4send(64) || convert_to(encode(h.hash, 'hex'), 'UTF8')) AS hash
FROM shared AS j
JOIN heads AS h ON h.pattern = j.session_id;
INSERT INTO journal (org, session_id, seq, kind, step, actor, at, body, content, prev_hash, hash)
SELECT org, session_id, seq, kind, step, actor, at, body, content, prev_hash, hash
FROM entries;
UPDATE heads SET hash = e.hash
FROM entries AS e
WHERE e.session_id = copy;
DROP TABLE entries;
"""

END_SQL = """
UPDATE sessions SET journal_hash = h.hash
FROM heads AS h
WHERE session_id = h.copy;
"""
LONGEST_SQL = "SELECT max(seq) FROM journal"


def fill(stage: Stage, tenant: Tenant, endpoint: Endpoint, number: int) -> list[str]:
    """Bring a new database to so many active sessions, a multiple of `PATTERNS`, of `STEPS` committed effects each, and name the copies."""
    copies = number // PATTERNS - 1
    with stage.part():
        service = stage.service(tenant, "--no-orchestrator")
        agents = stage.agents(service, tenant, endpoint, PREFIX)
        patterns: list[str] = agents.ask("prepare", sessions=PATTERNS, steps=STEPS, connections=CONNECTIONS)
    columns = {table: stage.value(tenant.database_url, COLUMNS_SQL.format(table=table)) for table in TABLES}
    longest = stage.value(tenant.database_url, LONGEST_SQL)
    stage.execute(
        tenant.database_url,
        "".join(
            [
                BEGIN_SQL.format(copies=copies),
                *(COPY_SQL.format(table=table, columns=columns[table]) for table in TABLES),
                *(JOURNAL_SQL.format(seq=seq) for seq in range(1, longest + 1)),
                END_SQL,
            ]
        ),
    )
    stage.execute(tenant.database_url, "VACUUM ANALYZE")
    return [f"{pattern}-{copy}" for pattern in patterns for copy in range(1, copies + 1)]
