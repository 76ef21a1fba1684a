"""The reference of tools has every member, range and default, and the language of `$ref`. Must not test what they do: see tests/domain."""

import inspect
import json
import re
from typing import Any

import pytest
from pydantic import BaseModel

from app.api import bodies
from app.domain import bindings
from app.domain.model import RetryPolicy
from app.domain.references import Source
from tests.docs.documents import read
from tests.golden import REPOSITORY

DOCUMENT = read(REPOSITORY / "docs/reference/tools.md")
SCHEMAS: dict[str, dict[str, Any]] = json.loads((REPOSITORY / "openapi/openapi.json").read_text(encoding="utf-8"))["components"]["schemas"]
DEFAULTS = RetryPolicy()
RETRIES = bodies.ActionBody.model_fields.keys() - {"url"}
# Where each body's members are; those that an undo and an action share have a table of their own.
SECTIONS: dict[str, type[BaseModel]] = {
    "Members": bodies.ToolBody,
    "approval": bodies.ApprovalRuleBody,
    "compensation": bodies.CompensationBody,
    "unknown": bodies.UnknownBody,
    "action": bodies.ActionBody,
}
SAID_OTHERWISE = {("approval", "ttl_seconds"): "the deployment's", ("unknown", "url"): "the undo's"}


def rows(title: str) -> list[list[str]]:
    """Return the rows of a section's tables by column."""
    found = re.search(rf"^###? {title}$(.*?)(?=^##|\Z)", DOCUMENT.prose, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return [[column.strip() for column in line.strip("|").split(" | ")] for line in found[1].splitlines() if line.startswith("| `")]


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """Return what a member's schema means, null apart."""
    while "anyOf" in schema or "$ref" in schema:
        if "$ref" in schema:
            schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
        else:
            (schema,) = (option for option in schema["anyOf"] if option.get("type") != "null")
    return schema


def range_of(schema: dict[str, Any]) -> str:
    """Write what may stand in a member, as the tables do."""
    match schema:
        case {"enum": values}:
            return ", ".join(f"`{value}`" for value in values)
        case {"type": "boolean"}:
            return "`true`, `false`"
        case {"type": "string"}:
            return f"{schema.get('minLength', 0)} to {schema['maxLength']} characters"
        case {"type": "array"}:
            return f"0 to {schema['maxItems']} of {range_of(schema['items'])}"
        case {"minimum": low, "maximum": high}:
            return f"{low:g} to {high:.0f}"
        case {"type": "object"}:
            return "object"
        case _:
            return "any JSON"


def default_of(title: str, name: str) -> str:
    """Write what holds where a member is left out, as the tables do."""
    if name in RETRIES - {"retry_on"}:
        return f"{getattr(DEFAULTS, name):g}" if name == "multiplier" else str(getattr(DEFAULTS, name))
    if (title, name) in SAID_OTHERWISE:
        return SAID_OTHERWISE[title, name]
    field = SECTIONS[title].model_fields[name]
    if field.is_required():
        return "-"
    match field.get_default(call_default_factory=True):
        case None | frozenset():
            return "none"
        case "":
            return "empty"
        case value:
            return f"`{value.lower() if isinstance(value, str) else json.dumps(value)}`"


def test_members_are_those_that_may_be_registered() -> None:
    """What may be said of a tool is explained, and nothing that may not."""
    for title, body in SECTIONS.items():
        own = [name for name in body.model_fields if name not in RETRIES]
        assert [row[0].strip("`") for row in rows(title)] == own, title
    assert {row[0].strip("`") for row in rows("retries")} == RETRIES


@pytest.mark.parametrize(
    ("title", "row"), [pytest.param(title, row, id=f"{title}-{row[0]}") for title in [*SECTIONS, "retries"] for row in rows(title)]
)
def test_range_and_default_are_the_codes(title: str, row: list[str]) -> None:
    """Whoever writes a registration by the table has it taken, and knows what holds of what is left out."""
    body = SECTIONS["action" if title == "retries" else title]
    name = row[0].strip("`")
    schema = SCHEMAS[body.__name__]["properties"][name]
    assert row[1] == range_of(resolved(schema))
    assert row[2] == default_of("action" if title == "retries" else title, name)
    assert len(row) == 4


def test_sources_and_what_the_service_says_of_a_call_are_the_codes() -> None:
    """Every reference that is shown binds, and none is kept secret."""
    source = inspect.getsource(bindings._effect_document)  # noqa: SLF001 (there is no effect here to make a document of)
    said = re.findall(r'^        "(\w+)":', source, re.MULTILINE)
    named = [row[0].strip("`") for row in rows("References")]
    sources = [f"{each}#" for each in Source]
    assert sorted(named[: len(sources)]) == sorted(sources)
    assert named[len(sources) :] == said


def test_limits_of_references_are_the_codes() -> None:
    """A descriptor that is refused for its size is refused as foretold."""
    assert f"more than {bindings.MAX_REFERENCES} references" in " ".join(DOCUMENT.prose.split())
    assert bindings.MAX_BOUND_ARGS_BYTES == 256 * 1024
