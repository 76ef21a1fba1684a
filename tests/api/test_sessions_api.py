"""Opening, looking at, listing and failing sessions, over HTTP."""

import asyncio

import httpx
import pytest

from app.domain.model import Principal, Role, Session, SessionId
from app.storage import views
from app.storage.batches import MAX_STEPS
from app.storage.database import StorageUnavailable, Transaction
from app.storage.views import SessionView
from tests.factories import JsonObject, Service, do_step, undo_at
from tests.fakes import FakeEndpoint, Reply
from tests.probes import PATIENCE_SECONDS, row_counts

URL = "http://127.0.0.1:9/undo"


def code(response: httpx.Response) -> tuple[int, str]:
    """Return status and problem code of a refusal."""
    return response.status_code, response.json()["code"]


async def test_session_has_what_its_opener_said_when_it_is_opened(service: Service) -> None:
    """PUT opens once, finds the same session again, and refuses other options; metadata keeps its bytes."""
    body = b'{"agent":"refund-agent","metadata":{"order":4921.0,"z":1E2},"idle_seconds":60,"deadline_at":"2031-02-03T04:05:06+01:00"}'
    json_type = {"Content-Type": "application/json"}
    opened = await service.agent.request("PUT", "/v1/sessions/s", content=body, headers=json_type)
    assert opened.status_code == 201
    assert '"metadata":{"order":4921.0,"z":1E2}' in opened.text
    session = opened.json()
    assert {name: session[name] for name in ("state", "clean", "halt_reason", "pivoted", "agent", "idle_seconds", "deadline_at")} == {
        "state": "active",
        "clean": True,
        "halt_reason": None,
        "pivoted": False,
        "agent": "refund-agent",
        "idle_seconds": 60,
        "deadline_at": "2031-02-03T03:05:06.000000Z",
    }
    assert (session["effects"], session["undo_stack"]) == ([], [])
    again = await service.agent.request("PUT", "/v1/sessions/s", content=body, headers=json_type)
    assert (again.status_code, again.text) == (200, opened.text)
    assert (await service.agent.put("/sessions/s")).status_code == 200
    others: tuple[JsonObject, ...] = ({"agent": "x"}, {"idle_seconds": 61}, {"metadata": {}}, {"deadline_at": "2031-02-03T03:05:07Z"})
    for other in others:
        assert code(await service.agent.put("/sessions/s", other)) == (409, "session_differs")
    assert await service.operator.kinds("s") == ["OPENED"]


async def test_session_has_defaults_when_an_intercept_opens_it(service: Service) -> None:
    """The key's subject is the agent, silence is allowed for a day, and a PUT afterwards finds it."""
    await service.agent.intercept("s", step_index=1, compensation=undo_at(URL))
    session = await service.agent.session("s")
    assert (session["agent"], session["metadata"], session["idle_seconds"], session["deadline_at"]) == ("agent-1", {}, 86_400, None)
    assert (await service.agent.put("/sessions/s")).status_code == 200
    assert await service.operator.kinds("s") == ["OPENED", "INTENT"]


async def test_one_session_is_opened_when_twenty_open_it_at_once(service: Service) -> None:
    """One of the twins opens it, the others find it."""
    answers = await asyncio.gather(*(service.agent.put("/sessions/s", {"agent": "a"}) for _ in range(20)))
    assert sorted({answer.status_code for answer in answers} - {503}) == [200, 201]
    assert [answer.status_code for answer in answers].count(201) == 1
    assert await service.operator.kinds("s") == ["OPENED"]


async def test_list_has_pages_and_filters(service: Service, endpoint: FakeEndpoint) -> None:
    """Newest first, every session once over all pages, filtered by state, tool and agent; an agent sees its own only."""
    for number in range(5):
        await service.agent.put(f"/sessions/s{number}", {"agent": f"agent-{number % 2}"})
    await service.agent.intercept("s1", tool="issue_credit", step_index=1, compensation=undo_at(endpoint.url("/1")))
    await service.agent.fail("s1", wait_s=20)
    other = await service.client(Role.AGENT, "agent-2")
    await other.put("/sessions/others")

    names: list[str] = []
    cursor: dict[str, str] = {}
    for _ in range(4):
        page = (await service.operator.get("/sessions", params={"limit": "2", **cursor})).json()
        names += [item["session_id"] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert names == ["others", "s4", "s3", "s2", "s1", "s0"]

    async def listed(**params: str) -> list[str]:
        items = (await service.operator.get("/sessions", params=params)).json()["items"]
        return sorted(item["session_id"] for item in items)

    assert await listed(state="compensated") == ["s1"]
    assert await listed(state="active") == ["others", "s0", "s2", "s3", "s4"]
    assert await listed(tool="issue_credit") == ["s1"]
    assert await listed(agent="agent-1") == ["s1", "s3"]
    assert await listed(agent="agent-1", state="active") == ["s3"]
    assert await listed(tool="nothing") == []
    own = (await other.get("/sessions")).json()
    assert ([item["session_id"] for item in own["items"]], own["next_cursor"]) == (["others"], None)
    assert "effects" not in own["items"][0]


async def test_fail_answers_at_once_or_waits_when_asked(service: Service, endpoint: FakeEndpoint) -> None:
    """202 with the session as it stands; `wait_s` holds until it is at rest, and not longer than that."""
    gate = asyncio.Event()
    endpoint.script("/undo", Reply(gate=gate))
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    at_once = await service.agent.fail("s")
    assert (at_once.status_code, at_once.json()["state"] in {"failed", "compensating"}) == (202, True)
    await endpoint.wait_for_requests(1)
    held = await service.agent.fail("s", wait_s=1)
    assert (held.status_code, held.json()["state"]) == (202, "compensating")
    waiting = [asyncio.create_task(service.agent.fail("s", wait_s=55)) for _ in range(20)]
    assert (await service.agent.get("/sessions/s")).json()["state"] == "compensating", "waiters hold no connection"
    gate.set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        answers = await asyncio.gather(*waiting)
    assert {answer.status_code for answer in answers} <= {202, 503}
    assert {answer.json()["state"] for answer in answers if answer.status_code == 202} == {"compensated"}


async def test_waiting_reads_no_steps_until_the_session_is_at_rest(
    service: Service, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a session is and however long it takes, whoever waits reads it once; all is shown then."""
    whole: list[SessionId] = []
    glances: asyncio.Queue[SessionId] = asyncio.Queue()

    async def session(tx: Transaction, principal: Principal, session_id: SessionId) -> Session:
        glances.put_nowait(session_id)
        return await read_session(tx, principal, session_id)

    async def with_steps(tx: Transaction, found: Session) -> SessionView:
        whole.append(found.session_id)
        return await read_steps(tx, found)

    read_session, read_steps = views.session, views.with_steps
    monkeypatch.setattr(views, "session", session)
    monkeypatch.setattr(views, "with_steps", with_steps)
    monkeypatch.setattr("app.engine.waits.LOOK_SECONDS", 0.001)
    gate = asyncio.Event()
    endpoint.script("/undo", Reply(gate=gate))
    for step in range(1, MAX_STEPS + 2):  # more than are decided on together with others
        await do_step(service.agent, "s", step, endpoint.url("/undo"))
    waiting = asyncio.create_task(service.agent.fail("s", wait_s=55))
    async with asyncio.timeout(PATIENCE_SECONDS):
        for _ in range(5):
            await glances.get()
        assert whole == []
        gate.set()
        answer = (await waiting).json()
    assert (answer["state"], len(answer["effects"]), whole) == ("compensated", MAX_STEPS + 1, ["s"])


async def test_waiting_goes_on_when_the_database_cannot_answer_for_a_moment(
    service: Service, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure that is recorded is waited for until the time is over; what cannot be told even then is not."""
    looks = 0

    async def session(tx: Transaction, principal: Principal, session_id: SessionId) -> Session:
        nonlocal looks
        looks += 1
        if looks in {2, 3}:
            raise StorageUnavailable("storage_unavailable", "the database cannot answer now; try again")
        if looks > 3:
            gate.set()
        return await read_session(tx, principal, session_id)

    read_session, gate = views.session, asyncio.Event()
    endpoint.script("/undo", Reply(gate=gate))
    await do_step(service.agent, "s", 1, endpoint.url("/undo"))
    (await service.agent.fail("s")).raise_for_status()
    await endpoint.wait_for_requests(1)
    monkeypatch.setattr("app.engine.waits.LOOK_SECONDS", 0.001)
    monkeypatch.setattr(views, "session", session)
    answer = await service.agent.fail("s", wait_s=55)
    assert (answer.status_code, answer.json()["state"]) == (202, "compensated")
    assert looks > 3


async def test_repeat_of_fail_is_harmless_in_every_state(service: Service, endpoint: FakeEndpoint) -> None:
    """Failing again changes nothing, whatever it says, while unwinding, when compensated and when halted."""
    endpoint.script("/refuses", Reply(status=400))
    await do_step(service.agent, "halts", 1, endpoint.url("/refuses"))
    await do_step(service.agent, "rests", 1, endpoint.url("/1"))
    for name, state in (("halts", "halted"), ("rests", "compensated")):
        assert (await service.agent.fail(name, wait_s=20)).json()["state"] == state
        before = await row_counts(service.database_url)
        again = await service.agent.fail(name, error="something else", effect={"step_index": 1})
        assert (again.status_code, again.json()["state"]) == (202, state)
        assert await row_counts(service.database_url) == before
        assert (await service.operator.kinds(name)).count("SESSION_FAILED") == 1


async def test_operator_may_fail_a_run_and_is_named_for_it(service: Service, endpoint: FakeEndpoint) -> None:
    """The journal names the principal and the reason; the agent's undo is run all the same."""
    await do_step(service.agent, "s", 1, endpoint.url("/1"))
    answer = await service.operator.fail("s", error="it looks wrong", wait_s=20)
    assert (answer.status_code, answer.json()["state"]) == (202, "compensated")
    (failed,) = [entry for entry in await service.operator.journal("s") if entry["kind"] == "SESSION_FAILED"]
    assert failed["actor"] == "operator:operator-1"
    assert '"error":"it looks wrong"' in failed["body"]
    assert len(endpoint.received) == 1


async def test_get_changes_nothing(service: Service, endpoint: FakeEndpoint) -> None:
    """Reading a session in any way neither writes a row nor moves a version."""
    await do_step(service.agent, "s", 1, endpoint.url("/1"))
    before, shown = await row_counts(service.database_url), (await service.agent.get("/sessions/s")).text
    paths = ("/sessions/s", "/sessions", "/sessions/s/effects/1", "/sessions/s/journal", "/sessions/s/journal/verify")
    for path in paths:
        assert (await service.operator.get(path)).status_code == 200
        await service.operator.request("HEAD", f"/v1{path}")
    assert (await row_counts(service.database_url), (await service.agent.get("/sessions/s")).text) == (before, shown)
