"""Documents leave one another alone when one reader follows several. Must not play them: there each has an org of its own.

A reader has one `dev`: a session of the same name would be found ended, and a tool that one page registers could not be described inline
by another any more.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import permutations
from typing import Any

import pytest
import yaml

from tests.docs.documents import Document, Kind, documents
from tests.golden import REPOSITORY

Names = Mapping[str, set[str]]

ALL = {document.name: document for document in documents()}
FILES = {path: path.read_text(encoding="utf-8") for path in REPOSITORY.glob("examples/*/*.yaml")}


def code_of(document: Document) -> str:
    """Return what its blocks hold, those apart that are run elsewhere."""
    return "\n".join(block.text for block in document.blocks if block.kind is not Kind.NOT_RUN)


def sent_by(document: Document) -> Iterator[dict[str, Any]]:
    """Find the JSON objects that its blocks send as they stand."""
    for text in re.findall(r"-d '(\{.*?\})'", code_of(document), re.DOTALL):
        with suppress(ValueError):  # put together by the shell
            yield json.loads(text)


def registered_by(document: Document) -> set[str]:
    """Return the tools that its YAML registers."""
    pages = [yaml.safe_load(block.text) for block in document.blocks if block.language == "yaml"]
    return {name for page in pages if isinstance(page, dict) for name in page.get("tools", ())}


def described_by(document: Document) -> set[str]:
    """Return the tools that it describes inline, with their undo."""
    return {body["tool"] for body in sent_by(document) if "compensation" in body}


def overlaps(left: Names, right: Names) -> list[tuple[str, str, set[str]]]:
    """Return which two share which names."""
    pairs = permutations(sorted(left.keys() | right.keys()), 2)
    shared = ((one, other, left.get(one, set()) & right.get(other, set())) for one, other in pairs)
    return [found for found in shared if found[2]]


def test_sessions_have_names_of_their_own_in_every_document() -> None:
    """Each run of a page begins anew."""
    sessions = {name: set(re.findall(r"/sessions/([A-Za-z0-9._-]+)", code_of(document))) for name, document in ALL.items()}
    assert any(sessions.values())
    assert overlaps(sessions, sessions) == []


def test_tools_described_inline_are_not_those_that_another_page_registers() -> None:
    """That would be refused: a registered tool has the undo that an administrator gave it."""
    described = {name: described_by(document) for name, document in ALL.items()}
    registered: dict[str, set[str]] = {name: registered_by(document) for name, document in ALL.items()}
    registered |= {str(path): set(yaml.safe_load(text)["tools"]) for path, text in FILES.items()}
    assert any(described.values())
    assert overlaps(described, registered) == []


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        ({"a": {"x"}, "b": {"x", "y"}}, {"a": {"x"}, "b": {"z"}}, [("b", "a", {"x"})]),
        ({"a": {"x"}}, {"a": {"x"}}, []),
        ({"a": {"x"}}, {"c": {"x"}}, [("a", "c", {"x"})]),
    ],
)
def test_overlap_is_found_when_two_share_a_name(left: Names, right: Names, found: list[tuple[str, str, set[str]]]) -> None:
    """The tests above could not fail otherwise; what one shares with itself is no matter."""
    assert overlaps(left, right) == found
