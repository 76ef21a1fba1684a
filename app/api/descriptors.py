"""Turn what a body says of a tool or of an undo into the domain's words, with the deployment's defaults. Must not judge it."""

from dataclasses import replace

from app.api import bodies
from app.api.strict_json import MAX_PAYLOAD_BYTES, within
from app.domain.json_text import dump
from app.domain.model import Action, Compensation, RetryPolicy, UnknownVariant
from app.domain.tools import ApprovalRule, Definition

MAX_SCHEMA_BYTES = 65_536  # of one payload schema; real ones have a few kilobytes


def definition_of(model: bodies.ToolBody, defaults: RetryPolicy) -> Definition:
    """Read a registration."""
    schema, approval = None, None
    if model.payload_schema is not None:
        schema = within(dump(model.payload_schema), limit_bytes=MAX_SCHEMA_BYTES, pointer="/payload_schema")
    if model.approval is not None:
        approval = ApprovalRule(is_required=model.approval.required, ttl_seconds=model.approval.ttl_seconds)
    return Definition(
        reversibility=model.reversibility,
        is_idempotent=model.idempotent,
        description=model.description,
        payload_schema=schema,
        compensation=None if model.compensation is None else compensation_of(model.compensation, defaults),
        approval=approval,
        action=None if model.action is None else Action(url=model.action.url, retry=_retry_of(model.action, defaults)),
    )


def compensation_of(model: bodies.CompensationBody, defaults: RetryPolicy) -> Compensation:
    """Read an undo's descriptor."""
    unknown = None
    if model.unknown is not None:
        args = within(dump(model.unknown.args), limit_bytes=MAX_PAYLOAD_BYTES, pointer="/compensation/unknown/args")
        unknown = UnknownVariant(args=args, url=model.unknown.url)
    return Compensation(
        url=model.url,
        args=within(dump(model.args), limit_bytes=MAX_PAYLOAD_BYTES, pointer="/compensation/args"),
        description=model.description,
        unknown=unknown,
        on_unknown=model.on_unknown,
        independent=model.independent,
        settle_ms=model.settle_ms,
        retry=replace(_retry_of(model, defaults), compensated_on=model.compensated_on),
    )


def _retry_of(model: bodies.CompensationBody | bodies.ActionBody, defaults: RetryPolicy) -> RetryPolicy:
    return RetryPolicy(
        max_retries=_or(model.max_retries, defaults.max_retries),
        initial_interval_ms=_or(model.initial_interval_ms, defaults.initial_interval_ms),
        multiplier=defaults.multiplier if model.multiplier is None else model.multiplier,
        max_interval_ms=_or(model.max_interval_ms, defaults.max_interval_ms),
        timeout_ms=_or(model.timeout_ms, defaults.timeout_ms),
        deadline_ms=_or(model.deadline_ms, defaults.deadline_ms),
        retry_on=model.retry_on,
    )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
