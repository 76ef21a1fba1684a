"""How long it takes from the report of a failure to the first undo's arrival. Must not have other work in the way."""

from bench.figures import Findings, Row, percentile
from bench.lines import Fault
from bench.stage import Stage

SESSIONS = 200
MILLISECONDS = 1e3
CONNECTIONS = 8
HIDES = "one failure at a time on an idle service: from before the report is written to when the endpoint has read the undo"


def measure(stage: Stage, findings: Findings) -> None:
    """Fail sessions of one undo, one after another."""
    tenant, endpoint = stage.tenant(), stage.endpoint()
    service = stage.service(tenant)
    agents = stage.agents(service, tenant, endpoint)
    number = stage.options.size(SESSIONS)
    rounds: list[list[float]] = []
    for _ in range(stage.options.rounds):
        names = agents.ask("prepare", sessions=number, steps=1, connections=CONNECTIONS)
        endpoint.clear()
        sent_at, arrived_at = agents.ask("fail_in_turn", names=names), endpoint.arrivals()
        if len(arrived_at) != number:
            raise Fault(f"expected {number} undos, found {len(arrived_at)}")
        rounds.append([MILLISECONDS * (arrived - sent) for sent, arrived in zip(sent_at, arrived_at, strict=True)])
    findings.rows += [
        Row(
            name=f"from fail to the first undo, p{round(100 * share)}",
            unit="ms",
            values=[percentile(each, share) for each in rounds],
            hides=HIDES,
        )
        for share in (0.5, 0.99)
    ]
