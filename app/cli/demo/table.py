"""Turn the story into aligned plain text that fits a terminal. Must not print or judge."""

from collections.abc import Mapping, Sequence

from app.cli.demo.agent import Done
from app.cli.demo.listeners import WorldState
from app.cli.demo.systems import LedgerLine, LoggedCall
from app.domain.model import Reversibility

GAP = "  "
SHOWN_OF_KEY = 8  # the end of an id: its beginning is the time, alike for all
SHOWN_OF_DIGEST = 8


def short(key: str | None) -> str:
    """Return `undo-..1a2b3c4d` for a key, `-` for none."""
    if key is None:
        return "-"
    kind, _, rest = key.partition("-")
    return f"{kind}-..{rest[-SHOWN_OF_KEY:]}"


def align(headings: Sequence[str], rows: Sequence[Sequence[str]], *, to_the_right: frozenset[int] = frozenset()) -> list[str]:
    """Return one line for the headings and one per row; the columns named are aligned to the right."""
    lines = [headings, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    return [
        GAP.join(
            cell.rjust(width) if column in to_the_right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def done_lines(done: Sequence[Done], not_asked: str) -> list[str]:
    """Show what the agent did; `not_asked` is why the last tool was never asked for."""
    rows = [
        [str(each.step_index), each.tool, each.reversibility.value, each.story, short(each.forward_key), short(each.undo_key)]
        for each in done
    ]
    rows.append([str(len(done) + 1), "send_reply", Reversibility.IRREVERSIBLE.value, not_asked, "-", "-"])
    return align(["step", "tool", "class", "what it did", "forward key", "undo key"], rows, to_the_right=frozenset({0}))


def undone_lines(done: Sequence[Done], undone: Sequence[LoggedCall], failed_at: float) -> list[str]:
    """Show what the endpoints saw, in their order; times are milliseconds, counted from the failure of the run."""
    by_key = {each.undo_key: each for each in done}
    rows = [_undone_row(by_key.get(call.request.key), call, failed_at) for call in undone]
    headings = ["step", "endpoint", "undo", "key", "try", "sha256", "at ms", "took ms", "answer", "effect"]
    return align(headings, rows, to_the_right=frozenset({0, 4, 6, 7}))


def _undone_row(done: Done | None, call: LoggedCall, failed_at: float) -> list[str]:
    took = "-" if call.ended_at is None else f"{(call.ended_at - call.arrived_at) * 1000:.0f}"
    return [
        "?" if done is None else str(done.step_index),
        call.system,
        "unexpected" if done is None else done.undo_story,
        short(call.request.key),
        str(call.request.attempt),
        call.body_sha256[:SHOWN_OF_DIGEST],
        f"{(call.arrived_at - failed_at) * 1000:.0f}",
        took,
        "lost" if call.status is None else str(call.status),
        "undone" if call.is_applied else "none",
    ]


def world_lines(states: Mapping[str, WorldState]) -> list[str]:
    """Show the world at several moments, each under its heading, with the ledger's lines since the first of them."""
    first, *_, now = states.values()
    rows = [
        ["credits on order 4921", *(f"${state.credited:,}" for state in states.values()), _ledger(now.ledger[len(first.ledger) :])],
        ["status of ticket 9104", *(state.ticket_status for state in states.values()), ""],
        ["notes on order 4921", *(str(len(state.notes)) for state in states.values()), ""],
        ["mails to the customer", *(str(state.mails) for state in states.values()), ""],
    ]
    return align(["", *states, ""], rows)


def _ledger(lines: Sequence[LedgerLine]) -> str:
    return f"lines: {', '.join(f'{line.line_id} {line.amount:+,}' for line in lines)}"
