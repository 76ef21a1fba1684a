"""Intercept and commit on a database that holds a million effects, over one that began empty. Must not leave the large one unread.

Two services on two databases of one cluster, one active at a time. The large one's pairs go to sessions among all that are stored.
"""

import random
from collections.abc import Callable
from functools import partial

from bench import filling
from bench.figures import Findings, Reading, Row, Target, costs_of, rates
from bench.lines import Process
from bench.scenarios.pair import OPENERS, sessions
from bench.stage import Endpoint, Stage, Tenant, alternate, metered

CONNECTIONS = 32
STORED = 100_000  # sessions, of ten effects each
LARGE, EMPTY = "large", "empty"
TARGET = Target(value=0.90)
SEED = 11
HIDES = "all of it fits into memory; what grows with rows that do not is not seen"


def measure(stage: Stage, findings: Findings) -> None:
    """Measure both side by side."""
    endpoint, number = stage.endpoint(), stage.options.size(STORED)
    readings = alternate(stage.options.rounds, {LARGE: _large(stage, endpoint, number), EMPTY: _empty(stage, endpoint)})
    name = f"intercept+commit at {CONNECTIONS} with {number * filling.STEPS:,} effects stored"
    findings.costs += costs_of(name, "request", readings)
    findings.rows.append(
        Row(
            name=name,
            unit="requests/s",
            values=rates(readings[LARGE]),
            versus="the empty database",
            against=rates(readings[EMPTY]),
            target=TARGET,
            hides=HIDES,
        )
    )


def _large(stage: Stage, endpoint: Endpoint, number: int) -> Callable[[], Reading]:
    tenant = stage.tenant()
    names = filling.fill(stage, tenant, endpoint, number)
    chosen = random.Random(SEED).sample(names, sessions(stage.options))
    return _side(stage, endpoint, tenant, lambda agents: agents.ask("adopt", names=chosen, step=filling.STEPS))


def _empty(stage: Stage, endpoint: Endpoint) -> Callable[[], Reading]:
    number = sessions(stage.options)
    return _side(stage, endpoint, stage.tenant(), lambda agents: agents.ask("open", sessions=number, connections=OPENERS))


def _side(stage: Stage, endpoint: Endpoint, tenant: Tenant, begin: Callable[[Process], None]) -> Callable[[], Reading]:
    service = stage.service(tenant)
    agents = stage.agents(service, tenant, endpoint)
    begin(agents)
    agents.ask("pairs", connections=CONNECTIONS, seconds=stage.options.warm_seconds)
    ask = partial(agents.ask, "pairs", connections=CONNECTIONS, seconds=stage.options.seconds)
    return partial(metered, stage.meters(service=[service.pid], client=[agents.pid]), ask)
