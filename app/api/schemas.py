"""The shapes on the wire: bodies that are read, answers as they are documented. Must not hold behaviour."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from app.api.strict_json import LosslessJson, LosslessObject, Payload, StrictModel
from app.domain.model import (
    MAX_STEP_INDEX,
    EffectState,
    EntryKind,
    HaltReason,
    OnUnknown,
    Outcome,
    Reversibility,
    SessionState,
    UndoState,
)

TOOL_NAME = r"^[A-Za-z0-9_.:-]+$"
ToolName = Annotated[str, Field(min_length=1, max_length=200, pattern=TOOL_NAME)]
Text = Annotated[str, Field(min_length=1, max_length=2_000)]
Url = Annotated[str, Field(min_length=1, max_length=2_048)]
Interval = Annotated[int, Field(ge=1, le=86_400_000)]
Status = Annotated[int, Field(ge=400, le=599)]


class UnknownBody(StrictModel):
    """How to undo when the result is not known: find the effect by something that is."""

    args: LosslessJson = Field(description="The body to send; may hold `payload#` and `effect#` references.")
    url: Url | None = Field(default=None, description="Where to send it, if not to the same place.")


class CompensationBody(StrictModel):
    """The HTTP call that semantically undoes an effect."""

    url: Url = Field(description="POSTed to with `Idempotency-Key: undo-<undo_id>`; http or https.")
    args: LosslessJson = Field(
        default_factory=dict, description='The body to send; `{"$ref": "result#/credit_id"}` is bound to the result at commit.'
    )
    description: Annotated[str, Field(max_length=500)] = Field(
        default="", description="What it does, for the person who may have to do it."
    )
    unknown: UnknownBody | None = None
    on_unknown: OnUnknown = OnUnknown.COMPENSATE
    independent: bool = Field(default=False, description="If this undo fails for good, go on with the ones below it before halting.")
    max_retries: Annotated[int, Field(ge=0, le=100)] | None = None
    initial_interval_ms: Interval | None = None
    multiplier: Annotated[float, Field(ge=1, le=100)] | None = None
    max_interval_ms: Interval | None = None
    timeout_ms: Annotated[int, Field(ge=1, le=600_000)] | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=31_536_000_000)] | None = None
    retry_on: Annotated[frozenset[Status], Field(max_length=32)] = frozenset()
    compensated_on: Annotated[frozenset[Status], Field(max_length=32)] = frozenset()


class SessionBody(StrictModel):
    """What may be said of a session when it is opened."""

    agent: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(default=None, description="A name for people.")
    metadata: LosslessObject | None = Field(default=None, description="The client's own JSON, at most 16 KiB.")
    idle_seconds: Annotated[int, Field(ge=1, le=31_536_000)] | None = None
    deadline_at: datetime | None = None


class InterceptBody(StrictModel):
    """One tool call, before it runs. Exactly one of `payload` and `args`."""

    tool: ToolName
    payload: Payload | None = Field(default=None, description="The call's arguments as an opaque string: stored and hashed byte for byte.")
    args: LosslessJson = Field(default=None, description="The call's arguments as JSON; stored as compact text.")
    step_index: Annotated[int, Field(ge=1, le=MAX_STEP_INDEX)] | None = Field(
        default=None, description="The call's place in the session; absent: the next one (needs an Idempotency-Key)."
    )
    reversibility: Reversibility | None = None
    compensation: CompensationBody | None = None


class ApprovalRuleBody(StrictModel):
    """Whether a person has to approve each call."""

    required: bool
    ttl_seconds: Annotated[int, Field(ge=1, le=31_536_000)] | None = Field(default=None, description="How long the question stays open.")


class ToolBody(StrictModel):
    """What is registered about a tool."""

    reversibility: Reversibility
    idempotent: bool = Field(default=False, description="Running it twice with the same payload does no harm.")
    description: Annotated[str, Field(max_length=2_000)] = ""
    payload_schema: LosslessJson = Field(default=None, description="JSON Schema (draft 2020-12) that every payload has to fit.")
    compensation: CompensationBody | None = None
    approval: ApprovalRuleBody | None = Field(default=None, description="Absent: an irreversible call is approved, any other is not.")


class EmptyBody(StrictModel):
    """Nothing has to be said."""


class CommitBody(StrictModel):
    """The tool ran."""

    result: LosslessJson = Field(default=None, description="What it returned.")


class FailEffectBody(StrictModel):
    """The tool did not do its work, or nobody knows whether it did."""

    error: Text
    outcome: Literal[Outcome.NOT_APPLIED, Outcome.UNKNOWN] = Outcome.UNKNOWN


class NamedFailureBody(StrictModel):
    """The call that made the run fail."""

    step_index: Annotated[int, Field(ge=1, le=MAX_STEP_INDEX)]
    outcome: Literal[Outcome.NOT_APPLIED, Outcome.UNKNOWN] = Outcome.UNKNOWN
    error: Text | None = None


class FailSessionBody(StrictModel):
    """The run failed: unwind what it did."""

    error: Text
    effect: NamedFailureBody | None = None


class ApprovalView(BaseModel):
    """The question put to a person about an irreversible call."""

    state: EffectState
    requested_at: datetime
    requested_by: str
    expires_at: datetime
    decided_at: datetime | None
    decided_by: str | None
    claimed_approver: str | None
    reason: str | None


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


class JournalEntryView(BaseModel):
    """One link of the chain; see docs/journal-format.md."""

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


class VerificationView(BaseModel):
    """What the check of a whole chain found."""

    valid: bool
    entry_count: int
    first_bad_seq: int | None
    message: str


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
    created_by: str
    created_at: datetime | None = Field(description="Absent in the answer to a dry run.")


class ToolListView(BaseModel):
    """One page of the newest versions, by name."""

    items: list[ToolView]
    next_cursor: str | None
