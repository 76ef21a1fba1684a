"""What is registered about a tool: its class, its undo, its payload's schema. Must not know how a call is decided: see `intercept`."""

from dataclasses import dataclass
from functools import lru_cache
from typing import assert_never

from app.domain import compensation as compensations
from app.domain import egress
from app.domain.bindings import check_template
from app.domain.egress import EgressPolicy, UrlRefused
from app.domain.errors import Invalid, SagaError
from app.domain.json_text import Json, dump, parse
from app.domain.model import Action, Compensation, Reversibility
from app.domain.payload_schema import faults_of_schema
from app.domain.references import BadReference


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalRule:
    """Whether a person has to approve each call, and for how long the question stays open (seconds; None: the deployment's)."""

    is_required: bool
    ttl_seconds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One immutable version's content; `payload_schema` is JSON text."""

    reversibility: Reversibility
    is_idempotent: bool = False
    description: str = ""
    payload_schema: bytes | None = None
    compensation: Compensation | None = None
    approval: ApprovalRule | None = None
    action: Action | None = None

    @property
    def must_be_approved(self) -> bool:
        """Tell whether a call is parked: an irreversible one unless the registration says otherwise, any other only if it says so."""
        if self.approval is not None:
            return self.approval.is_required
        return self.reversibility is Reversibility.IRREVERSIBLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One version of a registered tool; versions count from 1."""

    name: str
    version: int
    definition: Definition


def check(definition: Definition, policy: EgressPolicy) -> SagaError | None:
    """Say why this may not be registered, or None: what could not work is refused here, not at the first call."""
    match definition.reversibility:
        case Reversibility.REVERSIBLE | Reversibility.COMPENSATABLE if definition.compensation is None:
            return _invalid("tool_needs_compensation", "/compensation", f"{definition.reversibility}: such a tool needs a compensation")
        case Reversibility.READ_ONLY | Reversibility.IRREVERSIBLE if definition.compensation is not None:
            return _invalid("compensation_not_allowed", "/compensation", f"{definition.reversibility}: such a tool has no compensation")
        case Reversibility.READ_ONLY | Reversibility.REVERSIBLE | Reversibility.COMPENSATABLE | Reversibility.IRREVERSIBLE:
            pass
        case _:
            assert_never(definition.reversibility)
    if definition.payload_schema is not None:
        for fault in faults_of_schema(definition.payload_schema):
            return _invalid("bad_payload_schema", f"/payload_schema{fault.pointer}", fault.detail)
    if definition.action is not None:
        refusal = _check_action(definition, definition.action, policy)
        if refusal is not None:
            return refusal
    return None if definition.compensation is None else check_compensation(definition.compensation, policy)


def _check_action(definition: Definition, action: Action, policy: EgressPolicy) -> SagaError | None:
    """Say why the service could not execute this itself: it runs what a resume releases, and only an approved call is resumed."""
    if not definition.must_be_approved:
        return _invalid("action_needs_approval", "/action", "only approved calls are executed by the service; set approval.required")
    try:
        egress.check_url(action.url, policy)
    except UrlRefused as refused:
        return _invalid("url_refused", "/action/url", f"the call could never be sent there: {refused.detail}")
    return None


def check_compensation(compensation: Compensation, policy: EgressPolicy) -> SagaError | None:
    """Say why this could never be sent: an address that is refused, a reference that is none."""
    urls = {"/compensation/url": compensation.url}
    templates = {"/compensation/args": compensation.args}
    if compensation.unknown is not None:
        templates["/compensation/unknown/args"] = compensation.unknown.args
        if compensation.unknown.url is not None:
            urls["/compensation/unknown/url"] = compensation.unknown.url
    for pointer, url in urls.items():
        try:
            egress.check_url(url, policy)
        except UrlRefused as refused:
            return _invalid("url_refused", pointer, f"the undo could never be sent there: {refused.detail}")
    for pointer, args in templates.items():
        try:
            check_template(args)
        except BadReference as bad:
            return _invalid("bad_reference", pointer + bad.pointer, bad.detail)
    return None


def _invalid(code: str, pointer: str, detail: str) -> Invalid:
    return Invalid(code, detail, errors=[{"pointer": pointer, "detail": detail}])


def write(definition: Definition) -> bytes:
    """Return a definition as compact JSON text, with the members of the API."""
    compensation = definition.compensation
    approval: Json = None
    if definition.approval is not None:
        approval = {"required": definition.approval.is_required, "ttl_seconds": definition.approval.ttl_seconds}
    return dump(
        {
            "reversibility": definition.reversibility.value,
            "idempotent": definition.is_idempotent,
            "description": definition.description,
            "payload_schema": None if definition.payload_schema is None else parse(definition.payload_schema),
            "compensation": None if compensation is None else parse(compensations.write(compensation)),
            "approval": approval,
            "action": None if definition.action is None else _write_action(definition.action),
        }
    )


@lru_cache(compensations.KEPT)
def read(text: bytes) -> Definition:
    """Read back what `write` wrote.

    Raises:
        KeyError, TypeError, ValueError: the text is not one of ours.
    """
    members = parse(text)
    if not isinstance(members, dict):
        raise TypeError("expected a JSON object")
    schema, compensation, approval = members["payload_schema"], members["compensation"], members["approval"]
    action = members.get("action")  # versions registered before there were actions have no such member
    return Definition(
        reversibility=Reversibility(str(members["reversibility"])),
        is_idempotent=members["idempotent"] is True,
        description=str(members["description"]),
        payload_schema=None if schema is None else dump(schema),
        compensation=None if compensation is None else compensations.read(dump(compensation)),
        approval=_read_approval(approval) if isinstance(approval, dict) else None,
        action=_read_action(action) if isinstance(action, dict) else None,
    )


def _read_approval(members: dict[str, Json]) -> ApprovalRule:
    ttl_seconds = members["ttl_seconds"]
    return ApprovalRule(is_required=members["required"] is True, ttl_seconds=ttl_seconds if isinstance(ttl_seconds, int) else None)


def _write_action(action: Action) -> Json:
    """Return an action's members: those of a retry policy but for the statuses that mean undone."""
    return {
        "url": action.url,
        **{name: value for name, value in compensations.write_retry(action.retry).items() if name != "compensated_on"},
    }


def _read_action(members: dict[str, Json]) -> Action:
    return Action(url=str(members["url"]), retry=compensations.read_retry({**members, "compensated_on": []}))
