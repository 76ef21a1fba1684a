"""Write to the terminal, as things happen, and nothing that a terminal would obey. Must not decide what to tell."""

import os
import sys
import textwrap
from collections.abc import Sequence

import typer

from app.cli.demo.verdict import Check

WIDTH = 106  # of what is indented; a line of a terminal of 110 columns is never broken by the terminal
WHO_WIDTH = 10


def say(text: str) -> None:
    """Print one line now; what cannot be seen, or would move the cursor, is shown as an escape."""
    _print(_visible(text))


def say_heading(text: str) -> None:
    """Print an empty line and a heading."""
    say("")
    _print(_styled(_visible(text), is_bold=True))


def say_lines(lines: Sequence[str]) -> None:
    """Print a table's lines, indented."""
    for line in lines:
        say(f"  {line}")


def say_turn(who: str, text: str) -> None:
    """Print what somebody did or said."""
    say_lines(textwrap.wrap(text, WIDTH, initial_indent=who.ljust(WHO_WIDTH), subsequent_indent=" " * (WHO_WIDTH + 2)))


def say_checks(checks: Sequence[Check]) -> None:
    """Print each promise with what became of it."""
    for check in checks:
        word = _styled("FAILED", colour="red") if check.fault else _styled("ok", colour="green")
        _print(f"  {word}  {_visible(check.promise + (f': {check.fault}' if check.fault else ''))}")


def _print(text: str) -> None:
    typer.echo(text)
    sys.stdout.flush()


def _visible(text: str) -> str:
    return "".join(character if character.isprintable() else character.encode("unicode_escape").decode() for character in text)


def _styled(text: str, *, is_bold: bool = False, colour: str | None = None) -> str:
    """Colour only a terminal, and none whose owner asked for no colour (no-color.org)."""
    if os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return text
    return typer.style(text, bold=is_bold or None, fg=colour)
