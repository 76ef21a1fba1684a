"""Intercept and commit through HTTP, over the yardstick at as many clients. Must not compare with statements of ours."""

from collections.abc import Iterable
from functools import partial

from bench.figures import Findings, Row, Target, costs_of, rates
from bench.stage import Options, Stage, alternate, metered
from bench.yardstick import HIDES, Yardstick

CONNECTIONS = (1, 8, 32, 64)
TARGETS = {1: Target(value=0.35), 32: Target(value=0.60)}
SESSIONS = 10_000  # as many as the yardstick has
OPENERS = 32


def measure(stage: Stage, findings: Findings, connections: Iterable[int] = CONNECTIONS) -> None:
    """Measure at each number of connections; side by side with pgbench, round by round."""
    options = stage.options
    yardstick, tenant, endpoint = Yardstick(stage), stage.tenant(), stage.endpoint()
    service = stage.service(tenant)
    agents = stage.agents(service, tenant, endpoint)
    agents.ask("open", sessions=sessions(options), connections=OPENERS)
    for number in connections:
        agents.ask("pairs", connections=number, seconds=options.warm_seconds)
        ask = partial(agents.ask, "pairs", connections=number, seconds=options.seconds)
        readings = alternate(
            options.rounds,
            {
                "service": partial(metered, stage.meters(service=[service.pid], client=[agents.pid]), ask),
                "pgbench": partial(yardstick.read, number, options.seconds),
            },
        )
        name = f"intercept+commit at {number}"
        findings.costs += costs_of(name, "request", readings)
        findings.rows.append(
            Row(
                name=name,
                unit="requests/s",
                values=rates(readings["service"]),
                versus="pgbench",
                against=rates(readings["pgbench"]),
                target=TARGETS.get(number),
                hides=HIDES,
            )
        )


def sessions(options: Options) -> int:
    """Return over how many sessions pairs are spread."""
    return options.size(SESSIONS)
