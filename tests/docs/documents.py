"""The repository's documents, taken apart: fenced blocks with their marks, headings, links. Must not run anything: see `playing`.

A mark is a comment on the line before a block: `<!-- stays -->` (and `<!-- stays: 9010 -->`), `<!-- file: NAME -->`, `<!-- answer -->` (and
`<!-- answer: of what stays -->`), `<!-- refused: 409 payload_changed -->`, `<!-- not run: REASON -->`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from textwrap import dedent

from tests.golden import REPOSITORY

MARK = re.compile(r"^ *<!-- (?P<name>stays|file|answer|refused|not run)(?:: (?P<value>.+))? -->$")
# Around figures that a program printed: they are no mark of a block.
FIGURES = re.compile(r"^<!-- (?:figures: .+|end of figures) -->$")
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>\S*)[ \t]*$")
# The service that documents are played against runs already; this is how they all begin.
STARTS_DEV = "python3 -m app dev"
OF_WHAT_STAYS = "of what stays"


class Wrong(AssertionError):
    """A document does not do what it says; says which block of which document, and what it printed."""

    def __init__(self, document: str, block: "Block", why: str, printed: str = "") -> None:
        self.block, self.why = block, why
        said = f"\nIt printed:\n{printed}" if printed else ""
        super().__init__(f"{document}, block {block.number} (line {block.line}, {block.language or 'no language'}): {why}{said}")


class Kind(StrEnum):
    """What is done with a block."""

    RUN = "run"
    STAYS = "stays"
    SAVED = "saved"
    ANSWER = "answer"
    PARSED = "parsed"
    SHOWN = "shown"
    NOT_RUN = "not run"
    UNKNOWN = "unknown"


# Which marks a language may bear; any language may be saved as a file or not be run.
MARKS: Mapping[str, set[str]] = {"sh": {"stays", "refused"}, "json": {"answer"}, "text": {"answer"}}
ANY = {"file", "not run"}
UNMARKED: Mapping[str, Kind] = {
    "sh": Kind.RUN,
    "yaml": Kind.PARSED,
    **dict.fromkeys(("json", "jsonl", "text", "hex", "mermaid"), Kind.SHOWN),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block: its place, its language, its text and the marks before it."""

    number: int
    line: int
    language: str
    text: str
    marks: Mapping[str, str]

    @property
    def kind(self) -> Kind:
        """What is to be done with it."""
        if not self.marks.keys() <= MARKS.get(self.language, set()) | ANY:
            return Kind.UNKNOWN
        for mark, kind in (("not run", Kind.NOT_RUN), ("file", Kind.SAVED), ("stays", Kind.STAYS), ("answer", Kind.ANSWER)):
            if mark in self.marks:
                return kind
        if self.text.strip() == STARTS_DEV:
            return Kind.SHOWN
        return UNMARKED.get(self.language, Kind.UNKNOWN)


@dataclass(frozen=True)
class Document:
    """One Markdown file by its name from the repository's root."""

    name: str
    text: str

    @cached_property
    def blocks(self) -> list[Block]:
        """Its fenced blocks, from top to bottom."""
        return [block for block, _ in self._parts[0]]

    @cached_property
    def loose_marks(self) -> list[str]:
        """Comments that are no mark of a block: misspelt, or not directly before one."""
        return self._parts[1]

    @cached_property
    def prose(self) -> str:
        """Its text without the fenced blocks; the lines keep their number."""
        lines = self.text.splitlines()
        for block, end in self._parts[0]:
            lines[block.line - 1 : end] = [""] * (end - block.line + 1)
        return "\n".join(lines)

    @cached_property
    def anchors(self) -> set[str]:
        """What `#...` may lead to: each heading by GitHub's rule, a repeated one with a number."""
        found: list[str] = []
        for heading in re.findall(r"^#{1,6} +(.+?) *#*$", self.prose, re.MULTILINE):
            anchor = anchor_of(heading)
            repeated = sum(1 for each in found if re.fullmatch(re.escape(anchor) + r"(-\d+)?", each))
            found.append(f"{anchor}-{repeated}" if repeated else anchor)
        return set(found)

    @cached_property
    def links(self) -> list[str]:
        """The targets of its links and pictures, those in code apart."""
        prose = re.sub(r"`[^`\n]*`", "`", self.prose)
        return re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", prose)

    @cached_property
    def _parts(self) -> tuple[list[tuple[Block, int]], list[str]]:
        """Return the blocks, each with its last line's number, and the comments that belong to none."""
        blocks: list[tuple[Block, int]] = []
        loose: list[str] = []
        marks: dict[str, str] = {}
        pending: list[str] = []
        lines = self.text.splitlines()
        at = 0
        while at < len(lines):
            line, at = lines[at], at + 1
            if (fence := FENCE.match(line)) is not None and fence["language"] != "`":
                end = next((n for n in range(at, len(lines)) if lines[n].strip() == fence["ticks"]), len(lines))
                inner = dedent("\n".join(lines[at:end])) + "\n"
                number = len(blocks) + 1
                blocks.append((Block(number=number, line=at, language=fence["language"], text=inner, marks=marks), end + 1))
                at, marks, pending = end + 1, {}, []
            elif (mark := MARK.match(line)) is not None and mark["name"] not in marks:
                marks = {**marks, mark["name"]: mark["value"] or ""}
                pending.append(line.strip())
            else:
                loose += [*pending, *([] if FIGURES.match(line) else re.findall(r"<!--.*", line))]
                marks, pending = {}, []
        return blocks, [*loose, *pending]


def anchor_of(heading: str) -> str:
    """Return GitHub's anchor of a heading: its words in lower case without punctuation, joined by hyphens."""
    shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")


def read(path: Path) -> Document:
    """Read one document."""
    return Document(name=str(path.relative_to(REPOSITORY)), text=path.read_text(encoding="utf-8"))


def documents() -> list[Document]:
    """Return every document for people: those at the top, in docs/ and in examples/."""
    paths = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "examples").rglob("*.md")]
    return [read(path) for path in sorted(paths)]


# History and decisions are no instructions; the examples' READMEs, where agents wait for people, are played by tests/test_examples.py.
NOT_PLAYED = ("CHANGELOG.md", "docs/decisions/", "docs/field-reports.md", "examples/refund_agent/", "examples/onboarding_agent/")


def played() -> list[Document]:
    """Return the documents that are played from top to bottom."""
    return [document for document in documents() if not document.name.startswith(NOT_PLAYED)]
