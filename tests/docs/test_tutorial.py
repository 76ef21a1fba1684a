"""The tutorial's agent leaves no run half done, whatever happens to it. Must not test its story: the document is played."""

from pathlib import Path

import pytest

from tests.docs.documents import read
from tests.docs.playing import Desk
from tests.golden import REPOSITORY

DOCUMENT = read(REPOSITORY / "docs/tutorial.md")
PORT = "9010"
# A shop whose every answer to a call is this text; undos are done.
SHOP = """
from http.server import BaseHTTPRequestHandler, HTTPServer

class Shop(BaseHTTPRequestHandler):
    def do_POST(self):
        print(self.path, self.rfile.read(int(self.headers["Content-Length"])), flush=True)
        text = b"{}" if self.path.startswith("/undo/") else %r
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_words):
        pass

HTTPServer(("127.0.0.1", 9010), Shop).serve_forever()
"""


def agent(*changes: tuple[str, str]) -> str:
    """Return the agent as it is shown, with something put in another's place."""
    (text,) = (block.text for block in DOCUMENT.blocks if block.marks.get("file") == "agent.py")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(
    ("answer", "changes", "failed"),
    [
        (b"no JSON", (), "failed: JSONDecodeError: "),
        (b"{}", (('print("ticket", call(', 'print("ticket", {}["no"], call('),), "failed: KeyError: 'no'"),
    ],
    ids=["a call's answer is no JSON", "the agent itself is wrong"],
)
async def test_run_is_undone_when_the_agent_stumbles(
    variables: dict[str, str], tmp_path: Path, answer: bytes, changes: tuple[tuple[str, str], ...], failed: str
) -> None:
    """Not only where HTTP fails: any exception fails the run, which would stay half done for a day otherwise."""
    async with Desk(tmp_path, variables) as desk:
        desk.save("shop.py", SHOP % answer)
        desk.save("agent.py", agent(*changes))
        await desk.stay("python3 shop.py", PORT)
        out, _ = await desk.paste(".venv/bin/python agent.py run-1")
    *_, why, end = out.splitlines()
    assert why.startswith(failed)
    assert end == "run-1 is compensated"


async def test_run_goes_on_when_the_agent_is_started_again(variables: dict[str, str], tmp_path: Path) -> None:
    """What an agent that was killed had done is not done twice."""
    killed = (('print("ticket", call(', 'os._exit(9), print("ticket", call('),)
    async with Desk(tmp_path, variables) as desk:
        desk.save("shop.py", SHOP % b'{"number": 1}')
        desk.save("killed.py", agent(*killed))
        desk.save("agent.py", agent())
        await desk.stay("python3 shop.py", PORT)
        out, _ = await desk.paste(".venv/bin/python killed.py run-1 || echo killed; .venv/bin/python agent.py run-1")
        calls = [line.split()[0] for line in desk.said_by_what_stays().splitlines()]
    first, *rest = [f"{what} {{'number': 1}}" for what in ("credit", "ticket", "mail")]
    assert out.splitlines() == [first, "killed", first, *rest, "run-1 is completed"]
    assert calls == ["/give_credit", "/close_ticket", "/queue_mail"]
