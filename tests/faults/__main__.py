"""`python -m tests.faults --seeds 1-300 --seconds 1.5`: run seeds, print a line for each and a table at the end, and leave it all as JSON.

Exits with 1 if any invariant was violated; the evidence of such a seed is kept, and `--seeds N` plans the same again. Must not judge: the
checker does.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from tests.fakes import Received
from tests.faults.checker import INVARIANTS, Facts, Violation, check, overtaken_by_their_undo
from tests.faults.driver import drive
from tests.faults.endpoint import EndpointProcess
from tests.faults.evidence import Evidence, place_of
from tests.faults.nursery import Nursery
from tests.faults.plans import Fault, plan_of
from tests.faults.processes import open_cluster
from tests.faults.quantiles import quantile
from tests.faults.world import Grounds, World

KILLS = frozenset({Fault.KILL.value, Fault.KILL_BEFORE_COMMIT.value, Fault.KILL_AFTER_COMMIT.value})
CUT_OFF_SECONDS = 0.25  # a request whose sender was gone this soon after a kill was the killed one's


@dataclass(slots=True)
class Tally:
    """What many seeds came to."""

    seeds: list[int] = field(default_factory=list)
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)
    found: list[dict[str, Any]] = field(default_factory=list)

    def add(self, evidence: Evidence, violations: Sequence[Violation], seconds: float) -> None:
        """Count one seed in."""
        self.seeds.append(evidence.seed)
        self.seconds += seconds
        self.faults.update(fault.kind for fault in evidence.faults)
        self.ends.update(export.view["state"] for export in evidence.exports)
        self.violations.update(violation.invariant for violation in violations)
        self.found += [{"seed": evidence.seed, **violation._asdict()} for violation in violations]
        self.recoveries += recoveries(evidence)
        self.counts.update(counts(evidence))

    def as_json(self) -> dict[str, Any]:
        """Return all of it."""
        return {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "seeds": self.seeds,
            "wall_seconds": round(self.seconds, 1),
            "faults": dict(self.faults),
            **self.counts,
            "sessions_ended": dict(self.ends),
            "recovery_seconds": {
                "count": len(self.recoveries),
                "p50": quantile(self.recoveries, 0.5),
                "p99": quantile(self.recoveries, 0.99),
            },
            "violations": {name: self.violations[name] for name in INVARIANTS},
            "found": self.found,
        }

    def table(self) -> str:
        """Return it for a reader, as lines of a Markdown table."""
        told = self.as_json()
        rows = [("seeds", len(self.seeds)), ("wall time", f"{self.seconds:.0f} s"), ("machine", told["machine"])]
        rows += [(f"fault: {kind.value}", self.faults[kind.value]) for kind in Fault]
        rows += [(name.replace("_", " "), count) for name, count in self.counts.items()]
        rows += [(f"sessions {state}", count) for state, count in sorted(self.ends.items())]
        found = told["recovery_seconds"]
        rows.append(("kill -9 to the next attempt, p50 / p99", f"{found['p50']} s / {found['p99']} s ({found['count']} undos cut off)"))
        rows += [(f"violations of {name}", self.violations[name]) for name in INVARIANTS]
        return "\n".join(["| figure | value |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def counts(evidence: Evidence) -> dict[str, int]:
    """Count what went on in one run."""
    facts = Facts(evidence)
    undos = [request for request in evidence.requests if place_of(request).what == "undo"]
    keys: dict[str, set[str | None]] = {}
    for request in undos:
        keys.setdefault(request.path, set()).add(request.key)
    return {
        "sessions": len(evidence.exports),
        "effects": sum(len(export.view["effects"]) for export in evidence.exports),
        "client_calls": len({call.number for call in evidence.calls}),
        "client_attempts": len(evidence.calls),
        "client_attempts_without_an_answer": sum(call.heard == "info" for call in evidence.calls),
        "undo_requests": len(undos),
        "undo_answers_lost_or_refused": sum(request.status >= 300 or request.mode != "normal" for request in undos),
        "approvals": sum(effect["approval"] is not None for export in evidence.exports for effect in export.view["effects"]),
        "duplicate_deliveries_with_the_same_key": len(undos) - len({request.key for request in undos}),
        "duplicate_deliveries_with_another_key": sum(len(found) - 1 for found in keys.values()),
        "undos_done_twice_by_endpoints_that_forget_keys": sum(one.is_applied for one in undos)
        - len({one.key for one in undos if one.is_applied}),
        "acts_that_their_undo_had_overtaken": sum(len(overtaken_by_their_undo(facts, key)) for key in facts.exports),
        "journal_entries": sum(len(export.journal) for export in evidence.exports),
    }


def recoveries(evidence: Evidence) -> list[float]:
    """Return how long after a kill -9 each undo that it cut off was sent again."""
    undos = [request for request in evidence.requests if place_of(request).what == "undo"]
    return [
        min(waits)
        for fault in evidence.faults
        if fault.kind in KILLS
        for request in undos
        if _was_cut_off(request, fault.at)
        if (waits := [later.started_at - fault.at for later in undos if later.key == request.key and later.started_at > fault.at])
    ]


def _was_cut_off(request: Received, at: float) -> bool:
    return request.started_at < at and request.left_at is not None and 0 <= request.left_at - at < CUT_OFF_SECONDS


async def run_seeds(seeds: Sequence[int], seconds: float, directory: Path, kept: Path) -> Tally:
    """Run seeds one after another."""
    tally, left = Tally(), deque(seeds)
    with Nursery() as nursery, open_cluster(directory / "postgres") as cluster:
        async with EndpointProcess(directory / "endpoint.jsonl") as endpoint:
            grounds = Grounds(cluster=cluster, endpoint=endpoint, nursery=nursery, directory=directory)
            await grounds.prepare()
            while left:
                async with grounds.open_world() as world:
                    await _run_until_violated(world, left, seconds, kept, tally)
    return tally


async def _run_until_violated(world: World, left: deque[int], seconds: float, kept: Path, tally: Tally) -> None:
    """Run seeds in one world as long as nothing is wrong in it: what one seed spoils must not be found by the next."""
    while left:
        plan, started_at = plan_of(left.popleft(), seconds), monotonic()
        evidence = await drive(world, plan)
        violations = check(evidence)
        tally.add(evidence, violations, monotonic() - started_at)
        _tell(evidence, violations, monotonic() - started_at)
        if violations:
            evidence.write(kept / f"seed-{plan.seed}")
            return


def _tell(evidence: Evidence, violations: Sequence[Violation], seconds: float) -> None:
    counted = counts(evidence)
    sys.stdout.write(
        f"seed {evidence.seed}: {len(violations)} violations, {len(evidence.faults)} faults, {counted['sessions']} sessions, "
        f"{counted['effects']} effects, {counted['undo_requests']} undo requests, {seconds:.1f} s\n"
    )
    for violation in violations:
        sys.stdout.write(f"  {violation.invariant}: {violation.detail}\n")
    sys.stdout.flush()


def _seeds(text: str) -> list[int]:
    """Read `1-20,25`."""
    bounds = [part.partition("-") for part in text.split(",")]
    return [seed for first, _, last in bounds for seed in range(int(first), int(last or first) + 1)]


def main() -> None:
    """Run seeds from the command line."""
    parser = argparse.ArgumentParser(description="Break things under load and hold what happened against the invariants.")
    parser.add_argument("--seeds", type=_seeds, default=_seeds("1-300"), help="for example 1-300, or 17, or 1-20,25")
    parser.add_argument("--seconds", type=float, default=1.5, help="within how long the sessions of a seed begin")
    parser.add_argument("--out", type=Path, default=Path("build/faults"), help="where the report, and the evidence of bad seeds, is left")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="faults-") as directory:
        tally = asyncio.run(run_seeds(options.seeds, options.seconds, Path(directory), options.out))
    (options.out / "report.json").write_text(json.dumps(tally.as_json(), indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"\n{tally.table()}\n\n{options.out / 'report.json'}\n")
    raise SystemExit(1 if tally.found else 0)


if __name__ == "__main__":
    main()
