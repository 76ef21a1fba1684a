"""Bring sessions to where a person has to look at them, over HTTP. Must not assert anything."""

import asyncio
from dataclasses import dataclass
from typing import Any

from tests.factories import JsonObject, Service, do_step, park, undo_at
from tests.fakes import FakeEndpoint, Reply
from tests.operators import is_handed_back, order
from tests.probes import rest

REFUSED = Reply(status=400, body=b'{"error":"period is closed"}')
LATER = Reply(status=503, headers={"Retry-After": "60"})  # keeps an undo waiting for longer than any test lasts
WIRE = '{"to":"alice","amount":"100"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """One service and one endpoint, on which sessions go wrong: the undo of step 2 of `s` is at /s/2."""

    service: Service
    endpoint: FakeEndpoint

    async def run(self, name: str, steps: int = 2, **compensation: Any) -> None:
        """Do steps 1 to `steps` in a session; each result holds an `id` of the step's own."""
        for step in range(1, steps + 1):
            await self.step(name, step, **compensation)

    async def step(self, name: str, step: int, **compensation: Any) -> None:
        """Do one step."""
        members = {"args": {"id": {"$ref": "result#/id"}}, "description": f"take back {name}-{step}", **compensation}
        await do_step(self.service.agent, name, step, self.url(name, step), {"id": f"{name}-{step}"}, **members)

    async def open_step(self, name: str, step: int, **compensation: Any) -> None:
        """Begin a step and leave it open: nobody says what came of it."""
        undo = undo_at(self.url(name, step), **compensation)
        (await self.service.agent.intercept(name, step_index=step, compensation=undo)).raise_for_status()

    async def refused(self, name: str, steps: int = 2, *replies: Reply, **compensation: Any) -> JsonObject:
        """Halt a session because the undo of its last step is refused; what its endpoint says after that is `replies`, or yes."""
        self.endpoint.script(f"/{name}/{steps}", REFUSED, *(replies or (Reply(),)))
        await self.run(name, steps, **compensation)
        return await self.failed(name)

    async def ordered(self, name: str, steps: int = 2) -> JsonObject:
        """Halt a session by an operator's order while its last step's undo waits for its next try."""
        self.endpoint.script(f"/{name}/{steps}", LATER, Reply())
        await self.run(name, steps)
        (await self.service.agent.fail(name)).raise_for_status()
        await is_handed_back(self.service.database_url, name)
        (await order(self.service.operator, name, "halt", "the ledger is down")).raise_for_status()
        return await self.failed(name)

    async def pivoted(self, name: str, steps: int = 2) -> JsonObject:
        """Halt a session because it fails after its last step, an irreversible one, went ahead."""
        await self.run(name, steps - 1)
        await self.released(name, steps)
        (await self.service.agent.commit(name, steps, {"wired": True})).raise_for_status()
        return await self.failed(name)

    async def released(self, name: str, step: int, tool: str = "send_wire_transfer") -> None:
        """Have a call approved and released; its agent has to run it, or the service does."""
        await park(self.service.agent, name, step, WIRE, tool)
        (await self.service.operator.approve(name, step)).raise_for_status()
        (await self.service.agent.resume(name, step, WIRE)).raise_for_status()

    async def late(self, name: str) -> JsonObject:
        """Halt a session because a call is reported as committed after it was undone, in mid-unwind: step 1 is left."""
        gate = asyncio.Event()
        self.endpoint.script(f"/{name}/2", Reply(gate=gate))
        await self.run(name, 1)
        await self.open_step(name, 2)
        (await self.service.agent.fail(name)).raise_for_status()
        await self.reached(name)
        await self.service.agent.commit(name, 2, {"id": "late"})
        gate.set()
        return await self.failed(name)

    async def reached(self, name: str, count: int = 1) -> None:
        """Return once so many requests about a session have reached the endpoint."""
        while sum(request.header("Countermand-Session") == name for request in self.endpoint.received) < count:
            await self.endpoint.wait_for_requests(len(self.endpoint.received) + 1)

    async def failed(self, name: str) -> JsonObject:
        """Fail a session, or ask again, and return it once it is at rest."""
        found: JsonObject = await rest(self.service.agent, name)
        return found

    def url(self, name: str, step: int) -> str:
        """Return where a step is undone."""
        return self.endpoint.url(f"/{name}/{step}")
