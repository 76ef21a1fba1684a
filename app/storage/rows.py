"""Turn records of the database into the domain's values. Must not hold SQL: the columns' names are the aliases of the statements."""

from asyncpg import Record

from app.domain import compensation, tools
from app.domain.model import (
    Approval,
    ApprovalState,
    CallId,
    CallKind,
    Effect,
    EffectId,
    EffectState,
    HaltReason,
    JournalHead,
    OrgName,
    Outcome,
    OutgoingCall,
    Reversibility,
    Session,
    SessionId,
    SessionState,
    StepIndex,
    UndoEntry,
    UndoId,
    UndoState,
)
from app.domain.tools import Tool


def session_of(row: Record, org: OrgName) -> Session:
    """Read a session from columns without prefix."""
    return Session(
        org=org,
        session_id=SessionId(row["session_id"]),
        owner=row["owner"],
        agent=row["agent"],
        metadata=row["metadata"],
        state=SessionState(row["state"]),
        halt_reason=None if row["halt_reason"] is None else HaltReason(row["halt_reason"]),
        clean=row["clean"],
        pivoted=row["pivoted"],
        late_effect=row["late_effect"],
        last_step=row["last_step"],
        idle_seconds=row["idle_seconds"],
        deadline_at=row["deadline_at"],
        failed_at=row["failed_at"],
        halted_at=row["halted_at"],
        halt_ordered=row["halt_ordered"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        active_at=row["active_at"],
        version=row["version"],
        revision=row["revision"],
        head=JournalHead(seq=row["journal_seq"], digest=row["journal_hash"], at=row["journal_at"]),
    )


def effect_of(row: Record) -> Effect:
    """Read an effect from columns prefixed `e_`."""
    return Effect(
        step_index=StepIndex(row["e_step_index"]),
        effect_id=EffectId(row["e_effect_id"]),
        tool=row["e_tool"],
        tool_version=row["e_tool_version"],
        reversibility=Reversibility(row["e_reversibility"]),
        state=EffectState(row["e_state"]),
        outcome=None if row["e_outcome"] is None else Outcome(row["e_outcome"]),
        payload=row["e_payload"],
        payload_sha256=row["e_payload_sha256"],
        result=row["e_result"],
        error=row["e_error"],
        request_key=row["e_request_key"],
        request_sha256=row["e_request_sha256"],
        attempt=row["e_attempt"],
        traceparent=row["e_traceparent"],
        registered_at=row["e_registered_at"],
        executed_at=row["e_executed_at"],
        version=row["e_version"],
    )


def undo_entry_of(row: Record) -> UndoEntry | None:
    """Read an undo entry from columns prefixed `u_`; None where the effect has none."""
    if row["u_undo_id"] is None:
        return None
    return UndoEntry(
        undo_id=UndoId(row["u_undo_id"]),
        stack_position=StepIndex(row["u_stack_position"]),
        state=UndoState(row["u_state"]),
        compensation=compensation.read_kept(row["u_compensation"]),
        by_hand=row["u_by_hand"],
        registered_at=row["u_registered_at"],
        compensated_at=row["u_compensated_at"],
    )


def approval_of(row: Record) -> Approval | None:
    """Read an approval from columns prefixed `a_`; None where none was asked for."""
    if row["a_requested_at"] is None:
        return None
    return Approval(
        step_index=StepIndex(row["e_step_index"]),
        state=ApprovalState(row["a_state"]),
        requested_by=row["a_requested_by"],
        requested_at=row["a_requested_at"],
        expires_at=row["a_expires_at"],
        ttl_seconds=row["a_ttl_seconds"],
        decided_at=row["a_decided_at"],
        decided_by=row["a_decided_by"],
        claimed_approver=row["a_claimed_approver"],
        reason=row["a_reason"],
        is_continued=row["a_is_continued"],
        released_at=row["a_released_at"],
        released_to=row["a_released_to"],
        release_key=row["a_release_key"],
    )


def tool_of(name: str, row: Record) -> Tool | None:
    """Read a tool's version from columns prefixed `t_`; None where the name is not registered."""
    if row["t_version"] is None:
        return None
    return Tool(name=name, version=row["t_version"], definition=tools.read(row["t_definition"]))


def call_of(row: Record, prefix: str = "c_") -> OutgoingCall | None:
    """Read an outgoing call from columns with a prefix; None where there is none."""
    if row[f"{prefix}call_id"] is None:
        return None
    return OutgoingCall(
        call_id=CallId(row[f"{prefix}call_id"]),
        kind=CallKind(row[f"{prefix}kind"]),
        step_index=StepIndex(row[f"{prefix}step_index"]),
        destination=row[f"{prefix}destination"],
        url=row[f"{prefix}url"],
        body=row[f"{prefix}body"],
        outcome=None if row[f"{prefix}outcome"] is None else Outcome(row[f"{prefix}outcome"]),
        attempts=row[f"{prefix}attempts"],
        failures=row[f"{prefix}failures"],
        interrupted=row[f"{prefix}interrupted"],
        polls=row[f"{prefix}polls"],
        is_attempt_open=row[f"{prefix}is_attempt_open"],
        may_be_processing=row[f"{prefix}may_be_processing"],
        poll_url=row[f"{prefix}poll_url"],
        last_status=row[f"{prefix}last_status"],
        last_error=row[f"{prefix}last_error"],
        due_at=row[f"{prefix}due_at"],
        first_sent_at=row[f"{prefix}first_sent_at"],
        deadline_at=row[f"{prefix}deadline_at"],
        epoch=row[f"{prefix}epoch"],
    )
