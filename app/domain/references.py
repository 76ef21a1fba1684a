"""Bind `$ref` pointers into a compensation's args. Must not look for references in what it has bound: that is other people's data."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from app.domain.json_text import Json, pointer_text

_REFERENCE = re.compile(r"(?P<source>payload|effect|result)#(?P<pointer>(?:/(?:[^~/]|~[01])*+)*+)")
_INDEX = re.compile(r"0|[1-9][0-9]*")

# No array that fits a request has an index of more digits, and `int` refuses those of thousands.
_MAX_INDEX_DIGITS = 9

_MAX_SHOWN_CHARACTERS = 80  # of a string that is refused


class Source(StrEnum):
    """The documents that a reference may point into."""

    PAYLOAD = "payload"
    EFFECT = "effect"
    RESULT = "result"


_STARTS = tuple(f"{source}#" for source in Source)


class Unreadable:
    """The type of `UNREADABLE`."""

    __slots__ = ()


UNREADABLE: Final = Unreadable()
"""Stands for a document that is there and is not JSON: every reference into it is missing, the one to the whole of it too."""

Document: TypeAlias = Json | Unreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A reference found in args: `pointer` leads into the document `source`, `where` to the reference in the args (both RFC 6901)."""

    source: Source
    pointer: str
    where: str

    def __str__(self) -> str:
        """Return the text of the reference, as it was written."""
        return f"{self.source}#{self.pointer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Args with every reference replaced that could be.

    `open`: their source was not among the documents; `missing`: it was, and the pointer leads nowhere. Both stand unchanged in `args`, and
    in the order of the text.
    """

    args: Json
    open: tuple[Reference, ...]
    missing: tuple[Reference, ...]


class BadReference(ValueError):
    """An object that looks like a reference and is none.

    Args:
        pointer: RFC 6901 pointer to it in the args.
        detail: what was found and what was expected.
    """

    def __init__(self, pointer: str, detail: str) -> None:
        super().__init__(detail)
        self.pointer = pointer
        self.detail = detail


def bind(args: Json, documents: Mapping[Source, Document]) -> Bound:
    """Replace the references in `args` by what they point at (contract, section 4, "References").

    A reference is an object whose only member is `$ref` with a string: `payload#`, `effect#` or `result#` and a JSON Pointer, written as
    in RFC 6901, section 3 (no percent-encoding). Number literals are kept. `args` is not changed; bound values are shared with the
    documents.

    A bound value is never searched for references, so never bind what came out of a bind: when another document becomes known, bind the
    original args again with all of them. With no documents at all this checks args and lists their references. The caller bounds the
    result (`json_text.fits`): a short reference may stand for much, many times over.

    Raises:
        BadReference: the string names another source, what follows `#` is no JSON Pointer, or another member stands beside a reference.
    """
    binding = _Binding(documents)
    bound = binding.value(args, ())
    return Bound(args=bound, open=tuple(binding.open), missing=tuple(binding.missing))


class _Nowhere:
    """Where a pointer leads that finds nothing; null is something."""


class _Binding:
    """One walk through args, and what it has met."""

    def __init__(self, documents: Mapping[Source, Document]) -> None:
        self._documents = documents
        self.open: list[Reference] = []
        self.missing: list[Reference] = []

    def value(self, value: Json, path: tuple[str | int, ...]) -> Json:
        if isinstance(value, list):
            return [self.value(item, (*path, index)) for index, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        text = value.get("$ref")
        if isinstance(text, str):
            if len(value) == 1:
                return self._reference(text, value, path)
            if text.startswith(_STARTS):  # else it would be sent as it stands, and whoever wrote it believes that it is bound
                others = ", ".join(key for key in value if key != "$ref")[:_MAX_SHOWN_CHARACTERS]
                raise BadReference(pointer_text(path), f"expected $ref alone in its object, found beside it: {others}")
        return {key: self.value(member, (*path, key)) for key, member in value.items()}

    def _reference(self, text: str, unbound: Json, path: tuple[str | int, ...]) -> Json:
        reference = _read(text, pointer_text(path))
        if reference.source not in self._documents:
            self.open.append(reference)
            return unbound
        target = _follow(self._documents[reference.source], reference.pointer)
        if isinstance(target, _Nowhere):
            self.missing.append(reference)
            return unbound
        return target


def _read(text: str, where: str) -> Reference:
    found = _REFERENCE.fullmatch(text)
    if found is None:
        raise BadReference(where, f"expected payload#, effect# or result# and a JSON Pointer, found {text[:_MAX_SHOWN_CHARACTERS]!r}")
    return Reference(source=Source(found["source"]), pointer=found["pointer"], where=where)


def _follow(document: Document, pointer: str) -> Json | _Nowhere:
    if isinstance(document, Unreadable):
        return _Nowhere()
    place: Json = document
    for escaped in pointer.split("/")[1:]:
        token = escaped.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict) and token in place:
            place = place[token]
        elif isinstance(place, list) and _is_index(token, len(place)):
            place = place[int(token)]
        else:
            return _Nowhere()
    return place


def _is_index(token: str, length: int) -> bool:
    """Say whether a token names an item: no leading zeros, and `-` (the item after the last) names none (RFC 6901, section 4)."""
    return _INDEX.fullmatch(token) is not None and len(token) <= _MAX_INDEX_DIGITS and int(token) < length
