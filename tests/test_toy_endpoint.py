"""The toy endpoint does and undoes once per key: what we ask of every real one. Must not test the service."""

import json
import re
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from app.cli.tools import read_file
from examples.toy_endpoint import UNDO, Server
from tests.golden import REPOSITORY

CREDIT = {"order": 4921, "amount": 2500}


@pytest.fixture
def toy() -> Iterator[httpx.Client]:
    """Serve a fresh ledger and return a client of it."""
    with Server("127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{server.server_address[1]}", trust_env=False) as client:
                yield client
        finally:
            server.shutdown()
            thread.join()


def post(toy: httpx.Client, path: str, key: str, members: object) -> tuple[int, object]:
    """Send a call under a key."""
    answer = toy.post(path, content=json.dumps(members), headers={"Idempotency-Key": key} if key else {})
    return answer.status_code, answer.json()


def reversals(toy: httpx.Client) -> list[tuple[str, str | None]]:
    """Return which credits stand and by which key the others were reversed."""
    return [(each["credit_id"], each["reversed_by"]) for each in toy.get("/credits").json()["credits"]]


def test_credit_is_issued_and_reversed_once_when_calls_are_repeated(toy: httpx.Client) -> None:
    """A lost answer costs a repeat, and a repeat costs nothing."""
    for _ in range(2):
        assert post(toy, "/credits", "effect-1", CREDIT) == (201, {"credit_id": "cr_1"})
    assert reversals(toy) == [("cr_1", None)]
    for _ in range(3):
        assert post(toy, "/undo/credits", "undo-1", {"credit_id": "cr_1"}) == (200, {"reversed": "cr_1"})
    assert reversals(toy) == [("cr_1", "undo-1")]
    assert toy.get("/credits").json()["calls"] == [
        {"key": "effect-1", "path": "/credits", "times": 2},
        {"key": "undo-1", "path": "/undo/credits", "times": 3},
    ]


def test_call_is_refused_when_its_key_is_missing_or_came_with_something_else(toy: httpx.Client) -> None:
    """A key stands for one request; without one, nothing is done."""
    assert post(toy, "/credits", "", CREDIT)[0] == 400
    assert post(toy, "/credits", "effect-1", CREDIT)[0] == 201
    assert post(toy, "/credits", "effect-1", CREDIT | {"amount": 1})[0] == 422
    assert post(toy, "/undo/credits", "effect-1", CREDIT)[0] == 422
    assert post(toy, "/credits", "effect-2", {"order": 1})[0] == 422
    assert reversals(toy) == [("cr_1", None)]


def test_undo_of_what_may_never_have_happened_works_when_only_its_key_is_known(toy: httpx.Client) -> None:
    """Undoing nothing is a success, and the late call is refused; what did happen is found by its key."""
    assert post(toy, "/undo/credits", "undo-1", {"forward_key": "effect-1"}) == (200, {"reversed": None})
    assert post(toy, "/credits", "effect-1", CREDIT)[0] == 409
    assert post(toy, "/credits", "effect-2", CREDIT)[0] == 201
    assert post(toy, "/undo/credits", "undo-2", {"forward_key": "effect-2"}) == (200, {"reversed": "cr_1"})
    assert reversals(toy) == [("cr_1", "undo-2")]


def test_other_requests_are_told_so_when_they_come(toy: httpx.Client) -> None:
    """It lives, and knows two paths."""
    assert toy.get("/livez").json() == {"status": "ok"}
    assert toy.get("/other").status_code == toy.post("/other").status_code == 404
    assert toy.post("/credits", content=iter([b"{}"])).status_code == 413, "a body of unknown length"


def test_its_tool_leads_to_it_when_the_tool_is_registered() -> None:
    """The tool's file, compose's name for the toy, and the toy's own paths are of one mind."""
    text = (REPOSITORY / "examples/toy_tools.yaml").read_text(encoding="utf-8")
    (tool,) = read_file(REPOSITORY / "examples/toy_tools.yaml").values()
    services = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    assert tool["reversibility"] == "compensatable"
    assert [urlsplit(url).path for url in re.findall(r"http://\S+", text)] == [UNDO]
    assert {urlsplit(url).hostname for url in re.findall(r"http://\S+", text)} <= services.keys()
