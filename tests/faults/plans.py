"""What a seed says will happen: sessions, endpoints, faults. Must not depend on anything but the seed, nor do any of it."""

import re
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from tests.faults.endpoint import JsonReply
from tests.faults.proxy import ANY, WRITES_OF_ORGS

ORGS = ("acme", "umbra")
SESSIONS = 12
MAX_STEPS = 5
ATTEMPT_SECONDS = 0.8  # the service's deadline for one attempt: what is slower is asked again


class Kind(StrEnum):
    """What a step does. `wire` runs where it was released, `action` is run by the service; both need a person first."""

    UNDOABLE = "undoable"
    READ = "read"
    WIRE = "wire"
    ACTION = "action"


class Report(StrEnum):
    """What the agent says of a call it ran. Late ones come after the run has failed; of a silent one nobody ever hears."""

    COMMIT = "commit"
    NOT_APPLIED = "not_applied"
    UNKNOWN = "unknown"
    SILENT = "silent"
    LATE_COMMIT = "late_commit"
    LATE_NOT_APPLIED = "late_not_applied"


class Decision(StrEnum):
    """What a person makes of a question, and what becomes of a yes."""

    APPROVE = "approve"
    CONTEST = "contest"
    REJECT = "reject"
    REJECT_AND_CONTINUE = "reject_and_continue"
    MISMATCH = "mismatch"
    IGNORE = "ignore"
    EXPIRE = "expire"


class Ending(StrEnum):
    """How a run ends."""

    FAIL = "fail"
    COMPLETE = "complete"
    ABANDON = "abandon"


class Rescue(StrEnum):
    """What an operator does with a session that halted."""

    RETRY = "retry"
    SKIP = "skip"
    UNWIND = "unwind"
    RESOLVE = "resolve"
    LEAVE = "leave"


class Fault(StrEnum):
    """What is broken."""

    KILL = "kill -9"
    KILL_BEFORE_COMMIT = "kill -9 before COMMIT is forwarded"
    KILL_AFTER_COMMIT = "kill -9 before COMMIT is answered"
    STOP = "SIGTERM"
    FREEZE = "SIGSTOP, SIGCONT"
    CUT_BEFORE_COMMIT = "connection cut before COMMIT is forwarded"
    CUT_AFTER_COMMIT = "connection cut before COMMIT is answered"
    RESET = "all connections of a replica to Postgres reset"
    STALL = "connections of a replica to Postgres stalled"
    SLOW = "every message to and from Postgres delayed"
    POSTGRES = "Postgres immediate restart"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One call. `decision` counts where a person has to approve; `is_twin`: it is asked for twice at once, as by an impatient client."""

    ordinal: int
    kind: Kind
    report: Report
    decision: Decision
    act: tuple[JsonReply, ...]
    undo: tuple[JsonReply, ...]
    max_retries: int
    is_registered: bool
    is_independent: bool
    is_twin: bool
    is_numbered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """One run of an agent."""

    number: int
    org: str
    name: str
    starts_after: float
    steps: tuple[StepPlan, ...]
    ending: Ending
    rescue: Rescue


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """One fault: when, to which replica, for how long (or until it is started again), to how many connections.

    It comes so many seconds after a session began, or after it began to fail: on a slow machine everything is later, and faults are too.
    `begun`: how the transactions begin whose COMMIT it waits for. `is_aimed`: it strikes where an undo is under way.
    """

    kind: Fault
    session: int
    is_at_failure: bool
    after: float
    replica: int
    seconds: float
    count: int
    begun: re.Pattern[bytes]
    is_aimed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a seed says."""

    seed: int
    orgs: tuple[str, ...]
    sessions: tuple[SessionPlan, ...]
    faults: tuple[FaultPlan, ...]


def plan_of(seed: int, seconds: float) -> Plan:
    """Return what happens under a seed whose sessions begin within so many seconds; the same for ever."""
    dice = Random(seed)
    orgs = tuple(f"{org}-{seed}" for org in ORGS)
    sessions = tuple(_session(dice, orgs, number, seconds) for number in range(SESSIONS))
    faults = tuple(_fault(dice) for _ in range(dice.randint(4, 9)))
    return Plan(seed=seed, orgs=orgs, sessions=sessions, faults=faults)


def _session(dice: Random, orgs: tuple[str, ...], number: int, seconds: float) -> SessionPlan:
    ending = dice.choices(list(Ending), [9, 2, 1])[0]
    count = dice.randint(1, MAX_STEPS)
    kinds = [dice.choices(list(Kind), [16, 1, 2, 2])[0] for _ in range(count)]
    last_question = max((at for at, kind in enumerate(kinds) if kind in {Kind.WIRE, Kind.ACTION}), default=-1)
    steps = []
    for at, kind in enumerate(kinds):
        must_settle = at < last_question or ending is Ending.COMPLETE or kind in {Kind.READ, Kind.WIRE, Kind.ACTION}
        may_end = at == count - 1 and ending is not Ending.COMPLETE
        steps.append(_step(dice, at + 1, kind, must_settle=must_settle, may_end=may_end))
    return SessionPlan(
        number=number,
        org=orgs[number % 2],
        name=f"same-{number // 2}" if number % 6 < 2 else f"run-{number}",  # both orgs have a session of that name
        starts_after=dice.uniform(0, seconds),
        steps=tuple(steps),
        ending=ending,
        rescue=dice.choice(list(Rescue)),
    )


def _step(dice: Random, ordinal: int, kind: Kind, *, must_settle: bool, may_end: bool) -> StepPlan:
    reports = [Report.COMMIT, Report.NOT_APPLIED] if must_settle else list(Report)
    is_heard = kind in {Kind.WIRE, Kind.READ, Kind.ACTION}
    decisions = list(Decision) if may_end else [Decision.APPROVE, Decision.CONTEST, Decision.REJECT_AND_CONTINUE]
    undo, max_retries = _undo(dice)
    return StepPlan(
        ordinal=ordinal,
        kind=kind,
        report=Report.COMMIT if is_heard else dice.choices(reports, [12, *[1] * (len(reports) - 1)])[0],
        decision=dice.choice(decisions),
        act=_answers(dice, dice.choices([_ok, _fails, _lost], [6, 1, 2])[0](dice), dice.random() < 0.2),
        undo=undo,
        max_retries=max_retries,
        is_registered=dice.random() < 0.3,
        is_independent=dice.random() < 0.1,
        is_twin=dice.random() < 0.2,
        is_numbered=dice.random() < 0.7,
    )


def _undo(dice: Random) -> tuple[tuple[JsonReply, ...], int]:
    """Return what the undo's endpoint plays, and how many retries it is given."""
    play = dice.choices(
        [_ok, _fails, _hangs, _drips, _lost, _resets, _busy, _asks_to_wait, _accepts, _refuses, _is_away],
        [16, 4, 1, 1, 3, 2, 1, 1, 1, 2, 1],
    )[0]
    return _answers(dice, play(dice), dice.random() < 0.25), 2 if play is _is_away else 8


def _answers(dice: Random, first: list[JsonReply], is_key_blind: bool) -> tuple[JsonReply, ...]:
    replies = [*first, {"delay_seconds": round(dice.uniform(0, 0.3), 3)}]
    return tuple({**reply, "forgets_key": True} for reply in replies) if is_key_blind else tuple(replies)


def _ok(dice: Random) -> list[JsonReply]:
    del dice
    return []


def _fails(dice: Random) -> list[JsonReply]:
    return [{"status": dice.choice([408, 425, 429, 500, 502, 503, 504])} for _ in range(dice.randint(1, 3))]


def _hangs(dice: Random) -> list[JsonReply]:
    del dice
    return [{"mode": "hang"}]


def _drips(dice: Random) -> list[JsonReply]:
    return [{"mode": dice.choice(["drip", "drip_head"])}]


def _lost(dice: Random) -> list[JsonReply]:
    return [{"mode": "reset_after_processing", "delay_seconds": round(dice.uniform(0, 0.1), 3)}]


def _resets(dice: Random) -> list[JsonReply]:
    return [{"mode": dice.choice(["reset_before_reply", "reset_in_body", "reset_after_reply", "close_without_reply"])}]


def _busy(dice: Random) -> list[JsonReply]:
    return [{"delay_seconds": ATTEMPT_SECONDS + dice.uniform(0.2, 0.8), "busy_status": 409}]


def _asks_to_wait(dice: Random) -> list[JsonReply]:
    return [{"status": dice.choice([429, 503]), "headers": {"Retry-After": "1"}}]


def _accepts(dice: Random) -> list[JsonReply]:
    return [{"status": 202} for _ in range(dice.randint(1, 2))]


def _refuses(dice: Random) -> list[JsonReply]:
    return [{"status": dice.choice([400, 404, 409, 422])}]


def _is_away(dice: Random) -> list[JsonReply]:
    return [{"status": dice.choice([500, 503])} for _ in range(3)]


def _fault(dice: Random) -> FaultPlan:
    kind = dice.choices(list(Fault), [5, 4, 4, 2, 5, 4, 4, 2, 2, 2, 2])[0]
    return FaultPlan(
        kind=kind,
        session=dice.randrange(SESSIONS),
        is_at_failure=dice.random() < 0.75,
        after=round(dice.uniform(0, 0.5), 3),
        replica=dice.randrange(2),
        seconds=round(dice.uniform(0.8, 2.0) if kind is Fault.FREEZE else dice.uniform(0.1, 1.6), 3),  # a lease lasts one second
        count=dice.randint(1, 4),
        begun=WRITES_OF_ORGS if dice.random() < 0.8 else ANY,
        is_aimed=dice.random() < 0.7,
    )
