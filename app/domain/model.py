"""The nouns of a saga as frozen values, and the words they may hold. Must not decide or move anything: see `states`."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NewType
from uuid import UUID

OrgName = NewType("OrgName", str)
SessionId = NewType("SessionId", str)
StepIndex = NewType("StepIndex", int)
EffectId = NewType("EffectId", UUID)
UndoId = NewType("UndoId", UUID)
CallId = NewType("CallId", UUID)

MAX_STEP_INDEX = 2**31 - 1  # what a Postgres integer holds (contract, section 5)


class Role(StrEnum):
    """What a key may be used for."""

    AGENT = "agent"
    OPERATOR = "operator"
    AUDITOR = "auditor"
    ADMIN = "admin"


class Reversibility(StrEnum):
    """What it takes to undo a tool call."""

    READ_ONLY = "read_only"
    REVERSIBLE = "reversible"
    COMPENSATABLE = "compensatable"
    IRREVERSIBLE = "irreversible"


class SessionState(StrEnum):
    """Where a session stands."""

    ACTIVE = "active"
    AWAITING_APPROVAL = "awaiting_approval"
    FAILED = "failed"
    COMPENSATING = "compensating"
    COMPENSATED = "compensated"
    HALTED = "halted"
    RESOLVED = "resolved"
    COMPLETED = "completed"


class HaltReason(StrEnum):
    """Why a session was handed to a person."""

    COMPENSATION_FAILED = "compensation_failed"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    FAILED_AFTER_PIVOT = "failed_after_pivot"
    UNRESOLVED_REFERENCE = "unresolved_reference"
    UNKNOWN_OUTCOME = "unknown_outcome"
    LATE_EFFECT = "late_effect"
    EGRESS_DENIED = "egress_denied"
    OPERATOR = "operator"
    POISON = "poison"


class EffectState(StrEnum):
    """Where one tool call stands."""

    EXECUTING = "executing"
    COMMITTED = "committed"
    FAILED = "failed"
    UNKNOWN = "unknown"
    AWAITING_APPROVAL = "awaiting_approval"
    APPROVED = "approved"
    REJECTED = "rejected"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    COMPENSATING = "compensating"
    COMPENSATED = "compensated"
    COMPENSATION_FAILED = "compensation_failed"


class Outcome(StrEnum):
    """What is known of a tool call."""

    COMMITTED = "committed"
    NOT_APPLIED = "not_applied"
    UNKNOWN = "unknown"


class ApprovalState(StrEnum):
    """Where the question to a person stands; it follows its effect's state."""

    PENDING = "pending"
    APPROVED = "approved"
    RELEASED = "released"
    REJECTED = "rejected"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    MISMATCHED = "mismatched"


class CallKind(StrEnum):
    """What an outgoing call is for."""

    UNDO = "undo"
    ACTION = "action"


class UndoState(StrEnum):
    """Where one undo entry stands."""

    PENDING = "pending"
    RUNNING = "running"
    COMPENSATED = "compensated"
    FAILED = "failed"
    SKIPPED = "skipped"


class OnUnknown(StrEnum):
    """What to do with an effect whose outcome is unknown when its session unwinds."""

    COMPENSATE = "compensate"
    ESCALATE = "escalate"


class EntryKind(StrEnum):
    """The transitions that the journal tells (contract, section 5)."""

    OPENED = "OPENED"
    INTENT = "INTENT"
    EXECUTED = "EXECUTED"
    FAILED = "FAILED"
    AWAITING_APPROVAL = "AWAITING_APPROVAL"
    APPROVED = "APPROVED"
    REJECTED = "REJECTED"
    EXPIRED = "EXPIRED"
    CANCELLED = "CANCELLED"
    PAYLOAD_MISMATCH = "PAYLOAD_MISMATCH"
    PIVOT = "PIVOT"
    SESSION_FAILED = "SESSION_FAILED"
    COMPENSATING = "COMPENSATING"
    COMPENSATED = "COMPENSATED"
    COMPENSATION_FAILED = "COMPENSATION_FAILED"
    SKIPPED = "SKIPPED"
    UNWOUND = "UNWOUND"
    HALTED = "HALTED"
    LATE_COMMIT = "LATE_COMMIT"
    LATE_FAIL = "LATE_FAIL"
    RETRIED = "RETRIED"
    UNWIND_ORDERED = "UNWIND_ORDERED"
    HALT_ORDERED = "HALT_ORDERED"
    SETTLED = "SETTLED"
    RESOLVED = "RESOLVED"
    COMPLETED = "COMPLETED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who asks: one authenticated key."""

    org: OrgName
    role: Role
    subject: str
    key_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When an outgoing call is tried again (contract, section 4: the third seed's numbers).

    Intervals and deadlines are milliseconds; `retry_on` and `compensated_on` are HTTP statuses that override the table.
    """

    max_retries: int = 3
    initial_interval_ms: int = 100
    multiplier: float = 2.0
    max_interval_ms: int = 5_000
    timeout_ms: int = 10_000
    deadline_ms: int = 86_400_000
    retry_on: frozenset[int] = frozenset()
    compensated_on: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownVariant:
    """How to undo when not all references are bound: own `args`, maybe another `url` (e.g. find by forward key)."""

    args: bytes
    url: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compensation:
    """The HTTP call that semantically undoes an effect.

    `args` is compact JSON text whose `payload#` and `effect#` references are bound; `result#` ones may be open. `settle_ms`: how long a
    call of unknown outcome is given, from its session's failure on, before its undo is begun. `is_readable` False: what was kept is not
    ours.
    """

    url: str
    args: bytes
    description: str = ""
    unknown: UnknownVariant | None = None
    on_unknown: OnUnknown = OnUnknown.COMPENSATE
    independent: bool = False
    settle_ms: int = 0
    retry: RetryPolicy = RetryPolicy()
    is_readable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """The HTTP call by which the service itself executes an approved tool call: the approved bytes are its body."""

    url: str
    retry: RetryPolicy = RetryPolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalHead:
    """Where a session's chain stands: the last entry's number, hash and time; seq 0 = nothing written yet."""

    seq: int
    digest: bytes
    at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One agent run = one saga.

    `version` counts what callers can see (the ETag); `revision` counts every write made under the session's lock. `late_effect` and
    `halt_ordered` are marks for the worker, which halts at the next boundary.
    """

    org: OrgName
    session_id: SessionId
    owner: str
    agent: str
    metadata: bytes
    state: SessionState
    halt_reason: HaltReason | None
    clean: bool
    pivoted: bool
    late_effect: bool
    last_step: int
    idle_seconds: int | None
    deadline_at: datetime | None
    failed_at: datetime | None
    halted_at: datetime | None
    halt_ordered: bool
    created_at: datetime
    updated_at: datetime
    active_at: datetime
    version: int
    revision: int
    head: JournalHead


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One tool call of a session, at its `step_index`."""

    step_index: StepIndex
    effect_id: EffectId
    tool: str
    tool_version: int | None
    reversibility: Reversibility
    state: EffectState
    outcome: Outcome | None
    payload: bytes
    payload_sha256: bytes
    result: bytes | None
    error: str | None
    request_key: str | None
    request_sha256: bytes
    attempt: int
    traceparent: str | None
    registered_at: datetime
    executed_at: datetime | None
    version: int

    @property
    def forward_key(self) -> str:
        """The idempotency key that the agent sends downstream with the tool call itself."""
        return f"effect-{self.effect_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """The question put to a person about one call, the answer, and the one release that it allows.

    `ttl_seconds` is the rule in force when it was put. `requested_by`, `decided_by` and `released_to` are subjects; `claimed_approver` is
    whom the request named, a claim. `is_continued`: rejected, and the session goes on. `release_key` is the Idempotency-Key of the resume.
    """

    step_index: StepIndex
    state: ApprovalState
    requested_by: str
    requested_at: datetime
    expires_at: datetime
    ttl_seconds: int
    decided_at: datetime | None = None
    decided_by: str | None = None
    claimed_approver: str | None = None
    reason: str | None = None
    is_continued: bool = False
    released_at: datetime | None = None
    released_to: str | None = None
    release_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoEntry:
    """One compensation on a session's stack, at `stack_position` (= the effect's `step_index`)."""

    undo_id: UndoId
    stack_position: StepIndex
    state: UndoState
    compensation: Compensation
    by_hand: bool
    registered_at: datetime
    compensated_at: datetime | None

    @property
    def idempotency_key(self) -> str:
        """The one key under which this undo is ever sent."""
        return f"undo-{self.undo_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingCall:
    """One undo, or one action that the service executes itself, with its frozen bytes, its attempts and when it is due.

    `due_at` None: nothing to do until somebody moves it. `attempts` counts requests that may have left the process, each
    counted before it is sent; `failures` those that used up retry budget; `interrupted` those without a recorded end, and crashes of
    a worker over the call.
    `is_attempt_open`: counted and not yet recorded. `may_be_processing`: some attempt ended with unknown outcome.
    """

    call_id: CallId
    kind: CallKind
    step_index: StepIndex
    destination: str
    url: str | None
    body: bytes | None
    outcome: Outcome | None
    attempts: int
    failures: int
    interrupted: int
    polls: int
    is_attempt_open: bool
    may_be_processing: bool
    poll_url: str | None
    last_status: int | None
    last_error: str | None
    due_at: datetime | None
    first_sent_at: datetime | None
    deadline_at: datetime
    epoch: int

    @property
    def idempotency_key(self) -> str:
        """The one key under which this call is ever sent."""
        return f"effect-{self.call_id}" if self.kind is CallKind.ACTION else f"undo-{self.call_id}"
