"""Idempotency-Key: a repeat gets the stored answer, another request is told so, twins do the work once; intercept is never stored."""

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from app.domain.model import Role
from tests.factories import Client, JsonObject, Service, do_step, undo_at
from tests.fakes import FakeEndpoint
from tests.probes import rest, row_counts

RAW = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One repeatable request about session `s`, whose step 1 is executing: where, with what, and the kind that it journals."""

    path: str
    body: JsonObject
    other: JsonObject
    kind: str
    status: int = 200
    is_settled: bool = False  # step 1 has to be committed first


VERBS = {
    "commit": Verb(path="effects/1/commit", body={"result": {"id": 1}}, other={"result": {"id": 2}}, kind="EXECUTED"),
    "fail_effect": Verb(
        path="effects/1/fail", body={"error": "timeout"}, other={"error": "timeout", "outcome": "not_applied"}, kind="FAILED"
    ),
    "fail_session": Verb(path="fail", body={"error": "broke"}, other={"error": "broke again"}, kind="SESSION_FAILED", status=202),
    "complete": Verb(path="complete", body={}, other={"because": "done"}, kind="COMPLETED", is_settled=True),
}


def code(response: httpx.Response) -> tuple[int, str]:
    """Return status and code of a refusal."""
    return response.status_code, response.json()["code"]


def is_replayed(response: httpx.Response) -> bool:
    """Tell whether the answer is said to be an earlier one."""
    return "true" in response.headers.get_list("Idempotent-Replayed")


async def post(client: Client, path: str, body: object, key: str, **headers: str) -> httpx.Response:
    """Post about session `s` under a key."""
    return await client.post(f"/sessions/s/{path}", body, headers={"Idempotency-Key": key, **headers})


async def begin(service: Service, endpoint: FakeEndpoint, *, is_settled: bool = False) -> None:
    """Let step 1 of session `s` be under way, or done."""
    (await service.agent.intercept("s", step_index=1, compensation=undo_at(endpoint.url("/undo")))).raise_for_status()
    if is_settled:
        (await service.agent.commit("s", 1, {})).raise_for_status()


@pytest.mark.parametrize("name", VERBS)
async def test_answer_is_the_stored_one_when_the_request_is_repeated(service: Service, endpoint: FakeEndpoint, name: str) -> None:
    """Same key, same bytes back, also after the session moved on; another body is refused; nothing is done a second time."""
    verb = VERBS[name]
    await begin(service, endpoint, is_settled=verb.is_settled)
    first = await post(service.agent, verb.path, verb.body, "key-1")
    assert (first.status_code, is_replayed(first)) == (verb.status, False)
    again = await post(service.agent, verb.path, verb.body, "key-1")
    assert (again.status_code, again.content, is_replayed(again)) == (verb.status, first.content, True)
    await service.agent.fail("s", wait_s=25)
    ended = await service.agent.session("s")
    assert ended["state"] == ("completed" if name == "complete" else "compensated")

    before = await row_counts(service.database_url)
    later = await post(service.agent, verb.path, verb.body, "key-1")
    assert (later.status_code, later.content, is_replayed(later)) == (verb.status, first.content, True)
    assert later.headers["content-type"] == first.headers["content-type"]
    if name == "complete":
        reused = await post(service.agent, "fail", {"error": "x"}, "key-1")  # a body of its own is all that `complete` refuses
        assert code(reused) == (409, "session_not_active")
    else:
        assert code(await post(service.agent, verb.path, verb.other, "key-1")) == (422, "key_reused")
    assert await row_counts(service.database_url) == before
    assert (await service.operator.kinds("s")).count(verb.kind) == 1
    assert len(endpoint.received) == (0 if name == "complete" else 1)


@pytest.mark.parametrize("name", VERBS)
async def test_ten_twins_do_it_once_when_they_come_at_once(service: Service, endpoint: FakeEndpoint, name: str) -> None:
    """Twins wait for one another; one does the work, the others are handed its answer."""
    verb = VERBS[name]
    await begin(service, endpoint, is_settled=verb.is_settled)
    answers = await asyncio.gather(*(post(service.agent, verb.path, verb.body, "twin") for _ in range(10)))
    assert {answer.status_code for answer in answers} == {verb.status}
    assert len({answer.content for answer in answers}) == 1
    assert sorted(map(is_replayed, answers)) == [False] + [True] * 9
    assert (await service.operator.kinds("s")).count(verb.kind) == 1


async def test_run_fails_once_when_fifty_twins_say_so(service: Service, endpoint: FakeEndpoint) -> None:
    """One failure, one unwind, one answer for all of them."""
    for step in (1, 2):
        await do_step(service.agent, "s", step, endpoint.url(f"/{step}"))
    answers = await asyncio.gather(*(post(service.agent, "fail", {"error": "broke"}, "twin") for _ in range(50)))
    assert {(answer.status_code, answer.content) for answer in answers} == {(202, answers[0].content)}
    assert sorted(map(is_replayed, answers)) == [False] + [True] * 49
    assert (await rest(service.agent, "s"))["state"] == "compensated"
    assert [request.path for request in endpoint.received] == ["/2", "/1"]
    assert (await service.operator.kinds("s")).count("SESSION_FAILED") == 1


async def test_one_of_two_requests_wins_when_they_share_a_key(service: Service, endpoint: FakeEndpoint) -> None:
    """Whichever comes first names the key; the rest of its kind are repeats, all others are refused."""
    await begin(service, endpoint)
    bodies = [{"result": {"n": number % 2}} for number in range(10)]
    answers = await asyncio.gather(*(post(service.agent, "effects/1/commit", body, "shared") for body in bodies))
    taken = [answer for answer in answers if answer.status_code == 200]
    assert (len(taken), len({answer.content for answer in taken})) == (5, 1)
    assert {code(answer) for answer in answers if answer.status_code != 200} == {(422, "key_reused")}


async def test_key_is_the_same_when_it_is_quoted_or_the_body_ordered_otherwise(service: Service, endpoint: FakeEndpoint) -> None:
    """The draft's quoted string and the bare habit are one key; members in another order are the same request, other literals are not."""
    await begin(service, endpoint)
    path = "/v1/sessions/s/effects/1/fail"

    async def send(key: str, body: bytes) -> httpx.Response:
        return await service.agent.request("POST", path, content=body, headers={**RAW, "Idempotency-Key": key})

    first = await send("k-1", b'{"error":"timeout","outcome":"unknown"}')
    assert first.status_code == 200
    for key in ('"k-1"', "k-1", ' "k-1" '):
        again = await send(key, b'{ "outcome": "unknown", "error": "timeout" }')
        assert (again.content, is_replayed(again)) == (first.content, True)
    assert code(await send("k-1", b'{"error":"timeout"}')) == (422, "key_reused")
    assert not is_replayed(await send("K-1", b'{"error":"timeout","outcome":"unknown"}'))

    commit = "/v1/sessions/s/effects/1/commit"
    for literal, expected in (("1.0", 200), ("1.0", 200), ("1", 422), ("1.00", 422)):
        body = f'{{"result":{literal}}}'.encode()
        answer = await service.agent.request("POST", commit, content=body, headers={**RAW, "Idempotency-Key": "number"})
        assert answer.status_code == expected


async def test_key_is_refused_when_it_is_not_one(service: Service, endpoint: FakeEndpoint) -> None:
    """One key of 1 to 255 visible ASCII characters, on every verb that takes one; the longest is taken."""
    await begin(service, endpoint)
    before = await row_counts(service.database_url)
    bad: list[Any] = [[("Idempotency-Key", key)] for key in ("", '""', "a b", "caf\u00e9", "x" * 256, "a\tb", '"a b"')]
    bad.append([("Idempotency-Key", "a"), ("Idempotency-Key", "a")])
    for headers in bad:
        for path in ("effects/1/commit", "effects/1/fail", "fail", "complete", "intercept"):
            sent = [(name, value.encode()) for name, value in [*headers, ("Authorization", f"Bearer {service.agent.key}")]]
            refused = await service.agent.http.post(f"/v1/sessions/s/{path}", json={}, headers=sent)
            assert code(refused) == (400, "bad_idempotency_key"), (path, headers)
    assert await row_counts(service.database_url) == before
    assert (await post(service.agent, "effects/1/commit", {}, "x" * 255)).status_code == 200


async def test_key_is_another_one_when_path_session_person_or_org_differ(service: Service, endpoint: FakeEndpoint) -> None:
    """A key means something only to who sent it, and only where."""
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    for session_id, step in (("s", 2), ("s", 3), ("t", 2)):
        undo = undo_at(endpoint.url("/undo"))
        (await service.agent.intercept(session_id, step_index=step, compensation=undo)).raise_for_status()
        headers = {"Idempotency-Key": "k"}
        answer = await service.agent.post(f"/sessions/{session_id}/effects/{step}/commit", {"result": step}, headers=headers)
        assert (answer.status_code, is_replayed(answer), answer.json()["step_index"]) == (200, False, step)
    by_agent = await post(service.agent, "fail", {"error": "broke"}, "k")
    by_operator = await post(service.operator, "fail", {"error": "stop it"}, "k")
    assert [(answer.status_code, is_replayed(answer)) for answer in (by_agent, by_operator)] == [(202, False), (202, False)]
    assert is_replayed(await post(service.operator, "fail", {"error": "stop it"}, "k"))

    stranger = await service.client(Role.AGENT, "agent-1", org="globex")
    assert code(await post(stranger, "fail", {"error": "broke"}, "k")) == (404, "session_not_found")
    colleague = await service.client(Role.AGENT, "agent-2")
    assert code(await post(colleague, "fail", {"error": "broke"}, "k")) == (404, "session_not_found")
    (await stranger.put("/sessions/s")).raise_for_status()
    assert not is_replayed(await post(stranger, "fail", {"error": "broke"}, "k"))
    same_person = await service.client(Role.AGENT, "agent-1")
    assert is_replayed(await post(same_person, "fail", {"error": "broke"}, "k"))


async def test_refusal_is_not_stored_when_a_request_is_refused(service: Service, endpoint: FakeEndpoint) -> None:
    """What was refused may be tried again under the same key once the state allows it, also with another body."""
    await begin(service, endpoint)
    assert code(await post(service.agent, "complete", {}, "k")) == (409, "unsettled_effects")
    assert code(await post(service.agent, "effects/2/commit", {"result": 1}, "k")) == (404, "effect_not_found")
    assert (await post(service.agent, "effects/1/commit", {"outcome": 1}, "k")).status_code == 422
    assert code(await post(service.operator, "fail", {"error": "x"}, "k", **{"If-Match": '"v999"'})) == (412, "version_differs")
    assert (await post(service.agent, "effects/1/commit", {"result": 1}, "k")).status_code == 200
    assert code(await post(service.agent, "effects/1/commit", {"result": 2}, "k2")) == (409, "result_differs")
    assert is_replayed(await post(service.agent, "effects/1/commit", {"result": 1}, "k"))
    assert not is_replayed(await post(service.agent, "effects/1/commit", {"result": 1}, "k2"))
    completed = await post(service.agent, "complete", {}, "k")
    assert (completed.status_code, is_replayed(completed)) == (200, False)


async def test_repeat_is_known_before_its_version_is_judged(service: Service, endpoint: FakeEndpoint) -> None:
    """The lost answer of a decision that was made on the version of its time is found again; the same If-Match would be stale now."""
    await begin(service, endpoint)
    tag = (await service.operator.get("/sessions/s")).headers["ETag"]
    first = await post(service.operator, "fail", {"error": "stop"}, "k", **{"If-Match": tag})
    assert first.status_code == 202
    await rest(service.agent, "s")
    again = await post(service.operator, "fail", {"error": "stop"}, "k", **{"If-Match": tag})
    assert (again.status_code, again.content, is_replayed(again)) == (202, first.content, True)
    assert code(await post(service.operator, "fail", {"error": "stop"}, "k2", **{"If-Match": tag})) == (412, "version_differs")


async def test_repeat_holds_until_rest_when_it_is_asked_to_wait(service: Service, endpoint: FakeEndpoint) -> None:
    """`wait_s` is about the moment, not about the request: a repeat that waits is told how the session stands."""
    await begin(service, endpoint)
    assert (await post(service.agent, "fail", {"error": "broke"}, "k")).json()["state"] in {"failed", "compensating"}
    waited = await post(service.agent, "fail?wait_s=25", {"error": "broke"}, "k")
    assert (waited.status_code, waited.json()["state"]) == (202, "compensated")
    assert (await service.operator.kinds("s")).count("SESSION_FAILED") == 1


async def test_intercept_is_recomputed_when_it_is_repeated(service: Service, endpoint: FakeEndpoint) -> None:
    """No stale authority: the same request under the same key is answered by what is true now."""

    async def ask() -> httpx.Response:
        return await service.agent.intercept("s", step_index=1, compensation=undo_at(endpoint.url("/undo")), idempotency_key="k")

    first, again = await ask(), await ask()
    assert (first.status_code, again.status_code, again.json()) == (201, 201, first.json())
    await service.agent.fail_effect("s", 1, "unknown")
    assert code(await ask()) == (409, "step_settled")
    await service.agent.commit("s", 1, {"id": 1})
    replay = await ask()
    assert (replay.status_code, replay.json()["decision"], replay.json()["result"]) == (200, "replay", {"id": 1})
    await rest(service.agent, "s")
    undone = await ask()
    assert (code(undone), undone.json()["state"]) == ((409, "step_settled"), "compensated")
    assert not any(is_replayed(answer) for answer in (first, again, replay, undone))
