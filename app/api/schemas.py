"""The answers, as they are documented. Must not hold behaviour, nor be relied upon to render: see `render`."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field

from app.api.strict_json import LosslessJson, LosslessObject
from app.domain.circuits import Hold
from app.domain.model import (
    ApprovalState,
    EffectState,
    EntryKind,
    HaltReason,
    Outcome,
    Reversibility,
    SessionState,
    UndoState,
)
from app.storage.pauses import Scope


class ApprovalView(BaseModel):
    """The question put to a person about a call, and the answer."""

    state: ApprovalState
    requested_at: datetime
    requested_by: str
    expires_at: datetime
    ttl_seconds: int
    decided_at: datetime | None
    decided_by: str | None
    claimed_approver: str | None
    reason: str | None
    released_at: datetime | None
    message: str = Field(description="Where the call stands, in words for a model or a person.")


class ActionView(BaseModel):
    """How the service's own execution of a call is getting on."""

    url: str | None
    attempts: int
    last_status: int | None
    last_error: str | None
    next_attempt_at: datetime | None = Field(description="Absent: nothing more will be sent.")


class EffectView(BaseModel):
    """One tool call of a session."""

    effect_id: str
    step_index: int
    tool: str
    tool_version: int | None
    reversibility: Reversibility
    state: EffectState
    outcome: Outcome | None
    payload: str
    payload_sha256: str
    result: LosslessJson
    error: str | None
    forward_key: str
    undo_id: str | None
    attempt: int
    released_to: str | None
    approval: ApprovalView | None
    action: ActionView | None
    unresolved: list[str] = Field(description="References of the undo that the committed result does not satisfy.")


class UndoEntryView(BaseModel):
    """One compensation on the undo stack."""

    undo_id: str
    step_index: int
    stack_position: int
    state: UndoState
    description: str
    url: str
    attempts: int
    last_status: int | None
    last_error: str | None
    next_attempt_at: datetime | None
    by_hand: bool
    registered_at: datetime
    compensated_at: datetime | None


class SessionView(BaseModel):
    """One agent run = one saga."""

    session_id: str
    state: SessionState
    clean: bool
    halt_reason: HaltReason | None
    pivoted: bool
    agent: str
    metadata: LosslessObject
    effects: list[EffectView]
    undo_stack: list[UndoEntryView] = Field(description="Newest first: the order in which it is unwound.")
    unreadable_steps: list[int] = Field(description="Steps that are left out above: their rows are not such as this service knows.")
    held_by: Hold | None = Field(description="Why nothing is sent although something is due: the destination is away, or paused.")
    created_at: datetime
    updated_at: datetime
    deadline_at: datetime | None
    idle_seconds: int | None


class SessionSummaryView(BaseModel):
    """A session in a list: as a session, without its steps."""

    session_id: str
    state: SessionState
    clean: bool
    halt_reason: HaltReason | None
    pivoted: bool
    agent: str
    metadata: LosslessObject
    created_at: datetime
    updated_at: datetime
    deadline_at: datetime | None
    idle_seconds: int | None


class SessionListView(BaseModel):
    """One page of sessions, newest first."""

    items: list[SessionSummaryView]
    next_cursor: str | None


class ExecuteView(BaseModel):
    """Run the tool now; its undo is registered."""

    decision: Literal["execute"]
    session_id: str
    step_index: int
    effect_id: str
    undo_id: str | None
    forward_key: str = Field(description="Send it downstream as the call's own Idempotency-Key.")
    payload: str = Field(description="Exactly what to run the tool with.")
    payload_sha256: str
    attempt: int


class AwaitApprovalView(BaseModel):
    """Do not run the tool: a person has to approve it first."""

    decision: Literal["await_approval"]
    session_id: str
    step_index: int
    effect_id: str
    forward_key: str
    payload: str
    payload_sha256: str
    expires_at: datetime
    message: str = Field(description="A text to hand to the model.")


class RepeatView(BaseModel):
    """Do not run the tool: it ran already (`replay`, with the result), or is running (`in_flight`)."""

    decision: Literal["replay", "in_flight"]
    session_id: str
    step_index: int
    effect_id: str
    state: EffectState
    result: LosslessJson


class ActedView(BaseModel):
    """The service executes the released call itself: nobody else may run it.

    `executed`: it happened. `failed`: it certainly did not. `unknown`: nobody knows; an operator has to find out. `in_flight`: ask again.
    """

    decision: Literal["executed", "failed", "unknown", "in_flight"]
    session_id: str
    step_index: int
    effect_id: str
    state: EffectState
    outcome: Outcome | None
    result: LosslessJson
    error: str | None


class ApprovalItemView(EffectView):
    """A parked call, with the session it belongs to."""

    session_id: str
    agent: str
    action_url: str | None = Field(description="Where the service will send the call once released; absent: whoever resumes it runs it.")


class ApprovalListView(BaseModel):
    """One page of questions to people, oldest first."""

    items: list[ApprovalItemView]
    next_cursor: str | None


class EscalationItemView(BaseModel):
    """A session that waits for a person."""

    session_id: str
    agent: str
    reason: HaltReason
    explanation: str
    pivoted: bool
    halted_at: datetime
    age_seconds: int
    url: str = Field(description="Where the whole package is.")


class EscalationCountView(BaseModel):
    """How many sessions wait for one reason."""

    reason: HaltReason
    count: int
    oldest_halted_at: datetime
    oldest_age_seconds: int


class EscalationListView(BaseModel):
    """One page of sessions that wait for a person, the longest waiting first; `counts` are over all of them."""

    items: list[EscalationItemView]
    counts: list[EscalationCountView]
    next_cursor: str | None


class EscalationStepView(EffectView):
    """One step with its times."""

    registered_at: datetime
    executed_at: datetime | None


class EscalationUndoView(UndoEntryView):
    """One undo entry with what is sent for it."""

    idempotency_key: str
    independent: bool
    first_sent_at: datetime | None
    body: str | None = Field(description="The exact bytes that are sent; absent: not sent yet.")


class JudgedStepView(BaseModel):
    """One step as far as undoing goes."""

    step_index: int
    tool: str
    description: str
    sentence: str


class HappenedView(BaseModel):
    """Who decided what, or what went wrong, from the journal."""

    seq: int
    at: str
    kind: EntryKind
    step: int | None
    actor: str
    details: LosslessObject
    contents: dict[str, str]


class MoveView(BaseModel):
    """One order that is open now."""

    name: Literal["settle", "retry", "skip", "unwind", "resolve"]
    title: str
    consequence: str
    warning: str | None
    method: Literal["POST"]
    url: str
    body: LosslessObject = Field(description="To be sent with the reason added.")
    curl: str = Field(
        description="Takes the key and the reason from the environment, COUNTERMAND_KEY and REASON (no double quotes), and where "
        "the undo cannot be sent without it, what the tool returned, as JSON, from RESULT."
    )


class EscalationView(BaseModel):
    """What a person gets when automation has stopped."""

    session_id: str
    state: SessionState
    reason: HaltReason
    explanation: str
    advice: str
    halted_at: datetime
    agent: str
    owner: str
    metadata: LosslessObject
    clean: bool
    pivoted: bool
    created_at: datetime
    failed_at: datetime | None
    error: str | None = Field(description="Why the run failed, in the words of who failed it.")
    undone: list[JudgedStepView]
    not_undone: list[JudgedStepView]
    cannot_be_undone: list[JudgedStepView]
    moves: list[MoveView]
    steps: list[EscalationStepView]
    undo_stack: list[EscalationUndoView]
    unreadable_steps: list[int] = Field(description="Steps that are left out above: their rows are not such as this service knows.")
    decisions: list[HappenedView]


class PausedView(BaseModel):
    """What people hold: nothing new is sent, what is in flight ends, and deadlines still strike."""

    scope: Scope = Field(description="How much the pause holds; of several, the widest is shown.")
    at: datetime
    by: str | None = Field(description="Absent where everything is paused, which is not an org's own doing.")
    reason: str


class HoldView(BaseModel):
    """Whether a destination, or the whole org, is paused."""

    destination: str | None = Field(description="Absent: all of the org.")
    paused: PausedView | None


class CircuitView(BaseModel):
    """A destination that is held to be away: it is probed with one call at a time, and the others wait without using up retries."""

    opened_at: datetime
    probe_at: datetime = Field(description="When it may be probed next.")
    last_error: str


class DestinationView(BaseModel):
    """Where the org's calls go, as host:port."""

    destination: str
    due: int = Field(description="Calls that are due and that no worker holds.")
    in_flight: int = Field(description="Calls that a worker holds.")
    later: int = Field(description="Calls that wait for a time of their own, a backoff or an endpoint's Retry-After, which `resume` keeps.")
    oldest_due_at: datetime | None
    circuit: CircuitView | None
    paused: PausedView | None


class DestinationListView(BaseModel):
    """One page of destinations where calls wait or that something holds, by name; `paused`: all of the org is."""

    items: list[DestinationView]
    paused: PausedView | None
    next_cursor: str | None


class JournalEntryView(BaseModel):
    """One link of the chain; see docs/reference/journal-format.md."""

    seq: int
    kind: EntryKind
    step: int | None
    actor: str
    at: str
    body: str
    content: dict[str, dict[str, str]] | None
    prev_hash: str
    hash: str


class JournalView(BaseModel):
    """One page of a session's journal, oldest first."""

    items: list[JournalEntryView]
    next_cursor: str | None


class JournalHeadView(BaseModel):
    """Where a session says that its chain stands: its newest entry's number, hash and time. Note it elsewhere to be able to tell later."""

    seq: int
    hash: str
    at: datetime | None


class VerificationView(BaseModel):
    """What the check of a whole chain found."""

    valid: bool
    entry_count: int
    first_bad_seq: int | None
    message: str
    head: JournalHeadView


class HealthView(BaseModel):
    """Whether the process is alive, or ready; `checks` says which part is not."""

    status: Literal["ok", "unavailable"]
    checks: dict[str, str]


class ToolView(BaseModel):
    """One version of a registered tool."""

    name: str
    version: int
    reversibility: Reversibility
    idempotent: bool
    description: str
    payload_schema: LosslessJson
    compensation: LosslessJson
    approval: LosslessJson
    action: LosslessJson
    created_by: str
    created_at: datetime | None = Field(description="Absent in the answer to a dry run.")


class ToolListView(BaseModel):
    """One page of the newest versions, by name."""

    items: list[ToolView]
    next_cursor: str | None
