"""Put the outside systems on loopback, each on a port of its own, and look at what they keep. Must not act in the story."""

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self, cast

from app.cli.demo.systems import CallLog, Ledger, LedgerLine, Mail, Request, Shop, System, Tickets

LOOPBACK = "127.0.0.1"
STOP_POLL_SECONDS = 0.02  # how soon a listener notices that it is to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldState:
    """What a person would find in the systems; money in dollars."""

    ledger: tuple[LedgerLine, ...]
    ticket_status: str
    notes: tuple[str, ...]
    mails: int

    @property
    def credited(self) -> int:
        """What the ledger's lines come to."""
        return sum(line.amount for line in self.ledger)

    def is_as(self, other: "WorldState") -> bool:
        """Tell whether the customer is where `other` had them: the ledger by its sum, since a reversal is a line more, not one less."""
        mine = (self.credited, self.ticket_status, self.notes, self.mails)
        return mine == (other.credited, other.ticket_status, other.notes, other.mails)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The systems and the log of what they were asked."""

    log: CallLog
    shop: Shop
    ledger: Ledger
    tickets: Tickets
    mail: Mail

    @classmethod
    def create(cls, *, ledger: type[Ledger] = Ledger, tickets: type[Tickets] = Tickets, mail: type[Mail] = Mail) -> Self:
        """Make a world where nothing has happened yet; a test may bring systems that misbehave."""
        log = CallLog()
        return cls(log=log, shop=Shop(log), ledger=ledger(log), tickets=tickets(log), mail=mail(log))

    def look(self) -> WorldState:
        """Return what is so now."""
        return WorldState(
            ledger=tuple(self.ledger.lines),
            ticket_status=self.tickets.status,
            notes=tuple(self.shop.notes.values()),
            mails=len(self.mail.sent),
        )

    @contextmanager
    def listening(self) -> Iterator["Addresses"]:
        """Serve every system for the length of the block."""
        with ExitStack() as stack:
            shop, ledger, tickets, mail = (
                stack.enter_context(_listening(system)) for system in (self.shop, self.ledger, self.tickets, self.mail)
            )
            yield Addresses(shop=shop, ledger=ledger, tickets=tickets, mail=mail)


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where each system listens, `http://host:port`."""

    shop: str
    ledger: str
    tickets: str
    mail: str


class _Listener(ThreadingHTTPServer):
    """A server for one system; a thread per connection, none of which keeps the process alive."""

    def __init__(self, system: System) -> None:
        self.system = system
        super().__init__((LOOPBACK, 0), _Exchange)

    def server_bind(self) -> None:
        """Bind without asking the resolver for this machine's name, which can take seconds."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, _request: object, _client_address: object) -> None:
        """Say nothing: what breaks here is a connection to a service that was killed."""


class _Exchange(BaseHTTPRequestHandler):
    """One request and its answer."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body leave together: written apart, the second waits for the peer's acknowledgement
    timeout = 60  # seconds an idle connection is kept

    def do_GET(self) -> None:
        """Answer a read."""
        self._answer()

    def do_POST(self) -> None:
        """Answer a call."""
        self._answer()

    def log_message(self, *_arguments: object) -> None:
        """Keep the terminal for the story."""

    def _answer(self) -> None:
        request = Request(
            method=self.command,
            path=self.path,
            key=self.headers.get("Idempotency-Key", ""),
            attempt=int(self.headers.get("Countermand-Attempt", "0")),
            body=self.rfile.read(int(self.headers.get("Content-Length", "0"))),
        )
        answer = cast("_Listener", self.server).system.receive(request)
        if answer is None:
            self.close_connection = True
            return
        body = json.dumps(answer.members).encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def _listening(system: System) -> Iterator[str]:
    with _Listener(system) as listener:
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": STOP_POLL_SECONDS}, daemon=True)
        thread.start()
        try:
            yield f"http://{LOOPBACK}:{listener.server_address[1]}"
        finally:
            listener.shutdown()
            thread.join()
