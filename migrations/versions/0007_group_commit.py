"""Group commit: shapes for writing many rows at once, no index on what always moves, a cheaper check. Must not be edited once released."""

from migrations.sql import run

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

# The shapes are the code's, not the tables': a later revision that adds columns adds shapes of its own and leaves these to older code.
UP_SQL = """
CREATE TYPE step_asked AS (session_id text, step_index integer, request_key text, tool text);
COMMENT ON TYPE step_asked IS 'A session to lock, with what is wanted of one step of it';

CREATE TYPE session_written AS (
  session_id text, owner text, agent text, metadata bytea, state session_state, halt_reason halt_reason, clean boolean, pivoted boolean,
  late_effect boolean, last_step integer, idle_seconds integer, deadline_at timestamptz, failed_at timestamptz, halted_at timestamptz,
  halt_ordered boolean, created_at timestamptz, updated_at timestamptz, active_at timestamptz, version bigint, revision bigint,
  journal_seq bigint, journal_hash bytea, journal_at timestamptz
);
COMMENT ON TYPE session_written IS 'A session as a decision left it';

CREATE TYPE effect_written AS (
  session_id text, step_index integer, effect_id uuid, tool text, tool_version integer, reversibility reversibility, state effect_state,
  outcome outcome, payload bytea, payload_sha256 bytea, result bytea, error text, request_key text, request_sha256 bytea, attempt integer,
  traceparent text, registered_at timestamptz, executed_at timestamptz, version bigint
);
COMMENT ON TYPE effect_written IS 'An effect as a decision made or left it';

CREATE TYPE approval_written AS (
  session_id text, step_index integer, state approval_state, requested_by text, requested_at timestamptz, expires_at timestamptz,
  ttl_seconds integer, decided_at timestamptz, decided_by text, claimed_approver text, reason text, is_continued boolean,
  released_at timestamptz, released_to text, release_key text
);
COMMENT ON TYPE approval_written IS 'A question to a person as a decision made or left it';

CREATE TYPE undo_written AS (
  session_id text, stack_position integer, undo_id uuid, state undo_state, compensation bytea, by_hand boolean, registered_at timestamptz,
  compensated_at timestamptz
);
COMMENT ON TYPE undo_written IS 'An undo entry as a decision made or left it';

CREATE TYPE call_written AS (
  session_id text, call_id uuid, kind call_kind, step_index integer, destination text, url text, body bytea, outcome outcome,
  attempts integer, failures integer, interrupted integer, polls integer, is_attempt_open boolean, may_be_processing boolean, poll_url text,
  last_status integer, last_error text, due_at timestamptz, first_sent_at timestamptz, deadline_at timestamptz, epoch bigint
);
COMMENT ON TYPE call_written IS 'An outgoing call as a decision made or left it; leases are written by the statement';

CREATE TYPE entry_written AS (
  session_id text, seq bigint, kind entry_kind, step integer, actor text, at text, body bytea, content bytea, prev_hash bytea, hash bytea
);
COMMENT ON TYPE entry_written IS 'A journal entry of a decision';

-- `active_at` moves with every write of a session: as long as an index held it, no update could stay on its page.
DROP INDEX sessions_prunable;
CREATE INDEX sessions_prunable ON sessions (org, created_at, session_id)
  WHERE state = 'completed' OR (state = 'compensated' AND clean);

-- The same names as before. A repetition with a bound costs Postgres a state for each character of every name that it checks.
ALTER TABLE sessions
  DROP CONSTRAINT sessions_session_id_check,
  ADD CONSTRAINT sessions_session_id_check CHECK (length(session_id) <= 200 AND session_id ~ '^[A-Za-z0-9._:-]+$');

-- Nothing is taken away: the code of before goes on meanwhile.
UPDATE schema_support SET oldest_revision = '0004';
"""

DOWN_SQL = """
ALTER TABLE sessions
  DROP CONSTRAINT sessions_session_id_check,
  ADD CONSTRAINT sessions_session_id_check CHECK (session_id ~ '^[A-Za-z0-9._:-]{1,200}$');
DROP INDEX sessions_prunable;
CREATE INDEX sessions_prunable ON sessions (org, active_at, session_id)
  WHERE state = 'completed' OR (state = 'compensated' AND clean);
DROP TYPE entry_written;
DROP TYPE call_written;
DROP TYPE undo_written;
DROP TYPE approval_written;
DROP TYPE effect_written;
DROP TYPE session_written;
DROP TYPE step_asked;
UPDATE schema_support SET oldest_revision = '0004';
"""


def upgrade() -> None:
    """Move the schema up."""
    run(UP_SQL)


def downgrade() -> None:
    """Move the schema back."""
    run(DOWN_SQL)
