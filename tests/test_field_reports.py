"""Each report of docs/field-reports.md has its tests, and they exist; those that belong nowhere else stand here."""

import asyncio
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conftest import StartService, execute
from tests.factories import do_step, undo_at
from tests.fakes import FakeEndpoint, Reply
from tests.probes import rest

CLONE = Path(__file__).resolve().parent.parent
REPORTS = (CLONE / "docs" / "field-reports.md").read_text(encoding="utf-8")
ROWS = (
    "D6 D11 D12 D13 D15 D16 D17 D19 D1 D2 D3 D4 D5 D7 D8 D9 D10 T24 T27 T30 "
    "T01 T02 T03 T05 T08 T09 T11 T13 T14 T15 T17 T18 T19 T22 T23 T29 X36"
)
HERD = 20


def test_every_report_names_tests_that_exist() -> None:
    """A test that is renamed or removed takes its line here along."""
    sections = dict(re.findall(r"^### (\w+) - .*?\n(.*?)(?=^##|\Z)", REPORTS, re.DOTALL | re.MULTILINE))
    assert list(sections) == ROWS.split()
    sources = "".join(path.read_text(encoding="utf-8") for path in (CLONE / "tests").rglob("test_*.py"))
    existing = set(re.findall(r"^(?:async )?def (test_\w+)\(", sources, re.MULTILINE))
    for row, text in sections.items():
        named = set(re.findall(r"`(test_\w+)`", text.partition("Shown by:")[2]))
        assert named, row
        assert named <= existing, (row, named - existing)


@pytest.fixture
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process live at +05:45."""
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("_elsewhere")
async def test_retries_keep_their_times_when_every_clock_has_another_zone(
    services: StartService, endpoint: FakeEndpoint, database_url: str
) -> None:
    """T13: service at +05:45, database at -03:30: a herd retries as often as allowed, within the ceilings, and not in step."""
    await execute(database_url, f"ALTER DATABASE {urlsplit(database_url).path[1:]} SET timezone = 'America/St_Johns'")
    service = await services(circuit_calls=0)  # each call is to use up its own budget
    names = [f"run-{number}" for number in range(HERD)]
    waits = {"max_retries": 2, "initial_interval_ms": 400, "max_interval_ms": 800}
    for name in names:
        endpoint.script(f"/{name}", Reply(status=503))
        await do_step(service.agent, name, 1, endpoint.url(f"/{name}"), **waits)
    sessions = await asyncio.gather(*(rest(service.agent, name) for name in names))
    assert {session["state"] for session in sessions} == {"halted"}
    first_gaps = []
    for name in names:
        sent = endpoint.requests(f"/{name}")
        assert len(sent) == 1 + waits["max_retries"]
        first_gaps.append(next(two.started_at - one.started_at for one, two in pairwise(sent)))
    assert max(first_gaps) - min(first_gaps) > 0.1  # twenty dice below 400 ms


async def test_forward_key_is_stable_for_a_step_and_new_for_a_new_one(services: StartService, endpoint: FakeEndpoint) -> None:
    """D12: five repeats of a step bear one key, one undo and one stack entry; the same bytes under a new step are another call."""
    service = await services(has_orchestrator=False)
    undo = undo_at(endpoint.url("/undo"))
    answers = [await service.agent.intercept("s", idempotency_key="once", step_index=1, compensation=undo) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [201] * 5
    assert len({(answer.json()["forward_key"], answer.json()["undo_id"]) for answer in answers}) == 1
    planned_anew = await service.agent.intercept("s", idempotency_key="again", step_index=2, compensation=undo)
    assert planned_anew.status_code == 201
    assert planned_anew.json()["forward_key"] != answers[0].json()["forward_key"]
    assert [entry["step_index"] for entry in (await service.agent.session("s"))["undo_stack"]] == [2, 1]
    assert endpoint.received == []
