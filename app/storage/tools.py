"""Registered tools: add a version, find the newest, list. Must not judge a definition: see `domain.tools`."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from asyncpg import Record

from app.domain import tools
from app.domain.tools import Definition, Tool
from app.storage.database import Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTool:
    """A tool's version with who registered it and when; `is_deleted`: this version says that the name is gone."""

    tool: Tool
    is_deleted: bool
    created_by: str
    created_at: datetime


NEWEST_TOOL_SQL = """
SELECT name, version, definition, is_deleted, created_by, created_at
FROM tools
WHERE org = $1 AND name = $2 AND ($3::integer IS NULL OR version = $3)
ORDER BY version DESC
LIMIT 1
"""


async def find(tx: Transaction, name: str, version: int | None = None) -> KeptTool | None:
    """Return the newest version under a name, which may say that it is gone, or a given version."""
    row = await tx.connection.fetchrow(NEWEST_TOOL_SQL, tx.org, name, version)
    return None if row is None else _kept(row)


ADD_TOOL_SQL = """
INSERT INTO tools (org, name, version, definition, is_deleted, created_by)
VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (org, name, version) DO NOTHING
RETURNING created_at
"""


async def add(tx: Transaction, tool: Tool, created_by: str, *, is_deleted: bool) -> datetime | None:
    """Add a version and return when; None where somebody else has just added the same one."""
    definition = tools.write(tool.definition)
    added: datetime | None = await tx.connection.fetchval(ADD_TOOL_SQL, tx.org, tool.name, tool.version, definition, is_deleted, created_by)
    return added


LIST_TOOLS_SQL = """
SELECT newest.name, newest.version, newest.definition, newest.is_deleted, newest.created_by, newest.created_at
FROM (
  SELECT DISTINCT ON (name) name, version, definition, is_deleted, created_by, created_at
  FROM tools
  WHERE org = $1 AND ($2::text IS NULL OR name > $2)
  ORDER BY name, version DESC
) AS newest
WHERE NOT newest.is_deleted
ORDER BY newest.name
LIMIT $3
"""


async def newest(tx: Transaction, after: str | None, limit: int) -> Sequence[KeptTool]:
    """Return the newest versions of up to `limit` registered tools, by name, after the given one."""
    return [_kept(row) for row in await tx.connection.fetch(LIST_TOOLS_SQL, tx.org, after, limit)]


def _kept(row: Record) -> KeptTool:
    definition: Definition = tools.read(row["definition"])
    return KeptTool(
        tool=Tool(name=row["name"], version=row["version"], definition=definition),
        is_deleted=row["is_deleted"],
        created_by=row["created_by"],
        created_at=row["created_at"],
    )
