"""A session of many steps: unwinding it holds no more memory, and takes no longer per undo, than a short one.

Its rows are written through the domain and storage floors, some hundred steps to a transaction, so the journal is one that verifies.
`COUNTERMAND_TEST_LARGE_STEPS` sets the number of steps; the ordinary run has 600, `make large` 10,000.
"""

import asyncio
import gc
import os
import secrets
import sys
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from app.domain import intercept, outcomes
from app.domain.draft import Draft, Surroundings
from app.domain.egress import EgressPolicy
from app.domain.intercept import Execute, InterceptCommand, InterceptRules, Seen
from app.domain.model import Compensation, OrgName, SessionId, StepIndex
from app.domain.outcomes import Reported
from app.storage import changes, sessions
from app.storage.database import open_database
from app.storage.sessions import Wanted
from tests.conftest import StartService
from tests.factories import ORG, Client
from tests.fakes import FakeEndpoint, Received, Reply

STEPS = int(os.environ.get("COUNTERMAND_TEST_LARGE_STEPS", "600"))
STEPS_PER_WRITE = 250
SLICES = 5  # the unwind is measured in as many equal parts
PAYLOAD = b'{"order":4921,"note":"' + b"x" * 1_000 + b'"}'  # so that a session held in memory would be seen
RESULT = b'{"credit_id":"' + b"c" * 1_000 + b'"}'
ARGS = b'{"credit_id":{"$ref":"result#/credit_id"}}'

# A tenth of what a session of 10,000 steps holds; measured growth: 0 to 0.3 MB, whatever the number of steps.
MAX_GROWTH_BYTES = 4 * 1024 * 1024
# Measured 0.9 to 1.4 on a busy machine; 4 and more at 500 steps when a statement read the whole session for each undo.
MAX_SLOWDOWN = 2.5
UNWIND_SECONDS = 0.1 * STEPS  # measured: 5 to 35 ms an undo, as busy as the machine is

RULES = InterceptRules(is_inline_allowed=True, egress=EgressPolicy.parse("127.0.0.0/8"), approval_ttl_seconds=3_600)
NOTHING_SEEN = Seen(tool=None, at_step=None, under_key=None, unsettled=(), undo_of_repeat=None, approval_of_repeat=None)
RUN = SessionId("large")


async def build(database_url: str, url: str) -> None:
    """Give a session that was opened `STEPS` committed steps, as the agent's verbs would have."""
    async with open_database(database_url, size=1, application_name="tests") as database:
        for first in range(1, STEPS + 1, STEPS_PER_WRITE):
            async with database.transaction(OrgName(ORG)) as tx:
                locked = await sessions.lock(tx, RUN, Wanted())
                assert locked is not None
                surroundings = Surroundings(now=locked.now, actor="agent:agent-1", random_bytes=secrets.token_bytes)
                draft = Draft(locked.session, surroundings)
                for step in range(first, min(first + STEPS_PER_WRITE, STEPS + 1)):
                    take_step(draft, StepIndex(step), url)
                await changes.write(tx, [draft.changes()])


def take_step(draft: Draft, step: StepIndex, url: str) -> None:
    """Decide an intercept and its commit."""
    command = InterceptCommand(
        tool="issue_credit",
        payload=PAYLOAD,
        payload_pointer="/payload",
        step_index=step,
        reversibility=None,
        compensation=Compensation(url=url, args=ARGS),
        request_key=None,
        request_sha256=sha256(b"%d" % step).digest(),
        traceparent=None,
    )
    decision = intercept.decide(draft, command, NOTHING_SEEN, RULES)
    assert isinstance(decision, Execute)
    committed = outcomes.commit(draft, Reported(effect=decision.effect, undo_entry=decision.undo_entry, approval=None), RESULT)
    assert isinstance(committed, Reported)


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


@pytest.mark.timeout(60 + 2 * UNWIND_SECONDS)
async def test_memory_and_pace_stay_level_when_a_long_session_unwinds(services: StartService, database_url: str) -> None:
    """Every undo is sent once, newest first; the last slice costs what the first did, in time and in memory."""
    async with FakeEndpoint() as endpoint:
        witness = Witness(endpoint)
        endpoint.script("/undo", witness)
        service = await services()
        (await service.agent.put(f"/sessions/{RUN}")).raise_for_status()
        await build(database_url, endpoint.url("/undo"))
        (await service.agent.fail(RUN)).raise_for_status()
        async with asyncio.timeout(UNWIND_SECONDS):
            await witness.is_over.wait()
            while not await is_compensated(service.operator):
                pass
    assert witness.steps == list(range(STEPS, 0, -1))
    gaps = [later - earlier for earlier, later in pairwise(witness.moments)]
    paces = [median(gaps[part * len(gaps) // SLICES : (part + 1) * len(gaps) // SLICES]) for part in range(SLICES)]
    growth = witness.resident_bytes[-1] - witness.resident_bytes[1]
    figures = f"median ms per undo, by slice: {[round(1_000 * pace, 2) for pace in paces]}; grown by {growth:,} bytes"
    sys.stdout.write(f"{figures}\n")
    assert growth < MAX_GROWTH_BYTES, figures
    assert paces[-1] < MAX_SLOWDOWN * paces[0], figures
    verified = (await service.operator.get(f"/sessions/{RUN}/journal/verify")).json()
    assert (verified["valid"], verified["entry_count"]) == (True, 1 + 2 * STEPS + 1 + 2 * STEPS + 1)
