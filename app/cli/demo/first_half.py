"""The first half: a refund that fails before the reply, and is undone by itself. Must not go past the public API."""

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

from app.cli.demo import table
from app.cli.demo.agent import Agent, Done
from app.cli.demo.api import UNWIND_SECONDS
from app.cli.demo.failure import DemoFailed
from app.cli.demo.journal import Journal
from app.cli.demo.listeners import World, WorldState
from app.cli.demo.promises import hold_to
from app.cli.demo.screen import say, say_heading, say_lines
from app.cli.demo.server import Server, serving
from app.cli.demo.stage import Cast, Stage, new_session_id
from app.cli.demo.systems import Hold, JsonObject
from app.cli.demo.toolbox import get_order, undoable_calls
from app.cli.demo.verdict import Findings, judge
from app.domain.model import SessionState

HOLD_SECONDS = 30.0  # for the second undo to reach its endpoint
HELD_TOOL = "set_ticket_status"  # its undo is the second of three


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What the agent did before its run failed."""

    session_id: str
    done: list[Done]
    error: str
    before: WorldState
    then: WorldState


def play(stage: Stage, stack: ExitStack, server: Server, cast: Cast, *, crash: bool) -> Cast:
    """Play it, print it, and return who goes on: with `crash` the service has been killed and started again, and `stack` ends the new one.

    Raises:
        DemoFailed: something is not as promised.
    """
    run = _run_agent(stage, cast)
    failed_at = time.monotonic()
    if crash:
        cast = replace(cast, url=_fail_and_kill(stage, stack, server, cast.agent(run.session_id), run).url)
    session = _unwound(cast.agent(run.session_id), run)
    say_heading("What was undone, in the order in which the endpoints saw it (times from the failure of the run)")
    say_lines(table.undone_lines(run.done, stage.world.log.undos(), failed_at))
    say_heading("The world")
    say_lines(table.world_lines({"before": run.before, "when it failed": run.then, "now": stage.world.look()}))
    say_heading("Promised, and found")
    hold_to(judge(_findings(stage.world, run, session, cast.journal(run.session_id), crash=crash)))
    return cast


def _run_agent(stage: Stage, cast: Cast) -> _Run:
    """Let the agent take its steps until it finds that the last one is impossible."""
    before = stage.world.look()
    agent = cast.agent(new_session_id())
    calls = [get_order(stage.at), *undoable_calls(stage.at)]
    done = [agent.take(number, call) for number, call in enumerate(calls, start=1)]
    error = agent.find_mail_down(stage.at.mail)
    say_heading(f"What the agent did (session {agent.session_id})")
    say_lines(table.done_lines(done, "not asked for: mail is down"))
    say("")
    say(f"The run fails: {error}. What was done is undone, newest first.")
    return _Run(session_id=agent.session_id, done=done, error=error, before=before, then=stage.world.look())


def _fail_and_kill(stage: Stage, stack: ExitStack, server: Server, agent: Agent, run: _Run) -> Server:
    """Let the run fail, kill the service while the second undo is being processed, and return a new one on the same database."""
    hold = Hold()
    stack.callback(hold.released.set)
    stage.world.tickets.hold = hold
    started = time.monotonic()
    _fail(agent, run)
    if not hold.arrived.wait(HOLD_SECONDS):
        raise DemoFailed(f"the second undo did not reach its endpoint within {HOLD_SECONDS:g} s of the failure")
    server.kill()
    say_heading("The service is killed in mid-unwind, and started again")
    say(f"{_ms_since(started)}  SIGKILL to process {server.process.pid}: the second undo is done, its answer never left the endpoint")
    hold.released.set()
    server = stack.enter_context(serving(stage.environment, stage.log))
    say(f"{_ms_since(started)}  process {server.process.pid} serves, on the same database: the undo in doubt is sent again")
    return server


def _ms_since(started: float) -> str:
    return f"{(time.monotonic() - started) * 1000:6.0f} ms"


def _fail(agent: Agent, run: _Run, wait_seconds: int = 0) -> JsonObject:
    return agent.fail(f"{run.error}: the customer cannot be told", wait_seconds=wait_seconds)


def _unwound(agent: Agent, run: _Run) -> JsonObject:
    """Report the failure, again if need be, and wait until the session moves no more.

    Raises:
        DemoFailed: it is still at it after `UNWIND_SECONDS`.
    """
    session = _fail(agent, run, UNWIND_SECONDS)
    if session["state"] in {SessionState.FAILED, SessionState.COMPENSATING}:
        raise DemoFailed(f"session {run.session_id} is still {session['state']} after {UNWIND_SECONDS} s")
    return session


def _findings(world: World, run: _Run, session: JsonObject, journal: Journal, *, crash: bool) -> Findings:
    return Findings(
        done=run.done,
        undone=world.log.undos(),
        before=run.before,
        now=world.look(),
        session_state=session["state"],
        halt_reason=session["halt_reason"],
        is_clean=session["clean"],
        is_journal_valid=journal.is_valid,
        journal_message=journal.message,
        journal_entries=len(journal.entries),
        killed_step=next(done.step_index for done in run.done if done.tool == HELD_TOOL) if crash else None,
    )
