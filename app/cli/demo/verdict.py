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
        Check(promise="the world is as it was", fault=_world(findings)),
        Check(promise="the keys were `undo-<undo_id>` of the intercept answers, no others", fault=_keys(expected, calls)),
        Check(promise="the order was the exact reverse, one at a time", fault=_order(expected, calls)),
        Check(promise="each undo was applied exactly once", fault=_once(expected, calls)),
    ]
    if findings.killed_step is not None:
        fault = _repeat(findings)
        checks.append(Check(promise="the undo in doubt was sent again under the same key with identical bytes", fault=fault))
    return [*checks, _session(findings), _journal(findings)]


def _world(findings: Findings) -> str:
    if findings.now.is_as(findings.before):
        return ""
    before, now = findings.before, findings.now
    return (
        f"credits ${before.credited:,} -> ${now.credited:,}, ticket {before.ticket_status} -> {now.ticket_status}, "
        f"notes {len(before.notes)} -> {len(now.notes)}, mails {before.mails} -> {now.mails}"
    )


def _keys(expected: Sequence[str], calls: Sequence[LoggedCall]) -> str:
    seen = {call.request.key for call in calls}
    missing, surplus = set(expected) - seen, seen - set(expected)
    return "; ".join(
        f"{word} {', '.join(sorted(keys))}" for word, keys in (("never came:", missing), ("came unexpected:", surplus)) if keys
    )


def _order(expected: Sequence[str], calls: Sequence[LoggedCall]) -> str:
    seen = list(dict.fromkeys(call.request.key for call in calls))
    runs = [call.request.key for number, call in enumerate(calls) if number == 0 or calls[number - 1].request.key != call.request.key]
    if seen != list(expected) or runs != seen:
        return f"the endpoints saw {', '.join(runs) or 'nothing'}; expected {', '.join(expected)}"
    for earlier, later in pairwise(calls):
        if earlier.ended_at is None or later.arrived_at < earlier.ended_at:
            return f"{later.request.key} arrived before {earlier.request.key} was answered"
    return ""


def _once(expected: Sequence[str], calls: Sequence[LoggedCall]) -> str:
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
