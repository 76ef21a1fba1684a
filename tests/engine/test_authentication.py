"""Many callers with one key at once: the database is asked once for all of them. Must not look at what a key is made of."""

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest

from app.domain.errors import Unauthenticated
from app.domain.model import Principal, Role
from app.engine.authentication import FRESH_SECONDS, Authenticator
from app.engine.clock import SystemClock
from app.storage import keys
from app.storage.database import Connection, Database, StorageUnavailable, open_database
from app.storage.keys import KeptKey
from tests.factories import make_principal_key, owner_connection
from tests.probes import PATIENCE_SECONDS

CROWD = 500
ACQUIRE_SECONDS = 0.25


class HeldClock(SystemClock):
    """A clock that moves when it is told to."""

    now = 100.0

    def monotonic(self) -> float:
        """Return the moment."""
        return self.now


class Lookups:
    """Counts how often the database is asked, and lets it answer when the test says so."""

    def __init__(self) -> None:
        """Let everything through."""
        self.made = 0
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self._find = keys.find_key

    async def find_key(self, connection: Connection, key_id: str) -> KeptKey | None:
        """Ask the database."""
        self.made += 1
        self.begun.set()
        await self.may_end.wait()
        return await self._find(connection, key_id)


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> Lookups:
    """Watch what the database is asked."""
    watched = Lookups()
    monkeypatch.setattr(keys, "find_key", watched.find_key)
    return watched


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """Open a pool that is soon exhausted, with both of its connections made."""
    async with open_database(database_url, size=2, application_name="tests", acquire_seconds=PATIENCE_SECONDS) as patient:
        async with patient.dispatch(), patient.dispatch():
            pass
        yield Database(patient._pool, acquire_seconds=ACQUIRE_SECONDS)  # noqa: SLF001 - the same connections, for less patient callers


def crowd(authenticator: Authenticator, key: str, number: int = CROWD) -> list[asyncio.Task[Principal]]:
    """Present a key many times at once."""
    return [asyncio.create_task(authenticator.principal(key)) for _ in range(number)]


async def outcomes(callers: Iterable[asyncio.Task[Principal]]) -> set[Principal | type[BaseException]]:
    """Return what callers were told, each outcome once."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        told = await asyncio.gather(*callers, return_exceptions=True)
    return {type(each) if isinstance(each, BaseException) else each for each in told}


async def test_crowd_asks_once_when_its_key_was_quiet(database_url: str, database: Database, lookups: Lookups) -> None:
    """As many callers as there may be wait for one answer, at first and after it has become too old; nothing is left of the question."""
    key, clock = await make_principal_key(database_url, Role.AGENT, "robot-1"), HeldClock()
    authenticator = Authenticator(database=database, clock=clock)
    for made in (1, 2):
        (told,) = await outcomes(crowd(authenticator, key))
        assert isinstance(told, Principal), told
        assert told.subject == "robot-1"
        assert lookups.made == made
        assert not authenticator._asking  # noqa: SLF001 - what is never taken out would grow for ever, and nobody would see it
        clock.now += FRESH_SECONDS


async def test_crowd_is_refused_when_its_key_is_revoked_or_unknown(database_url: str, database: Database, lookups: Lookups) -> None:
    """All are told alike, after one question each time: a refusal is not remembered."""
    revoked = await make_principal_key(database_url, Role.AGENT, "robot-1")
    async with owner_connection(database_url) as owner:
        await owner.execute("UPDATE keys SET revoked_at = clock_timestamp()")
    authenticator = Authenticator(database=database, clock=HeldClock())
    for made, key in enumerate((revoked, revoked, f"{revoked[:-64]}{'0' * 64}", "nonsense"), start=1):
        assert await outcomes(crowd(authenticator, key)) == {Unauthenticated}
        assert lookups.made == made


async def test_crowd_is_told_when_the_database_cannot_answer(database_url: str, database: Database, lookups: Lookups) -> None:
    """Nobody is refused for good: who asks again is answered."""
    key = await make_principal_key(database_url, Role.AGENT, "robot-1")
    authenticator = Authenticator(database=database, clock=HeldClock())
    async with database.dispatch(), database.dispatch():
        assert await outcomes(crowd(authenticator, key)) == {StorageUnavailable}
    assert (await authenticator.principal(key)).subject == "robot-1"
    assert lookups.made == 1


async def test_others_are_answered_when_the_first_caller_leaves(database_url: str, database: Database, lookups: Lookups) -> None:
    """Who asked first takes the answer from nobody."""
    key = await make_principal_key(database_url, Role.AGENT, "robot-1")
    authenticator = Authenticator(database=database, clock=HeldClock())
    lookups.may_end.clear()
    first, *others = crowd(authenticator, key, 3)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await lookups.begun.wait()
    first.cancel()
    assert await outcomes([first]) == {asyncio.CancelledError}
    lookups.may_end.set()
    (told,) = await outcomes(others)
    assert isinstance(told, Principal), told
    assert lookups.made == 1


async def test_old_question_is_not_waited_for_when_its_answer_would_be_too_old(
    database_url: str, database: Database, lookups: Lookups
) -> None:
    """What the database saw before a key was revoked is good for a few seconds, however slowly it comes."""
    key, clock = await make_principal_key(database_url, Role.AGENT, "robot-1"), HeldClock()
    authenticator = Authenticator(database=database, clock=clock)
    lookups.may_end.clear()
    stuck = crowd(authenticator, key, 1)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await lookups.begun.wait()
    clock.now += FRESH_SECONDS
    late = crowd(authenticator, key, 2)
    lookups.may_end.set()
    (told,) = await outcomes([*stuck, *late])
    assert isinstance(told, Principal), told
    assert lookups.made == 2
    assert authenticator.known(key) == told, "the younger answer counts"


async def test_key_is_asked_for_again_when_it_is_due(database_url: str, database: Database, lookups: Lookups) -> None:
    """Who finds that the answer is half as old as it may be asks, although they looked before that; the others need not wait for it."""
    key, clock = await make_principal_key(database_url, Role.AGENT, "robot-1"), HeldClock()
    authenticator = Authenticator(database=database, clock=clock)
    known = await authenticator.principal(key)
    clock.now += FRESH_SECONDS / 2
    assert authenticator.known(key) is None
    lookups.may_end.clear()
    lookups.begun.clear()
    (renewing,) = crowd(authenticator, key, 1)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await lookups.begun.wait()
    assert authenticator.known(key) == known
    lookups.may_end.set()
    assert await outcomes([renewing]) == {known}
    clock.now += FRESH_SECONDS / 2
    assert lookups.made == 2
    clock.now -= FRESH_SECONDS / 4
    assert authenticator.known(key) == known, "it is good for as long again"
