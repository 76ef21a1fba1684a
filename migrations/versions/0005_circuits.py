"""Outages and pauses: circuits, people's pauses, and indexes that pass over both. Must not be edited once released."""

from migrations.sql import run

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# A service of revision 0004 works on this schema: it knows nothing of a circuit or a pause, and finds what is due as before, only slower.
UP_SQL = """
CREATE TABLE circuits (
  org org_name NOT NULL,
  destination text NOT NULL CHECK (destination <> ''),
  opened_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  probe_at timestamptz NOT NULL,
  probes integer NOT NULL DEFAULT 0 CHECK (probes >= 0),
  probe_session_id text,
  probe_call_id uuid,
  last_error text NOT NULL,
  PRIMARY KEY (org, destination),
  CHECK ((probe_session_id IS NULL) = (probe_call_id IS NULL))
);
COMMENT ON TABLE circuits IS 'Destinations that are held to be away: nothing is sent there but one probe at a time; closed = no row';
COMMENT ON COLUMN circuits.org IS 'The tenant: one tenant''s calls open no other''s circuit';
COMMENT ON COLUMN circuits.destination IS 'host:port, as in outgoing_calls';
COMMENT ON COLUMN circuits.opened_at IS 'When it was found to be away';
COMMENT ON COLUMN circuits.probe_at IS 'When it may be probed next';
COMMENT ON COLUMN circuits.probes IS 'How often it was; the fence between two replicas that would both probe';
COMMENT ON COLUMN circuits.probe_session_id IS 'The session of the call that probed last';
COMMENT ON COLUMN circuits.probe_call_id IS 'That call: while its lease lives nobody else probes';
COMMENT ON COLUMN circuits.last_error IS 'What opened it, or what its newest probe came to';

CREATE TABLE pauses (
  org org_name REFERENCES orgs,
  destination text CHECK (destination <> ''),
  paused_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  paused_by text NOT NULL,
  reason text NOT NULL CHECK (reason <> ''),
  CONSTRAINT pauses_once UNIQUE NULLS NOT DISTINCT (org, destination),
  CHECK (org IS NOT NULL OR destination IS NULL)
);
COMMENT ON TABLE pauses IS 'What people want nothing to be sent to for now; resumed = no row';
COMMENT ON COLUMN pauses.org IS 'The tenant; NULL = every tenant';
COMMENT ON COLUMN pauses.destination IS 'host:port; NULL = wherever the tenant''s calls go';
COMMENT ON COLUMN pauses.paused_at IS 'Since when';
COMMENT ON COLUMN pauses.paused_by IS 'Who wants it so: role:subject, or the command line';
COMMENT ON COLUMN pauses.reason IS 'Why, in their words';

DROP INDEX outgoing_calls_due;
CREATE INDEX outgoing_calls_due ON outgoing_calls (org, destination, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX outgoing_calls_ending ON outgoing_calls (deadline_at) WHERE due_at IS NOT NULL;

ALTER TABLE circuits ENABLE ROW LEVEL SECURITY;
ALTER TABLE circuits FORCE ROW LEVEL SECURITY;
ALTER TABLE pauses ENABLE ROW LEVEL SECURITY;
ALTER TABLE pauses FORCE ROW LEVEL SECURITY;

CREATE POLICY one_org ON circuits TO countermand_runtime USING (org = current_setting('app.org')::org_name);
CREATE POLICY every_org ON circuits TO countermand_dispatcher USING (true);
CREATE POLICY one_org ON pauses TO countermand_runtime USING (org = current_setting('app.org')::org_name);
CREATE POLICY everything_is_seen ON pauses FOR SELECT TO countermand_runtime
  USING (current_setting('app.org')::org_name IS NOT NULL AND org IS NULL);
CREATE POLICY every_org ON pauses FOR SELECT TO countermand_dispatcher USING (true);
CREATE POLICY everything_is_paused ON pauses FOR INSERT TO countermand_dispatcher WITH CHECK (org IS NULL);
CREATE POLICY everything_is_resumed ON pauses FOR DELETE TO countermand_dispatcher USING (org IS NULL);

GRANT SELECT, INSERT, DELETE, UPDATE (probe_at, last_error) ON circuits TO countermand_runtime;
GRANT SELECT, INSERT, DELETE ON pauses TO countermand_runtime;
GRANT SELECT (org, destination, probe_at, probes, probe_session_id, probe_call_id),
  UPDATE (probe_at, probes, probe_session_id, probe_call_id), DELETE ON circuits TO countermand_dispatcher;
GRANT SELECT (org, destination), INSERT, DELETE ON pauses TO countermand_dispatcher;
GRANT SELECT (attempts, deadline_at) ON outgoing_calls TO countermand_dispatcher;
"""

DOWN_SQL = """
REVOKE SELECT (attempts, deadline_at) ON outgoing_calls FROM countermand_dispatcher;
DROP TABLE circuits, pauses;
DROP INDEX outgoing_calls_due, outgoing_calls_ending;
CREATE INDEX outgoing_calls_due ON outgoing_calls (due_at) WHERE due_at IS NOT NULL;
"""


def upgrade() -> None:
    """Move the schema up."""
    run(UP_SQL)


def downgrade() -> None:
    """Move the schema back."""
    run(DOWN_SQL)
