"""Hold a call's payload against its tool's JSON Schema (draft 2020-12). Must not fetch anything: references stay inside the schema."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable

from app.domain.json_text import Json, JsonFault, NumberLiteral, parse, pointer_text

MAX_FAULTS = 10  # a person reads the first few
MAX_CACHED_SCHEMAS = 512
MAX_DETAIL_CHARACTERS = 200  # the validator quotes what it found, which may be the whole payload

# What the validator stumbles over in a schema whose $ref leads to something that is no schema, and in numbers beyond a float.
_STUMBLES = (RecursionError, Unresolvable, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class SchemaFault:
    """What is wrong, and where (RFC 6901)."""

    pointer: str
    detail: str


def faults_of_schema(schema: bytes) -> list[SchemaFault]:
    """Say what keeps a text from being a usable schema; empty where nothing does."""
    value = plain(parse(schema))
    if not isinstance(value, dict | bool):
        return [SchemaFault("", "expected an object or a boolean")]
    outside = _reference_outside(value, ())
    if outside is not None:
        return [SchemaFault(outside, "a $ref must stay inside the schema: `#...`")]
    try:
        Draft202012Validator.check_schema(value)
        _validator_of(value).is_valid({})
    except SchemaError as error:
        return [SchemaFault(pointer_text(error.absolute_path), error.message[:MAX_DETAIL_CHARACTERS])]
    except Unresolvable as error:
        return [SchemaFault("", f"a $ref leads nowhere: {error.ref[:MAX_DETAIL_CHARACTERS]}")]
    except RecursionError:
        return [SchemaFault("", "the schema refers to itself without end")]
    except _STUMBLES:
        return [SchemaFault("", "a $ref leads to something that is no schema")]
    return []


def faults_of_payload(schema: bytes, payload: bytes) -> list[SchemaFault]:
    """Say where a payload does not fit the schema; pointers lead into the payload. Empty where it fits."""
    try:
        value = plain(parse(payload))
    except JsonFault as fault:
        return [SchemaFault(fault.pointer, f"the payload is not JSON: {fault.detail}")]
    try:
        found = islice(_validator(schema).iter_errors(value), MAX_FAULTS)
        errors = sorted(found, key=lambda error: list(map(str, error.absolute_path)))
    except _STUMBLES as error:
        return [SchemaFault("", f"the schema cannot be applied to this payload: {type(error).__name__}")]
    return [SchemaFault(pointer_text(error.absolute_path), error.message[:MAX_DETAIL_CHARACTERS]) for error in errors]


@lru_cache(maxsize=MAX_CACHED_SCHEMAS)
def _validator(schema: bytes) -> Draft202012Validator:
    value = plain(parse(schema))
    if not isinstance(value, dict | bool):
        raise TypeError("only what faults_of_schema let pass is a schema")
    return _validator_of(value)


def _unique_items(_validator: object, is_wanted: object, items: object, _schema: object) -> Iterator[ValidationError]:
    """Compare items by hash: the library compares each with each, which 50,000 items of a payload turn into minutes."""
    if is_wanted is True and isinstance(items, list) and len({_identity(item) for item in items}) < len(items):
        yield ValidationError("expected items that all differ")


def _identity(value: object) -> Hashable:
    """Return what is equal for equal JSON values only; Python takes true for 1."""
    match value:
        case bool():
            return ("boolean", value)
        case list():
            return ("array", tuple(map(_identity, value)))
        case dict():
            return ("object", frozenset((key, _identity(member)) for key, member in value.items()))
        case _:
            return value


_Validator: Any = extend(Draft202012Validator, {"uniqueItems": _unique_items})  # type: ignore[no-untyped-call]


def _validator_of(schema: dict[str, object] | bool) -> Draft202012Validator:  # noqa: FBT001 - true and false are schemas
    """Make a validator that knows no document but the schema: the library's own registry would fetch others."""
    validator: Draft202012Validator = _Validator(schema, registry=Registry())
    return validator


def plain(value: Json) -> object:
    """Return a tree with Python's own numbers, which is what the validator compares; huge and fractional ones become floats."""
    match value:
        case NumberLiteral():
            number = float(value)
            return int(value.text) if value.text.lstrip("-").isdecimal() and len(value.text) < MAX_INT_CHARACTERS else number
        case list():
            return [plain(item) for item in value]
        case dict():
            return {key: plain(member) for key, member in value.items()}
        case _:
            return value


MAX_INT_CHARACTERS = 4_000  # Python refuses to convert more digits than 4,300


def _reference_outside(value: object, path: tuple[str | int, ...]) -> str | None:
    match value:
        case dict():
            reference = value.get("$ref", value.get("$dynamicRef"))
            if isinstance(reference, str) and not reference.startswith("#"):
                return pointer_text((*path, "$ref"))
            found = (_reference_outside(member, (*path, key)) for key, member in value.items())
        case list():
            found = (_reference_outside(item, (*path, index)) for index, item in enumerate(value))
        case _:
            return None
    return next((pointer for pointer in found if pointer is not None), None)
