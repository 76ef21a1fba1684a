"""The agent of the story: its tools, and how it asks Countermand before it uses one. Must not undo anything."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from app.cli.demo.failure import DemoFailed
from app.cli.demo.listeners import Addresses
from app.cli.demo.systems import (
    CREDITS_PATH,
    HEALTH_PATH,
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

CALL_SECONDS = 10.0  # everything is on this machine
UNWIND_SECONDS = 30  # three undos, a lease of one second that has to run out, and a slow machine
AMOUNT = 2_500  # dollars; the first seed's

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A step that was taken."""

    step_index: int
    tool: str
    reversibility: Reversibility
    story: str
    undo_story: str
    forward_key: str
    undo_id: str | None

    @property
    def undo_key(self) -> str | None:
        """The key its undo has to come under."""
        return None if self.undo_id is None else f"undo-{self.undo_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """The service's public API, seen with one key."""

    http: httpx.Client
    url: str
    key: str

    def get(self, path: str) -> JsonObject:
        """GET something that must be there."""
        return _members(self.http, "GET", self.url + path, headers=self._headers)

    def post(self, path: str, body: JsonObject, **query: int) -> JsonObject:
        """POST something that must be accepted."""
        return _members(self.http, "POST", self.url + path, json=body, params=query, headers=self._headers)

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}


def http_client() -> httpx.Client:
    """Return a client for everything on this machine; nothing is taken from the environment."""
    return httpx.Client(timeout=httpx.Timeout(CALL_SECONDS, read=UNWIND_SECONDS + CALL_SECONDS), trust_env=False)


def tool_calls(at: Addresses) -> list[ToolCall]:
    """Return the steps before the reply, the one that only reads first."""
    return [_get_order(at), _issue_credit(at), _set_ticket_status(at), _add_order_note(at)]


def _get_order(at: Addresses) -> ToolCall:
    return ToolCall(
        tool="get_order",
        reversibility=Reversibility.READ_ONLY,
        method="GET",
        url=at.shop + ORDER_PATH,
        args={"order": ORDER},
        compensation=None,
        tell=lambda order: f"read order {order['order']} of {order['customer']}",
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
        compensation={
            "url": at.tickets + STATUS_PATH,
            "description": "set the ticket's status back",
            "args": {"status": {"$ref": "result#/previous"}},
            "unknown": BY_FORWARD_KEY,
        },
        tell=lambda ticket: f"ticket {TICKET}: {ticket['previous']} -> {ticket['status']}",
    )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """Someone with a session, a key and tools."""

    api: Api
    tools: httpx.Client
    session_id: str

    def take(self, step_index: int, call: ToolCall) -> Done:
        """Ask, run the tool under the forward key with exactly the payload that came back, and say what it returned."""
        asked: JsonObject = {
            "tool": call.tool,
            "args": call.args,
            "step_index": step_index,
            "reversibility": call.reversibility.value,
        }
        if call.compensation is not None:
            asked["compensation"] = call.compensation
        told = self.api.post(f"/v1/sessions/{self.session_id}/intercept", asked)
        if told["decision"] != "execute":
            raise DemoFailed(f"intercept of {call.tool} was answered {told['decision']!r}, expected 'execute'")
        content = told["payload"].encode() if call.method == "POST" else b""
        headers = {"Idempotency-Key": told["forward_key"], "Content-Type": "application/json"}
        result = _members(self.tools, call.method, call.url, content=content, headers=headers)
        self.api.post(f"/v1/sessions/{self.session_id}/effects/{step_index}/commit", {"result": result})
        return Done(
            step_index=step_index,
            tool=call.tool,
            reversibility=call.reversibility,
            story=call.tell(result),
            undo_story="" if call.compensation is None else str(call.compensation["description"]),
            forward_key=told["forward_key"],
            undo_id=told["undo_id"],
        )

    def find_mail_down(self, mail_url: str) -> str:
        """Look whether the reply could be sent, before asking for what cannot be undone; return why it could not.

        Raises:
            DemoFailed: it could, and the story ends otherwise.
        """
        response = self.tools.get(mail_url + HEALTH_PATH)
        if response.is_success:
            raise DemoFailed("the mail service answers, and the story needs it to be down")
        return f"{response.json()['error']} ({response.status_code})"

    def fail(self, error: str, *, wait_seconds: int) -> JsonObject:
        """Say that the run failed, and return the session once it is at rest, or `wait_seconds` later; may be repeated."""
        return self.api.post(f"/v1/sessions/{self.session_id}/fail", {"error": error}, wait_s=wait_seconds)


def _members(client: httpx.Client, method: str, url: str, **options: Any) -> JsonObject:  # noqa: ANN401 (httpx's own options)
    """Send a request that must succeed and return the JSON object it is answered with."""
    try:
        response = client.request(method, url, **options)
    except httpx.HTTPError as error:
        raise DemoFailed(f"{method} {url} failed: {type(error).__name__}: {error}") from error
    if not response.is_success:
        raise DemoFailed(f"{method} {url} was answered {response.status_code}: {response.text[:500]}")
    members: JsonObject = response.json()
    return members
