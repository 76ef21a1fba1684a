"""The agent of the story: how it asks Countermand before it uses a tool, and what it says afterwards. Must not undo or decide anything."""

from dataclasses import dataclass

import httpx

from app.cli.demo.api import Answered, Api, accepted, ask
from app.cli.demo.failure import DemoFailed
from app.cli.demo.systems import HEALTH_PATH, JsonObject
from app.cli.demo.toolbox import ToolCall
from app.domain.model import Reversibility


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
class Agent:
    """Someone with a session, a key and tools."""

    api: Api
    tools: httpx.Client
    session_id: str

    def take(self, step_index: int, call: ToolCall) -> Done:
        """Ask, run the tool, and say what it returned."""
        told = self.intercept(step_index, call)
        if told["decision"] != "execute":
            raise DemoFailed(f"intercept of {call.tool} was answered {told['decision']!r}, expected 'execute'")
        return self.finish(step_index, call, told)

    def intercept(self, step_index: int, call: ToolCall) -> JsonObject:
        """Ask before doing."""
        asked: JsonObject = {
            "tool": call.tool,
            "args": call.args,
            "step_index": step_index,
            "reversibility": call.reversibility.value,
        }
        if call.compensation is not None:
            asked["compensation"] = call.compensation
        return self.api.post(f"/v1/sessions/{self.session_id}/intercept", asked)

    def resume(self, step_index: int, payload: str) -> Answered:
        """Present the bytes of a call that was approved."""
        return self.api.try_post(f"{self._step(step_index)}/resume", {"payload": payload})

    def finish(self, step_index: int, call: ToolCall, told: JsonObject) -> Done:
        """Run a tool that may go ahead, and say what it returned."""
        result = accepted(call.method, call.url, self.run(call, told))
        self.api.post(f"{self._step(step_index)}/commit", {"result": result})
        return Done(
            step_index=step_index,
            tool=call.tool,
            reversibility=call.reversibility,
            story=call.tell(result),
            undo_story="" if call.compensation is None else str(call.compensation["description"]),
            forward_key=told["forward_key"],
            undo_id=told["undo_id"],
        )

    def run(self, call: ToolCall, told: JsonObject) -> Answered:
        """Run the tool under the forward key with exactly the payload that came back."""
        content = told["payload"].encode() if call.method == "POST" else b""
        headers = {"Idempotency-Key": told["forward_key"], "Content-Type": "application/json"}
        return ask(self.tools, call.method, call.url, content=content, headers=headers)

    def find_mail_down(self, mail_url: str) -> str:
        """Look whether the reply could be sent, before asking for what cannot be undone; return why it could not.

        Raises:
            DemoFailed: it could, and the story ends otherwise.
        """
        health = ask(self.tools, "GET", mail_url + HEALTH_PATH)
        if httpx.codes.is_success(health.status):
            raise DemoFailed("the mail service answers, and the story needs it to be down")
        return f"{health.members['error']} ({health.status})"

    def fail(self, error: str, *, wait_seconds: int, refused_step: int | None = None) -> JsonObject:
        """Say that the run failed, and return the session once it is at rest, or `wait_seconds` later; may be repeated.

        `refused_step`: the call at which it failed; it certainly did nothing.
        """
        body: JsonObject = {"error": error}
        if refused_step is not None:
            body["effect"] = {"step_index": refused_step, "outcome": "not_applied", "error": error}
        return self.api.post(f"/v1/sessions/{self.session_id}/fail", body, wait_s=wait_seconds)

    def _step(self, step_index: int) -> str:
        return f"/v1/sessions/{self.session_id}/effects/{step_index}"
