"""Play both halves of the story, and say whether it ended as promised. Must not tell any of it: see `first_half` and `second_half`."""

import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import typer

from app.cli.demo import first_half, second_half
from app.cli.demo.api import http_client
from app.cli.demo.failure import DemoFailed
from app.cli.demo.listeners import World
from app.cli.demo.screen import say
from app.cli.demo.server import serving, tail
from app.cli.demo.stage import Stage, cast, settings_of
from app.cli.target import target
from app.settings import Settings

EXIT_FAILED = 1
EXIT_SIGNAL = 128  # plus the signal's number, as shells count
# Of two stops the second would cut the cleaning up short; and a terminal that is closed says only SIGHUP.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stopped(BaseException):
    """A signal asked the demo to end; nobody on the way out may take it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_demo(settings: Settings, *, crash: bool, world: World | None = None) -> int:
    """Play the story, print it, and return the exit code: 0 only if everything is as promised; everything started is stopped.

    With `crash` the service is killed in mid-unwind and started again. `world`: the systems to play with; a test may bring its own. Takes
    seconds, and no wait is longer than a minute; call it from the main thread. On a database that the settings name, which must have the
    newest schema, it leaves sessions in org `demo`; services already running there have to be allowed to call loopback, too.

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
            environment = settings_of(database_url, crash=crash)
            stage = Stage(world=world, at=at, log=log, environment=environment, database_url=database_url, http=http)
            _play(stage, crash=crash)
    except DemoFailed as failure:
        typer.echo(f"countermand demo: FAILED: {failure}", err=True)
        typer.echo(f"The end of the service's log:\n{tail(log)}", err=True)
        return EXIT_FAILED
    say(f"demo ok ({time.monotonic() - started:.1f} s)")
    return 0


def _play(stage: Stage, *, crash: bool) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serving(stage.environment, stage.log))
        everybody = first_half.play(stage, stack, server, cast(stage, server.url), crash=crash)
        second_half.play(stage, everybody)


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
