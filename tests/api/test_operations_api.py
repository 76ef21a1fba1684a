"""An operator's orders over HTTP: what each does, to whom it listens, when it is refused, and that a repeat does no harm."""

import asyncio
from typing import Any
from uuid import uuid4

import httpx
import pytest

from app.domain.model import Role
from tests.factories import Client, JsonObject, Service, park
from tests.fakes import FakeEndpoint, Mode, Reply
from tests.halts import LATER, REFUSED, WIRE, Night
from tests.operators import escalation, order, requests_of, settled, steps_of, told, undo_ids
from tests.probes import fetch, row_counts

ACTOR = "operator:operator-1"
RETRY_FACTS = ("reason", "was", "url", "attempts_before", "key_may_be_forgotten")


@pytest.fixture
def night(service: Service, endpoint: FakeEndpoint) -> Night:
    """Return one service and one endpoint on which things go wrong."""
    return Night(service=service, endpoint=endpoint)


def code(response: httpx.Response) -> tuple[int, str]:
    """Return status and code of a refusal."""
    return response.status_code, response.json()["code"]


def entries_of(session: JsonObject) -> list[str]:
    """Return the states of the undo stack, by ascending step."""
    return [entry["state"] for entry in reversed(session["undo_stack"])]


def states_of(session: JsonObject) -> list[str]:
    """Return the states of the effects, by ascending step."""
    return [effect["state"] for effect in session["effects"]]


def rest_of(session: JsonObject) -> tuple[str, str | None, bool]:
    """Return where a session rests: its state, why, and whether it is clean."""
    return session["state"], session["halt_reason"], session["clean"]


async def is_valid(client: Client, *session_ids: str) -> bool:
    """Tell whether the journals of these sessions verify."""
    found = [(await client.get(f"/sessions/{session_id}/journal/verify")).json() for session_id in session_ids]
    return all(chain["valid"] for chain in found)


async def retry(client: Client, session_id: str, step: int, reason: str = "because", **options: Any) -> httpx.Response:
    """Order the undo of one step to be tried again."""
    return await order(client, session_id, f"undo/{(await undo_ids(client, session_id))[step]}/retry", reason, **options)


async def skip(client: Client, session_id: str, step: int, reason: str = "because", **options: Any) -> httpx.Response:
    """Order the undo of one step to be left out."""
    return await order(client, session_id, f"undo/{(await undo_ids(client, session_id))[step]}/skip", reason, **options)


async def test_retry_sends_the_same_bytes_under_the_same_key_with_a_fresh_budget(night: Night) -> None:
    """What was refused once may be retried as often as at first; then the unwind goes on, and nothing was settled by hand."""
    operator = night.service.operator
    assert rest_of(await night.refused("s", 2, *[Reply(status=503)] * 3, Reply())) == ("halted", "compensation_failed", True)
    answer = await retry(operator, "s", 2, "the period is open again", params={"wait_s": 20})
    assert (answer.status_code, *rest_of(answer.json())) == (202, "compensated", None, True)
    assert steps_of(night.endpoint, "s") == [2, 2, 2, 2, 2, 1]
    tries = requests_of(night.endpoint, "s")[:-1]
    assert {(request.key, request.body) for request in tries} == {
        (f"undo-{answer.json()['undo_stack'][0]['undo_id']}", b'{"id":"s-2"}'),
    }
    assert [request.header("Countermand-Attempt") for request in tries] == ["1", "2", "3", "4", "5"]
    ((actor, body),) = await told(operator, "s", "RETRIED")
    assert (actor, [body[name] for name in RETRY_FACTS]) == (
        ACTOR,
        ["the period is open again", "compensation_failed", None, 1, False],
    )
    begun = [(body["attempts_before"], body["idempotency_key"]) for _, body in await told(operator, "s", "COMPENSATING")]
    assert [attempts for attempts, _ in begun] == [0, 1, 0]
    assert begun[0][1] == begun[1][1] == tries[0].key
    assert await is_valid(operator, "s")


async def test_retry_is_refused_when_a_newer_undo_is_unsettled_or_nothing_is_left_to_do(night: Night) -> None:
    """Newest first holds for people too; and what is done, or not halted, is not tried again."""
    operator, stranger = night.service.operator, await night.service.client(Role.OPERATOR, "operator-9", "globex")
    await night.refused("s", 3)
    ids = await undo_ids(operator, "s")
    before = await row_counts(night.service.database_url)
    for step in (1, 2):
        refused = await retry(operator, "s", step)
        assert (code(refused), refused.json()["next_undo_id"]) == ((409, "undo_not_next"), ids[3])
    assert code(await order(operator, "s", f"undo/{uuid4()}/retry")) == (404, "undo_not_found")
    assert (await order(operator, "s", "undo/three/retry")).status_code == 422
    assert code(await order(operator, "ghost", f"undo/{ids[3]}/retry")) == (404, "session_not_found")
    assert code(await order(stranger, "s", f"undo/{ids[3]}/retry")) == (404, "session_not_found")
    assert await row_counts(night.service.database_url) == before

    await night.run("active", 1)
    assert code(await retry(operator, "active", 1)) == (409, "session_not_halted")
    assert code(await order(operator, "active", f"undo/{ids[3]}/retry")) == (404, "undo_not_found")
    (await skip(operator, "s", 3)).raise_for_status()
    refused = await retry(operator, "s", 3)
    assert (code(refused), refused.json()["state"]) == ((409, "undo_settled"), "skipped")
    assert steps_of(night.endpoint, "s") == [3]


async def test_retry_may_pass_an_undo_that_failed_when_that_one_is_independent(night: Night) -> None:
    """The unwind went past an independent undo, so a person may too, whichever of several is mended first; the others are still owed."""
    operator = night.service.operator
    for step in (1, 3):
        night.endpoint.script(f"/s/{step}", REFUSED, Reply())
    for step in (1, 2, 3):
        await night.step("s", step, independent=True)
    halted = await night.failed("s")
    assert (rest_of(halted), entries_of(halted)) == (
        ("halted", "compensation_failed", True),
        ["failed", "compensated", "failed"],
    )
    lower = await retry(operator, "s", 1, params={"wait_s": 20})
    assert (rest_of(lower.json()), entries_of(lower.json())) == (
        ("halted", "compensation_failed", True),
        ["compensated", "compensated", "failed"],
    )
    upper = await retry(operator, "s", 3, params={"wait_s": 20})
    assert (rest_of(upper.json()), entries_of(upper.json())) == (("compensated", None, True), ["compensated"] * 3)
    assert steps_of(night.endpoint, "s") == [3, 2, 1, 1, 3]


async def test_undo_that_has_moved_is_sent_to_the_new_address_when_an_admin_says_so(night: Night) -> None:
    """Never other bytes and never another key; an operator may not say where, nor an admin name an address that is refused."""
    operator, admin = night.service.operator, night.service.admin
    moved = night.endpoint.url("/v2/undo")
    await night.refused("s", 2, REFUSED)
    assert code(await retry(operator, "s", 2, url=moved)) == (403, "role_not_allowed")
    refused = await retry(admin, "s", 2, url="http://169.254.169.254/latest")
    assert (code(refused), [error["pointer"] for error in refused.json()["errors"]]) == ((422, "url_refused"), ["/url"])
    assert (await night.service.operator.session("s"))["state"] == "halted"
    answer = await retry(admin, "s", 2, "the ledger has moved", url=moved, params={"wait_s": 20})
    assert (answer.status_code, *rest_of(answer.json())) == (202, "compensated", None, True)
    old, new, _ = requests_of(night.endpoint, "s")
    assert [request.path for request in (old, new)] == ["/s/2", "/v2/undo"]
    assert (old.key, old.body) == (new.key, new.body)
    ((actor, body),) = await told(operator, "s", "RETRIED")
    assert (actor, body["url"]) == ("admin:admin-1", moved)
    assert answer.json()["undo_stack"][0]["url"] == moved

    await night.ordered("t", 2)
    (await skip(admin, "t", 2)).raise_for_status()
    assert code(await retry(admin, "t", 1, url=moved)) == (409, "undo_not_sent")


async def test_retry_is_flagged_when_the_endpoint_may_have_forgotten_the_key(night: Night) -> None:
    """A day after the first attempt a repeat may be taken for a new call: the person is warned before, and the journal says so after."""
    operator, database_url = night.service.operator, night.service.database_url
    for name, hours in (("fresh", 23), ("old", 25)):
        await night.refused(name, 2)
        aged = "UPDATE outgoing_calls SET first_sent_at = first_sent_at - make_interval(hours => $2) WHERE session_id = $1"
        await fetch(database_url, aged, name, hours)
        package = await escalation(operator, name)
        warned = [move["name"] for move in package["moves"] if "more than 24 h ago" in (move["warning"] or "")]
        assert warned == (["retry", "unwind"] if name == "old" else [])
        (await retry(operator, name, 2)).raise_for_status()
        ((_, body),) = await told(operator, name, "RETRIED")
        assert body["key_may_be_forgotten"] is (name == "old")
        assert (await settled(operator, name))["state"] == "compensated"


async def test_skipped_undo_is_never_sent_and_the_session_waits_for_the_unwind(night: Night) -> None:
    """By hand it counts as undone, else it is let stand; both leave the session with the person, and it is not clean any more."""
    operator = night.service.operator
    await night.refused("s", 4)
    by_hand = await skip(operator, "s", 4, "reversed in the back office", by_hand=True)
    assert (by_hand.status_code, *rest_of(by_hand.json())) == (200, "halted", "compensation_failed", False)
    (await skip(operator, "s", 2, "the customer keeps it")).raise_for_status()
    session = await operator.session("s")
    assert (entries_of(session), states_of(session)) == (
        ["pending", "skipped", "pending", "compensated"],
        ["committed", "committed", "committed", "compensated"],
    )
    assert [entry["by_hand"] for entry in session["undo_stack"]] == [True, False, False, False]
    assert session["undo_stack"][0]["compensated_at"] is not None
    assert steps_of(night.endpoint, "s") == [4]

    repeated = [await skip(operator, "s", 4, "again", by_hand=True), await skip(operator, "s", 2, "again")]
    assert [answer.status_code for answer in repeated] == [200, 200]
    assert code(await skip(operator, "s", 4)) == (409, "undo_settled")
    assert code(await skip(operator, "s", 2, by_hand=True)) == (409, "undo_settled")
    answer = await order(operator, "s", "unwind", params={"wait_s": 20})
    assert rest_of(answer.json()) == ("compensated", None, False)
    assert steps_of(night.endpoint, "s") == [4, 3, 1]
    assert [(actor, body["reason"], body["by_hand"]) for actor, body in await told(operator, "s", "SKIPPED")] == [
        (ACTOR, "the customer keeps it", False)
    ]
    assert (await told(operator, "s", "COMPENSATED"))[0][1]["reason"] == "reversed in the back office"
    assert await is_valid(operator, "s")


async def test_skip_is_refused_when_there_is_nothing_to_skip(night: Night) -> None:
    """Only an unsettled undo of a halted session of the org can be left out."""
    operator, stranger = night.service.operator, await night.service.client(Role.OPERATOR, "operator-9", "globex")
    await night.run("s", 1)
    (undo_id,) = (await undo_ids(operator, "s")).values()
    assert code(await skip(operator, "s", 1)) == (409, "session_not_halted")
    assert code(await order(operator, "s", f"undo/{uuid4()}/skip")) == (404, "undo_not_found")
    assert code(await order(stranger, "s", f"undo/{undo_id}/skip")) == (404, "session_not_found")
    await night.failed("s")
    assert code(await skip(operator, "s", 1)) == (409, "session_not_halted")
    assert (await night.service.agent.session("s"))["clean"] is True


async def test_unwind_goes_past_the_pivot_when_it_is_ordered(night: Night) -> None:
    """By itself nothing is undone past the pivot; a person may order it, and what is irreversible stands."""
    operator = night.service.operator
    assert rest_of(await night.pivoted("s", 3)) == ("halted", "failed_after_pivot", False)
    assert night.endpoint.received == []
    answer = await order(operator, "s", "unwind", "the customer agreed", params={"wait_s": 20})
    assert (answer.status_code, *rest_of(answer.json())) == (202, "compensated", None, False)
    assert states_of(answer.json()) == ["compensated", "compensated", "committed"]
    assert steps_of(night.endpoint, "s") == [2, 1]
    assert await told(operator, "s", "UNWIND_ORDERED") == [
        (ACTOR, {"reason": "the customer agreed", "was": "failed_after_pivot", "retried": []})
    ]


async def test_unwind_takes_failed_undos_for_pending_when_it_is_ordered(night: Night) -> None:
    """One order for all that failed: newest first, same key, same bytes, each with a fresh budget."""
    operator = night.service.operator
    for step in (1, 3):
        night.endpoint.script(f"/s/{step}", REFUSED, *[Reply(status=503)] * 3, Reply())
        await night.step("s", step, independent=True)
    await night.failed("s")
    ids = await undo_ids(operator, "s")
    answer = await order(operator, "s", "unwind", params={"wait_s": 20})
    assert rest_of(answer.json()) == ("compensated", None, True)
    assert steps_of(night.endpoint, "s") == [3, 1, *[3] * 4, *[1] * 4]
    assert len({(request.key, request.body) for request in requests_of(night.endpoint, "s")}) == 2
    ((_, body),) = await told(operator, "s", "UNWIND_ORDERED")
    assert body["retried"] == [ids[3], ids[1]]


async def test_unwind_closes_the_session_when_nothing_is_left(night: Night) -> None:
    """Once everything is settled by hand there is nothing to send: compensated, but not clean. A repeat changes nothing."""
    operator = night.service.operator
    await night.refused("s", 1)
    (await skip(operator, "s", 1, by_hand=True)).raise_for_status()
    assert rest_of((await order(operator, "s", "unwind")).json()) == ("compensated", None, False)
    before = await row_counts(night.service.database_url)
    assert (await order(operator, "s", "unwind")).status_code == 202
    assert await row_counts(night.service.database_url) == before
    assert steps_of(night.endpoint, "s") == [1]


async def test_halt_takes_effect_at_the_next_boundary_when_a_request_is_in_flight(night: Night) -> None:
    """The answer is awaited: a yes counts, anything that would have been retried is given up; nothing more is sent."""
    operator = night.service.operator
    gates = {name: asyncio.Event() for name in ("yes", "later", "last")}
    for name, reply in {"yes": Reply(gate=gates["yes"]), "later": Reply(status=503, gate=gates["later"])}.items():
        night.endpoint.script(f"/{name}/2", reply)
        await night.run(name)
    night.endpoint.script("/last/1", Reply(gate=gates["last"]))
    await night.run("last", 1)
    for name, gate in gates.items():
        (await night.service.agent.fail(name)).raise_for_status()
        await night.reached(name)
        answer = await order(operator, name, "halt", "stop the bleeding")
        assert (answer.status_code, answer.json()["state"]) == (202, "compensating")
        assert (await order(operator, name, "halt", "stop it")).status_code == 202
        gate.set()
    found = {name: await settled(operator, name) for name in gates}
    assert {name: (*rest_of(session), entries_of(session)) for name, session in found.items()} == {
        "yes": ("halted", "operator", True, ["pending", "compensated"]),
        "later": ("halted", "operator", True, ["pending", "failed"]),
        "last": ("compensated", None, True, ["compensated"]),
    }
    assert [len(requests_of(night.endpoint, name)) for name in gates] == [1, 1, 1]
    assert [await told(operator, name, "HALT_ORDERED") for name in gates] == [[(ACTOR, {"reason": "stop the bleeding"})]] * 3
    ((_, body),) = await told(operator, "later", "COMPENSATION_FAILED")
    assert (body["reason"], body["status"]) == ("operator", 503)
    assert await is_valid(operator, *gates)


async def test_halt_takes_effect_when_the_endpoint_hangs_until_the_attempt_is_over(night: Night) -> None:
    """An attempt whose end nobody tells ends at its own deadline, and is the last."""
    night.endpoint.script("/s/2", Reply(mode=Mode.HANG))
    await night.run("s", 2, timeout_ms=3_000)
    (await night.service.agent.fail("s")).raise_for_status()
    await night.reached("s")
    answer = await order(night.service.operator, "s", "halt", params={"wait_s": 20})
    assert rest_of(answer.json()) == ("halted", "operator", True)
    assert (entries_of(answer.json()), steps_of(night.endpoint, "s")) == (["pending", "failed"], [2])


async def test_halt_takes_effect_at_once_when_nothing_is_in_flight(night: Night) -> None:
    """An undo that waits for its next try is given up, and can be retried from there; a halted session stays as it is."""
    operator = night.service.operator
    night.endpoint.script("/s/2", LATER, Reply())
    halted = await night.ordered("s")
    assert (*rest_of(halted), entries_of(halted)) == ("halted", "operator", True, ["pending", "failed"])
    before = await row_counts(night.service.database_url)
    assert (await order(operator, "s", "halt")).json()["state"] == "halted"
    assert await row_counts(night.service.database_url) == before
    answer = await retry(operator, "s", 2, params={"wait_s": 20})
    assert rest_of(answer.json()) == ("compensated", None, True)
    assert steps_of(night.endpoint, "s") == [2, 2, 1]


async def test_halt_is_refused_when_the_session_is_not_unwinding(night: Night) -> None:
    """There is nothing to stop while a run goes on, nor after its end."""
    operator = night.service.operator
    await night.run("active", 1)
    await night.run("done", 1)
    await night.failed("done")
    for name, state in (("active", "active"), ("done", "compensated")):
        refused = await order(operator, name, "halt")
        assert (code(refused), refused.json()["state"]) == ((409, "session_not_unwinding"), state)
    assert code(await order(operator, "ghost", "halt")) == (404, "session_not_found")


async def test_halt_waits_for_the_action_when_a_failed_session_awaits_one(night: Night) -> None:
    """What an action comes to decides first: past the pivot that is the reason; else the order stops the unwind before it begins."""
    service, operator = night.service, night.service.operator
    for name, status in (("went", 200), ("refused", 400)):
        gate = asyncio.Event()
        night.endpoint.script(f"/act/{name}", Reply(status=status, gate=gate))
        (
            await service.admin.register(
                f"wire-{name}",
                reversibility="irreversible",
                approval={"required": True},
                action={"url": night.endpoint.url(f"/act/{name}")},
            )
        ).raise_for_status()
        await night.run(name, 1)
        await night.released(name, 2, f"wire-{name}")
        await night.reached(name)
        assert (await service.agent.fail(name)).json()["state"] == "failed"
        assert (await order(operator, name, "halt")).json()["state"] == "failed"
        assert code(await order(operator, name, "resolve")) == (409, "session_not_halted")
        gate.set()
        await settled(operator, name)
    found = {name: await operator.session(name) for name in ("went", "refused")}
    assert {name: (*rest_of(session), entries_of(session)) for name, session in found.items()} == {
        "went": ("halted", "failed_after_pivot", False, ["pending"]),
        "refused": ("halted", "operator", True, ["pending"]),
    }
    assert {request.path for request in night.endpoint.received} == {"/act/went", "/act/refused"}


async def test_resolve_closes_the_session_as_it_stands(night: Night) -> None:
    """What is not undone stays so, for good: no order and no report moves it any more."""
    operator = night.service.operator
    await night.refused("s", 2)
    answer = await order(operator, "s", "resolve", "written off")
    assert (answer.status_code, *rest_of(answer.json())) == (200, "resolved", "compensation_failed", False)
    before = await row_counts(night.service.database_url)
    assert (await order(operator, "s", "resolve", "again")).json()["state"] == "resolved"
    for refused in (await retry(operator, "s", 2), await skip(operator, "s", 2), await order(operator, "s", "unwind")):
        assert code(refused) == (409, "session_not_halted")
    assert code(await order(operator, "s", "halt")) == (409, "session_not_unwinding")
    assert await row_counts(night.service.database_url) == before
    assert entries_of(await operator.session("s")) == ["pending", "failed"]
    assert await told(operator, "s", "RESOLVED") == [(ACTOR, {"reason": "written off", "was": "compensation_failed"})]
    await night.run("active", 1)
    assert code(await order(operator, "active", "resolve")) == (409, "session_not_halted")
    assert steps_of(night.endpoint, "s") == [2]


async def test_settle_says_what_is_known_of_an_unknown_call_when_the_run_goes_on(night: Night) -> None:
    """`committed` binds the undo to the result, `not_applied` takes the undo away; both are the end of not knowing."""
    service, operator = night.service, night.service.operator
    for step in (1, 2):
        await night.open_step("s", step, args={"id": {"$ref": "result#/id"}})
        (await service.agent.fail_effect("s", step)).raise_for_status()
    happened = await order(operator, "s", "effects/1/settle", "seen in the ledger", outcome="committed", result={"id": 7})
    assert (happened.status_code, happened.json()["state"], happened.json()["result"]) == (200, "committed", {"id": 7})
    nothing = await order(operator, "s", "effects/2/settle", "not in the ledger", outcome="not_applied")
    assert (nothing.json()["state"], nothing.json()["outcome"]) == ("failed", "not_applied")
    assert nothing.json()["error"] == "settled as not applied: not in the ledger"

    before = await row_counts(service.database_url)
    for step, known in ((1, {"outcome": "committed", "result": {"id": 7}}), (1, {"outcome": "committed"}), (2, {"outcome": "not_applied"})):
        assert (await order(operator, "s", f"effects/{step}/settle", "again", **known)).status_code == 200
    for step, other in ((1, {"outcome": "not_applied"}), (1, {"outcome": "committed", "result": 8}), (2, {"outcome": "committed"})):
        assert code(await order(operator, "s", f"effects/{step}/settle", **other)) == (409, "not_unknown")
    assert code(await order(operator, "s", "effects/9/settle", outcome="committed")) == (404, "effect_not_found")
    assert await row_counts(service.database_url) == before
    assert [(actor, body["outcome"], body["reason"]) for actor, body in await told(operator, "s", "SETTLED")] == [
        (ACTOR, "committed", "seen in the ledger"),
        (ACTOR, "not_applied", "not in the ledger"),
    ]
    session = await night.failed("s")
    assert (rest_of(session), entries_of(session)) == (("compensated", None, True), ["compensated", "skipped"])
    assert [(request.body, request.header("Countermand-Outcome")) for request in requests_of(night.endpoint, "s")] == [
        (b'{"id":7}', "committed")
    ]


async def test_settle_decides_the_pivot_when_the_irreversible_call_was_unknown(night: Night) -> None:
    """`not_applied` takes the pivot back, so that the rest can be undone; what a person had to find out is not clean."""
    service, operator = night.service, night.service.operator
    for name, outcome in (("lifted", "not_applied"), ("stands", "committed")):
        await night.run(name, 1)
        await night.released(name, 2)
        assert rest_of(await night.failed(name)) == ("halted", "failed_after_pivot", False)
        (await order(operator, name, "effects/2/settle", outcome=outcome)).raise_for_status()
        assert (await operator.session(name))["pivoted"] is (outcome == "committed")
        answer = await order(operator, name, "unwind", params={"wait_s": 20})
        assert (*rest_of(answer.json()), entries_of(answer.json())) == ("compensated", None, False, ["compensated"])
    await night.run("active", 1)
    await night.released("active", 2)
    (await service.agent.fail_effect("active", 2)).raise_for_status()
    assert (await operator.session("active"))["pivoted"] is True
    (await order(operator, "active", "effects/2/settle", outcome="not_applied")).raise_for_status()
    assert ((await operator.session("active"))["pivoted"], (await night.failed("active"))["clean"]) == (False, True)


async def test_settle_is_refused_when_nothing_is_unknown_or_the_worker_has_the_session(night: Night) -> None:
    """A call that runs is its agent's to report on; one that is being undone is not settled under the worker's hands."""
    service, operator = night.service, night.service.operator
    await night.open_step("s", 1)
    refused = await order(operator, "s", "effects/1/settle", outcome="committed")
    assert (code(refused), refused.json()["state"]) == ((409, "not_unknown"), "executing")
    gate = asyncio.Event()
    night.endpoint.script("/s/2", Reply(gate=gate))
    await night.open_step("s", 2)
    (await service.agent.fail("s")).raise_for_status()
    await night.reached("s")
    assert code(await order(operator, "s", "effects/1/settle", outcome="committed")) == (409, "session_not_halted")
    gate.set()
    assert (await settled(operator, "s"))["state"] == "compensated"
    assert code(await order(operator, "s", "effects/1/settle", outcome="not_applied")) == (409, "session_not_halted")
    assert await told(operator, "s", "SETTLED") == []


async def test_operator_fails_a_session_when_it_is_active_or_waits_for_approval(night: Night) -> None:
    """The run is over for its agent: what it did is undone, what waits is cancelled, and the journal names the operator and the reason."""
    service, operator = night.service, night.service.operator
    await night.run("active", 2)
    await night.run("waiting", 1)
    await park(service.agent, "waiting", 2, WIRE)
    for name, states in (("active", ["compensated", "compensated"]), ("waiting", ["compensated", "cancelled"])):
        answer = await operator.fail(name, error="the agent runs wild", wait_s=20)
        assert (answer.status_code, rest_of(answer.json()), states_of(answer.json())) == (202, ("compensated", None, True), states)
        ((actor, body),) = await told(operator, name, "SESSION_FAILED")
        assert (actor, body["error"]) == (ACTOR, "the agent runs wild")
        assert code(await service.agent.intercept(name, step_index=9, args={})) == (409, "session_not_active")
        assert (await operator.fail(name, error="again")).status_code == 202
    assert (steps_of(night.endpoint, "active"), steps_of(night.endpoint, "waiting")) == ([2, 1], [1])


ORDERS: dict[str, JsonObject] = {
    "undo/{undo_id}/retry": {},
    "undo/{undo_id}/skip": {"by_hand": True},
    "unwind": {},
    "halt": {},
    "resolve": {},
    "effects/1/settle": {"outcome": "committed"},
}


async def test_orders_are_operators_alone_and_need_a_reason(night: Night) -> None:
    """An agent cannot clear its own failure, an auditor only reads; nobody orders without saying why, or says more than is taken."""
    service = night.service
    await night.refused("s", 2)
    ids = await undo_ids(service.operator, "s")
    before = await row_counts(service.database_url)
    for path, body in ORDERS.items():
        below = path.format(undo_id=ids[2])
        for client in (service.agent, service.auditor):
            assert code(await order(client, "s", below, **body)) == (403, "role_not_allowed"), path
            assert code(await order(client, "ghost", below, **body)) == (403, "role_not_allowed"), path
        for reason in (None, "", 7, "x" * 2_001):
            refused = await service.operator.post(f"/sessions/s/{below}", {**body, "reason": reason})
            assert (refused.status_code, [error["pointer"] for error in refused.json()["errors"]]) == (422, ["/reason"]), (path, reason)
        unreasoned = await service.operator.post(f"/sessions/s/{below}", body)
        assert (unreasoned.status_code, [error["pointer"] for error in unreasoned.json()["errors"]]) == (422, ["/reason"]), path
        more = await order(service.operator, "s", below, **body, payload="{}")
        assert (more.status_code, [error["pointer"] for error in more.json()["errors"]]) == (422, ["/payload"]), path
        assert (await order(service.operator, "s", below, params={"force": "1"}, **body)).status_code == 422, path
    assert await row_counts(service.database_url) == before


async def test_order_is_given_once_when_it_is_repeated_under_its_key(night: Night) -> None:
    """A lost answer is had again, whatever has happened since; a stale view, or another request under the key, is refused."""
    service, operator = night.service, night.service.operator
    bodies: dict[str, JsonObject] = {"retry": {}, "skip": {"by_hand": True}, "unwind": {}, "resolve": {}}
    for name, body in bodies.items():
        await night.refused(name, 2)
        undo = f"undo/{(await undo_ids(operator, name))[2]}/{name}"
        path = undo if name in {"retry", "skip"} else name
        seen = (await operator.get(f"/sessions/{name}")).headers["ETag"]
        stale = await order(operator, name, path, headers={"Idempotency-Key": "k", "If-Match": '"v1"'}, **body)
        assert (code(stale), stale.json()["current_version"]) == ((412, "version_differs"), int(seen.strip('"v'))), name
        headers = {"Idempotency-Key": "k", "If-Match": seen}
        first = await order(operator, name, path, headers=headers, **body)
        assert (first.is_success, "Idempotent-Replayed" in first.headers) == (True, False), name
        await settled(operator, name)
        before = await row_counts(service.database_url)
        again = await order(operator, name, path, headers=headers, **body)
        assert (again.status_code, again.content, again.headers["Idempotent-Replayed"]) == (first.status_code, first.content, "true"), name
        assert code(await order(operator, name, path, "another reason", headers=headers, **body)) == (422, "key_reused"), name
        assert await row_counts(service.database_url) == before, name
    assert {name: steps_of(night.endpoint, name) for name in ("retry", "skip", "unwind", "resolve")} == {
        "retry": [2, 2, 1],
        "skip": [2],
        "unwind": [2, 2, 1],
        "resolve": [2],
    }


async def test_settle_is_bound_to_the_version_of_the_call_when_the_caller_names_one(night: Night) -> None:
    """What is settled is what was looked at: a report that came between makes the order stale."""
    operator, agent = night.service.operator, night.service.agent
    await night.open_step("s", 1)
    seen = (await operator.get("/sessions/s/effects/1")).headers["ETag"]
    (await agent.fail_effect("s", 1)).raise_for_status()
    stale = await order(operator, "s", "effects/1/settle", outcome="not_applied", headers={"If-Match": seen})
    assert code(stale) == (412, "version_differs")
    current = (await operator.get("/sessions/s/effects/1")).headers["ETag"]
    answer = await order(operator, "s", "effects/1/settle", outcome="not_applied", headers={"If-Match": current})
    assert (answer.status_code, answer.json()["state"]) == (200, "failed")


async def test_late_commit_is_kept_and_never_crashes_when_it_meets_an_operators_orders(night: Night) -> None:
    """Whatever a person has ordered of a call, its late report is refused, journaled, and read for what it is worth then."""
    service, operator = night.service, night.service.operator
    gate = asyncio.Event()
    # Its undo was sent and refused, and waits for its turn again: the repeat may meet nothing, so a person looks.
    night.endpoint.script("/retried/1", REFUSED, Reply())
    night.endpoint.script("/retried/2", REFUSED, Reply(gate=gate))
    for step in (1, 2):
        await night.open_step("retried", step, independent=True)
    await night.failed("retried")
    (await order(operator, "retried", "unwind")).raise_for_status()
    await night.reached("retried", 3)
    late = await service.agent.commit("retried", 1, {"id": 1})
    gate.set()
    assert code(late) == (409, "session_not_active")
    session = await settled(operator, "retried")
    assert (*rest_of(session), entries_of(session)) == ("halted", "late_effect", False, ["pending", "compensated"])
    assert (states_of(session), session["effects"][0]["outcome"]) == (["compensation_failed", "compensated"], "committed")

    # A person has let it stand, or undone it by other means: that it happened is what that person reckoned with.
    for name, state in (("stands", "committed"), ("by-hand", "compensated")):
        await night.open_step(name, 1, on_unknown="escalate")
        assert (await night.failed(name))["halt_reason"] == "unknown_outcome"
        (await skip(operator, name, 1, by_hand=name == "by-hand")).raise_for_status()
        (await order(operator, name, "unwind")).raise_for_status()
        assert code(await service.agent.commit(name, 1, {"id": 1})) == (409, "session_not_active")
        session = await operator.session(name)
        assert (*rest_of(session), states_of(session)) == ("compensated", None, False, [state])
        assert len(await told(operator, name, "LATE_COMMIT")) == 1

    # Halted or resolved: a person owns it, and it is recorded for that person.
    await night.refused("owned", 1)
    for verb in ("", "resolve"):
        if verb:
            (await order(operator, "owned", verb)).raise_for_status()
        assert code(await service.agent.commit("owned", 1, {"id": verb})) == (409, "session_not_active")
    assert (await operator.session("owned"))["state"] == "resolved"
    assert len(await told(operator, "owned", "LATE_COMMIT")) == 2
    assert await is_valid(operator, "retried", "stands", "by-hand", "owned")
