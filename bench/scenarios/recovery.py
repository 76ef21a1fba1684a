"""How long a service needs that starts on a database full of due calls. Must not be helped: every setting is as it comes."""

import time
from collections.abc import Sequence
from time import monotonic

from bench.figures import Findings, Row
from bench.lines import Fault
from bench.stage import Stage, Tenant

CALLS = 10_000
CONNECTIONS = 32
PATIENCE_SECONDS = 1_800.0
POLL_SECONDS = 0.1
LEFT_SQL = "SELECT count(*) FROM sessions WHERE state <> 'compensated'"
HIDES = "counted from the start of the process, its imports included; one destination, so 16 calls at a time as the settings come"


def measure(stage: Stage, findings: Findings) -> None:
    """Have sessions of one undo each fail while nobody unwinds, then start a service, and wait; a database for each round."""
    number = stage.options.size(CALLS)
    rounds = [_recover(stage, number) for _ in range(stage.options.rounds)]
    names = ("until the first of them arrives", "until all are done", "calls/s from the first to the end")
    findings.rows += [
        Row(name=f"recovery with {number} due calls, {name}", unit=unit, values=values, hides=HIDES)
        for name, unit, values in zip(names, ("s", "s", "calls/s"), zip(*rounds, strict=True), strict=True)
    ]


def _recover(stage: Stage, number: int) -> Sequence[float]:
    """Return the seconds to the first arrival and to the end, and the calls per second between."""
    with stage.part():
        tenant, endpoint = stage.tenant(), stage.endpoint()
        idle = stage.service(tenant, "--no-orchestrator")
        agents = stage.agents(idle, tenant, endpoint)
        agents.ask("fail", names=agents.ask("prepare", sessions=number, steps=1, connections=CONNECTIONS), connections=CONNECTIONS)
        idle.stop()
        stage.execute(tenant.database_url, "VACUUM ANALYZE")
        endpoint.clear()
        service = stage.service(tenant)
        _wait(stage, tenant)
        ended_at = monotonic()
        arrivals = endpoint.arrivals()
        if len(arrivals) < number:
            raise Fault(f"expected {number} undos, found {len(arrivals)}")
        return arrivals[0] - service.started_at, ended_at - service.started_at, number / (ended_at - arrivals[0])


def _wait(stage: Stage, tenant: Tenant) -> None:
    """Wait until everything is undone; asking for it costs a scan, so it is asked seldom."""
    deadline = monotonic() + PATIENCE_SECONDS
    while stage.value(tenant.database_url, LEFT_SQL):
        if monotonic() > deadline:
            raise Fault(f"not everything was undone within {PATIENCE_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
