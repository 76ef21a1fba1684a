"""The journal over HTTP: complete, paged, exported and verified; every change made behind the service's back is found."""

import asyncio
import json

import asyncpg
import pytest

from app.domain.journal import verify_lines
from app.domain.model import OrgName, SessionId
from tests.conftest import StartService
from tests.factories import ORG, JsonObject, Service, do_step, owner_connection, undo_at
from tests.fakes import FakeEndpoint
from tests.probes import fetch, rest, spoil

URL = "http://127.0.0.1:9/undo"
FLIP = "set_byte({column}, {place}, get_byte({column}, {place}) # 1)"


async def unwound(service: Service, endpoint: FakeEndpoint) -> list[JsonObject]:
    """Unwind a session of two steps and return its journal."""
    for step in (1, 2):
        await do_step(service.agent, "s", step, endpoint.url(f"/{step}"), {"n": step})
    await rest(service.agent, "s")
    return await service.operator.journal("s")


async def verified(service: Service, session_id: str = "s") -> JsonObject:
    """Return what `verify` finds."""
    response = await service.operator.get(f"/sessions/{session_id}/journal/verify")
    response.raise_for_status()
    found: JsonObject = response.json()
    return found


async def test_journal_tells_everything_once_and_verifies(service: Service, endpoint: FakeEndpoint) -> None:
    """Dense numbers, linked hashes, times that do not run backwards, the actors, and contents beside the hashed bytes."""
    journal = await unwound(service, endpoint)
    assert [entry["seq"] for entry in journal] == list(range(1, len(journal) + 1))
    assert [entry["prev_hash"] for entry in journal] == ["0" * 64, *(entry["hash"] for entry in journal[:-1])]
    assert [entry["at"] for entry in journal] == sorted(entry["at"] for entry in journal)
    assert {entry["actor"] for entry in journal} == {"agent:agent-1", "orchestrator"}
    assert [(entry["kind"], entry["step"]) for entry in journal[:5]] == [
        ("OPENED", None),
        ("INTENT", 1),
        ("EXECUTED", 1),
        ("INTENT", 2),
        ("EXECUTED", 2),
    ]
    intent = journal[1]
    assert intent["content"]["payload"]["text"] == '{"amount":2500}'
    assert "2500" not in intent["body"]
    assert await verified(service) == {
        "valid": True,
        "entry_count": len(journal),
        "first_bad_seq": None,
        "message": f"{len(journal)} entries are linked and unchanged; they end at its head",
        "head": {"seq": len(journal), "hash": journal[-1]["hash"], "at": journal[-1]["at"]},
    }


async def test_change_is_found_at_its_place_when_any_stored_part_is_altered(service: Service, endpoint: FakeEndpoint) -> None:
    """Somebody with the database and without scruples alters one entry: `verify` names it."""
    journal = await unwound(service, endpoint)
    intent, executed = 4, 5
    changes = {
        "kind": (executed, "'FAILED'"),
        "step": (intent, "1"),
        "actor": (intent, "actor || ' '"),
        "at": (intent, "replace(at, '0', '1')"),
        "prev_hash": (intent, FLIP.format(column="prev_hash", place=31)),
        "hash": (intent, FLIP.format(column="hash", place=0)),
        "content": (intent, "convert_to(replace(convert_from(content, 'UTF8'), '2500', '9900'), 'UTF8')"),
    }
    lengths = [len(entry["body"].encode()) for entry in journal]
    cases = [(column, seq, value) for column, (seq, value) in changes.items()]
    cases += [
        ("body", seq, FLIP.format(column="body", place=place)) for seq in (1, intent, len(journal)) for place in (0, lengths[seq - 1] - 1)
    ]
    for column, seq, value in cases:
        (kept,) = await fetch(service.database_url, f"SELECT {column}::text AS text, {column} AS value FROM journal WHERE seq = $1", seq)
        await spoil(service.database_url, f"UPDATE journal SET {column} = {value} WHERE seq = $1", seq)
        found = await verified(service)
        assert (found["valid"], found["first_bad_seq"]) == (False, seq), (column, found)
        assert found["entry_count"] == len(journal)
        await spoil(service.database_url, f"UPDATE journal SET {column} = $2 WHERE seq = $1", seq, kept["value"])
    assert (await verified(service))["valid"] is True


async def test_loss_is_found_when_entries_are_gone_or_added(service: Service, endpoint: FakeEndpoint) -> None:
    """A gap is named at its place, a cut end by what the session's head knows, an added entry as one too many."""
    last = len(await unwound(service, endpoint))
    copies = "CREATE TABLE kept AS SELECT * FROM journal"
    async with owner_connection(service.database_url) as connection:
        await connection.execute(copies)
    for where, first_bad in ((f"seq = {last}", last), (f"seq > {last - 3}", last - 2), ("seq = 4", 4), ("seq = 1", 1), ("true", 1)):
        await spoil(service.database_url, f"DELETE FROM journal WHERE {where}")
        found = await verified(service)
        assert (found["valid"], found["first_bad_seq"]) == (False, first_bad), where
        await spoil(service.database_url, f"INSERT INTO journal SELECT * FROM kept WHERE {where}")
    columns = f"org, session_id, {last + 1}, kind, step, actor, at, body, content, hash, hash"
    added = f"INSERT INTO journal SELECT {columns} FROM kept WHERE seq = {last}"
    await spoil(service.database_url, added)
    found = await verified(service)
    assert (found["valid"], found["first_bad_seq"]) == (False, last + 1)


async def test_journal_stays_valid_when_contents_are_erased(service: Service, endpoint: FakeEndpoint) -> None:
    """Erasing is the one change that is let through: the chain does not need what was erased."""
    await unwound(service, endpoint)
    async with owner_connection(service.database_url) as connection:
        await connection.execute("UPDATE journal SET content = NULL")
        for change in ("UPDATE journal SET actor = 'x'", "DELETE FROM journal", "TRUNCATE journal"):
            with pytest.raises(asyncpg.RestrictViolationError):
                await connection.execute(change)
    assert (await verified(service))["valid"] is True
    assert {entry["content"] for entry in await service.operator.journal("s")} == {None}


async def test_chain_is_dense_when_eighty_append_at_once(services: StartService) -> None:
    """Eighty entries by eighty requests at the same time on two replicas: no gap, no fork, no time that runs backwards."""
    replicas = [await services(has_orchestrator=False, database_connections=10) for _ in range(2)]
    pending = list(range(80))
    while pending:
        answers = await asyncio.gather(
            *(replicas[n % 2].agent.intercept("s", idempotency_key=f"k{n}", args=n, compensation=undo_at(URL)) for n in pending)
        )
        assert {answer.status_code for answer in answers} <= {201, 503}
        pending = [n for n, answer in zip(pending, answers, strict=True) if answer.status_code == 503]
    journal = await replicas[0].operator.journal("s")
    assert [entry["seq"] for entry in journal] == list(range(1, 82))
    assert [entry["step"] for entry in journal[1:]] == list(range(1, 81))
    assert {entry["content"]["payload"]["text"] for entry in journal[1:]} == {str(n) for n in range(80)}
    assert (await verified(replicas[1]))["valid"] is True


async def test_export_passes_the_offline_verifier(service: Service, endpoint: FakeEndpoint) -> None:
    """JSON Lines, chosen by Accept, verify without the service; one altered byte does not."""
    journal = await unwound(service, endpoint)
    lines: list[bytes] = []
    for name in ("application/jsonl", "application/x-ndjson; q=0.9, text/html"):
        export = await service.auditor.get("/sessions/s/journal", headers={"Accept": name})
        assert (export.status_code, export.headers["content-type"]) == (200, "application/jsonl")
        lines = export.content.splitlines(keepends=True)
        assert [json.loads(line) for line in lines] == journal
    found = verify_lines(OrgName(ORG), SessionId("s"), lines, None)
    assert (found.valid, found.entry_count) == (True, len(journal))
    lines[3] = lines[3].replace(b'"step":2', b'"step":1')
    assert verify_lines(OrgName(ORG), SessionId("s"), lines, None).first_bad_seq == 4
    rest_of_it = await service.auditor.get("/sessions/s/journal", params={"cursor": "5"}, headers={"Accept": "application/jsonl"})
    assert json.loads(rest_of_it.content.splitlines()[0])["seq"] == 6


async def test_journal_has_pages(service: Service, endpoint: FakeEndpoint) -> None:
    """Every entry once over all pages, oldest first; the last page says that it is the last."""
    journal = await unwound(service, endpoint)
    seen: list[JsonObject] = []
    cursor: dict[str, str] = {}
    while True:
        page = (await service.operator.get("/sessions/s/journal", params={"limit": "4", **cursor})).json()
        seen += page["items"]
        assert len(page["items"]) <= 4
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert seen == journal
    beyond = (await service.operator.get("/sessions/s/journal", params={"cursor": "99999"})).json()
    assert beyond == {"items": [], "next_cursor": None}
