"""Undos per second, each recorded before the next begins, over HTTP clients that record nothing. Must not meet a slow endpoint."""

from collections.abc import Callable, Sequence
from functools import partial

from bench.figures import Findings, Reading, Row, Target, costs_of, rates
from bench.lines import Fault, Process
from bench.stage import Endpoint, Stage, alternate, metered

SESSIONS = 32
STEPS = 100
CONNECTIONS = 32
# What 32 sessions at once to one destination need; as it comes there are 16 to one destination.
SETTINGS = {"max_calls": 64, "max_calls_per_destination": SESSIONS, "max_calls_per_org": SESSIONS}
OURS = "undos"
PEERS = {
    "httpx": ("httpx's default transport", Target(value=7)),
    "aiohttp": ("bare aiohttp", Target(value=0.45)),
}
HIDES = {
    "httpx": "its pool is quadratic in what is in flight, so the ratio is one over a client that nobody should use like this",
    "aiohttp": "it records nothing, claims nothing and checks no address; ours counts an attempt before each undo and marks it after",
}


def measure(stage: Stage, findings: Findings) -> None:
    """Fail prepared sessions all at once, and post the same bytes with each client, side by side."""
    if not stage.comparison.has_packages:
        findings.left_out.append("undos: without aiohttp there is nothing to compare with")
        return
    tenant, endpoint = stage.tenant(), stage.endpoint()
    service = stage.service(tenant, **SETTINGS)
    agents = stage.agents(service, tenant, endpoint)
    steps = stage.options.size(STEPS)
    first = agents.ask("prepare", sessions=SESSIONS, steps=1, connections=CONNECTIONS)
    agents.ask("unwind", names=first)  # warms up, and shows what an undo looks like
    request = endpoint.newest()
    sides: dict[str, Callable[[], Reading]] = {OURS: partial(_ours, stage, endpoint, agents, service.pid, steps)}
    for peer in PEERS:
        sender = stage.process("bench.comparison.senders", peer, str(endpoint.port))
        sides[peer] = partial(_theirs, stage, endpoint, sender, request, SESSIONS * steps)
    readings = alternate(stage.options.rounds, sides)
    findings.costs += costs_of(f"undos at {SESSIONS}", "undo", readings)
    findings.rows += [
        Row(
            name=f"undos at {SESSIONS} sessions",
            unit="undos/s",
            values=rates(readings[OURS]),
            versus=versus,
            against=rates(readings[peer]),
            target=target,
            hides=HIDES[peer],
        )
        for peer, (versus, target) in PEERS.items()
    ]


def _ours(stage: Stage, endpoint: Endpoint, agents: Process, service: int, steps: int) -> Reading:
    names: Sequence[str] = agents.ask("prepare", sessions=SESSIONS, steps=steps, connections=CONNECTIONS)
    endpoint.clear()
    meters = stage.meters(service=[service], endpoint=[endpoint.pid])
    reading = metered(meters, lambda: {"units": SESSIONS * steps, **agents.ask("unwind", names=names)})
    _check(endpoint, SESSIONS * steps)
    return reading


def _theirs(stage: Stage, endpoint: Endpoint, sender: Process, request: dict[str, object], calls: int) -> Reading:
    endpoint.clear()
    meters = stage.meters(sender=[sender.pid], endpoint=[endpoint.pid])
    reading = metered(meters, lambda: {"units": calls, **sender.ask("send", calls=calls, at_once=SESSIONS, **request)})
    _check(endpoint, calls)
    return reading


def _check(endpoint: Endpoint, expected: int) -> None:
    found = endpoint.count()
    if found != expected:
        raise Fault(f"expected {expected} calls at the endpoint, found {found}")
