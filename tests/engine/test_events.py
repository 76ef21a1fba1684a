"""What the log is told of a committed decision: classes and numbers. Must not be told what an agent or an endpoint wrote."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import structlog

from app.domain import outcomes, unwinding
from app.domain.draft import Draft
from app.domain.model import EffectState, HaltReason, Outcome, SessionState, UndoState
from app.domain.outcomes import FailReport, Reported
from app.domain.retry import Attempt
from app.domain.unwinding import StackItem, Undoing
from tests.domain.world import START, UNDO_URL, answered, new_call, new_compensation, new_draft, new_effect, new_entry, new_session
from tests.factories import new_events

SECRET = "sk-live-4242"


def announced(draft: Draft) -> dict[str, Mapping[str, Any]]:
    """Seal a decision, announce it, and return the events by name; none may hold anybody's text."""
    with structlog.testing.capture_logs() as logs:
        new_events().announce(draft.changes())
    assert SECRET not in repr(logs)
    return {event["event"]: event for event in logs}


def refuse(attempt: Attempt, attempts: int) -> Draft:
    """Record a final answer to the one undo of a session; agent and endpoint put a secret wherever they can."""
    compensation = new_compensation(f'{{"token":"{SECRET}"}}'.encode(), url=f"{UNDO_URL}/{SECRET}", description=SECRET)
    work = Undoing(
        call=new_call(
            url=compensation.url,
            body=compensation.args,
            outcome=Outcome.COMMITTED,
            attempts=attempts,
            is_attempt_open=True,
            first_sent_at=START,
        ),
        item=StackItem(entry=new_entry(UndoState.RUNNING, compensation=compensation), effect=new_effect(EffectState.COMPENSATING)),
        below=None,
        has_failed_entries=False,
    )
    draft = new_draft(new_session(SessionState.COMPENSATING))
    unwinding.record(draft, work, attempt, 0.5)
    return draft


def test_halt_says_why_when_an_undo_is_refused() -> None:
    """Reason, status and attempts are what an operator is woken with; what the endpoint wrote stays in the session."""
    attempt = replace(answered(422), detail=f"no such card: {SECRET}", location=f"https://ledger.example/{SECRET}")
    told = announced(refuse(attempt, 3))
    failed, halted = told["compensation_failed"], told["halted"]
    assert (failed["log_level"], failed["reason"], failed["status"], failed["attempts"]) == ("error", "compensation_failed", 422, 3)
    assert (halted["log_level"], halted["reason"]) == ("error", "compensation_failed")
    assert {"error", "text", "detail"} & (failed.keys() | halted.keys()) == set()
    assert all(event["org"] == "acme" and event["session_id"] == "run-1" for event in told.values())


def test_failure_says_its_outcome_when_an_agent_reports_it() -> None:
    """The outcome decides what is undone; the agent's own words are for the session's readers."""
    draft = new_draft(new_session(last_step=1))
    effect = new_effect(payload=f'{{"card":"{SECRET}"}}'.encode())
    outcomes.fail_effect(
        draft, Reported(effect=effect, undo_entry=new_entry()), FailReport(outcome=Outcome.NOT_APPLIED, error=f"declined: {SECRET}"), []
    )
    told = announced(draft)
    assert (told["failed"]["log_level"], told["failed"]["outcome"]) == ("warning", "not_applied")
    assert told["skipped"]["reason"] == "not_applied"


def test_run_says_no_more_than_that_it_failed_when_its_agent_gives_a_reason() -> None:
    """The error of a run is the agent's text."""
    draft = new_draft(new_session())
    outcomes.fail_session(draft, f"gave up on {SECRET}", [])
    told = announced(draft)
    assert told["session_failed"]["log_level"] == "warning"
    assert "error" not in told["session_failed"]


def test_halt_is_told_again_when_its_commit_may_have_been_lost() -> None:
    """A halt that nobody hears of leaves a session to nobody."""
    with structlog.testing.capture_logs() as logs:
        new_events().announce_state(new_session(SessionState.HALTED, halt_reason=HaltReason.EGRESS_DENIED))
    assert logs == [{"event": "halted", "log_level": "error", "org": "acme", "session_id": "run-1", "reason": HaltReason.EGRESS_DENIED}]


@pytest.mark.parametrize("state", [state for state in SessionState if state is not SessionState.HALTED])
def test_nothing_is_told_again_when_the_session_is_not_halted(state: SessionState) -> None:
    """Everything else goes on by itself, and is told where it does."""
    with structlog.testing.capture_logs() as logs:
        new_events().announce_state(new_session(state))
    assert logs == []
