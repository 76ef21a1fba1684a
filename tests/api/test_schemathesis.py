"""Requests made up from the API's own description, in every role: no crash, no answer that the description does not hold.

The service runs on a real database behind a real port, in a loop of its own thread, since the generator of requests is not asynchronous.
"""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.domain.model import Role
from app.main import create_app
from app.settings import Settings
from tests.conftest import execute, with_database
from tests.factories import QUICK, make_principal_key
from tests.probes import PATIENCE_SECONDS

ROLES = (Role.AGENT, Role.OPERATOR, Role.ADMIN)
EXAMPLES = 8  # per operation and role, good and bad requests together: some 700 in all
Case: TypeAlias = schemathesis.Case[Any]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,  # those that are always there are there, each in its form
    response_schema_conformance,  # the code of a problem is one that the operation declares
]
DATABASE = "made_up_requests"
CLOSED = "http://127.0.0.1:9/undo"  # nobody listens at the discard port: undos are retried, and halt

NOWHERE = create_app(Settings(_env_file=None), "postgresql://nobody@127.0.0.1:9/none")
OPERATIONS = {
    operation.definition.raw["operationId"]: operation
    for operation in (
        result.ok() for result in schemathesis.openapi.from_dict(NOWHERE.openapi()).get_all_operations() if isinstance(result, Ok)
    )
}

# What is there to be met: each operation has a session of its own, with a committed step, an executing one, and maybe a parked one; those
# of operators have a halted one, whose first step has an undo.
STEPS = st.integers(1, 4)
PARKED = ("approveEffect", "rejectEffect", "resumeEffect")
HALTED = ("retryUndo", "skipUndo", "unwindSession", "resolveSession", "getEscalation")
TOOL = {"reversibility": "compensatable", "compensation": {"url": CLOSED, "max_retries": 0}}
HELD = "elsewhere.example:443"  # nothing of the other operations' goes there
A_DAY_MS = 86_400_000
SLOW_UNDO = {"url": CLOSED, "max_retries": 100, "initial_interval_ms": A_DAY_MS, "max_interval_ms": A_DAY_MS}
SLOW_TOOL = {"reversibility": "compensatable", "compensation": SLOW_UNDO}
TOOLS = st.sampled_from(["issue_credit", "send_reply"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Where the service is, a key for each role, and by session the id of its first step's undo."""

    url: str
    keys: dict[Role, str]
    undo_ids: dict[str, str]


@contextmanager
def served(database_url: str) -> Iterator[str]:
    """Serve on a free loopback port from another thread, and give the address."""
    values: dict[str, Any] = {**QUICK, "circuit_calls": 0}  # every undo finds its destination away, and is to halt
    app = create_app(Settings(_env_file=None, **values), database_url)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listening:  # connections queue here until the service accepts them
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def served_service(cluster_url: str, template: str) -> Iterator[Served]:
    """Serve on a database of the module's own, with something in it."""
    asyncio.run(execute(cluster_url, f'CREATE DATABASE "{DATABASE}" TEMPLATE "{template}"'))
    database_url = with_database(cluster_url, DATABASE)
    keys = {role: asyncio.run(make_principal_key(database_url, role, f"{role}-1")) for role in ROLES}
    with served(database_url) as url:
        yield Served(url=url, keys=keys, undo_ids=furnish(url, keys))
    asyncio.run(execute(cluster_url, f'DROP DATABASE "{DATABASE}" WITH (FORCE)'))


def furnish(url: str, keys: dict[Role, str]) -> dict[str, str]:
    """Register a tool, and open a session for each operation on one; return the ids of their first steps' undos."""
    admin = {"Authorization": f"Bearer {keys[Role.ADMIN]}"}
    with httpx.Client(base_url=f"{url}/v1", headers={"Authorization": f"Bearer {keys[Role.AGENT]}"}, timeout=PATIENCE_SECONDS) as agent:
        agent.put("/tools/issue_credit", json=TOOL, headers=admin).raise_for_status()
        for run in OPERATIONS:
            for step in (1, 2):
                call = {"tool": "issue_credit", "args": {"amount": 1}, "step_index": step}
                agent.post(f"/sessions/{run}/intercept", json=call).raise_for_status()
            agent.post(f"/sessions/{run}/effects/1/commit", json={"result": {"id": 1}}).raise_for_status()
        for run in PARKED:
            agent.post(f"/sessions/{run}/effects/2/commit", json={}).raise_for_status()
            agent.post(f"/sessions/{run}/intercept", json={"tool": "send_reply", "args": {}, "step_index": 3}).raise_for_status()
        agent.post("/sessions/resumeEffect/effects/3/approve", json={}, headers=admin).raise_for_status()
        agent.post("/sessions/settleEffect/effects/2/fail", json={"error": "x"}).raise_for_status()
        agent.put("/tools/issue_slowly", json=SLOW_TOOL, headers=admin).raise_for_status()
        agent.post("/sessions/haltSession/intercept", json={"tool": "issue_slowly", "args": {}, "step_index": 3}).raise_for_status()
        agent.post("/sessions/haltSession/fail", json={"error": "x"}).raise_for_status()
        for run in HALTED:
            agent.post(f"/sessions/{run}/fail", json={"error": "x"}, params={"wait_s": 20}).raise_for_status()
        agent.post("/sessions/completeSession/effects/2/commit", json={}).raise_for_status()
        agent.post("/sessions/getEffect/effects/2/commit", json={}).raise_for_status()
        agent.post("/sessions/getEffect/intercept", json={"tool": "send_reply", "args": {}, "step_index": 3}).raise_for_status()
        agent.post("/sessions/getSession/fail", json={"error": "x"}).raise_for_status()
        return {run: agent.get(f"/sessions/{run}").json()["undo_stack"][-1]["undo_id"] for run in OPERATIONS}


@st.composite
def requests(draw: st.DrawFn, name: str, undo_id: str) -> Case:
    """Make up a request, good or bad, or take an example; it may speak of what is there, and holds no answer back for long."""
    operation = OPERATIONS[name]
    made_up = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]
    case: Case = draw(draw(st.sampled_from([*made_up, *operation.get_strategies_from_examples()])))
    is_known = draw(st.booleans())
    if case.path_parameters and is_known:
        known = {"session_id": name, "step": draw(STEPS), "name": draw(TOOLS), "undo_id": undo_id, "destination": HELD}
        case.path_parameters = {key: known[key] for key in case.path_parameters}
    if str((case.query or {}).get("wait_s", "")).isdecimal():
        case.query["wait_s"] = 0
    return case


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_answer_is_as_described_when_a_request_is_made_up(name: str, role: Role, served_service: Served) -> None:
    """No 5xx, no status, content type or shape that the description does not announce, whoever asks for whatever."""

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),  # a failing request is shown as it was found: shrinking would cost minutes
        suppress_health_check=list(HealthCheck),
    )
    @given(case=requests(name, served_service.undo_ids[name]))
    def ask(case: Case) -> None:
        headers = {"Authorization": f"Bearer {served_service.keys[role]}"}
        case.validate_response(case.call(base_url=served_service.url, headers=headers, timeout=PATIENCE_SECONDS), checks=CHECKS)

    ask()


def test_every_operation_is_asked() -> None:
    """The generator leaves no operation of the description out."""
    described = {operation["operationId"] for methods in NOWHERE.openapi()["paths"].values() for operation in methods.values()}
    assert OPERATIONS.keys() == described
