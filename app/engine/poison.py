"""What a crash at the loops' edges leads to: counted, and in the end a person's. Must not touch what the crash was about."""

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass

from app.domain import poison as rules
from app.domain.draft import Draft, Surroundings
from app.domain.model import OrgName, SessionId, SessionState
from app.domain.outcomes import REPORTING_STATES
from app.domain.retry import Failure
from app.domain.states import RESTING_STATES, UNWINDING_STATES
from app.engine import verbs
from app.engine.events import ORCHESTRATOR, Events
from app.storage import poison, sessions
from app.storage.claims import Claim
from app.storage.database import Database
from app.storage.sessions import Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """Takes sessions out of the work that bring it down, over one database."""

    database: Database
    events: Events
    random_bytes: Callable[[int], bytes] = secrets.token_bytes

    async def count_crash(self, claim: Claim, error: Exception) -> None:
        """Count a crash over a claimed call and put the call off; once there were too many, put its session down.

        Raises:
            StorageUnavailable: the database is away; the lease will run out.
        """
        told = f"{Failure.INTERRUPTED}: the worker crashed over it ({type(error).__name__}); its log says more, under call_crashed"
        async with self.database.transaction(claim.org) as tx:
            await sessions.lock(tx, claim.session_id, Wanted())
            crash = await poison.count_crash(tx, claim, told)
        if crash is None:
            return
        if crash.was_attempt_open:
            self.events.telemetry.count_interrupted(claim.kind.value)
        if rules.is_poison(crash.count):
            await self.put_down(claim.org, claim.session_id, REPORTING_STATES | UNWINDING_STATES)

    async def put_down(self, org: OrgName, session_id: SessionId, states: Collection[SessionState] = REPORTING_STATES) -> None:
        """Hand a session to a person, if it is in one of `states` still; one at rest stays as it is, and no call of it is worked on.

        Raises:
            StorageUnavailable: the database is away.
        """
        async with self.database.transaction(org) as tx:
            locked = await sessions.lock(tx, session_id, Wanted())
            if locked is None or locked.session.state not in {*states, *RESTING_STATES}:
                return
            draft = Draft(locked.session, Surroundings(now=locked.now, actor=ORCHESTRATOR, random_bytes=self.random_bytes))
            ended = rules.put_down(draft, await poison.open_steps(tx, session_id))
            await poison.put_down(tx, session_id, ended)
            written = None if draft.is_empty else await verbs.write(tx, draft)
        if written is not None:
            self.events.announce(written)
