"""The how-to knows every reason and every move there is. Must not test the moves: the document is played, and tests/api has each."""

import re
from typing import get_args

from app.api.schemas import MoveView
from app.domain.model import HaltReason
from tests.docs.documents import read
from tests.golden import REPOSITORY

DOCUMENT = read(REPOSITORY / "docs/how-to/work-on-an-escalation.md")


def section(title: str) -> str:
    """Return the text of one section, without what is in blocks."""
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", DOCUMENT.prose, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def test_reasons_are_all_that_there_are_each_with_a_way_out() -> None:
    """Whoever is woken finds the reason that they were woken for, and what to do."""
    parts = re.split(r"^### (\w+)$", section("The nine reasons"), flags=re.MULTILINE)[1:]
    reasons = dict(zip(parts[::2], parts[1::2], strict=True))
    assert reasons.keys() == {str(reason) for reason in HaltReason}
    assert [reason for reason, text in reasons.items() if "*Out:*" not in " ".join(text.split())] == []


def test_moves_are_all_that_an_escalation_can_offer() -> None:
    """And `halt`, which is ordered before there is one."""
    named = re.findall(r"^\| `POST [^`]*/(\w+)` \|", section("The moves"), re.MULTILINE)
    assert sorted(named) == sorted({*get_args(MoveView.model_fields["name"].annotation), "halt"})
