"""Start the service and end it cleanly. Must not configure what `main` composes beyond handing it settings."""

import asyncio
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

import structlog
import typer
import uvicorn

from app import observability
from app.api.dependencies import Engine
from app.cells import Cells, shared_memory
from app.cli import keys, migrating
from app.cli.framing import BoundedProtocol
from app.cli.manners import SetupError
from app.cli.supervising import Post, Supervisor
from app.cli.target import target
from app.domain.egress import EgressPolicy
from app.domain.model import Role
from app.main import Parts, create_app
from app.settings import Settings

DEV_EGRESS = "localhost,127.0.0.0/8,::1/128"
DEV_ORG = "demo"
DEV_SUBJECTS: Mapping[Role, str] = {
    Role.AGENT: "demo-agent",
    Role.OPERATOR: "demo-operator",
    Role.AUDITOR: "demo-auditor",
    Role.ADMIN: "demo-admin",
}
BACKLOG = 2_048  # connections that may wait to be accepted; uvicorn's own number
TICKS_PER_SECOND = 10  # of uvicorn's own
SETTING_PREFIX = "COUNTERMAND_"
OTHER_VARIABLES = frozenset({"URL", "KEY", "ADMIN_KEY", "ADMIN_KEY_FILE", *(f"{role.name}_KEY" for role in Role)})
"""What clients of the service read, after the prefix."""
COLLECT_AFTER = 10_000  # allocations; Python's 700 is made for scripts, and a request makes hundreds
NEARLY = 0.8  # of 1: a letter or two of a setting's name
KEEP_ALIVE_SECONDS = 75  # above the usual idle time of proxies, so that they, not we, close first

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Server(uvicorn.Server):
    """Uvicorn with our way to stop: SIGTERM and SIGINT stop claiming at once, let requests and attempts end, and the exit code is 0.

    `post`: this process is one of several workers.
    """

    def __init__(self, config: uvicorn.Config, post: Post | None = None) -> None:
        """Start nothing yet."""
        super().__init__(config)
        self._post = post

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals in the loop, and the end of whoever supervises this; nothing is raised again after the shutdown."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        if self._post is not None:
            loop.add_reader(self._post.lifeline, self._leave, self._post)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say where: the port may have been left to the system."""
        await super().startup(sockets)
        gc.freeze()  # what was made so far stays: looking through it for garbage again and again would cost some percent of each request
        gc.set_threshold(COLLECT_AFTER)
        if self._post is not None:
            self._post.tell_serving()
        for bound in sockets or ():
            host, port = bound.getsockname()[:2]
            _log.info("serving", host=host, port=port)

    async def on_tick(self, counter: int) -> bool:
        """End the process when the engine has died under it: a supervisor starts it anew."""
        if self.lifespan.error_occurred and not self.should_exit:
            _log.error("engine_died")
            self.should_exit = True
        if self._engine is not None and counter % TICKS_PER_SECOND == 0:
            self._engine.gauges.look_at_pools()
        return await super().on_tick(counter)

    @property
    def _engine(self) -> Engine | None:
        engine: Engine | None = getattr(self.config.loaded_app.state, "engine", None)
        return engine

    def _leave(self, post: Post) -> None:
        asyncio.get_running_loop().remove_reader(post.lifeline)
        self._stop()

    def _stop(self) -> None:
        if self.should_exit and self._post is None:  # a worker may be told by its supervisor and with its group, and that is once
            self.force_exit = True  # asked twice: do not wait for requests any longer
        if self._engine is not None:
            self._engine.stop()
        self.should_exit = True


def serve(settings: Settings, parts: Parts, *, workers: int) -> None:
    """Serve until a signal comes, in this process or in several of its own."""
    observability.configure()
    warn_of_environment(settings)
    with _bound(settings) as bound, target(settings) as database_url:
        if workers == 1:
            _run(settings, database_url, parts, bound)
        else:
            _run_workers(settings, database_url, parts, bound, workers)


def migrate(settings: Settings) -> None:
    """Bring the schema to head."""
    observability.configure()
    warn_of_environment(settings)
    with target(settings) as database_url:
        newer = migrating.migrate(database_url)
    if newer is None:
        _log.info("schema_migrated")
    else:
        _log.warning("schema_newer", revision=newer)


def warn_of_environment(settings: Settings) -> None:
    """Tell what is easily not meant: a database of this machine's own, and a variable that is nearly a setting's.

    Others that begin as ours do are left alone: orchestrators of containers set such for whatever is called like this service.
    """
    if settings.database_url is None:
        _log.warning("embedded_postgres", data_dir=str(settings.data_dir))
    names = {name.upper() for name in Settings.model_fields}
    for variable in sorted(os.environ):
        name = variable.upper().removeprefix(SETTING_PREFIX)
        if variable.upper().startswith(SETTING_PREFIX) and name not in names | OTHER_VARIABLES:
            for meant in get_close_matches(name, names, n=1, cutoff=NEARLY):
                _log.warning("unknown_setting", variable=variable, meant=f"{SETTING_PREFIX}{meant}")


def dev(settings: Settings) -> None:
    """Serve for a developer: schema brought to head, keys made and printed, loopback endpoints and inline tools allowed."""
    observability.configure()
    allowed = ",".join(filter(None, (settings.egress_allow, DEV_EGRESS)))
    settings = settings.model_copy(update={"egress_allow": allowed, "inline_tools": "allow"})
    with _bound(settings) as bound, target(settings) as database_url:
        migrating.migrate(database_url)
        _print_keys(bound, database_url, _dev_keys(settings, database_url))
        _run(settings, database_url, Parts(), bound)


@contextmanager
def _bound(settings: Settings) -> Iterator[socket.socket]:
    """Check what can be checked, and listen: callers that come before the service is up wait instead of being refused.

    Raises:
        SetupError: a setting that cannot be, or an address that cannot be had.
    """
    try:
        EgressPolicy.parse(settings.egress_allow)
    except ValueError as error:
        raise SetupError(f"COUNTERMAND_EGRESS_ALLOW: {error}") from error
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        bound = socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SetupError(f"cannot listen on {settings.host} port {settings.port} (COUNTERMAND_PORT): {error.strerror}") from error
    with bound:
        yield bound


def _run_workers(settings: Settings, database_url: str, parts: Parts, bound: socket.socket, workers: int) -> None:
    memory = shared_memory(workers)

    def work(post: Post) -> None:
        _run(settings, database_url, replace(parts, cells=Cells(memory, post.number)), bound, post)

    if not Supervisor(workers, work, bound.close).run():
        raise SystemExit(1)


def _run(settings: Settings, database_url: str, parts: Parts, bound: socket.socket, post: Post | None = None) -> None:
    config = uvicorn.Config(
        create_app(settings, database_url, parts),
        host=settings.host,
        port=settings.port,
        http=BoundedProtocol,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=round(settings.grace_seconds),
    )
    server = Server(config, post)
    server.run(sockets=[bound])
    if not server.started or server.lifespan.error_occurred:
        raise SystemExit(1)


def _dev_keys(settings: Settings, database_url: str) -> Mapping[str, str]:
    """Return one key per role, the same ones as long as the database knows them."""
    kept = settings.data_dir / "dev-keys.json"
    known = _read_keys(kept)
    if known is not None and keys.are_known(database_url, list(known.values())):
        return known
    made = {role.value: keys.create(database_url, org=DEV_ORG, role=role, subject=subject).key for role, subject in DEV_SUBJECTS.items()}
    _write_privately(kept, json.dumps(made))
    return made


def _read_keys(path: Path) -> Mapping[str, str] | None:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {role.value: str(known[role.value]) for role in Role}
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none kept, or not readable: others are made


def _write_privately(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".new")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    unfinished.replace(path)


def _print_keys(bound: socket.socket, database_url: str, made: Mapping[str, str]) -> None:
    host, port = bound.getsockname()[:2]
    typer.echo(f"# Countermand for development, org `{DEV_ORG}`. Paste into another shell:")
    typer.echo(f"export COUNTERMAND_URL=http://{f'[{host}]' if ':' in host else host}:{port}")
    for role, key in made.items():
        typer.echo(f"export COUNTERMAND_{role.upper()}_KEY={key}")
    typer.echo(f"# Other commands reach its database with COUNTERMAND_DATABASE_URL='{database_url}'. Ctrl-C ends it.")
    sys.stdout.flush()
