"""Golden files: what the code says against what the repository keeps. Must not be rewritten by a test that was not told to.

`COUNTERMAND_REWRITE_GOLDEN=1` rewrites (the make verbs set it); the difference is then reviewed like any other.
"""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
REWRITE_VARIABLE = "COUNTERMAND_REWRITE_GOLDEN"


def kept_text(name: str, current: str) -> str:
    """Return the text of a golden file, named from the repository's root; rewritten with `current` first, where that was asked for."""
    path = REPOSITORY / name
    if os.environ.get(REWRITE_VARIABLE) == "1":
        path.write_text(current, encoding="utf-8")
    return path.read_text(encoding="utf-8") if path.exists() else ""
