"""The bench on a real service, for a moment, so that it cannot rot. Must not judge a figure: this machine is busy."""

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.cli import keys
from app.domain.model import Role
from bench import environment, filling
from bench.__main__ import comparison_for
from bench.figures import Findings
from bench.scenarios import first_undo, pair
from bench.stage import ORG, Options, Stage

MOMENT = Options(rounds=1, seconds=0.3, share=0.002)


@pytest.fixture
def stage(cluster_url: str, tmp_path: Path) -> Iterator[Stage]:
    """Set up on the test process's own Postgres, with nothing to compare with."""
    with Stage(options=MOMENT, directory=tmp_path, cluster_url=cluster_url, comparison=environment.none()).part() as part:
        yield part


def test_nothing_is_installed_when_nothing_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a scenario that compares looks for what there is to compare with."""
    monkeypatch.setattr(environment, "FOLDER", tmp_path)
    monkeypatch.setattr(environment, "LOCK", tmp_path / "nowhere")  # whoever looks for it fails at once
    assert comparison_for(["pair", "memory"]) == environment.none()
    with pytest.raises(FileNotFoundError):
        comparison_for(["pair", "sagas"])


def test_pairs_are_compared_with_the_yardstick_when_the_bench_runs(stage: Stage) -> None:
    """Service, endpoint, agents and pgbench work together as `make bench` starts them."""
    if not (stage.program("pgbench")).exists():
        pytest.skip("this Postgres comes without pgbench")
    found = Findings(machine={}, options={})

    pair.measure(stage, found, connections=(2,))

    (row,) = found.rows
    assert row.ratio is not None
    assert row.ratio > 0
    assert {cost.side for cost in found.costs} == {"service", "pgbench"}
    assert all(microseconds > 0 for cost in found.costs for part, microseconds in cost.microseconds.items() if part != "client")


def test_first_undos_are_met_when_the_bench_runs(stage: Stage) -> None:
    """A report and the undo that it causes are told by one clock, in order."""
    found = Findings(machine={}, options={})

    first_undo.measure(stage, found)

    assert [len(row.values) for row in found.rows] == [1, 1]
    assert all(value > 0 for row in found.rows for value in row.values)


def test_copies_verify_and_go_on_when_a_database_was_filled(stage: Stage) -> None:
    """What growth is measured on is what the service would have written: journals are whole, and the next call is taken."""
    tenant, endpoint = stage.tenant(), stage.endpoint()
    number = 2 * filling.PATTERNS
    names = filling.fill(stage, tenant, endpoint, number)
    assert len(names) == number - filling.PATTERNS
    auditor = keys.create(tenant.database_url, org=ORG, role=Role.AUDITOR, subject="auditor-1").key
    service = stage.service(tenant)
    agents = stage.agents(service, tenant, endpoint)

    agents.ask("adopt", names=names[:1], step=filling.STEPS)
    assert agents.ask("pairs", connections=1, seconds=0.2)["units"] > 0

    headers = {"Authorization": f"Bearer {auditor}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{service.port}", headers=headers, trust_env=False, timeout=30) as client:
        for name in names[:2]:
            session = client.get(f"/v1/sessions/{name}").raise_for_status().json()
            told = client.get(f"/v1/sessions/{name}/journal/verify").raise_for_status().json()
            assert told["valid"], told["message"]
            assert len(session["effects"]) >= filling.STEPS


def test_nothing_is_left_running_when_a_part_ends(stage: Stage) -> None:
    """Whatever was started is ended by its number, in a failure as in success."""
    pids: list[int] = []

    def fail() -> None:
        with stage.part():
            tenant, endpoint = stage.tenant(), stage.endpoint()
            service = stage.service(tenant)
            agents = stage.agents(service, tenant, endpoint)
            pids.extend([endpoint.pid, service.pid, agents.pid])
            agents.ask("pairs", connections=1, seconds=0.1)  # it knows no sessions, so it fails

    with pytest.raises(Exception, match=r"bench\.agents"):
        fail()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
