"""The backlog of all orgs: bounded in what it names, and read by the index that leaves out what has ended. Must not test /metrics."""

import re

from app.domain.model import SessionId, SessionState
from app.storage import backlog, claims
from app.storage.backlog import MAX_DESTINATIONS, OPEN_SESSIONS_SQL, OPEN_STATES, OTHER, Backlog
from app.storage.database import Database
from tests.golden import REPOSITORY
from tests.probes import claim_due
from tests.storage.acts import ACME, BETA, LEASE, do_steps, fail

ENDS = {SessionState.COMPENSATED, SessionState.RESOLVED, SessionState.COMPLETED}
CONDITION = re.compile(r"WHERE state IN \(([^)]*)\)")


async def look(database: Database) -> Backlog:
    """Read the backlog as the dispatcher."""
    async with database.dispatch() as connection:
        return await backlog.read(connection)


def test_open_states_are_those_that_are_no_end_when_the_statement_and_its_index_name_them() -> None:
    """The index serves a statement of the same condition only, and a new state must not be forgotten."""
    migration = (REPOSITORY / "migrations/versions/0004_telemetry.py").read_text(encoding="utf-8")
    for text in (OPEN_SESSIONS_SQL, migration):
        named = CONDITION.search(text)
        assert named is not None
        assert re.findall(r"'([a-z_]+)'", named[1]) == [state.value for state in OPEN_STATES]
    assert set(OPEN_STATES) == set(SessionState) - ENDS


async def test_least_busy_destinations_are_told_together_when_there_are_many(database: Database) -> None:
    """Whoever registers tools at a thousand hosts must not make a thousand series."""
    for number in range(MAX_DESTINATIONS + 2):
        session_id = SessionId(f"run-{number}")
        await do_steps(database, session_id, 1, url=f"https://host-{number:02}.example/undo")
        await fail(database, session_id)
    await do_steps(database, SessionId("busy"), 1, BETA, url="https://host-21.example/undo")
    await fail(database, SessionId("busy"), BETA)
    found = await look(database)
    names = {f"host-{number:02}.example:443" for number in (*range(MAX_DESTINATIONS - 1), 21)}
    assert set(found.due) == names | {OTHER}
    assert (found.due["host-21.example:443"], found.due[OTHER]) == (2, 2)
    assert found.sessions == {"failed": MAX_DESTINATIONS + 3}


async def test_call_is_in_flight_and_not_due_when_a_worker_holds_it(database: Database) -> None:
    """The two together are what is to be done now: a call counts in one of them, in none while it waits for its next try."""
    await do_steps(database, SessionId("s"), 1, ACME, url="https://a.example/undo")
    await fail(database, SessionId("s"))
    async with database.dispatch() as connection:
        (claimed,) = await claim_due(connection, LEASE)
    held = await look(database)
    assert (held.due, held.in_flight) == ({"a.example:443": 0}, {"a.example:443": 1})
    async with database.dispatch() as connection:
        await claims.release(connection, [claimed])
    given_back = await look(database)
    assert (given_back.due, given_back.in_flight) == ({"a.example:443": 1}, {"a.example:443": 0})


async def test_backlog_is_empty_when_nothing_was_ever_done(database: Database) -> None:
    """A new service tells of nothing, rather than failing on no rows."""
    assert await look(database) == Backlog(
        sessions={}, oldest_seconds={}, due={}, in_flight={}, circuits={}, pauses={}, first_expiry_seconds=None
    )
