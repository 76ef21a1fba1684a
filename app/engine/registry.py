"""The administrator's verbs on tools: register, remove. Must not change a version that is there: every change is a new one."""

from dataclasses import dataclass
from datetime import datetime

from app.domain import tools as rules
from app.domain.egress import EgressPolicy
from app.domain.errors import NotFound, Unavailable
from app.domain.model import Principal
from app.domain.tools import Definition, Tool
from app.storage import tools
from app.storage.database import Database

TRIES = 3  # two administrators at once: the later one sees the earlier one's version and comes after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The newest version of a tool; `is_new`: it was not before. `created_at` None: it only would be (a dry run)."""

    tool: Tool
    created_by: str
    created_at: datetime | None
    is_new: bool


@dataclass(frozen=True, slots=True)
class Registry:
    """The registered tools of every org of one database."""

    database: Database
    egress: EgressPolicy

    async def register(self, principal: Principal, name: str, definition: Definition, *, is_dry_run: bool) -> Registered:
        """Make a definition the newest version; the very same one again changes nothing.

        Raises:
            Invalid: it could not work.
        """
        refusal = rules.check(definition, self.egress)
        if refusal is not None:
            raise refusal
        for _ in range(TRIES):
            async with self.database.transaction(principal.org) as tx:
                newest = await tools.find(tx, name)
                if newest is not None and not newest.is_deleted and newest.tool.definition == definition:
                    return Registered(tool=newest.tool, created_by=newest.created_by, created_at=newest.created_at, is_new=False)
                tool = Tool(name=name, version=newest.tool.version + 1 if newest else 1, definition=definition)
                if is_dry_run:
                    return Registered(tool=tool, created_by=principal.subject, created_at=None, is_new=True)
                added = await tools.add(tx, tool, principal.subject, is_deleted=False)
            if added is not None:
                return Registered(tool=tool, created_by=principal.subject, created_at=added, is_new=True)
        raise Unavailable("registry_busy", f"tool {name!r} is being changed by others; try again")

    async def remove(self, principal: Principal, name: str) -> None:
        """Say that a name is no longer registered; calls made before keep the version they saw.

        Raises:
            NotFound: it is not registered.
        """
        for _ in range(TRIES):
            async with self.database.transaction(principal.org) as tx:
                newest = await tools.find(tx, name)
                if newest is None or newest.is_deleted:
                    raise tool_not_found(name)
                gone = Tool(name=name, version=newest.tool.version + 1, definition=newest.tool.definition)
                if await tools.add(tx, gone, principal.subject, is_deleted=True) is not None:
                    return
        raise Unavailable("registry_busy", f"tool {name!r} is being changed by others; try again")


def tool_not_found(name: str) -> NotFound:
    """Return the answer for a name that is not registered."""
    return NotFound("tool_not_found", f"no tool {name!r} is registered", tool=name)
