"""Give sessions steps through the domain and storage floors, many to a transaction. Must not skip what a verb decides or journals."""

import secrets
from collections.abc import Sequence
from hashlib import sha256

from app.domain import intercept, outcomes
from app.domain.draft import Draft, Surroundings
from app.domain.egress import EgressPolicy
from app.domain.intercept import Execute, InterceptCommand, InterceptRules, Seen
from app.domain.model import Compensation, Principal, SessionId, StepIndex
from app.domain.outcomes import Reported
from app.storage import changes, sessions
from app.storage.database import Database
from app.storage.sessions import Locked, NewSession, Wanted

PAYLOAD = b'{"order":4921,"note":"' + b"x" * 1_000 + b'"}'  # so that a session held in memory would be seen
RESULT = b'{"credit_id":"' + b"c" * 1_000 + b'"}'
ARGS = b'{"credit_id":{"$ref":"result#/credit_id"}}'
SESSIONS_PER_COMMIT = 100
RULES = InterceptRules(is_inline_allowed=True, egress=EgressPolicy.parse("127.0.0.0/8"), approval_ttl_seconds=3_600)
NOTHING_SEEN = Seen(tool=None, at_step=None, under_key=None, unsettled=(), undo_of_repeat=None, approval_of_repeat=None)


def begin(locked: Locked) -> Draft:
    """Begin an account of what an agent does to a session."""
    return Draft(locked.session, Surroundings(now=locked.now, actor=f"agent:{locked.session.owner}", random_bytes=secrets.token_bytes))


def take_step(draft: Draft, step: int, url: str) -> None:
    """Decide an intercept and its commit, of a call that is undone at `url`."""
    command = InterceptCommand(
        tool="issue_credit",
        payload=PAYLOAD,
        payload_pointer="/payload",
        step_index=StepIndex(step),
        reversibility=None,
        compensation=Compensation(url=url, args=ARGS),
        request_key=None,
        request_sha256=sha256(b"%d" % step).digest(),
        traceparent=None,
    )
    decision = intercept.decide(draft, command, NOTHING_SEEN, RULES)
    assert isinstance(decision, Execute)
    committed = outcomes.commit(draft, Reported(effect=decision.effect, undo_entry=decision.undo_entry, approval=None), RESULT)
    assert isinstance(committed, Reported)


async def make_sessions(database: Database, agent: Principal, names: Sequence[str], steps: int, url: str) -> None:
    """Open sessions of one agent and give each so many committed steps, all undone at `url`."""
    for first in range(0, len(names), SESSIONS_PER_COMMIT):
        async with database.transaction(agent.org) as tx:
            for name in names[first : first + SESSIONS_PER_COMMIT]:
                new = NewSession(
                    session_id=SessionId(name),
                    owner=agent.subject,
                    agent=agent.subject,
                    metadata=b"{}",
                    idle_seconds=86_400,
                    deadline_at=None,
                )
                await sessions.open_session(tx, new)
                locked = await sessions.lock(tx, new.session_id, Wanted())
                assert locked is not None
                draft = begin(locked)
                draft.open()
                for step in range(1, steps + 1):
                    take_step(draft, step, url)
                await changes.write(tx, [draft.changes()])
