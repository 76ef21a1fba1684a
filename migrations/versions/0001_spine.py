"""The spine: orgs, keys, sessions, effects, undo stacks, outgoing calls, the journal. Must not be edited once released."""

from migrations.sql import run

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

UP_SQL = """
DO $$
BEGIN
  CREATE ROLE countermand_runtime NOLOGIN;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
END $$;
DO $$
BEGIN
  CREATE ROLE countermand_dispatcher NOLOGIN;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
END $$;
GRANT countermand_runtime, countermand_dispatcher TO CURRENT_USER;

CREATE DOMAIN org_name AS text CHECK (VALUE ~ '^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$');
COMMENT ON DOMAIN org_name IS 'A tenant. The empty text is refused, so a connection that forgot app.org fails loudly';

CREATE TYPE key_role AS ENUM ('agent', 'operator', 'auditor', 'admin');
CREATE TYPE reversibility AS ENUM ('read_only', 'reversible', 'compensatable', 'irreversible');
CREATE TYPE session_state AS ENUM (
  'active', 'awaiting_approval', 'failed', 'compensating', 'compensated', 'halted', 'resolved', 'completed');
CREATE TYPE halt_reason AS ENUM (
  'compensation_failed', 'deadline_exceeded', 'failed_after_pivot', 'unresolved_reference', 'unknown_outcome',
  'late_effect', 'egress_denied', 'operator', 'poison');
CREATE TYPE effect_state AS ENUM (
  'executing', 'committed', 'failed', 'unknown', 'awaiting_approval', 'approved', 'rejected', 'expired', 'cancelled',
  'compensating', 'compensated', 'compensation_failed');
CREATE TYPE outcome AS ENUM ('committed', 'not_applied', 'unknown');
CREATE TYPE undo_state AS ENUM ('pending', 'running', 'compensated', 'failed', 'skipped');
CREATE TYPE entry_kind AS ENUM (
  'OPENED', 'INTENT', 'EXECUTED', 'FAILED', 'AWAITING_APPROVAL', 'APPROVED', 'REJECTED', 'EXPIRED', 'CANCELLED',
  'PAYLOAD_MISMATCH', 'PIVOT', 'SESSION_FAILED', 'COMPENSATING', 'COMPENSATED', 'COMPENSATION_FAILED', 'SKIPPED',
  'UNWOUND', 'HALTED', 'LATE_COMMIT', 'LATE_FAIL', 'RETRIED', 'UNWIND_ORDERED', 'HALT_ORDERED', 'SETTLED', 'RESOLVED',
  'COMPLETED');

CREATE TABLE orgs (
  org org_name PRIMARY KEY,
  created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE orgs IS 'Tenants';
COMMENT ON COLUMN orgs.org IS 'The name, which is also its key everywhere';
COMMENT ON COLUMN orgs.created_at IS 'When the first key of the org was made';

CREATE TABLE keys (
  org org_name NOT NULL REFERENCES orgs,
  key_id text NOT NULL UNIQUE CHECK (key_id ~ '^[a-z0-9]{12}$'),
  secret_sha256 bytea NOT NULL CHECK (octet_length(secret_sha256) = 32),
  role key_role NOT NULL,
  subject text NOT NULL CHECK (length(subject) BETWEEN 1 AND 200),
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  revoked_at timestamptz,
  PRIMARY KEY (org, key_id)
);
COMMENT ON TABLE keys IS 'Bearer keys; the secret itself is never kept';
COMMENT ON COLUMN keys.org IS 'The tenant the key acts for';
COMMENT ON COLUMN keys.key_id IS 'The public part, by which a key is found; unique over all orgs';
COMMENT ON COLUMN keys.secret_sha256 IS 'SHA-256 of the 32 secret bytes';
COMMENT ON COLUMN keys.role IS 'What the key may be used for';
COMMENT ON COLUMN keys.subject IS 'Who holds it; two keys of one subject are the same person';
COMMENT ON COLUMN keys.created_at IS 'When it was made';
COMMENT ON COLUMN keys.revoked_at IS 'Since when it is no longer accepted';

CREATE TABLE sessions (
  org org_name NOT NULL,
  session_id text NOT NULL CHECK (session_id ~ '^[A-Za-z0-9._:-]{1,200}$'),
  owner text NOT NULL,
  agent text NOT NULL,
  metadata bytea NOT NULL CHECK (octet_length(metadata) <= 16384),
  state session_state NOT NULL,
  halt_reason halt_reason,
  clean boolean NOT NULL,
  pivoted boolean NOT NULL,
  late_effect boolean NOT NULL,
  last_step integer NOT NULL CHECK (last_step >= 0),
  idle_seconds integer CHECK (idle_seconds > 0),
  deadline_at timestamptz,
  failed_at timestamptz,
  created_at timestamptz NOT NULL,
  updated_at timestamptz NOT NULL CHECK (updated_at >= created_at),
  active_at timestamptz NOT NULL,
  version bigint NOT NULL CHECK (version >= 0),
  revision bigint NOT NULL CHECK (revision >= 0),
  journal_seq bigint NOT NULL CHECK (journal_seq >= 0),
  journal_hash bytea NOT NULL CHECK (octet_length(journal_hash) = 32),
  journal_at timestamptz CHECK ((journal_at IS NULL) = (journal_seq = 0)),
  PRIMARY KEY (org, session_id),
  CHECK (state <> 'halted' OR halt_reason IS NOT NULL),
  CHECK (state NOT IN ('active', 'awaiting_approval', 'completed') OR halt_reason IS NULL)
) WITH (fillfactor = 70);
CREATE INDEX sessions_by_age ON sessions (org, created_at DESC, session_id);
COMMENT ON TABLE sessions IS 'One agent run = one saga; its row is the only lock, always taken first';
COMMENT ON COLUMN sessions.org IS 'The tenant';
COMMENT ON COLUMN sessions.session_id IS 'Chosen by the client';
COMMENT ON COLUMN sessions.owner IS 'The subject whose agent keys may use the session';
COMMENT ON COLUMN sessions.agent IS 'The name the agent gives itself, for people';
COMMENT ON COLUMN sessions.metadata IS 'The client''s own JSON, byte for byte';
COMMENT ON COLUMN sessions.state IS 'Where the session stands';
COMMENT ON COLUMN sessions.halt_reason IS 'Why it was handed to a person';
COMMENT ON COLUMN sessions.clean IS 'False once an entry was settled by hand, an effect came late, or an irreversible effect stands';
COMMENT ON COLUMN sessions.pivoted IS 'An irreversible effect went ahead, or may have';
COMMENT ON COLUMN sessions.late_effect IS 'A commit came for an effect whose undo was sent already: halt at the next boundary';
COMMENT ON COLUMN sessions.last_step IS 'The greatest step_index in use; 0 = none';
COMMENT ON COLUMN sessions.idle_seconds IS 'Silence after which the session fails, seconds';
COMMENT ON COLUMN sessions.deadline_at IS 'When the session fails at the latest';
COMMENT ON COLUMN sessions.failed_at IS 'When it failed; reports about earlier steps are late from then on';
COMMENT ON COLUMN sessions.created_at IS 'When it was opened';
COMMENT ON COLUMN sessions.updated_at IS 'When something visible last changed';
COMMENT ON COLUMN sessions.active_at IS 'When the agent, a person or a running call last gave a sign of life';
COMMENT ON COLUMN sessions.version IS 'Counts visible changes; the ETag';
COMMENT ON COLUMN sessions.revision IS 'Counts every write made under the session lock; tells a reader that waited for it to read again';
COMMENT ON COLUMN sessions.journal_seq IS 'Number of the newest journal entry; 0 = none';
COMMENT ON COLUMN sessions.journal_hash IS 'Hash of the newest journal entry; zeros when there is none';
COMMENT ON COLUMN sessions.journal_at IS 'Time of the newest journal entry';

CREATE TABLE effect_log (
  org org_name NOT NULL,
  session_id text NOT NULL,
  step_index integer NOT NULL CHECK (step_index >= 1),
  effect_id uuid NOT NULL,
  tool text NOT NULL CHECK (length(tool) BETWEEN 1 AND 200),
  reversibility reversibility NOT NULL,
  state effect_state NOT NULL,
  outcome outcome,
  payload bytea NOT NULL CHECK (octet_length(payload) <= 262144),
  payload_sha256 bytea NOT NULL CHECK (octet_length(payload_sha256) = 32),
  result bytea,
  error text,
  request_key text CHECK (length(request_key) BETWEEN 1 AND 255),
  request_sha256 bytea NOT NULL CHECK (octet_length(request_sha256) = 32),
  attempt integer NOT NULL CHECK (attempt >= 1),
  traceparent text,
  registered_at timestamptz NOT NULL,
  executed_at timestamptz CHECK (registered_at <= executed_at),
  version bigint NOT NULL CHECK (version >= 1),
  PRIMARY KEY (org, session_id, step_index),
  FOREIGN KEY (org, session_id) REFERENCES sessions ON DELETE CASCADE,
  CHECK ((executed_at IS NOT NULL) = (outcome IS NOT DISTINCT FROM 'committed')),
  CHECK (state <> 'committed' OR outcome IS NOT DISTINCT FROM 'committed'),
  CHECK (state <> 'failed' OR outcome IS NOT DISTINCT FROM 'not_applied'),
  CHECK (state <> 'unknown' OR outcome IS NOT DISTINCT FROM 'unknown'),
  CHECK (state NOT IN ('executing', 'awaiting_approval', 'approved', 'rejected', 'expired', 'cancelled') OR outcome IS NULL),
  CHECK (reversibility <> 'irreversible' OR state NOT IN ('compensating', 'compensated', 'compensation_failed'))
) WITH (fillfactor = 85);
CREATE UNIQUE INDEX effect_log_by_request_key ON effect_log (org, session_id, request_key) WHERE request_key IS NOT NULL;
COMMENT ON TABLE effect_log IS 'The durable record of every tool call that was asked for';
COMMENT ON COLUMN effect_log.org IS 'The tenant';
COMMENT ON COLUMN effect_log.session_id IS 'The session';
COMMENT ON COLUMN effect_log.step_index IS 'The place of the call in its session, increasing';
COMMENT ON COLUMN effect_log.effect_id IS 'UUIDv7; the forward key is effect-<effect_id>';
COMMENT ON COLUMN effect_log.tool IS 'The tool''s name';
COMMENT ON COLUMN effect_log.reversibility IS 'What it takes to undo the call';
COMMENT ON COLUMN effect_log.state IS 'Where the call stands';
COMMENT ON COLUMN effect_log.outcome IS 'What is known of it: committed, not applied, unknown';
COMMENT ON COLUMN effect_log.payload IS 'The call''s arguments, the exact UTF-8 bytes';
COMMENT ON COLUMN effect_log.payload_sha256 IS 'The fingerprint of the payload';
COMMENT ON COLUMN effect_log.result IS 'What the agent reported back, compact JSON text';
COMMENT ON COLUMN effect_log.error IS 'What the agent said went wrong';
COMMENT ON COLUMN effect_log.request_key IS 'The Idempotency-Key of the intercept, if one was sent';
COMMENT ON COLUMN effect_log.request_sha256 IS 'SHA-256 of the intercept request''s JSON, keys sorted';
COMMENT ON COLUMN effect_log.attempt IS 'How often the call was told to execute';
COMMENT ON COLUMN effect_log.traceparent IS 'The W3C trace context that the intercept came with';
COMMENT ON COLUMN effect_log.registered_at IS 'When the call and its undo were registered, before it ran';
COMMENT ON COLUMN effect_log.executed_at IS 'When it was reported as done';
COMMENT ON COLUMN effect_log.version IS 'Counts visible changes; the ETag';

CREATE TABLE approvals (
  org org_name NOT NULL,
  session_id text NOT NULL,
  step_index integer NOT NULL,
  requested_by text NOT NULL,
  requested_at timestamptz NOT NULL,
  expires_at timestamptz NOT NULL CHECK (expires_at > requested_at),
  PRIMARY KEY (org, session_id, step_index),
  FOREIGN KEY (org, session_id, step_index) REFERENCES effect_log ON DELETE CASCADE
);
COMMENT ON TABLE approvals IS 'The question put to a person about one irreversible call';
COMMENT ON COLUMN approvals.org IS 'The tenant';
COMMENT ON COLUMN approvals.session_id IS 'The session';
COMMENT ON COLUMN approvals.step_index IS 'The parked call';
COMMENT ON COLUMN approvals.requested_by IS 'The subject whose agent asked';
COMMENT ON COLUMN approvals.requested_at IS 'When it was asked';
COMMENT ON COLUMN approvals.expires_at IS 'From this moment on it may no longer be approved or released';

CREATE TABLE undo_stack (
  org org_name NOT NULL,
  session_id text NOT NULL,
  stack_position integer NOT NULL CHECK (stack_position >= 1),
  undo_id uuid NOT NULL,
  state undo_state NOT NULL,
  compensation bytea NOT NULL,
  by_hand boolean NOT NULL,
  registered_at timestamptz NOT NULL,
  compensated_at timestamptz CHECK (registered_at <= compensated_at),
  PRIMARY KEY (org, session_id, stack_position),
  FOREIGN KEY (org, session_id, stack_position) REFERENCES effect_log ON DELETE CASCADE,
  CHECK ((state = 'compensated') = (compensated_at IS NOT NULL)),
  CHECK (NOT by_hand OR state IN ('compensated', 'skipped'))
) WITH (fillfactor = 85);
COMMENT ON TABLE undo_stack IS 'The compensations of a session; unwound by descending stack_position';
COMMENT ON COLUMN undo_stack.org IS 'The tenant';
COMMENT ON COLUMN undo_stack.session_id IS 'The session';
COMMENT ON COLUMN undo_stack.stack_position IS 'The step_index of the effect it undoes: higher = later = undone first';
COMMENT ON COLUMN undo_stack.undo_id IS 'UUIDv7; the call''s idempotency key is undo-<undo_id>, for ever';
COMMENT ON COLUMN undo_stack.state IS 'Where the entry stands';
COMMENT ON COLUMN undo_stack.compensation IS 'The whole descriptor as JSON text: url, args, retry policy; number literals kept';
COMMENT ON COLUMN undo_stack.by_hand IS 'A person settled it, with a reason in the journal';
COMMENT ON COLUMN undo_stack.registered_at IS 'When it was registered: not after the effect was executed';
COMMENT ON COLUMN undo_stack.compensated_at IS 'When its endpoint said it is undone';

CREATE TABLE outgoing_calls (
  org org_name NOT NULL,
  session_id text NOT NULL,
  call_id uuid NOT NULL,
  step_index integer NOT NULL,
  destination text NOT NULL,
  url text,
  body bytea,
  outcome outcome,
  attempts integer NOT NULL CHECK (attempts >= 0),
  failures integer NOT NULL CHECK (failures BETWEEN 0 AND attempts),
  interrupted integer NOT NULL CHECK (interrupted BETWEEN 0 AND attempts + polls),
  polls integer NOT NULL CHECK (polls >= 0),
  is_attempt_open boolean NOT NULL,
  may_be_processing boolean NOT NULL,
  poll_url text,
  last_status integer CHECK (last_status BETWEEN 100 AND 999),
  last_error text,
  due_at timestamptz,
  first_sent_at timestamptz,
  deadline_at timestamptz NOT NULL,
  leased_by text,
  leased_until timestamptz,
  epoch bigint NOT NULL CHECK (epoch >= 0),
  PRIMARY KEY (org, session_id, call_id),
  FOREIGN KEY (org, session_id, step_index) REFERENCES effect_log ON DELETE CASCADE,
  UNIQUE (org, session_id, step_index),
  CHECK ((first_sent_at IS NULL) = (url IS NULL)),
  CHECK ((first_sent_at IS NULL) = (body IS NULL)),
  CHECK ((first_sent_at IS NULL) = (outcome IS NULL)),
  CHECK ((first_sent_at IS NULL) = (attempts = 0)),
  CHECK ((leased_by IS NULL) = (leased_until IS NULL)),
  CONSTRAINT outgoing_calls_one_due EXCLUDE USING btree (org WITH =, session_id WITH =)
    WHERE (due_at IS NOT NULL) DEFERRABLE INITIALLY DEFERRED
) WITH (fillfactor = 70);
CREATE INDEX outgoing_calls_due ON outgoing_calls (due_at) WHERE due_at IS NOT NULL;
COMMENT ON TABLE outgoing_calls IS 'Calls that became due once: frozen bytes, attempts, when to act next, who is at it';
COMMENT ON COLUMN outgoing_calls.org IS 'The tenant';
COMMENT ON COLUMN outgoing_calls.session_id IS 'The session';
COMMENT ON COLUMN outgoing_calls.call_id IS 'The undo_id';
COMMENT ON COLUMN outgoing_calls.step_index IS 'The effect it belongs to';
COMMENT ON COLUMN outgoing_calls.destination IS 'host:port, for limits per destination';
COMMENT ON COLUMN outgoing_calls.url IS 'Where it is sent; frozen at the first send';
COMMENT ON COLUMN outgoing_calls.body IS 'The exact bytes sent; frozen at the first send';
COMMENT ON COLUMN outgoing_calls.outcome IS 'What the endpoint is told about the effect; frozen at the first send';
COMMENT ON COLUMN outgoing_calls.attempts IS 'Requests that may have left the process, each counted before it was sent';
COMMENT ON COLUMN outgoing_calls.failures IS 'Those that used up retry budget since it was last filled';
COMMENT ON COLUMN outgoing_calls.interrupted IS 'Attempts and polls whose end was never recorded';
COMMENT ON COLUMN outgoing_calls.polls IS 'How often a 202''s Location was asked';
COMMENT ON COLUMN outgoing_calls.is_attempt_open IS 'An attempt was counted and its end is not recorded yet';
COMMENT ON COLUMN outgoing_calls.may_be_processing IS 'Some attempt ended with unknown outcome: the endpoint may still be at it';
COMMENT ON COLUMN outgoing_calls.poll_url IS 'The Location of a 202, to be asked until final';
COMMENT ON COLUMN outgoing_calls.last_status IS 'HTTP status of the last answer';
COMMENT ON COLUMN outgoing_calls.last_error IS 'Class and text of the last failure';
COMMENT ON COLUMN outgoing_calls.due_at IS 'When to act next; NULL = nothing to do; at most one call of a session is due';
COMMENT ON COLUMN outgoing_calls.first_sent_at IS 'When it was frozen';
COMMENT ON COLUMN outgoing_calls.deadline_at IS 'When to give up';
COMMENT ON COLUMN outgoing_calls.leased_by IS 'Which worker is at it';
COMMENT ON COLUMN outgoing_calls.leased_until IS 'Until when no other worker may take it';
COMMENT ON COLUMN outgoing_calls.epoch IS 'Counts claims; a write of an older epoch changes nothing';

CREATE TABLE journal (
  org org_name NOT NULL,
  session_id text NOT NULL,
  seq bigint NOT NULL CHECK (seq >= 1),
  kind entry_kind NOT NULL,
  step integer CHECK (step >= 1),
  actor text NOT NULL,
  at text NOT NULL CHECK (at ~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}[.][0-9]{6}Z$'),
  body bytea NOT NULL,
  content bytea,
  prev_hash bytea NOT NULL CHECK (octet_length(prev_hash) = 32),
  hash bytea NOT NULL CHECK (octet_length(hash) = 32),
  PRIMARY KEY (org, session_id, seq)
);
COMMENT ON TABLE journal IS 'Append-only, hash-chained per session: one entry per transition; see docs/journal-format.md';
COMMENT ON COLUMN journal.org IS 'The tenant; part of the hash';
COMMENT ON COLUMN journal.session_id IS 'The session; part of the hash';
COMMENT ON COLUMN journal.seq IS 'Dense from 1 per session';
COMMENT ON COLUMN journal.kind IS 'Which transition';
COMMENT ON COLUMN journal.step IS 'The effect concerned, if one is';
COMMENT ON COLUMN journal.actor IS 'Who caused it: role:subject, or orchestrator';
COMMENT ON COLUMN journal.at IS 'When, as the text that was hashed';
COMMENT ON COLUMN journal.body IS 'Canonical JSON, the bytes that were hashed';
COMMENT ON COLUMN journal.content IS 'Salt and text of the contents whose digests stand in body; may be erased, not changed';
COMMENT ON COLUMN journal.prev_hash IS 'Hash of the entry before; zeros for the first';
COMMENT ON COLUMN journal.hash IS 'SHA-256 over all the above but content';

CREATE FUNCTION refuse_journal_change() RETURNS trigger LANGUAGE plpgsql AS $$
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
CREATE TRIGGER journal_is_insert_only BEFORE UPDATE OR DELETE ON journal
  FOR EACH ROW EXECUTE FUNCTION refuse_journal_change();
CREATE TRIGGER journal_is_not_truncated BEFORE TRUNCATE ON journal
  FOR EACH STATEMENT EXECUTE FUNCTION refuse_journal_change();

ALTER TABLE orgs ENABLE ROW LEVEL SECURITY;
ALTER TABLE orgs FORCE ROW LEVEL SECURITY;
ALTER TABLE keys ENABLE ROW LEVEL SECURITY;
ALTER TABLE keys FORCE ROW LEVEL SECURITY;
ALTER TABLE sessions ENABLE ROW LEVEL SECURITY;
ALTER TABLE sessions FORCE ROW LEVEL SECURITY;
ALTER TABLE effect_log ENABLE ROW LEVEL SECURITY;
ALTER TABLE effect_log FORCE ROW LEVEL SECURITY;
ALTER TABLE approvals ENABLE ROW LEVEL SECURITY;
ALTER TABLE approvals FORCE ROW LEVEL SECURITY;
ALTER TABLE undo_stack ENABLE ROW LEVEL SECURITY;
ALTER TABLE undo_stack FORCE ROW LEVEL SECURITY;
ALTER TABLE outgoing_calls ENABLE ROW LEVEL SECURITY;
ALTER TABLE outgoing_calls FORCE ROW LEVEL SECURITY;
ALTER TABLE journal ENABLE ROW LEVEL SECURITY;
ALTER TABLE journal FORCE ROW LEVEL SECURITY;

CREATE POLICY one_org ON orgs TO countermand_runtime USING (org = current_setting('app.org')::org_name);
CREATE POLICY one_org ON keys TO countermand_runtime USING (org = current_setting('app.org')::org_name);
CREATE POLICY one_org ON sessions TO countermand_runtime USING (org = current_setting('app.org')::org_name);
CREATE POLICY one_org ON effect_log TO countermand_runtime USING (org = current_setting('app.org')::org_name);
CREATE POLICY one_org ON approvals TO countermand_runtime USING (org = current_setting('app.org')::org_name);
CREATE POLICY one_org ON undo_stack TO countermand_runtime USING (org = current_setting('app.org')::org_name);
CREATE POLICY one_org ON outgoing_calls TO countermand_runtime USING (org = current_setting('app.org')::org_name);
CREATE POLICY one_org ON journal TO countermand_runtime USING (org = current_setting('app.org')::org_name);
CREATE POLICY every_org ON keys TO countermand_dispatcher USING (true);
CREATE POLICY every_org ON outgoing_calls TO countermand_dispatcher USING (true);

GRANT SELECT, INSERT ON orgs TO countermand_runtime;
GRANT SELECT, INSERT, UPDATE (revoked_at) ON keys TO countermand_runtime;
GRANT SELECT, INSERT, UPDATE ON sessions, effect_log, undo_stack, outgoing_calls TO countermand_runtime;
GRANT SELECT, INSERT ON approvals, journal TO countermand_runtime;
GRANT SELECT ON alembic_version TO countermand_runtime;
GRANT SELECT ON keys TO countermand_dispatcher;
GRANT SELECT (org, session_id, call_id, destination, due_at, leased_by, leased_until, epoch),
  UPDATE (leased_by, leased_until, epoch) ON outgoing_calls TO countermand_dispatcher;
"""

# The two roles stay: they belong to the cluster and may serve another database of it.
DOWN_SQL = """
REVOKE ALL ON alembic_version FROM countermand_runtime;
DROP TABLE journal, outgoing_calls, undo_stack, approvals, effect_log, sessions, keys, orgs;
DROP FUNCTION refuse_journal_change();
DROP TYPE entry_kind, undo_state, outcome, effect_state, halt_reason, session_state, reversibility, key_role;
DROP DOMAIN org_name;
"""


def upgrade() -> None:
    """Move the schema up."""
    run(UP_SQL)


def downgrade() -> None:
    """Move the schema back."""
    run(DOWN_SQL)
