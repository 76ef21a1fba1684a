"""What docs/performance.md says of the bench is what the bench does. Must not run it."""

import re
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from bench import yardstick
from bench.__main__ import COMPARING, SCENARIOS
from bench.agents import STEPS_OF_A_RUN
from bench.environment import LOCK, RESTATE_VERSION
from bench.figures import Target
from bench.filling import STEPS
from bench.lines import CLONE
from bench.scenarios import growth, latency, memory, pair, recovery, sagas, undos

YARDSTICK = {
    yardstick.SCHEMA: "cb62ce3cb3036c547d198863460636ff94c8510c7a45eb06c0fa13c538198160",
    yardstick.PAIR: "caae982f1e33511fd765374ab7ef16f7f58db2d13d55a2457a9bc3cbf5376bd3",
}
DESCRIPTION = (CLONE / "docs" / "performance.md").read_text(encoding="utf-8")
LINES = dict(re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", DESCRIPTION, re.MULTILINE))


def test_every_scenario_is_described_when_it_can_be_run() -> None:
    """Whoever reads a figure finds how it came about."""
    assert list(LINES) == list(SCENARIOS)


def test_scenarios_compare_when_they_look_at_what_is_installed() -> None:
    """What no scenario of a run needs is not installed for it, and what one needs is."""
    sources = {name: Path(str(sys.modules[measure.__module__].__file__)).read_text(encoding="utf-8") for name, measure in SCENARIOS.items()}
    assert {name for name, source in sources.items() if "stage.comparison" in source} == COMPARING


@pytest.mark.parametrize(
    ("scenario", "numbers"),
    [
        ("pair", [pair.SESSIONS, STEPS_OF_A_RUN, *pair.CONNECTIONS]),
        ("latency", latency.RATES),
        ("sagas", sagas.CALLERS),
        ("undos", [undos.SESSIONS, undos.STEPS]),
        ("recovery", [recovery.CALLS]),
        ("memory", [memory.SESSIONS]),
        ("growth", [growth.STORED, growth.STORED * STEPS, growth.CONNECTIONS]),
    ],
)
def test_sizes_are_those_of_the_bench_when_they_are_described(scenario: str, numbers: list[int]) -> None:
    """A figure that was measured on less than is said is worth less."""
    described = {int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?<!,)", LINES[scenario])}
    assert set(numbers) - described == set()


def test_targets_are_those_of_the_bench_when_they_are_described() -> None:
    """A target that was lowered in one place shows in the other."""
    targets: dict[str, list[Target]] = {
        "pair": list(pair.TARGETS.values()),
        "sagas": list(sagas.TARGETS.values()),
        "undos": [target for _, target in undos.PEERS.values()],
        "memory": [memory.TARGET],
        "growth": [growth.TARGET],
    }
    for scenario, wanted in targets.items():
        described = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", LINES[scenario].rpartition("|")[2])}
        assert {target.value for target in wanted} - described == set(), scenario


def test_versions_are_the_pinned_ones_when_they_are_described() -> None:
    """A comparison is one with a version."""
    (dbos,) = re.findall(r"^dbos==(\d+\.\d+)\.", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    assert f"**DBOS** {dbos}:" in DESCRIPTION
    assert f"**Restate** {RESTATE_VERSION}:" in DESCRIPTION


@pytest.mark.parametrize(("file", "digest"), YARDSTICK.items(), ids=lambda value: value.name if isinstance(value, Path) else "")
def test_yardstick_is_the_given_one_when_it_is_run(file: Path, digest: str) -> None:
    """A yardstick that changes measures nothing: ratios of last year and of today would not be of the same thing."""
    assert sha256(file.read_bytes()).hexdigest() == digest
