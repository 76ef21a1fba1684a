"""The database that a command works on: the one that is named, else an embedded Postgres. Must not outlive the command."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg

from app.cli.embedded_postgres import embedded_postgres
from app.cli.manners import SetupError
from app.cli.migrating import migrate
from app.settings import Settings

SCHEMES = ("postgresql://", "postgres://")
CONNECT_SECONDS = 5.0

# What no waiting mends.
_MISTAKES = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.ClientConfigurationError,
)


@contextmanager
def target(settings: Settings) -> Iterator[str]:
    """Yield the database's URL; an embedded Postgres is started, and its schema brought to head, since nobody else would.

    Raises:
        SetupError: the URL is none, or the database refuses it. One that merely cannot be reached now is waited for by who uses it.
    """
    if settings.listen_database_url is not None:
        _check("COUNTERMAND_LISTEN_DATABASE_URL", settings.listen_database_url)
    if settings.database_url is not None:
        _check("COUNTERMAND_DATABASE_URL", settings.database_url)
        yield settings.database_url
        return
    with embedded_postgres(settings.data_dir / "postgres", bin_dir=settings.postgres_bin_dir) as database_url:
        migrate(database_url)
        yield database_url


def named(settings: Settings) -> str:
    """Return the database's URL for a command about what a service has there: on a database of its own it would say that all is well.

    Raises:
        SetupError: none is named, it is no URL, or the database refuses it.
    """
    if settings.database_url is None:
        raise SetupError("COUNTERMAND_DATABASE_URL: name the service's database; `dev` prints its own")
    _check("COUNTERMAND_DATABASE_URL", settings.database_url)
    return settings.database_url


def _check(variable: str, database_url: str) -> None:
    if not database_url.startswith(SCHEMES):
        raise SetupError(f"{variable}: expected postgresql://user:password@host:port/database")
    asyncio.run(_knock(variable, database_url))


async def _knock(variable: str, database_url: str) -> None:
    try:
        connection = await asyncpg.connect(database_url, timeout=CONNECT_SECONDS)
    except _MISTAKES as error:
        raise SetupError(f"{variable}: {error}") from error
    except ValueError:  # it quotes what it could not read, and that may be half of the password
        raise SetupError(f"{variable}: no URL that can be read; is every sign of the password percent-encoded?") from None
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
        return  # the last is what several hosts say of which none can be written to: one will be promoted
    await connection.close()
