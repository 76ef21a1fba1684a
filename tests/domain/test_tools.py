"""What may be registered about a tool, and the text it is kept as."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.egress import EgressPolicy
from app.domain.json_text import dump, parse
from app.domain.model import Action, Compensation, OnUnknown, RetryPolicy, Reversibility, UnknownVariant
from app.domain.tools import ApprovalRule, Definition, check, read, write

UNDO = Compensation(url="https://ledger.example/undo", args=b"{}")
POLICY = EgressPolicy()
CLASSES = {
    (Reversibility.READ_ONLY, False): None,
    (Reversibility.READ_ONLY, True): "compensation_not_allowed",
    (Reversibility.REVERSIBLE, False): "tool_needs_compensation",
    (Reversibility.REVERSIBLE, True): None,
    (Reversibility.COMPENSATABLE, False): "tool_needs_compensation",
    (Reversibility.COMPENSATABLE, True): None,
    (Reversibility.IRREVERSIBLE, False): None,
    (Reversibility.IRREVERSIBLE, True): "compensation_not_allowed",
}
APPROVALS = {None: None, True: ApprovalRule(is_required=True), False: ApprovalRule(is_required=False)}
MANY_REFERENCES = dump([{"$ref": "result#/id"}] * 33)


def place(definition: Definition, policy: EgressPolicy = POLICY) -> tuple[str, str] | None:
    """Return code and pointer of the refusal."""
    refusal = check(definition, policy)
    if refusal is None:
        return None
    errors = refusal.facts["errors"]
    assert isinstance(errors, list)
    (fault,) = errors
    return refusal.code, str(fault["pointer"])


@pytest.mark.parametrize(("reversibility", "has_undo", "code"), [(*case, code) for case, code in CLASSES.items()])
def test_class_and_undo_must_go_together(reversibility: Reversibility, has_undo: bool, code: str | None) -> None:
    """What can be undone says how; what cannot, or need not be, has no undo."""
    definition = Definition(reversibility=reversibility, compensation=UNDO if has_undo else None)
    assert place(definition) == (None if code is None else (code, "/compensation"))


@pytest.mark.parametrize("reversibility", Reversibility)
@pytest.mark.parametrize("said", [None, True, False])
def test_call_is_approved_when_irreversible_unless_something_else_is_said(
    reversibility: Reversibility,
    said: bool | None,
) -> None:
    """Nothing said: fail closed for what cannot be undone, and for nothing else."""
    definition = Definition(reversibility=reversibility, approval=APPROVALS[said])
    assert definition.must_be_approved is (reversibility is Reversibility.IRREVERSIBLE if said is None else said)


@pytest.mark.parametrize(
    ("undo", "expected"),
    [
        (replace(UNDO, url="ftp://ledger.example/undo"), ("url_refused", "/compensation/url")),
        (replace(UNDO, url="http://127.0.0.1/undo"), ("url_refused", "/compensation/url")),
        (replace(UNDO, url="http://2130706433/undo"), ("url_refused", "/compensation/url")),
        (replace(UNDO, url="https://user@ledger.example/"), ("url_refused", "/compensation/url")),
        (replace(UNDO, unknown=UnknownVariant(args=b"{}", url="http://[::1]/")), ("url_refused", "/compensation/unknown/url")),
        (replace(UNDO, args=b'{"a":[{"$ref":"effects#/x"}]}'), ("bad_reference", "/compensation/args/a/0")),
        (replace(UNDO, args=b'{"$ref":"result#x"}'), ("bad_reference", "/compensation/args")),
        (replace(UNDO, args=MANY_REFERENCES), ("bad_reference", "/compensation/args/32")),
        (replace(UNDO, unknown=UnknownVariant(args=b'{"k":{"$ref":"#/x"}}')), ("bad_reference", "/compensation/unknown/args/k")),
        (replace(UNDO, args=dump([{"$ref": "result#/id"}] * 32)), None),
        (replace(UNDO, args=b'{"a":{"$ref":"nonsense","and":1}}'), None),
        (replace(UNDO, args=b'{"a":{"$ref":1}}'), None),
    ],
)
def test_undo_is_refused_when_it_could_never_be_sent(undo: Compensation, expected: tuple[str, str] | None) -> None:
    """The fault is told at registration, with its place, not at the first undo."""
    assert place(Definition(reversibility=Reversibility.COMPENSATABLE, compensation=undo)) == expected


def test_undo_to_a_private_address_is_taken_when_the_deployment_allows_it() -> None:
    """The deployment's list counts at registration as it does at sending."""
    definition = Definition(reversibility=Reversibility.COMPENSATABLE, compensation=replace(UNDO, url="http://127.0.0.1:9/undo"))
    assert place(definition, EgressPolicy.parse("127.0.0.0/8")) is None


ACTION = Action(url="https://ledger.example/charge")


@pytest.mark.parametrize(
    ("definition", "expected"),
    [
        (Definition(reversibility=Reversibility.IRREVERSIBLE, action=ACTION), None),
        (Definition(reversibility=Reversibility.COMPENSATABLE, compensation=UNDO, approval=APPROVALS[True], action=ACTION), None),
        (
            Definition(reversibility=Reversibility.COMPENSATABLE, compensation=UNDO, action=ACTION),
            ("action_needs_approval", "/action"),
        ),
        (
            Definition(reversibility=Reversibility.IRREVERSIBLE, action=Action(url="http://127.0.0.1/charge")),
            ("url_refused", "/action/url"),
        ),
        (Definition(reversibility=Reversibility.IRREVERSIBLE, action=Action(url="ftp://ledger.example/")), ("url_refused", "/action/url")),
    ],
)
def test_action_is_refused_when_it_could_never_be_sent(definition: Definition, expected: tuple[str, str] | None) -> None:
    """The service runs what a person has released, and nothing that it may not call."""
    assert place(definition) == expected


def test_text_is_read_when_it_is_older_than_actions() -> None:
    """What was registered before there were actions is the same registration after."""
    definition = Definition(reversibility=Reversibility.IRREVERSIBLE)
    older = parse(write(definition))
    assert isinstance(older, dict)
    del older["action"]
    assert read(dump(older)) == definition


def test_schema_fault_is_placed_below_its_member() -> None:
    """The pointer leads through the whole registration."""
    definition = Definition(reversibility=Reversibility.READ_ONLY, payload_schema=b'{"properties":{"a":{"type":1}}}')
    assert place(definition) == ("bad_payload_schema", "/payload_schema/properties/a/type")


STATUSES = st.frozensets(st.integers(400, 599), max_size=3)
POLICIES = st.builds(
    RetryPolicy,
    max_retries=st.integers(0, 100),
    initial_interval_ms=st.integers(1, 10**7),
    multiplier=st.floats(1, 100),
    max_interval_ms=st.integers(1, 10**7),
    timeout_ms=st.integers(1, 600_000),
    deadline_ms=st.integers(1, 10**10),
    retry_on=STATUSES,
    compensated_on=STATUSES,
)
ARGS = st.sampled_from([b"{}", b'{"z":1.10,"a":[1E+2,{"$ref":"result#/id"}]}', b"null", b"123456789012345678901234567890", b'"\\u0000"'])


def without_statuses_of_undo(policy: RetryPolicy) -> RetryPolicy:
    """Return the policy as an action may have it: no status means that something was undone."""
    return replace(policy, compensated_on=frozenset())


UNDOS = st.builds(
    Compensation,
    url=st.just("https://ledger.example/undo"),
    args=ARGS,
    description=st.text(max_size=5),
    unknown=st.none() | st.builds(UnknownVariant, args=ARGS, url=st.none() | st.just("https://ledger.example/find")),
    on_unknown=st.sampled_from(OnUnknown),
    independent=st.booleans(),
    retry=POLICIES,
)
DEFINITIONS = st.builds(
    Definition,
    reversibility=st.sampled_from(Reversibility),
    is_idempotent=st.booleans(),
    description=st.text(max_size=5),
    payload_schema=st.sampled_from([None, b"{}", b"true", b"false", b'{"minimum":1.50,"type":"number"}']),
    compensation=st.none() | UNDOS,
    approval=st.none() | st.builds(ApprovalRule, is_required=st.booleans(), ttl_seconds=st.none() | st.integers(1, 10**6)),
    action=st.none() | st.builds(Action, url=st.just("https://ledger.example/charge"), retry=POLICIES.map(without_statuses_of_undo)),
)


@given(DEFINITIONS)
def test_definition_is_the_same_when_it_was_written_and_read(definition: Definition) -> None:
    """Equality decides whether a registration is a new version, so nothing may be lost or normalised on the way."""
    assert read(write(definition)) == definition


def test_text_has_the_members_of_the_api_when_written() -> None:
    """What is kept is what is shown."""
    members = parse(write(Definition(reversibility=Reversibility.READ_ONLY)))
    assert members == {
        "reversibility": "read_only",
        "idempotent": False,
        "description": "",
        "payload_schema": None,
        "compensation": None,
        "approval": None,
        "action": None,
    }
