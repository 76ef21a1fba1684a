"""How long an intercept and a commit take at a stated rate, which does not wait for slow answers. Must not leave out what was late."""

from bench.figures import Findings, Row, percentile
from bench.lines import Process
from bench.scenarios.pair import OPENERS, sessions
from bench.stage import Options, Stage

RATES = (200, 1_000)  # requests per second
CONNECTIONS = 64
MILLISECONDS = 1e3
HIDES = "agents do not come evenly spaced; each moment is due whether or not earlier answers came, and waiting for a connection counts"
BEHIND = 1.2  # times the round: later than that the rate was not kept, and times grow with the length of the round


def measure(stage: Stage, findings: Findings) -> None:
    """Measure at each rate."""
    tenant, endpoint = stage.tenant(), stage.endpoint()
    service = stage.service(tenant)
    agents = stage.agents(service, tenant, endpoint)
    agents.ask("open", sessions=sessions(stage.options), connections=OPENERS)
    for rate in RATES:
        rounds = _rounds(stage.options, agents, rate)
        if not rounds:
            findings.left_out.append(f"latency at {rate} requests/s: the service did not keep up with that rate")
        findings.rows += [
            Row(
                name=f"{verb} at {rate} requests/s, p{round(100 * share)}",
                unit="ms",
                values=[MILLISECONDS * percentile(each[f"{verb}s"], share) for each in rounds],
                hides=HIDES,
            )
            for verb in ("intercept", "commit")
            for share in (0.5, 0.99)
            if rounds
        ]


def _rounds(options: Options, agents: Process, rate: int) -> list[dict[str, list[float]]]:
    """Return the times of each round in seconds; nothing where the rate cannot be kept."""
    rounds: list[dict[str, list[float]]] = []
    for _ in range(options.rounds):
        took = agents.ask("paced", rate=rate, seconds=options.seconds, connections=CONNECTIONS)
        if took.pop("seconds") > options.seconds * BEHIND:
            return []
        rounds.append(took)
    return rounds
