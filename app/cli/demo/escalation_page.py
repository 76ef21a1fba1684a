"""Turn an escalation into plain text that fits a terminal, as the person who is called would read it. Must not print or judge."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from app.cli.demo.curl import broken_into_lines
from app.cli.demo.screen import WIDTH
from app.cli.demo.systems import JsonObject

LABEL_WIDTH = 18
MOVE_WIDTH = 9
COMMAND = "curl"  # how each move's command begins


def page(escalation: JsonObject, *, whole: JsonObject) -> list[str]:
    """Return the escalation's lines; of the open moves, `whole` is shown with its whole command, the others by title and length."""
    return [
        *_labelled("why", [escalation["explanation"]]),
        *_labelled("advice", [escalation["advice"]]),
        *_labelled("undone", [_judged(each) for each in escalation["undone"]]),
        *_labelled("not undone", [_judged(each) for each in escalation["not_undone"]]),
        *_labelled("cannot be undone", [_judged(each) for each in escalation["cannot_be_undone"]]),
        *_labelled("who did what", [_happened(each) for each in escalation["decisions"]]),
        *_labelled("open moves", ["each takes COUNTERMAND_KEY and REASON from the environment"]),
        *(line for move in escalation["moves"] for line in _move(move, is_whole=move == whole)),
    ]


def _labelled(label: str, texts: Sequence[str]) -> Iterator[str]:
    for number, text in enumerate(texts or ["nothing"]):
        head = (label if number == 0 else "").ljust(LABEL_WIDTH)
        yield from textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * (LABEL_WIDTH + 2))


def _judged(step: JsonObject) -> str:
    what = f" ({step['description']})" if step["description"] else ""
    return f"step {step['step_index']} {step['tool']}{what}: {step['sentence']}"


def _happened(entry: JsonObject) -> str:
    step = "" if entry["step"] is None else f" step {entry['step']}"
    details: dict[str, Any] = entry["details"]
    why = details.get("reason") or details.get("error")
    return f"{entry['kind']}{step} by {entry['actor']}" + (f": {why}" if why else "")


def _move(move: JsonObject, *, is_whole: bool) -> Iterator[str]:
    indent = " " * (2 + MOVE_WIDTH)
    head = f"  {move['name'].ljust(MOVE_WIDTH)}"
    if not is_whole:
        yield f"{head}{move['title']}: {COMMAND} ... ({len(move['curl'])} characters)"
        return
    yield f"{head}{move['title']}"
    for text in (move["consequence"], move["warning"]):
        if text:
            yield from textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
    yield from (indent + line for line in broken_into_lines(move["curl"]))
