"""What the story is played with: the outside systems, the service's settings, and who holds which key. Must not act in the story."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import httpx

from app.cli import keys
from app.cli.demo.agent import Agent
from app.cli.demo.api import Api
from app.cli.demo.failure import DemoFailed
from app.cli.demo.journal import Journal, read_journal
from app.cli.demo.listeners import Addresses, World
from app.cli.demo.person import Person
from app.cli.demo.systems import ORDER
from app.domain.model import Role

ORG = "demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What the story is played with."""

    world: World
    at: Addresses
    log: Path
    environment: Mapping[str, str]
    database_url: str
    http: httpx.Client


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Who takes part, each with a key of their own, and where they find the service."""

    http: httpx.Client
    url: str
    keys: Mapping[Role, str]

    def agent(self, session_id: str) -> Agent:
        """Return the agent with one of its sessions."""
        return Agent(api=self._api(Role.AGENT), tools=self.http, session_id=session_id)

    @property
    def person(self) -> Person:
        """The operator."""
        return Person(api=self._api(Role.OPERATOR))

    def journal(self, session_id: str) -> Journal:
        """Read a session's journal with an auditor's key."""
        return read_journal(self._api(Role.AUDITOR), session_id)

    def _api(self, role: Role) -> Api:
        return Api(http=self.http, url=self.url, key=self.keys[role])


def settings_of(database_url: str, *, crash: bool) -> dict[str, str]:
    """Return all the settings of the service; whatever the caller has set beside the database is not inherited."""
    return {
        "COUNTERMAND_DATABASE_URL": database_url,
        "COUNTERMAND_HOST": "127.0.0.1",
        "COUNTERMAND_PORT": "0",
        "COUNTERMAND_EGRESS_ALLOW": "127.0.0.0/8",
        "COUNTERMAND_INLINE_TOOLS": "allow",
        "COUNTERMAND_GRACE_SECONDS": "2",
        # How long the call of a killed worker stays its own: short, so that nobody waits half a minute for the show to go on.
        "COUNTERMAND_LEASE_SECONDS": "1" if crash else "30",
        "COUNTERMAND_POLL_SECONDS": "0.2",
    }


def cast(stage: Stage, url: str) -> Cast:
    """Give everybody a key, once the service is ready.

    Raises:
        DemoFailed: it is not; one sentence says what is missing, e.g. on somebody's own database without our schema.
    """
    response = stage.http.get(f"{url}/readyz")
    if not response.is_success:
        found = response.json() if response.headers.get("Content-Type", "").startswith("application/problem+json") else {}
        raise DemoFailed(f"the service is not ready: {found.get('detail', response.status_code)}")
    made = {
        role: keys.create(stage.database_url, org=ORG, role=role, subject=subject_of(role)).key
        for role in (Role.AGENT, Role.AUDITOR, Role.OPERATOR)
    }
    return Cast(http=stage.http, url=url, keys=made)


def subject_of(role: Role) -> str:
    """Return who holds the key of a role: no two are the same person."""
    return f"demo-{role}"


def new_session_id() -> str:
    """Return a name for one more run about the order."""
    return f"refund-{ORDER}-{token_hex(4)}"
