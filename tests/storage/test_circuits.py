"""What is due where, past what is held: places, late calls, probes that are fenced, circuits nobody needs. Must not send anything."""

import asyncio
from dataclasses import replace

import pytest

from app.domain.circuits import Held, Place
from app.domain.model import OrgName, SessionId
from app.domain.turns import Queue
from app.storage import circuits, claims, destinations, pauses
from app.storage.changes import Lease
from app.storage.claims import Claim
from app.storage.database import Connection, Database
from app.storage.pauses import Scope
from tests.factories import owner_connection
from tests.probes import fetch
from tests.storage.acts import ACME, BETA, LEASE, begin, claim, do_steps, fail

HERE, THERE = "a.example:443", "b.example:443"
AWAY = Place(org=ACME, destination=HERE)
MANY = 10
MAKE_ORGS_SQL = "INSERT INTO orgs (org) VALUES ('acme'), ('beta')"


async def due(database: Database, name: str, org: OrgName = ACME, destination: str = HERE) -> SessionId:
    """Make a session whose one undo is due."""
    session_id = SessionId(name)
    await do_steps(database, session_id, 1, org, url=f"https://{destination.removesuffix(':443')}/undo")
    await fail(database, session_id, org)
    return session_id


async def away(database: Database, place: Place = AWAY) -> None:
    """Open a circuit that is due for its first probe."""
    async with database.transaction(place.org) as tx:
        assert await circuits.open_circuit(tx, place.destination, 0.0, "http 503")


async def look(database: Database, after: Place | None = None, places: int = MANY, most: int = MANY) -> list[Queue]:
    """Look as the dispatcher."""
    async with database.dispatch() as connection:
        return await claims.look(connection, after, places, most)


async def probe(database: Database, worker: Lease = LEASE, seconds: float = 0.0) -> list[Claim]:
    """Claim what may be probed now."""
    async with database.dispatch() as connection:
        return await probes(connection, worker, await claims.look(connection, None, MANY, MANY), seconds)


async def probes(connection: Connection, worker: Lease, seen: list[Queue], seconds: float = 0.0) -> list[Claim]:
    """Claim a probe of each of these queues that is due for one."""
    return await claims.claim_probes(connection, worker, [(queue, seconds) for queue in seen if queue.is_probe_due])


async def test_places_are_seen_in_order_when_calls_of_several_orgs_are_due(database: Database) -> None:
    """One row per destination of an org, however many calls wait there; counted up to what was asked for, a page at a time."""
    for name, org, destination in (
        ("s-1", ACME, HERE),
        ("s-2", ACME, HERE),
        ("s-3", ACME, HERE),
        ("s-4", ACME, THERE),
        ("s-5", BETA, HERE),
    ):
        await due(database, name, org, destination)
    seen = await look(database, most=2)
    places = [Place(org=ACME, destination=HERE), Place(org=ACME, destination=THERE), Place(org=BETA, destination=HERE)]
    assert [(queue.place, queue.waiting) for queue in seen] == list(zip(places, (2, 1, 1), strict=True))
    oldest = await fetch_one(database, "SELECT min(due_at) FROM outgoing_calls WHERE destination = 'a.example:443'")
    assert seen[0].oldest_due_at == oldest
    assert [queue.place for queue in await look(database, places=2)] == places[:2]
    assert [queue.place for queue in await look(database, after=places[1])] == places[2:]


async def fetch_one(database: Database, sql: str) -> object:
    """Return one value of an org's."""
    async with database.transaction(ACME) as tx:
        return await tx.connection.fetchval(sql)


async def test_nothing_waits_when_its_destination_is_held(database: Database, database_url: str) -> None:
    """A circuit or a pause holds what it is about: the same destination of another org, and another one of the same, go on."""
    await fetch(database_url, MAKE_ORGS_SQL)
    for org in (ACME, BETA):
        for destination in (HERE, THERE):
            await due(database, f"s-{destination[0]}", org, destination)
    await away(database)
    assert await waiting(database) == {(ACME, THERE), (BETA, HERE), (BETA, THERE)}
    async with database.transaction(BETA) as tx:
        assert await pauses.pause(tx, THERE, "operator:o", "moving")
        assert not await pauses.pause(tx, THERE, "operator:p", "again")
    assert await waiting(database) == {(ACME, THERE), (BETA, HERE)}
    async with database.transaction(BETA) as tx:
        assert await pauses.pause(tx, None, "operator:o", "all of it")
    assert await waiting(database) == {(ACME, THERE)}
    async with database.dispatch() as connection:
        assert await pauses.pause_everything(connection, "command-line", "disk is full")
        assert not await pauses.pause_everything(connection, "command-line", "again")
    assert await waiting(database) == set()
    async with database.dispatch() as connection:
        assert await pauses.resume_everything(connection)
        assert not await pauses.resume_everything(connection)
    async with database.transaction(BETA) as tx:
        assert await pauses.resume(tx, None)
        assert not await pauses.resume(tx, None)
    async with database.transaction(ACME) as tx:
        assert await circuits.close(tx, HERE)
        assert not await circuits.close(tx, HERE)
    assert await waiting(database) == {(ACME, HERE), (ACME, THERE), (BETA, HERE)}


async def waiting(database: Database) -> set[tuple[str, str]]:
    """Return where something waits that may be claimed."""
    return {(queue.place.org, queue.place.destination) for queue in await look(database) if queue.waiting}


async def test_org_is_told_what_holds_it_when_everything_is_paused(database: Database, database_url: str) -> None:
    """Of several pauses the widest is shown; who paused everything is no tenant's business, why is."""
    await fetch(database_url, MAKE_ORGS_SQL)
    async with database.transaction(ACME) as tx:
        await pauses.pause(tx, HERE, "operator:o", "moving")
        narrow, none = await pauses.widest(tx, HERE), await pauses.widest(tx, THERE)
        held = await destinations.held(tx)
    assert narrow is not None
    assert (narrow.scope, narrow.by, narrow.reason, none) == (Scope.DESTINATION, "operator:o", "moving", None)
    assert held == Held(pauses=frozenset({HERE}))
    async with database.dispatch() as connection:
        await pauses.pause_everything(connection, "command-line", "disk is full")
    async with database.transaction(ACME) as tx:
        wide, everywhere = await pauses.widest(tx, HERE), await pauses.widest(tx, None)
        assert (await destinations.held(tx)).is_all_paused
    assert wide == everywhere
    assert wide is not None
    assert (wide.scope, wide.by, wide.reason) == (Scope.EVERYTHING, None, "disk is full")


async def test_late_call_is_claimed_when_its_destination_is_held(database: Database, database_url: str) -> None:
    """Whoever is past the deadline is not sent: no circuit, no pause and no full destination keeps it from being given up."""
    await due(database, "in-time")
    late = await due(database, "late")
    await away(database)
    await fetch(database_url, "UPDATE outgoing_calls SET deadline_at = clock_timestamp() WHERE session_id = 'late'")
    async with database.dispatch() as connection:
        (claimed,) = await claims.claim_late(connection, LEASE, MANY)
        assert await claims.claim_late(connection, LEASE, MANY) == []
    assert (claimed.session_id, claimed.is_late, claimed.is_probe, claimed.epoch) == (late, True, False, 1)


async def test_one_probe_is_made_when_two_replicas_would(database: Database, database_url: str) -> None:
    """Both have seen that a probe is due; the second to write finds that somebody has begun it, and leaves the other call alone."""
    for number in range(2):
        await due(database, f"s-{number}")
    await away(database)
    seen = await look(database)
    async with database.dispatch() as first:
        mine = await probes(first, LEASE, seen)
        async with database.dispatch() as second, asyncio.TaskGroup() as group:
            theirs = group.create_task(probes(second, replace(LEASE, worker="worker-2"), seen))
            await until_waiting(database_url)
            await first.execute("COMMIT; BEGIN")
    assert [(each.session_id, each.is_probe) for each in mine] == [("s-0", True)]
    assert theirs.result() == []
    rows = await fetch(database_url, "SELECT session_id, leased_by FROM outgoing_calls ORDER BY session_id")
    assert [tuple(row) for row in rows] == [("s-0", "worker-1"), ("s-1", None)]


async def until_waiting(database_url: str) -> None:
    """Return once a connection waits for a lock; the database is asked again and again, which is what takes the time."""
    waiting_sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    async with asyncio.timeout(30), owner_connection(database_url) as connection:
        while await connection.fetchval(waiting_sql) == 0:
            pass


async def test_nobody_else_probes_when_the_last_probe_lives(database: Database, database_url: str) -> None:
    """One at a time, however long it takes; whose worker died with it is probed again, once its lease is over."""
    for number in range(2):
        await due(database, f"s-{number}")
    await away(database)
    (first,) = await probe(database)
    assert await probe(database) == []
    await fetch(database_url, "UPDATE outgoing_calls SET leased_until = clock_timestamp() WHERE leased_by IS NOT NULL")
    (again,) = await probe(database)
    assert (again.session_id, again.epoch) == (first.session_id, 2)


async def test_probe_is_put_off_when_one_was_made(database: Database, database_url: str) -> None:
    """The next one has to wait for as long as was said, unless somebody wants it at once."""
    await due(database, "s")
    await away(database)
    (first,) = await probe(database, seconds=600)
    async with database.dispatch() as connection:
        await claims.release(connection, [first])
    assert await probe(database) == []
    async with database.transaction(BETA) as tx:
        await circuits.probe_now(tx, HERE)
    assert await probe(database) == []
    async with database.transaction(ACME) as tx:
        await circuits.probe_now(tx, THERE)
    assert await probe(database) == []
    async with database.transaction(ACME) as tx:
        await circuits.probe_now(tx, None)
    assert len(await probe(database)) == 1
    (row,) = await fetch(database_url, "SELECT probes, probe_session_id, last_error FROM circuits")
    assert tuple(row) == (2, "s", "http 503")


async def test_no_probe_is_made_when_a_person_has_paused_the_destination(database: Database, database_url: str) -> None:
    """Whoever wants nothing sent there wants no probe either."""
    await fetch(database_url, MAKE_ORGS_SQL)
    await due(database, "s")
    await away(database)
    async with database.transaction(ACME) as tx:
        await pauses.pause(tx, HERE, "operator:o", "moving")
    assert await probe(database) == []


async def test_call_that_was_tried_least_probes_when_several_are_due(database: Database, database_url: str) -> None:
    """One that fails whatever the destination does goes to the end of the line, also where it is due longest."""
    for name in ("poison", "newer", "newest"):
        await due(database, name)
    await begin(database, (await claim(database, limit=1))[0])
    await away(database)
    await fetch(database_url, "UPDATE outgoing_calls SET leased_by = NULL, leased_until = NULL")
    (probed,) = await probe(database)
    assert probed.session_id == "newer"


async def test_circuit_is_dropped_when_nothing_waits_for_it(database: Database, database_url: str) -> None:
    """Without a call nobody would find out that the destination is back: it must not be shown as away for ever."""
    await due(database, "s")
    await away(database)
    await away(database, Place(org=ACME, destination=THERE))
    await away(database, Place(org=BETA, destination=HERE))
    async with database.dispatch() as connection:
        dropped = await circuits.drop_idle(connection)
    assert set(dropped) == {Place(org=ACME, destination=THERE), Place(org=BETA, destination=HERE)}
    rows = await fetch(database_url, "SELECT org, destination FROM circuits")
    assert [tuple(row) for row in rows] == [(ACME, HERE)]


@pytest.mark.parametrize("is_noted", [True, False])
async def test_circuit_keeps_the_first_error_until_a_probe_has_another(*, database: Database, database_url: str, is_noted: bool) -> None:
    """Whoever opens it once more changes nothing; what a probe came to is news."""
    await away(database)
    async with database.transaction(ACME) as tx:
        assert not await circuits.open_circuit(tx, HERE, 60.0, "timeout")
        if is_noted:
            await circuits.note(tx, HERE, "connect: refused")
    (row,) = await fetch(database_url, "SELECT probe_at <= clock_timestamp() AS is_due, last_error FROM circuits")
    assert tuple(row) == (True, "connect: refused" if is_noted else "http 503")
