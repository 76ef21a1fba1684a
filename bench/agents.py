"""Agents that load the service, in a process of their own. Must not need an installed package, nor let an unexpected answer pass.

A connection has one request in flight. It leaves out nothing that an agent needs: an intercept has a key, for a lost answer.
"""

import asyncio
import json
import random
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Any, TypeVar

from bench import lines
from bench.wire import Connection, connect, render

HOST = "127.0.0.1"
# What the yardstick writes.
PAYLOAD = '{"amount": 100, "to": "acct-42", "memo": "invoice 1234 for services"}'
PAYLOAD_JSON = json.dumps(PAYLOAD)
COMMIT_BODY = b'{"result": {"status": "ok", "charge": "ch_123"}}'
STEPS_OF_A_RUN = 20  # then a new session begins
STEPS_OF_A_SAGA = 3
SEED = 7
WAIT_S = 55  # the longest that the service holds an answer
FAILURE = {"error": "the third tool refused"}

Item = TypeVar("Item")


@dataclass(slots=True)
class Run:
    """A session as its agent knows it: the newest step, and the last that it will take."""

    name: str
    step: int
    last: int


class Service:
    """How the service is spoken to."""

    def __init__(self, port: int, key: str) -> None:
        """Keep what every request has."""
        self._port = port
        self._head = f"Host: {HOST}:{port}\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n".encode()

    async def connections(self, number: int) -> list[Connection]:
        """Open so many."""
        return [await connect(HOST, self._port) for _ in range(number)]

    def intercept(self, name: str, step: int, tool: str = "pay") -> bytes:
        """Ask before a call."""
        head = self._head + f"Idempotency-Key: {name}-{step}\r\n".encode()
        body = f'{{"tool": "{tool}", "step_index": {step}, "payload": {PAYLOAD_JSON}}}'.encode()
        return render("POST", f"/v1/sessions/{name}/intercept", head, body)

    def commit(self, name: str, step: int) -> bytes:
        """Say that it happened."""
        return render("POST", f"/v1/sessions/{name}/effects/{step}/commit", self._head, COMMIT_BODY)

    def fail(self, name: str, *, wait_s: int = 0, effect: Mapping[str, object] | None = None) -> bytes:
        """Say that the run failed."""
        query = f"?wait_s={wait_s}" if wait_s else ""
        body = json.dumps({**FAILURE, **({} if effect is None else {"effect": effect})}).encode()
        return render("POST", f"/v1/sessions/{name}/fail{query}", self._head, body)

    def complete(self, name: str) -> bytes:
        """Say that the run ended well."""
        return render("POST", f"/v1/sessions/{name}/complete", self._head, b"{}")


class Agents:
    """What can be asked of them."""

    def __init__(self, service: Service, endpoint_port: int, prefix: str) -> None:
        """Know the service and the tools' endpoint; all names of sessions begin with `prefix`."""
        self._service = service
        self._endpoint_port = endpoint_port
        self._names = (f"{prefix}-{number}" for number in count())
        self._random = random.Random(SEED)
        self._runs: list[Run] = []

    def deeds(self) -> dict[str, lines.Deed]:
        """Return what they do when told."""
        return {
            "open": self.open,
            "adopt": self.adopt,
            "pairs": self.pairs,
            "paced": self.paced,
            "sagas": self.sagas,
            "prepare": self.prepare,
            "fail": self.fail,
            "unwind": self.unwind,
            "fail_in_turn": self.fail_in_turn,
            "park": self.park,
            "invoke": self.invoke,
        }

    async def open(self, *, sessions: int, connections: int) -> None:
        """Open sessions to spread pairs over, each by its first pair; how far each will go differs, so that they end one by one."""
        self._runs = [Run(next(self._names), 0, self._random.randint(1, STEPS_OF_A_RUN)) for _ in range(sessions)]
        await self._on_each(connections, self._runs, self._pair)

    async def adopt(self, *, names: Sequence[str], step: int) -> None:
        """Go on with sessions that are there already."""
        self._runs = [Run(name, step, self._random.randint(step + 1, STEPS_OF_A_RUN)) for name in names]

    async def pairs(self, *, connections: int, seconds: float) -> dict[str, float]:
        """Intercept and commit on so many connections, each with sessions of its own, as fast as answers come."""
        opened = await self._service.connections(connections)
        began_at = monotonic()
        numbers = await asyncio.gather(
            *(self._pairs_until(began_at + seconds, each, self._runs[at::connections]) for at, each in enumerate(opened))
        )
        ended_at = monotonic()
        close(opened)
        return {"units": 2 * sum(numbers), "seconds": ended_at - began_at}

    async def paced(self, *, rate: float, seconds: float, connections: int) -> dict[str, Any]:
        """Begin pairs at fixed moments, whether or not earlier ones were answered; `rate` is of requests per second.

        An intercept's time runs from its moment, a commit's from its intercept's answer, waiting for a free connection included.
        """
        free: asyncio.Queue[Connection] = asyncio.Queue()
        opened = await self._service.connections(connections)
        for each in opened:
            free.put_nowait(each)
        intercepts: list[float] = []
        commits: list[float] = []

        async def pair(moment: float) -> None:
            run = Run(next(self._names), 0, STEPS_OF_A_RUN) if not self._runs else self._runs.pop(self._random.randrange(len(self._runs)))
            self._advance(run)
            connection = await free.get()
            await connection.ask(self._service.intercept(run.name, run.step), 201)
            free.put_nowait(connection)
            answered_at = monotonic()
            intercepts.append(answered_at - moment)
            connection = await free.get()
            await connection.ask(self._service.commit(run.name, run.step), 200)
            free.put_nowait(connection)
            commits.append(monotonic() - answered_at)
            self._runs.append(run)

        began_at = monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(round(rate / 2 * seconds)):
                moment = began_at + number * 2 / rate
                await asyncio.sleep(moment - monotonic())  # noqa: TID251 - the moments of an open loop are the clock's
                group.create_task(pair(moment))
        ended_at = monotonic()
        close(opened)
        return {"intercepts": intercepts, "commits": commits, "seconds": ended_at - began_at}

    async def sagas(self, *, callers: int, seconds: float, is_failing: bool) -> dict[str, float]:
        """Run three-step sagas, each caller one after another."""
        opened, tools = await self._service.connections(callers), await self._tools(callers)
        began_at = monotonic()
        ends_at = began_at + seconds
        saga = self._failing_saga if is_failing else self._happy_saga

        async def caller(connection: Connection, tool: Connection) -> int:
            for number in count():
                if monotonic() >= ends_at:
                    return number
                await saga(connection, tool)
            raise AssertionError

        numbers = await asyncio.gather(*map(caller, opened, tools))
        ended_at = monotonic()
        close([*opened, *tools])
        return {"units": sum(numbers), "seconds": ended_at - began_at}

    async def prepare(self, *, sessions: int, steps: int, connections: int) -> list[str]:
        """Open sessions with so many committed steps each, and name them."""
        runs = [Run(next(self._names), 0, steps + 1) for _ in range(sessions)]

        async def fill(connection: Connection, run: Run) -> None:
            for _ in range(steps):
                await self._pair(connection, run)

        await self._on_each(connections, runs, fill)
        return [run.name for run in runs]

    async def fail(self, *, names: Sequence[str], connections: int) -> None:
        """Report failures, and wait for nothing."""

        async def report(connection: Connection, name: str) -> None:
            await connection.ask(self._service.fail(name), 202)

        await self._on_each(connections, names, report)

    async def unwind(self, *, names: Sequence[str]) -> dict[str, float]:
        """Fail all sessions at once, and wait until each is compensated."""
        opened = await self._service.connections(len(names))
        began_at = monotonic()
        await asyncio.gather(*map(self._see_compensated, opened, names))
        ended_at = monotonic()
        close(opened)
        return {"seconds": ended_at - began_at}

    async def fail_in_turn(self, *, names: Sequence[str]) -> list[float]:
        """Fail one session after another, each when the one before is compensated, and tell when each report was sent."""
        opened = await self._service.connections(1)
        sent_at: list[float] = []
        for name in names:
            sent_at.append(monotonic())
            await self._see_compensated(opened[0], name)
        close(opened)
        return sent_at

    async def park(self, *, sessions: int, connections: int) -> None:
        """Open sessions that wait for a person from their first call on."""

        async def ask(connection: Connection, name: str) -> None:
            await connection.ask(self._service.intercept(name, 1, "wire"), 202)

        await self._on_each(connections, [next(self._names) for _ in range(sessions)], ask)

    async def invoke(self, *, port: int, path: str, said: str, callers: int, seconds: float) -> dict[str, float]:
        """Call another HTTP service, each caller one call after another, which has to be answered by `said`."""
        opened = [await connect(HOST, port) for _ in range(callers)]
        head = f"Host: {HOST}:{port}\r\nContent-Type: application/json\r\n".encode()
        request, expected = render("POST", path, head, b"{}"), said.encode()
        began_at = monotonic()

        async def caller(connection: Connection) -> int:
            for number in count():
                if monotonic() >= began_at + seconds:
                    return number
                if (found := await connection.ask(request, 200)) != expected:
                    raise lines.Fault(f"{path}: expected {expected!r}, found {found!r}")
            raise AssertionError

        numbers = await asyncio.gather(*map(caller, opened))
        ended_at = monotonic()
        close(opened)
        return {"units": sum(numbers), "seconds": ended_at - began_at}

    def _advance(self, run: Run) -> None:
        """Go to a run's next step, or begin another in its place."""
        if run.step == run.last:
            run.name, run.step, run.last = next(self._names), 0, STEPS_OF_A_RUN
        run.step += 1

    async def _pair(self, connection: Connection, run: Run) -> None:
        self._advance(run)
        await connection.ask(self._service.intercept(run.name, run.step), 201)
        await connection.ask(self._service.commit(run.name, run.step), 200)

    async def _pairs_until(self, moment: float, connection: Connection, runs: Sequence[Run]) -> int:
        choose = self._random.choice
        for number in count():
            if monotonic() >= moment:
                return number
            await self._pair(connection, choose(runs))
        raise AssertionError

    async def _happy_saga(self, connection: Connection, tool: Connection) -> None:
        name = next(self._names)
        for step in range(1, STEPS_OF_A_SAGA + 1):
            await connection.ask(self._service.intercept(name, step), 201)
            await tool.ask(self._call("/tool"), 200)
            await connection.ask(self._service.commit(name, step), 200)
        await connection.ask(self._service.complete(name), 200)

    async def _failing_saga(self, connection: Connection, tool: Connection) -> None:
        """Do two steps, have the third refused, and wait until the two are undone."""
        name = next(self._names)
        for step in range(1, STEPS_OF_A_SAGA):
            await connection.ask(self._service.intercept(name, step), 201)
            await tool.ask(self._call("/tool"), 200)
            await connection.ask(self._service.commit(name, step), 200)
        await connection.ask(self._service.intercept(name, STEPS_OF_A_SAGA), 201)
        await tool.ask(self._call("/refuse"), 409)
        await self._see_compensated(connection, name, {"step_index": STEPS_OF_A_SAGA, "outcome": "not_applied"})

    async def _see_compensated(self, connection: Connection, name: str, effect: Mapping[str, object] | None = None) -> None:
        request = self._service.fail(name, wait_s=WAIT_S, effect=effect)
        while (state := json.loads(await connection.ask(request, 202))["state"]) in {"failed", "compensating"}:
            continue
        if state != "compensated":
            raise lines.Fault(f"expected session {name} to be compensated, found it {state}")

    def _call(self, path: str) -> bytes:
        head = f"Host: {HOST}:{self._endpoint_port}\r\nContent-Type: application/json\r\n".encode()
        return render("POST", path, head, PAYLOAD.encode())

    async def _tools(self, number: int) -> list[Connection]:
        return [await connect(HOST, self._endpoint_port) for _ in range(number)]

    async def _on_each(self, connections: int, items: Sequence[Item], deed: Callable[[Connection, Item], Awaitable[None]]) -> None:
        """Do something for each of many, on so many connections."""
        opened = await self._service.connections(min(connections, len(items)))
        left = iter(items)

        async def work(connection: Connection) -> None:
            for item in left:
                await deed(connection, item)

        await asyncio.gather(*map(work, opened))
        close(opened)


def close(connections: Sequence[Connection]) -> None:
    """Hang up everywhere."""
    for connection in connections:
        connection.close()


async def main() -> None:
    """Do as told by arguments: the service's port, a key, the endpoint's port, and how names begin."""
    port, key, endpoint_port, prefix = sys.argv[1:]
    await lines.obey(Agents(Service(int(port), key), int(endpoint_port), prefix).deeds())


if __name__ == "__main__":
    lines.run(main)
