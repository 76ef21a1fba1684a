"""Tell the first seed's story from beginning to end, and say whether it ended as promised. Must not go past the public API."""

import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from types import FrameType

import httpx
import typer

from app.cli import keys
from app.cli.demo import table
from app.cli.demo.agent import UNWIND_SECONDS, Agent, Api, Done, http_client, tool_calls
from app.cli.demo.failure import DemoFailed
from app.cli.demo.listeners import Addresses, World, WorldState
from app.cli.demo.screen import say, say_checks, say_heading, say_lines
from app.cli.demo.server import Server, serving, tail
from app.cli.demo.systems import ORDER, Hold, JsonObject
from app.cli.demo.verdict import Findings, judge
from app.cli.target import target
from app.domain.model import Role, SessionState
from app.settings import Settings

ORG = "demo"
HOLD_SECONDS = 30.0  # for the second undo to reach its endpoint
EXIT_FAILED = 1
EXIT_SIGNAL = 128  # plus the signal's number, as shells count
HELD_TOOL = "set_ticket_status"  # its undo is the second of three
# Of two stops the second would cut the cleaning up short; and a terminal that is closed says only SIGHUP.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stopped(BaseException):
    """A signal asked the demo to end; nobody on the way out may take it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """What the story is played with."""

    world: World
    at: Addresses
    log: Path
    environment: Mapping[str, str]
    database_url: str
    http: httpx.Client


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What the agent did before its run failed."""

    session_id: str
    done: list[Done]
    error: str
    before: WorldState
    then: WorldState


def run_demo(settings: Settings, *, crash: bool, world: World | None = None) -> int:
    """Play the story, print it, and return the exit code: 0 only if everything is as promised; everything started is stopped.

    With `crash` the service is killed in mid-unwind and started again. `world`: the systems to play with; a test may bring its own. Takes
    seconds, and no wait is longer than a minute; call it from the main thread. On a database that the settings name, which must have the
    newest schema, it leaves a session in org `demo`; services already running there have to be allowed to call loopback, too.

    Raises:
        PostgresError, SetupError, SagaError: the database cannot be started, or reached.
    """
    started = time.monotonic()
    try:
        with _signals(), tempfile.TemporaryDirectory(prefix="countermand-demo-") as folder:
            # Started by root, Postgres may have to run as nobody, who must be able to pass through.
            Path(folder).chmod(0o711)
            return _play_or_explain(settings, Path(folder), world or World.create(), crash=crash, started=started)
    except _Stopped as stopped:
        typer.echo("countermand demo: stopped, and nothing was left running", err=True)
        return EXIT_SIGNAL + stopped.number


def _play_or_explain(settings: Settings, folder: Path, world: World, *, crash: bool, started: float) -> int:
    log = folder / "service.log"
    embedded = settings.model_copy(update={"data_dir": folder})
    try:
        with world.listening() as at, target(embedded) as database_url, http_client() as http:
            environment = _environment(database_url, crash=crash)
            stage = _Stage(world=world, at=at, log=log, environment=environment, database_url=database_url, http=http)
            faults = _play(stage, crash=crash)
    except DemoFailed as failure:
        faults = [str(failure)]
    if not faults:
        say(f"demo ok ({time.monotonic() - started:.1f} s)")
        return 0
    typer.echo(f"countermand demo: FAILED: {'; '.join(faults)}", err=True)
    typer.echo(f"The end of the service's log:\n{tail(log)}", err=True)
    return EXIT_FAILED


def _environment(database_url: str, *, crash: bool) -> dict[str, str]:
    """Return all the settings of the service; whatever the caller has set beside the database is not inherited."""
    return {
        "COUNTERMAND_DATABASE_URL": database_url,
        "COUNTERMAND_HOST": "127.0.0.1",
        "COUNTERMAND_PORT": "0",
        "COUNTERMAND_EGRESS_ALLOW": "127.0.0.0/8",
        "COUNTERMAND_INLINE_TOOLS": "allow",
        "COUNTERMAND_GRACE_SECONDS": "2",
        # How long the call of a killed worker stays its own: short, so that nobody waits half a minute for the show to go on.
        "COUNTERMAND_LEASE_SECONDS": "1" if crash else "30",
        "COUNTERMAND_POLL_SECONDS": "0.2",
    }


def _play(stage: _Stage, *, crash: bool) -> list[str]:
    """Play the story to its end and print it; return what is not as promised."""
    with ExitStack() as stack:
        server = stack.enter_context(serving(stage.environment, stage.log))
        _await_ready(stage, server)
        agent_key, auditor_key = (
            keys.create(stage.database_url, org=ORG, role=role, subject=f"demo-{role}").key for role in (Role.AGENT, Role.AUDITOR)
        )
        run = _run_agent(stage, server, agent_key)
        failed_at = time.monotonic()
        if crash:
            server = _fail_and_kill(stage, stack, server, run, agent_key)
        session = _unwound(stage, server, run, agent_key)
        say_heading("What was undone, in the order in which the endpoints saw it (times from the failure of the run)")
        say_lines(table.undone_lines(run.done, stage.world.log.undos(), failed_at))
        say_heading("The world")
        say_lines(table.world_lines(run.before, run.then, stage.world.look()))
        auditor = Api(http=stage.http, url=server.url, key=auditor_key)
        verified = auditor.get(f"/v1/sessions/{run.session_id}/journal/verify")
    checks = judge(_findings(stage.world, run, session, verified, crash=crash))
    say_heading("Promised, and found")
    say_checks(checks)
    return [f"not kept: {check.promise}: {check.fault}" for check in checks if check.fault]


def _await_ready(stage: _Stage, server: Server) -> None:
    """Say in one sentence what is missing where the service cannot work, e.g. on somebody's own database without our schema."""
    response = stage.http.get(f"{server.url}/readyz")
    if response.is_success:
        return
    found = response.json() if response.headers.get("Content-Type", "").startswith("application/problem+json") else {}
    raise DemoFailed(f"the service is not ready: {found.get('detail', response.status_code)}")


def _run_agent(stage: _Stage, server: Server, key: str) -> _Run:
    """Let the agent take its steps until it finds that the last one is impossible."""
    before = stage.world.look()
    session_id = f"refund-{ORDER}-{token_hex(4)}"
    agent = Agent(api=Api(http=stage.http, url=server.url, key=key), tools=stage.http, session_id=session_id)
    done = [agent.take(number, call) for number, call in enumerate(tool_calls(stage.at), start=1)]
    error = agent.find_mail_down(stage.at.mail)
    say_heading(f"What the agent did (session {session_id})")
    say_lines(table.done_lines(done, "not asked for: mail is down"))
    say(f"\nThe run fails: {error}. What was done is undone, newest first.")
    return _Run(session_id=session_id, done=done, error=error, before=before, then=stage.world.look())


def _fail_and_kill(stage: _Stage, stack: ExitStack, server: Server, run: _Run, key: str) -> Server:
    """Let the run fail, kill the service while the second undo is being processed, and return a new one on the same database."""
    hold = Hold()
    stack.callback(hold.released.set)
    stage.world.tickets.hold = hold
    started = time.monotonic()
    _fail(stage, server, run, key)
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


def _fail(stage: _Stage, server: Server, run: _Run, key: str, wait_seconds: int = 0) -> JsonObject:
    agent = Agent(api=Api(http=stage.http, url=server.url, key=key), tools=stage.http, session_id=run.session_id)
    return agent.fail(f"{run.error}: the customer cannot be told", wait_seconds=wait_seconds)


def _unwound(stage: _Stage, server: Server, run: _Run, key: str) -> JsonObject:
    """Report the failure, again if need be, and wait until the session moves no more.

    Raises:
        DemoFailed: it is still at it after `UNWIND_SECONDS`.
    """
    session = _fail(stage, server, run, key, UNWIND_SECONDS)
    if session["state"] in {SessionState.FAILED, SessionState.COMPENSATING}:
        raise DemoFailed(f"session {run.session_id} is still {session['state']} after {UNWIND_SECONDS} s")
    return session


def _findings(world: World, run: _Run, session: JsonObject, verified: JsonObject, *, crash: bool) -> Findings:
    return Findings(
        done=run.done,
        undone=world.log.undos(),
        before=run.before,
        now=world.look(),
        session_state=session["state"],
        halt_reason=session["halt_reason"],
        is_clean=session["clean"],
        is_journal_valid=verified["valid"],
        journal_message=verified["message"],
        journal_entries=verified["entry_count"],
        killed_step=next(done.step_index for done in run.done if done.tool == HELD_TOOL) if crash else None,
    )


@contextmanager
def _signals() -> Iterator[None]:
    """Turn the first signal to stop into an exception, and have the next ones ignored while things are put away."""

    def stop(number: int, _frame: FrameType | None) -> None:
        for each in STOPPING:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped(number)

    earlier = {number: signal.signal(number, stop) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
