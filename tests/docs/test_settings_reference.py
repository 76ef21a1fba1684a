"""The table of settings has the range and the default of each. Must not test what they do."""

import re
from typing import Any

from app.settings import Settings
from tests.docs.documents import read
from tests.golden import REPOSITORY

DOCUMENT = read(REPOSITORY / "docs/reference/settings.md")
PROPERTIES: dict[str, dict[str, Any]] = Settings.model_json_schema()["properties"]


def rows() -> dict[str, list[str]]:
    """Return default and range of each setting, as shown."""
    found = re.findall(r"^\| `COUNTERMAND_([A-Z_]+)` \| (.*?) \| (.*?) \| ", DOCUMENT.prose, re.MULTILINE)
    return {name.lower(): [default, shown] for name, default, shown in found}


def range_of(schema: dict[str, Any]) -> str:
    """Write what a setting may be; `-` where it is a text of its own form."""
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    schema = next((option for option in schema.get("anyOf", ()) if "maximum" in option), schema)
    if "maximum" not in schema:
        return "-"
    low = f"above {schema['exclusiveMinimum']:g}" if "exclusiveMinimum" in schema else f"{schema['minimum']:g}"
    return f"{low} to {schema['maximum']:.0f}"


def test_ranges_are_those_that_are_held() -> None:
    """Nobody is stopped at the start by a bound that was not told."""
    assert {name: shown for name, (_, shown) in rows().items()} == {name: range_of(schema) for name, schema in PROPERTIES.items()}


def test_defaults_are_those_of_the_code() -> None:
    """Whoever sets nothing knows what holds."""
    defaults = {name: field.default for name, field in Settings.model_fields.items()}
    shown = {None: "-", "": "(empty)"}
    assert {name: default for name, (default, _) in rows().items()} == {
        name: shown.get(value, f"`{value}`") for name, value in defaults.items()
    }
