"""Read request bodies, and the names in a URL, strictly: one meaning or a refusal. Must not store, log or repeat what was sent.

FastAPI solves the dependencies of a router first, then those of a route's signature in the order written there, and a dependency that
raises ends the request. So authentication comes first and no byte of an unauthenticated body is read:

    async def intercept(
        principal: Annotated[Principal, Depends(authenticate)],
        received: Annotated[Received[InterceptBody], Depends(body(InterceptBody))],
        session_id: SessionIdPath,
    ) -> Response: ...

(Authentication must raise by itself: a dependency whose own header parameter merely fails validation is skipped, not fatal.)
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeAlias, TypeVar

from fastapi import Path
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from app.api.errors import MAX_LISTED_ERRORS, sentence
from app.domain.errors import Invalid, Malformed, TooLarge, WrongMediaType
from app.domain.json_text import Json, JsonFault, NumberLiteral, dump, parse, pointer_text
from app.domain.model import MAX_STEP_INDEX, SessionId, StepIndex

MAX_BODY_BYTES = 1_048_576  # contract, section 6
MAX_PAYLOAD_BYTES = 262_144  # contract, section 6; counted in the UTF-8 of the decoded string

# No model has as many; of more, each would be reported as unknown, at a hundred times the cost of reading it.
MAX_MEMBERS = 256

# A megabyte at 35 kB/s; a slower body is a stuck or hostile sender that holds a connection.
BODY_SECONDS = 30.0

_TOO_LARGE = "payload_too_large"
_NO_NUL = r"^[^\x00]*$"
_NUL_DETAIL = "U+0000 is not acceptable here"
_PLAIN_DIGITS = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)
_RFC_3339 = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?(?:[Zz]|[+-][0-9]{2}:[0-9]{2})")

# Where pydantic's schemas hold further schemas.
_SCHEMA_HOLDERS = ("schema", "fields", "items_schema", "choices", "keys_schema", "values_schema", "steps", "definitions")

# Types that JSON has no form for here: better a crash at import than a field that nobody can fill.
_NO_JSON_FORM = frozenset({"bytes", "complex", "date", "decimal", "multi-host-url", "time", "timedelta", "url", "uuid"})
_RAW_TEXT = "countermand_raw_text"

Model = TypeVar("Model", bound=BaseModel)


def _from_json(schema: Any, resolve: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - pydantic's core schemas are a union of some fifty dictionaries
    """Rewrite a core schema so that strict validation accepts what a parsed JSON text holds for each type, and nothing else.

    `resolve` returns what a reference to a definition stands for.
    """
    match schema:
        case list() | tuple():
            return type(schema)(_from_json(item, resolve) for item in schema)
        case {"type": "model"}:
            return schema
        case {"type": "definition-ref"}:
            # Models have rewritten themselves, and may be recursive; an enum that stands alone is known by reference only.
            meant = resolve(schema)
            return _typed_from_json("enum", meant) if meant["type"] == "enum" else schema
        case {"type": str(kind)}:
            inner = {name: _from_json(member, resolve) if name in _SCHEMA_HOLDERS else member for name, member in schema.items()}
            return _typed_from_json(kind, inner)
        case dict():
            return {name: _from_json(member, resolve) for name, member in schema.items()}
        case _:
            return schema


def _typed_from_json(kind: str, schema: Any) -> Any:  # noqa: ANN401 - as above
    match kind:
        case "str":
            return _text_without_nul(schema)
        case "enum":
            return {**schema, "strict": False}
        case "list" | "tuple" | "set" | "frozenset":
            # The first item at fault is enough: a megabyte of them would cost a second to list.
            return {**schema, "strict": False, "fail_fast": True}
        case "float":
            return core_schema.no_info_before_validator_function(_float, schema)
        case "datetime":
            return core_schema.no_info_before_validator_function(_timestamp, schema)
        case _ if kind in _NO_JSON_FORM:
            raise TypeError(f"a body cannot hold the type {kind!r}: annotate the field with a type that JSON has")
        case _:
            return schema


def _text_without_nul(schema: core_schema.StringSchema) -> CoreSchema:
    """Refuse U+0000, by the pattern (which OpenAPI then shows) or beside the field's own one."""
    if schema.get("metadata", {}).get(_RAW_TEXT):
        return schema
    if "pattern" in schema:
        return core_schema.no_info_after_validator_function(_refuse_nul, schema)
    return {**schema, "pattern": _NO_NUL}


def _few_members(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_MEMBERS:
        raise PydanticCustomError("too_many_members", "unknown members: more than {limit} in all", {"limit": MAX_MEMBERS})
    return value


def _refuse_nul(text: str) -> str:
    if "\0" in text:
        raise PydanticCustomError("nul_character", _NUL_DETAIL)
    return text


def _float(value: object) -> object:
    return float(value) if isinstance(value, NumberLiteral) else value


def _timestamp(value: object) -> datetime:
    if isinstance(value, str) and _RFC_3339.fullmatch(value):
        try:
            return datetime.fromisoformat(value.upper()).astimezone(UTC)
        except (ValueError, OverflowError):
            pass
    raise PydanticCustomError("rfc_3339", "expected a date-time as RFC 3339 writes it, with offset: 2026-01-02T03:04:05Z")


class StrictModel(BaseModel):
    """A body that means exactly what it says: no unknown members, no conversions.

    Ints only from ints (`"1"`, `1.0` and `true` are refused), floats from any number within their range, enums from their strings, aware
    datetimes (in UTC) from RFC 3339 strings, tuples and sets from arrays. U+0000 is refused in every string but `RawText` and `Payload`.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True, protected_namespaces=()
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Loosen pydantic's strict mode where the tree of a JSON text cannot hold the very Python type."""
        schema = handler(source)
        if schema["type"] != "model":
            return schema
        fields = _from_json(schema["schema"], handler.resolve_ref_schema)
        return {**schema, "schema": core_schema.no_info_before_validator_function(_few_members, fields)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnyJson:
    """Lets a field hold the parsed tree itself."""

    is_object: bool = False

    def __get_pydantic_core_schema__(self, _source: object, _handler: GetCoreSchemaHandler) -> CoreSchema:
        if not self.is_object:
            return core_schema.any_schema()
        return core_schema.no_info_after_validator_function(_expect_object, core_schema.any_schema())

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "object", "additionalProperties": True} if self.is_object else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _MayHoldNul:
    """Marks a text that is stored as bytes and so may contain U+0000."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        return {**schema, "metadata": {**schema.get("metadata", {}), _RAW_TEXT: True}}


def _within_payload_limit(text: str) -> str:
    if len(text) > MAX_PAYLOAD_BYTES or len(text.encode()) > MAX_PAYLOAD_BYTES:
        raise PydanticCustomError(_TOO_LARGE, "more than {limit} bytes of UTF-8", {"limit": MAX_PAYLOAD_BYTES})
    return text


if TYPE_CHECKING:
    LosslessJson: TypeAlias = Json
    LosslessObject: TypeAlias = dict[str, Json]
else:
    # The alias is recursive and pydantic need not look into it: these fields take the tree of `json_text.parse` as it is.
    LosslessJson = Annotated[object, _AnyJson()]
    LosslessObject = Annotated[object, _AnyJson(is_object=True)]

RawText: TypeAlias = Annotated[str, _MayHoldNul()]
Payload: TypeAlias = Annotated[str, _MayHoldNul(), AfterValidator(_within_payload_limit)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(Generic[Model]):
    """One accepted body: validated, and as the lossless tree it was read from (see `fingerprint`)."""

    model: Model
    tree: Json


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BodyReader(Generic[Model]):
    """A FastAPI dependency that reads one body; made by `body`, found in the routes by `openapi`."""

    model: type[Model]
    examples: Mapping[str, Mapping[str, object]]
    deadline_seconds: float

    @property
    def is_optional(self) -> bool:
        """Say whether an empty body counts as `{}`."""
        return not any(field.is_required() for field in self.model.model_fields.values())

    async def __call__(self, request: Request) -> Received[Model]:
        """Read, parse and validate the body of this request.

        Raises:
            TooLarge: `body_too_large`, decided on Content-Length before reading and else on the bytes received; `payload_too_large`.
            WrongMediaType: `unsupported_media_type`, `unsupported_content_coding`.
            Malformed: `malformed_json` (with `reason` and the pointer); `incomplete_body`: the sender left, or needed too long.
            Invalid: `invalid_request` with a pointer for each member at fault.
        """
        is_declared = _is_declared_json(request.headers)
        _refuse_announced_size(request.headers)
        data = await _read(request, self.deadline_seconds)
        if data and not is_declared:
            raise WrongMediaType("unsupported_media_type", "expected content type application/json, found none")
        if not data and self.is_optional:
            data = b"{}"
        tree = _parse(data)
        return Received(model=validate(self.model, tree), tree=tree)


def body(
    model: type[Model], *, examples: Mapping[str, Mapping[str, object]] | None = None, deadline_seconds: float = BODY_SECONDS
) -> BodyReader[Model]:
    """Return the dependency that reads a body as `model`: `Annotated[Received[Model], Depends(body(Model))]`.

    Args:
        model: normally a StrictModel. When none of its members is required, an empty body counts as `{}`, with or without content type.
        examples: name -> body, shown in OpenAPI.
        deadline_seconds: for the whole body to arrive.

    Raises:
        SagaError: an example is not an acceptable body.
    """
    shown = MappingProxyType(dict(examples or {}))
    for example in shown.values():
        validate(model, _parse(json.dumps(example).encode()))
    return BodyReader(model=model, examples=shown, deadline_seconds=deadline_seconds)


def validate(model: type[Model], tree: Json) -> Model:
    """Check a parsed body against its model.

    Raises:
        Invalid: `invalid_request`.
        TooLarge: `payload_too_large`.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        # The chain ends here: pydantic's own text would name the values.
        refusal = _refusal_of(error, tree)
    raise refusal


def within(data: bytes, *, limit_bytes: int, pointer: str) -> bytes:
    """Return `data` if it fits the limit; for texts whose size is known only once they are written (`args`, `metadata`).

    Raises:
        TooLarge: `payload_too_large` with the member's pointer.
    """
    if len(data) <= limit_bytes:
        return data
    fault = {"pointer": pointer, "detail": f"more than {limit_bytes} bytes of UTF-8"}
    raise TooLarge(_TOO_LARGE, f"found {len(data)} bytes, expected at most {limit_bytes}", errors=[fault])


def fingerprint(tree: Json) -> bytes:
    """Return the SHA-256 that tells two bodies apart: same members and same number literals in any key order are the same request."""
    return sha256(dump(_sorted(tree))).digest()


def _sorted(tree: Json) -> Json:
    match tree:
        case dict():
            return {key: _sorted(tree[key]) for key in sorted(tree)}
        case list():
            return [_sorted(item) for item in tree]
        case _:
            return tree


def _is_declared_json(headers: Headers) -> bool:
    """Say whether a media type is declared at all; raise for any but JSON in UTF-8, and for a compressed body."""
    if any(coding.strip().lower() not in {"", "identity"} for coding in headers.getlist("content-encoding")):
        raise WrongMediaType("unsupported_content_coding", "expected an uncompressed body")
    declared = headers.getlist("content-type")
    if not declared:
        return False
    media_type, *parameters = (part.strip().lower() for part in declared[0].split(";"))
    if len(declared) > 1 or media_type != "application/json":
        raise WrongMediaType("unsupported_media_type", "expected content type application/json")
    charsets = [value.strip('"') for name, _, value in (part.partition("=") for part in parameters) if name == "charset"]
    if charsets not in ([], ["utf-8"]):
        raise WrongMediaType("unsupported_media_type", "expected charset utf-8 or none")
    return True


def _refuse_announced_size(headers: Headers) -> None:
    announced = headers.get("content-length", "").lstrip("0")
    if announced.isdecimal() and (len(announced) > len(str(MAX_BODY_BYTES)) or int(announced) > MAX_BODY_BYTES):
        raise _body_too_large()


def _body_too_large() -> TooLarge:
    return TooLarge("body_too_large", f"expected a body of at most {MAX_BODY_BYTES} bytes", limit_bytes=MAX_BODY_BYTES)


async def _read(request: Request, deadline_seconds: float) -> bytes:
    """Collect the body; what a lying or absent Content-Length did not tell is counted as it comes."""
    data = bytearray()
    try:
        async with asyncio.timeout(deadline_seconds), aclosing(request.stream()) as chunks:
            async for chunk in chunks:
                if len(data) + len(chunk) > MAX_BODY_BYTES:
                    raise _body_too_large()
                data += chunk
    except ClientDisconnect:
        raise Malformed("incomplete_body", "the connection closed before the body was complete") from None
    except TimeoutError:
        raise Malformed("incomplete_body", f"the body was not complete within {deadline_seconds:g} seconds") from None
    return bytes(data)


def _parse(data: bytes) -> Json:
    try:
        return parse(data)
    except JsonFault as fault:
        # All of them 400: even where a tree could be made of it, the text has no single meaning (RFC 8259, section 4).
        listed = [{"pointer": fault.pointer, "detail": fault.detail}]
        raise Malformed("malformed_json", f"not acceptable JSON: {fault.detail}", reason=fault.reason, errors=listed) from None


def _refusal_of(error: ValidationError, tree: Json) -> Invalid | TooLarge:
    found = error.errors(include_url=False, include_input=False)
    too_large = [fault for fault in found if fault["type"] == _TOO_LARGE]
    listed = [{"pointer": _pointer(fault, tree), "detail": _detail(fault)} for fault in (too_large or found)[:MAX_LISTED_ERRORS]]
    if too_large:
        return TooLarge(_TOO_LARGE, f"expected a payload of at most {MAX_PAYLOAD_BYTES} bytes", errors=listed)
    return Invalid("invalid_request", f"not acceptable: {len(found)} of the body's members", errors=listed)


def _detail(fault: ErrorDetails) -> str:
    if fault.get("ctx", {}).get("pattern") == _NO_NUL:
        return _NUL_DETAIL
    return sentence(fault)


def _pointer(fault: ErrorDetails, tree: Json) -> str:
    """Follow pydantic's location through the body; the labels it inserts (a union's branch, `[key]`) lead nowhere and are left out."""
    *steps, last = fault["loc"] or ("",)
    is_missing = fault["type"] == "missing"
    path: list[str | int] = []
    node = tree
    for step in steps if is_missing else fault["loc"]:
        match node, step:
            case dict(), str() if step in node:
                node = node[step]
            case list(), int() if step < len(node):
                node = node[step]
            case _:
                continue
        path.append(step)
    if is_missing:
        path.append(last)
    return pointer_text(path)


def _expect_object(value: object) -> object:
    if not isinstance(value, dict):
        raise PydanticCustomError("dict_type", "expected an object")
    return value


def _plain_integer(value: object) -> object:
    """Accept one spelling of each number only: `01`, `+1`, `1.0` and ` 1` would be other names of the same thing."""
    if not isinstance(value, str):
        return value
    if _PLAIN_DIGITS.fullmatch(value) is None:
        raise PydanticCustomError("plain_digits", "expected plain digits")
    return int(value)


# For integers in paths and queries, after the bounds: `Annotated[int, Query(ge=0, le=55), PlainInteger]`.
PlainInteger = BeforeValidator(_plain_integer)

# "." and ".." are no ids: clients take such a segment out of a path before they send it (RFC 3986, section 5.2.4).
_SESSION_ID = r"^(\.{0,2}[A-Za-z0-9_:-][A-Za-z0-9._:-]*|\.{3}[A-Za-z0-9._:-]*)$"
_MAX_SESSION_ID = 200


def is_session_id(text: str) -> bool:
    """Tell whether `SessionIdPath` would take this."""
    return len(text) <= _MAX_SESSION_ID and re.fullmatch(_SESSION_ID, text) is not None


SessionIdPath: TypeAlias = Annotated[
    SessionId,
    Path(
        pattern=_SESSION_ID,
        min_length=1,
        max_length=_MAX_SESSION_ID,
        description="The run's own id, chosen by the agent.",
        examples=["refund-4921"],
    ),
]
StepPath: TypeAlias = Annotated[
    StepIndex, Path(ge=1, le=MAX_STEP_INDEX, description="Position of the tool call in its session.", examples=[2]), PlainInteger
]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryNames:
    """A FastAPI dependency that refuses query parameters nobody declared; made by `only_query`."""

    names: frozenset[str]

    async def __call__(self, request: Request) -> None:
        """Check the names of this request's query parameters.

        Raises:
            Invalid: `invalid_request`; a parameter is unknown, or given twice.
        """
        given = Counter(name for name, _ in request.query_params.multi_items())
        faults = [
            {"parameter": name[:100], "detail": "given more than once" if name in self.names else "unknown query parameter"}
            for name, times in given.items()
            if name not in self.names or times > 1
        ]
        if faults:
            known = ", ".join(sorted(self.names)) or "none"
            raise Invalid("invalid_request", f"expected query parameters: {known}", errors=faults[:MAX_LISTED_ERRORS])


def only_query(*names: str) -> QueryNames:
    """Return the dependency that lets a route have these query parameters and no others: `dependencies=[Depends(only_query("wait_s"))]`."""
    return QueryNames(names=frozenset(names))
