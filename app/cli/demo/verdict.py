"""Is everything as promised? Judge what the endpoints, the world and the journal say. Must not look anything up."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from app.cli.demo.agent import Done
from app.cli.demo.listeners import WorldState
from app.cli.demo.systems import LoggedCall
from app.domain.model import SessionState


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What is known at the end of the story: `undone` from the endpoints' logs, oldest first, the rest from the API and the world.

    `killed_step`: the step whose undo was being processed when the service was killed; None if it was not.
    """

    done: Sequence[Done]
    undone: Sequence[LoggedCall]
    before: WorldState
    now: WorldState
    session_state: str
    halt_reason: str | None
    is_clean: bool
    is_journal_valid: bool
    journal_message: str
    journal_entries: int
    killed_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One promise; `fault` says what was found instead, empty if it was kept."""

    promise: str
    fault: str = ""


def judge(findings: Findings) -> list[Check]:
    """Return every promise with what became of it."""
    expected = [done.undo_key for done in reversed(findings.done) if done.undo_key is not None]
    calls = findings.undone
    checks = [
        Check(promise="the world is as it was", fault=world_fault(findings.before, findings.now)),
        Check(promise="the keys were `undo-<undo_id>` of the intercept answers, no others", fault=keys_fault(expected, calls)),
        Check(promise="the order was the exact reverse, one at a time", fault=order_fault(expected, calls)),
        Check(promise="each undo was applied exactly once", fault=once_fault(expected, calls)),
    ]
    if findings.killed_step is not None:
        fault = _repeat(findings)
        checks.append(Check(promise="the undo in doubt was sent again under the same key with identical bytes", fault=fault))
    return [*checks, _session(findings), _journal(findings)]


def world_fault(expected: WorldState, now: WorldState) -> str:
    """Say where the customer is not where `expected` has them; empty if they are."""
    if now.is_as(expected):
        return ""
    return (
        f"credits ${expected.credited:,} -> ${now.credited:,}, ticket {expected.ticket_status} -> {now.ticket_status}, "
        f"notes {len(expected.notes)} -> {len(now.notes)}, mails {expected.mails} -> {now.mails}"
    )


def keys_fault(expected: Sequence[str], calls: Sequence[LoggedCall]) -> str:
    """Say which undo never came, and which came that nobody expected; empty if it is as expected."""
    seen = {call.request.key for call in calls}
    missing, surplus = set(expected) - seen, seen - set(expected)
    return "; ".join(
        f"{word} {', '.join(sorted(keys))}" for word, keys in (("never came:", missing), ("came unexpected:", surplus)) if keys
    )


def order_fault(expected: Sequence[str], calls: Sequence[LoggedCall]) -> str:
    """Say where the undos did not come in this order, or not one at a time; empty if they did."""
    seen = list(dict.fromkeys(call.request.key for call in calls))
    runs = [call.request.key for number, call in enumerate(calls) if number == 0 or calls[number - 1].request.key != call.request.key]
    if seen != list(expected) or runs != seen:
        return f"the endpoints saw {', '.join(runs) or 'nothing'}; expected {', '.join(expected)}"
    for earlier, later in pairwise(calls):
        if earlier.ended_at is None or later.arrived_at < earlier.ended_at:
            return f"{later.request.key} arrived before {earlier.request.key} was answered"
    return ""


def once_fault(expected: Sequence[str], calls: Sequence[LoggedCall]) -> str:
    """Say which undo was not applied exactly once; empty if each was."""
    counts = {key: sum(call.is_applied for call in calls if call.request.key == key) for key in expected}
    return ", ".join(f"{key} was applied {count} times" for key, count in counts.items() if count != 1)


def _repeat(findings: Findings) -> str:
    key = next(done.undo_key for done in findings.done if done.step_index == findings.killed_step)
    sent = [call for call in findings.undone if call.request.key == key]
    if [call.request.attempt for call in sent] != [1, 2]:
        return f"attempts {[call.request.attempt for call in sent]} of {key} were seen, expected [1, 2]"
    if len({call.request.body for call in sent}) != 1:
        return f"{key} came with other bytes the second time"
    return ""


def _session(findings: Findings) -> Check:
    is_kept = findings.session_state == SessionState.COMPENSATED and findings.is_clean
    reason = f" ({findings.halt_reason})" if findings.halt_reason else ""
    fault = "" if is_kept else f"it is {findings.session_state}{reason}, {'clean' if findings.is_clean else 'not clean'}"
    return Check(promise="the session is compensated, and clean", fault=fault)


def _journal(findings: Findings) -> Check:
    promise = f"the journal's {findings.journal_entries} entries verify"
    return Check(promise=promise, fault="" if findings.is_journal_valid else findings.journal_message)
