"""What storage's tests do before they look: sessions made through the verbs, calls that are due. Must not assert."""

from datetime import datetime
from typing import Any

from app.domain import unwinding
from app.domain.draft import Draft, Surroundings
from app.domain.egress import EgressPolicy
from app.domain.intercept import Execute, InterceptRules
from app.domain.model import OrgName, Principal, Role, SessionId, StepIndex
from app.domain.sending import Move
from app.domain.unwinding import Undoing
from app.engine.forward import Forward
from app.engine.verbs import Ask, Verbs
from app.storage import calls, changes
from app.storage.calls import LockedCall
from app.storage.changes import Lease
from app.storage.claims import Claim
from app.storage.database import Database
from tests.domain.world import command, new_compensation
from tests.factories import new_events
from tests.probes import claim_due

ACME = OrgName("acme")
BETA = OrgName("beta")
RUN = SessionId("run-1")
STEP = StepIndex(1)
RESULT = b'{"credit_id":"c-1"}'
LEASE = Lease(worker="worker-1", seconds=30.0)
RULES = InterceptRules(is_inline_allowed=True, egress=EgressPolicy(), approval_ttl_seconds=3_600)


def agent_of(org: OrgName, subject: str = "robot-1") -> Principal:
    """Return an agent of an org."""
    return Principal(org=org, role=Role.AGENT, subject=subject, key_id="0123456789ab")


def verbs(database: Database) -> Forward:
    """Return the agent's verbs."""
    return Forward(verbs=Verbs(database=database, events=new_events()), rules=RULES, idle_seconds=600)


async def do_steps(database: Database, session_id: SessionId, count: int, org: OrgName = ACME, **compensation: Any) -> list[Execute]:
    """Intercept and commit undoable steps 1 to `count`."""
    done = []
    for index in range(1, count + 1):
        asked = command(step_index=StepIndex(index), compensation=new_compensation(**compensation))
        decision = await verbs(database).intercept(agent_of(org), session_id, asked)
        await verbs(database).commit(Ask(principal=agent_of(org), session_id=session_id), StepIndex(index), RESULT, lambda _: b"")
        if isinstance(decision, Execute):
            done.append(decision)
    return done


async def fail(database: Database, session_id: SessionId = RUN, org: OrgName = ACME) -> None:
    """Fail a run: its newest undo is due."""
    await verbs(database).fail_session(Ask(principal=agent_of(org), session_id=session_id), "the run failed", None, lambda _: b"")


async def claim(database: Database, lease: Lease = LEASE, limit: int = 10) -> list[Claim]:
    """Claim what is due in any org."""
    async with database.dispatch() as connection:
        return await claim_due(connection, lease, limit)


async def begin(database: Database, claimed: Claim, lease: Lease = LEASE) -> Move:
    """Let a worker count its next attempt, and go no further."""
    async with database.transaction(claimed.org) as tx:
        locked = await calls.lock_call(tx, claimed)
        draft = Draft(locked.session, surroundings(locked.now))
        move = unwinding.begin(draft, undoing(locked))
        await changes.write(tx, [draft.changes()], lease=lease)
    return move


def undoing(locked: LockedCall) -> Undoing:
    """Return the work of a locked call that is an undo."""
    if not isinstance(locked.work, Undoing):
        raise TypeError(f"expected an undo, found {locked.work}")
    return locked.work


def surroundings(now: datetime) -> Surroundings:
    """Return what a decision of these tests needs from outside: dice are zeros."""
    return Surroundings(now=now, actor="orchestrator", random_bytes=bytes)
