"""The verbs by which people pause and resume: a destination, an org, everything. Must not touch a call: it is claimed, or is not."""

from dataclasses import dataclass

import structlog

from app.domain.model import OrgName
from app.storage import circuits, pauses
from app.storage.database import Database
from app.storage.pauses import Pause

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Pauses:
    """Pauses and resumes in one database. A repeat does no harm: what was ordered first stands, and only what is new is logged."""

    database: Database

    async def pause(self, org: OrgName, destination: str | None, actor: str, reason: str) -> Pause | None:
        """Let nothing more be sent to a destination, or (None) for the whole org; return what holds it then."""
        async with self.database.transaction(org) as tx:
            is_new = await pauses.pause(tx, destination, actor, reason)
            standing = await pauses.widest(tx, destination)
        if is_new:
            _log.info("paused", org=org, destination=destination, actor=actor, reason=reason)
        return standing

    async def resume(self, org: OrgName, destination: str | None, actor: str, reason: str) -> tuple[bool, Pause | None]:
        """Take a pause away and have what is held to be away probed at once; return whether there was one, and the wider one that stays."""
        async with self.database.transaction(org) as tx:
            is_new = await pauses.resume(tx, destination)
            await circuits.probe_now(tx, destination)
            standing = await pauses.widest(tx, destination)
        if is_new:
            _log.info("resumed", org=org, destination=destination, actor=actor, reason=reason)
        return is_new, standing

    async def pause_everything(self, actor: str, reason: str) -> bool:
        """Let nothing more be sent for any org; return False where that was so already."""
        async with self.database.dispatch() as connection:
            is_new = await pauses.pause_everything(connection, actor, reason)
        if is_new:
            _log.info("paused", org=None, destination=None, actor=actor, reason=reason)
        return is_new

    async def resume_everything(self, actor: str, reason: str) -> bool:
        """Take the pause of everything away; return False where there was none."""
        async with self.database.dispatch() as connection:
            is_new = await pauses.resume_everything(connection)
        if is_new:
            _log.info("resumed", org=None, destination=None, actor=actor, reason=reason)
        return is_new
