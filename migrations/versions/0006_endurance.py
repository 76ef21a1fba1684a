"""Endurance: retention by a role of its own, crashes that are counted, which code a schema serves. Must not be edited once released."""

from migrations.sql import run

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

UP_SQL = """
DO $$
BEGIN
  CREATE ROLE countermand_pruner NOLOGIN;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
END $$;
GRANT countermand_pruner TO CURRENT_USER;

CREATE TABLE schema_support (
  is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
  oldest_revision text NOT NULL
);
COMMENT ON TABLE schema_support IS 'Which code this schema serves besides that which it was made for; one row';
COMMENT ON COLUMN schema_support.is_only IS 'The key that lets there be no second row';
COMMENT ON COLUMN schema_support.oldest_revision IS 'The oldest revision whose code still runs on this schema; each migration sets it';
INSERT INTO schema_support (oldest_revision) VALUES ('0004');
GRANT SELECT ON schema_support TO countermand_runtime;

-- A worker may crash over a call before an attempt of it was ever counted.
ALTER TABLE outgoing_calls
  DROP CONSTRAINT outgoing_calls_check1,
  ADD CHECK (interrupted >= 0);
COMMENT ON COLUMN outgoing_calls.interrupted IS 'Attempts and polls whose end was never recorded, and crashes of a worker over the call';

COMMENT ON TABLE journal IS
  'Append-only, hash-chained per session: one entry per transition; see docs/reference/journal-format.md';

CREATE INDEX sessions_prunable ON sessions (org, active_at, session_id)
  WHERE state = 'completed' OR (state = 'compensated' AND clean);

-- Everything but the journal goes with its session by foreign key, as its owner. No temporary table may stand for a session.
CREATE FUNCTION refuse_session_deletion() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF current_user = 'countermand_pruner' AND (OLD.state = 'completed' OR (OLD.state = 'compensated' AND OLD.clean)) THEN
    RETURN OLD;
  END IF;
  RAISE EXCEPTION 'only countermand_pruner deletes sessions, and only those that completed, or were compensated and are clean'
    USING ERRCODE = 'restrict_violation';
END $$;
COMMENT ON FUNCTION refuse_session_deletion() IS 'Second lock behind the missing privilege: what a person may still have to look at stays';
CREATE TRIGGER sessions_are_kept BEFORE DELETE ON sessions
  FOR EACH ROW EXECUTE FUNCTION refuse_session_deletion();

CREATE OR REPLACE FUNCTION refuse_journal_change() RETURNS trigger LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
BEGIN
  IF TG_OP = 'UPDATE' THEN
    IF NEW.content IS NULL AND (OLD.org, OLD.session_id, OLD.seq, OLD.kind, OLD.actor, OLD.at, OLD.body, OLD.prev_hash, OLD.hash)
        = (NEW.org, NEW.session_id, NEW.seq, NEW.kind, NEW.actor, NEW.at, NEW.body, NEW.prev_hash, NEW.hash)
        AND OLD.step IS NOT DISTINCT FROM NEW.step THEN
      RETURN NEW;
    END IF;
  ELSIF TG_OP = 'DELETE' THEN
    IF current_user = 'countermand_pruner'
        AND NOT EXISTS (SELECT FROM sessions WHERE org = OLD.org AND session_id = OLD.session_id) THEN
      RETURN OLD;
    END IF;
  END IF;
  RAISE EXCEPTION 'the journal is insert-only' USING ERRCODE = 'restrict_violation';
END $$;
COMMENT ON FUNCTION refuse_journal_change() IS
  'Second lock behind the missing privilege: contents may be erased, and the journal of a session that is gone may be pruned';

CREATE POLICY every_org ON orgs FOR SELECT TO countermand_pruner USING (true);
CREATE POLICY one_org_pruned ON sessions TO countermand_pruner USING (org = current_setting('app.org')::org_name);
CREATE POLICY one_org_pruned ON remembered_answers FOR SELECT TO countermand_pruner USING (org = current_setting('app.org')::org_name);
CREATE POLICY one_org_pruned ON journal TO countermand_pruner USING (org = current_setting('app.org')::org_name);
GRANT SELECT ON orgs TO countermand_pruner;
-- A row is locked only by who may update some column of it; the policy leaves this column no other value.
GRANT SELECT (org, session_id, state, clean, last_step, created_at, active_at), UPDATE (org), DELETE ON sessions TO countermand_pruner;
GRANT SELECT (org, session_id, answered_at) ON remembered_answers TO countermand_pruner;
GRANT SELECT (org, session_id), DELETE ON journal TO countermand_pruner;
"""

# The role stays, as the other two do. What the older code never counted is cut to what its rule allows.
DOWN_SQL = """
REVOKE ALL ON journal, remembered_answers, sessions, orgs FROM countermand_pruner;
REVOKE SELECT (org, session_id), UPDATE (org) ON sessions FROM countermand_pruner;
REVOKE SELECT (state, clean, last_step, created_at, active_at) ON sessions FROM countermand_pruner;
REVOKE SELECT (org, session_id, answered_at) ON remembered_answers FROM countermand_pruner;
REVOKE SELECT (org, session_id) ON journal FROM countermand_pruner;
DROP POLICY one_org_pruned ON journal;
DROP POLICY one_org_pruned ON remembered_answers;
DROP POLICY one_org_pruned ON sessions;
DROP POLICY every_org ON orgs;
CREATE OR REPLACE FUNCTION refuse_journal_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'UPDATE' THEN
    IF NEW.content IS NULL AND (OLD.org, OLD.session_id, OLD.seq, OLD.kind, OLD.actor, OLD.at, OLD.body, OLD.prev_hash, OLD.hash)
        = (NEW.org, NEW.session_id, NEW.seq, NEW.kind, NEW.actor, NEW.at, NEW.body, NEW.prev_hash, NEW.hash)
        AND OLD.step IS NOT DISTINCT FROM NEW.step THEN
      RETURN NEW;
    END IF;
  END IF;
  RAISE EXCEPTION 'the journal is insert-only' USING ERRCODE = 'restrict_violation';
END $$;
COMMENT ON FUNCTION refuse_journal_change() IS 'Second lock behind the missing privilege: only erasing contents is let through';
DROP TRIGGER sessions_are_kept ON sessions;
DROP FUNCTION refuse_session_deletion();
DROP INDEX sessions_prunable;
ALTER TABLE outgoing_calls NO FORCE ROW LEVEL SECURITY;
UPDATE outgoing_calls SET interrupted = attempts + polls WHERE interrupted > attempts + polls;
ALTER TABLE outgoing_calls
  FORCE ROW LEVEL SECURITY,
  DROP CONSTRAINT outgoing_calls_interrupted_check,
  ADD CONSTRAINT outgoing_calls_check1 CHECK (interrupted BETWEEN 0 AND attempts + polls);
COMMENT ON COLUMN outgoing_calls.interrupted IS 'Attempts and polls whose end was never recorded';
COMMENT ON TABLE journal IS 'Append-only, hash-chained per session: one entry per transition; see docs/journal-format.md';
DROP TABLE schema_support;
"""


def upgrade() -> None:
    """Move the schema up."""
    run(UP_SQL)


def downgrade() -> None:
    """Move the schema back."""
    run(DOWN_SQL)
