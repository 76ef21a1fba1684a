"""Delete what is past its retention, org by org, batch by batch. Must not guess a bound, nor take one that is too short."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass

from app.cli.manners import SetupError
from app.domain.model import OrgName
from app.settings import Settings
from app.storage import retention, tools
from app.storage.database import Database, MayNotPrune, is_org_name, open_database

DAY_SECONDS = 86_400  # also what an Idempotency-Key is kept for at least (contract, section 5): no bound is shorter
MAX_DAYS = 36_500
TOOLS_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Sessions that ended more than so many days ago go: of one org, or of all (None). `is_dry_run`: they are counted and stay."""

    days: int
    org: OrgName | None
    is_dry_run: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """How many sessions went, or would, and how many past the bound stay because a person had a hand in them, by org."""

    bound: Bound
    went: dict[OrgName, int]
    kept: dict[OrgName, int]

    def as_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(
            {
                "sessions": sum(self.went.values()),
                "kept": sum(self.kept.values()),
                "orgs": {org: {"sessions": self.went[org], "kept": self.kept[org]} for org in self.went},
                "older_than_days": self.bound.days,
                "dry_run": self.bound.is_dry_run,
            }
        )

    def as_text(self) -> str:
        """Return one line per org with something past the bound, and their sum."""
        done = "would be deleted" if self.bound.is_dry_run else "deleted"
        lines = [
            f"{org}: {self.went[org]} {done}, {self.kept[org]} kept (resolved, or not clean)"
            for org in self.went
            if self.went[org] or self.kept[org]
        ]
        total = f"{sum(self.went.values())} sessions that ended more than {self.bound.days} days ago {done}, {sum(self.kept.values())} kept"
        return "\n".join([*lines, total])


def bound_of(settings: Settings, *, days: int | None, org: str | None, is_dry_run: bool) -> Bound:
    """Return what was asked for, the setting standing in for the option.

    Raises:
        SetupError: no bound was given, or none that could be; or an org that cannot be one.
    """
    days = settings.retention_days if days is None else days
    if days is None:
        raise SetupError("say how old: --older-than-days, or COUNTERMAND_RETENTION_DAYS")
    if not 1 <= days <= MAX_DAYS:
        raise SetupError(f"expected 1 to {MAX_DAYS} days, found {days}: answers under an Idempotency-Key are kept for 24 hours at least")
    if org is not None and not is_org_name(org):
        raise SetupError(f"{org!r} is no org name: expected 1 to 63 of a-z, 0-9 and hyphens inside")
    return Bound(days=days, org=None if org is None else OrgName(org), is_dry_run=is_dry_run)


def prune(database_url: str, bound: Bound, approval_ttl_seconds: int) -> Pruned:
    """Delete, or count, what is past the bound. Killed at any moment, it leaves each session whole or gone.

    Raises:
        SetupError: a question to a person may be open for longer than the bound; no such org; or the login user may not prune.
        StorageUnavailable: the database cannot be reached.
    """
    try:
        return asyncio.run(_prune(database_url, bound, approval_ttl_seconds))
    except MayNotPrune as error:
        raise SetupError(str(error)) from error


async def _prune(database_url: str, bound: Bound, approval_ttl_seconds: int) -> Pruned:
    async with open_database(database_url, size=1, application_name="countermand prune", keeps_statements=False) as database:
        orgs = await _orgs(database, bound.org)
        _check(bound, "COUNTERMAND_APPROVAL_TTL_SECONDS", approval_ttl_seconds)
        for org in orgs:
            await _check_tools(database, bound, org)
        went, kept = {}, {}
        for org in orgs:
            went[org], kept[org] = await _prune_org(database, bound, org)
    return Pruned(bound=bound, went=went, kept=kept)


async def _orgs(database: Database, named: OrgName | None) -> Iterable[OrgName]:
    async with database.prune(None) as connection:
        found = await retention.orgs(connection)
    if named is None:
        return found
    if named not in found:
        raise SetupError(f"there is no org {named!r}")
    return [named]


async def _check_tools(database: Database, bound: Bound, org: OrgName) -> None:
    after = None
    while True:
        async with database.transaction(org) as tx:
            page = await tools.newest(tx, after, TOOLS_AT_ONCE)
        for kept in page:
            approval = kept.tool.definition.approval
            if approval is not None and approval.ttl_seconds is not None:
                _check(bound, f"ttl_seconds of tool {kept.tool.name} of org {org}", approval.ttl_seconds)
        if len(page) < TOOLS_AT_ONCE:
            return
        after = page[-1].tool.name


def _check(bound: Bound, what: str, ttl_seconds: int) -> None:
    if bound.days * DAY_SECONDS < ttl_seconds:
        raise SetupError(f"{bound.days} days are shorter than {what}, {ttl_seconds} s: a run may wait for a person for that long")


async def _prune_org(database: Database, bound: Bound, org: OrgName) -> tuple[int, int]:
    went = 0
    while not bound.is_dry_run:
        async with database.prune(org) as connection:
            gone = await retention.prune(connection, org, bound.days)
        if not gone:
            break
        went += gone
    async with database.prune(org) as connection:
        past = await retention.count_past(connection, org, bound.days)
    return (past.prunable if bound.is_dry_run else went), past.kept
