"""The composition root: settings to pools, pools to engine, engine to the HTTP application. Must not contain a rule of its own."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

import structlog
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from app.api import approvals, destinations, effects, errors, escalations, health, journal, metrics, openapi, operations, sessions, tools
from app.api.dependencies import Engine
from app.api.head import HeadAsGet
from app.api.lean import LeanVerbs
from app.api.timing import VerbTimes
from app.cells import Cells
from app.domain.circuits import Rules
from app.domain.egress import EgressPolicy
from app.domain.intercept import InterceptRules
from app.domain.model import RetryPolicy
from app.engine.authentication import Authenticator
from app.engine.circuits import Circuits
from app.engine.clock import Clock, SystemClock
from app.engine.deadlines import Deadlines
from app.engine.decisions import Decisions
from app.engine.events import Events
from app.engine.forward import Forward
from app.engine.gauges import Gauges
from app.engine.group import LANES, GroupCommit
from app.engine.listening import keep_listening
from app.engine.operations import Operations
from app.engine.orchestrator import Limits, Orchestrator
from app.engine.outbound import Outbound
from app.engine.pauses import Pauses
from app.engine.poison import Poison
from app.engine.registry import Registry
from app.engine.schema import Schema
from app.engine.unwind import Unwind
from app.engine.verbs import Verbs
from app.engine.waits import Waits
from app.settings import Settings
from app.storage import batches, calls
from app.storage.batches import Asked, Sighting
from app.storage.changes import Lease
from app.storage.database import DUE_CHANNEL, MOVED_CHANNEL, Database, open_database
from app.telemetry import Telemetry

VERSION = "0.1.0"
SCHEMA_REVISION = "0007"  # the newest under migrations/versions; a test compares

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Which halves of the service this process runs, and where it counts; None: where no other process sees it."""

    has_api: bool = True
    has_orchestrator: bool = True
    cells: Cells | None = None


class Application(FastAPI):
    """The framework's application, with a shorter way for the verbs that are nearly all of what is asked."""

    lean: LeanVerbs | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what is plain the short way, and anything else the framework's."""
        if self.lean is None:
            await super().__call__(scope, receive, send)
        else:
            await self.lean(scope, receive, send, super().__call__)


def create_app(settings: Settings, database_url: str, parts: Parts | None = None, clock: Clock | None = None) -> FastAPI:
    """Build the HTTP application; pools and orchestrator live as long as its lifespan."""
    clock = clock or SystemClock()
    parts = parts or Parts()
    telemetry = Telemetry(version=VERSION, schema_revision=SCHEMA_REVISION, cells=parts.cells or Cells.alone())
    events = Events(telemetry=telemetry)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_engine(settings, database_url, parts, clock, events) as engine:
            app.state.engine = engine
            yield

    app = Application(
        title="Countermand",
        version=VERSION,
        summary="An HTTP saga orchestrator for AI agents' tool side effects.",
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    errors.install(app)
    app.add_middleware(VerbTimes, telemetry=telemetry, clock=clock)
    app.add_middleware(HeadAsGet)
    app.include_router(health.router)
    app.include_router(metrics.router)
    if parts.has_api:
        for router in (
            tools.router,
            sessions.router,
            effects.router,
            approvals.router,
            operations.router,
            escalations.router,
            destinations.router,
            journal.router,
        ):
            app.include_router(router)
        app.lean = LeanVerbs(app, (*effects.LEAN, *sessions.LEAN), telemetry=telemetry, clock=clock)
    openapi.install_openapi(app)
    return app


@asynccontextmanager
async def open_engine(settings: Settings, database_url: str, parts: Parts, clock: Clock, events: Events) -> AsyncIterator[Engine]:
    """Open everything that holds a connection, run the orchestrator beside it, and close it all in the reverse order."""
    egress = EgressPolicy.parse(settings.egress_allow)
    worker = f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"
    async with AsyncExitStack() as stack:
        database = await _open_pool(stack, settings, database_url, f"api {worker}", settings.database_wait_seconds)
        waits = Waits(clock=clock)
        callbacks: dict[str, Callable[[str], None]] = {MOVED_CHANNEL: waits.moved}
        orchestrator = None
        if parts.has_orchestrator:
            orchestrator = await _open_orchestrator(stack, settings, database_url, clock, worker, events)
            callbacks[DUE_CHANNEL] = orchestrator.wake
        verbs = Verbs(database=database, events=events)
        group = _grouping(settings, database, events)
        forward = Forward(verbs=verbs, rules=_rules(settings, egress), idle_seconds=settings.session_idle_seconds, group=group)
        engine = Engine(
            database=database,
            authenticator=Authenticator(database=database, clock=clock),
            forward=forward,
            decisions=Decisions(verbs=verbs),
            operations=Operations(verbs=verbs, egress=egress),
            registry=Registry(database, egress),
            pauses=Pauses(database),
            waits=waits,
            orchestrator=orchestrator,
            retry_defaults=_retry_defaults(settings),
            schema=Schema(database=database, revision=SCHEMA_REVISION, clock=clock),
            public_url=settings.public_url,
            telemetry=events.telemetry,
            gauges=_gauges(database, orchestrator, clock, events.telemetry),
        )
        async with asyncio.TaskGroup() as tasks:
            url = _listen_url(settings, database_url)
            listening = tasks.create_task(keep_listening(url, callbacks, clock)) if url else None
            poison = Poison(database=database, events=events)
            deadlines = Deadlines(
                database=database, forward=forward, poison=poison, schema=engine.schema, clock=clock, sweep_seconds=settings.sweep_seconds
            )
            writing = tasks.create_task(group.run())
            sweeping = tasks.create_task(deadlines.run()) if orchestrator else None
            turning = tasks.create_task(orchestrator.run()) if orchestrator else None
            _log.info("engine_started", worker=worker, orchestrator=orchestrator is not None)
            try:
                yield engine
            finally:
                engine.stop()
                if turning is not None:
                    await asyncio.wait({turning})
                for task in filter(None, (sweeping, listening, writing)):
                    task.cancel()
        _log.info("engine_stopped", worker=worker)


def _grouping(settings: Settings, database: Database, events: Events) -> GroupCommit[Asked, Sighting]:
    """Let each lane keep a connection, but leave half of them to everybody else."""
    return GroupCommit(database=database, events=events, lock=batches.lock_steps, lanes=_lanes(settings))


def _lanes(settings: Settings) -> int:
    return min(LANES, settings.database_connections // 2)


async def _open_pool(stack: AsyncExitStack, settings: Settings, database_url: str, name: str, acquire_seconds: float) -> Database:
    opening = open_database(
        database_url,
        size=settings.database_connections,
        application_name=f"countermand {name}",
        acquire_seconds=acquire_seconds,
        keeps_statements=settings.database_pooler == "none",
    )
    return await stack.enter_async_context(opening)


def _listen_url(settings: Settings, database_url: str) -> str | None:
    """Return where notifications can be had; None where only polling is left."""
    if settings.listen_database_url is not None:
        return settings.listen_database_url
    return database_url if settings.database_pooler == "none" else None


async def _open_orchestrator(  # noqa: PLR0913, PLR0917 - what the composition root has at hand
    stack: AsyncExitStack, settings: Settings, database_url: str, clock: Clock, worker: str, events: Events
) -> Orchestrator:
    """Give the orchestrator a pool and a door of its own: a herd of requests must not starve it, nor it them."""
    # Nobody waits for an answer here, and work that is given up for want of a connection lies idle until its lease runs out.
    patience_seconds = settings.lease_seconds / 3
    database = await _open_pool(stack, settings, database_url, f"orchestrator {worker}", patience_seconds)
    outbound = await stack.enter_async_context(Outbound(EgressPolicy.parse(settings.egress_allow), clock=clock))
    lease = Lease(worker=worker, seconds=settings.lease_seconds)
    rules = Rules(calls=settings.circuit_calls, limit=settings.max_calls_per_destination)
    return Orchestrator(
        database=database,
        unwind=Unwind(
            database=database,
            outbound=outbound,
            clock=clock,
            lease=lease,
            events=events,
            circuits=Circuits(rules=rules),
            group=GroupCommit(database=database, events=events, lock=calls.lock_undos, lease=lease, lanes=_lanes(settings)),
        ),
        poison=Poison(database=database, events=events),
        schema=Schema(database=database, revision=SCHEMA_REVISION, clock=clock),
        clock=clock,
        telemetry=events.telemetry,
        limits=Limits(
            max_calls=settings.max_calls,
            max_calls_per_destination=settings.max_calls_per_destination,
            max_calls_per_org=settings.max_calls_per_org,
            poll_seconds=settings.poll_seconds,
            grace_seconds=settings.grace_seconds,
        ),
    )


def _gauges(database: Database, orchestrator: Orchestrator | None, clock: Clock, telemetry: Telemetry) -> Gauges:
    pools = {"api": database} if orchestrator is None else {"api": database, "orchestrator": orchestrator.database}
    return Gauges(database=database, pools=pools, clock=clock, telemetry=telemetry)


def _rules(settings: Settings, egress: EgressPolicy) -> InterceptRules:
    return InterceptRules(
        is_inline_allowed=settings.inline_tools == "allow",
        egress=egress,
        approval_ttl_seconds=settings.approval_ttl_seconds,
    )


def _retry_defaults(settings: Settings) -> RetryPolicy:
    return RetryPolicy(
        max_retries=settings.retry_max_retries,
        initial_interval_ms=settings.retry_initial_interval_ms,
        multiplier=settings.retry_multiplier,
        max_interval_ms=settings.retry_max_interval_ms,
        timeout_ms=settings.attempt_timeout_ms,
    )
