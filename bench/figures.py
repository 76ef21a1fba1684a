"""The arithmetic of the bench: medians, ratios round by round, verdicts, a table and JSON. Must not measure anything."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a figure has to reach: at least `value`, or less than it."""

    value: float
    is_ceiling: bool = False

    def is_met_by(self, figure: float) -> bool:
        """Tell whether a figure reaches it."""
        return figure < self.value if self.is_ceiling else figure >= self.value

    def __str__(self) -> str:
        return f"{'<' if self.is_ceiling else '>='} {self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One measurement of one side: how many units of work (requests, sagas, undos) in how long, and the CPU seconds of each part."""

    units: int
    seconds: float
    cpu_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Units per second."""
        return self.units / self.seconds

    def cost(self, part: str) -> float:
        """CPU microseconds of one part per unit."""
        return self.cpu_seconds[part] / self.units * MICROSECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. `values` are ours, one per round; `against` are theirs of the same rounds, where there is another side."""

    name: str
    unit: str
    values: Sequence[float]
    hides: str
    versus: str = ""
    against: Sequence[float] = ()
    target: Target | None = None

    @property
    def ratio(self) -> float | None:
        """The median of the ratios round by round: what disturbed both sides of a round is in neither."""
        if not self.against:
            return None
        return median(ours / theirs for ours, theirs in zip(self.values, self.against, strict=True))

    @property
    def verdict(self) -> str:
        """`pass`, `fail`, or `-` where nothing has to be reached; a target is about the ratio where there is one."""
        if self.target is None:
            return "-"
        ratio = self.ratio
        return "pass" if self.target.is_met_by(median(self.values) if ratio is None else ratio) else "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one unit of one side's work cost each part, in CPU microseconds: medians over the rounds."""

    name: str
    side: str
    unit: str
    microseconds: Mapping[str, float]


@dataclass(slots=True, kw_only=True)
class Findings:
    """All that one run found."""

    machine: Mapping[str, object]
    options: Mapping[str, object]
    rows: list[Row] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def is_on_target(self) -> bool:
        """Tell whether no target was missed."""
        return all(row.verdict != "fail" for row in self.rows)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of `values` that at least `share` (0 to 1) of them do not exceed (nearest rank)."""
    if not values:
        raise ValueError("no values, no percentile")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def costs_of(name: str, unit: str, sides: Mapping[str, Sequence[Reading]]) -> list[Cost]:
    """Return what each side's readings cost, without the sides of which nothing is known."""
    return [
        Cost(
            name=name,
            side=side,
            unit=unit,
            microseconds={part: median(reading.cost(part) for reading in readings) for part in readings[0].cpu_seconds},
        )
        for side, readings in sides.items()
        if readings and readings[0].cpu_seconds
    ]


def rates(readings: Sequence[Reading]) -> list[float]:
    """Return the units per second of each reading."""
    return [reading.rate for reading in readings]


def table(findings: Findings) -> str:
    """Return Markdown: the figures with their targets, what each hides, what a unit cost whom, what was left out or failed."""
    lines = ["| figure | ours | other side | ratio | target | verdict |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [_line(row) for row in findings.rows]
    lines += ["", *_hidden(findings.rows)]
    if findings.costs:
        lines += ["", "| CPU microseconds | side | per | of what |", "| --- | --- | --- | --- |", *map(_cost_line, findings.costs)]
    if findings.left_out:
        lines += ["", *(f"- left out: {each}" for each in findings.left_out)]
    lines += [f"\nFAILED {each}" for each in findings.faults]
    return "\n".join(lines)


def as_json(findings: Findings) -> dict[str, object]:
    """Return everything as a JSON value, every round of every figure included."""
    return {
        "machine": dict(findings.machine),
        "options": dict(findings.options),
        "figures": [_row_json(row) for row in findings.rows],
        "cpu_microseconds": [
            {"figure": cost.name, "side": cost.side, "per": cost.unit, "parts": dict(cost.microseconds)} for cost in findings.costs
        ],
        "left_out": list(findings.left_out),
        "faults": list(findings.faults),
        "is_on_target": findings.is_on_target,
    }


def _row_json(row: Row) -> dict[str, object]:
    return {
        "figure": row.name,
        "unit": row.unit,
        "ours": list(row.values),
        "ours_median": median(row.values),
        "versus": row.versus or None,
        "theirs": list(row.against),
        "theirs_median": median(row.against) if row.against else None,
        "ratio": row.ratio,
        "target": None if row.target is None else {"value": row.target.value, "is_ceiling": row.target.is_ceiling},
        "verdict": row.verdict,
        "hides": row.hides,
    }


def _line(row: Row) -> str:
    theirs = f"{row.versus}: {_number(median(row.against))}" if row.against else "-"
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    target = "-" if row.target is None else str(row.target)
    return f"| {row.name} | {_number(median(row.values))} {row.unit} | {theirs} | {ratio} | {target} | {row.verdict} |"


def _hidden(rows: Sequence[Row]) -> list[str]:
    """Return what figures hide, each once: of a ratio by the other side, of another figure by its name."""
    told = {row.hides: f"what is over {row.versus}" if row.versus else row.name.partition(", ")[0] for row in reversed(rows)}
    return [f"- {figure} hides: {hides}" for hides, figure in reversed(told.items())]


def _cost_line(cost: Cost) -> str:
    parts = ", ".join(f"{part} {microseconds:,.0f}" for part, microseconds in cost.microseconds.items())
    return f"| {cost.name} | {cost.side} | {cost.unit} | {parts} |"


def _number(value: float) -> str:
    """Show three digits or more, whatever the size."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
