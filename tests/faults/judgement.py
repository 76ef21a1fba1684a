"""What must be true of an unwound session whatever happened on the way: the endpoint's own log against the journal and the answers."""

from collections.abc import Sequence
from itertools import groupby

from app.domain.model import EntryKind
from tests.factories import Client, JsonObject, do_step
from tests.fakes import FakeEndpoint, Received

PATIENCE_SECONDS = 40


async def do_steps(agent: Client, endpoint: FakeEndpoint, session_id: str, count: int) -> list[str]:
    """Intercept and commit steps 1 to `count`, undone at /undo/<step> with their own `credit_id`; return the undos' keys, newest first."""
    told = [
        await do_step(
            agent,
            session_id,
            step,
            endpoint.url(f"/undo/{step}"),
            {"credit_id": f"{session_id}-{step}"},
            args={"credit_id": {"$ref": "result#/credit_id"}},
        )
        for step in range(1, count + 1)
    ]
    return [f"undo-{answer['undo_id']}" for answer in reversed(told)]


def requests_of(endpoint: FakeEndpoint, keys: Sequence[str]) -> list[Received]:
    """Return what reached the endpoint under these keys, in order of arrival."""
    return [request for request in endpoint.received if request.key in keys]


async def assert_undone(agent: Client, auditor: Client, endpoint: FakeEndpoint, session_id: str, keys: Sequence[str]) -> None:
    """Wait until the session rests, then hold everything against the promises: once each, newest first, same key and bytes, journaled."""
    answer = await agent.fail(session_id, wait_s=PATIENCE_SECONDS)
    session: JsonObject = answer.json()
    assert (session["state"], session["clean"], session["halt_reason"]) == ("compensated", True, None)
    assert [entry["state"] for entry in session["undo_stack"]] == ["compensated"] * len(keys)
    requests = requests_of(endpoint, keys)
    assert [key for key, _ in groupby(request.key for request in requests)] == list(keys), "newest first, none resumed after a later one"
    assert [endpoint.applications_of(key) for key in keys] == [1] * len(keys)
    steps = range(len(keys), 0, -1)
    expected = {(key, f'{{"credit_id":"{session_id}-{step}"}}'.encode()) for key, step in zip(keys, steps, strict=True)}
    assert {(request.key, request.body) for request in requests} == expected, "one key, one body"
    await _assert_journaled(auditor, session_id, list(steps))


async def _assert_journaled(auditor: Client, session_id: str, steps: Sequence[int]) -> None:
    journal = await auditor.journal(session_id)
    for kind in (EntryKind.COMPENSATING, EntryKind.COMPENSATED):
        assert [entry["step"] for entry in journal if entry["kind"] == kind] == list(steps)
    assert [entry["kind"] for entry in journal].count(EntryKind.SESSION_FAILED) == 1
    assert journal[-1]["kind"] == EntryKind.UNWOUND
    verified = (await auditor.get(f"/sessions/{session_id}/journal/verify")).json()
    assert (verified["valid"], verified["entry_count"]) == (True, len(journal)), "the journal verifies"
