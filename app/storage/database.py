"""Pools, transactions of one org, the dispatcher's transactions, LISTEN. Must not hold a statement about sessions."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import asyncpg

from app.domain.errors import Unavailable
from app.domain.model import OrgName

RUNTIME_ROLE = "countermand_runtime"
DUE_CHANNEL = "countermand_due"
MOVED_CHANNEL = "countermand_moved"

ACQUIRE_TIMEOUT_SECONDS = 1.0  # a caller that cannot be served soon is better told so, and asks again
CONNECT_TIMEOUT_SECONDS = 5.0
RESET_TIMEOUT_SECONDS = 5.0
MILLISECOND_BOUNDS = {"lock_timeout": "5000", "statement_timeout": "30000", "idle_in_transaction_session_timeout": "15000"}
"""Nothing may hold or wait for a session's lock longer than an operator would wait for an answer."""

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

# What a database says that was never migrated, or not for this user: at connect the role is missing, later a table.
NO_ROLE_ERRORS = (asyncpg.InvalidParameterValueError, asyncpg.InsufficientPrivilegeError)
NO_TABLE_ERRORS = (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError)


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
    """One pool of connections, each with the runtime role."""

    def __init__(self, pool: Pool, *, acquire_seconds: float = ACQUIRE_TIMEOUT_SECONDS) -> None:
        """Wrap an open pool; `open_database` makes one. `acquire_seconds` bounds the wait for a free connection."""
        self._pool = pool
        self._acquire_seconds = acquire_seconds

    @asynccontextmanager
    async def transaction(self, org: OrgName) -> AsyncIterator[Transaction]:
        """Begin, name the org for row-level security, commit at the end; roll back on any exception.

        The commit is over when the block is left: answer after it.

        Raises:
            StorageUnavailable: no connection in time, or it broke; whether a commit in flight took effect is then unknown.
        """
        async with self._begun("READ COMMITTED", org) as connection:
            yield Transaction(connection, org)

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
        async with self._begun("READ COMMITTED", None) as connection:
            await connection.execute(BECOME_DISPATCHER_SQL)
            yield connection

    @asynccontextmanager
    async def prune(self, org: OrgName | None) -> AsyncIterator[Connection]:
        """Begin as the pruner, who alone may delete, and sees of one org when its sessions ended; without one, which orgs there are.

        Raises:
            MayNotPrune: the login user may not become the pruner. StorageUnavailable: no connection in time, or it broke.
        """
        async with self._begun("READ COMMITTED", org) as connection:
            try:
                await connection.execute(BECOME_PRUNER_SQL)
            except asyncpg.InsufficientPrivilegeError as error:
                raise MayNotPrune("the database's user may not prune: GRANT countermand_pruner TO it") from error
            except asyncpg.InvalidParameterValueError as error:
                raise _schema_missing() from error
            yield connection

    @asynccontextmanager
    async def outside_orgs(self) -> AsyncIterator[Connection]:
        """Begin without an org: every table with rows of orgs refuses."""
        async with self._begun("READ COMMITTED", None) as connection:
            yield connection

    @asynccontextmanager
    async def _begun(self, isolation: str, org: OrgName | None) -> AsyncIterator[Connection]:
        begin = f"BEGIN ISOLATION LEVEL {isolation}"
        if org is not None:
            if not is_org_name(org):
                message = f"not an org name: {org!r}"
                raise ValueError(message)
            # The simple protocol takes two statements in one trip but no parameters; the name was checked just above.
            begin = f"{begin}; SELECT set_config('app.org', '{org}', true)"
        try:
            connection = await self._pool.acquire(timeout=self._acquire_seconds)
            try:
                await connection.execute(begin)
                try:
                    yield connection
                except BaseException:
                    if not connection.is_closed():
                        await connection.execute("ROLLBACK")
                    raise
                await connection.execute("COMMIT")
            finally:
                await self._give_back(connection)
        except NO_TABLE_ERRORS as error:
            raise _schema_missing() from error
        except UNREACHABLE_ERRORS as error:
            raise StorageUnavailable("storage_unavailable", "the database cannot answer now; try again") from error

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


async def _connect(*arguments: Any, **options: Any) -> "asyncpg.Connection[asyncpg.Record]":  # noqa: ANN401 - asyncpg's own
    """Connect, and tell a database without our roles from one that is away."""
    try:
        return await asyncpg.connect(*arguments, **options)
    except NO_ROLE_ERRORS as error:
        raise _schema_missing() from error


@asynccontextmanager
async def open_database(
    dsn: str, *, size: int, application_name: str, acquire_seconds: float = ACQUIRE_TIMEOUT_SECONDS
) -> AsyncIterator[Database]:
    """Open a pool of at most `size` connections and close it at the end; a connection is made when it is first needed."""
    pool = asyncpg.create_pool(
        dsn,
        connect=_connect,
        min_size=0,
        max_size=size,
        timeout=CONNECT_TIMEOUT_SECONDS,
        server_settings={"role": RUNTIME_ROLE, "application_name": application_name, **MILLISECOND_BOUNDS},
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
        connection = await _connect(
            dsn,
            timeout=CONNECT_TIMEOUT_SECONDS,
            server_settings={"role": RUNTIME_ROLE, "application_name": "countermand listen"},
        )
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


BECOME_DISPATCHER_SQL = """
SET LOCAL ROLE countermand_dispatcher
"""

BECOME_PRUNER_SQL = """
SET LOCAL ROLE countermand_pruner
"""

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
