"""Read a curl command as a shell and curl would, so that what is shown is what is sent, with or without curl. Must not send anything."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from app.cli.demo.failure import DemoFailed

VARIABLE = re.compile(r"\$\{(\w+):\?[^}]*\}")  # the only expansion that an escalation's commands use


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The request that a command sends."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: str


def read(text: str, variables: Mapping[str, str]) -> Command:
    """Return the request of `curl -sS -X METHOD URL -H ... -d BODY`, with the variables filled in.

    Raises:
        DemoFailed: it is another command, or asks for another variable.
    """
    try:
        words = [VARIABLE.sub(lambda found: variables[found[1]], word) for word in shlex.split(text)]
    except (KeyError, ValueError) as error:
        raise DemoFailed(f"the command cannot be read ({error}): {text}") from error
    match words:
        case ["curl", "-sS", "-X", method, url, *options] if options[::2] == ["-H"] * (len(options) // 2 - 1) + ["-d"]:
            headers = dict(header.split(": ", 1) for header in options[1:-1:2])
            return Command(method=method, url=url, headers=headers, body=options[-1])
        case _:
            raise DemoFailed(f"the command is not of the form that was expected: {text}")


def broken_into_lines(text: str) -> list[str]:
    """Return the same command over several lines, to be pasted as they are."""
    first, *more = re.split(r" (?=-[Hd] )", text)
    lines = [first, *(f"  {each}" for each in more)]
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
