"""A toy system that issues credits and takes them back, with Python's standard library alone. Must not be taken for a real one: it forgets.

    python3 examples/toy_endpoint.py [--host 127.0.0.1] [--port 9009]

`POST /credits` {"order": 4921, "amount": 2500} issues a credit and answers its `credit_id`; `POST /undo/credits` {"credit_id": ...}
reverses it; `GET /credits` shows what is so and who asked for what how often. Both POSTs need an Idempotency-Key and do their work once
per key: a repeat gets the first answer, the same key with other bytes is refused. An undo may name the credit by the key it was issued
under ({"forward_key": ...}), for a call of which nobody knows whether it happened: undoing nothing is a success, and the credit itself is
refused should it come later.
"""

import argparse
import json
import signal
import socketserver
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CREDITS, UNDO, LIVE = "/credits", "/undo/credits", "/livez"
MAX_BODY_BYTES = 65_536

Answer = tuple[int, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One key's work: the bytes it came with first, and what was answered."""

    path: str
    body: bytes
    answer: Answer


@dataclass(slots=True)
class Ledger:
    """What was credited, what was reversed, and which keys have been seen."""

    credits: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    never: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def receive(self, path: str, key: str, body: bytes) -> Answer:
        """Do what is asked, once per key."""
        if not key:
            return 400, {"error": "send an Idempotency-Key: without one a repeat could not be told from a second call"}
        with self.lock:
            self.asked[key] = self.asked.get(key, 0) + 1
            before = self.calls.get(key)
            if before is not None:
                is_repeat = (before.path, before.body) == (path, body)
                return before.answer if is_repeat else (422, {"error": "this key came with another request before"})
            if key in self.never:
                return 409, {"error": "this call was undone before it came"}
            answer = self._act(path, key, body)
            if answer[0] < 300:
                self.calls[key] = Call(path=path, body=body, answer=answer)
            return answer

    def look(self) -> dict[str, Any]:
        """Return the credits and, per key, what it asked for and how often."""
        with self.lock:
            calls = [{"key": key, "path": call.path, "times": self.asked[key]} for key, call in self.calls.items()]
            return {"credits": list(self.credits.values()), "calls": calls}

    def _act(self, path: str, key: str, body: bytes) -> Answer:
        try:
            members = json.loads(body)
            return self._issue(key, members["order"], members["amount"]) if path == CREDITS else self._reverse(key, members)
        except (ValueError, KeyError, TypeError):
            return 422, {"error": "expected JSON: order and amount to issue a credit, credit_id or forward_key to reverse one"}

    def _issue(self, key: str, order: int, amount: int) -> Answer:
        credit_id = f"cr_{len(self.credits) + 1}"
        self.credits[credit_id] = {"credit_id": credit_id, "order": order, "amount": amount, "issued_by": key, "reversed_by": None}
        return 201, {"credit_id": credit_id}

    def _reverse(self, key: str, members: dict[str, Any]) -> Answer:
        """Reverse a credit that stands; one that never was needs nothing, and may not come any more."""
        if "credit_id" in members:
            credit = self.credits.get(members["credit_id"])
        else:
            forward_key = members["forward_key"]
            credit = next((each for each in self.credits.values() if each["issued_by"] == forward_key), None)
            if credit is None:
                self.never.add(forward_key)
        if credit is None:
            return 200, {"reversed": None}
        credit["reversed_by"] = credit["reversed_by"] or key
        return 200, {"reversed": credit["credit_id"]}


class Server(ThreadingHTTPServer):
    """Serves one ledger."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        """Listen on an address; port 0 is any free one."""
        self.ledger = Ledger()
        super().__init__((host, port), Exchange)

    def server_bind(self) -> None:
        """Bind without asking a resolver for this machine's name, which can take seconds."""
        socketserver.TCPServer.server_bind(self)


class Exchange(BaseHTTPRequestHandler):
    """One connection's requests and answers."""

    server: Server
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body leave together
    timeout = 60  # seconds an idle connection is kept

    def do_GET(self) -> None:
        """Show the ledger, or say that this process lives."""
        if self.path == LIVE:
            self._answer(200, {"status": "ok"})
        elif self.path == CREDITS:
            self._answer(200, self.server.ledger.look())
        else:
            self._answer(404, {"error": "there is no such thing here"})

    def do_POST(self) -> None:
        """Issue a credit, or reverse one."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            self._answer(413, {"error": f"say by Content-Length how long the body is, up to {MAX_BODY_BYTES} bytes"})
            return
        body = self.rfile.read(int(length))
        if self.path not in {CREDITS, UNDO}:
            self._answer(404, {"error": "there is no such thing here"})
            return
        key = self.headers.get("Idempotency-Key", "")
        status, members = self.server.ledger.receive(self.path, key, body)
        print(f"{self.path} {key!r} {body.decode('utf-8', 'backslashreplace')!r} -> {status}", flush=True)
        self._answer(status, members)

    def log_message(self, *_arguments: object) -> None:
        """Say nothing here: the POSTs print a line of their own."""

    def _answer(self, status: int, members: dict[str, Any]) -> None:
        body = json.dumps(members).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    """Serve until a signal comes."""
    words = argparse.ArgumentParser(description="A toy system that issues credits and takes them back.")
    words.add_argument("--host", default="127.0.0.1")
    words.add_argument("--port", type=int, default=9009)
    given = words.parse_args()
    # As process 1 of a container it gets no signal that it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Server(given.host, given.port) as server:
        print(f"toy endpoint on http://{given.host}:{server.server_address[1]}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
