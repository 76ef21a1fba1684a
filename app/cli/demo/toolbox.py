"""The tools that the agent can use: where each is, what it is given, how it is undone. Must not call them."""

from collections.abc import Callable
from dataclasses import dataclass

from app.cli.demo.listeners import Addresses
from app.cli.demo.systems import (
    CREDITS_PATH,
    MAILS_PATH,
    NOTE_REMOVALS_PATH,
    NOTES_PATH,
    ORDER,
    ORDER_PATH,
    REVERSALS_PATH,
    STATUS_PATH,
    TICKET,
    JsonObject,
)
from app.domain.model import Reversibility

AMOUNT = 2_500  # dollars; the first seed's
CUSTOMER, STRANGER = "ada@example.com", "mallory@example.com"

BY_FORWARD_KEY: JsonObject = {"args": {"forward_key": {"$ref": "effect#/forward_key"}}}
"""How an effect is undone whose result never came back: the system looks for the key it was asked under."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One step that the agent takes: where the tool is, what it is given, how it is undone, and how to tell of its result."""

    tool: str
    reversibility: Reversibility
    method: str
    url: str
    args: JsonObject
    compensation: JsonObject | None
    tell: Callable[[JsonObject], str]


def undoable_calls(at: Addresses) -> list[ToolCall]:
    """Return the three steps that change something and can be undone."""
    return [_issue_credit(at), _set_ticket_status(at), _add_order_note(at)]


def get_order(at: Addresses) -> ToolCall:
    """Return the step that only reads."""
    return ToolCall(
        tool="get_order",
        reversibility=Reversibility.READ_ONLY,
        method="GET",
        url=at.shop + ORDER_PATH,
        args={"order": ORDER},
        compensation=None,
        tell=lambda order: f"read order {order['order']} of {order['customer']}",
    )


def send_reply(at: Addresses, to: str = CUSTOMER) -> ToolCall:
    """Return the step that cannot be undone."""
    return ToolCall(
        tool="send_reply",
        reversibility=Reversibility.IRREVERSIBLE,
        method="POST",
        url=at.mail + MAILS_PATH,
        args={"to": to, "text": f"${AMOUNT:,} have been credited to your order {ORDER}."},
        compensation=None,
        tell=lambda mail: f"{mail['mail_id']} sent to {mail['to']}",
    )


def close_ticket(at: Addresses) -> ToolCall:
    """Return the step after the reply."""
    return ToolCall(
        tool="close_ticket",
        reversibility=Reversibility.REVERSIBLE,
        method="POST",
        url=at.tickets + STATUS_PATH,
        args={"status": "closed"},
        compensation=_status_back(at),
        tell=_tell_status,
    )


def _issue_credit(at: Addresses) -> ToolCall:
    return ToolCall(
        tool="issue_credit",
        reversibility=Reversibility.COMPENSATABLE,
        method="POST",
        url=at.ledger + CREDITS_PATH,
        args={"order": ORDER, "amount": AMOUNT},
        compensation={
            "url": at.ledger + REVERSALS_PATH,
            "description": f"reverse the credit of ${AMOUNT:,}",
            "args": {"credit_id": {"$ref": "result#/credit_id"}},
            "unknown": BY_FORWARD_KEY,
        },
        tell=lambda credit: f"${AMOUNT:,} credited ({credit['credit_id']})",
    )


def _set_ticket_status(at: Addresses) -> ToolCall:
    return ToolCall(
        tool="set_ticket_status",
        reversibility=Reversibility.REVERSIBLE,
        method="POST",
        url=at.tickets + STATUS_PATH,
        args={"status": "refunded"},
        compensation=_status_back(at),
        tell=_tell_status,
    )


def _status_back(at: Addresses) -> JsonObject:
    return {
        "url": at.tickets + STATUS_PATH,
        "description": "set the ticket's status back",
        "args": {"status": {"$ref": "result#/previous"}},
        "unknown": BY_FORWARD_KEY,
    }


def _tell_status(ticket: JsonObject) -> str:
    return f"ticket {TICKET}: {ticket['previous']} -> {ticket['status']}"


def _add_order_note(at: Addresses) -> ToolCall:
    return ToolCall(
        tool="add_order_note",
        reversibility=Reversibility.REVERSIBLE,
        method="POST",
        url=at.shop + NOTES_PATH,
        args={"text": f"refunded ${AMOUNT:,}, customer informed"},
        compensation={
            "url": at.shop + NOTE_REMOVALS_PATH,
            "description": "remove the note",
            "args": {"note_id": {"$ref": "result#/note_id"}},
            "unknown": BY_FORWARD_KEY,
        },
        tell=lambda note: f"{note['note_id']}: customer informed",
    )
