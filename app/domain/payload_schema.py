"""Hold a call's payload against its tool's JSON Schema (draft 2020-12). Must not fetch anything: references stay inside the schema."""

from dataclasses import dataclass
from functools import lru_cache

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing.exceptions import Unresolvable

from app.domain.json_text import Json, JsonFault, NumberLiteral, parse, pointer_text

MAX_FAULTS = 10  # a person reads the first few
MAX_CACHED_SCHEMAS = 512
MAX_DETAIL_CHARACTERS = 200  # the validator quotes what it found, which may be the whole payload


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
        Draft202012Validator(value).is_valid({})
    except SchemaError as error:
        return [SchemaFault(pointer_text(error.absolute_path), error.message[:MAX_DETAIL_CHARACTERS])]
    except Unresolvable as error:
        return [SchemaFault("", f"a $ref leads nowhere: {error.ref[:MAX_DETAIL_CHARACTERS]}")]
    except RecursionError:
        return [SchemaFault("", "the schema refers to itself without end")]
    return []


def faults_of_payload(schema: bytes, payload: bytes) -> list[SchemaFault]:
    """Say where a payload does not fit the schema; pointers lead into the payload. Empty where it fits."""
    try:
        value = plain(parse(payload))
    except JsonFault as fault:
        return [SchemaFault(fault.pointer, f"the payload is not JSON: {fault.detail}")]
    try:
        errors = sorted(_validator(schema).iter_errors(value), key=lambda error: list(map(str, error.absolute_path)))
    except (RecursionError, Unresolvable) as error:
        return [SchemaFault("", f"the schema cannot be applied to this payload: {type(error).__name__}")]
    return [SchemaFault(pointer_text(error.absolute_path), error.message[:MAX_DETAIL_CHARACTERS]) for error in errors[:MAX_FAULTS]]


@lru_cache(maxsize=MAX_CACHED_SCHEMAS)
def _validator(schema: bytes) -> Draft202012Validator:
    value = plain(parse(schema))
    if not isinstance(value, dict | bool):
        raise TypeError("only what faults_of_schema let pass is a schema")
    return Draft202012Validator(value)


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
