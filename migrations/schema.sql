-- The schema at the newest revision, as pg_dump tells it. `make schema` rewrites this file; a test compares it.

CREATE TYPE approval_state AS ENUM (
    'pending',
    'approved',
    'released',
    'rejected',
    'expired',
    'cancelled',
    'mismatched'
);

CREATE TYPE approval_written AS (
	session_id text,
	step_index integer,
	state approval_state,
	requested_by text,
	requested_at timestamp with time zone,
	expires_at timestamp with time zone,
	ttl_seconds integer,
	decided_at timestamp with time zone,
	decided_by text,
	claimed_approver text,
	reason text,
	is_continued boolean,
	released_at timestamp with time zone,
	released_to text,
	release_key text
);

COMMENT ON TYPE approval_written IS 'A question to a person as a decision made or left it';

CREATE TYPE call_kind AS ENUM (
    'undo',
    'action'
);

CREATE TYPE outcome AS ENUM (
    'committed',
    'not_applied',
    'unknown'
);

CREATE TYPE call_written AS (
	session_id text,
	call_id uuid,
	kind call_kind,
	step_index integer,
	destination text,
	url text,
	body bytea,
	outcome outcome,
	attempts integer,
	failures integer,
	interrupted integer,
	polls integer,
	is_attempt_open boolean,
	may_be_processing boolean,
	poll_url text,
	last_status integer,
	last_error text,
	due_at timestamp with time zone,
	first_sent_at timestamp with time zone,
	deadline_at timestamp with time zone,
	epoch bigint
);

COMMENT ON TYPE call_written IS 'An outgoing call as a decision made or left it; leases are written by the statement';

CREATE TYPE effect_state AS ENUM (
    'executing',
    'committed',
    'failed',
    'unknown',
    'awaiting_approval',
    'approved',
    'rejected',
    'expired',
    'cancelled',
    'compensating',
    'compensated',
    'compensation_failed'
);

CREATE TYPE reversibility AS ENUM (
    'read_only',
    'reversible',
    'compensatable',
    'irreversible'
);

CREATE TYPE effect_written AS (
	session_id text,
	step_index integer,
	effect_id uuid,
	tool text,
	tool_version integer,
	reversibility reversibility,
	state effect_state,
	outcome outcome,
	payload bytea,
	payload_sha256 bytea,
	result bytea,
	error text,
	request_key text,
	request_sha256 bytea,
	attempt integer,
	traceparent text,
	registered_at timestamp with time zone,
	executed_at timestamp with time zone,
	version bigint
);

COMMENT ON TYPE effect_written IS 'An effect as a decision made or left it';

CREATE TYPE entry_kind AS ENUM (
    'OPENED',
    'INTENT',
    'EXECUTED',
    'FAILED',
    'AWAITING_APPROVAL',
    'APPROVED',
    'REJECTED',
    'EXPIRED',
    'CANCELLED',
    'PAYLOAD_MISMATCH',
    'PIVOT',
    'SESSION_FAILED',
    'COMPENSATING',
    'COMPENSATED',
    'COMPENSATION_FAILED',
    'SKIPPED',
    'UNWOUND',
    'HALTED',
    'LATE_COMMIT',
    'LATE_FAIL',
    'RETRIED',
    'UNWIND_ORDERED',
    'HALT_ORDERED',
    'SETTLED',
    'RESOLVED',
    'COMPLETED'
);

CREATE TYPE entry_written AS (
	session_id text,
	seq bigint,
	kind entry_kind,
	step integer,
	actor text,
	at text,
	body bytea,
	content bytea,
	prev_hash bytea,
	hash bytea
);

COMMENT ON TYPE entry_written IS 'A journal entry of a decision';

CREATE TYPE halt_reason AS ENUM (
    'compensation_failed',
    'deadline_exceeded',
    'failed_after_pivot',
    'unresolved_reference',
    'unknown_outcome',
    'late_effect',
    'egress_denied',
    'operator',
    'poison'
);

CREATE TYPE key_role AS ENUM (
    'agent',
    'operator',
    'auditor',
    'admin'
);

CREATE DOMAIN org_name AS text
	CONSTRAINT org_name_check CHECK ((VALUE ~ '^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$'::text));

COMMENT ON DOMAIN org_name IS 'A tenant. The empty text is refused, so a connection that forgot app.org fails loudly';

CREATE TYPE session_state AS ENUM (
    'active',
    'awaiting_approval',
    'failed',
    'compensating',
    'compensated',
    'halted',
    'resolved',
    'completed'
);

CREATE TYPE session_written AS (
	session_id text,
	owner text,
	agent text,
	metadata bytea,
	state session_state,
	halt_reason halt_reason,
	clean boolean,
	pivoted boolean,
	late_effect boolean,
	last_step integer,
	idle_seconds integer,
	deadline_at timestamp with time zone,
	failed_at timestamp with time zone,
	halted_at timestamp with time zone,
	halt_ordered boolean,
	created_at timestamp with time zone,
	updated_at timestamp with time zone,
	active_at timestamp with time zone,
	version bigint,
	revision bigint,
	journal_seq bigint,
	journal_hash bytea,
	journal_at timestamp with time zone
);

COMMENT ON TYPE session_written IS 'A session as a decision left it';

CREATE TYPE step_asked AS (
	session_id text,
	step_index integer,
	request_key text,
	tool text
);

COMMENT ON TYPE step_asked IS 'A session to lock, with what is wanted of one step of it';

CREATE TYPE undo_state AS ENUM (
    'pending',
    'running',
    'compensated',
    'failed',
    'skipped'
);

CREATE TYPE undo_written AS (
	session_id text,
	stack_position integer,
	undo_id uuid,
	state undo_state,
	compensation bytea,
	by_hand boolean,
	registered_at timestamp with time zone,
	compensated_at timestamp with time zone
);

COMMENT ON TYPE undo_written IS 'An undo entry as a decision made or left it';

CREATE FUNCTION refuse_journal_change() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'public', 'pg_temp'
    AS $$
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

COMMENT ON FUNCTION refuse_journal_change() IS 'Second lock behind the missing privilege: contents may be erased, and the journal of a session that is gone may be pruned';

CREATE FUNCTION refuse_session_deletion() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
  IF current_user = 'countermand_pruner' AND (OLD.state = 'completed' OR (OLD.state = 'compensated' AND OLD.clean)) THEN
    RETURN OLD;
  END IF;
  RAISE EXCEPTION 'only countermand_pruner deletes sessions, and only those that completed, or were compensated and are clean'
    USING ERRCODE = 'restrict_violation';
END $$;

COMMENT ON FUNCTION refuse_session_deletion() IS 'Second lock behind the missing privilege: what a person may still have to look at stays';

CREATE TABLE alembic_version (
    version_num character varying(32) NOT NULL
);

CREATE TABLE approvals (
    org org_name NOT NULL,
    session_id text NOT NULL,
    step_index integer NOT NULL,
    requested_by text NOT NULL,
    requested_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    state approval_state NOT NULL,
    ttl_seconds integer NOT NULL,
    decided_at timestamp with time zone,
    decided_by text,
    claimed_approver text,
    reason text,
    is_continued boolean NOT NULL,
    released_at timestamp with time zone,
    released_to text,
    release_key text,
    CONSTRAINT approvals_check CHECK ((expires_at > requested_at)),
    CONSTRAINT approvals_check1 CHECK ((decided_at >= requested_at)),
    CONSTRAINT approvals_check2 CHECK ((decided_by <> requested_by)),
    CONSTRAINT approvals_check3 CHECK (((released_at >= decided_at) AND (released_at < expires_at))),
    CONSTRAINT approvals_check4 CHECK (((decided_at IS NULL) = (decided_by IS NULL))),
    CONSTRAINT approvals_check5 CHECK (((released_at IS NULL) = (released_to IS NULL))),
    CONSTRAINT approvals_check6 CHECK (((state = 'released'::approval_state) = (released_at IS NOT NULL))),
    CONSTRAINT approvals_check7 CHECK (((state <> ALL (ARRAY['approved'::approval_state, 'released'::approval_state, 'rejected'::approval_state, 'mismatched'::approval_state])) OR (decided_at IS NOT NULL))),
    CONSTRAINT approvals_check8 CHECK (((state <> 'pending'::approval_state) OR (decided_at IS NULL))),
    CONSTRAINT approvals_check9 CHECK (((NOT is_continued) OR (state = 'rejected'::approval_state))),
    CONSTRAINT approvals_release_key_check CHECK (((length(release_key) >= 1) AND (length(release_key) <= 300))),
    CONSTRAINT approvals_ttl_seconds_check CHECK ((ttl_seconds > 0))
);

ALTER TABLE ONLY approvals FORCE ROW LEVEL SECURITY;

COMMENT ON TABLE approvals IS 'The question put to a person about one irreversible call';

COMMENT ON COLUMN approvals.org IS 'The tenant';

COMMENT ON COLUMN approvals.session_id IS 'The session';

COMMENT ON COLUMN approvals.step_index IS 'The parked call';

COMMENT ON COLUMN approvals.requested_by IS 'The subject whose agent asked';

COMMENT ON COLUMN approvals.requested_at IS 'When it was asked';

COMMENT ON COLUMN approvals.expires_at IS 'From this moment on it may no longer be approved or released';

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

CREATE TABLE circuits (
    org org_name NOT NULL,
    destination text NOT NULL,
    opened_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    probe_at timestamp with time zone NOT NULL,
    probes integer DEFAULT 0 NOT NULL,
    probe_session_id text,
    probe_call_id uuid,
    last_error text NOT NULL,
    CONSTRAINT circuits_check CHECK (((probe_session_id IS NULL) = (probe_call_id IS NULL))),
    CONSTRAINT circuits_destination_check CHECK ((destination <> ''::text)),
    CONSTRAINT circuits_probes_check CHECK ((probes >= 0))
);

ALTER TABLE ONLY circuits FORCE ROW LEVEL SECURITY;

COMMENT ON TABLE circuits IS 'Destinations that are held to be away: nothing is sent there but one probe at a time; closed = no row';

COMMENT ON COLUMN circuits.org IS 'The tenant: one tenant''s calls open no other''s circuit';

COMMENT ON COLUMN circuits.destination IS 'host:port, as in outgoing_calls';

COMMENT ON COLUMN circuits.opened_at IS 'When it was found to be away';

COMMENT ON COLUMN circuits.probe_at IS 'When it may be probed next';

COMMENT ON COLUMN circuits.probes IS 'How often it was; the fence between two replicas that would both probe';

COMMENT ON COLUMN circuits.probe_session_id IS 'The session of the call that probed last';

COMMENT ON COLUMN circuits.probe_call_id IS 'That call: while its lease lives nobody else probes';

COMMENT ON COLUMN circuits.last_error IS 'What opened it, or what its newest probe came to';

CREATE TABLE effect_log (
    org org_name NOT NULL,
    session_id text NOT NULL,
    step_index integer NOT NULL,
    effect_id uuid NOT NULL,
    tool text NOT NULL,
    reversibility reversibility NOT NULL,
    state effect_state NOT NULL,
    outcome outcome,
    payload bytea NOT NULL,
    payload_sha256 bytea NOT NULL,
    result bytea,
    error text,
    request_key text,
    request_sha256 bytea NOT NULL,
    attempt integer NOT NULL,
    traceparent text,
    registered_at timestamp with time zone NOT NULL,
    executed_at timestamp with time zone,
    version bigint NOT NULL,
    tool_version integer,
    CONSTRAINT effect_log_attempt_check CHECK ((attempt >= 1)),
    CONSTRAINT effect_log_check CHECK ((registered_at <= executed_at)),
    CONSTRAINT effect_log_check1 CHECK (((executed_at IS NOT NULL) = (NOT (outcome IS DISTINCT FROM 'committed'::outcome)))),
    CONSTRAINT effect_log_check2 CHECK (((state <> 'committed'::effect_state) OR (NOT (outcome IS DISTINCT FROM 'committed'::outcome)))),
    CONSTRAINT effect_log_check3 CHECK (((state <> 'failed'::effect_state) OR (NOT (outcome IS DISTINCT FROM 'not_applied'::outcome)))),
    CONSTRAINT effect_log_check4 CHECK (((state <> 'unknown'::effect_state) OR (NOT (outcome IS DISTINCT FROM 'unknown'::outcome)))),
    CONSTRAINT effect_log_check5 CHECK (((state <> ALL (ARRAY['executing'::effect_state, 'awaiting_approval'::effect_state, 'approved'::effect_state, 'rejected'::effect_state, 'expired'::effect_state, 'cancelled'::effect_state])) OR (outcome IS NULL))),
    CONSTRAINT effect_log_check6 CHECK (((reversibility <> 'irreversible'::reversibility) OR (state <> ALL (ARRAY['compensating'::effect_state, 'compensated'::effect_state, 'compensation_failed'::effect_state])))),
    CONSTRAINT effect_log_payload_check CHECK ((octet_length(payload) <= 262144)),
    CONSTRAINT effect_log_payload_sha256_check CHECK ((octet_length(payload_sha256) = 32)),
    CONSTRAINT effect_log_request_key_check CHECK (((length(request_key) >= 1) AND (length(request_key) <= 255))),
    CONSTRAINT effect_log_request_sha256_check CHECK ((octet_length(request_sha256) = 32)),
    CONSTRAINT effect_log_step_index_check CHECK ((step_index >= 1)),
    CONSTRAINT effect_log_tool_check CHECK (((length(tool) >= 1) AND (length(tool) <= 200))),
    CONSTRAINT effect_log_tool_version_check CHECK ((tool_version >= 1)),
    CONSTRAINT effect_log_version_check CHECK ((version >= 1))
)
WITH (fillfactor='85');

ALTER TABLE ONLY effect_log FORCE ROW LEVEL SECURITY;

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

COMMENT ON COLUMN effect_log.tool_version IS 'The registered version seen at intercept; NULL = nobody had registered the tool';

CREATE TABLE journal (
    org org_name NOT NULL,
    session_id text NOT NULL,
    seq bigint NOT NULL,
    kind entry_kind NOT NULL,
    step integer,
    actor text NOT NULL,
    at text NOT NULL,
    body bytea NOT NULL,
    content bytea,
    prev_hash bytea NOT NULL,
    hash bytea NOT NULL,
    CONSTRAINT journal_at_check CHECK ((at ~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}[.][0-9]{6}Z$'::text)),
    CONSTRAINT journal_hash_check CHECK ((octet_length(hash) = 32)),
    CONSTRAINT journal_prev_hash_check CHECK ((octet_length(prev_hash) = 32)),
    CONSTRAINT journal_seq_check CHECK ((seq >= 1)),
    CONSTRAINT journal_step_check CHECK ((step >= 1))
);

ALTER TABLE ONLY journal FORCE ROW LEVEL SECURITY;

COMMENT ON TABLE journal IS 'Append-only, hash-chained per session: one entry per transition; see docs/reference/journal-format.md';

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

CREATE TABLE keys (
    org org_name NOT NULL,
    key_id text NOT NULL,
    secret_sha256 bytea NOT NULL,
    role key_role NOT NULL,
    subject text NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    revoked_at timestamp with time zone,
    CONSTRAINT keys_key_id_check CHECK ((key_id ~ '^[a-z0-9]{12}$'::text)),
    CONSTRAINT keys_secret_sha256_check CHECK ((octet_length(secret_sha256) = 32)),
    CONSTRAINT keys_subject_check CHECK (((length(subject) >= 1) AND (length(subject) <= 200)))
);

ALTER TABLE ONLY keys FORCE ROW LEVEL SECURITY;

COMMENT ON TABLE keys IS 'Bearer keys; the secret itself is never kept';

COMMENT ON COLUMN keys.org IS 'The tenant the key acts for';

COMMENT ON COLUMN keys.key_id IS 'The public part, by which a key is found; unique over all orgs';

COMMENT ON COLUMN keys.secret_sha256 IS 'SHA-256 of the 32 secret bytes';

COMMENT ON COLUMN keys.role IS 'What the key may be used for';

COMMENT ON COLUMN keys.subject IS 'Who holds it; two keys of one subject are the same person';

COMMENT ON COLUMN keys.created_at IS 'When it was made';

COMMENT ON COLUMN keys.revoked_at IS 'Since when it is no longer accepted';

CREATE TABLE orgs (
    org org_name NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);

ALTER TABLE ONLY orgs FORCE ROW LEVEL SECURITY;

COMMENT ON TABLE orgs IS 'Tenants';

COMMENT ON COLUMN orgs.org IS 'The name, which is also its key everywhere';

COMMENT ON COLUMN orgs.created_at IS 'When the first key of the org was made';

CREATE TABLE outgoing_calls (
    org org_name NOT NULL,
    session_id text NOT NULL,
    call_id uuid NOT NULL,
    step_index integer NOT NULL,
    destination text NOT NULL,
    url text,
    body bytea,
    outcome outcome,
    attempts integer NOT NULL,
    failures integer NOT NULL,
    interrupted integer NOT NULL,
    polls integer NOT NULL,
    is_attempt_open boolean NOT NULL,
    may_be_processing boolean NOT NULL,
    poll_url text,
    last_status integer,
    last_error text,
    due_at timestamp with time zone,
    first_sent_at timestamp with time zone,
    deadline_at timestamp with time zone NOT NULL,
    leased_by text,
    leased_until timestamp with time zone,
    epoch bigint NOT NULL,
    kind call_kind NOT NULL,
    CONSTRAINT outgoing_calls_attempts_check CHECK ((attempts >= 0)),
    CONSTRAINT outgoing_calls_check CHECK (((failures >= 0) AND (failures <= attempts))),
    CONSTRAINT outgoing_calls_check2 CHECK (((first_sent_at IS NULL) = (url IS NULL))),
    CONSTRAINT outgoing_calls_check3 CHECK (((first_sent_at IS NULL) = (body IS NULL))),
    CONSTRAINT outgoing_calls_check4 CHECK (
CASE kind
    WHEN 'undo'::call_kind THEN ((first_sent_at IS NULL) = (outcome IS NULL))
    ELSE (outcome IS NULL)
END),
    CONSTRAINT outgoing_calls_check5 CHECK (((first_sent_at IS NULL) = (attempts = 0))),
    CONSTRAINT outgoing_calls_check6 CHECK (((leased_by IS NULL) = (leased_until IS NULL))),
    CONSTRAINT outgoing_calls_epoch_check CHECK ((epoch >= 0)),
    CONSTRAINT outgoing_calls_interrupted_check CHECK ((interrupted >= 0)),
    CONSTRAINT outgoing_calls_last_status_check CHECK (((last_status >= 100) AND (last_status <= 999))),
    CONSTRAINT outgoing_calls_polls_check CHECK ((polls >= 0))
)
WITH (fillfactor='70');

ALTER TABLE ONLY outgoing_calls FORCE ROW LEVEL SECURITY;

COMMENT ON TABLE outgoing_calls IS 'Calls that became due once: frozen bytes, attempts, when to act next, who is at it';

COMMENT ON COLUMN outgoing_calls.org IS 'The tenant';

COMMENT ON COLUMN outgoing_calls.session_id IS 'The session';

COMMENT ON COLUMN outgoing_calls.call_id IS 'The undo_id, or the effect_id of an action';

COMMENT ON COLUMN outgoing_calls.step_index IS 'The effect it belongs to';

COMMENT ON COLUMN outgoing_calls.destination IS 'host:port, for limits per destination';

COMMENT ON COLUMN outgoing_calls.url IS 'Where it is sent; frozen at the first send';

COMMENT ON COLUMN outgoing_calls.body IS 'The exact bytes sent; frozen at the first send';

COMMENT ON COLUMN outgoing_calls.outcome IS 'What an undo''s endpoint is told about the effect; frozen at the first send';

COMMENT ON COLUMN outgoing_calls.attempts IS 'Requests that may have left the process, each counted before it was sent';

COMMENT ON COLUMN outgoing_calls.failures IS 'Those that used up retry budget since it was last filled';

COMMENT ON COLUMN outgoing_calls.interrupted IS 'Attempts and polls whose end was never recorded, and crashes of a worker over the call';

COMMENT ON COLUMN outgoing_calls.polls IS 'How often a 202''s Location was asked';

COMMENT ON COLUMN outgoing_calls.is_attempt_open IS 'An attempt was counted and its end is not recorded yet';

COMMENT ON COLUMN outgoing_calls.may_be_processing IS 'Some attempt ended with unknown outcome: the endpoint may still be at it';

COMMENT ON COLUMN outgoing_calls.poll_url IS 'The Location of a 202, to be asked until final';

COMMENT ON COLUMN outgoing_calls.last_status IS 'HTTP status of the last answer';

COMMENT ON COLUMN outgoing_calls.last_error IS 'Class and text of the last failure';

COMMENT ON COLUMN outgoing_calls.due_at IS 'When to act next; NULL = nothing to do; at most one undo of a session is due';

COMMENT ON COLUMN outgoing_calls.first_sent_at IS 'When it was frozen';

COMMENT ON COLUMN outgoing_calls.deadline_at IS 'When to give up';

COMMENT ON COLUMN outgoing_calls.leased_by IS 'Which worker is at it';

COMMENT ON COLUMN outgoing_calls.leased_until IS 'Until when no other worker may take it';

COMMENT ON COLUMN outgoing_calls.epoch IS 'Counts claims; a write of an older epoch changes nothing';

COMMENT ON COLUMN outgoing_calls.kind IS 'An undo, or an approved call that the service executes itself';

CREATE TABLE pauses (
    org org_name,
    destination text,
    paused_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    paused_by text NOT NULL,
    reason text NOT NULL,
    CONSTRAINT pauses_check CHECK (((org IS NOT NULL) OR (destination IS NULL))),
    CONSTRAINT pauses_destination_check CHECK ((destination <> ''::text)),
    CONSTRAINT pauses_reason_check CHECK ((reason <> ''::text))
);

ALTER TABLE ONLY pauses FORCE ROW LEVEL SECURITY;

COMMENT ON TABLE pauses IS 'What people want nothing to be sent to for now; resumed = no row';

COMMENT ON COLUMN pauses.org IS 'The tenant; NULL = every tenant';

COMMENT ON COLUMN pauses.destination IS 'host:port; NULL = wherever the tenant''s calls go';

COMMENT ON COLUMN pauses.paused_at IS 'Since when';

COMMENT ON COLUMN pauses.paused_by IS 'Who wants it so: role:subject, or the command line';

COMMENT ON COLUMN pauses.reason IS 'Why, in their words';

CREATE TABLE remembered_answers (
    org org_name NOT NULL,
    subject text NOT NULL,
    request text NOT NULL,
    request_key text NOT NULL,
    session_id text NOT NULL,
    request_sha256 bytea NOT NULL,
    status integer NOT NULL,
    body bytea NOT NULL,
    answered_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT remembered_answers_request_key_check CHECK (((length(request_key) >= 1) AND (length(request_key) <= 255))),
    CONSTRAINT remembered_answers_request_sha256_check CHECK ((octet_length(request_sha256) = 32)),
    CONSTRAINT remembered_answers_status_check CHECK (((status >= 200) AND (status <= 299)))
);

ALTER TABLE ONLY remembered_answers FORCE ROW LEVEL SECURITY;

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

CREATE TABLE schema_support (
    is_only boolean DEFAULT true NOT NULL,
    oldest_revision text NOT NULL,
    CONSTRAINT schema_support_is_only_check CHECK (is_only)
);

COMMENT ON TABLE schema_support IS 'Which code this schema serves besides that which it was made for; one row';

COMMENT ON COLUMN schema_support.is_only IS 'The key that lets there be no second row';

COMMENT ON COLUMN schema_support.oldest_revision IS 'The oldest revision whose code still runs on this schema; each migration sets it';

CREATE TABLE sessions (
    org org_name NOT NULL,
    session_id text NOT NULL,
    owner text NOT NULL,
    agent text NOT NULL,
    metadata bytea NOT NULL,
    state session_state NOT NULL,
    halt_reason halt_reason,
    clean boolean NOT NULL,
    pivoted boolean NOT NULL,
    late_effect boolean NOT NULL,
    last_step integer NOT NULL,
    idle_seconds integer,
    deadline_at timestamp with time zone,
    failed_at timestamp with time zone,
    created_at timestamp with time zone NOT NULL,
    updated_at timestamp with time zone NOT NULL,
    active_at timestamp with time zone NOT NULL,
    version bigint NOT NULL,
    revision bigint NOT NULL,
    journal_seq bigint NOT NULL,
    journal_hash bytea NOT NULL,
    journal_at timestamp with time zone,
    halted_at timestamp with time zone,
    halt_ordered boolean NOT NULL,
    CONSTRAINT sessions_check CHECK ((updated_at >= created_at)),
    CONSTRAINT sessions_check1 CHECK (((journal_at IS NULL) = (journal_seq = 0))),
    CONSTRAINT sessions_check2 CHECK (((state <> 'halted'::session_state) OR (halt_reason IS NOT NULL))),
    CONSTRAINT sessions_check3 CHECK (((state <> ALL (ARRAY['active'::session_state, 'awaiting_approval'::session_state, 'completed'::session_state])) OR (halt_reason IS NULL))),
    CONSTRAINT sessions_check4 CHECK (((state <> ALL (ARRAY['halted'::session_state, 'resolved'::session_state])) OR ((halted_at IS NOT NULL) AND (halt_reason IS NOT NULL)))),
    CONSTRAINT sessions_check5 CHECK (((NOT halt_ordered) OR (state = ANY (ARRAY['failed'::session_state, 'compensating'::session_state])))),
    CONSTRAINT sessions_idle_seconds_check CHECK ((idle_seconds > 0)),
    CONSTRAINT sessions_journal_hash_check CHECK ((octet_length(journal_hash) = 32)),
    CONSTRAINT sessions_journal_seq_check CHECK ((journal_seq >= 0)),
    CONSTRAINT sessions_last_step_check CHECK ((last_step >= 0)),
    CONSTRAINT sessions_metadata_check CHECK ((octet_length(metadata) <= 16384)),
    CONSTRAINT sessions_revision_check CHECK ((revision >= 0)),
    CONSTRAINT sessions_session_id_check CHECK (((length(session_id) <= 200) AND (session_id ~ '^[A-Za-z0-9._:-]+$'::text))),
    CONSTRAINT sessions_version_check CHECK ((version >= 0))
)
WITH (fillfactor='70');

ALTER TABLE ONLY sessions FORCE ROW LEVEL SECURITY;

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

COMMENT ON COLUMN sessions.halted_at IS 'When it was last handed to a person';

COMMENT ON COLUMN sessions.halt_ordered IS 'An operator wants it halted at the next boundary';

CREATE TABLE tools (
    org org_name NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    definition bytea NOT NULL,
    is_deleted boolean NOT NULL,
    created_by text NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT tools_name_check CHECK (((length(name) >= 1) AND (length(name) <= 200))),
    CONSTRAINT tools_version_check CHECK ((version >= 1))
);

ALTER TABLE ONLY tools FORCE ROW LEVEL SECURITY;

COMMENT ON TABLE tools IS 'Registered tools; versions are never changed, the newest counts';

COMMENT ON COLUMN tools.org IS 'The tenant';

COMMENT ON COLUMN tools.name IS 'The tool''s name';

COMMENT ON COLUMN tools.version IS 'From 1; each change or removal is a new one';

COMMENT ON COLUMN tools.definition IS 'Class, undo, schema and all, as JSON text; number literals kept';

COMMENT ON COLUMN tools.is_deleted IS 'This version says that the name is no longer registered';

COMMENT ON COLUMN tools.created_by IS 'The subject who registered it';

COMMENT ON COLUMN tools.created_at IS 'When it was registered';

CREATE TABLE undo_stack (
    org org_name NOT NULL,
    session_id text NOT NULL,
    stack_position integer NOT NULL,
    undo_id uuid NOT NULL,
    state undo_state NOT NULL,
    compensation bytea NOT NULL,
    by_hand boolean NOT NULL,
    registered_at timestamp with time zone NOT NULL,
    compensated_at timestamp with time zone,
    CONSTRAINT undo_stack_check CHECK ((registered_at <= compensated_at)),
    CONSTRAINT undo_stack_check1 CHECK (((state = 'compensated'::undo_state) = (compensated_at IS NOT NULL))),
    CONSTRAINT undo_stack_check2 CHECK (((NOT by_hand) OR (state = ANY (ARRAY['compensated'::undo_state, 'skipped'::undo_state])))),
    CONSTRAINT undo_stack_stack_position_check CHECK ((stack_position >= 1))
)
WITH (fillfactor='85');

ALTER TABLE ONLY undo_stack FORCE ROW LEVEL SECURITY;

COMMENT ON TABLE undo_stack IS 'The compensations of a session; unwound by descending stack_position';

COMMENT ON COLUMN undo_stack.org IS 'The tenant';

COMMENT ON COLUMN undo_stack.session_id IS 'The session';

COMMENT ON COLUMN undo_stack.stack_position IS 'The step_index of the effect it undoes: higher = later = undone first';

COMMENT ON COLUMN undo_stack.undo_id IS 'UUIDv7; the call''s idempotency key is undo-<undo_id>, for ever';

COMMENT ON COLUMN undo_stack.state IS 'Where the entry stands';

COMMENT ON COLUMN undo_stack.compensation IS 'The whole descriptor as JSON text: url, args, retry policy; number literals kept';

COMMENT ON COLUMN undo_stack.by_hand IS 'A person undid it by other means, with a reason in the journal';

COMMENT ON COLUMN undo_stack.registered_at IS 'When it was registered: not after the effect was executed';

COMMENT ON COLUMN undo_stack.compensated_at IS 'When its endpoint, or a person, said it is undone';

ALTER TABLE ONLY alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);

ALTER TABLE ONLY approvals
    ADD CONSTRAINT approvals_pkey PRIMARY KEY (org, session_id, step_index);

ALTER TABLE ONLY circuits
    ADD CONSTRAINT circuits_pkey PRIMARY KEY (org, destination);

ALTER TABLE ONLY effect_log
    ADD CONSTRAINT effect_log_pkey PRIMARY KEY (org, session_id, step_index);

ALTER TABLE ONLY journal
    ADD CONSTRAINT journal_pkey PRIMARY KEY (org, session_id, seq);

ALTER TABLE ONLY keys
    ADD CONSTRAINT keys_key_id_key UNIQUE (key_id);

ALTER TABLE ONLY keys
    ADD CONSTRAINT keys_pkey PRIMARY KEY (org, key_id);

ALTER TABLE ONLY orgs
    ADD CONSTRAINT orgs_pkey PRIMARY KEY (org);

ALTER TABLE ONLY outgoing_calls
    ADD CONSTRAINT outgoing_calls_by_step UNIQUE (org, session_id, step_index, kind);

ALTER TABLE ONLY outgoing_calls
    ADD CONSTRAINT outgoing_calls_one_undo_due EXCLUDE USING btree (org WITH =, session_id WITH =) WHERE (((due_at IS NOT NULL) AND (kind = 'undo'::call_kind))) DEFERRABLE INITIALLY DEFERRED;

ALTER TABLE ONLY outgoing_calls
    ADD CONSTRAINT outgoing_calls_pkey PRIMARY KEY (org, session_id, call_id);

ALTER TABLE ONLY pauses
    ADD CONSTRAINT pauses_once UNIQUE NULLS NOT DISTINCT (org, destination);

ALTER TABLE ONLY remembered_answers
    ADD CONSTRAINT remembered_answers_pkey PRIMARY KEY (org, session_id, subject, request, request_key);

ALTER TABLE ONLY schema_support
    ADD CONSTRAINT schema_support_pkey PRIMARY KEY (is_only);

ALTER TABLE ONLY sessions
    ADD CONSTRAINT sessions_pkey PRIMARY KEY (org, session_id);

ALTER TABLE ONLY tools
    ADD CONSTRAINT tools_pkey PRIMARY KEY (org, name, version);

ALTER TABLE ONLY undo_stack
    ADD CONSTRAINT undo_stack_pkey PRIMARY KEY (org, session_id, stack_position);

CREATE INDEX approvals_by_age ON approvals USING btree (org, requested_at, session_id, step_index);

CREATE INDEX approvals_expiring ON approvals USING btree (expires_at) WHERE (state = ANY (ARRAY['pending'::approval_state, 'approved'::approval_state]));

CREATE INDEX approvals_open ON approvals USING btree (org, requested_at, session_id, step_index) WHERE (state = ANY (ARRAY['pending'::approval_state, 'approved'::approval_state]));

CREATE UNIQUE INDEX effect_log_by_request_key ON effect_log USING btree (org, session_id, request_key) WHERE (request_key IS NOT NULL);

CREATE UNIQUE INDEX journal_decisions ON journal USING btree (org, session_id, step) WHERE (kind = ANY (ARRAY['APPROVED'::entry_kind, 'REJECTED'::entry_kind]));

CREATE INDEX outgoing_calls_due ON outgoing_calls USING btree (org, destination, due_at) WHERE (due_at IS NOT NULL);

CREATE INDEX outgoing_calls_ending ON outgoing_calls USING btree (deadline_at) WHERE (due_at IS NOT NULL);

CREATE INDEX sessions_active ON sessions USING btree (org, session_id) WHERE (state = 'active'::session_state);

CREATE INDEX sessions_by_age ON sessions USING btree (org, created_at DESC, session_id);

CREATE INDEX sessions_halted ON sessions USING btree (org, halted_at, session_id) WHERE (state = 'halted'::session_state);

CREATE INDEX sessions_open ON sessions USING btree (state, created_at, failed_at, halted_at) WHERE (state = ANY (ARRAY['active'::session_state, 'awaiting_approval'::session_state, 'failed'::session_state, 'compensating'::session_state, 'halted'::session_state]));

CREATE INDEX sessions_prunable ON sessions USING btree (org, created_at, session_id) WHERE ((state = 'completed'::session_state) OR ((state = 'compensated'::session_state) AND clean));

CREATE TRIGGER journal_is_insert_only BEFORE DELETE OR UPDATE ON journal FOR EACH ROW EXECUTE FUNCTION refuse_journal_change();

CREATE TRIGGER journal_is_not_truncated BEFORE TRUNCATE ON journal FOR EACH STATEMENT EXECUTE FUNCTION refuse_journal_change();

CREATE TRIGGER sessions_are_kept BEFORE DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION refuse_session_deletion();

ALTER TABLE ONLY approvals
    ADD CONSTRAINT approvals_org_session_id_step_index_fkey FOREIGN KEY (org, session_id, step_index) REFERENCES effect_log(org, session_id, step_index) ON DELETE CASCADE;

ALTER TABLE ONLY effect_log
    ADD CONSTRAINT effect_log_org_session_id_fkey FOREIGN KEY (org, session_id) REFERENCES sessions(org, session_id) ON DELETE CASCADE;

ALTER TABLE ONLY keys
    ADD CONSTRAINT keys_org_fkey FOREIGN KEY (org) REFERENCES orgs(org);

ALTER TABLE ONLY outgoing_calls
    ADD CONSTRAINT outgoing_calls_org_session_id_step_index_fkey FOREIGN KEY (org, session_id, step_index) REFERENCES effect_log(org, session_id, step_index) ON DELETE CASCADE;

ALTER TABLE ONLY pauses
    ADD CONSTRAINT pauses_org_fkey FOREIGN KEY (org) REFERENCES orgs(org);

ALTER TABLE ONLY remembered_answers
    ADD CONSTRAINT remembered_answers_org_session_id_fkey FOREIGN KEY (org, session_id) REFERENCES sessions(org, session_id) ON DELETE CASCADE;

ALTER TABLE ONLY undo_stack
    ADD CONSTRAINT undo_stack_org_session_id_stack_position_fkey FOREIGN KEY (org, session_id, stack_position) REFERENCES effect_log(org, session_id, step_index) ON DELETE CASCADE;

ALTER TABLE approvals ENABLE ROW LEVEL SECURITY;

ALTER TABLE circuits ENABLE ROW LEVEL SECURITY;

ALTER TABLE effect_log ENABLE ROW LEVEL SECURITY;

CREATE POLICY every_org ON approvals FOR SELECT TO countermand_dispatcher USING (true);

CREATE POLICY every_org ON circuits TO countermand_dispatcher USING (true);

CREATE POLICY every_org ON keys TO countermand_dispatcher USING (true);

CREATE POLICY every_org ON orgs FOR SELECT TO countermand_pruner USING (true);

CREATE POLICY every_org ON outgoing_calls TO countermand_dispatcher USING (true);

CREATE POLICY every_org ON pauses FOR SELECT TO countermand_dispatcher USING (true);

CREATE POLICY every_org ON sessions FOR SELECT TO countermand_dispatcher USING (true);

CREATE POLICY everything_is_paused ON pauses FOR INSERT TO countermand_dispatcher WITH CHECK ((org IS NULL));

CREATE POLICY everything_is_resumed ON pauses FOR DELETE TO countermand_dispatcher USING ((org IS NULL));

CREATE POLICY everything_is_seen ON pauses FOR SELECT TO countermand_runtime USING ((((current_setting('app.org'::text))::org_name IS NOT NULL) AND (org IS NULL)));

ALTER TABLE journal ENABLE ROW LEVEL SECURITY;

ALTER TABLE keys ENABLE ROW LEVEL SECURITY;

CREATE POLICY one_org ON approvals TO countermand_runtime USING (((org)::text = ((current_setting('app.org'::text))::org_name)::text));

CREATE POLICY one_org ON circuits TO countermand_runtime USING (((org)::text = ((current_setting('app.org'::text))::org_name)::text));

CREATE POLICY one_org ON effect_log TO countermand_runtime USING (((org)::text = ((current_setting('app.org'::text))::org_name)::text));

CREATE POLICY one_org ON journal TO countermand_runtime USING (((org)::text = ((current_setting('app.org'::text))::org_name)::text));

CREATE POLICY one_org ON keys TO countermand_runtime USING (((org)::text = ((current_setting('app.org'::text))::org_name)::text));

CREATE POLICY one_org ON orgs TO countermand_runtime USING (((org)::text = ((current_setting('app.org'::text))::org_name)::text));

CREATE POLICY one_org ON outgoing_calls TO countermand_runtime USING (((org)::text = ((current_setting('app.org'::text))::org_name)::text));

CREATE POLICY one_org ON pauses TO countermand_runtime USING (((org)::text = ((current_setting('app.org'::text))::org_name)::text));

CREATE POLICY one_org ON remembered_answers TO countermand_runtime USING (((org)::text = ((current_setting('app.org'::text))::org_name)::text));

CREATE POLICY one_org ON sessions TO countermand_runtime USING (((org)::text = ((current_setting('app.org'::text))::org_name)::text));

CREATE POLICY one_org ON tools TO countermand_runtime USING (((org)::text = ((current_setting('app.org'::text))::org_name)::text));

CREATE POLICY one_org ON undo_stack TO countermand_runtime USING (((org)::text = ((current_setting('app.org'::text))::org_name)::text));

CREATE POLICY one_org_pruned ON journal TO countermand_pruner USING (((org)::text = ((current_setting('app.org'::text))::org_name)::text));

CREATE POLICY one_org_pruned ON remembered_answers FOR SELECT TO countermand_pruner USING (((org)::text = ((current_setting('app.org'::text))::org_name)::text));

CREATE POLICY one_org_pruned ON sessions TO countermand_pruner USING (((org)::text = ((current_setting('app.org'::text))::org_name)::text));

ALTER TABLE orgs ENABLE ROW LEVEL SECURITY;

ALTER TABLE outgoing_calls ENABLE ROW LEVEL SECURITY;

ALTER TABLE pauses ENABLE ROW LEVEL SECURITY;

ALTER TABLE remembered_answers ENABLE ROW LEVEL SECURITY;

ALTER TABLE sessions ENABLE ROW LEVEL SECURITY;

ALTER TABLE tools ENABLE ROW LEVEL SECURITY;

ALTER TABLE undo_stack ENABLE ROW LEVEL SECURITY;

GRANT SELECT ON TABLE alembic_version TO countermand_runtime;

GRANT SELECT,INSERT ON TABLE approvals TO countermand_runtime;

GRANT SELECT(org) ON TABLE approvals TO countermand_dispatcher;

GRANT SELECT(session_id) ON TABLE approvals TO countermand_dispatcher;

GRANT SELECT(expires_at) ON TABLE approvals TO countermand_dispatcher;

GRANT UPDATE(state) ON TABLE approvals TO countermand_runtime;
GRANT SELECT(state) ON TABLE approvals TO countermand_dispatcher;

GRANT UPDATE(decided_at) ON TABLE approvals TO countermand_runtime;

GRANT UPDATE(decided_by) ON TABLE approvals TO countermand_runtime;

GRANT UPDATE(claimed_approver) ON TABLE approvals TO countermand_runtime;

GRANT UPDATE(reason) ON TABLE approvals TO countermand_runtime;

GRANT UPDATE(is_continued) ON TABLE approvals TO countermand_runtime;

GRANT UPDATE(released_at) ON TABLE approvals TO countermand_runtime;

GRANT UPDATE(released_to) ON TABLE approvals TO countermand_runtime;

GRANT UPDATE(release_key) ON TABLE approvals TO countermand_runtime;

GRANT SELECT,INSERT,DELETE ON TABLE circuits TO countermand_runtime;
GRANT DELETE ON TABLE circuits TO countermand_dispatcher;

GRANT SELECT(org) ON TABLE circuits TO countermand_dispatcher;

GRANT SELECT(destination) ON TABLE circuits TO countermand_dispatcher;

GRANT UPDATE(probe_at) ON TABLE circuits TO countermand_runtime;
GRANT SELECT(probe_at),UPDATE(probe_at) ON TABLE circuits TO countermand_dispatcher;

GRANT SELECT(probes),UPDATE(probes) ON TABLE circuits TO countermand_dispatcher;

GRANT SELECT(probe_session_id),UPDATE(probe_session_id) ON TABLE circuits TO countermand_dispatcher;

GRANT SELECT(probe_call_id),UPDATE(probe_call_id) ON TABLE circuits TO countermand_dispatcher;

GRANT UPDATE(last_error) ON TABLE circuits TO countermand_runtime;

GRANT SELECT,INSERT,UPDATE ON TABLE effect_log TO countermand_runtime;

GRANT SELECT,INSERT ON TABLE journal TO countermand_runtime;
GRANT DELETE ON TABLE journal TO countermand_pruner;

GRANT SELECT(org) ON TABLE journal TO countermand_pruner;

GRANT SELECT(session_id) ON TABLE journal TO countermand_pruner;

GRANT SELECT,INSERT ON TABLE keys TO countermand_runtime;
GRANT SELECT ON TABLE keys TO countermand_dispatcher;

GRANT UPDATE(revoked_at) ON TABLE keys TO countermand_runtime;

GRANT SELECT,INSERT ON TABLE orgs TO countermand_runtime;
GRANT SELECT ON TABLE orgs TO countermand_pruner;

GRANT SELECT,INSERT,UPDATE ON TABLE outgoing_calls TO countermand_runtime;

GRANT SELECT(org) ON TABLE outgoing_calls TO countermand_dispatcher;

GRANT SELECT(session_id) ON TABLE outgoing_calls TO countermand_dispatcher;

GRANT SELECT(call_id) ON TABLE outgoing_calls TO countermand_dispatcher;

GRANT SELECT(destination) ON TABLE outgoing_calls TO countermand_dispatcher;

GRANT SELECT(attempts) ON TABLE outgoing_calls TO countermand_dispatcher;

GRANT SELECT(due_at) ON TABLE outgoing_calls TO countermand_dispatcher;

GRANT SELECT(deadline_at) ON TABLE outgoing_calls TO countermand_dispatcher;

GRANT SELECT(leased_by),UPDATE(leased_by) ON TABLE outgoing_calls TO countermand_dispatcher;

GRANT SELECT(leased_until),UPDATE(leased_until) ON TABLE outgoing_calls TO countermand_dispatcher;

GRANT SELECT(epoch),UPDATE(epoch) ON TABLE outgoing_calls TO countermand_dispatcher;

GRANT SELECT(kind) ON TABLE outgoing_calls TO countermand_dispatcher;

GRANT SELECT,INSERT,DELETE ON TABLE pauses TO countermand_runtime;
GRANT INSERT,DELETE ON TABLE pauses TO countermand_dispatcher;

GRANT SELECT(org) ON TABLE pauses TO countermand_dispatcher;

GRANT SELECT(destination) ON TABLE pauses TO countermand_dispatcher;

GRANT SELECT,INSERT ON TABLE remembered_answers TO countermand_runtime;

GRANT SELECT(org) ON TABLE remembered_answers TO countermand_pruner;

GRANT SELECT(session_id) ON TABLE remembered_answers TO countermand_pruner;

GRANT SELECT(answered_at) ON TABLE remembered_answers TO countermand_pruner;

GRANT SELECT ON TABLE schema_support TO countermand_runtime;

GRANT SELECT,INSERT,UPDATE ON TABLE sessions TO countermand_runtime;
GRANT DELETE ON TABLE sessions TO countermand_pruner;

GRANT SELECT(org) ON TABLE sessions TO countermand_dispatcher;
GRANT SELECT(org),UPDATE(org) ON TABLE sessions TO countermand_pruner;

GRANT SELECT(session_id) ON TABLE sessions TO countermand_dispatcher;
GRANT SELECT(session_id) ON TABLE sessions TO countermand_pruner;

GRANT SELECT(state) ON TABLE sessions TO countermand_dispatcher;
GRANT SELECT(state) ON TABLE sessions TO countermand_pruner;

GRANT SELECT(clean) ON TABLE sessions TO countermand_pruner;

GRANT SELECT(last_step) ON TABLE sessions TO countermand_pruner;

GRANT SELECT(idle_seconds) ON TABLE sessions TO countermand_dispatcher;

GRANT SELECT(deadline_at) ON TABLE sessions TO countermand_dispatcher;

GRANT SELECT(failed_at) ON TABLE sessions TO countermand_dispatcher;

GRANT SELECT(created_at) ON TABLE sessions TO countermand_dispatcher;
GRANT SELECT(created_at) ON TABLE sessions TO countermand_pruner;

GRANT SELECT(active_at) ON TABLE sessions TO countermand_dispatcher;
GRANT SELECT(active_at) ON TABLE sessions TO countermand_pruner;

GRANT SELECT(halted_at) ON TABLE sessions TO countermand_dispatcher;

GRANT SELECT,INSERT ON TABLE tools TO countermand_runtime;

GRANT SELECT,INSERT,UPDATE ON TABLE undo_stack TO countermand_runtime;
