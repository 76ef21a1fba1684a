"""What a session that awaits approval costs the service in memory. Must not count what the service takes once, however many there are."""

from bench import cpu
from bench.figures import Findings, Row, Target
from bench.stage import Stage

SESSIONS = 5_000
CONNECTIONS = 32
MEBIBYTE = 2**20
TARGET = Target(value=1.0, is_ceiling=True)
HIDES = "no agent holds a request open for the decision meanwhile; the first thousands, before measuring begins, warm allocator and pools"


def measure(stage: Stage, findings: Findings) -> None:
    """Park sessions, after as many to warm up, and see by how much the process has grown."""
    if not cpu.IS_KNOWN:
        findings.left_out.append("memory: this system does not tell what a process holds")
        return
    tenant, endpoint = stage.tenant(), stage.endpoint()
    service = stage.service(tenant)
    agents = stage.agents(service, tenant, endpoint)
    number = stage.options.size(SESSIONS)
    grown: list[float] = []
    agents.ask("park", sessions=number, connections=CONNECTIONS)
    for _ in range(stage.options.rounds):
        before = cpu.resident_bytes(service.pid)
        agents.ask("park", sessions=number, connections=CONNECTIONS)
        grown.append((cpu.resident_bytes(service.pid) - before) / MEBIBYTE * 1_000 / number)
    findings.rows.append(Row(name="memory per 1,000 sessions awaiting approval", unit="MiB", values=grown, target=TARGET, hides=HIDES))
