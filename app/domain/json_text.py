"""Read and write JSON text strictly and without loss. Must not guess: what has two meanings, or none, is refused with its place."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from json.encoder import encode_basestring
from typing import NoReturn, TypeAlias

MAX_DEPTH = 64  # levels of arrays and objects (contract, section 6)

# Longer ints, and every number that is no plain int, stay text: 18 digits fit a 64-bit integer in every language that reads us.
MAX_INT_DIGITS = 18

# A pointer is shown in problems and logs; one through hostile keys of a megabyte stops at the last ancestor that fits.
MAX_POINTER_CHARACTERS = 1024

_NUMBER = re.compile(r"(?P<int>-?(?:0|[1-9][0-9]*))(?P<rest>(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")

# Possessive quantifiers keep a megabyte of escapes from filling the matcher's backtracking stack.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_MAY_BE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_BRACES_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


@dataclass(frozen=True, slots=True)
class NumberLiteral:
    """A JSON number whose text `str(int(text))` would not give back: a fraction, an exponent, -0 or an int over 18 digits.

    Equal by text: `1.0`, `1.00` and `1e0` are three literals. Raises ValueError for text that is no such number.
    """

    text: str

    def __post_init__(self) -> None:
        found = _NUMBER.fullmatch(self.text)
        if found is None:
            raise ValueError(f"expected the text of a JSON number, found {self.text[:40]!r}")
        if not found["rest"] and _is_plain_int(self.text):
            raise ValueError(f"expected an int for the plain number {self.text}")

    def __float__(self) -> float:
        """Return the nearest double; infinite where the literal is beyond its range."""
        return float(self.text)


# What `parse` returns and `dump` takes. Note that Python holds `True == 1`; JSON does not: compare bytes where that matters.
Json: TypeAlias = bool | int | str | NumberLiteral | list["Json"] | dict[str, "Json"] | None


class JsonFaultReason(StrEnum):
    """Why a text is not accepted as JSON."""

    NOT_UTF8 = "not_utf8"
    BYTE_ORDER_MARK = "byte_order_mark"
    SYNTAX = "syntax"
    TOO_DEEP = "too_deep"
    DUPLICATE_KEY = "duplicate_key"
    NOT_A_NUMBER = "not_a_number"
    LONE_SURROGATE = "lone_surrogate"


class JsonFault(ValueError):
    """A text that is not acceptable JSON.

    Args:
        pointer: RFC 6901 pointer to the place; "" (the whole text) where none can be given.
        reason: the class of the fault.
        detail: a sentence for people, with line and column of a syntax fault; never a value of the text.
    """

    def __init__(self, pointer: str, reason: JsonFaultReason, detail: str) -> None:
        super().__init__(detail)
        self.pointer = pointer
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class _Constant:
    """Stands in the tree of a second reading for NaN or an infinity."""

    text: str


@dataclass(frozen=True, slots=True)
class _Repetitive:
    """Stands in the tree of a second reading for an object with some key twice."""

    keys: list[str]

    def repeated_key(self) -> str:
        seen: set[str] = set()
        for key in self.keys:
            if key in seen:
                return key
            seen.add(key)
        raise AssertionError("no key occurs twice")


class _UnplacedError(Exception):
    """The first reading met something that is refused, and cannot say where."""


def pointer_text(tokens: Iterable[str | int]) -> str:
    """Return the JSON Pointer (RFC 6901) of a path; one too long to show ends at the last ancestor that fits."""
    pointer = ""
    for token in tokens:
        longer = f"{pointer}/{str(token).replace('~', '~0').replace('/', '~1')}"
        if len(longer) > MAX_POINTER_CHARACTERS:
            break
        pointer = longer
    return pointer


def parse(data: bytes, *, max_depth: int = MAX_DEPTH) -> Json:
    r"""Read one JSON text (RFC 8259), keeping the literal of every number that an int would not keep.

    An escaped U+0000 is accepted here; columns that cannot hold it refuse it themselves. The caller bounds the size.

    Raises:
        JsonFault: not UTF-8, a byte order mark, bad syntax, more than `max_depth` levels, a key twice in one object, NaN or Infinity,
            or half a surrogate pair.
    """
    text = _decode(data)
    if _is_too_deep(data, max_depth):
        raise JsonFault("", JsonFaultReason.TOO_DEEP, f"arrays and objects are nested more than {max_depth} levels deep")
    try:
        value = _read(_STRICT, text)
    except _UnplacedError:
        value = _read(_PLACING, text)
        _refuse(value, ())
    if _MAY_BE_SURROGATE.search(data) is not None:
        _refuse(value, ())
    return value


def dump(value: Json) -> bytes:
    """Return compact UTF-8 JSON text with key order and number literals kept, non-ASCII unescaped and control characters escaped.

    Raises:
        TypeError: a float, a key that is no string, or another type that is not `Json`.
        ValueError: a string with half a surrogate pair.
    """
    if _is_flat(value):
        return _IN_ORDER.encode(value).encode()
    parts: list[str] = []
    _write(value, parts, is_canonical=False)
    return "".join(parts).encode()


def canonical(value: object) -> bytes:
    """Return the one text of a value: as `dump`, with the keys of every object sorted by code point (journal bodies).

    Raises:
        TypeError: as `dump`, and for a NumberLiteral: equal numbers could have different texts.
        ValueError: a string with half a surrogate pair.
    """
    if _is_flat(value):
        return _SORTED.encode(value).encode()
    parts: list[str] = []
    _write(value, parts, is_canonical=True)
    return "".join(parts).encode()


def fits(value: Json, *, max_bytes: int, max_depth: int = MAX_DEPTH) -> bool:
    """Say whether `dump(value)` is no longer than `max_bytes` and no deeper than `max_depth`, without making it.

    Takes time in proportion to `max_bytes`, also for a value that shares its parts many times over (bound references).
    """
    left = max_bytes
    waiting: list[tuple[Json, int]] = [(value, 1)]
    while waiting and left >= 0:
        item, depth = waiting.pop()
        if not isinstance(item, list | dict):
            left -= len(dump(item))
            continue
        if depth > max_depth:
            return False
        left -= 1 + max(len(item), 1)  # the brackets, and the commas
        if left < 0:
            return False
        if isinstance(item, dict):
            left -= sum(len(encode_basestring(key).encode()) + 1 for key in item)
        waiting.extend((member, depth + 1) for member in (item.values() if isinstance(item, dict) else item))
    return left >= 0


def _decode(data: bytes) -> str:
    if data.startswith(b"\xef\xbb\xbf"):
        raise JsonFault("", JsonFaultReason.BYTE_ORDER_MARK, "the text begins with a byte order mark (RFC 8259, section 8.1, forbids it)")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise JsonFault("", JsonFaultReason.NOT_UTF8, f"the text is not UTF-8 at byte {error.start}") from error


def _is_too_deep(data: bytes, max_depth: int) -> bool:
    """Say whether the brackets outside strings nest deeper than `max_depth`, before anything recurses over them.

    Each round removes the innermost pairs; a text that nests no deeper is used up after `max_depth` rounds. Unbalanced rests are left to
    the parser, which then stops at a depth below twice the limit.
    """
    if data.count(b"[") + data.count(b"{") <= max_depth:
        return False
    brackets = _STRING.sub(b"", data).translate(_BRACES_TO_BRACKETS, _NOT_BRACKETS)
    for _ in range(max_depth):
        fewer = brackets.replace(b"[]", b"")
        if len(fewer) == len(brackets):
            break
        brackets = fewer
    return b"[]" in brackets or brackets.count(b"[") > max_depth


def _read(decoder: json.JSONDecoder, text: str) -> Json:
    try:
        value: Json = decoder.decode(text)
    except json.JSONDecodeError as error:
        detail = f"line {error.lineno} column {error.colno}: {error.msg}"
        raise JsonFault("", JsonFaultReason.SYNTAX, detail) from error
    except RecursionError as error:
        # Only with a `max_depth` near the interpreter's own limit, or when called deep in a stack.
        raise JsonFault("", JsonFaultReason.TOO_DEEP, "arrays and objects are nested too deep to be read") from error
    return value


def _is_plain_int(text: str) -> bool:
    return text != "-0" and len(text) - text.startswith("-") <= MAX_INT_DIGITS


def _integer(text: str) -> int | NumberLiteral:
    return int(text) if _is_plain_int(text) else _literal(text)


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _UnplacedError
    return members


def _object_or_repetitive(pairs: list[tuple[str, Json]]) -> dict[str, Json] | _Repetitive:
    members = dict(pairs)
    return members if len(members) == len(pairs) else _Repetitive([key for key, _ in pairs])


def _refuse_constant(_text: str) -> NoReturn:
    raise _UnplacedError


def _literal(text: str) -> NumberLiteral:
    """Make a literal of what the scanner took for a number: checking each again would triple the time of a megabyte of them."""
    literal = object.__new__(NumberLiteral)
    object.__setattr__(literal, "text", text)
    return literal


_STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_float=_literal, parse_constant=_refuse_constant)
_PLACING = json.JSONDecoder(object_pairs_hook=_object_or_repetitive, parse_int=_integer, parse_float=_literal, parse_constant=_Constant)


def _refuse(value: Json | _Constant | _Repetitive, path: tuple[str | int, ...]) -> None:
    """Raise for the first thing in the tree that is refused, in the order of the text; the depth is bounded already."""
    match value:
        case str():
            if _has_lone_surrogate(value):
                raise JsonFault(pointer_text(path), JsonFaultReason.LONE_SURROGATE, "the string holds half a surrogate pair")
        case list():
            for index, item in enumerate(value):
                _refuse(item, (*path, index))
        case dict():
            for key, member in value.items():
                _refuse_key(key, path)
                _refuse(member, (*path, key))
        case _Constant():
            raise JsonFault(pointer_text(path), JsonFaultReason.NOT_A_NUMBER, f"{value.text} is not a JSON number")
        case _Repetitive():
            key = value.repeated_key()
            _refuse_key(key, path)
            raise JsonFault(pointer_text((*path, key)), JsonFaultReason.DUPLICATE_KEY, "the key occurs more than once in its object")
        case _:
            return


def _refuse_key(key: str, path: tuple[str | int, ...]) -> None:
    """Blame the object for a key that no pointer could show."""
    if _has_lone_surrogate(key):
        raise JsonFault(pointer_text(path), JsonFaultReason.LONE_SURROGATE, "a key of this object holds half a surrogate pair")


def _has_lone_surrogate(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


_NAMES = frozenset({str})
_SCALARS = frozenset({str, int, bool, type(None)})
_IN_ORDER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_SORTED = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _is_flat(value: object) -> bool:
    """Tell whether a value is an object of scalars alone: those the library writes as we do, in a third of the time."""
    return type(value) is dict and _NAMES.issuperset(map(type, value)) and _SCALARS.issuperset(map(type, value.values()))


def _write(value: object, parts: list[str], *, is_canonical: bool) -> None:
    match value:
        case str():
            parts.append(encode_basestring(value))
        case True:
            parts.append("true")
        case False:
            parts.append("false")
        case None:
            parts.append("null")
        case int():
            parts.append(int.__repr__(value))
        case list():
            _write_array(value, parts, is_canonical=is_canonical)
        case dict():
            _write_object(value, parts, is_canonical=is_canonical)
        case NumberLiteral() if not is_canonical:
            parts.append(value.text)
        case _:
            raise TypeError(f"{type(value).__name__} has no place in {'canonical' if is_canonical else 'JSON'} text")


def _write_array(items: list[object], parts: list[str], *, is_canonical: bool) -> None:
    separator = "["
    for item in items:
        parts.append(separator)
        _write(item, parts, is_canonical=is_canonical)
        separator = ","
    parts.append("]" if items else "[]")


def _write_object(members: dict[object, object], parts: list[str], *, is_canonical: bool) -> None:
    separator = "{"
    keys = [key for key in members if isinstance(key, str)]
    if len(keys) != len(members):
        raise TypeError("the keys of an object must be strings")
    for key in sorted(keys) if is_canonical else keys:
        member = members[key]
        if type(member) is str:
            parts.append(f"{separator}{encode_basestring(key)}:{encode_basestring(member)}")
        else:
            parts.append(f"{separator}{encode_basestring(key)}:")
            _write(member, parts, is_canonical=is_canonical)
        separator = ","
    parts.append("}" if members else "{}")
