"""The OpenAPI document of routes whose bodies are read strictly. Must not compare the service's own document: a golden file does."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Query
from pydantic import BaseModel, Field

from app.api.errors import install
from app.api.openapi import dumps, install_openapi
from app.api.problems import problem_responses
from app.api.strict_json import LosslessJson, PlainInteger, Received, SessionIdPath, StepPath, StrictModel, body, only_query
from app.domain.errors import Invalid


class Kind(StrEnum):
    """A closed set of words."""

    ONE = "one"
    TWO = "two"


class Undo(StrictModel):
    """Part of a body."""

    url: str
    args: LosslessJson
    max_retries: int = 3


class Command(StrictModel):
    """A body with everything that must show."""

    tool: Annotated[str, Field(max_length=200, description="Name of the tool.")]
    kind: Kind | None = None
    undo: Undo | None = None
    payload: LosslessJson = None


class Nothing(StrictModel):
    """A body of which nothing is required."""

    reason: str | None = None


class Answer(BaseModel):
    """What comes back."""

    class Undo(BaseModel):
        """Part of an answer, under the name that the part of the body has."""

        undo_id: str

    undo: Undo
    kind: Kind


EXAMPLES = {"refund": {"tool": "issue_credit", "undo": {"url": "https://billing.example/undo", "args": {"a": 1.5}}}}


def described() -> FastAPI:
    """Return an app with one verb that has a body, one whose body may be empty, one without, and a route outside the API."""
    app = FastAPI(title="Described", version="1.2.3")
    install(app)
    router = APIRouter()

    @router.post(
        "/sessions/{session_id}/effects/{step}/commit",
        operation_id="commitEffect",
        responses=problem_responses("result_differs", "tool_not_found"),
        dependencies=[Depends(only_query("wait_s"))],
    )
    async def commit(
        session_id: SessionIdPath,
        step: StepPath,
        received: Annotated[Received[Command], Depends(body(Command, examples=EXAMPLES))],
        wait_s: Annotated[int, Query(ge=0, le=55), PlainInteger] = 0,
    ) -> Answer:
        """Record that the effect happened."""
        raise NotImplementedError

    @router.post("/sessions/{session_id}/touch", operation_id="touchSession", dependencies=[Depends(only_query())])
    async def touch(session_id: SessionIdPath, received: Annotated[Received[Nothing], Depends(body(Nothing))]) -> None:
        """Show that the agent lives."""

    @router.get("/sessions", operation_id="listSessions")
    async def sessions() -> list[Answer]:
        """List sessions."""
        return []

    app.include_router(router, prefix="/v1")

    @app.get("/livez")
    async def live() -> None:
        """Answer."""

    install_openapi(app)
    return app


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """Return the document as a client would load it."""
    loaded: dict[str, Any] = json.loads(dumps(described()))
    return loaded


def _commit(document: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = document["paths"]["/v1/sessions/{session_id}/effects/{step}/commit"]["post"]
    return operation


def test_body_is_described_when_a_route_reads_one(document: dict[str, Any]) -> None:
    """The schema is a component, the examples are shown, and one media type is offered."""
    assert _commit(document)["requestBody"] == {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/Command"},
                "examples": {"refund": {"value": EXAMPLES["refund"]}},
            }
        },
    }
    schema = document["components"]["schemas"]["Command"]
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["tool"]
    assert schema["properties"]["tool"]["pattern"] == r"^[^\x00]*$"
    assert "type" not in schema["properties"]["payload"]
    assert document["components"]["schemas"]["Kind"]["enum"] == ["one", "two"]


def test_body_is_optional_when_nothing_in_it_is_required(document: dict[str, Any]) -> None:
    """A generated client may leave the body out where the service takes that."""
    assert document["paths"]["/v1/sessions/{session_id}/touch"]["post"]["requestBody"]["required"] is False


def test_part_is_described_once_when_bodies_and_answers_share_it(document: dict[str, Any]) -> None:
    """One model, one component, whichever way it travels."""
    schemas = document["components"]["schemas"]

    assert schemas["Answer"]["properties"]["kind"] == {"$ref": "#/components/schemas/Kind"}
    assert {"$ref": "#/components/schemas/Kind"} in schemas["Command"]["properties"]["kind"]["anyOf"]


def test_shapes_are_kept_apart_when_they_share_a_name(document: dict[str, Any]) -> None:
    """What is sent and what is answered may bear one name; neither overwrites the other."""
    schemas = document["components"]["schemas"]

    assert schemas["Undo-Input"]["required"] == ["url", "args"]
    assert schemas["Undo"]["required"] == ["undo_id"]
    assert {"$ref": "#/components/schemas/Undo-Input"} in schemas["Command"]["properties"]["undo"]["anyOf"]
    assert schemas["Answer"]["properties"]["undo"] == {"$ref": "#/components/schemas/Undo"}


def test_problems_are_declared_when_the_edge_can_answer_them(document: dict[str, Any]) -> None:
    """Every status of the edge is there by itself, those of the verb beside them, all in the one shape."""
    responses = _commit(document)["responses"]

    assert sorted(responses) == ["200", "400", "401", "404", "409", "413", "415", "422", "500", "503"]
    for status, response in responses.items():
        if status != "200":
            (shape,) = response["content"].values()
            assert list(response["content"]) == ["application/problem+json"]
            assert shape["schema"]["allOf"][0] == {"$ref": "#/components/schemas/Problem"}
    assert sorted(document["paths"]["/v1/sessions"]["get"]["responses"]) == ["200", "401", "422", "500", "503"]
    assert "Retry-After" in responses["503"]["headers"]
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_parameters_are_bounded_when_paths_and_queries_are(document: dict[str, Any]) -> None:
    """The rules of the URL are in the document, in JSON Schema's words."""
    schemas = {parameter["name"]: parameter["schema"] for parameter in _commit(document)["parameters"]}

    assert schemas["session_id"]["pattern"] == r"^(\.{0,2}[A-Za-z0-9_:-][A-Za-z0-9._:-]*|\.{3}[A-Za-z0-9._:-]*)$"
    assert (schemas["session_id"]["minLength"], schemas["session_id"]["maxLength"]) == (1, 200)
    assert (schemas["step"]["minimum"], schemas["step"]["maximum"]) == (1, 2_147_483_647)
    assert (schemas["wait_s"]["minimum"], schemas["wait_s"]["maximum"]) == (0, 55)


def test_frame_is_complete_when_the_document_is_built(document: dict[str, Any]) -> None:
    """Version, servers, security: relative, so that the document holds wherever the service stands."""
    assert document["openapi"] == "3.1.0"
    assert document["info"] == {"title": "Described", "version": "1.2.3"}
    assert document["servers"] == [{"url": "/"}]
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert _commit(document)["security"] == [{"bearer": []}]
    assert "security" not in document["paths"]["/livez"]["get"]
    assert sorted(document["paths"]["/livez"]["get"]["responses"]) == ["200"]


def test_every_reference_leads_somewhere_when_followed(document: dict[str, Any]) -> None:
    """No dangling $ref, and no component that nothing points to."""
    text = json.dumps(document)
    schemas = document["components"]["schemas"]

    referenced = {part.split('"', 1)[0] for part in text.split('"#/components/schemas/')[1:]}
    assert referenced == set(schemas)


def test_text_is_the_same_when_written_by_another_process() -> None:
    """Hash seeds and set orders do not move a byte: a changed golden file means a changed API."""
    program = "import importlib.util, sys; spec = importlib.util.spec_from_file_location('described', sys.argv[1]); "
    program += "module = importlib.util.module_from_spec(spec); sys.modules['described'] = module; spec.loader.exec_module(module); "
    program += "from app.api.openapi import dumps; sys.stdout.write(dumps(module.described()))"
    text = subprocess.run(
        [sys.executable, "-c", program, __file__],
        # Not this process's seed: that one is random, or another number.
        env={**os.environ, "PYTHONHASHSEED": "4921", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout

    assert text == dumps(described()).encode()


def _without_operation_id(app: FastAPI) -> None:
    @app.get("/v1/a")
    async def a() -> None: ...


def _with_equal_operation_ids(app: FastAPI) -> None:
    @app.get("/v1/a", operation_id="same")
    async def a() -> None: ...

    @app.get("/b", operation_id="same")
    async def b() -> None: ...


def _with_two_methods(app: FastAPI) -> None:
    @app.api_route("/v1/a", methods=["GET", "POST"], operation_id="both")
    async def a() -> None: ...


def _with_two_bodies(app: FastAPI) -> None:
    @app.post("/v1/a", operation_id="a")
    async def a(
        one: Annotated[Received[Nothing], Depends(body(Nothing))], two: Annotated[Received[Command], Depends(body(Command))]
    ) -> None: ...


def _with_undeclared_query(app: FastAPI) -> None:
    @app.get("/v1/a", operation_id="a", dependencies=[Depends(only_query("wait_s"))])
    async def a() -> None: ...


def _with_blocked_query(app: FastAPI) -> None:
    @app.get("/v1/a", operation_id="a", dependencies=[Depends(only_query())])
    async def a(wait_s: int = 0) -> None: ...


FAULTS: list[tuple[Callable[[FastAPI], None], str]] = [
    (_without_operation_id, "GET /v1/a has no operation_id"),
    (_with_equal_operation_ids, "GET /b shares the operation_id same"),
    (_with_two_methods, "POST /v1/a shares the operation_id both"),
    (_with_two_bodies, "POST /v1/a reads 2 bodies"),
    (_with_undeclared_query, r"declares the query parameters \[\] and lets through \['wait_s'\]"),
    (_with_blocked_query, r"declares the query parameters \['wait_s'\] and lets through \[\]"),
]


@pytest.mark.parametrize(("add", "expected"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_document_is_refused_when_a_route_cannot_be_described(add: Callable[[FastAPI], None], expected: str) -> None:
    """A mistake in a route's declaration is found by name, at the start or when the document is made."""
    app = FastAPI()
    add(app)

    with pytest.raises(ValueError, match=expected):  # noqa: PT012 - either of the two may be the first to see it
        install_openapi(app)
        app.openapi()


def test_start_fails_when_an_example_is_not_a_body() -> None:
    """Examples are read by the reader they illustrate, so they cannot rot."""
    with pytest.raises(Invalid):
        body(Command, examples={"old": {"tool": "t", "renamed": 1}})
