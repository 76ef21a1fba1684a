"""Chapter A: what is about to run is not what a person has approved. Must not go past the public API."""

from app.cli.demo.api import UNWIND_SECONDS
from app.cli.demo.promises import hold_to
from app.cli.demo.reply import WHY, ask_and_approve, look
from app.cli.demo.screen import say_heading, say_turn
from app.cli.demo.second_verdict import Refused, judge_refused
from app.cli.demo.stage import Cast, Stage
from app.cli.demo.toolbox import CUSTOMER, STRANGER


def play(stage: Stage, cast: Cast) -> None:
    """Play it and print it.

    Raises:
        DemoFailed: something is not as promised.
    """
    say_heading("A. The reply needs a person, and what was approved is not what is about to run")
    run = ask_and_approve(stage, cast)
    say_turn("agent", f"steps 1 to {len(run.done)}: {'; '.join(each.story for each in run.done)}")
    say_turn("agent", f"step {run.step} {run.call.tool}: {run.told.get('message')}")
    say_turn("operator", f"reads in /v1/approvals: {run.question['payload']}")
    say_turn("operator", f"approves it ({WHY}): the step is {run.effect['state']}, nothing has run")
    changed = run.told["payload"].replace(CUSTOMER, STRANGER)
    say_turn("agent", f"has planned anew, and resumes with {changed}")
    resumed = run.agent.resume(run.step, changed)
    say_turn("service", str(resumed))
    session = run.agent.fail("the reply was refused", wait_seconds=UNWIND_SECONDS)
    undone = stage.world.log.undos(after=run.since)
    stories = {each.undo_key: each.undo_story for each in run.done}
    told = "; ".join(stories.get(call.request.key, "unexpected") for call in undone)
    say_turn("service", f"undoes the rest, newest first: {told}; the session is {session['state']}")
    hold_to(judge_refused(Refused(seen=look(stage, cast, run, session), resumed=resumed)))
