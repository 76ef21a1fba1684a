"""Write a database's schema as text that is the same on every Postgres we run on. Must not look at rows."""

import re
import subprocess
from functools import cache
from itertools import groupby
from pathlib import Path

from app.cli.embedded_postgres import all_binaries, major_version

DUMP_SECONDS = 60
HEADER = "-- The schema at the newest revision, as pg_dump tells it. `make schema` rewrites this file; a test compares it.\n\n"

# What says which program wrote the dump, and when, rather than what is in the database.
_NOISE = re.compile(r"--|SET |\\|SELECT pg_catalog\.set_config")


@cache
def newest_pg_dump() -> Path:
    """Return the newest pg_dump at hand: it reads older servers too, and then writes the same text for all of them."""
    found = [directory for directory in all_binaries() if (directory / "pg_dump").exists()]
    assert found, "no pg_dump beside any Postgres found"
    return max(found, key=major_version) / "pg_dump"


def dump_schema(database_url: str) -> str:
    """Return the schema `public` with privileges, without owners."""
    command = [str(newest_pg_dump()), "--schema-only", "--no-owner", database_url]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DUMP_SECONDS)
    told = (line for line in done.stdout.replace("public.", "").splitlines() if _NOISE.match(line) is None)
    # One empty line is enough between two statements.
    blocks = ("\n".join(lines) for is_text, lines in groupby(told, key=bool) if is_text)
    return HEADER + "\n\n".join(blocks) + "\n"
