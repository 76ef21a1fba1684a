"""Three-step sagas against DBOS and Restate: same machine, same endpoint, DBOS on the same Postgres. Must not tune one side alone.

A saga of ours is what an agent does: per step intercept, the tool, commit; then complete, or the report of the failure, and waiting until
two steps are undone. Theirs is a workflow that does the same calls, and undoes newest first when the third is refused.
"""

from collections.abc import Callable
from functools import partial

from bench.comparison import restate_server
from bench.figures import Findings, Reading, Row, Target, costs_of, rates
from bench.lines import Process
from bench.stage import Endpoint, Stage, alternate, metered

CALLERS = (1, 8, 32)
OURS, DBOS, RESTATE = "service", "DBOS", "Restate"
TARGETS = {
    ("happy", DBOS, 32): Target(value=10),
    ("happy", RESTATE, 32): Target(value=1.7),
    ("failing", DBOS, 32): Target(value=12),
    ("failing", RESTATE, 32): Target(value=1.7),
}
HIDES = {
    DBOS: "DBOS runs in its caller's process, no HTTP before it; it can resume a workflow whose code it has, ours is told step by step",
    RESTATE: "Restate writes to a store of its own, not Postgres; it can resume a workflow whose code it has, ours is told step by step",
}
Side = Callable[[str, int, float], Reading]


def measure(stage: Stage, findings: Findings) -> None:
    """Measure happy and failing sagas at each number of callers, all sides in turn."""
    if not stage.comparison.has_packages:
        findings.left_out.append("sagas: there is nothing to compare with")
        return
    endpoint = stage.endpoint()
    sides = {OURS: _ours(stage, endpoint), DBOS: _dbos(stage, endpoint)}
    if stage.comparison.restate is not None:
        sides[RESTATE] = _restate(stage, endpoint)
    for kind in ("happy", "failing"):
        for callers in CALLERS:
            _measure(stage, findings, sides, kind, callers)


def _measure(stage: Stage, findings: Findings, sides: dict[str, Side], kind: str, callers: int) -> None:
    for side in sides.values():
        side(kind, callers, stage.options.warm_seconds)
    seconds = stage.options.seconds
    readings = alternate(stage.options.rounds, {name: partial(side, kind, callers, seconds) for name, side in sides.items()})
    name = f"{kind} sagas at {callers}"
    findings.costs += costs_of(name, "saga", readings)
    findings.rows += [
        Row(
            name=name,
            unit="sagas/s",
            values=rates(readings[OURS]),
            versus=other,
            against=rates(readings[other]),
            target=TARGETS.get((kind, other, callers)),
            hides=HIDES[other],
        )
        for other in sides
        if other != OURS
    ]


def _ours(stage: Stage, endpoint: Endpoint) -> Side:
    tenant = stage.tenant()
    service = stage.service(tenant)
    agents = stage.agents(service, tenant, endpoint)
    return partial(_sagas, agents, stage.meters(service=[service.pid], client=[agents.pid], endpoint=[endpoint.pid]))


def _dbos(stage: Stage, endpoint: Endpoint) -> Side:
    process = stage.process("bench.comparison.dbos_sagas", stage.database(), str(endpoint.port))
    return partial(_sagas, process, stage.meters(service=[process.pid], endpoint=[endpoint.pid]))


def _restate(stage: Stage, endpoint: Endpoint) -> Side:
    """Start Restate's server, the service that it calls, and who calls it."""
    assert stage.comparison.restate is not None
    server = stage.enter(restate_server.running(stage.comparison.restate, stage.directory))
    port = restate_server.free_port()
    service = stage.process("bench.comparison.restate_sagas", str(port), str(endpoint.port))
    server.register(port)
    callers = stage.process("bench.agents", "0", "none", "0", "saga")
    meters = stage.meters(service=[server.pid, service.pid], client=[callers.pid], endpoint=[endpoint.pid])

    def side(kind: str, number: int, seconds: float) -> Reading:
        said = {"happy": "0", "failing": "2"}[kind]
        ask = partial(callers.ask, "invoke", port=server.ingress_port, path=f"/Saga/{kind}", said=said, callers=number, seconds=seconds)
        return metered(meters, ask)

    return side


def _sagas(process: Process, meters: dict[str, Callable[[], float]], kind: str, callers: int, seconds: float) -> Reading:
    return metered(meters, partial(process.ask, "sagas", callers=callers, seconds=seconds, is_failing=kind == "failing"))
