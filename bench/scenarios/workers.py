"""What a second process gains: `--workers 2`, or a second replica on the same database. Must not be taken for what two machines gain."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

from bench.figures import Findings, Reading, Row, costs_of, rates
from bench.lines import CLONE, Process
from bench.scenarios.pair import OPENERS, sessions
from bench.stage import Endpoint, Stage, alternate, metered

CONNECTIONS = 32
OPTION = "--workers"
ONE = "one worker"
HIDES = "client, service and Postgres share the same cores here, so a second process gains only what the first left idle"


def measure(stage: Stage, findings: Findings) -> None:
    """Measure pairs on one worker, on two, and on two replicas, side by side."""
    if not _has_workers():
        findings.left_out.append(f"workers: serve does not know {OPTION}")
        return
    endpoint = stage.endpoint()
    sides: dict[str, Callable[[], Reading]] = {
        ONE: _side(stage, endpoint, (OPTION, "1"), 1),
        "two workers": _side(stage, endpoint, (OPTION, "2"), 1),
        "two replicas": _side(stage, endpoint, (), 2),
    }
    readings = alternate(stage.options.rounds, sides)
    findings.costs += costs_of(f"intercept+commit at {CONNECTIONS}", "request", readings)
    findings.rows += [
        Row(
            name=f"intercept+commit at {CONNECTIONS}, {side}",
            unit="requests/s",
            values=rates(readings[side]),
            versus=ONE,
            against=rates(readings[ONE]),
            hides=HIDES,
        )
        for side in sides
        if side != ONE
    ]


def _side(stage: Stage, endpoint: Endpoint, arguments: Sequence[str], replicas: int) -> Callable[[], Reading]:
    """Start replicas on a database of their own, each with agents of its own, and return how to measure them together."""
    tenant = stage.tenant()
    services = [stage.service(tenant, *arguments) for _ in range(replicas)]
    agents = [stage.agents(each, tenant, endpoint, f"run-{number}") for number, each in enumerate(services)]
    for each in agents:
        each.ask("open", sessions=sessions(stage.options) // replicas, connections=OPENERS)
    _pairs(agents, stage.options.warm_seconds)
    meters = stage.meters(service=[each.pid for each in services], client=[each.pid for each in agents])
    return partial(metered, meters, partial(_pairs, agents, stage.options.seconds))


def _pairs(agents: Sequence[Process], seconds: float) -> dict[str, float]:
    """Have all agents at work at the same time, on as many connections together as there are for one."""
    for each in agents:
        each.tell("pairs", connections=CONNECTIONS // len(agents), seconds=seconds)
    said = [each.answer() for each in agents]
    return {"units": sum(each["units"] for each in said), "seconds": max(each["seconds"] for each in said)}


def _has_workers() -> bool:
    told = subprocess.run(
        [sys.executable, "-m", "app", "serve", "--help"], check=True, capture_output=True, text=True, cwd=CLONE, timeout=60
    )
    return OPTION in told.stdout
