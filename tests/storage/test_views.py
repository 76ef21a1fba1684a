"""What a session is shown with when it has more than can be shown. Must not test what a step looks like over HTTP."""

import pytest

from app.storage import views
from app.storage.database import Database
from tests.storage.acts import ACME, RUN, agent_of, do_steps


@pytest.mark.parametrize(("most", "shown"), [(2, [4, 5]), (4, [2, 3, 4, 5]), (5, [1, 2, 3, 4, 5]), (6, [1, 2, 3, 4, 5])])
async def test_newest_steps_are_shown_when_there_are_too_many(
    database: Database, monkeypatch: pytest.MonkeyPatch, most: int, shown: list[int]
) -> None:
    """An unwind works from the top: what is left out is the oldest, and what is shown is in the order of the steps."""
    monkeypatch.setattr(views, "MAX_STEPS_SHOWN", most)
    await do_steps(database, RUN, 5)
    async with database.snapshot(ACME) as tx:
        view = await views.session_view(tx, agent_of(ACME), RUN)
    assert [step.effect.step_index for step in view.steps] == shown
    assert [step.undo_entry.stack_position for step in view.steps if step.undo_entry] == shown
