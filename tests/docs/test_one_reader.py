"""Documents leave one another alone when one reader follows several, in any order. Must not play them: there each has an org of its own.

A reader has one `dev`, with one database, and one machine. A session of the same name would be found ended; a tool that one page registers
is, on another, a tool with another undo, or one that may not be described inline; of two servers at one port the second does not start.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations

import pytest
import yaml

from tests.docs.documents import Document, Kind, documents
from tests.golden import REPOSITORY

# It has a service of its own in containers, with the toy that belongs to it, and says which ports it takes.
APART = "docs/containers.md"
OURS = "8420"
PASTED = {Kind.RUN, Kind.STAYS, Kind.SAVED}
PORT = re.compile(r"127\.0\.0\.1(?::|\", )(\d{4,5})\b|\bport=(\d{4,5})\b")
SESSION = re.compile(r"(?:/sessions|\$RUNS)/([A-Za-z0-9][A-Za-z0-9._:-]*)|agent(?:\.py)? ([a-z][\w.-]*-\d+)\b|registered\.py (\S+)")
REGISTERED = re.compile(r"^tools:$", re.MULTILINE)


@dataclass(kw_only=True)
class Page:
    """What a reader of one page pastes, saves and runs: `shell` and `programs`; `registers` names the tools of its YAML."""

    shell: str = ""
    programs: str = ""
    files: set[str] = field(default_factory=set)

    @property
    def code(self) -> str:
        """All of it."""
        return self.shell + self.programs

    @property
    def sessions(self) -> set[str]:
        """The sessions that it opens."""
        return {next(filter(None, found)) for found in SESSION.findall(self.code)}

    @property
    def ports(self) -> set[str]:
        """The ports that its servers take, or that it calls."""
        return {one or other for one, other in PORT.findall(self.code)} - {OURS}

    @property
    def registers(self) -> set[str]:
        """The tools that it registers."""
        found: set[str] = set()
        for text in self.files:
            if REGISTERED.search(text):
                found |= set(yaml.safe_load(text)["tools"])
        return found

    def names(self, word: str) -> bool:
        """Tell whether a name stands in it: in quotes, or as a word of the shell."""
        return re.search(rf"[\"']{re.escape(word)}\\?[\"']", self.code) is not None or is_word(word, self.shell)


def is_word(word: str, text: str) -> bool:
    """Tell whether a word stands by itself, not as a part of a longer name or of a path."""
    return re.search(rf"(?<![\w/.-]){re.escape(word)}(?![\w-])", text) is not None


def page_of(document: Document) -> Page:
    """Take what a document has its reader paste; an example's programs and files are its page's own."""
    page = Page()
    for block in document.blocks:
        if block.kind not in PASTED | {Kind.PARSED}:
            continue
        if block.language == "sh":
            page.shell += block.text
        else:
            page.programs += block.text
            page.files.add(block.text)
    folder = (REPOSITORY / document.name).parent
    if folder.parent.name == "examples":
        for path in sorted([*folder.glob("*.py"), *folder.glob("*.yaml")]):
            text = path.read_text(encoding="utf-8")
            page.programs += text
            page.files.add(text)
    return page


PAGES: Mapping[str, Page] = {document.name: page_of(document) for document in documents() if document.name != APART}


def shared(mine: Mapping[str, set[str]]) -> list[tuple[str, str, set[str]]]:
    """Return which two have what in common."""
    return [
        (one, other, mine[one] & mine[other]) for one, other in permutations(sorted(mine), 2) if one < other and mine[one] & mine[other]
    ]


def meddled(pages: Mapping[str, Page]) -> Iterator[tuple[str, str, str]]:
    """Find the tools that one page registers and another names: where, where else, which."""
    for one, other in permutations(sorted(pages), 2):
        yield from ((one, other, tool) for tool in sorted(pages[one].registers) if pages[other].names(tool))


def met(pages: Mapping[str, Page]) -> Iterator[tuple[str, str, str]]:
    """Find the sessions that one page opens and another has in its commands and programs."""
    for one, other in permutations(sorted(pages), 2):
        yield from ((one, other, session) for session in sorted(pages[one].sessions) if is_word_of(session, pages[other].code))


def is_word_of(session: str, code: str) -> bool:
    """Tell whether a session's id stands in code, in a path too; keys that begin with it are no matter."""
    return re.search(rf"(?<![\w.-]){re.escape(session)}(?![\w-])", code) is not None


def test_sessions_have_names_of_their_own_on_every_page() -> None:
    """Each run of a page begins anew."""
    assert sum(bool(page.sessions) for page in PAGES.values()) > 5
    assert list(met(PAGES)) == []


def test_tools_that_a_page_registers_are_named_on_no_other() -> None:
    """A registered tool has the class, the undo and the action that its page gave it, for the calls of every page."""
    assert sum(bool(page.registers) for page in PAGES.values()) == 3, "the tutorial, a how-to, an example"
    assert list(meddled(PAGES)) == []


def test_ports_are_taken_by_one_page_each() -> None:
    """A server of one page may still run when another page's is started."""
    assert sum(bool(page.ports) for page in PAGES.values()) > 5
    assert shared({name: page.ports for name, page in PAGES.items()}) == []


def test_files_are_saved_under_one_name_by_one_page() -> None:
    """What one page had saved is still what it runs, after another."""
    saved = {document.name: {block.marks["file"] for block in document.blocks if "file" in block.marks} for document in documents()}
    assert any(saved.values())
    assert shared(saved) == []


def test_ports_of_the_page_apart_are_told() -> None:
    """The one page that is not compared says what it wants free."""
    (text,) = (document.prose for document in documents() if document.name == APART)
    assert "ports 8420 and 9009" in " ".join(text.split())


def made(text: str) -> Page:
    """Make a page of Markdown."""
    return page_of(Document(name="docs/SOME.md", text=text))


OTHER = made(
    "```yaml\ntools:\n  credit:\n    x: y\n```\n<!-- stays: 9011 -->\n```sh\npython3 -m http.server 127.0.0.1:9011\n```\n"
    "```sh\nRUNS=$URL/v1/sessions\nagent $RUNS/run-1/intercept\n```\n"
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('```sh\nagent $URL -d \'{"tool": "credit"}\'\n```\n', ["credit"]),
        ('```sh\nagent $URL -d "{\\"tool\\": \\"credit\\"}"\n```\n', ["credit"]),
        ("```sh\nstep 1 credit\n```\n", ["credit"]),
        ('<!-- file: a.py -->\n```python\ncall("credit")\n```\n', ["credit"]),
        ("```yaml\ntools: {credit: {}}\n```\n```sh\nagent /undo/credit; credit_account credit-1\n```\n", []),
        ("```sh\nagent $URL/v1/sessions/run-1/fail\n```\n", ["run-1"]),
        ("```sh\npython3 agent.py run-1\n```\n", ["run-1"]),
        ("```sh\nagent $URL/v1/sessions/run-11/fail -H 'Idempotency-Key: run-1-1'\n```\n", []),
        ("```sh\ncurl http://127.0.0.1:9011/\n```\n", ["9011"]),
        ('<!-- file: a.py -->\n```python\nserve(("127.0.0.1", 9011))\n```\n', ["9011"]),
        ("<!-- file: a.py -->\n```python\nserve(port=9011)\n```\n", ["9011"]),
        ("```sh\ncurl http://127.0.0.1:8420/\n```\n", []),
        ("<!-- not run: it is told elsewhere -->\n```sh\nagent $URL/v1/sessions/run-1/fail\n```\n", []),
    ],
)
def test_meeting_is_found_when_two_pages_name_the_same(text: str, found: list[str]) -> None:
    """The tests above could not fail otherwise."""
    pages = {"other": OTHER, "some": made(text)}
    ports = [port for _, _, both in shared({name: page.ports for name, page in pages.items()}) for port in both]
    told = {what for _, _, what in [*meddled(pages), *met(pages)]}
    assert sorted({*told, *ports}) == found
