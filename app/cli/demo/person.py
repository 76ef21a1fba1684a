"""The operator of the story: decides, reads the escalation, and orders what its commands say. Must not be who asked."""

from dataclasses import dataclass

import httpx

from app.cli.demo import curl
from app.cli.demo.api import Api, accepted, ask
from app.cli.demo.failure import DemoFailed
from app.cli.demo.systems import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Someone on call, with an operator's key."""

    api: Api

    def question(self, session_id: str) -> JsonObject:
        """Find what a session asks among all that waits for a person."""
        return self._find("/v1/approvals", session_id, state="pending")

    def approve(self, question: JsonObject, reason: str) -> JsonObject:
        """Say yes to exactly what was read; nothing runs."""
        path = f"/v1/sessions/{question['session_id']}/effects/{question['step_index']}/approve"
        return self.api.post(path, {"reason": reason, "payload_sha256": question["payload_sha256"]})

    def announcement(self, session_id: str) -> JsonObject:
        """Find a session among those that wait for a person."""
        return self._find("/v1/escalations", session_id)

    def escalation(self, session_id: str) -> JsonObject:
        """Read what there is to know of a halted session, and what can be ordered."""
        return self.api.get(f"/v1/sessions/{session_id}/escalation")

    def order(self, move: JsonObject, reason: str, *, wait_seconds: int = 0) -> JsonObject:
        """Send the very command that a move shows; `wait_seconds` asks for the answer once the session is at rest."""
        command = self.command(move, reason)
        options = {"params": {"wait_s": wait_seconds}} if wait_seconds else {}
        answer = ask(self.api.http, command.method, command.url, headers=command.headers, content=command.body, **options)
        return accepted(command.method, command.url, answer)

    def command(self, move: JsonObject, reason: str) -> curl.Command:
        """Return the request that a move's command sends with this person's key."""
        return curl.read(move["curl"], {"COUNTERMAND_KEY": self.api.key, "REASON": reason})

    def do_by_hand(self, tools: httpx.Client, url: str, body: JsonObject, key: str) -> None:
        """Use a system's own API, past the service."""
        accepted("POST", url, ask(tools, "POST", url, json=body, headers={"Idempotency-Key": key}))

    def _find(self, path: str, session_id: str, **query: str) -> JsonObject:
        for item in self.api.items(path, **query):
            if item["session_id"] == session_id:
                return item
        raise DemoFailed(f"{path} does not list session {session_id}")


def move_about(escalation: JsonObject, name: str, step: int | None = None, **body: object) -> JsonObject:
    """Return the open move of that name, about the undo of a step if one is given, with exactly this body.

    Raises:
        DemoFailed: it is not open.
    """
    undo_ids = [entry["undo_id"] for entry in escalation["undo_stack"] if entry["step_index"] == step]
    for move in escalation["moves"]:
        is_about = step is None or any(f"/undo/{undo_id}/" in move["url"] for undo_id in undo_ids)
        if move["name"] == name and is_about and move["body"] == body:
            found: JsonObject = move
            return found
    raise DemoFailed(f"the escalation offers no {name}{'' if step is None else f' of step {step}'} {body or ''}")
