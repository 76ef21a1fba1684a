"""The player of documents notices what is wrong with one. Must not play a real document: see `test_documents`."""

from pathlib import Path

import pytest

from tests.docs.documents import Block, Document, Wrong, anchor_of
from tests.docs.playing import Desk, Ran, is_part, is_said, play

FENCE = "```"
SERVER = """
import http.server
import sys

class Endpoint(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        print("asked for", self.path)
        body = b'{"code": "%s", "n": 1, "items": [1, 2]}' % self.path.strip("/").encode()
        self.send_response(409 if self.path == "/taken" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass

http.server.HTTPServer(("127.0.0.1", 9009), Endpoint).serve_forever()
"""
ENDPOINT = f"<!-- file: endpoint.py -->\n{FENCE}python\n{SERVER}{FENCE}\n\n<!-- stays -->\n{FENCE}sh\npython3 endpoint.py\n{FENCE}\n\n"
POST = "curl -s -d '{}' http://127.0.0.1:9009"


def fenced(language: str, text: str, *marks: str) -> str:
    """Write a block as a document does."""
    return "".join(f"<!-- {mark} -->\n" for mark in marks) + f"{FENCE}{language}\n{text}\n{FENCE}\n\n"


async def played(directory: Path, *parts: str) -> list[Ran]:
    """Play a document of these parts, without a service."""
    return await play(Document(name="some.md", text="# Some\n\n" + "".join(parts)), {}, directory)


async def test_blocks_share_one_shell_when_they_are_pasted(tmp_path: Path) -> None:
    """What one block sets and defines, the next one has; files are where they were saved."""
    ran = await played(
        tmp_path,
        fenced("sh", "name=world\ngreet() { echo hello $1; }"),
        fenced("python", "print(6 * 7)", "file: sub/answer.py"),
        fenced("sh", "greet $name; python3 sub/answer.py"),
        fenced("text", "hello world\n42", "answer"),
    )
    assert ran[-1].out == "hello world\n42\n"


async def test_answers_and_refusals_are_held_when_they_are_as_shown(tmp_path: Path) -> None:
    """Ports that are shown are replaced everywhere: in what is saved, started, pasted and answered."""
    await played(
        tmp_path,
        ENDPOINT,
        fenced("sh", f"{POST}/free; echo; echo port 9009"),
        fenced("json", '{"code": "fr...", "items": [1, "..."]}', "answer"),
        fenced("text", "port 9009", "answer"),
        fenced("sh", f"{POST}/taken", "refused: 409 taken"),
        fenced("text", "asked for /free\nasked for ...", "answer: of what stays"),
    )


async def test_server_is_replaced_when_another_stays_at_its_port(tmp_path: Path) -> None:
    """A reader ends it with Ctrl-C and starts it again."""
    await played(
        tmp_path,
        ENDPOINT,
        fenced("sh", f"{POST}/one"),
        fenced("sh", "python3 endpoint.py", "stays"),
        fenced("sh", f"{POST}/two"),
        fenced("text", "asked for /two", "answer: of what stays"),
    )


@pytest.mark.parametrize(
    ("why", "parts"),
    [
        ("exit code 1", [fenced("sh", "echo before\nfalse\necho after")]),
        ("exit code 2", [fenced("sh", "echo $missing")]),
        ("exit code 0", [fenced("sh", "exit 0")]),
        ("exit code 7", [fenced("sh", f"{POST}/nobody")]),
        ("writes to stderr", [fenced("sh", "echo careful >&2")]),
        ("does not know", [fenced("sh", "curl --http3 http://127.0.0.1:9009/")]),
        ("nothing is known", [fenced("", "make tea")]),
        ("nothing is known", [fenced("ruby", "puts 1")]),
        ("nothing is known", [fenced("python", "print(1)")]),
        ("nothing is known", [fenced("text", "stays where it is", "stays")]),
        ("no YAML", [fenced("yaml", "a: [")]),
        ("nothing that it could be the answer of", [fenced("text", "hello", "answer")]),
        ("not the one that came", [fenced("sh", "echo hello"), fenced("text", "hell", "answer")]),
        ("not the one that came", [fenced("sh", "echo '{\"a\": 1}'"), fenced("json", '{"a": 2}', "answer")]),
        ("no JSON", [fenced("sh", "echo '{}'"), fenced("json", "{...}", "answer")]),
        ("instead of staying", [fenced("sh", "echo done", "stays")]),
        ("refused: 409 taken; expected: nothing", [ENDPOINT, fenced("sh", f"{POST}/taken")]),
        ("refused: 409 taken; expected: 409 gone", [ENDPOINT, fenced("sh", f"{POST}/taken", "refused: 409 gone")]),
        ("refused: nothing; expected: 409 taken", [ENDPOINT, fenced("sh", f"{POST}/free", "refused: 409 taken")]),
    ],
)
async def test_document_is_red_when_a_block_does_otherwise(tmp_path: Path, why: str, parts: list[str]) -> None:
    """The message names the document and the block, and says why."""
    with pytest.raises(Wrong, match=why) as caught:
        await played(tmp_path, *parts)
    block = caught.value.block
    assert str(caught.value).startswith(f"some.md, block {block.number} (line {block.line}, ")


async def test_message_has_what_was_printed_when_a_block_fails(tmp_path: Path) -> None:
    """Whoever wrote the document sees at once what the reader would have seen."""
    with pytest.raises(Wrong, match=r"It printed:\nbefore\n.*missing"):
        await played(tmp_path, fenced("sh", "echo before\necho $missing"))


async def test_block_is_given_up_when_it_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document that hangs is red, not the run; what it started is ended."""
    monkeypatch.setattr("tests.docs.playing.PATIENCE_SECONDS", 0.1)
    with pytest.raises(Wrong, match="does not end within"):
        await played(tmp_path, fenced("sh", "tail -f /dev/null"))


async def test_files_stay_in_the_documents_folder_when_they_are_saved(tmp_path: Path) -> None:
    """A document may not write elsewhere."""
    async with Desk(tmp_path, {}) as desk:
        with pytest.raises(AssertionError):
            desk.save("../outside", "")


def test_loose_marks_are_found_when_no_block_follows() -> None:
    """A misspelt mark, and one with a line between it and its block, do nothing, so they must not stand there."""
    figures = "<!-- figures: of a run -->\n| 1 |\n<!-- end of figures -->\n"
    text = figures + "<!-- anwser -->\n```json\n{}\n```\n<!-- stays -->\n\n```sh\ntrue\n```\n<!-- answer -->"
    assert Document(name="some.md", text=text).loose_marks == ["<!-- anwser -->", "<!-- stays -->", "<!-- answer -->"]


def test_blocks_are_found_when_they_are_indented_or_hold_fences() -> None:
    """As under an item of a list; a longer fence may hold a shorter one; what is in a block is no heading and no link."""
    text = "- item\n\n  ```sh\n  # no heading\n  if true; then\n    true\n  fi\n  ```\n\n````text\n```sh\n[a](b)\n```\n````\n# Heading\n"
    document = Document(name="some.md", text=text)
    assert document.blocks == [
        Block(number=1, line=3, language="sh", text="# no heading\nif true; then\n  true\nfi\n", marks={}),
        Block(number=2, line=10, language="text", text="```sh\n[a](b)\n```\n", marks={}),
    ]
    assert document.anchors == {"heading"}
    assert document.links == []


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("Write an undo endpoint", "write-an-undo-endpoint"),
        ("`failed_after_pivot`: what now?", "failed_after_pivot-what-now"),
        ("See [the API](openapi.json), v1.0", "see-the-api-v10"),
        ("Why LIFO - and not FIFO", "why-lifo---and-not-fifo"),
    ],
)
def test_anchor_is_githubs_when_a_heading_has_more_than_words(heading: str, anchor: str) -> None:
    """Lower case, punctuation away, blanks to hyphens."""
    assert anchor_of(heading) == anchor


def test_anchors_are_numbered_when_a_heading_is_repeated() -> None:
    """The second of its name is found by -1."""
    assert Document(name="some.md", text="## Steps\n\n## Steps\n").anchors == {"steps", "steps-1"}


@pytest.mark.parametrize(
    ("shown", "found", "is_shown"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ({"a": 1}, {"b": 2}, False),
        ({"a": "..."}, {"a": None}, True),
        ({"a": "undo-..."}, {"a": "undo-17"}, True),
        ({"a": "undo-..."}, {"a": "effect-17"}, False),
        ({"a": True}, {"a": 1}, False),
        ([1], [1, 2], False),
        ([1, "..."], [1, 2, 3], True),
        ([2, "..."], [1, 2, 3], False),
        ([{"a": 1}, {}], [{"a": 1, "b": 2}, {"c": 3}], True),
    ],
)
def test_json_is_a_subset_when_all_that_is_shown_is_there(shown: object, found: object, *, is_shown: bool) -> None:
    """Members may be left out, values may not differ."""
    assert is_part(shown, found) is is_shown


@pytest.mark.parametrize(
    ("shown", "printed", "is_shown"),
    [
        ("a\nb", "x\na\nb\ny\n", True),
        ("a\nb", "a\nx\nb\n", False),
        ("a\n...\nb", "a\nx\nb\n", True),
        ("a ... c", "a b c", True),
        ("a ... c", "a b\nc\n", False),
        ("a", "ab\n", False),
        ("(a)*", "(a)*\n", True),
    ],
)
def test_text_is_said_when_its_lines_were_printed(shown: str, printed: str, *, is_shown: bool) -> None:
    """Whole lines, one after the other, with what differs from run to run left out."""
    assert is_said(shown, printed) is is_shown
