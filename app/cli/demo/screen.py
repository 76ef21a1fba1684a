"""Write to the terminal, as things happen. Must not decide what to tell."""

import os
import sys
from collections.abc import Sequence

import typer

from app.cli.demo.verdict import Check


def say(text: str) -> None:
    """Print one line now."""
    typer.echo(text)
    sys.stdout.flush()


def say_heading(text: str) -> None:
    """Print an empty line and a heading."""
    say("\n" + _styled(text, is_bold=True))


def say_lines(lines: Sequence[str]) -> None:
    """Print a table's lines, indented."""
    for line in lines:
        say(f"  {line}")


def say_checks(checks: Sequence[Check]) -> None:
    """Print each promise with what became of it."""
    for check in checks:
        word = _styled("FAILED", colour="red") if check.fault else _styled("ok", colour="green")
        say(f"  {word}  {check.promise}" + (f": {check.fault}" if check.fault else ""))


def _styled(text: str, *, is_bold: bool = False, colour: str | None = None) -> str:
    """Colour only a terminal, and none whose owner asked for no colour (no-color.org)."""
    if os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return text
    return typer.style(text, bold=is_bold or None, fg=colour)
