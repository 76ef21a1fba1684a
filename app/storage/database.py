"""Pools, transactions of one org, the dispatcher's transactions, LISTEN. Must not hold a statement about sessions."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeAlias

import asyncpg

from app.domain.errors import Unavailable
from app.domain.model import OrgName

RUNTIME_ROLE = "countermand_runtime"
DISPATCHER_ROLE = "countermand_dispatcher"
PRUNER_ROLE = "countermand_pruner"
DUE_CHANNEL = "countermand_due"
MOVED_CHANNEL = "countermand_moved"

ACQUIRE_TIMEOUT_SECONDS = 1.0  # a caller that cannot be served soon is better told so, and asks again
CONNECT_TIMEOUT_SECONDS = 5.0
RESET_TIMEOUT_SECONDS = 5.0
STATEMENTS_KEPT = 100  # per connection, the driver's own number: more than there are
NO_ORG = ""  # refused wherever an org is needed
MILLISECOND_BOUNDS = {"lock_timeout": "5000", "statement_timeout": "30000", "idle_in_transaction_session_timeout": "15000"}
"""Nothing may hold or wait for a session's lock longer than an operator would wait for an answer."""

# Their statements find a few rows by key, whatever the values: planned once per connection, they cost half of what planning anew does.
PLANNED_ONCE = {**MILLISECOND_BOUNDS, "plan_cache_mode": "force_generic_plan"}

_ORG = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")

Connection: TypeAlias = "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"
Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"

UNREACHABLE_ERRORS = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.LockNotAvailableError,
    asyncpg.DeadlockDetectedError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
)

# What a database says that was never migrated, or not for this user: at first the role is missing, later a table.
NO_ROLE_ERRORS = (asyncpg.InvalidParameterValueError, asyncpg.InsufficientPrivilegeError)
NO_TABLE_ERRORS = (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError)
# What comes of statements that were prepared on one of a pooler's connections and looked for on another.
POOLER_ERRORS = (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError)


def is_org_name(text: str) -> bool:
    """Tell whether `text` can name an org; the schema's `org_name` says the same."""
    return _ORG.fullmatch(text) is not None


class StorageUnavailable(Unavailable):
    """The database cannot be reached, or cannot answer in time."""

    @property
    def cause(self) -> str:
        """What the driver or the system said, for the log: its class and its words."""
        return "" if self.__cause__ is None else f"{type(self.__cause__).__name__}: {self.__cause__}"


class MayNotPrune(Exception):
    """The database's user is not let become the pruner."""


class SchemaMissing(StorageUnavailable):
    """The database answers, but has not the schema that this code knows."""


def _schema_missing() -> SchemaMissing:
    return SchemaMissing("schema_missing", "the database has not the schema that this code knows: run `countermand migrate`")


class WriteConflict(Exception):
    """A guarded write met other rows than its decision was made on; the transaction is rolled back, nothing is written."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """An open transaction that sees the rows of one org."""

    connection: Connection
    org: OrgName


class Database:
    """One pool of connections; a transaction's role, org and bounds begin and end with it."""

    def __init__(self, pool: Pool, *, acquire_seconds: float = ACQUIRE_TIMEOUT_SECONDS) -> None:
        """Wrap an open pool; `open_database` makes one. `acquire_seconds` bounds the wait for a free connection."""
        self._pool = pool
        self._acquire_seconds = acquire_seconds

    @property
    def patience_seconds(self) -> float:
        """How long a caller waits for a connection before being told that there is none."""
        return self._acquire_seconds

    @asynccontextmanager
    async def transaction(self, org: OrgName) -> AsyncIterator[Transaction]:
        """Begin, name the org for row-level security, commit at the end; roll back on any exception.

        The commit is over when the block is left: answer after it.

        Raises:
            StorageUnavailable: no connection in time, or it broke; whether a commit in flight took effect is then unknown.
        """
        async with self._begun("READ COMMITTED", org, settings=PLANNED_ONCE) as connection:
            yield Transaction(connection, org)

    @asynccontextmanager
    async def held(self) -> AsyncIterator["HeldConnection"]:
        """Keep one connection for many transactions, one after another: taking it from the pool costs as much as two trips do.

        After an exception in a transaction it may be of no use any more: leave the block, which returns it, and hold another.

        Raises:
            StorageUnavailable: no connection in time.
        """
        with _told_apart():
            connection = await self._pool.acquire(timeout=self._acquire_seconds)
        try:
            yield HeldConnection(connection)
        finally:
            await self._give_back(connection)

    @asynccontextmanager
    async def snapshot(self, org: OrgName) -> AsyncIterator[Transaction]:
        """Begin a read-only transaction of one org whose statements all see the same moment.

        Raises:
            StorageUnavailable: no connection in time, or it broke.
        """
        async with self._begun("REPEATABLE READ READ ONLY", org) as connection:
            yield Transaction(connection, org)

    @asynccontextmanager
    async def dispatch(self) -> AsyncIterator[Connection]:
        """Begin as the dispatcher, who may see which calls are due and whose a key is in every org, and nothing else."""
        async with self._begun("READ COMMITTED", None, DISPATCHER_ROLE) as connection:
            yield connection

    @asynccontextmanager
    async def prune(self, org: OrgName | None) -> AsyncIterator[Connection]:
        """Begin as the pruner, who alone may delete, and sees of one org when its sessions ended; without one, which orgs there are.

        Raises:
            MayNotPrune: the login user may not become the pruner. StorageUnavailable: no connection in time, or it broke.
        """
        try:
            async with self._begun("READ COMMITTED", org, PRUNER_ROLE) as connection:
                yield connection
        except SchemaMissing as error:
            if isinstance(error.__cause__, asyncpg.InsufficientPrivilegeError):
                raise MayNotPrune("the database's user may not prune: GRANT countermand_pruner TO it") from error
            raise

    @asynccontextmanager
    async def outside_orgs(self) -> AsyncIterator[Connection]:
        """Begin without an org: every table with rows of orgs refuses."""
        async with self._begun("READ COMMITTED", None) as connection:
            yield connection

    @asynccontextmanager
    async def _begun(
        self, isolation: str, org: OrgName | None, role: str = RUNTIME_ROLE, settings: Mapping[str, str] = MILLISECOND_BOUNDS
    ) -> AsyncIterator[Connection]:
        with _told_apart():
            connection = await self._pool.acquire(timeout=self._acquire_seconds)
            try:
                async with _transaction(connection, isolation, org, role, settings):
                    yield connection
            finally:
                await self._give_back(connection)

    async def _give_back(self, connection: Connection) -> None:
        """Return a connection to the pool; one that cannot be reset in time is dropped, which says nothing about what it committed."""
        with suppress(*UNREACHABLE_ERRORS):
            await self._pool.release(connection, timeout=RESET_TIMEOUT_SECONDS)

    def connections(self) -> Mapping[str, int]:
        """Return how many connections are in use, how many idle, and how many more may be opened."""
        size, idle = self._pool.get_size(), self._pool.get_idle_size()
        return {"in_use": size - idle, "idle": idle, "unopened": self._pool.get_max_size() - size}

    async def close(self) -> None:
        """Close every connection; those in use are given up after the connect timeout."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()


@dataclass(frozen=True, slots=True)
class HeldConnection:
    """A connection that is kept for a while; see `Database.held`."""

    connection: Connection

    @property
    def is_closed(self) -> bool:
        """Tell whether the database has closed it meanwhile; the pool then has it back already, and lets nobody ask it."""
        try:
            return self.connection.is_closed()
        except asyncpg.InterfaceError:
            return True

    @asynccontextmanager
    async def transaction(self, org: OrgName) -> AsyncIterator[Transaction]:
        """Do as `Database.transaction` does, on this connection."""
        with _told_apart():
            async with _transaction(self.connection, "READ COMMITTED", org, RUNTIME_ROLE, PLANNED_ONCE):
                yield Transaction(self.connection, org)


@asynccontextmanager
async def _transaction(
    connection: Connection, isolation: str, org: OrgName | None, role: str, settings: Mapping[str, str]
) -> AsyncIterator[None]:
    if org is not None and not is_org_name(org):
        raise ValueError(f"not an org name: {org!r}")
    try:
        await _begin(connection, isolation, {"role": role, "app.org": org or NO_ORG, **settings})
        yield
    except BaseException:
        await _roll_back(connection)
        raise
    await connection.execute("COMMIT")


@contextmanager
def _told_apart() -> Iterator[None]:
    """Turn what the driver says of a database that cannot be worked with into refusals that say so."""
    try:
        yield
    except NO_TABLE_ERRORS as error:
        raise _schema_missing() from error
    except POOLER_ERRORS as error:
        raise StorageUnavailable(
            "storage_unavailable", "a pooler stands before the database: set COUNTERMAND_DATABASE_POOLER to how it pools"
        ) from error
    except UNREACHABLE_ERRORS as error:
        raise StorageUnavailable("storage_unavailable", "the database cannot answer now; try again") from error


async def _begin(connection: Connection, isolation: str, settings: Mapping[str, str]) -> None:
    """Begin with settings that end with the transaction, in one trip: the next one may be another client's (decision 0025)."""
    # The simple protocol takes two statements in one trip but no parameters; every value is ours, or was checked as an org's name.
    local = ";".join(f"SET LOCAL {name} = '{value}'" for name, value in settings.items())
    try:
        await connection.execute(f"BEGIN ISOLATION LEVEL {isolation};{local}")
    except NO_ROLE_ERRORS as error:
        raise _schema_missing() from error


async def _roll_back(connection: Connection) -> None:
    """Undo what was written; a connection that is gone has done so already, and must not hide why the transaction ended."""
    with suppress(*UNREACHABLE_ERRORS):
        await connection.execute("ROLLBACK")


async def _end_what_is_open(connection: "asyncpg.Connection[asyncpg.Record]") -> None:
    """Make a connection fit for the next transaction; there is nothing else on it to clean up."""
    if connection.is_in_transaction():
        await connection.execute("ROLLBACK")


@asynccontextmanager
async def open_database(
    dsn: str,
    *,
    size: int,
    application_name: str,
    acquire_seconds: float = ACQUIRE_TIMEOUT_SECONDS,
    keeps_statements: bool = True,
) -> AsyncIterator[Database]:
    """Open a pool of at most `size` connections and close it at the end; a connection is made when it is first needed.

    `keeps_statements`: prepare each statement once per connection, which a pooler that hands out its own by the transaction forbids.
    """
    pool = asyncpg.create_pool(
        dsn,
        min_size=0,
        max_size=size,
        timeout=CONNECT_TIMEOUT_SECONDS,
        reset=_end_what_is_open,
        statement_cache_size=STATEMENTS_KEPT if keeps_statements else 0,
        server_settings={"application_name": application_name},
    )
    await pool
    database = Database(pool, acquire_seconds=acquire_seconds)
    try:
        yield database
    finally:
        await database.close()


@asynccontextmanager
async def listen(dsn: str, callbacks: Mapping[str, Callable[[str], None]]) -> AsyncIterator[asyncio.Event]:
    """Listen on channels over a connection of its own; the event is set when that connection is gone.

    Raises:
        StorageUnavailable: the database cannot be reached.
    """
    gone = asyncio.Event()
    try:
        connection = await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT_SECONDS, server_settings={"application_name": "countermand listen"})
        connection.add_termination_listener(lambda _: gone.set())
        for channel, callback in callbacks.items():
            await connection.add_listener(channel, _payload_to(callback))
    except UNREACHABLE_ERRORS as error:
        raise StorageUnavailable("storage_unavailable", "the database cannot be listened to now") from error
    try:
        yield gone
    finally:
        await _close_quietly(connection)


def _payload_to(callback: Callable[[str], None]) -> Callable[..., None]:
    def listener(_connection: object, _pid: int, _channel: str, payload: object) -> None:
        callback(str(payload))

    return listener


async def _close_quietly(connection: "asyncpg.Connection[asyncpg.Record]") -> None:
    try:
        await connection.close(timeout=CONNECT_TIMEOUT_SECONDS)
    except UNREACHABLE_ERRORS:
        connection.terminate()


REVISION_SQL = """
SELECT version_num
FROM alembic_version
LIMIT 1
"""


async def read_revision(database: Database) -> str | None:
    """Return the schema's revision, or None where there is no schema.

    Raises:
        StorageUnavailable: the database cannot be reached.
    """
    try:
        async with database.outside_orgs() as connection:
            revision: str | None = await connection.fetchval(REVISION_SQL)
    except SchemaMissing:
        return None
    return revision


OLDEST_REVISION_SQL = """
SELECT oldest_revision
FROM schema_support
LIMIT 1
"""


async def read_oldest_revision(database: Database) -> str | None:
    """Return the oldest revision whose code the schema still serves, or None where it does not say so: it serves its own alone then.

    Raises:
        StorageUnavailable: the database cannot be reached.
    """
    try:
        async with database.outside_orgs() as connection:
            revision: str | None = await connection.fetchval(OLDEST_REVISION_SQL)
    except SchemaMissing:
        return None
    return revision
