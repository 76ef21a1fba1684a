"""A session of many steps: unwinding it holds no more memory, and reads no more rows per undo, than a short one.

Its rows are written through the domain and storage floors, some hundred steps to a transaction, so the journal is one that verifies.
`COUNTERMAND_TEST_LARGE_STEPS` sets the number of steps; the ordinary run has 600, `make large` 10,000.
"""

import asyncio
import gc
import os
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from app.domain.model import OrgName, SessionId
from app.storage import changes, sessions
from app.storage.database import open_database
from app.storage.sessions import Wanted
from tests import bulk
from tests.conftest import StartService
from tests.factories import ORG, Client, open_service
from tests.fakes import FakeEndpoint, Received, Reply
from tests.probes import PATIENCE_SECONDS, fetch

STEPS = int(os.environ.get("COUNTERMAND_TEST_LARGE_STEPS", "600"))
STEPS_PER_WRITE = 250
SLICES = 5  # the unwind is measured in as many equal parts

# A tenth of what a session of 10,000 steps holds; measured growth: 0 to 0.3 MB, whatever the number of steps.
MAX_GROWTH_BYTES = 4 * 1024 * 1024
# Rows, not time: on a busy machine an undo takes now 20 and then 50 ms. Measured: 30, whatever the number of steps; a statement
# that reads what the session has for each undo reads half of the steps on average, and a plan may do so for a while:
# tests/storage/test_statements.py is where each statement is held to a few rows.
MAX_ROWS_READ = 1.5 * STEPS
ROWS_READ_SQL = """
SELECT (SELECT sum(seq_tup_read) FROM pg_stat_user_tables) + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes) AS rows
"""
WORKING_SQL = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'countermand orchestrator%'"
UNWIND_SECONDS = 0.1 * STEPS  # measured: 5 to 35 ms an undo, as busy as the machine is

RUN = SessionId("large")


async def build(database_url: str, url: str) -> None:
    """Give a session that was opened `STEPS` committed steps, as the agent's verbs would have."""
    async with open_database(database_url, size=1, application_name="tests") as database:
        for first in range(1, STEPS + 1, STEPS_PER_WRITE):
            async with database.transaction(OrgName(ORG)) as tx:
                locked = await sessions.lock(tx, RUN, Wanted())
                assert locked is not None
                draft = bulk.begin(locked)
                for step in range(first, min(first + STEPS_PER_WRITE, STEPS + 1)):
                    bulk.take_step(draft, step, url)
                await changes.write(tx, [draft.changes()])


@dataclass(slots=True)
class Witness:
    """Notes each undo's step and time as it comes, and between slices the memory of this process."""

    endpoint: FakeEndpoint
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    steps: list[int] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)

    def __call__(self, request: Received) -> Reply:
        """Answer one undo; the endpoint's own log is let go, as it would be the only thing that grows."""
        if len(self.steps) % (STEPS // SLICES) == 0:
            gc.collect()
            self.resident_bytes.append(resident_bytes())
        self.moments.append(request.started_at)
        self.steps.append(int(request.header("Countermand-Step") or 0))
        self.endpoint.received.clear()
        if len(self.steps) == STEPS:
            self.is_over.set()
        return Reply()


def resident_bytes() -> int:
    """Return how much memory this process holds; Linux only, like the machines that run these tests."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def is_compensated(client: Client) -> bool:
    """Look for the session in a list, which does not hold its steps."""
    return len((await client.get("/sessions", params={"state": "compensated"})).json()["items"]) == 1


async def rows_read(database_url: str) -> int:
    """Return how many rows have been read in a database since it was made; what a backend has read is counted by its end."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await fetch(database_url, WORKING_SQL):
            pass
    return int((await fetch(database_url, ROWS_READ_SQL))[0]["rows"])


@pytest.mark.timeout(60 + 2 * UNWIND_SECONDS)
async def test_memory_and_work_stay_level_when_a_long_session_unwinds(services: StartService, database_url: str) -> None:
    """Every undo is sent once, newest first; its session's length costs it nothing, neither rows read nor memory."""
    async with FakeEndpoint() as endpoint:
        witness = Witness(endpoint)
        endpoint.script("/undo", witness)
        api = await services(has_orchestrator=False)
        (await api.agent.put(f"/sessions/{RUN}")).raise_for_status()
        await build(database_url, endpoint.url("/undo"))
        (await api.agent.fail(RUN)).raise_for_status()
        before = await rows_read(database_url)
        async with open_service(database_url, has_api=False), asyncio.timeout(UNWIND_SECONDS):
            await witness.is_over.wait()
            while not await is_compensated(api.operator):
                pass
        read = (await rows_read(database_url) - before) / STEPS
    assert witness.steps == list(range(STEPS, 0, -1))
    gaps = [later - earlier for earlier, later in pairwise(witness.moments)]
    paces = [median(gaps[part * len(gaps) // SLICES : (part + 1) * len(gaps) // SLICES]) for part in range(SLICES)]
    growth = witness.resident_bytes[-1] - witness.resident_bytes[1]
    paces_told = f"median ms per undo, by slice: {[round(1_000 * pace, 2) for pace in paces]}"
    figures = f"{read:.0f} rows read per undo; {paces_told}; grown by {growth:,} bytes"
    sys.stdout.write(f"{figures}\n")
    assert growth < MAX_GROWTH_BYTES, figures
    assert 1 < read < MAX_ROWS_READ, figures
    verified = (await api.operator.get(f"/sessions/{RUN}/journal/verify")).json()
    assert (verified["valid"], verified["entry_count"]) == (True, 1 + 2 * STEPS + 1 + 2 * STEPS + 1)
