"""Agents at work while the database breaks: what they were told, and whether it was true. Must not know how the database breaks."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import httpx

from tests.factories import Client, JsonObject, undo_at
from tests.fakes import FakeEndpoint, Received
from tests.probes import fetch

PAUSE_SECONDS = 0.05  # a client with a little patience, less than it is asked for
PATIENCE_SECONDS = 60
STEPS = 2  # of a run that will fail


@dataclass(slots=True, kw_only=True)
class Agents:
    """Agents who register, commit and fail runs until `stopping`, asking again under the same key, and what they were told.

    `intercepts` and `commits`: by session and step, what was answered with 2xx; `failed`: the runs whose failure was.
    """

    agent: Client
    endpoint: FakeEndpoint
    prefix: str = ""
    intercepts: dict[tuple[str, int], JsonObject] = field(default_factory=dict)
    commits: set[tuple[str, int]] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    refusals: list[httpx.Response] = field(default_factory=list)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @asynccontextmanager
    async def at_work(self, writers: int, failing: int) -> AsyncIterator[None]:
        """Have so many write one endless run each, and so many let one run after another fail; they have stopped at the end."""
        async with asyncio.TaskGroup() as group:
            for number in range(writers):
                group.create_task(self._write(f"{self.prefix}writer-{number}"))
            for number in range(failing):
                group.create_task(self._fail_again_and_again(f"{self.prefix}failing-{number}"))
            try:
                yield
            finally:
                self.stopping.set()

    async def wait_for(self, answers: int = 0, refusals: int = 0, failed: int = 0) -> None:
        """Return once so many more were given, and so many more runs' failure was answered."""
        before = len(self.intercepts), len(self.refusals), len(self.failed)

        def is_enough() -> bool:
            now = len(self.intercepts), len(self.refusals), len(self.failed)
            return all(here - there >= wanted for here, there, wanted in zip(now, before, (answers, refusals, failed), strict=True))

        async with asyncio.timeout(PATIENCE_SECONDS), self._changed:
            await self._changed.wait_for(is_enough)

    async def _write(self, session_id: str) -> None:
        for step in count(1):
            if not await self._do(session_id, step):
                return

    async def _fail_again_and_again(self, name: str) -> None:
        for number in count(1):
            session_id = f"{name}.{number}"
            for step in range(1, STEPS + 1):
                if not await self._do(session_id, step):
                    return
            if await self._insist(partial(self.agent.fail, session_id)) is None:
                return
            self.failed.append(session_id)

    async def _do(self, session_id: str, step: int) -> bool:
        undo = undo_at(self.endpoint.url(f"/{session_id}/{step}"))
        told = await self._insist(
            lambda: self.agent.intercept(session_id, step_index=step, idempotency_key=f"step-{step}", compensation=undo)
        )
        if told is None:
            return False
        self.intercepts[session_id, step] = told.json()
        if await self._insist(lambda: self.agent.commit(session_id, step, {"credit_id": step})) is None:
            return False
        self.commits.add((session_id, step))
        return True

    async def _insist(self, ask: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response | None:
        """Ask until there is a 2xx; None when it is time to stop, or when the answer is one that asking again does not mend."""
        while not self.stopping.is_set():
            answer = await ask()
            if not answer.is_success:
                self.refusals.append(answer)
            async with self._changed:
                self._changed.notify_all()
            if answer.is_success:
                return answer
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                return None
            try:
                async with asyncio.timeout(PAUSE_SECONDS):
                    await self.stopping.wait()
            except TimeoutError:
                continue
        return None

    def _received(self) -> list[Received]:
        mine = tuple(f"/{self.prefix}{kind}-" for kind in ("writer", "failing"))
        return [request for request in self.endpoint.received if request.path.startswith(mine)]

    def assert_polite(self) -> None:
        """Expect every refusal to have asked its caller to come again."""
        for answer in self.refusals:
            assert (answer.status_code, answer.headers["Content-Type"]) == (503, "application/problem+json"), answer.text
            assert int(answer.headers["Retry-After"]) >= 1

    async def lost(self, operator: Client) -> list[tuple[str, int]]:
        """Return the steps that were acknowledged and are not there as they were acknowledged."""
        lost = []
        for session_id in {session_id for session_id, _ in self.intercepts}:
            response = await operator.get(f"/sessions/{session_id}")
            effects = {effect["step_index"]: effect for effect in response.json()["effects"]} if response.is_success else {}
            for (_, step), answer in ((key, answer) for key, answer in self.intercepts.items() if key[0] == session_id):
                found = effects.get(step, {})
                is_there = all(found.get(name) == answer[name] for name in ("effect_id", "undo_id", "forward_key"))
                if not is_there or ((session_id, step) in self.commits and found["outcome"] != "committed"):
                    lost.append((session_id, step))
        return lost

    async def assert_undone(self, database_url: str) -> None:
        """Expect every failed run to be undone, newest first, each request counted before it was sent."""
        assert self.failed
        for session_id in self.failed:
            answer = await self.agent.fail(session_id, wait_s=PATIENCE_SECONDS - 10)
            assert (answer.json()["state"], answer.json()["clean"]) == ("compensated", True), answer.text
        self.assert_newest_first()
        await self.assert_counted(database_url)

    def assert_newest_first(self) -> None:
        """Expect that no undo was sent before the one above it was answered."""
        for session_id in self.failed:
            requests = [request for request in self._received() if request.path.startswith(f"/{session_id}/")]
            steps = [int(request.path.rpartition("/")[2]) for request in requests]
            assert steps == sorted(steps, reverse=True), f"{session_id}: {steps}"
            assert set(steps) == set(range(1, STEPS + 1))

    async def assert_counted(self, database_url: str) -> None:
        """Expect every request that reached the endpoint to carry a number of its own that the database knows."""
        rows = await fetch(database_url, "SELECT call_id, attempts FROM outgoing_calls")
        attempts = {f"undo-{row['call_id']}": row["attempts"] for row in rows}
        numbers = [(request.key, int(request.header("Countermand-Attempt") or 0)) for request in self._received()]
        assert len(set(numbers)) == len(numbers), "an attempt was sent twice under one number"
        for key, number in numbers:
            assert 1 <= number <= attempts[str(key)], f"{key}: attempt {number} of {attempts[str(key)]} that were counted"
