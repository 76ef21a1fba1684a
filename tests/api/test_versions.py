"""ETag, If-None-Match, If-Match and the long poll: what moves a version, who may decide on which, and who waits without cost."""

import asyncio
import re

import httpx
import pytest

from tests.conftest import StartService
from tests.factories import Client, JsonObject, Service, do_step, undo_at
from tests.fakes import FakeEndpoint, Reply
from tests.probes import call_of, fetch, rest

STRONG = re.compile(r'"v[0-9]+"')
PATIENCE_SECONDS = 20.0
SESSION, EFFECT = "/sessions/s", "/sessions/s/effects/1"


def code(response: httpx.Response) -> tuple[int, str]:
    """Return status and code of a refusal."""
    return response.status_code, response.json()["code"]


async def tags(client: Client) -> tuple[str, str]:
    """Return the entity tags of session `s` and its first effect."""
    found = [(await client.get(path)).headers["ETag"] for path in (SESSION, EFFECT)]
    assert all(STRONG.fullmatch(tag) for tag in found)
    return found[0], found[1]


def number(tag: str) -> int:
    """Return the version in a tag."""
    return int(tag.strip('"v'))


async def test_version_moves_with_what_is_visible_and_nothing_else(service: Service, endpoint: FakeEndpoint) -> None:
    """Reads, refusals, repeats and signs of life leave it; every visible change moves it, the effect's only with the effect."""
    undo = undo_at(endpoint.url("/undo"))
    await service.agent.intercept("s", step_index=1, compensation=undo)
    before = await tags(service.agent)
    assert await tags(service.operator) == before
    for response in (
        await service.agent.touch("s"),
        await service.agent.complete("s"),
        await service.agent.intercept("s", step_index=1, compensation=undo),
        await service.agent.intercept("s", step_index=1, args={"other": 1}),
        await service.agent.put("/sessions/s"),
        await service.agent.fail_effect("s", 9),
    ):
        assert response.status_code in {200, 404, 409}
    assert await tags(service.agent) == before

    await service.agent.intercept("s", step_index=2, compensation=undo)
    second = await tags(service.agent)
    assert (number(second[0]) > number(before[0]), second[1]) == (True, before[1])
    await service.agent.commit("s", 1, {"id": 1})
    committed = await tags(service.agent)
    assert (number(committed[0]) > number(second[0]), number(committed[1]) > number(second[1])) == (True, True)
    await service.agent.commit("s", 1, {"id": 1})
    assert code(await service.agent.commit("s", 1, {"id": 2})) == (409, "result_differs")
    assert await tags(service.agent) == committed
    await rest(service.agent, "s")
    undone = await tags(service.agent)
    assert (number(undone[0]) > number(committed[0]), number(undone[1]) > number(committed[1])) == (True, True)


async def test_attempts_do_not_move_the_version(service: Service, endpoint: FakeEndpoint) -> None:
    """A page that shows a session is not stale because an undo is tried once more."""
    gates = [asyncio.Event(), asyncio.Event()]
    endpoint.script("/undo", *(Reply(status=503, gate=gate) for gate in gates), Reply())
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    await service.agent.fail("s")
    await endpoint.wait_for_requests(1)
    first = await tags(service.operator)
    gates[0].set()
    await endpoint.wait_for_requests(2)
    assert (await call_of(service.database_url, "s", 1))["attempts"] == 2
    assert await tags(service.operator) == first
    unchanged = await service.operator.get(SESSION, headers={"If-None-Match": first[0]})
    assert unchanged.status_code == 304
    gates[1].set()
    await rest(service.agent, "s")
    assert number((await tags(service.operator))[0]) > number(first[0])


async def test_body_is_left_out_when_the_caller_has_it(service: Service, endpoint: FakeEndpoint) -> None:
    """If-None-Match compares weakly, takes lists and `*`; 304 has the tag and no body; another version gets the whole."""
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    for path in (SESSION, EFFECT):
        full = await service.agent.get(path)
        tag = full.headers["ETag"]
        for given in (tag, f"W/{tag}", f'"v0", {tag}', f'"other",W/{tag}', "*"):
            unchanged = await service.agent.get(path, headers={"If-None-Match": given})
            assert (unchanged.status_code, unchanged.content, unchanged.headers["ETag"]) == (304, b"", tag), given
        for given in ('"v0"', tag.strip('"'), '"v99999999999999999999"', "", '"', f'"{tag}'):
            changed = await service.agent.get(path, headers={"If-None-Match": given})
            assert (changed.status_code, changed.content) == (200, full.content), given
    assert (await service.agent.get("/sessions/none", headers={"If-None-Match": "*"})).status_code == 404


async def test_decision_is_refused_when_it_was_made_on_another_version(service: Service, endpoint: FakeEndpoint) -> None:
    """An operator's fail with If-Match acts on what was seen, or not at all; weak tags and strange ones match nothing."""
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    stale = (await tags(service.operator))[0]
    await service.agent.intercept("s", step_index=2, compensation=undo_at(endpoint.url("/undo")))
    current = (await tags(service.operator))[0]

    async def fail(given: str, session_id: str = "s") -> httpx.Response:
        return await service.operator.post(f"/sessions/{session_id}/fail", {"error": "stop"}, headers={"If-Match": given})

    for given in (stale, f"W/{current}", current.strip('"'), "v1", "", f"{stale}, W/{current}", f"*, {stale}"):
        refused = await fail(given)
        assert (code(refused), refused.json()["current_version"]) == ((412, "version_differs"), number(current)), given
    assert code(await fail(current, "none")) == (404, "session_not_found")
    assert code(await service.agent.complete("s", headers={"If-Match": stale})) == (412, "version_differs")
    assert (await service.agent.session("s"))["state"] == "active"
    assert "SESSION_FAILED" not in await service.operator.kinds("s")
    assert (await fail(f"{stale}, {current}")).status_code == 202
    assert (await rest(service.agent, "s"))["state"] == "compensated"
    assert code(await fail(current)) == (412, "version_differs")
    assert (await fail("*")).status_code == 202

    await service.agent.put("/sessions/any")
    assert (await fail("*", "any")).json()["state"] == "compensated"


async def test_one_decision_is_taken_when_two_operators_saw_the_same_version(service: Service, endpoint: FakeEndpoint) -> None:
    """The second one is told that the session moved, instead of failing what it did not see."""
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    tag = (await tags(service.operator))[0]
    answers = await asyncio.gather(
        *(client.post("/sessions/s/fail", {"error": "stop"}, headers={"If-Match": tag}) for client in (service.operator, service.admin))
    )
    assert sorted(answer.status_code for answer in answers) == [202, 412]
    assert (await service.operator.kinds("s")).count("SESSION_FAILED") == 1


async def test_waiting_caller_is_answered_when_its_call_is_cancelled(service: Service) -> None:
    """The long poll on a parked call ends with the failure of its session, not with the time it would have waited."""
    await service.agent.intercept("s", step_index=1, reversibility="irreversible")
    waiting = [
        asyncio.create_task(client.get(EFFECT, params={"wait_s": 55})) for client in (service.agent, service.operator, service.auditor)
    ]
    parked = await service.agent.get(EFFECT)
    assert (parked.json()["state"], [waiter.done() for waiter in waiting]) == ("awaiting_approval", [False] * 3)
    await service.agent.fail("s")
    async with asyncio.timeout(PATIENCE_SECONDS):
        answers = await asyncio.gather(*waiting)
    for answer in answers:
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
        assert answer.headers["ETag"] != parked.headers["ETag"]


async def test_wait_ends_when_its_time_is_over(service: Service, endpoint: FakeEndpoint) -> None:
    """Nothing happened: the caller gets what there is, or a 304 for it; calls that wait for nobody are answered at once."""
    await service.agent.intercept("s", step_index=1, reversibility="irreversible")
    waited, unchanged = await asyncio.gather(
        service.agent.get(EFFECT, params={"wait_s": 1}),
        service.agent.get(EFFECT, params={"wait_s": 1}, headers={"If-None-Match": (await service.agent.get(EFFECT)).headers["ETag"]}),
    )
    assert (waited.status_code, waited.json()["state"], unchanged.status_code) == (200, "awaiting_approval", 304)
    await do_step(service.agent, "t", 1, endpoint.url("/undo"))
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert (await service.agent.get("/sessions/t/effects/1", params={"wait_s": 55})).json()["state"] == "committed"
        assert (await service.agent.get("/sessions/t/effects/9", params={"wait_s": 55})).status_code == 404
    for bad in ("56", "-1", "1.5", "01", "x"):
        assert (await service.agent.get(EFFECT, params={"wait_s": bad})).status_code == 422


@pytest.mark.parametrize("kind", ["effect", "session"])
async def test_waiters_hold_no_connection(services: StartService, endpoint: FakeEndpoint, kind: str) -> None:
    """Ten callers wait on a pool of two, and the service answers everybody else meanwhile."""
    service = await services(database_connections=2, has_orchestrator=False)
    if kind == "effect":
        await service.agent.intercept("s", step_index=1, reversibility="irreversible")
        waiting = [asyncio.create_task(service.agent.get(EFFECT, params={"wait_s": 55})) for _ in range(10)]
    else:
        await do_step(service.agent, "s", 1, endpoint.url("/undo"))
        waiting = [asyncio.create_task(service.agent.fail("s", wait_s=55)) for _ in range(10)]
    others = [(await service.agent.put(f"/sessions/other-{count}")).status_code for count in range(20)]
    busy_sql = "SELECT count(*) AS n FROM pg_stat_activity WHERE application_name LIKE 'countermand api%' AND state <> 'idle'"
    assert others == [201] * 20
    assert [waiter.done() for waiter in waiting] == [False] * 10
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await fetch(service.database_url, f"{busy_sql} AND datname = current_database()"))[0]["n"]:
            pass  # a waiter looks by itself once a second: that is a moment, where holding a connection would be for good
    if kind == "effect":
        await service.agent.fail("s")
    else:
        await services(has_api=False)  # somebody who unwinds
    async with asyncio.timeout(PATIENCE_SECONDS):
        answers = await asyncio.gather(*waiting)
    shown: list[JsonObject] = [answer.json() for answer in answers]
    assert {answer["state"] for answer in shown} == {"cancelled" if kind == "effect" else "compensated"}


async def test_report_is_refused_when_it_was_made_on_another_version_of_the_effect(service: Service, endpoint: FakeEndpoint) -> None:
    """Effects hand out ETags, so reports on them honour If-Match; nothing is stored of a refused one."""
    (await service.agent.intercept("s", step_index=1, compensation=undo_at(endpoint.url("/s")))).raise_for_status()
    effect = "/sessions/s/effects/1"
    seen = (await service.agent.get(effect)).headers["ETag"]
    stale = await service.agent.post(f"{effect}/commit", {"result": 1}, headers={"If-Match": '"v999"'})
    assert (stale.status_code, stale.json()["code"]) == (412, "version_differs")
    assert (await service.agent.get(effect)).json()["state"] == "executing"
    assert (await service.agent.post(f"{effect}/commit", {"result": 1}, headers={"If-Match": seen})).status_code == 200
