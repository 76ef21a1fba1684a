"""docs/reference/api.md shows the routes that there are. Must not call them: see tests/api."""

import re

from app.main import create_app
from app.settings import Settings
from tests.golden import REPOSITORY

API = (REPOSITORY / "docs/reference/api.md").read_text(encoding="utf-8")


def shown_verbs() -> set[tuple[str, str]]:
    """Return each method and path of the table of verbs; `...` stands for the row's first path without its last part."""
    found: set[tuple[str, str]] = set()
    for line in API.splitlines():
        columns = [column.strip() for column in line.strip("|").split(" | ")]
        if len(columns) < 4 or not re.match(r"[A-Z]+\b", columns[0]):
            continue
        first: str | None = None
        for part in columns[1].split(";"):
            methods = re.findall(r"\b(GET|PUT|POST|DELETE)\b", part.partition("`")[0]) or columns[0].split()
            for path in re.findall(r"`([^`?]+)[^`]*`", part):
                first = first or path
                found |= {(method, path.replace("...", first.rpartition("/")[0])) for method in methods}
    return found


def test_table_of_verbs_has_every_route_and_no_other() -> None:
    """Whoever looks for a verb finds it, under the path that it has."""
    paths = create_app(Settings(_env_file=None), "postgresql://nobody@127.0.0.1:1/nothing").openapi()["paths"]
    real = {
        (method.upper(), path.removeprefix("/v1").replace("{session_id}", "{id}")) for path, methods in paths.items() for method in methods
    }
    assert shown_verbs() == real
