"""The agent up to its reply: three steps done, and a person asked, who says yes. Must not send the reply, nor print."""

from dataclasses import dataclass

from app.cli.demo.agent import Agent, Done
from app.cli.demo.listeners import WorldState
from app.cli.demo.second_verdict import Seen
from app.cli.demo.stage import Cast, Stage, new_session_id, subject_of
from app.cli.demo.systems import JsonObject
from app.cli.demo.toolbox import ToolCall, send_reply, undoable_calls
from app.domain.model import Role

WHY = "amount and address checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Approved:
    """A run whose reply was approved and has not gone out.

    `told` is what the agent was answered when it asked, `question` what the person read, `effect` how the step stood after the yes, `since`
    the number of the last call that the outside systems got before the run.
    """

    agent: Agent
    call: ToolCall
    step: int
    done: list[Done]
    told: JsonObject
    question: JsonObject
    effect: JsonObject
    before: WorldState
    since: int

    @property
    def session_id(self) -> str:
        """The run's session."""
        return self.agent.session_id


def ask_and_approve(stage: Stage, cast: Cast) -> Approved:
    """Let the agent do its three steps and ask for the fourth, and the person approve it."""
    before, since = stage.world.look(), stage.world.log.newest()
    agent = cast.agent(new_session_id())
    done = [agent.take(number, call) for number, call in enumerate(undoable_calls(stage.at), start=1)]
    call, step = send_reply(stage.at), len(done) + 1
    told = agent.intercept(step, call)
    question = cast.person.question(agent.session_id)
    effect = cast.person.approve(question, WHY)
    return Approved(agent=agent, call=call, step=step, done=done, told=told, question=question, effect=effect, before=before, since=since)


def look(stage: Stage, cast: Cast, run: Approved, session: JsonObject) -> Seen:
    """Gather what is known of a run now, from everybody who knows something."""
    return Seen(
        done=run.done,
        step=run.step,
        told=run.told,
        calls=stage.world.log.calls(after=run.since),
        before=run.before,
        now=stage.world.look(),
        session=session,
        journal=cast.journal(run.session_id),
        approver=subject_of(Role.OPERATOR),
    )
