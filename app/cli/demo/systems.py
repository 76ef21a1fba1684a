"""The four outside systems of the story: what each keeps, which keys it knows, what it was asked. Must not know HTTP or one another."""

import hashlib
import itertools
import json
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

JsonObject: TypeAlias = dict[str, Any]

ORDER, TICKET = 4921, 9104  # the first seed's
ORDER_PATH = f"/orders/{ORDER}"
NOTES_PATH = f"{ORDER_PATH}/notes"
NOTE_REMOVALS_PATH = "/note-removals"
CREDITS_PATH = "/credits"
REVERSALS_PATH = "/reversals"
STATUS_PATH = f"/tickets/{TICKET}/status"
HEALTH_PATH = "/health"
MAILS_PATH = "/mails"
UNDO_PREFIX = "undo-"
HOLD_SECONDS = 60.0  # longer than everything the story waits for while an answer is held


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What came in. `key` is the Idempotency-Key, `attempt` the Countermand-Attempt; empty and 0 where there is none."""

    method: str
    path: str
    key: str
    attempt: int
    body: bytes

    @property
    def is_undo(self) -> bool:
        """Tell whether this undoes something."""
        return self.key.startswith(UNDO_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What goes back."""

    status: int
    members: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCall:
    """One line of an endpoint's log.

    `number` counts over all systems; times are seconds of `time.monotonic`. `status` None: no answer was given. `is_applied` False: the
    system changed nothing, e.g. because it knew the key.
    """

    number: int
    system: str
    request: Request
    arrived_at: float
    ended_at: float | None = None
    status: int | None = None
    is_applied: bool = False

    @property
    def body_sha256(self) -> str:
        """The fingerprint of the bytes that came."""
        return hashlib.sha256(self.request.body).hexdigest()


NO_SUCH_THING = Answer(status=404, members={"error": "there is no such thing here"})
MAIL_IS_DOWN = Answer(status=503, members={"error": "the mail service is down"})


class CallLog:
    """What all the systems were asked, in the order of arrival; safe for their threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[int, LoggedCall] = {}

    def begin(self, system: str, request: Request) -> int:
        """Note an arrival and return its number."""
        with self._lock:
            number = next(self._numbers)
            self._calls[number] = LoggedCall(number=number, system=system, request=request, arrived_at=time.monotonic())
            return number

    def applied(self, number: int) -> None:
        """Note that the call changed something."""
        with self._lock:
            self._calls[number] = replace(self._calls[number], is_applied=True)

    def end(self, number: int, status: int | None) -> None:
        """Note the answer, before it leaves; None where none is given."""
        with self._lock:
            self._calls[number] = replace(self._calls[number], status=status, ended_at=time.monotonic())

    def calls(self, *, after: int = 0) -> list[LoggedCall]:
        """Return the calls with a number above `after`, oldest first."""
        with self._lock:
            return [call for number, call in sorted(self._calls.items()) if number > after]

    def undos(self, *, after: int = 0) -> list[LoggedCall]:
        """Return the undo calls with a number above `after`, oldest first."""
        return [call for call in self.calls(after=after) if call.request.is_undo]

    def newest(self) -> int:
        """Return the number of the newest call, 0 where there is none: what comes from now on has greater ones."""
        return max((call.number for call in self.calls()), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A way to keep an undo's answer back: `arrived` is set once it has done its work, no answer leaves; `released` ends the wait."""

    arrived: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


class System(ABC):
    """One outside system: applies each key once, and a key that was undone before it came never.

    `refusal`: what it answers to everything new, while there is one.
    """

    name: ClassVar[str]

    def __init__(self, log: CallLog) -> None:
        self.hold: Hold | None = None
        self.refusal: Answer | None = None
        self._log = log
        self._lock = threading.Lock()
        self._known: dict[str, tuple[bytes, Answer]] = {}
        self._undone_unseen: set[str] = set()

    def receive(self, request: Request) -> Answer | None:
        """Do what is asked, once per key, and log it; None: do not answer (the answer was held until nobody wanted it any more)."""
        number = self._log.begin(self.name, request)
        with self._lock:
            answer = self._answer(number, request)
        if request.is_undo and self.hold is not None and not self.hold.released.is_set():
            self.hold.arrived.set()
            self.hold.released.wait(HOLD_SECONDS)
            self._log.end(number, None)
            return None
        self._log.end(number, answer.status)
        return answer

    @abstractmethod
    def act(self, request: Request, members: JsonObject) -> Answer:
        """Do what is asked for the first time; called under the system's lock."""

    def result_of(self, forward_key: str) -> JsonObject | None:
        """Return what a forward call was answered; one that has not come is remembered, and refused should it come late."""
        if forward_key in self._known:
            return self._known[forward_key][1].members
        self._undone_unseen.add(forward_key)
        return None

    def _answer(self, number: int, request: Request) -> Answer:
        if request.key in self._known:
            body, answer = self._known[request.key]
            return answer if body == request.body else Answer(status=422, members={"error": "this key came with another body before"})
        if request.key in self._undone_unseen:
            return Answer(status=409, members={"error": "this call was undone before it came"})
        if self.refusal is not None:
            return self.refusal
        answer = self.act(request, json.loads(request.body) if request.body else {})
        if request.key and answer.status < 300:
            self._known[request.key] = (request.body, answer)
            self._log.applied(number)
        return answer


class Shop(System):
    """Keeps orders and the notes on them."""

    name = "shop"

    def __init__(self, log: CallLog) -> None:
        super().__init__(log)
        self.notes: dict[str, str] = {}
        self._added = itertools.count(1)

    def act(self, request: Request, members: JsonObject) -> Answer:
        """Read the order, add a note, or remove one."""
        if request.path == ORDER_PATH:
            return Answer(status=200, members={"order": ORDER, "customer": "Ada Marsh", "total": 12_400, "ticket": TICKET})
        if request.path == NOTES_PATH:
            note_id = f"note_{next(self._added)}"
            self.notes[note_id] = members["text"]
            return Answer(status=201, members={"note_id": note_id})
        if request.path == NOTE_REMOVALS_PATH:
            return self._remove(members)
        return NO_SUCH_THING

    def _remove(self, members: JsonObject) -> Answer:
        """Remove a note named by its id, or by the key it was added under."""
        if "forward_key" in members:
            members = self.result_of(members["forward_key"]) or {"note_id": None}
        self.notes.pop(members["note_id"], None)
        return Answer(status=200, members={"removed": members["note_id"]})


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """One line of the ledger, never changed: a credit in dollars, or the reversal of one, with the sign turned."""

    line_id: str
    amount: int
    reverses: str | None = None


class Ledger(System):
    """Keeps what was credited to the order; append-only, so that a reversal is a line of its own."""

    name = "ledger"

    def __init__(self, log: CallLog) -> None:
        super().__init__(log)
        self.lines: list[LedgerLine] = []

    def act(self, request: Request, members: JsonObject) -> Answer:
        """Issue a credit, or reverse one."""
        if request.path == CREDITS_PATH:
            line = LedgerLine(line_id=f"cr_{TICKET}_{len(self.lines) + 1}", amount=members["amount"])
            self.lines.append(line)
            return Answer(status=201, members={"credit_id": line.line_id})
        if request.path == REVERSALS_PATH:
            return self.reverse(members)
        return NO_SUCH_THING

    def reverse(self, members: JsonObject) -> Answer:
        """Append the reversal of a credit named by its id, or by the key it was issued under."""
        if "forward_key" in members:
            members = self.result_of(members["forward_key"]) or {"credit_id": None}
        credit_id = members["credit_id"]
        credit = next((line for line in self.lines if line.line_id == credit_id), None)
        if credit is not None and all(line.reverses != credit_id for line in self.lines):
            self.lines.append(LedgerLine(line_id=f"rv_{TICKET}_{len(self.lines) + 1}", amount=-credit.amount, reverses=credit_id))
        return Answer(status=200, members={"reversed": credit_id})


class Tickets(System):
    """Keeps the status of one ticket."""

    name = "tickets"

    def __init__(self, log: CallLog) -> None:
        super().__init__(log)
        self.status = "open"

    def act(self, request: Request, members: JsonObject) -> Answer:
        """Set the status, or set back what a forward key changed; the answer holds the one before."""
        if request.path != STATUS_PATH:
            return NO_SUCH_THING
        previous, status = self.status, members.get("status")
        if "forward_key" in members:
            changed = self.result_of(members["forward_key"])
            status = previous if changed is None else changed["previous"]
        self.status = str(status)
        return Answer(status=200, members={"ticket": TICKET, "status": self.status, "previous": previous})


class Mail(System):
    """Sends the reply to the customer, once it is up; when the story begins it is down."""

    name = "mail"

    def __init__(self, log: CallLog) -> None:
        super().__init__(log)
        self.refusal = MAIL_IS_DOWN
        self.sent: list[str] = []

    def act(self, request: Request, members: JsonObject) -> Answer:
        """Say that it is up, or send a mail; there is no way to take one back."""
        if request.path == HEALTH_PATH:
            return Answer(status=200, members={"status": "up"})
        if request.path != MAILS_PATH:
            return NO_SUCH_THING
        self.sent.append(str(members["to"]))
        return Answer(status=201, members={"mail_id": f"mail_{len(self.sent)}", "to": members["to"]})
