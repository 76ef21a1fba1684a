"""How a command prints its result, and what it may refuse with. Must not print: the commands do."""

from enum import StrEnum


class Output(StrEnum):
    """How a result is printed."""

    TEXT = "text"
    JSON = "json"


class SetupError(Exception):
    """Something outside has to be set up differently; the text says what, in one line."""
