"""Every reason to halt has its escalation and its way out: the commands of the escalation itself, pasted into a shell, as it advises.

Must not give an order that the escalation does not show.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.domain.escalation import ADVICE, REASONS
from app.domain.model import HaltReason
from app.domain.sending import POISON_AFTER_INTERRUPTED
from tests.conftest import StartService
from tests.factories import JsonObject, Service, open_service
from tests.fakes import FakeEndpoint, Reply
from tests.halts import LATER, Night
from tests.operators import Shell, escalation, is_handed_back, move_of, open_shell, paste, requests_of, settled, steps_of
from tests.probes import fetch

OPERATOR = "operator:operator-1"
REASON = "ticket 4921: it's Alice's, $5 & more; $(touch run) `touch run`"
KINDS = {"retry": "RETRIED", "unwind": "UNWIND_ORDERED", "resolve": "RESOLVED", "settle": "SETTLED", "skip": "SKIPPED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One move of the escalation: of which step, with what it says; `result` is what the tool returned."""

    name: str
    step: int | None = None
    by_hand: bool = False
    outcome: str | None = None
    result: str = ""

    @property
    def body(self) -> JsonObject:
        """What the move's body says."""
        return ({"by_hand": True} if self.by_hand else {}) | ({"outcome": self.outcome} if self.outcome else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way out of a halt: the orders, where the session rests after them, and whose undos the endpoint has seen in all."""

    orders: tuple[Order, ...]
    undone: list[int]
    state: str = "compensated"
    is_clean: bool = False


UNWIND, RESOLVE = Order(name="unwind"), Order(name="resolve")
RETRY = Order(name="retry", step=2)
BY_HAND = Order(name="skip", step=2, by_hand=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """One reason: how a session comes to it, and the ways out that are walked."""

    reason: HaltReason
    bring: Callable[[Night, str], Awaitable[object]]
    ways: tuple[Way, ...]


async def late(night: Night, name: str) -> None:
    """Have the undo of step 2 put off past its deadline."""
    night.endpoint.script(f"/{name}/2", LATER, Reply())
    await night.run(name, 2)
    (await night.service.agent.fail(name)).raise_for_status()
    await is_handed_back(night.service.database_url, name)
    over = (
        "UPDATE outgoing_calls SET deadline_at = clock_timestamp(), due_at = clock_timestamp() WHERE session_id = $1 AND due_at IS NOT NULL"
    )
    await fetch(night.service.database_url, over, name)
    await night.failed(name)


async def unresolved(night: Night, name: str) -> None:
    """Have the result of step 2 lack what its undo needs."""
    await night.run(name, 1)
    await night.step(name, 2, args={"id": {"$ref": "result#/number"}})
    await night.failed(name)


async def unknown(night: Night, name: str) -> None:
    """Have nobody say what came of step 2, whose tool wants a person to find out."""
    await night.run(name, 1)
    await night.open_step(name, 2, on_unknown="escalate", args={"id": {"$ref": "result#/id"}})
    await night.failed(name)


async def late_at_rest(night: Night, name: str) -> None:
    """Have step 2 turn out to have happened when all was undone."""
    await night.run(name, 1)
    await night.open_step(name, 2)
    await night.failed(name)
    await night.service.agent.commit(name, 2, {"id": "late"})


HALTS = (
    Halt(
        reason=HaltReason.COMPENSATION_FAILED,
        bring=Night.refused,
        ways=(
            Way(orders=(RETRY,), undone=[2, 2, 1], is_clean=True),
            Way(orders=(BY_HAND, UNWIND), undone=[2, 1]),
        ),
    ),
    Halt(
        reason=HaltReason.DEADLINE_EXCEEDED,
        bring=late,
        ways=(
            Way(orders=(BY_HAND, UNWIND), undone=[2, 1]),
            Way(orders=(RETRY,), undone=[2, 2, 1], is_clean=True),
        ),
    ),
    Halt(
        reason=HaltReason.FAILED_AFTER_PIVOT,
        bring=Night.pivoted,
        ways=(
            Way(orders=(UNWIND,), undone=[1]),
            Way(orders=(RESOLVE,), undone=[], state="resolved"),
        ),
    ),
    Halt(
        reason=HaltReason.UNRESOLVED_REFERENCE,
        bring=unresolved,
        ways=(Way(orders=(BY_HAND, UNWIND), undone=[1]),),
    ),
    Halt(
        reason=HaltReason.UNKNOWN_OUTCOME,
        bring=unknown,
        ways=(
            Way(orders=(Order(name="settle", step=2, outcome="not_applied"), UNWIND), undone=[1], is_clean=True),
            Way(orders=(Order(name="settle", step=2, outcome="committed", result='{"id":"s-2"}'), UNWIND), undone=[2, 1], is_clean=True),
        ),
    ),
    Halt(
        reason=HaltReason.LATE_EFFECT,
        bring=Night.late,
        ways=(
            Way(orders=(UNWIND,), undone=[2, 1]),
            Way(orders=(RESOLVE,), undone=[2], state="resolved"),
        ),
    ),
    Halt(
        reason=HaltReason.LATE_EFFECT,
        bring=late_at_rest,
        ways=(Way(orders=(UNWIND,), undone=[2, 1]),),
    ),
    Halt(
        reason=HaltReason.OPERATOR,
        bring=Night.ordered,
        ways=(
            Way(orders=(UNWIND,), undone=[2, 2, 1], is_clean=True),
            Way(orders=(RESOLVE,), undone=[2], state="resolved"),
        ),
    ),
)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Return a shell that finds nothing to run but curl."""
    return open_shell(tmp_path)


@pytest.mark.parametrize("halt", HALTS, ids=lambda halt: f"{halt.reason}-{halt.bring.__name__}")
async def test_way_out_is_walked_by_the_escalations_own_commands(
    halt: Halt, service: Service, endpoint: FakeEndpoint, shell: Shell
) -> None:
    """The advice names the orders, their commands are pasted as they stand, and the session ends as the person was told."""
    night = Night(service=service, endpoint=endpoint)
    for number, way in enumerate(halt.ways):
        name = f"s{number}"
        await halt.bring(night, name)
        await walk(night, shell, name, halt.reason, way)
    for order in {order.name for way in halt.ways for order in way.orders}:
        assert order in ADVICE[halt.reason], "who only reads the advice would not find it"


async def test_way_out_of_egress_denied_is_walked_once_the_address_is_allowed(
    services: StartService, database_url: str, endpoint: FakeEndpoint, shell: Shell
) -> None:
    """Nothing had been sent where it may not go; after the retry it is, as if nothing had happened."""
    service = await services(has_orchestrator=False)
    night = Night(service=service, endpoint=endpoint)
    await night.run("s", 2)
    async with open_service(database_url, has_api=False, egress_allow=""):
        assert (await night.failed("s"))["halt_reason"] == "egress_denied"
    assert endpoint.connections == 0
    await services(has_api=False)
    await walk(night, shell, "s", HaltReason.EGRESS_DENIED, Way(orders=(RETRY,), undone=[2, 1], is_clean=True))


async def test_way_out_of_poison_is_walked_when_the_worker_is_mended(
    services: StartService, database_url: str, endpoint: FakeEndpoint, shell: Shell
) -> None:
    """After ten attempts whose end nobody recorded a person has it tried again, or undoes it by other means."""
    service = await services(has_orchestrator=False)
    night = Night(service=service, endpoint=endpoint)
    ways = {
        "s": Way(orders=(RETRY,), undone=[2, 1], is_clean=True),
        "t": Way(orders=(BY_HAND, UNWIND), undone=[1]),
    }
    for name in ways:
        await night.run(name, 2)
        (await service.agent.fail(name)).raise_for_status()
        await die_in_mid_attempt(database_url, name, night.url(name, 2))
    await services(has_api=False)
    for name, way in ways.items():
        assert (await night.failed(name))["halt_reason"] == "poison"
        assert requests_of(endpoint, name) == []
        await walk(night, shell, name, HaltReason.POISON, way)
    (retried,) = [request for request in requests_of(endpoint, "s") if request.path == "/s/2"]
    assert retried.header("Countermand-Attempt") == str(POISON_AFTER_INTERRUPTED + 1)


def test_every_reason_is_walked_here() -> None:
    """A reason that is added and has no way out is noticed."""
    walked = {halt.reason for halt in HALTS} | {HaltReason.EGRESS_DENIED, HaltReason.POISON}
    assert walked == set(HaltReason) == set(REASONS) == set(ADVICE)


async def walk(night: Night, shell: Shell, name: str, reason: HaltReason, way: Way) -> None:
    """Give the orders of a way one after the other, each from a fresh look, and hold what came of it against what was promised."""
    operator = night.service.operator
    package = await escalation(operator, name)
    assert (package["reason"], package["explanation"], package["advice"]) == (reason, REASONS[reason], ADVICE[reason])
    for order in way.orders:
        move = move_of(await escalation(operator, name), order.name, order.step, **order.body)
        environment = {"RESULT": order.result} if order.result else {}
        answer = await paste(shell, operator, move["curl"], REASON, **environment)
        assert answer.is_success, answer.text
        again = await paste(shell, operator, move["curl"], REASON, **environment)
        assert (again.status_code, again.content, again.headers["Idempotent-Replayed"]) == (answer.status_code, answer.content, "true")
    session = await settled(operator, name)
    assert (session["state"], session["clean"]) == (way.state, way.is_clean)
    assert not (shell.path / "run").exists()
    expect_one_request_each(night.endpoint, name, way.undone)
    await expect_told(night, name, way)


def expect_one_request_each(endpoint: FakeEndpoint, name: str, undone: list[int]) -> None:
    """Hold the endpoint's log against the way: newest first, and however often an undo was sent, one key and the same bytes."""
    assert steps_of(endpoint, name) == undone
    sent = {(request.path, request.key, request.body) for request in requests_of(endpoint, name)}
    assert len(sent) == len(set(undone))
    assert all(endpoint.applications_of(key) <= 1 for _, key, _ in sent)


async def expect_told(night: Night, name: str, way: Way) -> None:
    """Find every order in the journal, in order, under the operator's name and with the reason; the chain verifies."""
    operator = night.service.operator
    journal = await operator.journal(name)
    halted = max(entry["seq"] for entry in journal if entry["kind"] == "HALTED")
    ordered = [entry for entry in journal if entry["seq"] > halted and entry["actor"] == OPERATOR and "reason" in json.loads(entry["body"])]
    told = [(entry["kind"], entry["step"]) for entry in ordered if json.loads(entry["body"])["reason"] == REASON]
    assert told == [("COMPENSATED" if order.by_hand else KINDS[order.name], order.step) for order in way.orders]
    chain = (await operator.get(f"/sessions/{name}/journal/verify")).json()
    assert (chain["valid"], chain["entry_count"]) == (True, len(journal))


async def die_in_mid_attempt(database_url: str, name: str, url: str) -> None:
    """Leave the undo of step 2 as ten workers leave it that died after counting their attempt."""
    call = (
        "UPDATE outgoing_calls SET is_attempt_open = true, attempts = $2, interrupted = $3, first_sent_at = clock_timestamp(), "
        "url = $4, body = $5, outcome = 'committed' WHERE session_id = $1 AND step_index = 2"
    )
    body = json.dumps({"id": f"{name}-2"}, separators=(",", ":")).encode()
    await fetch(database_url, call, name, POISON_AFTER_INTERRUPTED, POISON_AFTER_INTERRUPTED - 1, url, body)
    await fetch(database_url, "UPDATE undo_stack SET state = 'running' WHERE session_id = $1 AND stack_position = 2", name)
    await fetch(database_url, "UPDATE effect_log SET state = 'compensating' WHERE session_id = $1 AND step_index = 2", name)
    await fetch(database_url, "UPDATE sessions SET state = 'compensating' WHERE session_id = $1", name)
