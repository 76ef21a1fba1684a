"""Approval is bound to bytes: whatever else is presented, however alike it looks, does not run and ends the run. Must not forgive."""

import json
import unicodedata
from hashlib import sha256

import httpx
import pytest

from tests.conftest import StartService
from tests.factories import JsonObject, Service, do_step, park
from tests.fakes import FakeEndpoint
from tests.probes import rest

APPROVED = '{"amount":100,"to":"Zo\u00eb","memo":"rent/\\u00e9"}'

# What differs, and how much of what a reader would call the same thing it still is.
PRESENTED = {
    "a space after the colon": APPROVED.replace(":100", ": 100"),
    "a space before the brace": f"{APPROVED[:-1]} }}",
    "a newline at the end": f"{APPROVED}\n",
    "a newline at the start": f"\n{APPROVED}",
    "a byte order mark": f"\ufeff{APPROVED}",
    "another order of keys": '{"to":"Zo\u00eb","amount":100,"memo":"rent/\\u00e9"}',
    "a point and a zero": APPROVED.replace("100", "100.0"),
    "an exponent": APPROVED.replace("100", "1e2"),
    "a number as a string": APPROVED.replace("100", '"100"'),
    "one digit": APPROVED.replace("100", "101"),
    "one digit more": APPROVED.replace("100", "1000"),
    "the same letter decomposed": unicodedata.normalize("NFD", APPROVED),
    "the letter instead of its escape": APPROVED.replace("\\u00e9", "\u00e9"),
    "an escaped slash": APPROVED.replace("/", "\\/"),
    "an escape in capitals": APPROVED.replace("\\u00e9", "\\u00E9"),
    "a letter that looks alike": APPROVED.replace("amount", "\u0430mount"),
    "a key twice": f'{{"amount":999999,{APPROVED[1:]}',
    "a member more": f'{APPROVED[:-1]},"approved":true}}',
    "a member less": APPROVED.replace('"amount":100,', ""),
    "capitals": APPROVED.upper(),
    "its first half": APPROVED[: len(APPROVED) // 2],
    "nothing": "",
    "its fingerprint": sha256(APPROVED.encode()).hexdigest(),
}


def code(response: httpx.Response) -> tuple[int, str]:
    """Return status and code of a refusal."""
    return response.status_code, response.json()["code"]


async def begin(service: Service, endpoint: FakeEndpoint, name: str, payload: str = APPROVED) -> None:
    """Do one undoable step, and have a call at step 2 approved that the service would execute itself."""
    await do_step(service.agent, name, 1, endpoint.url(f"/undo/{name}"))
    await park(service.agent, name, 2, payload, tool="wire")
    (await service.operator.approve(name, 2)).raise_for_status()


@pytest.fixture
async def wired(services: StartService, endpoint: FakeEndpoint) -> Service:
    """Run a service that executes `wire` at the endpoint itself, so that the endpoint's log is the witness."""
    service = await services()
    registered = await service.admin.register("wire", reversibility="irreversible", action={"url": endpoint.url("/wire")})
    registered.raise_for_status()
    return service


async def assert_refused(service: Service, endpoint: FakeEndpoint, name: str, presented: str) -> None:
    """Hold everything that follows from other bytes against a session that was resumed with them."""
    for _ in range(2):  # consumed: the right bytes come too late, and are refused with the state
        late = await service.agent.resume(name, 2, APPROVED)
        assert (code(late), late.json()["state"]) == ((409, "already_decided"), "mismatched")
    session = await rest(service.agent, name)
    assert (session["state"], session["clean"], session["pivoted"]) == ("compensated", True, False)
    assert [request.path for request in endpoint.received if request.path != "/wire"].count(f"/undo/{name}") == 1
    effect = await service.agent.effect(name, 2)
    assert (effect["state"], effect["approval"]["state"], effect["released_to"]) == ("rejected", "mismatched", None)
    journal = await service.auditor.journal(name)
    assert [entry["kind"] for entry in journal if entry["step"] == 2] == ["AWAITING_APPROVAL", "APPROVED", "PAYLOAD_MISMATCH"]
    (evidence,) = [entry for entry in journal if entry["kind"] == "PAYLOAD_MISMATCH"]
    assert evidence["actor"] == "agent:agent-1"
    assert evidence["content"]["presented"]["text"] == presented
    assert (await service.auditor.get(f"/sessions/{name}/journal/verify")).json()["valid"] is True


async def test_table_holds_nothing_that_was_approved() -> None:
    """Every row differs from the approved bytes, and from every other row."""
    texts = [text.encode() for text in PRESENTED.values()]
    assert APPROVED.encode() not in texts
    assert len(set(texts)) == len(texts)
    same_value = ("a space after the colon", "another order of keys", "an exponent", "an escaped slash", "an escape in capitals")
    assert all(json.loads(PRESENTED[name]) == json.loads(APPROVED) for name in same_value)


async def test_call_does_not_run_when_its_bytes_are_not_the_approved_ones(wired: Service, endpoint: FakeEndpoint) -> None:
    """Refused, told in the journal with what was presented, consumed, unwound; the tool's endpoint never hears of it."""
    for number, (what, presented) in enumerate(PRESENTED.items()):
        name = f"s{number}"
        await begin(wired, endpoint, name)
        refused = await wired.agent.resume(name, 2, presented)
        assert code(refused) == (409, "payload_changed"), what
        await assert_refused(wired, endpoint, name, presented)
    assert endpoint.requests("/wire") == []


async def test_call_does_not_run_when_the_bytes_are_approved_for_another(wired: Service, endpoint: FakeEndpoint) -> None:
    """What a person approved for another tool, another step or another session is another payload here, though it was approved."""
    others = {"tool": '{"to":"bob"}', "step": '{"amount":7,"to":"carol"}', "session": '{"amount":8,"to":"dave"}'}
    for what, payload in others.items():
        name = f"other-{what}"
        if what == "session":
            await begin(wired, endpoint, "elsewhere", payload)
        else:
            await park(wired.agent, name, 1, payload, tool="send_email" if what == "tool" else "wire")
            (await wired.operator.approve(name, 1)).raise_for_status()
            (await wired.agent.resume(name, 1, payload, wait_s=20)).raise_for_status()
            if what == "tool":
                (await wired.agent.fail_effect(name, 1, "not_applied")).raise_for_status()
        await park(wired.agent, name, 2, APPROVED, tool="wire")
        (await wired.operator.approve(name, 2)).raise_for_status()
        assert code(await wired.agent.resume(name, 2, payload)) == (409, "payload_changed"), what
        assert (await wired.agent.effect(name, 2))["state"] == "rejected"
    assert [request.body.decode() for request in endpoint.requests("/wire")] == [others["step"]]
    released = await wired.agent.resume("elsewhere", 2, others["session"], wait_s=20)
    assert released.json()["decision"] == "executed", "the other session's own approval still stands"


async def test_call_runs_once_when_the_bytes_are_the_approved_ones(wired: Service, endpoint: FakeEndpoint) -> None:
    """The approved bytes, unevenly spaced or no JSON at all, reach the endpoint as they are, once; presented again they do nothing."""
    payloads = [APPROVED, *(text for text in PRESENTED.values() if text), '{ "a":1,"a":2 , "n":1.00e+2 }', "plain words", "\t\n \u2028"]
    for number, payload in enumerate(payloads):
        name = f"s{number}"
        await begin(wired, endpoint, name, payload)
        done = await wired.agent.resume(name, 2, payload, wait_s=20)
        assert (done.status_code, done.json()["decision"]) == (200, "executed"), payload
        again = await wired.agent.resume(name, 2, payload, wait_s=20)
        assert (code(again), again.json()["state"]) == ((409, "already_released"), "committed")
    assert [request.body for request in endpoint.received] == [payload.encode() for payload in payloads]
    assert len({request.key for request in endpoint.received}) == len(payloads)


async def test_fingerprint_that_was_recorded_is_that_of_the_bytes_when_the_call_was_asked_with_args(wired: Service) -> None:
    """Asked with `args`, bound is the compact text that the answer gives: the client's own spacing is another payload."""
    args: JsonObject = {"amount": 100, "to": "Zo\u00eb"}
    asked = await wired.agent.intercept("s", tool="wire", step_index=1, args=args)
    assert asked.json()["payload"] == '{"amount":100,"to":"Zo\u00eb"}'
    (await wired.operator.approve("s", 1, payload_sha256=sha256(asked.json()["payload"].encode()).hexdigest())).raise_for_status()
    assert code(await wired.agent.resume("s", 1, json.dumps(args, ensure_ascii=False))) == (409, "payload_changed")
