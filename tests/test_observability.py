"""The log's lines: one JSON object each, safe to look at, none too long. Must not test what is logged: see where it happens."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from app.observability import HEAD_CHARACTERS, MAX_VALUE_CHARACTERS

REPOSITORY = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 60
MARK = " [...] "
UNSAFE = "a\x1b[31m\r\nb\u202ec\u2028d\x00e\x9bf\ufeffg"
SAFE = r"a\u001b[31m\u000d\u000ab\u202ec\u2028d\u0000e\u009bf\ufeffg"
# In a process of its own: the log belongs to the whole process, and other tests look at what theirs says.
SCRIPT = f"""
import logging
import structlog
from app import observability

observability.configure()
log = structlog.get_logger()
unsafe = {UNSAFE!r}
log.info("unsafe", text=unsafe)
logging.getLogger("somebody.else").warning("%s", unsafe)
for length in ({MAX_VALUE_CHARACTERS}, {MAX_VALUE_CHARACTERS + 1}, 1_000_000):
    log.info("long", text="<" + "x" * (length - 2) + ">")
try:
    raise ValueError("the first cause " + "y" * 20_000)
except ValueError as cause:
    try:
        raise RuntimeError("what went wrong last" + unsafe) from cause
    except RuntimeError:
        log.exception("crashed")
"""

# Nobody is there to read: once the log is closed, everything goes on.
UNREAD = """
import os
import structlog
from app import observability

observability.configure()
os.close(2)
structlog.get_logger().error("lost")
print("went on", flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def logged() -> list[Mapping[str, Any]]:
    """Return the lines of a process that logs what is hard to log."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    assert run.stdout == ""
    return [json.loads(line) for line in run.stderr.splitlines()]


def test_control_characters_are_escaped_when_they_are_logged(logged: list[Mapping[str, Any]]) -> None:
    """Nothing ends a line, moves a terminal's cursor or turns text around, in our own events and in libraries' records."""
    ours, theirs = logged[:2]
    assert (ours["text"], theirs["event"]) == (SAFE, SAFE)


def test_value_is_cut_in_its_middle_when_it_is_too_long(logged: list[Mapping[str, Any]]) -> None:
    """Up to the bound it is whole; past it both ends stay and a mark tells of the cut."""
    whole, cut, flood = (line["text"] for line in logged if line["event"] == "long")
    assert (len(whole), MARK in whole) == (MAX_VALUE_CHARACTERS, False)
    for text in (cut, flood):
        head, tail = text.split(MARK)
        assert (len(head), len(tail)) == (HEAD_CHARACTERS, MAX_VALUE_CHARACTERS - HEAD_CHARACTERS)
        assert (head[0], tail[-1]) == ("<", ">")


def test_traceback_keeps_beginning_and_end_when_it_is_long(logged: list[Mapping[str, Any]]) -> None:
    """Where it began and what went wrong last are what it is read for."""
    told = logged[-1]["exception"]
    assert told.startswith("Traceback (most recent call last):")
    assert "the first cause" in told[:HEAD_CHARACTERS]
    assert told.endswith(f"RuntimeError: what went wrong last{SAFE}")
    assert told.count(MARK) == 1
    assert len(told) == MAX_VALUE_CHARACTERS + len(MARK)
    assert told.isprintable()


def test_program_goes_on_when_its_log_cannot_be_written() -> None:
    """What an event tells of is committed by then; whoever caused it must not be told otherwise."""
    run = subprocess.run(
        [sys.executable, "-c", UNREAD], cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    assert run.stdout == "went on\n"
