"""Documents lead to what is there, and every one is led to. Must not fetch anything: addresses outside the repository are not judged."""

import re
from pathlib import Path, PurePosixPath

import pytest

from tests.docs.documents import Document, documents, read
from tests.golden import REPOSITORY

DOCS = REPOSITORY / "docs"
INDEX = "docs/README.md"
LLMS = REPOSITORY / "llms.txt"
OUTSIDE = re.compile(r"[a-z][a-z0-9+.-]*:|//")
ALL = {document.name: document for document in documents()}


def target_of(document: Document, link: str) -> Path:
    """Return the file or folder that a relative link leads to."""
    return (REPOSITORY / document.name).parent.joinpath(link.partition("#")[0]).resolve()


def faults_of(document: Document) -> list[str]:
    """Return the links of a document that lead nowhere."""
    found: list[str] = []
    for link in document.links:
        if OUTSIDE.match(link):
            continue
        path, anchor = target_of(document, link), link.partition("#")[2]
        if link.startswith("#"):
            anchors = document.anchors
        elif not path.is_relative_to(REPOSITORY) or not path.exists():
            found.append(f"{link}: there is no such file")
            continue
        else:
            anchors = read(path).anchors if path.suffix == ".md" else set()
        if anchor and anchor not in anchors:
            found.append(f"{link}: there is no such heading")
    return found


@pytest.mark.parametrize("document", ALL.values(), ids=lambda document: document.name)
def test_links_lead_somewhere_when_they_are_relative(document: Document) -> None:
    """To a file or folder of the repository, and there to a heading, by GitHub's rule."""
    assert faults_of(document) == []


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ("docs/nothing.md", ["docs/nothing.md: there is no such file"]),
        ("../outside.md", ["../outside.md: there is no such file"]),
        ("README.md#no-such-heading", ["README.md#no-such-heading: there is no such heading"]),
        ("#some", []),
        ("#other", ["#other: there is no such heading"]),
        ("https://example.com/nothing", []),
    ],
)
def test_fault_is_found_when_a_link_leads_nowhere(link: str, fault: list[str]) -> None:
    """The test above could not fail otherwise."""
    assert faults_of(Document(name="SOME.md", text=f"# Some\n\nSee [there]({link}), not `[here](nowhere.md)`.\n")) == fault


def reached_from(name: str) -> set[str]:
    """Return every document that can be reached from one by links; a link to a folder is one to its README."""
    reached, waiting = set[str](), [name]
    while waiting:
        here = waiting.pop()
        if here in reached or here not in ALL:
            continue
        reached.add(here)
        for link in ALL[here].links:
            path = target_of(ALL[here], link)
            if not OUTSIDE.match(link) and path.is_relative_to(REPOSITORY):
                waiting.append(str((path / "README.md" if path.is_dir() else path).relative_to(REPOSITORY)))
    return reached


def test_every_document_is_reached_when_the_index_is_followed() -> None:
    """Nobody finds what nothing leads to."""
    assert ALL.keys() - reached_from(INDEX) == set()


def test_every_document_is_in_llms_txt_and_no_line_leads_nowhere() -> None:
    """A model that reads only this file knows of each document; decision records by their index."""
    listed = re.findall(r"^- \[[^\]]+\]\(([^)\s]+)\): \S", LLMS.read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name in listed if not OUTSIDE.match(name) and not (REPOSITORY / name).is_file()] == []
    files = {str(path.relative_to(REPOSITORY)) for path in DOCS.rglob("*.md")}
    records = {name for name in files if re.match(r"\d{4}-", PurePosixPath(name).name)}
    assert files - records - set(listed) == set()
