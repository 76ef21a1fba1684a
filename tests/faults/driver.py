"""Does what a plan says, as agents, operators and vandals would, and writes down what each of them saw. Must not judge any of it.

Clients speak HTTP to either replica, ask again under the same Idempotency-Key when an answer was lost, and believe nothing but answers.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import Any

import httpx

from app.domain.model import Role
from app.engine.clock import SystemClock
from tests.faults.evidence import Call, Checkpoint, Evidence, Export, Heard, JsonObject, Place, credit_of, path_of
from tests.faults.plans import Decision, Ending, FaultPlan, Kind, Plan, Report, Rescue, SessionPlan, StepPlan
from tests.faults.processes import Keys, make_keys
from tests.faults.world import World

ANSWER_SECONDS = 2.5  # a client's patience with one attempt
PATIENCE_SECONDS = 60.0  # and with a call: faults are over long before, so an answer has to come
QUIET_SECONDS = 60.0  # after the last fault everything has to be at rest within this; far more than it takes on a free machine
PAUSE_SECONDS = 0.1  # between two attempts, and between two looks at something that has to change
OVER = frozenset({"halted", "compensated", "completed", "resolved"})
NOT_ACTIVE = ("session_not_active",)
OTHER_BYTES = '{"amount":1000000}'


@dataclass(slots=True, kw_only=True)
class Clients:
    """Everybody who calls the service: asks until there is an answer, and keeps the history."""

    world: World
    http: httpx.AsyncClient
    keys: dict[str, Keys]
    calls: list[Call] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def call(  # noqa: PLR0913 - what a request consists of, and what may come of it
        self,
        session: SessionPlan,
        op: str,
        method: str,
        path: str,
        body: Any = None,
        *,
        role: Role = Role.AGENT,
        org: str | None = None,
        step: int | None = None,
        key: str | None = None,
        allowed: tuple[str, ...] = (),
        must_refuse: bool = False,
    ) -> Call:
        """Ask until the answer is there, or patience has an end; each attempt is one line of the history."""
        number = next(self._numbers)
        until = monotonic() + PATIENCE_SECONDS
        for attempt in itertools.count(1):
            asked = Call(
                number=number,
                attempt=attempt,
                org=org or session.org,
                who=f"{role.value}:{role.value}-1",
                op=op,
                session=session.name,
                step=step,
                method=method,
                path=path,
                key=key,
                body=body,
                allowed=allowed,
                must_refuse=must_refuse,
                asked_at=monotonic(),
            )
            self.calls.append(asked)
            await self._ask(asked, role, self.world.base_urls[(number + attempt) % len(self.world.base_urls)])
            if asked.heard is not Heard.INFO or monotonic() > until:
                return asked
            await SystemClock().sleep(PAUSE_SECONDS)
        raise AssertionError("counting has no end")

    async def _ask(self, asked: Call, role: Role, base_url: str) -> None:
        """Send one attempt and write down what was heard of it; 503, and no answer at all, say nothing of what was done."""
        headers = {"Authorization": f"Bearer {self.keys[asked.org][role]}"}
        if asked.key is not None:
            headers["Idempotency-Key"] = asked.key
        url, body = f"{base_url}/v1{asked.path}", {} if asked.body is None else asked.body
        try:
            answer = await self.http.request(asked.method, url, headers=headers, json=None if asked.method == "GET" else body)
        except httpx.TransportError as error:
            asked.heard, asked.answered_at, asked.answer = Heard.INFO, monotonic(), repr(error)
            return
        asked.answered_at, asked.status = monotonic(), answer.status_code
        asked.answer = answer.json() if "json" in answer.headers.get("Content-Type", "") else answer.text
        asked.heard = Heard.OK if answer.is_success else Heard.INFO if answer.status_code >= 500 else Heard.FAIL

    async def act(self, place: Place, key: str, payload: str) -> bool:
        """Run a tool as an agent does: ask its endpoint under the forward key until it says done; tell whether it did."""
        url = self.world.endpoint.url(path_of(place))
        for _ in range(20):
            try:
                answer = await self.http.post(url, content=payload, headers={"Idempotency-Key": key})
            except httpx.TransportError:
                continue
            if answer.is_success:
                return True
        return False


@dataclass(slots=True, kw_only=True)
class Story:
    """One session, from its first call to its end; `begins` and `fails` are for whoever waits for these moments.

    A run that does not fail has its second moment when it is over.
    """

    clients: Clients
    plan: SessionPlan
    begins: asyncio.Event = field(default_factory=asyncio.Event)
    fails: asyncio.Event = field(default_factory=asyncio.Event)
    late: list[Callable[[], Awaitable[object]]] = field(default_factory=list)
    is_failed: bool = False

    @property
    def path(self) -> str:
        """Where the session is spoken to."""
        return f"/sessions/{self.plan.name}"

    @property
    def failed_meanwhile(self) -> tuple[str, ...]:
        """Refusals that are in order because the session may be failed for its silence at any moment."""
        return (*NOT_ACTIVE, "step_settled") if self.plan.ending is Ending.ABANDON else ()

    def _over_meanwhile(self, step: StepPlan) -> tuple[str, ...]:
        """Return also those that are because a question whose asker's answer was lost may have expired when it is asked again."""
        is_short = step.kind in {Kind.WIRE, Kind.ACTION} and step.decision is Decision.EXPIRE
        return (*NOT_ACTIVE, "step_settled") if is_short else self.failed_meanwhile

    async def tell(self) -> None:
        """Live through it."""
        await SystemClock().sleep(self.plan.starts_after)
        self.begins.set()
        try:
            await self._live()
        finally:
            self.fails.set()

    async def _live(self) -> None:
        idle = {"idle_seconds": 1} if self.plan.ending is Ending.ABANDON else {}
        opened = await self.ask("open", "PUT", "", {"agent": "refund-agent", **idle})
        if opened.heard is not Heard.OK:
            return
        for step in self.plan.steps:
            if not await self._step(step):
                break
        await self._end()

    async def ask(self, op: str, method: str, path: str, body: Any = None, *, is_twin: bool = False, **options: Any) -> Call:
        """Ask something of this session; twins ask the same at once, of both replicas, under one key."""
        if method == "POST":
            options.setdefault("key", f"{op} {path}".replace(" ", ":"))
        twins = [self.clients.call(self.plan, op, method, f"{self.path}{path}", body, **options) for _ in range(1 + is_twin)]
        return (await asyncio.gather(*twins))[0]

    def place(self, step: StepPlan, what: str) -> Place:
        """Return where the endpoint plays a part of a step."""
        return Place(self.plan.org, self.plan.name, step.ordinal, what)

    def url(self, step: StepPlan, what: str) -> str:
        """Return the URL of that."""
        return self.clients.world.endpoint.url(path_of(self.place(step, what)))

    def payload(self, step: StepPlan) -> str:
        """Return a call's arguments, which name their org."""
        return f'{{"of":"{self.plan.org}", "session":"{self.plan.name}","step":{step.ordinal},"amount":25.00}}'

    async def _step(self, step: StepPlan) -> bool:
        """Live through one call; tell whether the run goes on."""
        tool, described = f"{self.plan.name}-{step.ordinal}", self._description(step)
        if step.is_registered or step.kind in {Kind.WIRE, Kind.ACTION}:
            registered = await self.clients.call(self.plan, "register", "PUT", f"/tools/{tool}", described, role=Role.ADMIN)
            if registered.heard is not Heard.OK:
                return False
            described = {}
        numbered = {"step_index": step.ordinal * 10} if step.is_numbered else {}
        body = {"tool": tool, "payload": self.payload(step), **numbered, **described}
        asked = await self.ask(
            "intercept", "POST", "/intercept", body, is_twin=step.is_twin, key=f"step-{step.ordinal}", allowed=self._over_meanwhile(step)
        )
        if asked.heard is not Heard.OK:
            return False
        if step.ordinal == 1 and step.is_numbered:
            await self._ask_with_other_bytes(asked, body)
        if asked.answer["decision"] == "await_approval":
            return await _Question(story=self, step=step, index=asked.answer["step_index"]).answer(asked.answer)
        return await self.run(step, asked.answer, Role.AGENT)

    def _description(self, step: StepPlan) -> JsonObject:
        """Return what is told of a call's tool."""
        retries = {"max_retries": step.max_retries}
        match step.kind:
            case Kind.READ:
                return {"reversibility": "read_only"}
            case Kind.WIRE | Kind.ACTION:
                action = {"action": {"url": self.url(step, "action"), **retries}} if step.kind is Kind.ACTION else {}
                approval = {"approval": {"required": True, "ttl_seconds": 1}} if step.decision is Decision.EXPIRE else {}
                return {"reversibility": "irreversible", **action, **approval}
            case _:
                undo = {
                    "url": self.url(step, "undo"),
                    "description": "independent" if step.is_independent else "in order",
                    "args": {"of": self.plan.org, "credit": {"$ref": "result#/credit"}},
                    "unknown": {"args": {"of": self.plan.org, "find": {"$ref": "effect#/forward_key"}}},
                    "independent": step.is_independent,
                    **retries,
                }
                return {"reversibility": "compensatable", "compensation": undo}

    async def _ask_with_other_bytes(self, asked: Call, body: JsonObject) -> None:
        """Ask for the same step with other arguments, as an agent does that forgot what it had asked for."""
        codes = ("step_reused", "key_reused", *NOT_ACTIVE)
        changed = {**body, "payload": OTHER_BYTES}
        await self.ask("intercept", "POST", "/intercept", changed, key=asked.key, allowed=codes, must_refuse=True)

    async def run(self, step: StepPlan, told: JsonObject, role: Role) -> bool:
        """Do what was released, and report on it as the plan has it; tell whether the run goes on."""
        index, report = told["step_index"], step.report
        does_act = report not in {Report.NOT_APPLIED, Report.LATE_NOT_APPLIED} and step.kind is not Kind.READ
        if does_act and not await self.clients.act(self.place(step, "act"), told["forward_key"], told["payload"]):
            report = Report.UNKNOWN
        result, effect = {"result": {"credit": credit_of(self.plan.org, step.ordinal)}}, f"/effects/{index}"
        options: JsonObject = {"step": index, "role": role, "allowed": self.failed_meanwhile}
        late: JsonObject = {"step": index, "role": role, "allowed": NOT_ACTIVE, "must_refuse": True}
        match report:
            case Report.COMMIT:
                done = await self.ask("commit", "POST", f"{effect}/commit", result, is_twin=step.is_twin, **options)
                return done.heard is Heard.OK
            case Report.NOT_APPLIED | Report.UNKNOWN:
                failure = {"error": "the tool said no", "outcome": report.value}
                done = await self.ask("fail_effect", "POST", f"{effect}/fail", failure, **options)
                return done.heard is Heard.OK
            case Report.LATE_COMMIT:
                self.late.append(lambda: self.ask("commit", "POST", f"{effect}/commit", result, **late))
            case Report.LATE_NOT_APPLIED:
                failure = {"error": "it never ran", "outcome": "not_applied"}
                self.late.append(lambda: self.ask("fail_effect", "POST", f"{effect}/fail", failure, **late))
            case _:
                pass
        return True

    async def _end(self) -> None:
        """End the run, and see it through to where it rests."""
        if self.plan.ending is Ending.COMPLETE and not self.is_failed:
            await self.ask("complete", "POST", "/complete")
            return
        if self.plan.ending is Ending.ABANDON:
            if (await self.wait(lambda view: view["state"] != "active"))["state"] == "awaiting_approval":
                return  # waiting for a person is no silence: nothing fails this run
        else:
            self.fails.set()
            is_twin = self.plan.steps[0].is_twin
            await self.ask("fail", "POST", "/fail", {"error": "the run failed"}, is_twin=is_twin)
        for report in self.late:
            await report()
        view = await self._rest()
        if view["state"] == "halted":
            await self._rescue(view)

    async def _rescue(self, view: JsonObject) -> None:
        """Do as an operator what the plan has for a halted session."""
        failed = [entry["undo_id"] for entry in view["undo_stack"] if entry["state"] == "failed"]
        because: JsonObject = {"reason": "it was looked into"}
        options: JsonObject = {"role": Role.OPERATOR, "allowed": ("session_not_halted",)}
        match self.plan.rescue:
            case Rescue.RETRY if failed:
                await self.ask("retry", "POST", f"/undo/{failed[0]}/retry", because, **options)
            case Rescue.SKIP if failed:
                by_hand = {**because, "by_hand": len(failed[0]) % 2 == 0}
                await self.ask("skip", "POST", f"/undo/{failed[0]}/skip", by_hand, **options)
                await self.ask("unwind", "POST", "/unwind", because, **options)
            case Rescue.UNWIND:
                await self.ask("unwind", "POST", "/unwind", because, **options)
            case Rescue.RESOLVE:
                await self.ask("resolve", "POST", "/resolve", because, **options)
            case _:
                return
        await self._rest()

    async def _rest(self) -> JsonObject:
        return await self.wait(lambda view: view["state"] in OVER)

    async def wait(self, is_so: Callable[[JsonObject], bool]) -> JsonObject:
        """Look at the session again and again until it is so; what never comes about is for the checker to find."""
        until = monotonic() + QUIET_SECONDS
        while True:
            seen = await self.ask("look", "GET", "")
            view: JsonObject = seen.answer if seen.heard is Heard.OK else {"state": "unseen", "undo_stack": []}
            if is_so(view) or monotonic() > until:
                return view
            await SystemClock().sleep(PAUSE_SECONDS)


@dataclass(slots=True, kw_only=True)
class _Question:
    """One call that a person is asked about."""

    story: Story
    step: StepPlan
    index: int

    async def answer(self, told: JsonObject) -> bool:
        """Decide as the plan has it, and go on from there; tell whether the run goes on."""
        match self.step.decision:
            case Decision.APPROVE:
                await self._ask("approve", {"reason": "fine"}, Role.OPERATOR, is_twin=self.step.is_twin)
                return await self._resume(told)
            case Decision.CONTEST:
                decided: JsonObject = {"allowed": ("already_decided", *self.story.failed_meanwhile)}
                yes, _ = await asyncio.gather(
                    self._ask("approve", {"reason": "fine"}, Role.OPERATOR, **decided),
                    self._ask("reject", {"reason": "not fine", "then": "continue"}, Role.ADMIN, **decided),
                )
                return await self._resume(told) if yes.heard is Heard.OK else True
            case Decision.REJECT_AND_CONTINUE:
                no = await self._ask("reject", {"reason": "no", "then": "continue"}, Role.OPERATOR)
                return no.heard is Heard.OK
            case Decision.REJECT:
                await self._ask("reject", {"reason": "no"}, Role.OPERATOR)
                self.story.is_failed = True
            case Decision.MISMATCH:
                await self._ask("approve", {"reason": "fine"}, Role.OPERATOR)
                allowed = ("payload_changed", "already_decided", *NOT_ACTIVE)
                await self._ask("resume", {"payload": OTHER_BYTES}, Role.AGENT, allowed=allowed, must_refuse=True)
                self.story.is_failed = True
            case Decision.EXPIRE:
                await self.story.wait(lambda view: view["state"] != "awaiting_approval")
                self.story.is_failed = True
            case _:
                pass
        return False

    async def _resume(self, told: JsonObject) -> bool:
        """Release the call, by two at once where it is contested, and have it run by whoever it was released to."""
        roles = [Role.AGENT, Role.OPERATOR] if self.step.decision is Decision.CONTEST or self.step.is_twin else [Role.AGENT]
        allowed = () if len(roles) == 1 else ("already_released",)
        body = {"payload": told["payload"]}
        answers = await asyncio.gather(*(self._ask("resume", body, role, allowed=allowed) for role in roles))
        released = [(role, one.answer) for role, one in zip(roles, answers, strict=True) if one.heard is Heard.OK]
        if not released:
            return False
        role, answer = released[0]
        if answer["decision"] == "execute":
            return await self.story.run(self.step, answer, role)
        await self.story.wait(lambda view: not self._is_in_flight(view))
        return True

    def _is_in_flight(self, view: JsonObject) -> bool:
        return any(effect["step_index"] == self.index and effect["state"] == "executing" for effect in view.get("effects", ()))

    async def _ask(self, op: str, body: JsonObject, role: Role, **options: Any) -> Call:
        return await self.story.ask(op, "POST", f"/effects/{self.index}/{op}", body, role=role, step=self.index, **options)


async def drive(world: World, plan: Plan) -> Evidence:
    """Do all that a plan says, wait until everything is at rest, and return what is known of it."""
    keys = {org: await make_keys(world.database_url, org) for org in plan.orgs}
    script = {}
    for session in plan.sessions:
        for step in session.steps:
            script[path_of(Place(session.org, session.name, step.ordinal, "undo"))] = step.undo
            script[path_of(Place(session.org, session.name, step.ordinal, "act"))] = step.act
            script[path_of(Place(session.org, session.name, step.ordinal, "action"))] = step.act
    await world.endpoint.play(script)
    offset = world.endpoint.log_path.stat().st_size
    world.inflicted = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=40)
    async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_SECONDS, limits=limits) as http:
        clients = Clients(world=world, http=http, keys=keys)
        evidence = Evidence(seed=plan.seed, calls=clients.calls, faults=world.inflicted)
        async with asyncio.TaskGroup() as group:
            stories = [Story(clients=clients, plan=session) for session in plan.sessions]
            for story in stories:
                group.create_task(story.tell())
            breaking = group.create_task(_break(world, plan.faults, stories))
            group.create_task(_look_across(clients, plan))
            group.create_task(_take_checkpoints(clients, plan, evidence))
            group.create_task(_mend_after(breaking, world))
        await _Collector(clients=clients, plan=plan, evidence=evidence).collect()
    evidence.requests = [one for one in world.endpoint.received(offset) if one.path.split("/")[1] in plan.orgs]
    evidence.crashes = world.take_problems()
    return evidence


async def _break(world: World, faults: Sequence[FaultPlan], stories: Sequence[Story]) -> None:
    """Do each fault in its time; one that takes long does not keep the next one waiting."""

    async def later(fault: FaultPlan) -> None:
        story = stories[fault.session]
        await (story.fails if fault.is_at_failure else story.begins).wait()
        await SystemClock().sleep(fault.after)
        await world.inflict(fault)

    await asyncio.gather(*map(later, faults))


async def _mend_after(breaking: "asyncio.Task[None]", world: World) -> None:
    """Mend everything as soon as nothing more will break: the stories need that for their ends."""
    await asyncio.wait({breaking})
    await world.mend()


async def _look_across(clients: Clients, plan: Plan) -> None:
    """Look at another org's sessions, which must not be there for this one."""
    dice = Random(plan.seed)
    names = {org: {session.name for session in plan.sessions if session.org == org} for org in plan.orgs}
    for session in dice.sample(plan.sessions, 3):
        other = next(org for org in plan.orgs if org != session.org)
        if session.name not in names[other]:
            options: JsonObject = {"org": other, "allowed": ("session_not_found",), "must_refuse": True}
            await clients.call(session, "look across", "GET", f"/sessions/{session.name}", role=Role.OPERATOR, **options)
            await SystemClock().sleep(PAUSE_SECONDS)


async def _take_checkpoints(clients: Clients, plan: Plan, evidence: Evidence) -> None:
    """Note some journals in the middle of things."""
    dice = Random(plan.seed)
    for session in dice.sample(plan.sessions, 3):
        await SystemClock().sleep(dice.uniform(0.2, 0.8))
        path = f"/sessions/{session.name}/journal?limit=1000"
        found = await clients.call(session, "journal", "GET", path, role=Role.AUDITOR, allowed=("session_not_found",))
        if found.heard is Heard.OK:
            evidence.checkpoints.append(Checkpoint(org=session.org, name=session.name, journal=found.answer["items"]))


@dataclass(slots=True, kw_only=True)
class _Collector:
    """Waits for quiet, then reads everything through the API."""

    clients: Clients
    plan: Plan
    evidence: Evidence

    async def collect(self) -> None:
        """Read everything that the service shows."""
        await self._wait_for_quiet()
        listed = {}
        for org in self.plan.orgs:
            listed[org] = [item["session_id"] for item in await self._all(org, "/sessions")]
            for name in listed[org]:
                self.evidence.exports.append(await self._export(org, name))
        self.evidence.listed = listed
        self.evidence.escalated = {org: [item["session_id"] for item in await self._all(org, "/escalations")] for org in self.plan.orgs}

    async def _wait_for_quiet(self) -> None:
        until = monotonic() + QUIET_SECONDS
        while monotonic() < until:
            states = [item["state"] for org in self.plan.orgs for item in await self._all(org, "/sessions")]
            if not {"failed", "compensating"} & set(states):
                return
            await SystemClock().sleep(PAUSE_SECONDS)

    async def _export(self, org: str, name: str) -> Export:
        path = f"/sessions/{name}"
        return Export(
            org=org,
            name=name,
            view=await self._get(org, path),
            journal=await self._all(org, f"{path}/journal"),
            verified=await self._get(org, f"{path}/journal/verify"),
        )

    async def _all(self, org: str, path: str) -> list[JsonObject]:
        """Return a list, page by page."""
        items: list[JsonObject] = []
        cursor = ""
        while True:
            page = await self._get(org, f"{path}?limit=200{cursor}")
            items += page["items"]
            if page["next_cursor"] is None:
                return items
            cursor = f"&cursor={page['next_cursor']}"

    async def _get(self, org: str, path: str) -> JsonObject:
        """Read something as the org's auditor; this is no part of the history."""
        reader = Clients(world=self.clients.world, http=self.clients.http, keys=self.clients.keys)
        found = await reader.call(self.plan.sessions[0], "read", "GET", path, role=Role.AUDITOR, org=org)
        if found.heard is not Heard.OK:
            message = f"cannot read {path}: {found.status} {found.answer}"
            raise AssertionError(message)
        answer: JsonObject = found.answer
        return answer
