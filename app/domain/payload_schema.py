"""Hold a call's payload against its tool's JSON Schema (draft 2020-12). Must not fetch anything: references stay inside the schema.

The validator is compiled code with a regex engine that takes linear time, because payloads come from agents and are judged on the loop.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import jsonschema_rs

from app.domain.json_text import Json, JsonFault, NumberLiteral, parse, pointer_text

MAX_FAULTS = 10  # a person reads the first few
MAX_CACHED_SCHEMAS = 512
MAX_DETAIL_CHARACTERS = 200  # the validator quotes what it found, which may be the whole payload
MAX_REFERENCES = 40  # references that fan out level by level multiply the work; real schemas have far fewer

# What the validator stumbles over: numbers beyond a float, a schema that refers to itself without end.
_STUMBLES = (ArithmeticError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class SchemaFault:
    """What is wrong, and where (RFC 6901)."""

    pointer: str
    detail: str


def faults_of_schema(schema: bytes) -> list[SchemaFault]:
    """Say what keeps a text from being a usable schema; empty where nothing does."""
    try:
        value = plain(parse(schema))
    except OverflowError as error:
        return [SchemaFault("", str(error))]
    if not isinstance(value, dict | bool):
        return [SchemaFault("", "expected an object or a boolean")]
    references = _references(value, ())
    outside = next((pointer for pointer, target in references if not target.startswith("#")), None)
    if outside is not None:
        return [SchemaFault(outside, "a $ref must stay inside the schema: `#...`")]
    if len(references) > MAX_REFERENCES:
        return [SchemaFault(references[MAX_REFERENCES][0], f"expected at most {MAX_REFERENCES} references")]
    try:
        _compiled(value)
    except jsonschema_rs.ValidationError as error:
        return [SchemaFault(pointer_text(error.instance_path), error.message[:MAX_DETAIL_CHARACTERS])]
    except (jsonschema_rs.ReferencingError, *_STUMBLES) as error:
        return [SchemaFault("", f"the schema cannot be applied: {str(error)[:MAX_DETAIL_CHARACTERS]}")]
    return []


def faults_of_payload(schema: bytes, payload: bytes) -> list[SchemaFault]:
    """Say where a payload does not fit the schema; pointers lead into the payload. Empty where it fits."""
    try:
        errors = list(islice(_validator(schema).iter_errors(plain(parse(payload))), MAX_FAULTS))
    except JsonFault as fault:
        return [SchemaFault(fault.pointer, f"the payload is not JSON: {fault.detail}")]
    except _STUMBLES as error:
        return [SchemaFault("", f"the schema cannot be applied to this payload: {type(error).__name__}")]
    faults = [SchemaFault(pointer_text(error.instance_path), error.message[:MAX_DETAIL_CHARACTERS]) for error in errors]
    return sorted(faults, key=lambda fault: fault.pointer)


@lru_cache(maxsize=MAX_CACHED_SCHEMAS)
def _validator(schema: bytes) -> jsonschema_rs.Draft202012Validator:
    return _compiled(plain(parse(schema)))


def _compiled(value: object) -> jsonschema_rs.Draft202012Validator:
    if not isinstance(value, dict | bool):
        raise TypeError("only what faults_of_schema let pass is a schema")
    return jsonschema_rs.Draft202012Validator(value, offline=True, pattern_options=jsonschema_rs.RegexOptions())


def plain(value: Json) -> object:
    """Return a tree with Python's own numbers, as the validator takes them; fractions become floats.

    Raises:
        OverflowError: a number beyond a float, which the validator would not see as a number.
    """
    match value:
        case NumberLiteral():
            number = float(value)
            if math.isinf(number):
                raise OverflowError(f"{value.text[:40]} is beyond the range of a double")
            return int(value.text) if value.text.lstrip("-").isdecimal() else number
        case list():
            return [plain(item) for item in value]
        case dict():
            return {key: plain(member) for key, member in value.items()}
        case _:
            return value


def _references(value: object, path: tuple[str | int, ...]) -> list[tuple[str, str]]:
    """Return every `$ref` and `$dynamicRef` with its place."""
    match value:
        case dict():
            own = [(pointer_text((*path, name)), target) for name in ("$ref", "$dynamicRef") if isinstance(target := value.get(name), str)]
            return [*own, *(found for key, member in value.items() for found in _references(member, (*path, key)))]
        case list():
            return [found for index, item in enumerate(value) for found in _references(item, (*path, index))]
        case _:
            return []
