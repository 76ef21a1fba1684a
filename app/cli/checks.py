"""The developer's two verbs: `test` and `check`. Must not hold a rule of its own: pyproject.toml configures every tool."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from app.cli.embedded_postgres import all_binaries, major_version

CLONE = Path(__file__).resolve().parents[2]
SCRIPTS = Path(sysconfig.get_path("scripts"))
# One worker per core of the smallest machine this is run on; whole files go to one worker, so that the split does not hang on timing.
PARALLEL = ("-n", "2", "--dist", "loadfile")
BIN_DIR_VARIABLE = "COUNTERMAND_TEST_POSTGRES_BIN_DIR"
NO_TESTS_COLLECTED = 5  # pytest's exit code

CHECKS: tuple[tuple[str, Sequence[str]], ...] = (
    ("format", (sys.executable, "-m", "ruff", "format", "--check", ".")),
    ("lint", (sys.executable, "-m", "ruff", "check", ".")),
    ("types", (sys.executable, "-m", "mypy", "--strict", "app", "tests", "migrations", "bench", "deploy", "examples")),
    ("contracts", (str(SCRIPTS / "lint-imports"),)),
    ("dependencies", (sys.executable, "-m", "deptry", ".")),
    ("Dockerfile", (str(SCRIPTS / "hadolint"), "Dockerfile")),
    ("docker-compose.yml", (str(SCRIPTS / "docker-compose"), "--file", "docker-compose.yml", "config", "--quiet")),
    ("golden files", (sys.executable, "-m", "pytest", "-q", "-m", "golden")),
)


AGAIN = ("tests/storage", "tests/engine")


def run_tests(args: Sequence[str]) -> int:
    """Run pytest on the first Postgres found, then storage and engine again on the oldest other one; `args` go to pytest.

    The second round holds every statement, guard and race; what lies above sees no difference between the two. With `args`, it is what
    those choose that needs a database.

    Returns pytest's exit code of the first run that failed, 0 if none did. A directory named in COUNTERMAND_TEST_POSTGRES_BIN_DIR is
    the only one used.
    """
    code = _pytest(args)
    if code != 0 or os.environ.get(BIN_DIR_VARIABLE):
        return code
    others = all_binaries()[1:]
    if not others:
        return code
    oldest = min(others, key=major_version)
    print(f"\nAgain, what needs a database, on the Postgres in {oldest}:", flush=True)
    again = _pytest(["-m", "database", *(args or AGAIN)], bin_dir=oldest)
    return 0 if again == NO_TESTS_COLLECTED else again


def run_checks() -> int:
    """Run every check, all of them even after a failure, and print a line for each; returns 1 if one failed, else 0."""
    failed = [name for name, command in CHECKS if not _passes(name, command)]
    print("check: " + (f"{', '.join(failed)} FAILED" if failed else f"{len(CHECKS)} passed"), flush=True)
    return 1 if failed else 0


def _pytest(args: Sequence[str], *, bin_dir: Path | None = None) -> int:
    variables = {} if bin_dir is None else {BIN_DIR_VARIABLE: str(bin_dir)}
    command = [sys.executable, "-m", "pytest", *PARALLEL, *args]
    return subprocess.run(command, check=False, cwd=CLONE, env=os.environ | variables).returncode


def _passes(name: str, command: Sequence[str]) -> bool:
    print(f"--- {name}", flush=True)
    return subprocess.run(command, check=False, cwd=CLONE).returncode == 0
