"""The database that a command works on: the one that is named, else an embedded Postgres. Must not outlive the command."""

from collections.abc import Iterator
from contextlib import contextmanager

from app.cli.embedded_postgres import embedded_postgres
from app.cli.migrating import migrate
from app.settings import Settings


@contextmanager
def target(settings: Settings) -> Iterator[str]:
    """Yield the database's URL; an embedded Postgres is started, and its schema brought to head, since nobody else would."""
    if settings.database_url is not None:
        yield settings.database_url
        return
    with embedded_postgres(settings.data_dir / "postgres", bin_dir=settings.postgres_bin_dir) as database_url:
        migrate(database_url)
        yield database_url
