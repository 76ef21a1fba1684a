"""Chapter B: the approved bytes go out, once, and after that a failure undoes nothing. Must not go past the public API."""

from dataclasses import dataclass

from app.cli.demo.agent import Done
from app.cli.demo.api import UNWIND_SECONDS, Answered
from app.cli.demo.failure import DemoFailed
from app.cli.demo.listeners import WorldState
from app.cli.demo.promises import hold_to
from app.cli.demo.reply import Approved, ask_and_approve, look
from app.cli.demo.screen import say_heading, say_turn
from app.cli.demo.second_verdict import Released, judge_released
from app.cli.demo.stage import Cast, Stage
from app.cli.demo.systems import TICKET, Answer, JsonObject
from app.cli.demo.toolbox import close_ticket

IS_A_DUPLICATE = Answer(status=409, members={"error": f"ticket {TICKET} is a duplicate of 9088, which was refunded before"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Halted:
    """A run that failed after its reply went out."""

    run: Approved
    reply: Done
    error: str
    session: JsonObject
    then: WorldState


def play(stage: Stage, cast: Cast) -> Halted:
    """Play it, print it, and return the run that a person has to look at.

    Raises:
        DemoFailed: something is not as promised.
    """
    say_heading("B. The same again, honestly: exactly the approved bytes go out, once; then a later step fails")
    run = ask_and_approve(stage, cast)
    say_turn("agent", f"the same steps: {'; '.join(each.story for each in run.done)}; asks for step {run.step}")
    say_turn("operator", f"approves it: the step is {run.effect['state']}, nothing has run")
    reply, again = _reply_once(run)
    halted = _fail_later(stage, run, reply)
    hold_to(judge_released(Released(seen=look(stage, cast, run, halted.session), resumed_again=again)))
    return halted


def _reply_once(run: Approved) -> tuple[Done, Answered]:
    """Resume with exactly the bytes, send the reply, and try to have it released a second time."""
    released = run.agent.resume(run.step, run.told["payload"])
    if released.members.get("decision") != "execute":
        raise DemoFailed(f"the approved bytes were not released: {released}")
    say_turn("agent", f"resumes with exactly these bytes: {released.members['decision']}, released once")
    reply = run.agent.finish(run.step, run.call, released.members)
    say_turn("mail", f"{reply.story}; the agent commits it: from here on there is no way back")
    again = run.agent.resume(run.step, run.told["payload"])
    say_turn("agent", f"resumes a second time: {again}")
    return reply, again


def _fail_later(stage: Stage, run: Approved, reply: Done) -> Halted:
    """Let the step after the reply be refused, and the run fail."""
    step, call = run.step + 1, close_ticket(stage.at)
    stage.world.tickets.refusal = IS_A_DUPLICATE
    refused = run.agent.run(call, run.agent.intercept(step, call))
    error = f"{call.tool} was refused: {refused.members.get('error')}"
    say_turn("agent", f"step {step} {error}")
    session = run.agent.fail(error, wait_seconds=UNWIND_SECONDS, refused_step=step)
    say_turn("service", f"the run has failed past the pivot, nothing is undone: {session['state']} ({session['halt_reason']})")
    return Halted(run=run, reply=reply, error=error, session=session, then=stage.world.look())
