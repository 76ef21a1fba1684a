"""The document of the API: it is the one that is kept, it leaves no answer out, and its examples are accepted. Must not test verbs."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from jsonschema_rs import Draft202012Validator
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api import openapi
from app.api.approvals import PAYLOAD_EXAMPLE
from app.main import create_app
from app.settings import Settings
from tests.conftest import StartService
from tests.described import NO_SUCH_DATABASE, differences, document
from tests.factories import Service, park
from tests.fakes import FakeEndpoint
from tests.golden import kept_text
from tests.halts import LATER, Night
from tests.operators import undo_ids

GOLDEN = "openapi/openapi.json"
PROBLEM_JSON = "application/problem+json"


class Operation(NamedTuple):
    """One operation of the document."""

    method: str
    path: str
    body: dict[str, Any]

    @property
    def name(self) -> str:
        """Its operationId."""
        return str(self.body["operationId"])


def operations() -> Iterator[Operation]:
    """Yield every operation of the document."""
    for path, methods in document()["paths"].items():
        for method, body in methods.items():
            yield Operation(method.upper(), path, body)


@pytest.mark.golden
def test_document_is_the_golden_file() -> None:
    """A change of the API is seen in its diff; `make openapi` rewrites the file."""
    current = openapi.dumps(create_app(Settings(_env_file=None), NO_SUCH_DATABASE))
    assert kept_text(GOLDEN, current) == current, "run `make openapi` and look at the difference"


def test_every_operation_says_who_it_is_and_how_it_may_fail() -> None:
    """Each has a name in the form verbNoun, words for people, and every refusal that any caller can meet, as a problem."""
    for operation in operations():
        responses = operation.body["responses"]
        assert operation.name.isidentifier(), operation
        assert operation.name[0].islower(), operation
        assert operation.body["description"], operation.name
        is_of_api = operation.path.startswith("/v1/")
        expected = {"401", "422", "500", "503"} if is_of_api else set()
        if "requestBody" in operation.body:
            expected |= {"400", "413", "415", "422"}
        if "{session_id}" in operation.path and is_of_api:
            expected |= {"404"}
        assert expected <= responses.keys(), (operation.name, expected - responses.keys())
        for status, response in responses.items():
            if int(status) >= 400:
                assert list(response["content"]) == [PROBLEM_JSON], (operation.name, status)
                shape, codes = response["content"][PROBLEM_JSON]["schema"]["allOf"]
                assert shape == {"$ref": "#/components/schemas/Problem"}
                assert codes["properties"]["code"]["enum"], (operation.name, status)
        assert any(status.startswith("2") for status in responses), operation.name


def examples_of(operation: Operation) -> dict[str, Any]:
    """Return the examples of an operation's body, by name."""
    content = operation.body.get("requestBody", {}).get("content", {})
    return {name: example["value"] for name, example in content.get("application/json", {}).get("examples", {}).items()}


def test_every_body_that_has_to_say_something_has_an_example() -> None:
    """Where a body has members, a reader sees one that works."""
    schemas = document()["components"]["schemas"]
    for operation in operations():
        if "requestBody" not in operation.body:
            continue
        reference = operation.body["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        if schemas[reference.rpartition("/")[2]].get("properties"):
            assert examples_of(operation), operation.name


async def executing(night: Night, session_id: str) -> None:
    """Open a session with steps 2 and 3 executing, as the examples speak of them."""
    for step in (2, 3):
        answer = await night.service.agent.intercept(session_id, step_index=step, reversibility="read_only")
        answer.raise_for_status()


async def parked(night: Night, session_id: str) -> None:
    """Let step 2 wait for a person."""
    await park(night.service.agent, session_id, 2, PAYLOAD_EXAMPLE)


async def approved(night: Night, session_id: str) -> None:
    """Let step 2 wait for its release."""
    await parked(night, session_id)
    (await night.service.operator.approve(session_id, 2)).raise_for_status()


async def halted(night: Night, session_id: str) -> None:
    """Let a person own a session, since the undo of step 2 was refused."""
    await night.refused(session_id)


async def unwinding(night: Night, session_id: str) -> None:
    """Let the undo of step 2 wait for its next try."""
    night.endpoint.script(f"/{session_id}/2", LATER)
    await night.run(session_id)
    (await night.service.agent.fail(session_id)).raise_for_status()


async def unknown(night: Night, session_id: str) -> None:
    """Let nobody know what came of step 2."""
    await night.open_step(session_id, 2)
    (await night.service.agent.fail_effect(session_id, 2)).raise_for_status()


async def nothing(night: Night, session_id: str) -> None:
    """Prepare nothing: the operation opens what it speaks of."""
    del night, session_id


# What an operation's examples speak of; the others' are about calls that are executing. Who sends them, where that is not the agent.
PREPARED = {
    "openSession": nothing,
    "interceptEffect": nothing,
    "registerTool": nothing,
    "approveEffect": parked,
    "rejectEffect": parked,
    "resumeEffect": approved,
    "settleEffect": unknown,
    "retryUndo": halted,
    "skipUndo": halted,
    "unwindSession": halted,
    "resolveSession": halted,
    "haltSession": unwinding,
    # Each is followed by its resume, so that nothing of the others' is held.
    "pauseDestination": nothing,
    "resumeDestination": nothing,
    "pauseOrg": nothing,
    "resumeOrg": nothing,
}
OPERATORS = PREPARED.keys() - {"openSession", "interceptEffect", "registerTool", "resumeEffect"}


async def path_of(night: Night, operation: Operation, session_id: str) -> str:
    """Return where an operation is called about a prepared session."""
    undo_id = (await undo_ids(night.service.operator, session_id))[2] if "{undo_id}" in operation.path else None
    return operation.path.format(
        session_id=session_id, step=2, undo_id=undo_id, name=f"tool_{session_id}", destination="ledger.example:443"
    )


def expect_shape(operation: Operation, answer: httpx.Response) -> None:
    """Check an answer against what is described for its status."""
    described = operation.body["responses"][str(answer.status_code)]["content"]["application/json"]["schema"]
    Draft202012Validator({**described, "components": document()["components"]}, offline=True).validate(answer.json())


async def test_examples_are_accepted_when_they_are_sent(services: StartService, endpoint: FakeEndpoint) -> None:
    """Every example of every body is a request that works, and its answer has the shape that is described."""
    service = await services(egress_allow="127.0.0.0/8")
    night = Night(service=service, endpoint=endpoint)
    tried = set()
    for operation in operations():
        for name, body in examples_of(operation).items():
            session_id = f"{operation.name}-{name}".replace(" ", "_")
            await PREPARED.get(operation.name, executing)(night, session_id)
            caller = service.admin if operation.name in OPERATORS | {"registerTool"} else service.agent
            path = await path_of(night, operation, session_id)
            answer = await caller.request(operation.method, path, json=body, headers={"Idempotency-Key": "k"})
            assert answer.is_success, (operation.name, name, answer.text)
            expect_shape(operation, answer)
            tried.add(operation.name)
    assert tried >= PREPARED.keys()


# An answer -> in what it differs from what is described for it. Every client of the tests' services looks for this (tests/described.py).
CONFLICT: dict[str, Any] = {"status_code": 409, "headers": {"Cache-Control": "no-store"}, "json": {"code": "session_not_active"}}
ANSWERS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("POST /v1/sessions/s/touch", CONFLICT, []),
    ("POST /v1/sessions/s/touch?wait_s=1", {**CONFLICT, "json": {"code": "step_reused"}}, ["code step_reused is not declared"]),
    ("POST /v1/sessions/s/touch", {**CONFLICT, "headers": {}}, ["header Cache-Control is not sent"]),
    ("POST /v1/sessions/s/touch", {**CONFLICT, "status_code": 412}, ["status 412"]),
    ("POST /v1/sessions/s/fail", {"status_code": 202, "headers": {"Cache-Control": "no-store", "Idempotent-Replayed": "true"}}, []),
    ("HEAD /v1/sessions/s", {"status_code": 200, "headers": {"Cache-Control": "no-store", "ETag": '"v1"'}}, []),
    (
        "GET /v1/tools/t",
        {"status_code": 200, "headers": {"Cache-Control": "no-store", "ETag": '"v1"', "Location": "/"}},
        ["header etag is not declared", "header location is not declared"],
    ),
    ("GET /nowhere", {"status_code": 404}, []),
]


@pytest.mark.parametrize(("asked", "answer", "expected"), ANSWERS)
def test_answer_is_held_to_its_description_when_a_test_receives_one(asked: str, answer: dict[str, Any], expected: list[str]) -> None:
    """A status, code or header that is not declared is seen, and one that is always there and is not."""
    method, path = asked.split()
    response = httpx.Response(**answer, request=httpx.Request(method, f"http://countermand.test{path}"))
    assert differences(response, response.content) == expected


async def test_client_of_the_tests_refuses_an_answer_when_it_is_not_described(service: Service) -> None:
    """The hook is in place: what a service of the tests answers is looked at, whichever test asks."""

    async def odd(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(status_code=200, headers={"X-Odd": "1"})(scope, receive, send)

    service.app.middleware_stack = odd
    with pytest.raises(AssertionError, match="header x-odd is not declared"):
        await service.agent.get("/sessions")


async def test_document_is_served_as_it_is_kept(services: StartService) -> None:
    """What a client downloads is the document that is compared with the file."""
    service = await services(has_orchestrator=False)
    transport = httpx.ASGITransport(app=service.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://countermand.test") as anybody:
        served = await anybody.get("/openapi.json")
    assert served.json() == document()
