"""Every arrow of docs/reference/states.md is reached over HTTP, and no other. Must not move anything itself: it only watches."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from app.domain import states
from app.domain.draft import Draft
from app.domain.model import Approval, ApprovalState, Effect, Session, UndoEntry
from app.domain.states import EFFECT_MOVES, SESSION_MOVES, UNDO_MOVES
from tests.factories import Service, park
from tests.fakes import FakeEndpoint
from tests.golden import REPOSITORY
from tests.halts import REFUSED, WIRE, Night
from tests.operators import order, undo_ids
from tests.probes import fetch

Arrow = tuple[str, str]
LET_EXPIRE_SQL = "UPDATE approvals SET expires_at = requested_at + interval '1 us' WHERE session_id = $1"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[type, set[Arrow]]:
    """Return what will hold each move that is made, by what it moves; the moves themselves are made as ever."""
    moves: dict[type, set[Arrow]] = {kind: set() for kind in (Session, Effect, UndoEntry, Approval)}
    change_approval = Draft.change_approval

    def watched_advance(thing: Any, to: Any, **changes: Any) -> Any:
        moved = states.advance(thing, to, **changes)
        moves[type(thing)].add((str(thing.state), str(to)))
        return moved

    def watched_change(self: Draft, approval: Approval, to: ApprovalState, **changes: Any) -> Approval:
        changed = change_approval(self, approval, to, **changes)
        moves[Approval].add((str(approval.state), str(to)))
        return changed

    monkeypatch.setattr("app.domain.draft.advance", watched_advance)
    monkeypatch.setattr(Draft, "change_approval", watched_change)
    return moves


async def test_every_arrow_is_reached_and_no_other_when_small_sessions_are_walked(
    service: Service, endpoint: FakeEndpoint, seen: dict[type, set[Arrow]]
) -> None:
    """Nothing is drawn that cannot happen, and nothing happens that is not drawn."""
    night = Night(service=service, endpoint=endpoint)
    await end_well(night)
    await unwind_and_learn_late(night)
    await undo_with_a_persons_help(night)
    await decide(night)
    await let_questions_lapse(night)
    await go_past_the_pivot(night)
    assert seen[Session] == arrows_of(SESSION_MOVES)
    assert seen[Effect] == arrows_of(EFFECT_MOVES)
    assert seen[UndoEntry] == arrows_of(UNDO_MOVES)
    assert seen[Approval] == drawn_arrows("Approval")


def arrows_of(moves: Mapping[Any, frozenset[Any]]) -> set[Arrow]:
    """Return a table of moves as arrows."""
    return {(str(source), str(target)) for source, targets in moves.items() for target in targets}


def drawn_arrows(title: str) -> set[Arrow]:
    """Return the arrows between states that one section of docs/reference/states.md draws."""
    text = (REPOSITORY / "docs/reference/states.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {title}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return {arrow for arrow in re.findall(r"^ +(\S+) --> (\S+)$", section, re.MULTILINE) if "[*]" not in arrow}


async def expect(night: Night, name: str, state: str) -> None:
    """Be sure that a session has come to where the walk says."""
    assert (await night.service.operator.session(name))["state"] == state, name


async def end_well(night: Night) -> None:
    """End a run well, with a read of which nobody told the end."""
    await night.run("ends", 1)
    (await night.service.agent.intercept("ends", step_index=2, reversibility="read_only")).raise_for_status()
    (await night.service.agent.complete("ends")).raise_for_status()
    await expect(night, "ends", "completed")


async def unwind_and_learn_late(night: Night) -> None:
    """Fail a run with calls of which more is learnt, in time and too late; a person closes it."""
    agent = night.service.agent
    await night.run("learns", 1)
    for step in (2, 3, 4, 5):
        await night.open_step("learns", step)
    for step in (2, 3):
        (await agent.fail_effect("learns", step)).raise_for_status()
    (await agent.commit("learns", 2)).raise_for_status()
    for step in (3, 4):
        (await agent.fail_effect("learns", step, "not_applied")).raise_for_status()
    await night.failed("learns")
    await expect(night, "learns", "compensated")
    assert (await agent.commit("learns", 5, {"id": "late"})).status_code == 409
    await expect(night, "learns", "halted")
    (await order(night.service.operator, "learns", "resolve")).raise_for_status()
    await expect(night, "learns", "resolved")


async def undo_with_a_persons_help(night: Night) -> None:
    """Have undos refused; try one again, let it stand, or do it by hand, as one that was never sent."""
    operator = night.service.operator
    await night.refused("helped", 3, REFUSED)
    ids = await undo_ids(operator, "helped")
    (await order(operator, "helped", f"undo/{ids[3]}/retry", params={"wait_s": 20})).raise_for_status()
    await expect(night, "helped", "halted")
    (await order(operator, "helped", f"undo/{ids[3]}/skip")).raise_for_status()
    (await order(operator, "helped", f"undo/{ids[2]}/skip", by_hand=True)).raise_for_status()
    (await order(operator, "helped", "unwind", params={"wait_s": 20})).raise_for_status()
    await expect(night, "helped", "compensated")
    await night.refused("by-hand", 1)
    (undo_id,) = (await undo_ids(operator, "by-hand")).values()
    (await order(operator, "by-hand", f"undo/{undo_id}/skip", by_hand=True)).raise_for_status()


async def decide(night: Night) -> None:
    """Have a person answer: no, yes to other bytes than come then, yes to what is never used."""
    agent, operator = night.service.agent, night.service.operator
    for name in ("rejected", "mismatched", "unused"):
        await night.run(name, 1)
        await park(agent, name, 2, WIRE)
    (await operator.reject("rejected", 2)).raise_for_status()
    for name in ("mismatched", "unused"):
        (await operator.approve(name, 2)).raise_for_status()
    assert (await agent.resume("mismatched", 2, WIRE + " ")).status_code == 409
    for name in ("rejected", "mismatched", "unused"):
        await night.failed(name)
        await expect(night, name, "compensated")


async def let_questions_lapse(night: Night) -> None:
    """Ask what nobody answers in time, and get an answer that nobody uses in time."""
    for name in ("unanswered", "late-resume"):
        await park(night.service.agent, name, 1, WIRE)
    (await night.service.operator.approve("late-resume", 1)).raise_for_status()
    for name in ("unanswered", "late-resume"):
        await fetch(night.service.database_url, LET_EXPIRE_SQL, name)
    assert (await night.service.operator.approve("unanswered", 1)).status_code == 409
    assert (await night.service.agent.resume("late-resume", 1, WIRE)).status_code == 409
    for name in ("unanswered", "late-resume"):
        await expect(night, name, "compensated")


async def go_past_the_pivot(night: Night) -> None:
    """Fail runs after something irreversible: while they are at work, and while they wait for another decision."""
    await night.pivoted("at-work", 1)
    await expect(night, "at-work", "halted")
    await night.released("waiting", 1)
    (await night.service.agent.commit("waiting", 1)).raise_for_status()
    await park(night.service.agent, "waiting", 2, WIRE)
    await night.failed("waiting")
    await expect(night, "waiting", "halted")
