"""The bodies that are read, as they must be. Must not hold behaviour: `strict_json` reads them."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from app.api.strict_json import LosslessJson, LosslessObject, Payload, StrictModel
from app.domain.model import MAX_STEP_INDEX, OnUnknown, Outcome, Reversibility

TOOL_NAME = r"^[A-Za-z0-9_.:-]+$"
ToolName = Annotated[str, Field(min_length=1, max_length=200, pattern=TOOL_NAME)]
Text = Annotated[str, Field(min_length=1, max_length=2_000)]
Url = Annotated[str, Field(min_length=1, max_length=2_048)]
Interval = Annotated[int, Field(ge=1, le=86_400_000)]
Status = Annotated[int, Field(ge=400, le=599)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Claim = Annotated[str, Field(min_length=1, max_length=200)]


class UnknownBody(StrictModel):
    """How to undo when the result is not known: find the effect by something that is."""

    args: LosslessJson = Field(description="The body to send; may hold `payload#` and `effect#` references.")
    url: Url | None = Field(default=None, description="Where to send it, if not to the same place.")


class ActionBody(StrictModel):
    """The call by which the service executes an approved call itself: POST of the approved bytes, `Idempotency-Key: effect-<effect_id>`."""

    url: Url = Field(description="POSTed to; http or https.")
    max_retries: Annotated[int, Field(ge=0, le=100)] | None = None
    initial_interval_ms: Interval | None = None
    multiplier: Annotated[float, Field(ge=1, le=100)] | None = None
    max_interval_ms: Interval | None = None
    timeout_ms: Annotated[int, Field(ge=1, le=600_000)] | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=31_536_000_000)] | None = None
    retry_on: Annotated[frozenset[Status], Field(max_length=32)] = frozenset()


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
    settle_ms: Annotated[int, Field(ge=0, le=86_400_000)] = Field(
        default=0,
        description="How long a call of unknown outcome is given, from the run's failure on, before its undo is begun: it may still be "
        "running. The undos below wait as well.",
    )
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
    action: ActionBody | None = Field(default=None, description="Absent: whoever resumes an approved call runs it and reports on it.")


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


class ApproveBody(StrictModel):
    """A person says yes; nothing runs."""

    reason: Text | None = None
    payload_sha256: Sha256 | None = Field(
        default=None, description="The fingerprint of what was looked at; if it differs, nothing is decided."
    )
    approver: Claim | None = Field(default=None, description="Kept as a claim; the approver recorded is the holder of the key.")


class RejectBody(StrictModel):
    """A person says no."""

    reason: Text
    then: Literal["unwind", "continue"] = Field(
        default="unwind", description="`continue`: the session goes on without the call, and its agent is told the reason."
    )
    approver: Claim | None = Field(default=None, description="Kept as a claim; who is recorded is the holder of the key.")


class ResumeBody(StrictModel):
    """Release an approved call: exactly the bytes that were approved."""

    payload: Payload = Field(description="The payload as the approval shows it, byte for byte.")


class ReasonBody(StrictModel):
    """Why; it goes into the journal."""

    reason: Text


class PauseBody(StrictModel):
    """Why; it is shown to whoever looks, and logged."""

    reason: Text


class RetryBody(StrictModel):
    """Try an undo again: fresh budget, same key, same bytes."""

    reason: Text
    url: Url | None = Field(default=None, description="Where its destination has moved to; an admin's to say.")


class SkipBody(StrictModel):
    """Take an undo out of the unwind."""

    reason: Text
    by_hand: bool = Field(default=False, description="The effect was undone by other means; it counts as compensated.")


class SettleBody(StrictModel):
    """Say what is known of a call whose outcome was unknown."""

    reason: Text
    outcome: Literal[Outcome.COMMITTED, Outcome.NOT_APPLIED]
    result: LosslessJson = Field(default=None, description="What it returned, if it happened; its undo may need it.")
