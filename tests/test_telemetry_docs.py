"""What the telemetry's documents name is there, and what is there is named. Must not test that a metric has the right value."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from app.cells import Cells
from app.domain.model import EntryKind, HaltReason
from app.domain.retry import Failure
from app.engine import events
from app.storage.backlog import OPEN_STATES
from app.storage.pauses import Scope
from app.telemetry import FAMILIES, Family, Telemetry
from tests.golden import REPOSITORY

DOCUMENT = (REPOSITORY / "docs/reference/telemetry.md").read_text(encoding="utf-8")
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((REPOSITORY / "docs/reference/telemetry/alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
PANELS: list[dict[str, Any]] = json.loads((REPOSITORY / "docs/reference/telemetry/dashboard.json").read_text(encoding="utf-8"))["panels"]

# What Prometheus itself adds, to every series and in a histogram's buckets.
ADDED_LABELS = {"instance", "job", "le"}
ADDED_METRICS = {"up": Family(name="up", kind="gauge", help="Prometheus' own", labels=())}
METRIC = re.compile(r"\b(countermand_\w+|up)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"')
VALUES = {
    "state": {state.value for state in OPEN_STATES} | {"in_use", "idle", "unopened"},
    "outcome": {"2xx", "3xx", "4xx", "5xx"},
    "reason": {reason.value for reason in HaltReason},
    "scope": {scope.value for scope in Scope},
    "job": {"countermand"},
}


def section(title: str) -> str:
    """Return the text of one section of the document."""
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def rows(title: str) -> list[list[str]]:
    """Return the rows of a section's table by column."""
    return [[column.strip() for column in line.strip("|").split(" | ")] for line in section(title).splitlines() if line.startswith("| `")]


def exposed() -> dict[str, Family]:
    """Return every name that a scrape can hold, with the metric that it belongs to."""
    names = {family.name: family for family in FAMILIES if family.kind != "histogram"}
    return names | {
        f"{family.name}_{suffix}": family for family in FAMILIES if family.kind == "histogram" for suffix in ("bucket", "sum", "count")
    }


def expressions() -> Iterator[tuple[str, str, str]]:
    """Yield every query of the two files with where it stands and how its series are named."""
    for rule in ALERTS:
        yield rule["alert"], rule["expr"], rule["annotations"]["summary"]
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target.get("legendFormat", "")


def test_table_of_metrics_is_the_codes_when_compared_line_by_line() -> None:
    """Name, kind, labels and meaning are written once, in app/telemetry.py, and shown here."""
    shown = [line for line in section("Metrics").splitlines() if line.startswith("| `")]
    assert shown == [
        f"| `{family.name}` | {family.kind} | {', '.join(f'`{label}`' for label in family.labels) or '-'} | {family.help} |"
        for family in FAMILIES
    ]


def test_families_are_what_is_registered_when_a_scrape_is_read() -> None:
    """The table is made of the constants; this sees that nothing is registered beside them, nor left out."""
    text = Telemetry(version="0", schema_revision="0", cells=Cells.alone()).exposition().decode()
    told = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    absent_at_first = {"countermand_first_approval_expiry_seconds"}
    assert told == {family.name: family.kind for family in FAMILIES if family.name not in absent_at_first}


def test_label_values_are_listed_when_they_are_the_codes_own() -> None:
    """Whoever writes a rule finds every value that a label of ours can take."""
    listed = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in rows("Label values")}
    results = {failure.value for failure in Failure} | {"http_202", "http_2xx", "http_3xx", "http_4xx", "http_5xx"}
    assert listed["reason"] == VALUES["reason"]
    assert listed["state"] == VALUES["state"]
    assert listed["outcome"] == VALUES["outcome"]
    assert listed["result"] == results
    assert listed["scope"] == VALUES["scope"]
    assert listed.keys() == {"reason", "state", "outcome", "result", "call", "pool", "scope"}


@pytest.mark.parametrize(("where", "expression", "words"), [pytest.param(*found, id=found[0]) for found in expressions()])
def test_query_names_what_there_is_when_it_is_taken_apart(where: str, expression: str, words: str) -> None:
    """A renamed metric, or a label that it does not have, would leave an alert silent for ever."""
    known = exposed() | ADDED_METRICS
    found = METRIC.findall(expression)
    assert found, where
    labels = set(ADDED_LABELS)
    for name, selector in found:
        assert name in known, f"{where}: {name}"
        labels |= set(known[name].labels)
        for label, value in MATCHER.findall(selector):
            assert label in {*known[name].labels, *ADDED_LABELS}, f"{where}: {name} has no {label}"
            assert set(value.split("|")) <= VALUES[label], f"{where}: {label} is never {value}"
    grouped = {label.strip() for clause in re.findall(r"\bby \(([^)]*)\)", expression) for label in clause.split(",")}
    assert grouped <= labels, f"{where}: {grouped - labels}"
    shown = set(re.findall(r"\{\{(\w+)\}\}|\$labels\.(\w+)", words))
    assert {one or other for one, other in shown} <= (grouped or labels), where


def test_every_metric_is_on_the_dashboard_when_somebody_looks() -> None:
    """A metric that nobody can see is not measured."""
    known = exposed()
    seen = {known[name].name for panel in PANELS for target in panel["targets"] for name, _ in METRIC.findall(target["expr"])}
    assert seen == {family.name for family in FAMILIES}


def test_every_alert_has_a_runbook_when_it_wakes_somebody() -> None:
    """The line in the page leads to what to do; the two that mean money come first."""
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", section("Alerts"), re.MULTILINE)}
    assert [rule["annotations"]["runbook"] for rule in ALERTS] == [
        f"docs/reference/telemetry.md#{anchor}" for anchor in anchors(section("Alerts"))
    ]
    assert headings == set(anchors(section("Alerts")))
    assert [rule["alert"] for rule in ALERTS[:2]] == ["CountermandSessionHalted", "CountermandUnwindTakesLong"]
    assert {rule["labels"]["severity"] for rule in ALERTS} == {"page", "ticket"}


def anchors(text: str) -> list[str]:
    """Return the anchors of a section's headings, in order."""
    return [heading.lower().replace(" ", "-") for heading in re.findall(r"^### (.*)$", text, re.MULTILINE)]


@dataclass(frozen=True, slots=True)
class Logged:
    """One line of code that logs: what is said, how loud, and with which keys."""

    event: str
    level: str
    keys: frozenset[str]
    path: str


NAMES_OF_A_CLAIM = {"org", "session_id", "call_id"}  # what `**_names(claim)` adds
LOUD = {"exception": "error"}


def logged() -> Iterator[Logged | str]:
    """Yield every call of `_log` in the code; the path alone where the event's name is computed."""
    for path in sorted((REPOSITORY / "app").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="_log"), attr=level), args=[ast.Constant(value=str(event))]):
                    named = {word.arg for word in node.keywords if word.arg is not None}
                    added = NAMES_OF_A_CLAIM if any(word.arg is None for word in node.keywords) else set()
                    failed = {"exception"} if level == "exception" else set()
                    yield Logged(event, LOUD.get(level, level), frozenset(named | added | failed), path.name)
                case (
                    ast.Call(func=ast.Attribute(value=ast.Name(id="_log")))
                    | ast.Call(func=ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="_log"), *_]))
                ):
                    yield path.name
                case _:
                    pass


def test_other_events_are_the_codes_when_it_is_searched() -> None:
    """Name, level and keys of everything that is logged besides transitions; only what tells those computes a name."""
    found = list(logged())
    assert {one for one in found if isinstance(one, str)} == {"events.py"}
    real: dict[tuple[str, str], set[str]] = {}
    for one in found:
        if isinstance(one, Logged):
            real.setdefault((one.event, one.level), set()).update(one.keys)
    listed = {(row[0].strip("`"), row[1]): set(re.findall(r"`(\w+)`", row[2])) for row in rows("Other events")}
    assert listed == real


def test_events_of_transitions_are_the_kinds_of_entries_when_compared() -> None:
    """One event per kind of journal entry, under its name, as loud as the code has it, with the facts that it may tell."""
    listed = {row[0].strip("`"): (row[1], set(re.findall(r"`(\w+)`", row[2]))) for row in rows("Events of transitions")}
    assert listed == {
        events.event_of(kind): (events.level_of(kind), set(events.FACTS) if kind in events.TELLING else set()) for kind in EntryKind
    }
