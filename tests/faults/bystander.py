"""An agent of another org that goes on working beside whatever happens, and how long it waited. Must not know what happens."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from time import monotonic

import httpx

from app.engine.clock import SystemClock
from tests.factories import Client, undo_at

REST_SECONDS = 50  # one long poll for an unwind's end


@dataclass(slots=True, kw_only=True)
class Bystander:
    """Begins runs of one step at a steady rate, whatever became of those before, and fails each of them.

    `phase` is set by whoever knows what goes on. By phase in which a run began: `answers` are seconds from asking to a 2xx, those of asking
    again after a 503 included; `undone` are seconds from the report of the failure to the end of the unwind; `refusals` counts the 503s.
    """

    clients: Sequence[Client]
    url: str
    runs_per_second: float
    phase: str
    answers: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    undone: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    refusals: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Begin runs until the end of the block, and see the last ones undone."""
        async with asyncio.TaskGroup() as group:
            beginning = group.create_task(self._begin_runs(group))
            try:
                yield
            finally:
                beginning.cancel()

    async def _begin_runs(self, group: asyncio.TaskGroup) -> None:
        """Keep to the clock and not to the answers: a service that is slow must not be asked less often for it."""
        started_at = monotonic()
        for number in count():
            await SystemClock().sleep(max(0.0, started_at + number / self.runs_per_second - monotonic()))
            group.create_task(self._run(f"bystander-{number}", self.clients[number % len(self.clients)]))

    async def _run(self, name: str, client: Client) -> None:
        phase = self.phase
        undo = undo_at(self.url)
        await self._ask(phase, lambda: client.intercept(name, step_index=1, idempotency_key="1", compensation=undo))
        await self._ask(phase, lambda: client.commit(name, 1, {"credit_id": 1}))
        failed_at = monotonic()
        await self._ask(phase, lambda: client.fail(name))
        while (await insist(lambda: client.fail(name, wait_s=REST_SECONDS))).json()["state"] != "compensated":
            pass  # it has waited for as long as one request may
        self.undone[phase].append(monotonic() - failed_at)

    async def _ask(self, phase: str, ask: Callable[[], Awaitable[httpx.Response]]) -> None:
        def refuse() -> None:
            self.refusals[phase] += 1

        asked_at = monotonic()
        await insist(ask, refuse)
        self.answers[phase].append(monotonic() - asked_at)


async def insist(ask: Callable[[], Awaitable[httpx.Response]], refused: Callable[[], None] = lambda: None) -> httpx.Response:
    """Ask until the answer is no 503, each time after as long as the last one said, and return it, which must be a 2xx."""
    while (answer := await ask()).status_code == httpx.codes.SERVICE_UNAVAILABLE:
        refused()
        await SystemClock().sleep(float(answer.headers["Retry-After"]))
    return answer.raise_for_status()
