"""Run a whole SQL script inside a migration's transaction. Must not build SQL: it is given as written."""

from typing import Any

from alembic import op


def run(script: str) -> None:
    """Run a multi-statement `script` over the driver's simple protocol (prepared statements take only one)."""
    connection: Any = op.get_bind().connection.dbapi_connection
    connection.run_async(lambda driver: driver.execute(script))
