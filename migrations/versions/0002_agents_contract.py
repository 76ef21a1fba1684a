"""The agent's contract: registered tools, remembered answers, sessions that run out of time. Must not be edited once released."""

from migrations.sql import run

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

UP_SQL = """
CREATE TABLE tools (
  org org_name NOT NULL,
  name text NOT NULL CHECK (length(name) BETWEEN 1 AND 200),
  version integer NOT NULL CHECK (version >= 1),
  definition bytea NOT NULL,
  is_deleted boolean NOT NULL,
  created_by text NOT NULL,
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  PRIMARY KEY (org, name, version)
);
COMMENT ON TABLE tools IS 'Registered tools; versions are never changed, the newest counts';
COMMENT ON COLUMN tools.org IS 'The tenant';
COMMENT ON COLUMN tools.name IS 'The tool''s name';
COMMENT ON COLUMN tools.version IS 'From 1; each change or removal is a new one';
COMMENT ON COLUMN tools.definition IS 'Class, undo, schema and all, as JSON text; number literals kept';
COMMENT ON COLUMN tools.is_deleted IS 'This version says that the name is no longer registered';
COMMENT ON COLUMN tools.created_by IS 'The subject who registered it';
COMMENT ON COLUMN tools.created_at IS 'When it was registered';

CREATE TABLE remembered_answers (
  org org_name NOT NULL,
  subject text NOT NULL,
  request text NOT NULL,
  request_key text NOT NULL CHECK (length(request_key) BETWEEN 1 AND 255),
  session_id text NOT NULL,
  request_sha256 bytea NOT NULL CHECK (octet_length(request_sha256) = 32),
  status integer NOT NULL CHECK (status BETWEEN 200 AND 299),
  body bytea NOT NULL,
  answered_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  PRIMARY KEY (org, session_id, subject, request, request_key),
  FOREIGN KEY (org, session_id) REFERENCES sessions ON DELETE CASCADE
);
COMMENT ON TABLE remembered_answers IS 'What requests with an Idempotency-Key were answered, as long as the session lives; not intercepts';
COMMENT ON COLUMN remembered_answers.org IS 'The tenant';
COMMENT ON COLUMN remembered_answers.subject IS 'Who asked';
COMMENT ON COLUMN remembered_answers.request IS 'Method and path';
COMMENT ON COLUMN remembered_answers.request_key IS 'The Idempotency-Key';
COMMENT ON COLUMN remembered_answers.session_id IS 'The session concerned';
COMMENT ON COLUMN remembered_answers.request_sha256 IS 'SHA-256 of the request''s JSON, keys sorted';
COMMENT ON COLUMN remembered_answers.status IS 'The 2xx that was answered';
COMMENT ON COLUMN remembered_answers.body IS 'The bytes that were answered';
COMMENT ON COLUMN remembered_answers.answered_at IS 'When';

ALTER TABLE effect_log ADD COLUMN tool_version integer CHECK (tool_version >= 1);
COMMENT ON COLUMN effect_log.tool_version IS 'The registered version seen at intercept; NULL = nobody had registered the tool';

CREATE INDEX sessions_active ON sessions (org, session_id) WHERE state = 'active';

ALTER TABLE tools ENABLE ROW LEVEL SECURITY;
ALTER TABLE tools FORCE ROW LEVEL SECURITY;
ALTER TABLE remembered_answers ENABLE ROW LEVEL SECURITY;
ALTER TABLE remembered_answers FORCE ROW LEVEL SECURITY;
CREATE POLICY one_org ON tools TO countermand_runtime USING (org = current_setting('app.org')::org_name);
CREATE POLICY one_org ON remembered_answers TO countermand_runtime USING (org = current_setting('app.org')::org_name);
CREATE POLICY every_org ON sessions FOR SELECT TO countermand_dispatcher USING (true);
GRANT SELECT, INSERT ON tools, remembered_answers TO countermand_runtime;
GRANT SELECT (org, session_id, state, idle_seconds, active_at, deadline_at) ON sessions TO countermand_dispatcher;
"""

DOWN_SQL = """
REVOKE SELECT (org, session_id, state, idle_seconds, active_at, deadline_at) ON sessions FROM countermand_dispatcher;
DROP POLICY every_org ON sessions;
DROP INDEX sessions_active;
ALTER TABLE effect_log DROP COLUMN tool_version;
DROP TABLE remembered_answers, tools;
"""


def upgrade() -> None:
    """Move the schema up."""
    run(UP_SQL)


def downgrade() -> None:
    """Move the schema back."""
    run(DOWN_SQL)
