"""Payloads are held against JSON Schemas without surprises: right pointers, no fetching, no crash, no quadratic cost."""

import json
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.payload_schema import MAX_FAULTS, faults_of_payload, faults_of_schema

KEYWORDS = st.sampled_from(
    [
        "type",
        "properties",
        "required",
        "items",
        "$ref",
        "$dynamicRef",
        "$id",
        "$defs",
        "$anchor",
        "$schema",
        "allOf",
        "not",
        "enum",
        "const",
        "title",
        "minimum",
        "multipleOf",
        "pattern",
        "patternProperties",
        "uniqueItems",
        "additionalProperties",
        "prefixItems",
        "contains",
    ]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from(["string", "object", "#", "#/$defs/a", "#/title/0", "a", "(", "#/required/x"])
)
SCHEMAS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS | st.just("a"), inner, max_size=4), max_leaves=12
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, 1.0, 0.5, "1", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
    max_leaves=8,
)


def text(value: object) -> bytes:
    """Return JSON text."""
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        (b"5", ""),
        (b'"string"', ""),
        (b"[]", ""),
        (b'{"type":"strin"}', "/type"),
        (b'{"properties":{"a/b":{"minimum":"1"}}}', "/properties/a~1b/minimum"),
        (b'{"required":"a"}', "/required"),
        (b'{"pattern":"("}', "/pattern"),
        (b'{"patternProperties":{"(":{}}}', "/patternProperties/("),
        (b'{"multipleOf":0}', "/multipleOf"),
        (b'{"multipleOf":1e-400}', "/multipleOf"),
        (b'{"$ref":"https://example.org/schema"}', "/$ref"),
        (b'{"properties":{"a":{"$ref":"other.json#/a"}}}', "/properties/a/$ref"),
        (b'{"allOf":[{},{"$ref":"urn:uuid:0"}]}', "/allOf/1/$ref"),
        (b'{"$ref":"#/$defs/absent"}', ""),
        (b'{"$ref":"#nowhere"}', ""),
        (b'{"$ref":"#/required/x","required":["a"]}', ""),
        (b'{"$ref":"#/title","title":"a"}', "/title"),
        (b'{"$ref":"#/title/0","title":"a"}', ""),
        (b'{"$ref":"#/minimum","minimum":1}', "/minimum"),
    ],
)
def test_schema_is_refused_when_it_could_not_be_applied(schema: bytes, pointer: str) -> None:
    """A fault has the place it is at and a sentence that stays short."""
    (fault,) = faults_of_schema(schema)
    assert fault.pointer == pointer
    assert 0 < len(fault.detail) < 300


@pytest.mark.parametrize(
    "schema",
    [
        b"{}",
        b"true",
        b"false",
        b'{"type":"object","properties":{"$ref":{"type":"string"}}}',
        b'{"$defs":{"a":{"type":"integer"}},"properties":{"n":{"$ref":"#/$defs/a"}}}',
        b'{"$id":"https://example.org/own","$schema":"https://json-schema.org/draft/2020-12/schema"}',
        b'{"properties":{"next":{"$ref":"#"}}}',
        b'{"minimum":1.50,"maximum":123456789012345678901234567890}',
    ],
)
def test_schema_is_taken_when_it_is_one(schema: bytes) -> None:
    """References inside, recursion, exotic numbers and boolean schemas are all right."""
    assert faults_of_schema(schema) == []


@pytest.mark.parametrize(
    ("schema", "payload", "pointers"),
    [
        (b'{"required":["a"]}', b"{}", [""]),
        (b'{"properties":{"a":{"type":"string"},"b":{"type":"string"}}}', b'{"b":1,"a":2}', ["/a", "/b"]),
        (b'{"properties":{"x/y":{"items":{"minimum":3}}}}', b'{"x/y":[3,2]}', ["/x~1y/1"]),
        (b"false", b"1", [""]),
        (b"true", b"1", []),
        (b'{"type":"integer"}', b"1.0", []),
        (b'{"type":"integer"}', b"1E+2", []),
        (b'{"type":"integer"}', b"1.5", [""]),
        (b'{"type":"integer"}', b"123456789012345678901234567890", []),
        (b'{"const":1.10}', b"1.1", []),
        (b'{"const":1}', b"true", [""]),
        (b'{"maximum":5}', b"1E+400", [""]),
        (b'{"maximum":5}', b"1" + b"0" * 5000, [""]),
        (b'{"maxLength":1}', '"\U0001f600"'.encode(), []),
        (b'{"type":"object"}', b"not json", [""]),
        (b'{"type":"object"}', b"", [""]),
        (b'{"type":"object"}', b'{"a":1,"a":2}', ["/a"]),
        (b'{"uniqueItems":true}', b'[1,true,"1",[1],[true],{"a":1},{"a":true},null,0,false]', []),
        (b'{"uniqueItems":true}', b'[{"a":[1,{}]},2,{"a":[1.0,{}]}]', [""]),
        (b'{"properties":{"l":{"uniqueItems":true}}}', b'{"l":[1,1.0]}', ["/l"]),
        (b'{"uniqueItems":false}', b"[1,1]", []),
    ],
)
def test_payload_is_judged_by_its_schema(schema: bytes, payload: bytes, pointers: list[str]) -> None:
    """Numbers are compared as numbers, and every fault says where in the payload it is."""
    assert faults_of_schema(schema) == []
    faults = faults_of_payload(schema, payload)
    assert [fault.pointer for fault in faults] == pointers
    assert all(0 < len(fault.detail) < 300 for fault in faults)


@pytest.mark.parametrize(
    ("schema", "payload"),
    [
        (b'{"multipleOf":0.1}', b"1" + b"0" * 400),
        (b'{"multipleOf":0.1}', b"1E+400"),
        (b'{"properties":{"a":{"$ref":"#/required/x"}},"required":["a"]}', b'{"a":1}'),
        (b'{"properties":{"a":{"$ref":"#/title"}},"title":"x"}', b'{"a":1}'),
    ],
)
def test_payload_is_refused_when_the_schema_cannot_be_applied_to_it(schema: bytes, payload: bytes) -> None:
    """What the validator stumbles over is a refusal with a sentence, never a crash."""
    (fault,) = faults_of_payload(schema, payload)
    assert (fault.pointer, fault.detail.split(":", maxsplit=1)[0]) == ("", "the schema cannot be applied to this payload")


def test_nothing_is_fetched_when_a_schema_points_outside() -> None:
    """A schema is not a way to make the service open connections, not even past the check of the usual place."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/schema"
        for schema in (
            {"$ref": "#/$defs/a", "$dynamicRef": url, "$defs": {"a": {}}},
            {"$ref": url},
            {"$dynamicRef": url},
            {"$id": url, "$ref": "#absent"},
            {"properties": {"a": {"$schema": "http://json-schema.org/draft-04/schema#", "id": url, "allOf": [{"$ref": "#x"}]}}},
            {"$schema": url},
        ):
            faults_of_schema(text(schema))
            faults_of_payload(text(schema), b'{"a":1}')
        listener.setblocking(False)  # noqa: FBT003 - the socket's own signature
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_faults_are_few_when_everything_is_wrong() -> None:
    """A person reads the first ones; a hostile payload does not fill the answer."""
    faults = faults_of_payload(b'{"items":{"type":"string"}}', text([1] * 50_000))
    assert [fault.pointer for fault in faults] == [f"/{index}" for index in range(MAX_FAULTS)]


def test_detail_is_cut_when_the_validator_quotes_the_payload() -> None:
    """A fault names what is wrong, and does not carry the payload into an answer."""
    (fault,) = faults_of_payload(b'{"type":"object"}', text("x" * 100_000))
    assert len(fault.detail) == 200


def test_unique_items_stay_affordable_when_they_cannot_be_sorted() -> None:
    """A payload of the greatest size, of mixed types, is judged by hash: compared pair by pair it would take minutes."""
    items: list[Any] = [value for number in range(18_000) for value in (number, str(number))]
    assert faults_of_payload(b'{"uniqueItems":true}', text(items)) == []
    assert len(faults_of_payload(b'{"uniqueItems":true}', text([*items, 7]))) == 1


@given(SCHEMAS, VALUES)
def test_any_schema_is_refused_or_usable_when_given(schema: object, payload: object) -> None:
    """Whatever JSON comes as a schema, registering it and applying it ends in an answer."""
    if not faults_of_schema(text(schema)):
        faults_of_payload(text(schema), text(payload))


@given(st.lists(VALUES, max_size=6))
def test_unique_items_agree_with_comparing_every_pair(items: list[Any]) -> None:
    """Equality is JSON's: 1 is 1.0 and never true, key order means nothing."""
    tagged = [json.dumps(as_json(item), sort_keys=True) for item in items]
    is_unique = len(set(tagged)) == len(tagged)
    assert (faults_of_payload(b'{"uniqueItems":true}', text(items)) == []) is is_unique


def as_json(value: Any) -> Any:
    """Return a value whose text is the same for equal JSON values: whole floats become integers."""
    match value:
        case bool():
            return value
        case float() if value.is_integer():
            return int(value)
        case list():
            return [as_json(item) for item in value]
        case dict():
            return {key: as_json(member) for key, member in value.items()}
        case _:
            return value


@pytest.mark.parametrize("schema", [b'{"$ref":"#"}', b'{"properties":{"a":{"$ref":"#/$defs/b"}},"$defs":{"b":{"$ref":"#/$defs/b"}}}'])
def test_judgement_ends_when_a_schema_refers_to_itself_without_end(schema: bytes) -> None:
    """A schema that says nothing lets everything pass, and does so at once."""
    assert faults_of_schema(schema) == []
    assert faults_of_payload(schema, b'{"a":1}') == []


@pytest.mark.parametrize("payload", [b"19.99", b"4.35", b"0.07", b"1.10"])
def test_money_is_a_multiple_of_a_cent_when_it_is_written_so(payload: bytes) -> None:
    """What people write for amounts is what they mean by it: no double's error decides."""
    assert faults_of_payload(b'{"multipleOf":0.01}', payload) == []


def test_schema_is_refused_when_its_references_fan_out() -> None:
    """Each level of references multiplies the work of every payload."""
    levels = 30
    definitions = {f"d{level}": {"allOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(levels)} | {f"d{levels}": {}}
    (fault,) = faults_of_schema(text({"$defs": definitions, "$ref": "#/$defs/d0"}))
    assert "at most" in fault.detail


def test_regular_expression_takes_linear_time_when_it_is_made_to_backtrack() -> None:
    """An agent's text must not hold the loop through an administrator's careless pattern."""
    (fault,) = faults_of_payload(b'{"pattern":"^(a+)+$"}', text("a" * 100_000 + "!"))
    assert fault.pointer == ""
