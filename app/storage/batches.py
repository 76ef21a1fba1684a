"""Lock many sessions at once, each with one step of it. Must not wait for a lock, nor decide."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from asyncpg import Record

from app.domain.circuits import NOTHING_HELD, Held
from app.domain.model import SessionId
from app.domain.tools import Tool
from app.storage import answers, destinations
from app.storage.answers import RememberedAnswer, RepeatableRequest
from app.storage.database import Transaction
from app.storage.rows import effect_of, session_of, tool_of, undo_entry_of
from app.storage.sessions import Locked, LockedEffect, Wanted

NOTHING = Wanted()
MAX_STEPS = 32  # of a session that is read whole; a longer one is decided on by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A session, and what a decision about it wants: of `wanted` the `step`, `request_key` and `tool`, or, `is_whole`, every step.

    `repeatable` names the request, so that a repeat is known.
    """

    session_id: SessionId
    wanted: Wanted = NOTHING
    is_whole: bool = False
    repeatable: RepeatableRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What was found of a session that was asked for.

    `locked` None: it is not there, or, where `is_held`, somebody else has its lock, or had it a moment ago. `has_more`: the step has a
    question to a person, something is kept under the request's key, or there are more steps: more than comes along here. `held` is what
    keeps calls of the org from being sent, known where a session was asked for whole. `remembered`: what the request was answered before.
    """

    locked: Locked | None
    now: datetime
    tool: Tool | None
    is_held: bool
    has_more: bool
    held: Held = NOTHING_HELD
    remembered: RememberedAnswer | None = None


# For each session that is asked for, in the order of their ids: its row, locked unless somebody has it, and what belongs to the step.
# Nothing is joined but by LATERAL look-ups that end at their first row: no plan, whatever it expects, can read more than is asked for.
# What a look-up finds is as of the statement's start; `seen_revision` tells where the locked row is newer.
LOCK_STEPS_SQL = """
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
) AS t ON NOT t.is_deleted
"""


async def lock_steps(tx: Transaction, asked: Sequence[Asked]) -> list[Sighting]:
    """Lock sessions, each asked for once, and read what is wanted with them; those whose lock somebody has are passed over.

    Returns a sighting for each, in the same order.
    """
    rows = await tx.connection.fetch(
        LOCK_STEPS_SQL,
        tx.org,
        [(one.session_id, one.wanted.step, one.wanted.request_key, one.wanted.tool) for one in asked],
    )
    sightings = [_sighting(tx, one, row) for one, row in zip(asked, rows, strict=True)]
    if any(one.repeatable for one in asked):
        sightings = await _with_answers(tx, asked, sightings)
    return await _with_steps(tx, asked, sightings) if any(one.is_whole for one in asked) else sightings


async def _with_answers(tx: Transaction, asked: Sequence[Asked], sightings: Sequence[Sighting]) -> list[Sighting]:
    """Return the sightings with what was answered to those who ask again; the locks are held by now, so twins have waited."""
    named = [(one.session_id, one.repeatable) for one in asked if one.repeatable is not None]
    found = await answers.find_many(tx, named)
    return [
        seen if one.repeatable is None or one.session_id not in found else replace(seen, remembered=found[one.session_id])
        for one, seen in zip(asked, sightings, strict=True)
    ]


def _sighting(tx: Transaction, asked: Asked, row: Record) -> Sighting:
    is_free = row["revision"] == row["seen_revision"]  # both NULL where there is no such session
    tool = tool_of(asked.wanted.tool, row) if asked.wanted.tool is not None else None
    locked = None
    if row["revision"] is not None and is_free:
        has_step = row["e_step_index"] is not None
        effects = (LockedEffect(effect=effect_of(row), undo_entry=undo_entry_of(row), approval=None),) if has_step else ()
        locked = Locked(session=session_of(row, tx.org), now=row["now"], effects=effects, tool=tool)
    return Sighting(locked=locked, now=row["now"], tool=tool, is_held=not is_free, has_more=row["has_more"])


# One step more than is wanted tells that a session is longer.
ALL_STEPS_SQL = """
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
) AS question ON true
"""


async def _with_steps(tx: Transaction, asked: Sequence[Asked], sightings: Sequence[Sighting]) -> list[Sighting]:
    """Return the sightings with every step of the sessions that were asked for whole; their locks are held by now."""
    whole = [one.session_id for one, seen in zip(asked, sightings, strict=True) if one.is_whole and seen.locked is not None]
    found: dict[SessionId, list[LockedEffect]] = {session_id: [] for session_id in whole}
    with_questions: set[SessionId] = set()
    for row in await tx.connection.fetch(ALL_STEPS_SQL, tx.org, whole, MAX_STEPS + 1):
        if row["has_question"]:
            with_questions.add(SessionId(row["session_id"]))
        found[row["session_id"]].append(LockedEffect(effect=effect_of(row), undo_entry=undo_entry_of(row), approval=None))
    held = await destinations.held(tx)
    complete: list[Sighting] = []
    for seen in sightings:
        if seen.locked is None or seen.locked.session.session_id not in found:
            complete.append(seen)
            continue
        session_id = seen.locked.session.session_id
        effects = found[session_id]
        has_more = len(effects) > MAX_STEPS or session_id in with_questions
        complete.append(replace(seen, locked=replace(seen.locked, effects=tuple(effects)), has_more=has_more, held=held))
    return complete
