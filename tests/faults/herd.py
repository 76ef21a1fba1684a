"""`python -m tests.faults.herd`: fail 10,000 sessions at once, then again with their destination away in the middle, and print figures.

Exits with 1 if a bound of tests.faults.herd_figures was not kept. Must not judge: those figures do.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from urllib.parse import urlsplit
from uuid import uuid4

import httpx

from app.domain.model import OrgName, Principal, Role
from app.engine.clock import SystemClock
from app.settings import Settings
from app.storage.database import open_database
from tests import bulk
from tests.conftest import migrate_into, with_database
from tests.factories import ORG, QUICK, Client, JsonObject, owner_connection
from tests.faults.bystander import REST_SECONDS, Bystander, insist
from tests.faults.endpoint import EndpointProcess
from tests.faults.herd_figures import (
    AFTER,
    AWAY,
    BEFORE,
    DRAINING,
    FAILING,
    HERD_PATH,
    OTHER_PATH,
    STEPS,
    Herd,
    Outage,
    Sample,
    Seen,
    figures,
    table,
    violations,
)
from tests.faults.nursery import Nursery
from tests.faults.processes import ServiceProcess, make_keys, open_cluster

REPLICAS = 2
OTHER_ORG = "beta"
ANSWER_SECONDS = 0.02  # what an undo takes; one that took no time would hardly ever be met by another
CALLERS = 32  # connections over which the failures are reported, each with one report after the other
RETRY_SECONDS = 1.0  # after a 503, as its Retry-After asks
SAMPLE_SECONDS = 0.5
PATIENCE_SECONDS = 3_600
RESTING = ("compensated", "halted")
UP = {path: [{"delay_seconds": ANSWER_SECONDS}] for path in (HERD_PATH, OTHER_PATH)}
AWAY_REPLY = {HERD_PATH: [{"status": 503, "delay_seconds": ANSWER_SECONDS}]}
PERMISSIVE = {"inline_tools", "egress_allow"}
SHIPPED = {name: Settings.model_fields[name].default for name in (*QUICK, "lease_seconds") if name not in PERMISSIVE}
"""The figures are of the service as it comes, not of one in a hurry."""
STATES_SQL = "SELECT state::text, count(*) FROM sessions WHERE org = $1 GROUP BY state"
PROBES_SQL = "SELECT coalesce(sum(probes), 0)::integer FROM circuits WHERE org = $1"


def herd_of(sessions: int, outage_seconds: float, calm_seconds: float, runs_per_second: float) -> Herd:
    """Return a herd with the bounds that hold for it."""
    in_flight, calls, retries = (
        int(Settings.model_fields[name].default) for name in ("max_calls_per_destination", "circuit_calls", "retry_max_retries")
    )
    return Herd(
        sessions=sessions,
        outage_seconds=outage_seconds,
        calm_seconds=calm_seconds,
        runs_per_second=runs_per_second,
        max_in_flight=REPLICAS * in_flight,
        max_unaware=REPLICAS * (in_flight + (calls - 1) * retries),
    )


@dataclass(slots=True, kw_only=True)
class Field:
    """Where a herd runs: two replicas, one database, one endpoint."""

    database_url: str
    endpoint: EndpointProcess
    replicas: Sequence[ServiceProcess]
    seen: Seen

    async def run(self, names: Sequence[str]) -> Seen:
        """Fail all sessions at once and see them undone, with an outage in the middle if there is to be one."""
        seen = self.seen
        async with seen.bystander.at_work():
            await self._watch_for(seen.herd.calm_seconds)
            seen.began_at, seen.bystander.phase, load = monotonic(), FAILING, os.getloadavg()[0]
            async with asyncio.TaskGroup() as group:
                group.create_task(self._fail_all(names))
                if seen.herd.outage_seconds:
                    await self._watch(lambda sample: 4 * sample.states.get("compensated", 0) >= seen.herd.sessions)
                    await self._be_away()
                await self._watch(lambda sample: sum(sample.states.get(state, 0) for state in RESTING) == seen.herd.sessions)
            seen.ended_at, seen.bystander.phase, seen.load = monotonic(), AFTER, (load, os.getloadavg()[0])
            await self._watch_for(seen.herd.calm_seconds)
        seen.requests = self.endpoint.received()
        seen.events = [event for replica in self.replicas for event in replica.events]
        return seen

    async def _be_away(self) -> None:
        await self.endpoint.play(AWAY_REPLY)
        self.seen.bystander.phase = AWAY
        outage = self.seen.outage = Outage(began_at=monotonic())
        await self._watch_for(self.seen.herd.outage_seconds)
        operator = self.replicas[0].operator
        outage.circuits = sum(item["circuit"] is not None for item in (await insist(lambda: operator.get("/destinations"))).json()["items"])
        outage.escalations = len((await insist(lambda: operator.get("/escalations"))).json()["items"])
        async with owner_connection(self.database_url) as connection:
            outage.probes = await connection.fetchval(PROBES_SQL, ORG)
        await self.endpoint.play(UP)
        outage.ended_at = monotonic()
        self.seen.bystander.phase = DRAINING if len(self.seen.accepted) == self.seen.herd.sessions else FAILING

    async def _watch_for(self, seconds: float) -> None:
        ends_at = monotonic() + seconds
        await self._watch(lambda sample: sample.at >= ends_at)

    async def _watch(self, is_enough: Callable[[Sample], bool]) -> None:
        """Look at everything again and again until it is as it should be."""
        async with asyncio.timeout(PATIENCE_SECONDS), owner_connection(self.database_url) as connection:
            while True:
                states = {row["state"]: row["count"] for row in await connection.fetch(STATES_SQL, ORG)}
                sample = Sample(at=monotonic(), resident=[resident_bytes(replica.pid) for replica in self.replicas], states=states)
                self.seen.samples.append(sample)
                if is_enough(sample):
                    return
                await SystemClock().sleep(SAMPLE_SECONDS)

    async def _fail_all(self, names: Sequence[str]) -> None:
        left = iter(names)
        async with asyncio.TaskGroup() as group:
            for number in range(CALLERS):
                group.create_task(self._fail_some(left, self.replicas[number % REPLICAS]))
        if self.seen.bystander.phase == FAILING:  # an outage that goes on has a name of its own
            self.seen.bystander.phase = DRAINING

    async def _fail_some(self, names: Iterator[str], replica: ServiceProcess) -> None:
        """Report failures over one connection, again where the answer is 503."""
        where = urlsplit(replica.base_url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        with closing(writer):
            for name in names:
                writer.write(fail_request(name, replica.agent.key))
                while (status := await read_answer(reader)) == httpx.codes.SERVICE_UNAVAILABLE:
                    self.seen.refusals += 1
                    await SystemClock().sleep(RETRY_SECONDS)
                    writer.write(fail_request(name, replica.agent.key))
                if status != httpx.codes.ACCEPTED:
                    raise AssertionError(f"{name}: {status}")
                self.seen.accepted.append(monotonic())


def fail_request(name: str, key: str) -> bytes:
    """Return the bytes that report a failure; a client that does more would take from the service what it is measured by."""
    body = b'{"error":"the mail service is down"}'
    head = f"POST /v1/sessions/{name}/fail HTTP/1.1\r\nHost: herd.test\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def read_answer(reader: asyncio.StreamReader) -> int:
    """Read one answer, and return its status."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    await reader.readexactly(int(head.partition("content-length:")[2].partition("\r\n")[0]))
    return int(head.split(" ", 2)[1])


def resident_bytes(pid: int) -> int:
    """Return how much memory a process holds; Linux only."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def open_field(herd: Herd, cluster_url: str, nursery: Nursery, directory: Path) -> AsyncIterator[Field]:
    """Run replicas and an endpoint on a fresh database until the end of the block."""
    name = f"herd_{uuid4().hex}"
    await asyncio.to_thread(migrate_into, cluster_url, name)
    database_url = with_database(cluster_url, name)
    keys, others = await make_keys(database_url), await make_keys(database_url, OTHER_ORG)
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(EndpointProcess(directory / "endpoint.jsonl", UP))
        replicas = [
            await stack.enter_async_context(ServiceProcess(nursery, database_url, keys, directory, **SHIPPED)) for _ in range(REPLICAS)
        ]
        clients = []
        for replica in replicas:
            limits = httpx.Limits(max_connections=None)  # whoever waits for an unwind must not keep others from asking
            http = httpx.AsyncClient(base_url=replica.base_url, trust_env=False, timeout=2 * REST_SECONDS, limits=limits)
            clients.append(Client(http=await stack.enter_async_context(http), key=others[Role.AGENT]))
        bystander = Bystander(clients=clients, url=endpoint.url(OTHER_PATH), runs_per_second=herd.runs_per_second, phase=BEFORE)
        yield Field(database_url=database_url, endpoint=endpoint, replicas=replicas, seen=Seen(herd=herd, bystander=bystander))


async def drive(herd: Herd, cluster_url: str, nursery: Nursery, directory: Path) -> Seen:
    """Make a herd of sessions and run it."""
    agent = Principal(org=OrgName(ORG), role=Role.AGENT, subject=f"{Role.AGENT}-1", key_id="")  # whom make_keys makes a key for
    async with open_field(herd, cluster_url, nursery, directory) as field:
        names = [f"run-{number}" for number in range(herd.sessions)]
        async with open_database(field.database_url, size=1, application_name="tests") as database:
            await bulk.make_sessions(database, agent, names, STEPS, field.endpoint.url(HERD_PATH))
        return await field.run(names)


async def drive_all(herds: Sequence[Herd], directory: Path, out: Path) -> list[JsonObject]:
    """Drive one herd after another, leave in `out` what each came to as soon as it is over, and return it all."""
    report: list[JsonObject] = []
    with Nursery() as nursery, open_cluster(directory / "postgres") as cluster:
        for number, herd in enumerate(herds):
            place = directory / str(number)
            place.mkdir()
            seen = await drive(herd, cluster.url, nursery, place)
            report.append({"figures": figures(seen), "violations": violations(seen)})
            (out / "herd.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def main() -> None:
    """Run herds from the command line."""
    parser = argparse.ArgumentParser(description="Fail many sessions at once, and again with their destination away in the middle.")
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--outage-seconds", type=float, default=120.0, help="0: no second herd")
    parser.add_argument("--calm-seconds", type=float, default=15.0, help="how long the other org is watched before and after")
    parser.add_argument("--runs-per-second", type=float, default=1.0, help="of the other org, three requests each")
    parser.add_argument("--out", type=Path, default=Path("build/faults"), help="where herd.json is left")
    options = parser.parse_args()
    outages = [0.0, options.outage_seconds] if options.outage_seconds else [0.0]
    herds = [herd_of(options.sessions, seconds, options.calm_seconds, options.runs_per_second) for seconds in outages]
    options.out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="herd-") as directory:
        report = asyncio.run(drive_all(herds, Path(directory), options.out))
    violated = [name for told in report for name in told["violations"]]
    sys.stdout.write(f"{table([told['figures'] for told in report])}\n\nviolations: {violated}\n{options.out / 'herd.json'}\n")
    raise SystemExit(1 if violated else 0)


if __name__ == "__main__":
    main()
