"""Pause and resume with the database alone, without an operator's key. Must not ask who runs it: whoever has the database may."""

import asyncio
import re

import asyncpg

from app.cli.manners import SetupError
from app.domain.model import OrgName
from app.domain.sending import DESTINATION
from app.engine.pauses import Pauses
from app.storage.database import is_org_name, open_database

ACTOR = "command-line"
EVERYTHING = "everything"
MAX_REASON_CHARACTERS = 2_000


def pause(database_url: str, *, org: str | None, destination: str | None, reason: str) -> str:
    """Let nothing more be sent: to a destination of an org, of an org at all, or (no org) of any; return one line that says so.

    Raises:
        SetupError: no such org, a destination that cannot be one or is without its org, no reason. StorageUnavailable: the database
            cannot be reached.
    """
    return asyncio.run(_pause(database_url, _checked(org, destination, reason), destination, reason))


def resume(database_url: str, *, org: str | None, destination: str | None, reason: str) -> str:
    """Take such a pause away; return one line that says so.

    Raises:
        SetupError: no org's name, a destination that cannot be one or is without its org, no reason. StorageUnavailable: the database
            cannot be reached.
    """
    return asyncio.run(_resume(database_url, _checked(org, destination, reason), destination, reason))


def _checked(org: str | None, destination: str | None, reason: str) -> OrgName | None:
    if org is None and destination is not None:
        raise SetupError("--destination says where an org's calls go: name the org by --org")
    if destination is not None and not re.fullmatch(DESTINATION, destination):
        raise SetupError(f"{destination!r} is no destination: expected host:port, in lower case, as `GET /v1/destinations` shows it")
    if not 1 <= len(reason) <= MAX_REASON_CHARACTERS:
        raise SetupError(f"expected a reason of 1 to {MAX_REASON_CHARACTERS} characters")
    if org is not None and not is_org_name(org):
        raise SetupError(f"{org!r} is no org name: expected 1 to 63 of a-z, 0-9 and hyphens inside")
    return None if org is None else OrgName(org)


async def _pause(database_url: str, org: OrgName | None, destination: str | None, reason: str) -> str:
    async with open_database(database_url, size=1, application_name="countermand pause", keeps_statements=False) as database:
        if org is None:
            is_new = await Pauses(database).pause_everything(ACTOR, reason)
            return f"{EVERYTHING} is paused" if is_new else f"{EVERYTHING} was paused before"
        try:
            standing = await Pauses(database).pause(org, destination, ACTOR, reason)
        except asyncpg.ForeignKeyViolationError:
            raise SetupError(f"there is no org {org!r}") from None
    if standing is None:
        raise AssertionError("what was paused a moment ago is paused")
    return f"{_name(org, destination)} is paused ({standing.scope} since {standing.at:%Y-%m-%d %H:%M:%SZ}: {standing.reason})"


async def _resume(database_url: str, org: OrgName | None, destination: str | None, reason: str) -> str:
    async with open_database(database_url, size=1, application_name="countermand resume", keeps_statements=False) as database:
        if org is None:
            is_new = await Pauses(database).resume_everything(ACTOR, reason)
            return f"{EVERYTHING} is resumed" if is_new else f"{EVERYTHING} was not paused"
        is_new, standing = await Pauses(database).resume(org, destination, ACTOR, reason)
    if standing is None:
        return f"{_name(org, destination)} {'is resumed' if is_new else 'was not paused'}"
    return f"{_name(org, destination)} is still held by the pause of {_held_by(standing.scope, org)}: {standing.reason}"


def _held_by(scope: str, org: OrgName) -> str:
    return EVERYTHING if scope == EVERYTHING else f"the org {org}"


def _name(org: OrgName, destination: str | None) -> str:
    return org if destination is None else f"{org} at {destination}"
