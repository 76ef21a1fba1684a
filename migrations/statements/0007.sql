-- What the code of one revision asks the database: `make schema` rewrites the newest file, the older ones stay as they are.

-- ADD_TOOL_SQL
INSERT INTO tools (org, name, version, definition, is_deleted, created_by)
VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (org, name, version) DO NOTHING
RETURNING created_at;

-- ALL_STEPS_SQL
SELECT
  asked.session_id,
  e.step_index AS e_step_index, e.effect_id AS e_effect_id, e.tool AS e_tool, e.tool_version AS e_tool_version,
  e.reversibility::text AS e_reversibility,
  e.state::text AS e_state, e.outcome::text AS e_outcome, e.payload AS e_payload, e.payload_sha256 AS e_payload_sha256,
  e.result AS e_result, e.error AS e_error, e.request_key AS e_request_key, e.request_sha256 AS e_request_sha256,
  e.attempt AS e_attempt, e.traceparent AS e_traceparent, e.registered_at AS e_registered_at, e.executed_at AS e_executed_at,
  e.version AS e_version,
  u.undo_id AS u_undo_id, u.stack_position AS u_stack_position, u.state::text AS u_state, u.compensation AS u_compensation,
  u.by_hand AS u_by_hand, u.registered_at AS u_registered_at, u.compensated_at AS u_compensated_at,
  question.step_index IS NOT NULL AS has_question
FROM unnest($2::text[]) AS asked (session_id)
CROSS JOIN LATERAL (
  SELECT
    step_index, effect_id, tool, tool_version, reversibility, state, outcome, payload, payload_sha256, result, error, request_key,
    request_sha256, attempt, traceparent, registered_at, executed_at, version
  FROM effect_log
  WHERE org = $1 AND session_id = asked.session_id
  ORDER BY step_index
  LIMIT $3
) AS e
LEFT JOIN LATERAL (
  SELECT undo_id, stack_position, state, compensation, by_hand, registered_at, compensated_at
  FROM undo_stack
  WHERE org = $1 AND session_id = asked.session_id AND stack_position = e.step_index
  LIMIT 1
) AS u ON true
LEFT JOIN LATERAL (
  SELECT step_index
  FROM approvals
  WHERE org = $1 AND session_id = asked.session_id AND step_index = e.step_index
  LIMIT 1
) AS question ON true;

-- APPROVALS_SQL
WITH page AS MATERIALIZED (
  (
    SELECT session_id, step_index, requested_at
    FROM approvals
    WHERE $2::text IN ('pending', 'approved')
      AND org = $1
      AND state IN ('pending', 'approved')
      AND state = $2::approval_state
      AND expires_at > clock_timestamp()
      AND ($3::timestamptz IS NULL OR (requested_at, session_id, step_index) > ($3, $4, $5::bigint))
    ORDER BY requested_at, session_id, step_index
    LIMIT $6
  )
  UNION ALL
  (
    SELECT session_id, step_index, requested_at
    FROM approvals
    WHERE ($2::text IS NULL OR $2::text NOT IN ('pending', 'approved'))
      AND org = $1
      AND ($2::text IS NULL OR state = $2::approval_state)
      AND ($3::timestamptz IS NULL OR (requested_at, session_id, step_index) > ($3, $4, $5::bigint))
    ORDER BY requested_at, session_id, step_index
    LIMIT $6
  )
)
SELECT p.session_id, p.step_index, p.requested_at, s.agent, t.version AS t_version, t.definition AS t_definition
FROM page AS p
CROSS JOIN LATERAL (
  SELECT agent
  FROM sessions
  WHERE org = $1 AND session_id = p.session_id
  LIMIT 1
) AS s
CROSS JOIN LATERAL (
  SELECT tool, tool_version
  FROM effect_log
  WHERE org = $1 AND session_id = p.session_id AND step_index = p.step_index
  LIMIT 1
) AS e
LEFT JOIN LATERAL (
  SELECT version, definition
  FROM tools
  WHERE org = $1 AND name = e.tool AND version = e.tool_version
  LIMIT 1
) AS t ON true
ORDER BY p.requested_at, p.session_id, p.step_index
LIMIT $6;

-- APPROVED_SQL
SELECT
  j.seq, j.kind::text, j.step, j.actor, j.at, j.body, j.content, j.prev_hash, j.hash,
  coalesce(successor.prev_hash, s.journal_hash) AS linked_by
FROM journal AS j
JOIN sessions AS s ON s.org = j.org AND s.session_id = j.session_id
LEFT JOIN LATERAL (
  SELECT prev_hash
  FROM journal
  WHERE org = $1 AND session_id = $2 AND seq = j.seq + 1
  LIMIT 1
) AS successor ON true
WHERE j.org = $1 AND j.session_id = $2 AND j.step = $3 AND j.kind = 'APPROVED'
LIMIT 1;

-- CLOSE_CIRCUIT_SQL
WITH closed AS (
  DELETE FROM circuits
  WHERE org = $1 AND destination = $2
  RETURNING org
)
SELECT pg_notify('countermand_due', '') IS NOT NULL
FROM closed;

-- COUNT_CRASH_SQL
WITH crashed AS (
  SELECT org, session_id, call_id, is_attempt_open
  FROM outgoing_calls
  WHERE org = $1 AND session_id = $2 AND call_id = $3 AND epoch = $4 AND due_at IS NOT NULL
  FOR NO KEY UPDATE
)
UPDATE outgoing_calls AS o
SET
  interrupted = o.interrupted + 1,
  is_attempt_open = false,
  may_be_processing = o.may_be_processing OR o.is_attempt_open,
  last_error = $5,
  due_at = greatest(o.due_at, clock_timestamp() + make_interval(secs => least($6, power(2, least(o.interrupted, 30))))),
  leased_by = NULL,
  leased_until = NULL
FROM crashed AS c
WHERE o.org = c.org AND o.session_id = c.session_id AND o.call_id = c.call_id
RETURNING o.interrupted, c.is_attempt_open;

-- COUNT_PAST_SQL
SELECT
  count(*) FILTER (WHERE s.state = 'completed' OR (s.state = 'compensated' AND s.clean)) AS prunable,
  count(*) FILTER (WHERE s.state = 'resolved' OR (s.state = 'compensated' AND NOT s.clean)) AS kept
FROM sessions AS s
WHERE s.org = $1
  AND s.created_at <= statement_timestamp() - make_interval(days => $2)
  AND s.active_at <= statement_timestamp() - make_interval(days => $2)
  AND NOT EXISTS (
    SELECT FROM remembered_answers AS a
    WHERE a.org = $1 AND a.session_id = s.session_id AND a.answered_at > statement_timestamp() - make_interval(days => $2)
  );

-- CREATE_KEY_SQL
WITH tenant AS (
  INSERT INTO orgs (org) VALUES ($1) ON CONFLICT (org) DO NOTHING
)
INSERT INTO keys (org, key_id, secret_sha256, role, subject)
VALUES ($1, $2, $3, $4::text::key_role, $5)
RETURNING key_id;

-- DECISIONS_SQL
SELECT seq, kind::text, step, actor, at, body, content, prev_hash, hash
FROM journal
WHERE org = $1 AND session_id = $2
  AND (
    kind = ANY ($3::entry_kind[])
    OR (kind IN ('SKIPPED', 'COMPENSATED') AND actor <> 'orchestrator' AND actor NOT LIKE 'agent:%')
  )
ORDER BY seq DESC
LIMIT $4;

-- DELETE_JOURNAL_SQL
DELETE FROM journal
WHERE org = $1 AND session_id = ANY ($2::text[]);

-- DELETE_SESSIONS_SQL
DELETE FROM sessions
WHERE org = $1 AND session_id = ANY ($2::text[])
RETURNING session_id;

-- DESTINATIONS_SQL
WITH RECURSIVE busy AS (
  (
    SELECT destination
    FROM outgoing_calls
    WHERE due_at IS NOT NULL AND org = $1 AND destination > $2
    ORDER BY destination
    LIMIT 1
  )
  UNION ALL
  SELECT next.destination
  FROM busy AS b
  CROSS JOIN LATERAL (
    SELECT destination
    FROM outgoing_calls
    WHERE due_at IS NOT NULL AND org = $1 AND destination > b.destination
    ORDER BY destination
    LIMIT 1
  ) AS next
),
named AS (
  (SELECT destination FROM busy LIMIT $3)
  UNION
  SELECT destination FROM circuits WHERE org = $1 AND destination > $2
  UNION
  SELECT destination FROM pauses WHERE org = $1 AND destination > $2
  ORDER BY destination
  LIMIT $3
)
SELECT
  n.destination, calls.due, calls.in_flight, calls.later, calls.oldest_due_at, c.opened_at, c.probe_at, c.last_error,
  p.scope, p.paused_at, p.paused_by, p.reason
FROM named AS n
LEFT JOIN circuits AS c ON c.org = $1 AND c.destination = n.destination
LEFT JOIN LATERAL (
  SELECT
    CASE WHEN org IS NULL THEN 'everything' WHEN destination IS NULL THEN 'org' ELSE 'destination' END AS scope,
    paused_at, CASE WHEN org IS NOT NULL THEN paused_by END AS paused_by, reason
  FROM pauses
  WHERE (org IS NULL OR org = $1) AND (destination IS NULL OR destination = n.destination)
  ORDER BY org IS NOT NULL, destination IS NOT NULL
  LIMIT 1
) AS p ON true
CROSS JOIN LATERAL (
  SELECT
    count(*) FILTER (WHERE o.is_due AND NOT o.is_held) AS due,
    count(*) FILTER (WHERE o.is_held) AS in_flight,
    count(*) FILTER (WHERE NOT o.is_due AND NOT o.is_held) AS later,
    min(o.due_at) FILTER (WHERE o.is_due AND NOT o.is_held) AS oldest_due_at
  FROM (
    SELECT due_at, due_at <= statement_timestamp() AS is_due, coalesce(leased_until > statement_timestamp(), false) AS is_held
    FROM outgoing_calls
    WHERE org = $1 AND destination = n.destination AND due_at IS NOT NULL
  ) AS o
) AS calls
ORDER BY n.destination;

-- DROP_IDLE_SQL
DELETE FROM circuits AS c
WHERE NOT EXISTS (
  SELECT FROM outgoing_calls AS o
  WHERE o.org = c.org AND o.destination = c.destination AND o.due_at IS NOT NULL
)
RETURNING c.org, c.destination;

-- FIND_ANSWERS_SQL
SELECT asked.session_id, found.request_sha256, found.status, found.body
FROM unnest($2::text[], $3::text[], $4::text[], $5::text[]) AS asked (session_id, subject, request, request_key)
CROSS JOIN LATERAL (
  SELECT request_sha256, status, body
  FROM remembered_answers
  WHERE org = $1 AND session_id = asked.session_id AND subject = asked.subject AND request = asked.request
    AND request_key = asked.request_key
  LIMIT 1
) AS found;

-- FIND_KEY_SQL
SELECT org, key_id, secret_sha256, role::text, subject
FROM keys
WHERE key_id = $1 AND revoked_at IS NULL
LIMIT 1;

-- FIRST_EXPIRY_SQL
SELECT extract(epoch FROM expires_at - statement_timestamp())::float8 AS seconds
FROM approvals
WHERE state IN ('pending', 'approved')
ORDER BY expires_at
LIMIT 1;

-- GIVE_BACK_SQL
UPDATE outgoing_calls AS o
SET leased_by = NULL, leased_until = NULL
FROM outgoing_calls AS mine
WHERE mine.org = $1 AND mine.session_id = $2 AND mine.call_id = $4 AND mine.epoch = $5
  AND o.org = $1 AND o.session_id = $2 AND o.leased_by = $3
  AND (
    o.call_id = $4
    OR o.epoch = 0 AND NOT EXISTS (
      SELECT FROM outgoing_calls AS passed
      WHERE passed.org = $1 AND passed.session_id = $2 AND passed.step_index < mine.step_index AND passed.step_index > o.step_index
    )
  )
RETURNING o.call_id;

-- HALTED_SQL
SELECT
  session_id, owner, agent, metadata, state::text, halt_reason::text, clean, pivoted, late_effect, last_step, idle_seconds, deadline_at,
  failed_at, halted_at, halt_ordered, created_at, updated_at, active_at, version, revision, journal_seq, journal_hash, journal_at,
  extract(epoch FROM clock_timestamp() - halted_at)::bigint AS age_seconds
FROM sessions
WHERE org = $1
  AND state = 'halted'
  AND ($2::text IS NULL OR halt_reason = $2::halt_reason)
  AND ($3::timestamptz IS NULL OR (halted_at, session_id) > ($3, $4))
ORDER BY halted_at, session_id
LIMIT $5;

-- HALT_COUNTS_SQL
SELECT
  halt_reason::text, count(*) AS count, min(halted_at) AS oldest_halted_at,
  extract(epoch FROM clock_timestamp() - min(halted_at))::bigint AS oldest_age_seconds
FROM sessions
WHERE org = $1 AND state = 'halted'
GROUP BY halt_reason
ORDER BY min(halted_at)
LIMIT 100;

-- HELD_SQL
SELECT
  ARRAY(SELECT destination FROM circuits WHERE org = $1) AS circuits,
  ARRAY(SELECT coalesce(destination, '') FROM pauses WHERE org = $1 OR org IS NULL) AS pauses;

-- KEEP_ANSWERS_SQL
INSERT INTO remembered_answers (org, session_id, subject, request, request_key, request_sha256, status, body)
SELECT $1::org_name, session_id, subject, request, request_key, request_sha256, status, body
FROM unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::bytea[], $7::integer[], $8::bytea[])
  AS kept (session_id, subject, request, request_key, request_sha256, status, body)
RETURNING request_key;

-- LEASE_SQL
UPDATE outgoing_calls AS o
SET leased_by = $5, leased_until = clock_timestamp() + make_interval(secs => $6), epoch = o.epoch + 1
FROM unnest($1::text[], $2::text[], $3::uuid[], $4::bigint[]) AS picked (org, session_id, call_id, epoch)
WHERE o.org = picked.org AND o.session_id = picked.session_id AND o.call_id = picked.call_id AND o.epoch = picked.epoch
RETURNING o.org, o.session_id, o.call_id, o.kind::text, o.destination, o.epoch;

-- LIST_TOOLS_SQL
SELECT newest.name, newest.version, newest.definition, newest.is_deleted, newest.created_by, newest.created_at
FROM (
  SELECT DISTINCT ON (name) name, version, definition, is_deleted, created_by, created_at
  FROM tools
  WHERE org = $1 AND ($2::text IS NULL OR name > $2)
  ORDER BY name, version DESC
) AS newest
WHERE NOT newest.is_deleted
ORDER BY newest.name
LIMIT $3;

-- LOCK_CALLS_SQL
SELECT
  call_id AS c_call_id, kind::text AS c_kind, step_index AS c_step_index, destination AS c_destination, url AS c_url, body AS c_body,
  outcome::text AS c_outcome, attempts AS c_attempts, failures AS c_failures, interrupted AS c_interrupted, polls AS c_polls,
  is_attempt_open AS c_is_attempt_open, may_be_processing AS c_may_be_processing, poll_url AS c_poll_url,
  last_status AS c_last_status, last_error AS c_last_error, due_at AS c_due_at, first_sent_at AS c_first_sent_at,
  deadline_at AS c_deadline_at, epoch AS c_epoch
FROM outgoing_calls
WHERE org = $1 AND session_id = $2 AND (due_at IS NOT NULL OR call_id = ANY ($3::uuid[])) IS TRUE
ORDER BY call_id
FOR NO KEY UPDATE;

-- LOCK_CALL_SQL
WITH locked AS MATERIALIZED (
  SELECT
    session_id, owner, agent, metadata, state::text, halt_reason::text, clean, pivoted, late_effect, last_step, idle_seconds,
    deadline_at, failed_at, halted_at, halt_ordered, created_at, updated_at, active_at, version, revision, journal_seq, journal_hash,
    journal_at
  FROM sessions
  WHERE org = $1 AND session_id = $2
  FOR NO KEY UPDATE
),
called AS MATERIALIZED (
  SELECT step_index
  FROM outgoing_calls
  WHERE org = $1 AND session_id = $2 AND call_id BETWEEN $3 AND $3
  ORDER BY call_id
  LIMIT 1
),
below AS MATERIALIZED (
  SELECT stack_position
  FROM undo_stack
  WHERE org = $1 AND session_id = $2 AND state = 'pending' AND stack_position < (SELECT step_index FROM called)
  ORDER BY stack_position DESC
  LIMIT 1
),
places AS MATERIALIZED (
  SELECT step_index AS stack_position FROM called
  UNION ALL
  SELECT stack_position FROM below
)
SELECT
  l.session_id, l.owner, l.agent, l.metadata, l.state, l.halt_reason, l.clean, l.pivoted, l.late_effect, l.last_step, l.idle_seconds,
  l.deadline_at, l.failed_at, l.halted_at, l.halt_ordered, l.created_at, l.updated_at, l.active_at, l.version, l.revision,
  l.journal_seq, l.journal_hash, l.journal_at,
  clock_timestamp() AS now, seen.revision AS seen_revision,
  e.step_index AS e_step_index, e.effect_id AS e_effect_id, e.tool AS e_tool, e.tool_version AS e_tool_version,
  e.reversibility::text AS e_reversibility,
  e.state::text AS e_state, e.outcome::text AS e_outcome, e.payload AS e_payload, e.payload_sha256 AS e_payload_sha256,
  e.result AS e_result, e.error AS e_error, e.request_key AS e_request_key, e.request_sha256 AS e_request_sha256,
  e.attempt AS e_attempt, e.traceparent AS e_traceparent, e.registered_at AS e_registered_at, e.executed_at AS e_executed_at,
  e.version AS e_version,
  u.undo_id AS u_undo_id, u.stack_position AS u_stack_position, u.state::text AS u_state, u.compensation AS u_compensation,
  u.by_hand AS u_by_hand, u.registered_at AS u_registered_at, u.compensated_at AS u_compensated_at,
  c.call_id AS c_call_id, c.kind AS c_kind, c.step_index AS c_step_index, c.destination AS c_destination, c.url AS c_url, c.body AS c_body,
  c.outcome AS c_outcome, c.attempts AS c_attempts, c.failures AS c_failures, c.interrupted AS c_interrupted, c.polls AS c_polls,
  c.is_attempt_open AS c_is_attempt_open, c.may_be_processing AS c_may_be_processing, c.poll_url AS c_poll_url,
  c.last_status AS c_last_status, c.last_error AS c_last_error, c.due_at AS c_due_at, c.first_sent_at AS c_first_sent_at,
  c.deadline_at AS c_deadline_at, c.epoch AS c_epoch,
  t.version AS t_version, t.definition AS t_definition,
  CASE
    WHEN EXISTS (SELECT FROM below) THEN EXISTS (
      SELECT FROM undo_stack AS f
      WHERE f.org = $1 AND f.session_id = $2 AND f.state = 'failed'
        AND f.stack_position > (SELECT stack_position FROM below) AND f.stack_position < (SELECT step_index FROM called)
    )
    ELSE EXISTS (SELECT FROM undo_stack AS f WHERE f.org = $1 AND f.session_id = $2 AND f.state = 'failed')
  END AS has_failed_entries,
  ARRAY(SELECT destination FROM circuits WHERE org = $1) AS circuits,
  ARRAY(SELECT coalesce(destination, '') FROM pauses WHERE org = $1 OR org IS NULL) AS pauses
FROM locked AS l
JOIN sessions AS seen ON seen.org = $1 AND seen.session_id = $2
CROSS JOIN places AS p
CROSS JOIN LATERAL (
  SELECT undo_id, stack_position, state, compensation, by_hand, registered_at, compensated_at
  FROM undo_stack
  WHERE org = $1 AND session_id = $2 AND stack_position = p.stack_position
  LIMIT 1
) AS u
CROSS JOIN LATERAL (
  SELECT
    step_index, effect_id, tool, tool_version, reversibility, state, outcome, payload, payload_sha256, result, error, request_key,
    request_sha256, attempt, traceparent, registered_at, executed_at, version
  FROM effect_log
  WHERE org = $1 AND session_id = $2 AND step_index = p.stack_position
  LIMIT 1
) AS e
LEFT JOIN LATERAL (
  SELECT
    call_id, kind::text, step_index, destination, url, body, outcome::text, attempts, failures, interrupted, polls, is_attempt_open,
    may_be_processing, poll_url, last_status, last_error, due_at, first_sent_at, deadline_at, epoch
  FROM outgoing_calls
  WHERE org = $1 AND session_id = $2 AND call_id BETWEEN u.undo_id AND u.undo_id
  ORDER BY call_id
  LIMIT 1
) AS c ON true
LEFT JOIN LATERAL (
  SELECT version, definition, is_deleted
  FROM tools
  WHERE org = $1 AND name = e.tool AND e.tool_version IS NOT NULL
  ORDER BY version DESC
  LIMIT 1
) AS t ON NOT t.is_deleted
ORDER BY u.stack_position DESC
LIMIT 2;

-- LOCK_SESSION_SQL
SELECT revision
FROM sessions
WHERE org = $1 AND session_id = $2
FOR NO KEY UPDATE;

-- LOCK_SQL
WITH locked AS MATERIALIZED (
  SELECT
    session_id, owner, agent, metadata, state::text, halt_reason::text, clean, pivoted, late_effect, last_step, idle_seconds,
    deadline_at, failed_at, halted_at, halt_ordered, created_at, updated_at, active_at, version, revision, journal_seq, journal_hash,
    journal_at
  FROM sessions
  WHERE org = $1 AND session_id = $2
  FOR NO KEY UPDATE
)
SELECT
  l.session_id, l.owner, l.agent, l.metadata, l.state, l.halt_reason, l.clean, l.pivoted, l.late_effect, l.last_step, l.idle_seconds,
  l.deadline_at, l.failed_at, l.halted_at, l.halt_ordered, l.created_at, l.updated_at, l.active_at, l.version, l.revision,
  l.journal_seq, l.journal_hash, l.journal_at,
  clock_timestamp() AS now, seen.revision AS seen_revision,
  e.step_index AS e_step_index, e.effect_id AS e_effect_id, e.tool AS e_tool, e.tool_version AS e_tool_version,
  e.reversibility::text AS e_reversibility,
  e.state::text AS e_state, e.outcome::text AS e_outcome, e.payload AS e_payload, e.payload_sha256 AS e_payload_sha256,
  e.result AS e_result, e.error AS e_error, e.request_key AS e_request_key, e.request_sha256 AS e_request_sha256,
  e.attempt AS e_attempt, e.traceparent AS e_traceparent, e.registered_at AS e_registered_at, e.executed_at AS e_executed_at,
  e.version AS e_version,
  u.undo_id AS u_undo_id, u.stack_position AS u_stack_position, u.state::text AS u_state, u.compensation AS u_compensation,
  u.by_hand AS u_by_hand, u.registered_at AS u_registered_at, u.compensated_at AS u_compensated_at,
  a.state::text AS a_state, a.requested_by AS a_requested_by, a.requested_at AS a_requested_at, a.expires_at AS a_expires_at,
  a.ttl_seconds AS a_ttl_seconds, a.decided_at AS a_decided_at, a.decided_by AS a_decided_by,
  a.claimed_approver AS a_claimed_approver, a.reason AS a_reason, a.is_continued AS a_is_continued,
  a.released_at AS a_released_at, a.released_to AS a_released_to, a.release_key AS a_release_key,
  t.version AS t_version, t.definition AS t_definition
FROM locked AS l
JOIN sessions AS seen ON seen.org = $1 AND seen.session_id = $2
LEFT JOIN LATERAL (
  SELECT step_index FROM effect_log
  WHERE org = $1 AND session_id = $2 AND step_index = $3
  UNION
  SELECT step_index FROM effect_log
  WHERE org = $1 AND session_id = $2 AND request_key = $4
  UNION
  SELECT step_index FROM effect_log
  WHERE $5 AND org = $1 AND session_id = $2 AND state IN ('executing', 'unknown', 'awaiting_approval', 'approved')
  UNION
  (
    SELECT stack_position FROM undo_stack
    WHERE $6 AND org = $1 AND session_id = $2 AND state = 'pending'
    ORDER BY stack_position DESC
    LIMIT 2
  )
  UNION
  SELECT stack_position FROM undo_stack
  WHERE $7 AND org = $1 AND session_id = $2 AND state = 'pending'
  UNION
  SELECT stack_position FROM undo_stack
  WHERE $10 AND org = $1 AND session_id = $2 AND state = 'failed'
  UNION
  SELECT step_index FROM effect_log
  WHERE $8 AND org = $1 AND session_id = $2 AND reversibility = 'irreversible'
) AS wanted ON true
LEFT JOIN LATERAL (
  SELECT
    step_index, effect_id, tool, tool_version, reversibility, state, outcome, payload, payload_sha256, result, error, request_key,
    request_sha256, attempt, traceparent, registered_at, executed_at, version
  FROM effect_log
  WHERE org = $1 AND session_id = $2 AND step_index = wanted.step_index
  LIMIT 1
) AS e ON true
LEFT JOIN LATERAL (
  SELECT undo_id, stack_position, state, compensation, by_hand, registered_at, compensated_at
  FROM undo_stack
  WHERE org = $1 AND session_id = $2 AND stack_position = wanted.step_index
  LIMIT 1
) AS u ON true
LEFT JOIN LATERAL (
  SELECT
    state, requested_by, requested_at, expires_at, ttl_seconds, decided_at, decided_by, claimed_approver, reason, is_continued,
    released_at, released_to, release_key
  FROM approvals
  WHERE org = $1 AND session_id = $2 AND step_index = wanted.step_index
  LIMIT 1
) AS a ON true
LEFT JOIN LATERAL (
  SELECT version, definition, is_deleted
  FROM tools
  WHERE org = $1 AND name = $9
  ORDER BY version DESC
  LIMIT 1
) AS t ON NOT t.is_deleted
ORDER BY e.step_index;

-- LOCK_STEPS_SQL
SELECT
  l.session_id, l.owner, l.agent, l.metadata, l.state, l.halt_reason, l.clean, l.pivoted, l.late_effect, l.last_step, l.idle_seconds,
  l.deadline_at, l.failed_at, l.halted_at, l.halt_ordered, l.created_at, l.updated_at, l.active_at, l.version, l.revision,
  l.journal_seq, l.journal_hash, l.journal_at,
  clock_timestamp() AS now, seen.revision AS seen_revision,
  question.step_index IS NOT NULL OR known.step_index IS NOT NULL AS has_more,
  e.step_index AS e_step_index, e.effect_id AS e_effect_id, e.tool AS e_tool, e.tool_version AS e_tool_version,
  e.reversibility::text AS e_reversibility,
  e.state::text AS e_state, e.outcome::text AS e_outcome, e.payload AS e_payload, e.payload_sha256 AS e_payload_sha256,
  e.result AS e_result, e.error AS e_error, e.request_key AS e_request_key, e.request_sha256 AS e_request_sha256,
  e.attempt AS e_attempt, e.traceparent AS e_traceparent, e.registered_at AS e_registered_at, e.executed_at AS e_executed_at,
  e.version AS e_version,
  u.undo_id AS u_undo_id, u.stack_position AS u_stack_position, u.state::text AS u_state, u.compensation AS u_compensation,
  u.by_hand AS u_by_hand, u.registered_at AS u_registered_at, u.compensated_at AS u_compensated_at,
  t.version AS t_version, t.definition AS t_definition
FROM unnest($2::step_asked[]) AS asked
LEFT JOIN LATERAL (
  SELECT
    session_id, owner, agent, metadata, state::text, halt_reason::text, clean, pivoted, late_effect, last_step, idle_seconds,
    deadline_at, failed_at, halted_at, halt_ordered, created_at, updated_at, active_at, version, revision, journal_seq, journal_hash,
    journal_at
  FROM sessions
  WHERE org = $1 AND session_id = asked.session_id
  LIMIT 1
  FOR NO KEY UPDATE SKIP LOCKED
) AS l ON true
LEFT JOIN LATERAL (
  SELECT revision
  FROM sessions
  WHERE org = $1 AND session_id = asked.session_id
  LIMIT 1
) AS seen ON true
LEFT JOIN LATERAL (
  SELECT
    step_index, effect_id, tool, tool_version, reversibility, state, outcome, payload, payload_sha256, result, error, request_key,
    request_sha256, attempt, traceparent, registered_at, executed_at, version
  FROM effect_log
  WHERE org = $1 AND session_id = asked.session_id AND step_index = asked.step_index
  LIMIT 1
) AS e ON true
LEFT JOIN LATERAL (
  SELECT undo_id, stack_position, state, compensation, by_hand, registered_at, compensated_at
  FROM undo_stack
  WHERE org = $1 AND session_id = asked.session_id AND stack_position = asked.step_index
  LIMIT 1
) AS u ON true
LEFT JOIN LATERAL (
  SELECT step_index
  FROM approvals
  WHERE org = $1 AND session_id = asked.session_id AND step_index = asked.step_index
  LIMIT 1
) AS question ON true
LEFT JOIN LATERAL (
  SELECT step_index
  FROM effect_log
  WHERE org = $1 AND session_id = asked.session_id AND request_key = asked.request_key
  LIMIT 1
) AS known ON true
LEFT JOIN LATERAL (
  SELECT version, definition, is_deleted
  FROM tools
  WHERE org = $1 AND name = asked.tool
  ORDER BY version DESC
  LIMIT 1
) AS t ON NOT t.is_deleted;

-- LOCK_UNDOS_SQL
SELECT
  asked.call_id AS asked_call_id,
  l.session_id, l.owner, l.agent, l.metadata, l.state, l.halt_reason, l.clean, l.pivoted, l.late_effect, l.last_step, l.idle_seconds,
  l.deadline_at, l.failed_at, l.halted_at, l.halt_ordered, l.created_at, l.updated_at, l.active_at, l.version, l.revision,
  l.journal_seq, l.journal_hash, l.journal_at,
  clock_timestamp() AS now, seen.revision AS seen_revision,
  e.step_index AS e_step_index, e.effect_id AS e_effect_id, e.tool AS e_tool, e.tool_version AS e_tool_version,
  e.reversibility::text AS e_reversibility,
  e.state::text AS e_state, e.outcome::text AS e_outcome, e.payload AS e_payload, e.payload_sha256 AS e_payload_sha256,
  e.result AS e_result, e.error AS e_error, e.request_key AS e_request_key, e.request_sha256 AS e_request_sha256,
  e.attempt AS e_attempt, e.traceparent AS e_traceparent, e.registered_at AS e_registered_at, e.executed_at AS e_executed_at,
  e.version AS e_version,
  u.undo_id AS u_undo_id, u.stack_position AS u_stack_position, u.state::text AS u_state, u.compensation AS u_compensation,
  u.by_hand AS u_by_hand, u.registered_at AS u_registered_at, u.compensated_at AS u_compensated_at,
  c.call_id AS c_call_id, c.kind AS c_kind, c.step_index AS c_step_index, c.destination AS c_destination, c.url AS c_url, c.body AS c_body,
  c.outcome AS c_outcome, c.attempts AS c_attempts, c.failures AS c_failures, c.interrupted AS c_interrupted, c.polls AS c_polls,
  c.is_attempt_open AS c_is_attempt_open, c.may_be_processing AS c_may_be_processing, c.poll_url AS c_poll_url,
  c.last_status AS c_last_status, c.last_error AS c_last_error, c.due_at AS c_due_at, c.first_sent_at AS c_first_sent_at,
  c.deadline_at AS c_deadline_at, c.epoch AS c_epoch,
  t.version AS t_version, t.definition AS t_definition,
  failed.stack_position IS NOT NULL AS has_failed_entries,
  ARRAY(SELECT destination FROM circuits WHERE org = $1) AS circuits,
  ARRAY(SELECT coalesce(destination, '') FROM pauses WHERE org = $1 OR org IS NULL) AS pauses
FROM unnest($2::text[], $3::uuid[]) AS asked (session_id, call_id)
CROSS JOIN LATERAL (
  SELECT
    session_id, owner, agent, metadata, state::text, halt_reason::text, clean, pivoted, late_effect, last_step, idle_seconds,
    deadline_at, failed_at, halted_at, halt_ordered, created_at, updated_at, active_at, version, revision, journal_seq, journal_hash,
    journal_at
  FROM sessions
  WHERE org = $1 AND session_id = asked.session_id
  LIMIT 1
  FOR NO KEY UPDATE SKIP LOCKED
) AS l
CROSS JOIN LATERAL (
  SELECT revision
  FROM sessions
  WHERE org = $1 AND session_id = asked.session_id
  LIMIT 1
) AS seen
CROSS JOIN LATERAL (
  SELECT step_index
  FROM outgoing_calls
  WHERE org = $1 AND session_id = asked.session_id AND call_id BETWEEN asked.call_id AND asked.call_id
  ORDER BY call_id
  LIMIT 1
) AS called
LEFT JOIN LATERAL (
  SELECT stack_position
  FROM undo_stack
  WHERE org = $1 AND session_id = asked.session_id AND state = 'pending' AND stack_position < called.step_index
  ORDER BY stack_position DESC
  LIMIT 1
) AS below ON true
LEFT JOIN LATERAL (
  SELECT stack_position
  FROM undo_stack
  WHERE org = $1 AND session_id = asked.session_id AND state = 'failed'
    AND stack_position > coalesce(below.stack_position, 0)
    AND stack_position < CASE WHEN below.stack_position IS NULL THEN 2147483648 ELSE called.step_index::bigint END
  ORDER BY stack_position
  LIMIT 1
) AS failed ON true
CROSS JOIN LATERAL (VALUES (called.step_index), (below.stack_position)) AS p (stack_position)
CROSS JOIN LATERAL (
  SELECT undo_id, stack_position, state, compensation, by_hand, registered_at, compensated_at
  FROM undo_stack
  WHERE org = $1 AND session_id = asked.session_id AND stack_position = p.stack_position
  LIMIT 1
) AS u
CROSS JOIN LATERAL (
  SELECT
    step_index, effect_id, tool, tool_version, reversibility, state, outcome, payload, payload_sha256, result, error, request_key,
    request_sha256, attempt, traceparent, registered_at, executed_at, version
  FROM effect_log
  WHERE org = $1 AND session_id = asked.session_id AND step_index = p.stack_position
  LIMIT 1
) AS e
LEFT JOIN LATERAL (
  SELECT
    call_id, kind::text, step_index, destination, url, body, outcome::text, attempts, failures, interrupted, polls, is_attempt_open,
    may_be_processing, poll_url, last_status, last_error, due_at, first_sent_at, deadline_at, epoch
  FROM outgoing_calls
  WHERE org = $1 AND session_id = asked.session_id AND call_id BETWEEN u.undo_id AND u.undo_id
  ORDER BY call_id
  LIMIT 1
) AS c ON true
LEFT JOIN LATERAL (
  SELECT version, definition, is_deleted
  FROM tools
  WHERE org = $1 AND name = e.tool AND e.tool_version IS NOT NULL
  ORDER BY version DESC
  LIMIT 1
) AS t ON NOT t.is_deleted;

-- LOOK_SQL
WITH RECURSIVE places AS (
  (
    SELECT org, destination
    FROM outgoing_calls
    WHERE due_at IS NOT NULL AND (org, destination) > ($1::text, $2::text)
    ORDER BY org, destination
    LIMIT 1
  )
  UNION ALL
  SELECT next.org, next.destination
  FROM places AS p
  CROSS JOIN LATERAL (
    SELECT org, destination
    FROM outgoing_calls
    WHERE due_at IS NOT NULL AND (org, destination) > (p.org, p.destination)
    ORDER BY org, destination
    LIMIT 1
  ) AS next
)
SELECT
  p.org, p.destination, waiting.calls AS waiting, waiting.oldest_due_at, c.org IS NOT NULL AS is_open, coalesce(c.probes, 0) AS probes,
  c.org IS NOT NULL AND NOT h.is_paused AND c.probe_at <= statement_timestamp() AND coalesce((
    SELECT leased_until <= statement_timestamp()
    FROM outgoing_calls
    WHERE org = c.org AND session_id = c.probe_session_id AND call_id = c.probe_call_id
    LIMIT 1
  ), true) AS is_probe_due
FROM (SELECT org, destination FROM places LIMIT $3) AS p
LEFT JOIN circuits AS c ON c.org = p.org AND c.destination = p.destination
CROSS JOIN LATERAL (
  SELECT EXISTS (
    SELECT FROM pauses
    WHERE (org IS NULL OR org = p.org) AND (destination IS NULL OR destination = p.destination)
  ) AS is_paused
) AS h
CROSS JOIN LATERAL (
  SELECT count(*)::integer AS calls, min(due.due_at) AS oldest_due_at
  FROM (
    SELECT due_at
    FROM outgoing_calls
    WHERE c.org IS NULL AND NOT h.is_paused
      AND org = p.org AND destination = p.destination AND due_at <= statement_timestamp()
      AND (leased_until IS NULL OR leased_until <= statement_timestamp())
    ORDER BY due_at
    LIMIT $4
  ) AS due
) AS waiting
ORDER BY p.org, p.destination;

-- NEWEST_TOOL_SQL
SELECT name, version, definition, is_deleted, created_by, created_at
FROM tools
WHERE org = $1 AND name = $2 AND ($3::integer IS NULL OR version = $3)
ORDER BY version DESC
LIMIT 1;

-- NOTE_PROBE_SQL
UPDATE circuits
SET last_error = $3
WHERE org = $1 AND destination = $2
RETURNING true;

-- NOW_SQL
SELECT clock_timestamp();

-- OLDEST_REVISION_SQL
SELECT oldest_revision
FROM schema_support
LIMIT 1;

-- OPEN_CALLS_SQL
WITH held AS (
  SELECT
    destination,
    count(*) FILTER (
      WHERE due_at <= statement_timestamp() AND (leased_until IS NULL OR leased_until <= statement_timestamp())
    ) AS due,
    count(*) FILTER (WHERE leased_until > statement_timestamp()) AS in_flight
  FROM outgoing_calls
  WHERE due_at IS NOT NULL
  GROUP BY destination
),
ranked AS (
  SELECT destination, due, in_flight, row_number() OVER (ORDER BY due + in_flight DESC, destination) AS place
  FROM held
  WHERE due + in_flight > 0
)
SELECT CASE WHEN place <= $1 THEN destination ELSE $2 END AS destination, sum(due)::bigint AS due, sum(in_flight)::bigint AS in_flight
FROM ranked
GROUP BY 1;

-- OPEN_CIRCUITS_SQL
WITH ranked AS (
  SELECT destination, count(*) AS circuits, row_number() OVER (ORDER BY count(*) DESC, destination) AS place
  FROM circuits
  GROUP BY destination
)
SELECT CASE WHEN place <= $1 THEN destination ELSE $2 END AS destination, sum(circuits)::bigint AS circuits
FROM ranked
GROUP BY 1;

-- OPEN_CIRCUIT_SQL
INSERT INTO circuits (org, destination, probe_at, last_error)
VALUES ($1, $2, clock_timestamp() + make_interval(secs => $3), $4)
ON CONFLICT (org, destination) DO NOTHING
RETURNING true;

-- OPEN_SESSIONS_SQL
SELECT
  state::text,
  count(*) AS sessions,
  extract(epoch FROM statement_timestamp() - min(
    CASE
      WHEN state = 'halted' THEN halted_at
      WHEN state IN ('failed', 'compensating') THEN coalesce(failed_at, created_at)
      ELSE created_at
    END
  ))::float8 AS oldest_seconds
FROM sessions
WHERE state IN ('active', 'awaiting_approval', 'failed', 'compensating', 'halted')
GROUP BY state;

-- OPEN_SQL
INSERT INTO sessions (
  org, session_id, owner, agent, metadata, state, clean, pivoted, late_effect, last_step, idle_seconds, deadline_at,
  halt_ordered, created_at, updated_at, active_at, version, revision, journal_seq, journal_hash
)
SELECT $1, $2, $3, $4, $5, 'active', true, false, false, 0, $6, $7, false, moment, moment, moment, 0, 0, 0, $8
FROM clock_timestamp() AS moment
ON CONFLICT (org, session_id) DO NOTHING
RETURNING session_id;

-- OPEN_STEPS_SQL
SELECT
  e.step_index, e.effect_id, e.state::text, e.reversibility = 'read_only' AS is_read, e.reversibility = 'irreversible' AS is_irreversible,
  u.undo_id, c.attempts, c.last_status, c.last_error
FROM effect_log AS e
LEFT JOIN undo_stack AS u ON u.org = $1 AND u.session_id = $2 AND u.stack_position = e.step_index
LEFT JOIN outgoing_calls AS c ON c.org = $1 AND c.session_id = $2 AND c.call_id = u.undo_id
WHERE e.org = $1 AND e.session_id = $2 AND e.state = ANY ($3::effect_state[])
ORDER BY e.step_index;

-- ORGS_SQL
SELECT org
FROM orgs
ORDER BY org;

-- OVERDUE_SQL
(
  SELECT org, session_id
  FROM sessions
  WHERE state = 'active'
    AND (active_at + make_interval(secs => idle_seconds) <= clock_timestamp() OR deadline_at <= clock_timestamp())
  ORDER BY org, session_id
  LIMIT $1
)
UNION ALL
(
  SELECT org, session_id
  FROM approvals
  WHERE state IN ('pending', 'approved') AND expires_at <= statement_timestamp()
  ORDER BY expires_at
  LIMIT $1
);

-- PAUSES_SQL
SELECT
  CASE WHEN org IS NULL THEN 'everything' WHEN destination IS NULL THEN 'org' ELSE 'destination' END AS scope,
  count(*) AS pauses
FROM pauses
GROUP BY 1;

-- PAUSE_EVERYTHING_SQL
INSERT INTO pauses (org, destination, paused_by, reason)
VALUES (NULL, NULL, $1, $2)
ON CONFLICT (org, destination) DO NOTHING
RETURNING true;

-- PAUSE_SQL
INSERT INTO pauses (org, destination, paused_by, reason)
VALUES ($1, $2, $3, $4)
ON CONFLICT (org, destination) DO NOTHING
RETURNING true;

-- PICK_DUE_SQL
SELECT due.org, due.session_id, due.call_id, due.epoch
FROM unnest($1::text[], $2::text[], $3::integer[]) AS allotted (org, destination, calls)
CROSS JOIN LATERAL (
  SELECT org, session_id, call_id, epoch
  FROM outgoing_calls
  WHERE org = allotted.org AND destination = allotted.destination AND due_at <= statement_timestamp()
    AND (leased_until IS NULL OR leased_until <= statement_timestamp())
  ORDER BY due_at
  LIMIT allotted.calls
  FOR UPDATE SKIP LOCKED
) AS due;

-- PICK_LATE_SQL
SELECT org, session_id, call_id, epoch
FROM outgoing_calls
WHERE due_at IS NOT NULL AND deadline_at <= statement_timestamp()
  AND (leased_until IS NULL OR leased_until <= statement_timestamp())
ORDER BY deadline_at
LIMIT $1
FOR UPDATE SKIP LOCKED;

-- PICK_PROBES_SQL
WITH picked AS (
  SELECT due.org, due.session_id, due.call_id, due.epoch, probe.destination, probe.probes, probe.seconds
  FROM unnest($1::text[], $2::text[], $3::integer[], $4::float8[]) AS probe (org, destination, probes, seconds)
  CROSS JOIN LATERAL (
    SELECT org, session_id, call_id, epoch
    FROM outgoing_calls
    WHERE org = probe.org AND destination = probe.destination AND due_at <= statement_timestamp()
      AND (leased_until IS NULL OR leased_until <= statement_timestamp())
    ORDER BY attempts, due_at
    LIMIT 1
    FOR UPDATE SKIP LOCKED
  ) AS due
)
UPDATE circuits AS c
SET
  probe_at = clock_timestamp() + make_interval(secs => picked.seconds), probes = c.probes + 1,
  probe_session_id = picked.session_id, probe_call_id = picked.call_id
FROM picked
WHERE c.org = picked.org AND c.destination = picked.destination AND c.probes = picked.probes
RETURNING picked.org, picked.session_id, picked.call_id, picked.epoch;

-- POSITION_SQL
SELECT stack_position
FROM undo_stack
WHERE org = $1 AND session_id = $2 AND undo_id = $3
LIMIT 1;

-- PROBE_NOW_SQL
WITH asked AS (
  UPDATE circuits
  SET probe_at = clock_timestamp()
  WHERE org = $1 AND ($2::text IS NULL OR destination = $2)
  RETURNING org
)
SELECT count(*) AS circuits, pg_notify('countermand_due', '') IS NOT NULL AS woken
FROM asked;

-- PRUNABLE_SQL
SELECT s.session_id, s.last_step
FROM sessions AS s
WHERE s.org = $1
  AND (s.state = 'completed' OR (s.state = 'compensated' AND s.clean))
  AND s.active_at <= statement_timestamp() - make_interval(days => $2)
  AND NOT EXISTS (
    SELECT FROM remembered_answers AS a
    WHERE a.org = $1 AND a.session_id = s.session_id AND a.answered_at > statement_timestamp() - make_interval(days => $2)
  )
ORDER BY s.active_at, s.session_id
LIMIT $3
FOR UPDATE OF s SKIP LOCKED;

-- PUT_DOWN_SQL
WITH ended AS (
  SELECT step_index, state_before::effect_state, state::effect_state, outcome::outcome
  FROM unnest($3::integer[], $4::text[], $5::text[], $6::text[]) AS c (step_index, state_before, state, outcome)
),
effects AS (
  UPDATE effect_log AS e
  SET state = c.state, outcome = coalesce(c.outcome, e.outcome), version = e.version + 1
  FROM ended AS c
  WHERE e.org = $1 AND e.session_id = $2 AND e.step_index = c.step_index AND e.state = c.state_before
  RETURNING e.step_index
),
undo_entries AS (
  UPDATE undo_stack AS u
  SET state = 'failed'
  FROM ended AS c
  WHERE u.org = $1 AND u.session_id = $2 AND u.stack_position = c.step_index
    AND u.state = 'running' AND c.state = 'compensation_failed'
  RETURNING u.stack_position
),
questions AS (
  UPDATE approvals AS a
  SET state = 'cancelled'
  FROM ended AS c
  WHERE a.org = $1 AND a.session_id = $2 AND a.step_index = c.step_index
    AND a.state IN ('pending', 'approved') AND c.state = 'cancelled'
  RETURNING a.step_index
),
calls AS (
  UPDATE outgoing_calls
  SET
    due_at = NULL, leased_by = NULL, leased_until = NULL, is_attempt_open = false, may_be_processing = may_be_processing OR is_attempt_open
  WHERE org = $1 AND session_id = $2 AND (due_at IS NOT NULL) IS TRUE
  RETURNING call_id
)
SELECT
  (SELECT count(*) FROM effects) AS effects,
  (SELECT count(*) FROM undo_entries) AS undo_entries,
  (SELECT count(*) FROM questions) AS questions,
  (SELECT count(*) FROM calls) AS calls;

-- READ_JOURNAL_SQL
SELECT seq, kind::text, step, actor, at, body, content, prev_hash, hash
FROM journal
WHERE org = $1 AND session_id = $2 AND seq > $3
ORDER BY seq
LIMIT $4;

-- RELEASE_SQL
UPDATE outgoing_calls AS o
SET leased_by = NULL, leased_until = NULL
FROM unnest($1::text[], $2::text[], $3::uuid[], $4::bigint[]) AS mine (org, session_id, call_id, epoch)
WHERE o.org = mine.org AND o.session_id = mine.session_id AND o.call_id = mine.call_id AND o.epoch = mine.epoch
RETURNING o.call_id;

-- RENEW_SQL
UPDATE outgoing_calls AS o
SET leased_until = CASE WHEN o.leased_by IS NOT NULL THEN clock_timestamp() + make_interval(secs => $5) END
FROM unnest($1::text[], $2::text[], $3::uuid[], $4::bigint[]) AS mine (org, session_id, call_id, epoch)
WHERE o.org = mine.org AND o.session_id = mine.session_id AND o.call_id = mine.call_id AND o.epoch = mine.epoch
RETURNING o.call_id, o.epoch;

-- RESUME_EVERYTHING_SQL
WITH resumed AS (
  DELETE FROM pauses
  WHERE org IS NULL
  RETURNING true
)
SELECT pg_notify('countermand_due', '') IS NOT NULL
FROM resumed;

-- RESUME_SQL
DELETE FROM pauses
WHERE org = $1 AND destination IS NOT DISTINCT FROM $2
RETURNING true;

-- REVISION_SQL
SELECT version_num
FROM alembic_version
LIMIT 1;

-- SESSIONS_SQL
SELECT
  s.session_id, s.owner, s.agent, s.metadata, s.state::text, s.halt_reason::text, s.clean, s.pivoted, s.late_effect, s.last_step,
  s.idle_seconds, s.deadline_at, s.failed_at, s.halted_at, s.halt_ordered, s.created_at, s.updated_at, s.active_at, s.version,
  s.revision, s.journal_seq, s.journal_hash, s.journal_at
FROM sessions AS s
WHERE s.org = $1
  AND ($2::text IS NULL OR s.owner = $2)
  AND ($3::text IS NULL OR s.state = $3::session_state)
  AND ($4::text IS NULL OR s.agent = $4)
  AND ($5::text IS NULL OR EXISTS (
    SELECT FROM effect_log AS e WHERE e.org = $1 AND e.session_id = s.session_id AND e.tool = $5
  ))
  AND ($6::timestamptz IS NULL OR s.created_at < $6 OR (s.created_at = $6 AND s.session_id > $7))
ORDER BY s.created_at DESC, s.session_id
LIMIT $8;

-- SESSION_SQL
SELECT
  session_id, owner, agent, metadata, state::text, halt_reason::text, clean, pivoted, late_effect, last_step, idle_seconds, deadline_at,
  failed_at, halted_at, halt_ordered, created_at, updated_at, active_at, version, revision, journal_seq, journal_hash, journal_at
FROM sessions
WHERE org = $1 AND session_id = $2
LIMIT 1;

-- STEPS_SQL
SELECT
  e.step_index AS e_step_index, e.effect_id AS e_effect_id, e.tool AS e_tool, e.tool_version AS e_tool_version,
  e.reversibility::text AS e_reversibility,
  e.state::text AS e_state, e.outcome::text AS e_outcome, e.payload AS e_payload, e.payload_sha256 AS e_payload_sha256,
  e.result AS e_result, e.error AS e_error, e.request_key AS e_request_key, e.request_sha256 AS e_request_sha256,
  e.attempt AS e_attempt, e.traceparent AS e_traceparent, e.registered_at AS e_registered_at, e.executed_at AS e_executed_at,
  e.version AS e_version,
  a.state::text AS a_state, a.requested_by AS a_requested_by, a.requested_at AS a_requested_at, a.expires_at AS a_expires_at,
  a.ttl_seconds AS a_ttl_seconds, a.decided_at AS a_decided_at, a.decided_by AS a_decided_by,
  a.claimed_approver AS a_claimed_approver, a.reason AS a_reason, a.is_continued AS a_is_continued,
  a.released_at AS a_released_at, a.released_to AS a_released_to, a.release_key AS a_release_key,
  u.undo_id AS u_undo_id, u.stack_position AS u_stack_position, u.state::text AS u_state, u.compensation AS u_compensation,
  u.by_hand AS u_by_hand, u.registered_at AS u_registered_at, u.compensated_at AS u_compensated_at,
  c.call_id AS c_call_id, c.kind AS c_kind, c.step_index AS c_step_index, c.destination AS c_destination, c.url AS c_url, c.body AS c_body,
  c.outcome::text AS c_outcome, c.attempts AS c_attempts, c.failures AS c_failures, c.interrupted AS c_interrupted, c.polls AS c_polls,
  c.is_attempt_open AS c_is_attempt_open, c.may_be_processing AS c_may_be_processing, c.poll_url AS c_poll_url,
  c.last_status AS c_last_status, c.last_error AS c_last_error, c.due_at AS c_due_at, c.first_sent_at AS c_first_sent_at,
  c.deadline_at AS c_deadline_at, c.epoch AS c_epoch,
  x.call_id AS x_call_id, x.kind AS x_kind, x.step_index AS x_step_index, x.destination AS x_destination, x.url AS x_url, x.body AS x_body,
  x.outcome::text AS x_outcome, x.attempts AS x_attempts, x.failures AS x_failures, x.interrupted AS x_interrupted, x.polls AS x_polls,
  x.is_attempt_open AS x_is_attempt_open, x.may_be_processing AS x_may_be_processing, x.poll_url AS x_poll_url,
  x.last_status AS x_last_status, x.last_error AS x_last_error, x.due_at AS x_due_at, x.first_sent_at AS x_first_sent_at,
  x.deadline_at AS x_deadline_at, x.epoch AS x_epoch
FROM effect_log AS e
LEFT JOIN LATERAL (
  SELECT
    state, requested_by, requested_at, expires_at, ttl_seconds, decided_at, decided_by, claimed_approver, reason, is_continued,
    released_at, released_to, release_key
  FROM approvals
  WHERE org = $1 AND session_id = $2 AND step_index = e.step_index
  LIMIT 1
) AS a ON true
LEFT JOIN LATERAL (
  SELECT undo_id, stack_position, state, compensation, by_hand, registered_at, compensated_at
  FROM undo_stack
  WHERE org = $1 AND session_id = $2 AND stack_position = e.step_index
  LIMIT 1
) AS u ON true
LEFT JOIN LATERAL (
  SELECT
    call_id, kind::text, step_index, destination, url, body, outcome, attempts, failures, interrupted, polls, is_attempt_open,
    may_be_processing, poll_url, last_status, last_error, due_at, first_sent_at, deadline_at, epoch
  FROM outgoing_calls
  WHERE org = $1 AND session_id = $2 AND step_index BETWEEN e.step_index AND e.step_index AND kind = 'undo'
  ORDER BY step_index
  LIMIT 1
) AS c ON true
LEFT JOIN LATERAL (
  SELECT
    call_id, kind::text, step_index, destination, url, body, outcome, attempts, failures, interrupted, polls, is_attempt_open,
    may_be_processing, poll_url, last_status, last_error, due_at, first_sent_at, deadline_at, epoch
  FROM outgoing_calls
  WHERE org = $1 AND session_id = $2 AND step_index BETWEEN e.step_index AND e.step_index AND kind = 'action'
  ORDER BY step_index
  LIMIT 1
) AS x ON true
WHERE e.org = $1 AND e.session_id = $2 AND e.step_index BETWEEN $3 AND $4
ORDER BY e.step_index DESC
LIMIT $5;

-- WIDEST_PAUSE_SQL
SELECT
  CASE WHEN org IS NULL THEN 'everything' WHEN destination IS NULL THEN 'org' ELSE 'destination' END AS scope,
  paused_at, CASE WHEN org IS NOT NULL THEN paused_by END AS paused_by, reason
FROM pauses
WHERE (org IS NULL OR org = $1) AND (destination IS NULL OR destination = $2)
ORDER BY org IS NOT NULL, destination IS NOT NULL
LIMIT 1;

-- WRITE_SQL
WITH put_sessions AS (
  INSERT INTO sessions AS s (
    org, session_id, owner, agent, metadata, state, halt_reason, clean, pivoted, late_effect, last_step, idle_seconds, deadline_at,
    failed_at, halted_at, halt_ordered, created_at, updated_at, active_at, version, revision, journal_seq, journal_hash, journal_at
  )
  SELECT
    $1::org_name, session_id, owner, agent, metadata, state, halt_reason, clean, pivoted, late_effect, last_step, idle_seconds, deadline_at,
    failed_at, halted_at, halt_ordered, created_at, updated_at, active_at, version, revision, journal_seq, journal_hash, journal_at
  FROM unnest($4::session_written[])
  ON CONFLICT (org, session_id) DO UPDATE
  SET
    state = EXCLUDED.state, halt_reason = EXCLUDED.halt_reason, clean = EXCLUDED.clean, pivoted = EXCLUDED.pivoted,
    late_effect = EXCLUDED.late_effect, last_step = EXCLUDED.last_step, failed_at = EXCLUDED.failed_at, halted_at = EXCLUDED.halted_at,
    halt_ordered = EXCLUDED.halt_ordered, updated_at = EXCLUDED.updated_at, active_at = EXCLUDED.active_at, version = EXCLUDED.version,
    revision = EXCLUDED.revision, journal_seq = EXCLUDED.journal_seq, journal_hash = EXCLUDED.journal_hash,
    journal_at = EXCLUDED.journal_at
  WHERE s.revision = EXCLUDED.revision - 1
  RETURNING session_id
),
put_effects AS (
  INSERT INTO effect_log AS e (
    org, session_id, step_index, effect_id, tool, tool_version, reversibility, state, outcome, payload, payload_sha256, result, error,
    request_key, request_sha256, attempt, traceparent, registered_at, executed_at, version
  )
  SELECT
    $1::org_name, session_id, step_index, effect_id, tool, tool_version, reversibility, state, outcome, payload, payload_sha256, result,
    error, request_key, request_sha256, attempt, traceparent, registered_at, executed_at, version
  FROM unnest($5::effect_written[])
  ON CONFLICT (org, session_id, step_index) DO UPDATE
  SET
    state = EXCLUDED.state, outcome = EXCLUDED.outcome, result = EXCLUDED.result, error = EXCLUDED.error, attempt = EXCLUDED.attempt,
    executed_at = EXCLUDED.executed_at, version = EXCLUDED.version
  WHERE e.effect_id = EXCLUDED.effect_id AND e.version = EXCLUDED.version - 1
  RETURNING step_index
),
put_approvals AS (
  INSERT INTO approvals AS a (
    org, session_id, step_index, state, requested_by, requested_at, expires_at, ttl_seconds, decided_at, decided_by, claimed_approver,
    reason, is_continued, released_at, released_to, release_key
  )
  SELECT
    $1::org_name, session_id, step_index, state, requested_by, requested_at, expires_at, ttl_seconds, decided_at, decided_by,
    claimed_approver, reason, is_continued, released_at, released_to, release_key
  FROM unnest($6::approval_written[])
  ON CONFLICT (org, session_id, step_index) DO UPDATE
  SET
    state = EXCLUDED.state, decided_at = EXCLUDED.decided_at, decided_by = EXCLUDED.decided_by,
    claimed_approver = EXCLUDED.claimed_approver, reason = EXCLUDED.reason, is_continued = EXCLUDED.is_continued,
    released_at = EXCLUDED.released_at, released_to = EXCLUDED.released_to, release_key = EXCLUDED.release_key
  WHERE a.requested_at = EXCLUDED.requested_at AND a.state IN ('pending', 'approved')
  RETURNING step_index
),
put_undo_entries AS (
  INSERT INTO undo_stack AS u (org, session_id, stack_position, undo_id, state, compensation, by_hand, registered_at, compensated_at)
  SELECT $1::org_name, session_id, stack_position, undo_id, state, compensation, by_hand, registered_at, compensated_at
  FROM unnest($7::undo_written[])
  ON CONFLICT (org, session_id, stack_position) DO UPDATE
  SET state = EXCLUDED.state, by_hand = EXCLUDED.by_hand, compensated_at = EXCLUDED.compensated_at
  WHERE u.undo_id = EXCLUDED.undo_id AND u.state NOT IN ('compensated', 'skipped')
  RETURNING stack_position
),
put_calls AS (
  INSERT INTO outgoing_calls AS o (
    org, session_id, call_id, kind, step_index, destination, url, body, outcome, attempts, failures, interrupted, polls, is_attempt_open,
    may_be_processing, poll_url, last_status, last_error, due_at, first_sent_at, deadline_at, leased_by, leased_until, epoch
  )
  SELECT
    $1::org_name, session_id, call_id, kind, step_index, destination, url, body, outcome, attempts, failures, interrupted, polls,
    is_attempt_open, may_be_processing, poll_url, last_status, last_error, due_at, first_sent_at, deadline_at,
    CASE WHEN due_at IS NOT NULL THEN $2::text END,
    CASE WHEN due_at IS NOT NULL THEN clock_timestamp() + make_interval(secs => $3) END,
    epoch
  FROM unnest($8::call_written[])
  ON CONFLICT (org, session_id, call_id) DO UPDATE
  SET
    destination = EXCLUDED.destination, url = EXCLUDED.url, body = EXCLUDED.body, outcome = EXCLUDED.outcome,
    attempts = EXCLUDED.attempts, failures = EXCLUDED.failures, interrupted = EXCLUDED.interrupted, polls = EXCLUDED.polls,
    is_attempt_open = EXCLUDED.is_attempt_open, may_be_processing = EXCLUDED.may_be_processing, poll_url = EXCLUDED.poll_url,
    last_status = EXCLUDED.last_status, last_error = EXCLUDED.last_error, due_at = EXCLUDED.due_at,
    first_sent_at = EXCLUDED.first_sent_at, deadline_at = EXCLUDED.deadline_at,
    leased_by = CASE WHEN EXCLUDED.due_at IS NOT NULL THEN coalesce(EXCLUDED.leased_by, o.leased_by) END,
    leased_until = CASE WHEN EXCLUDED.due_at IS NOT NULL THEN coalesce(EXCLUDED.leased_until, o.leased_until) END
  WHERE o.epoch = EXCLUDED.epoch
  RETURNING call_id
),
entries AS (
  INSERT INTO journal (org, session_id, seq, kind, step, actor, at, body, content, prev_hash, hash)
  SELECT $1::org_name, session_id, seq, kind, step, actor, at, body, content, prev_hash, hash
  FROM unnest($9::entry_written[])
  RETURNING seq
)
SELECT
  (SELECT count(*) FROM put_sessions) AS sessions,
  (SELECT count(*) FROM put_effects) AS effects,
  (SELECT count(*) FROM put_approvals) AS approvals,
  (SELECT count(*) FROM put_undo_entries) AS undo_entries,
  (SELECT count(*) FROM put_calls) AS calls,
  (SELECT count(*) FROM entries) AS entries,
  (SELECT count(pg_notify('countermand_moved', $1 || '/' || moved)) FROM unnest($10::text[]) AS moved) AS moved,
  CASE WHEN $11 THEN pg_notify('countermand_due', '') IS NOT NULL END AS woken;
