"""Approvals, actions, operators: decisions and releases, service-executed calls, halts. Must not be edited once released."""

from migrations.sql import run

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

UP_SQL = """
-- The owner fills the new columns of every org's rows, to which row-level security would blind it.
ALTER TABLE approvals NO FORCE ROW LEVEL SECURITY;
ALTER TABLE effect_log NO FORCE ROW LEVEL SECURITY;
ALTER TABLE sessions NO FORCE ROW LEVEL SECURITY;

CREATE TYPE approval_state AS ENUM ('pending', 'approved', 'released', 'rejected', 'expired', 'cancelled', 'mismatched');
CREATE TYPE call_kind AS ENUM ('undo', 'action');

ALTER TABLE approvals
  ADD COLUMN state approval_state,
  ADD COLUMN ttl_seconds integer CHECK (ttl_seconds > 0),
  ADD COLUMN decided_at timestamptz CHECK (decided_at >= requested_at),
  ADD COLUMN decided_by text CHECK (decided_by <> requested_by),
  ADD COLUMN claimed_approver text,
  ADD COLUMN reason text,
  ADD COLUMN is_continued boolean,
  ADD COLUMN released_at timestamptz CHECK (released_at >= decided_at AND released_at < expires_at),
  ADD COLUMN released_to text,
  ADD COLUMN release_key text CHECK (length(release_key) BETWEEN 1 AND 300);
UPDATE approvals AS a
SET
  ttl_seconds = greatest(1, extract(epoch FROM a.expires_at - a.requested_at)::integer),
  is_continued = false,
  state = CASE e.state WHEN 'awaiting_approval' THEN 'pending' ELSE 'cancelled' END::approval_state
FROM effect_log AS e
WHERE e.org = a.org AND e.session_id = a.session_id AND e.step_index = a.step_index;
ALTER TABLE approvals
  ALTER COLUMN state SET NOT NULL,
  ALTER COLUMN ttl_seconds SET NOT NULL,
  ALTER COLUMN is_continued SET NOT NULL,
  ADD CHECK ((decided_at IS NULL) = (decided_by IS NULL)),
  ADD CHECK ((released_at IS NULL) = (released_to IS NULL)),
  ADD CHECK ((state = 'released') = (released_at IS NOT NULL)),
  ADD CHECK (state NOT IN ('approved', 'released', 'rejected', 'mismatched') OR decided_at IS NOT NULL),
  ADD CHECK (state <> 'pending' OR decided_at IS NULL),
  ADD CHECK (NOT is_continued OR state = 'rejected');
COMMENT ON COLUMN approvals.state IS 'Where the question stands; follows the state of its effect';
COMMENT ON COLUMN approvals.ttl_seconds IS 'How long the question was to stay open, seconds: the rule in force when it was put';
COMMENT ON COLUMN approvals.decided_at IS 'When a person approved or rejected';
COMMENT ON COLUMN approvals.decided_by IS 'The subject who did; never the one whose agent asked';
COMMENT ON COLUMN approvals.claimed_approver IS 'Whom the request named as approver; a claim, nothing more';
COMMENT ON COLUMN approvals.reason IS 'What the person said';
COMMENT ON COLUMN approvals.is_continued IS 'Rejected with then: continue, so the session goes on';
COMMENT ON COLUMN approvals.released_at IS 'When the call was let go ahead, once';
COMMENT ON COLUMN approvals.released_to IS 'The subject that was told to execute, or had it executed';
COMMENT ON COLUMN approvals.release_key IS 'Role and Idempotency-Key of the resume, so that its lost answer can be had again';
CREATE INDEX approvals_open ON approvals (org, requested_at, session_id, step_index) WHERE state IN ('pending', 'approved');
CREATE INDEX approvals_by_age ON approvals (org, requested_at, session_id, step_index);
CREATE INDEX approvals_expiring ON approvals (expires_at) WHERE state IN ('pending', 'approved');

ALTER TABLE outgoing_calls ADD COLUMN kind call_kind NOT NULL DEFAULT 'undo';
ALTER TABLE outgoing_calls ALTER COLUMN kind DROP DEFAULT;
COMMENT ON COLUMN outgoing_calls.kind IS 'An undo, or an approved call that the service executes itself';
COMMENT ON COLUMN outgoing_calls.call_id IS 'The undo_id, or the effect_id of an action';
COMMENT ON COLUMN outgoing_calls.outcome IS 'What an undo''s endpoint is told about the effect; frozen at the first send';
COMMENT ON COLUMN outgoing_calls.due_at IS 'When to act next; NULL = nothing to do; at most one undo of a session is due';
ALTER TABLE outgoing_calls
  DROP CONSTRAINT outgoing_calls_org_session_id_step_index_key,
  ADD CONSTRAINT outgoing_calls_by_step UNIQUE (org, session_id, step_index, kind),
  DROP CONSTRAINT outgoing_calls_check4,
  ADD CHECK (CASE kind WHEN 'undo' THEN (first_sent_at IS NULL) = (outcome IS NULL) ELSE outcome IS NULL END),
  DROP CONSTRAINT outgoing_calls_one_due,
  ADD CONSTRAINT outgoing_calls_one_undo_due EXCLUDE USING btree (org WITH =, session_id WITH =)
    WHERE (due_at IS NOT NULL AND kind = 'undo') DEFERRABLE INITIALLY DEFERRED;

ALTER TABLE sessions
  ADD COLUMN halted_at timestamptz,
  ADD COLUMN halt_ordered boolean NOT NULL DEFAULT false;
ALTER TABLE sessions ALTER COLUMN halt_ordered DROP DEFAULT;
UPDATE sessions SET halted_at = updated_at WHERE state IN ('halted', 'resolved');
ALTER TABLE sessions
  ADD CHECK (state NOT IN ('halted', 'resolved') OR (halted_at IS NOT NULL AND halt_reason IS NOT NULL)),
  ADD CHECK (NOT halt_ordered OR state IN ('failed', 'compensating'));
COMMENT ON COLUMN sessions.halted_at IS 'When it was last handed to a person';
COMMENT ON COLUMN sessions.halt_ordered IS 'An operator wants it halted at the next boundary';
CREATE INDEX sessions_halted ON sessions (org, halted_at, session_id) WHERE state = 'halted';

CREATE UNIQUE INDEX journal_decisions ON journal (org, session_id, step) WHERE kind IN ('APPROVED', 'REJECTED');

COMMENT ON COLUMN undo_stack.by_hand IS 'A person undid it by other means, with a reason in the journal';
COMMENT ON COLUMN undo_stack.compensated_at IS 'When its endpoint, or a person, said it is undone';

ALTER TABLE approvals FORCE ROW LEVEL SECURITY;
ALTER TABLE effect_log FORCE ROW LEVEL SECURITY;
ALTER TABLE sessions FORCE ROW LEVEL SECURITY;
CREATE POLICY every_org ON approvals FOR SELECT TO countermand_dispatcher USING (true);
GRANT UPDATE (state, decided_at, decided_by, claimed_approver, reason, is_continued, released_at, released_to, release_key)
  ON approvals TO countermand_runtime;
GRANT SELECT (org, session_id, state, expires_at) ON approvals TO countermand_dispatcher;
GRANT SELECT (kind) ON outgoing_calls TO countermand_dispatcher;
"""

# An action cannot be told in the older schema: where one exists, going back is refused. The check goes with its column.
DOWN_SQL = """
ALTER TABLE outgoing_calls ADD CONSTRAINT outgoing_calls_only_undos CHECK (kind = 'undo');
REVOKE SELECT (kind) ON outgoing_calls FROM countermand_dispatcher;
REVOKE SELECT (org, session_id, state, expires_at) ON approvals FROM countermand_dispatcher;
REVOKE UPDATE (state, decided_at, decided_by, claimed_approver, reason, is_continued, released_at, released_to, release_key)
  ON approvals FROM countermand_runtime;
DROP POLICY every_org ON approvals;
COMMENT ON COLUMN undo_stack.compensated_at IS 'When its endpoint said it is undone';
COMMENT ON COLUMN undo_stack.by_hand IS 'A person settled it, with a reason in the journal';
DROP INDEX journal_decisions, approvals_by_age;
ALTER TABLE sessions DROP COLUMN halted_at, DROP COLUMN halt_ordered;
ALTER TABLE outgoing_calls
  DROP CONSTRAINT outgoing_calls_one_undo_due,
  DROP COLUMN kind,
  ADD UNIQUE (org, session_id, step_index),
  ADD CONSTRAINT outgoing_calls_check4 CHECK ((first_sent_at IS NULL) = (outcome IS NULL)),
  ADD CONSTRAINT outgoing_calls_one_due EXCLUDE USING btree (org WITH =, session_id WITH =)
    WHERE (due_at IS NOT NULL) DEFERRABLE INITIALLY DEFERRED;
COMMENT ON COLUMN outgoing_calls.due_at IS 'When to act next; NULL = nothing to do; at most one call of a session is due';
COMMENT ON COLUMN outgoing_calls.outcome IS 'What the endpoint is told about the effect; frozen at the first send';
COMMENT ON COLUMN outgoing_calls.call_id IS 'The undo_id';
ALTER TABLE approvals
  DROP COLUMN state, DROP COLUMN ttl_seconds, DROP COLUMN decided_at, DROP COLUMN decided_by, DROP COLUMN claimed_approver,
  DROP COLUMN reason, DROP COLUMN is_continued, DROP COLUMN released_at, DROP COLUMN released_to, DROP COLUMN release_key;
DROP TYPE call_kind, approval_state;
"""


def upgrade() -> None:
    """Move the schema up."""
    run(UP_SQL)


def downgrade() -> None:
    """Move the schema back."""
    run(DOWN_SQL)
