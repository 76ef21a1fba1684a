"""Describe the API as OpenAPI 3.1, the bodies that `strict_json` reads included. Must not change what the API does."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, TypeAlias

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from app.api.dependencies import RoleCheck, idempotency_key, if_match
from app.api.errors import Problem
from app.api.headers import HEADERS, sends
from app.api.problems import declared_codes, problem_responses
from app.api.strict_json import BodyReader, QueryNames

OPENAPI_VERSION = "3.1.0"
API_PREFIX = "/v1/"
BEARER_SCHEME = "bearer"

_REF_PREFIX = "#/components/schemas/"

# What the edge itself can answer; a route declares only what its verb adds (with `problem_responses`).
_CODES_OF_API = ("invalid_request", "internal", "schema_missing", "stopping", "storage_unavailable", "unauthenticated")
_CODES_OF_BODY = (
    *("body_too_large", "incomplete_body", "invalid_request", "malformed_json"),
    *("unsupported_content_coding", "unsupported_media_type"),
)
_CODES_OF_PLACE: Mapping[str, str] = MappingProxyType(
    {"session_id": "session_not_found", "step": "effect_not_found", "undo_id": "undo_not_found"}
)
# A verb that takes If-Match keeps its first answer for repeats (`dependencies.Caller`).
_CODES_OF_CALL: Mapping[Callable[..., object], tuple[str, ...]] = MappingProxyType(
    {idempotency_key: ("bad_idempotency_key",), if_match: ("version_differs", "key_reused")}
)

# The framework's shape for validation errors, which `errors` never sends.
_FRAMEWORK_SCHEMAS = ("HTTPValidationError", "ValidationError")

Schemas: TypeAlias = dict[str, dict[str, Any]]
Operation: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """One method of one path, as it will stand in the document."""

    path: str
    method: str
    operation_id: str | None
    calls: tuple[Callable[..., object], ...]
    readers: tuple[BodyReader[Any], ...]
    query_names: frozenset[str] | None

    @property
    def is_of_api(self) -> bool:
        return self.path.startswith(API_PREFIX)

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def install_openapi(app: FastAPI) -> None:
    """Make `app.openapi()` return the document, made when it is first asked for; call this when all routes are in.

    Raises:
        ValueError: the routes cannot be described: an operationId under /v1 is missing, one occurs twice, or a route has two bodies. Asking
            for the document raises it where `only_query` does not name exactly the query parameters of its route.
    """
    routes = list(_routes(app))
    _refuse(_faults(routes))
    app.openapi = cache(lambda: _document(app, routes))  # type: ignore[method-assign]  # the framework's own way to replace it


def dumps(app: FastAPI) -> str:
    """Return the document as text that changes only when the API does: keys sorted, two spaces, one newline at the end."""
    return json.dumps(app.openapi(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _routes(app: FastAPI) -> Iterator[_Route]:
    for context in iter_route_contexts(app.routes):
        if not isinstance(context.original_route, APIRoute) or not context.include_in_schema:
            continue
        calls = tuple(call for call in _calls(context.dependant) if call is not None)
        names = [call.names for call in calls if isinstance(call, QueryNames)]
        for method in sorted(context.methods or ()):
            yield _Route(
                path=str(context.path_format),
                method=method,
                operation_id=_operation_id(context),
                calls=calls,
                readers=tuple(call for call in calls if isinstance(call, BodyReader)),
                query_names=frozenset[str]().union(*names) if names else None,
            )


def _operation_id(context: RouteContext) -> str | None:
    operation_id: str | None = context.operation_id
    return operation_id


def _calls(dependant: Dependant) -> Iterator[Callable[..., object] | None]:
    for dependency in dependant.dependencies:
        yield dependency.call
        yield from _calls(dependency)


def _faults(routes: list[_Route]) -> Iterator[str]:
    times = Counter(route.operation_id for route in routes if route.operation_id is not None)
    for route in routes:
        if route.is_of_api and route.operation_id is None:
            yield f"{route} has no operation_id"
        if route.operation_id is not None and times[route.operation_id] > 1:
            yield f"{route} shares the operation_id {route.operation_id}"
        if len(route.readers) > 1:
            yield f"{route} reads {len(route.readers)} bodies"


def _refuse(faults: Iterator[str]) -> None:
    found = list(faults)
    if found:
        raise ValueError(f"routes that cannot be described: {'; '.join(found)}")


def _document(app: FastAPI, routes: list[_Route]) -> dict[str, Any]:
    document = get_openapi(
        title=app.title,
        version=app.version,
        openapi_version=OPENAPI_VERSION,
        summary=app.summary,
        description=app.description,
        routes=app.routes,
        tags=app.openapi_tags,
        license_info=app.license_info,
        servers=[{"url": "/"}],
    )
    components = document.setdefault("components", {})
    schemas: Schemas = components.setdefault("schemas", {})
    for name in _FRAMEWORK_SCHEMAS:
        schemas.pop(name, None)
    references = _add_bodies(schemas, {reader.model for route in routes for reader in route.readers})
    for route in routes:
        operation: Operation = document["paths"][route.path][route.method.lower()]
        _refuse(_query_faults(route, operation))
        _complete(route, operation, references)
    components["headers"] = {name: dict(header) for name, header in HEADERS.items()}
    components["securitySchemes"] = {
        BEARER_SCHEME: {"type": "http", "scheme": "bearer", "description": "A key made by `countermand keys create`."}
    }
    return document


def _query_faults(route: _Route, operation: Operation) -> Iterator[str]:
    declared = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "query"}
    if route.query_names is not None and route.query_names != declared:
        yield f"{route} declares the query parameters {sorted(declared)} and lets through {sorted(route.query_names)}"


def _add_bodies(schemas: Schemas, models: set[type[BaseModel]]) -> Mapping[type[BaseModel], str]:
    """Add the schemas of the bodies and of Problem to the components; return where each body stands.

    A name under which answers already have another shape (a tool as it is sent has no version yet) gets the framework's suffix, `-Input`.
    """
    all_models: set[type[BaseModel]] = {*models, Problem}
    ordered = sorted(all_models, key=lambda model: (model.__name__, model.__module__))
    places, generated = models_json_schema([(model, "validation") for model in ordered], ref_template=f"{_REF_PREFIX}{{model}}")
    definitions: Schemas = generated["$defs"]
    suffixed: set[str] = set()
    while True:
        renamed = {name: f"{name}-Input" if name in suffixed else name for name in definitions}
        pointed: Schemas = {name: _point_to(definition, renamed) for name, definition in definitions.items()}
        # A schema may come to differ only now, by pointing to a renamed one.
        clashing = {name for name, schema in pointed.items() if name not in suffixed and schemas.get(name, schema) != schema}
        if not clashing:
            break
        suffixed |= clashing
    schemas.update({renamed[name]: schema for name, schema in pointed.items()})
    return {model: _point_to(places[model, "validation"], renamed)["$ref"] for model in models}


def _point_to(node: Any, renamed: Mapping[str, str]) -> Any:  # noqa: ANN401 - any part of a JSON schema
    match node:
        case {"$ref": str(reference)}:
            name = reference.removeprefix(_REF_PREFIX)
            return {**node, "$ref": f"{_REF_PREFIX}{renamed[name]}"}
        case dict():
            return {key: _point_to(member, renamed) for key, member in node.items()}
        case list():
            return [_point_to(item, renamed) for item in node]
        case _:
            return node


def _complete(route: _Route, operation: Operation, references: Mapping[type[BaseModel], str]) -> None:
    responses = operation.setdefault("responses", {})
    if "application/json" in responses.get("422", {}).get("content", {}):
        del responses["422"]
    if route.readers:
        (reader,) = route.readers
        operation["requestBody"] = _request_body(reader, references[reader.model])
    codes = {*declared_codes(responses), *_codes_of(route)}
    if operation.get("parameters"):
        codes.add("invalid_request")
    responses.update({str(status): declared for status, declared in problem_responses(*codes).items()})
    for status, response in responses.items():
        _add_headers(route, status, response)
    operation["responses"] = dict(sorted(responses.items()))
    if route.is_of_api:
        operation["security"] = [{BEARER_SCHEME: []}]


def _codes_of(route: _Route) -> Iterator[str]:
    """Yield what every verb that asks for these things can answer, whatever it does."""
    if route.is_of_api:
        yield from _CODES_OF_API
        yield from (code for name, code in _CODES_OF_PLACE.items() if f"{{{name}}}" in route.path)
    if route.readers:
        yield from _CODES_OF_BODY
    for call in route.calls:
        if isinstance(call, RoleCheck) and call.refuses_some:
            yield "role_not_allowed"
        yield from _CODES_OF_CALL.get(call, ())


def _add_headers(route: _Route, status: str, response: dict[str, Any]) -> None:
    """Add to an answer of the API what all of its kind have."""
    is_json = "application/json" in response.get("content", {})
    if is_json or status == "304":
        response.setdefault("headers", {}).update(sends("Cache-Control")["headers"])
    if is_json and if_match in route.calls:
        response["headers"].update(sends("Idempotent-Replayed")["headers"])


def _request_body(reader: BodyReader[Any], reference: str) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": {"$ref": reference}}
    if reader.examples:
        content["examples"] = {name: {"value": example} for name, example in reader.examples.items()}
    return {"required": not reader.is_optional, "content": {"application/json": content}}
