"""`countermand ...`: the commands, and what they need to start. Must not contain a rule of the saga.

Each command imports what it needs when it runs: the web framework and the migrations take longer to load than most commands to finish.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from app.cli.embedded_postgres import PostgresError
from app.cli.manners import Output, SetupError
from app.domain.errors import SagaError
from app.domain.model import Role

EXIT_NEGATIVE, EXIT_SETUP, EXIT_UNREACHABLE = 1, 2, 5
FIRST_PROCESS = 1
MAX_WORKERS = 64  # more are a slip of the keyboard: each opens up to 2 x COUNTERMAND_DATABASE_CONNECTIONS + 1 connections
EXIT_TERMINATED = 128 + signal.SIGTERM  # what a shell calls a process that the signal ended

cli = typer.Typer(
    name="countermand",
    help="An HTTP saga orchestrator for AI agents' tool side effects.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
keys_cli = typer.Typer(help="Bearer keys.", no_args_is_help=True, rich_markup_mode=None)
cli.add_typer(keys_cli, name="keys")
tools_cli = typer.Typer(help="Registered tools.", no_args_is_help=True, rich_markup_mode=None)
cli.add_typer(tools_cli, name="tools")

HEALTH = "health"
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@cli.command()
def serve(
    *,
    no_orchestrator: Annotated[bool, typer.Option("--no-orchestrator", help="Serve the API only.")] = False,
    orchestrator_only: Annotated[
        bool, typer.Option("--orchestrator-only", help="Unwind only; of the API, only the health checks.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, max=MAX_WORKERS, help="How many processes do so, on one port.")] = 1,
) -> None:
    """Serve the API and run the orchestrator, in one process or several; any number of replicas may share one database."""
    from app.cli import serving
    from app.main import Parts
    from app.settings import Settings

    if no_orchestrator and orchestrator_only:
        raise typer.BadParameter("--no-orchestrator and --orchestrator-only exclude each other")
    serving.serve(Settings(), Parts(has_api=not orchestrator_only, has_orchestrator=not no_orchestrator), workers=workers)


@cli.command()
def migrate() -> None:
    """Bring the database's schema to the newest revision."""
    from app.cli import serving
    from app.settings import Settings

    serving.migrate(Settings())


@cli.command()
def prune(
    *,
    older_than_days: Annotated[int | None, typer.Option(help="How long ago a session ended; absent: COUNTERMAND_RETENTION_DAYS.")] = None,
    org: Annotated[str | None, typer.Option(help="The tenant; absent: all of them.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")] = False,
    output: Annotated[Output, typer.Option(help="How the counts are printed.")] = Output.TEXT,
) -> None:
    """Delete sessions that ended well, or were undone by themselves, long ago; those that are resolved, or not clean, stay."""
    from app.cli import pruning
    from app.cli.target import named
    from app.settings import Settings

    settings = Settings()
    bound = pruning.bound_of(settings, days=older_than_days, org=org, is_dry_run=dry_run)
    pruned = pruning.prune(named(settings), bound, settings.approval_ttl_seconds)
    typer.echo(pruned.as_json() if output is Output.JSON else pruned.as_text())


@cli.command(HEALTH, context_settings=PASS_ON, add_help_option=False)
def ask_health(context: typer.Context) -> None:
    """Ask the service here whether it lives, or with --ready whether it can serve."""
    _tell_health(context.args)


@cli.command()
def dev() -> None:
    """Serve on an embedded Postgres with a `demo` org, its keys printed, loopback endpoints and inline tools allowed."""
    from app.cli import serving
    from app.settings import Settings

    serving.dev(Settings())


@cli.command()
def demo(
    *, crash: Annotated[bool, typer.Option("--crash", help="Kill the service in mid-unwind and start it again before your eyes.")] = False
) -> None:
    """Tell the story of a refund that fails, before its reply and after it; exit code 0 only if everything is as promised."""
    from app.cli.demo import run_demo
    from app.settings import Settings

    raise typer.Exit(run_demo(Settings(), crash=crash))


@keys_cli.command("create")
def create_key(
    org: Annotated[str, typer.Option(help="The tenant; made if it is new.")],
    role: Annotated[Role, typer.Option(help="What the key may be used for.")],
    subject: Annotated[str, typer.Option(help="Who holds it; two keys of one subject are the same person.")],
    output: Annotated[Output, typer.Option(help="text: the key alone; json: all that is known of it.")] = Output.TEXT,
) -> None:
    """Make a bearer key and print it, once: only its digest is kept."""
    from app.cli import keys
    from app.cli.target import target
    from app.settings import Settings

    settings = Settings()
    with target(settings) as database_url:
        made = keys.create(database_url, org=org, role=role, subject=subject)
    typer.echo(made.as_json() if output is Output.JSON else made.key)


Reason = Annotated[str, typer.Option(help="Why; it is shown to whoever looks, and logged.")]
Org = Annotated[str | None, typer.Option(help="One tenant; absent: everything.")]
DestinationOption = Annotated[str | None, typer.Option("--destination", help="Where the org's calls go, host:port; absent: anywhere.")]


@cli.command()
def pause(reason: Reason, org: Org = None, destination: DestinationOption = None) -> None:
    """Send no undo and no action any more, to a destination of an org, of an org, or of all; what is in flight ends."""
    from app import observability
    from app.cli import pausing
    from app.cli.target import named
    from app.settings import Settings

    observability.configure()
    typer.echo(pausing.pause(named(Settings()), org=org, destination=destination, reason=reason))


@cli.command()
def resume(reason: Reason, org: Org = None, destination: DestinationOption = None) -> None:
    """Take a pause away; the same options as it was paused with. Destinations that are away are probed at once."""
    from app import observability
    from app.cli import pausing
    from app.cli.target import named
    from app.settings import Settings

    observability.configure()
    typer.echo(pausing.resume(named(Settings()), org=org, destination=destination, reason=reason))


@tools_cli.command("apply")
def apply_tools(
    file: Annotated[Path, typer.Argument(help="A YAML file: `tools:` with a definition per name.")],
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")] = False,
) -> None:
    """Register the tools of a file with the service at COUNTERMAND_URL, by the key in COUNTERMAND_ADMIN_KEY (or its _FILE).

    Prints `+` for a new tool, `~` for a new version with the members that differ, `=` for one that is as it should be.
    """
    import httpx

    from app.cli import tools

    definitions = tools.read_file(file)
    try:
        with tools.connect() as client:
            for step in tools.apply(client, definitions, is_dry_run=dry_run):
                typer.echo(str(step))
    except httpx.TransportError as error:
        _refuse(f"the service cannot be reached: {error}", EXIT_UNREACHABLE)


@cli.command(context_settings=PASS_ON)
def test(context: typer.Context) -> None:
    """Run the tests on a Postgres of their own; arguments go to pytest."""
    from app.cli.checks import run_tests

    raise typer.Exit(run_tests(context.args))


@cli.command()
def check() -> None:
    """Run format, lint, types, import contracts, the container's files and golden files."""
    from app.cli.checks import run_checks

    raise typer.Exit(run_checks())


def main() -> None:
    """Run a command; a refusal is one line on stderr and an exit code: 1 refused, 2 not set up, 5 database or service unreachable."""
    if os.getpid() == FIRST_PROCESS:
        # The kernel drops a signal for which process 1 of a container has no handler; `serve` sets its own.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        if sys.argv[1:2] == [HEALTH]:
            _tell_health(sys.argv[2:])  # not by way of typer, which loads pydantic: that costs several times what the question does
        else:
            cli()
    except (SetupError, PostgresError) as error:
        _refuse(str(error), EXIT_SETUP)
    except SagaError as error:
        _refuse(error.detail, EXIT_UNREACHABLE if error.code == "storage_unavailable" else EXIT_NEGATIVE)
    except ValueError as error:
        _refuse(_setting_faults(error), EXIT_SETUP)


def _tell_health(words: Sequence[str]) -> None:
    from app.cli.health import Unreachable, ask, read_words

    question = read_words(words)
    try:
        found = ask(question.url, is_readiness=question.ready)
    except Unreachable as error:
        _refuse(str(error), EXIT_UNREACHABLE)
    if not found.is_good:
        _refuse(found.line, EXIT_NEGATIVE)
    typer.echo(found.line)


def _setting_faults(error: ValueError) -> str:
    """Say which settings are wrong; any other error is raised on. The library is loaded by who reads the settings, not by every command."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        raise error
    return "; ".join(f"COUNTERMAND_{'_'.join(map(str, fault['loc'])).upper()}: {fault['msg']}" for fault in error.errors())


def _refuse(message: str, code: int) -> NoReturn:
    typer.echo(f"countermand: {message}", err=True)
    sys.exit(code)
