"""Tell Countermand of every tool call, before and after it: all that an agent has to add. Must not know any tool."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import httpx

from examples.http_tool import NotApplied

PAUSES_SECONDS = (0.2, 1.0, 5.0)  # before a request is repeated whose answer was lost; a service that restarts is back by then
HOLD_SECONDS = 50  # the service holds an answer for up to 55 seconds; whoever makes the client gives it a longer timeout

JsonObject = dict[str, Any]
Run = Callable[[str, str], JsonObject]  # runs a tool, given the payload and the forward key


class Refused(Exception):
    """The call does not go ahead, because Countermand or a person says so; the text may be shown to the model."""


class Saga:
    """One run of an agent. The end of the block completes it; an exception has what was done undone, newest first.

    Every request has a key that is the same when it is repeated, and steps are counted. So a lost answer is asked for again, and an agent
    that was killed starts again with the same session: what it did is replayed, what it was doing goes on.
    """

    def __init__(self, http: httpx.Client, session_id: str) -> None:
        self._http, self._session_id, self._step = http, session_id, 0

    def __enter__(self) -> Self:
        self._ask("PUT", "", json={})
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self._post("complete", self._session_id, {})
        elif isinstance(error, Exception):  # Ctrl-C is no failure of the run: it can be started again
            # No key: a session fails once, whatever is said of it afterwards. The answer comes when it is undone, or halted.
            self._ask("POST", "/fail", json={"error": _said(error)}, params={"wait_s": HOLD_SECONDS})

    def call(self, tool: str, args: JsonObject, run: Run, **described: object) -> JsonObject:
        """Ask, run the tool, and say what became of it; return its result. `described`: what an unregistered tool is, and its undo."""
        self._step += 1
        key, step, payload = f"{self._session_id}-{self._step}", f"effects/{self._step}", json.dumps(args)
        told = self._post("intercept", key, {"tool": tool, "payload": payload, "step_index": self._step, **described})
        if told["decision"] == "replay":
            return dict(told["result"])  # an earlier process of this run did it
        if told["decision"] != "execute":
            self._await_person(step)
            told = self._post(f"{step}/resume", key, {"payload": payload})  # the bytes that were approved; any others are refused
        try:
            result = run(payload, told["forward_key"])
        except Exception as error:
            outcome = "not_applied" if isinstance(error, NotApplied) else "unknown"  # if in doubt, unknown: then it is undone
            self._post(f"{step}/fail", key, {"error": _said(error), "outcome": outcome})
            raise
        self._post(f"{step}/commit", key, {"result": result})
        return result

    def state(self) -> str:
        """Return the session's state."""
        return str(self._ask("GET", "")["state"])

    def _await_person(self, step: str) -> None:
        while (effect := self._ask("GET", f"/{step}", params={"wait_s": HOLD_SECONDS}))["state"] == "awaiting_approval":
            pass  # each round is one held request; when nobody decides in time, the question expires
        if effect["state"] not in {"approved", "executing"}:
            raise Refused(f"{effect['tool']} is {effect['state']}: {effect['approval']['reason']}")

    def _post(self, path: str, key: str, body: JsonObject) -> JsonObject:
        return self._ask("POST", f"/{path}", json=body, headers={"Idempotency-Key": key})

    def _ask(self, method: str, path: str, **options: Any) -> JsonObject:  # noqa: ANN401 (httpx's own options)
        url = f"/v1/sessions/{self._session_id}{path}"
        for pause in PAUSES_SECONDS:
            with suppress(httpx.TransportError):
                answer = self._http.request(method, url, **options)
                if not answer.is_server_error:
                    return _accepted(answer)
            time.sleep(pause)
        return _accepted(self._http.request(method, url, **options))


def _accepted(answer: httpx.Response) -> JsonObject:
    if not answer.is_success:
        raise Refused(answer.text)
    return dict(answer.json())


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:2000]
