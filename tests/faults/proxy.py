"""A TCP proxy before Postgres that knows where a COMMIT begins and where its answer ends. Must not change what it passes on.

It frames both directions (PostgreSQL documentation, "Message Formats"): after a first message without a type, each has a type byte and a
length. The service commits by a simple query, `Q` with the text COMMIT, answered by `C` (CommandComplete) or `E` (ErrorResponse) and `Z`
(ReadyForQuery); `PREPARE`d statements go by `P`, `B`, `E`, `S`, and are passed on as they come.
"""

import asyncio
import contextlib
import re
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

from app.engine.clock import SystemClock

CHUNK_BYTES = 65_536
HEAD_BYTES = 5  # of a framed message: its type, and its length, which counts itself
COMMIT_TEXTS = frozenset({b"COMMIT", b"COMMIT;"})
WRITES_OF_ORGS = re.compile(rb"READ COMMITTED;.*app\.org = '[^']")  # how a transaction begins in which a verb, or an attempt, is recorded
ANY = re.compile(b"")


class Cut(StrEnum):
    """Where a connection is cut. `before`: the server never hears COMMIT, and rolls back. `after`: it has committed, and nobody hears."""

    BEFORE = "before_commit"
    AFTER = "after_commit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap:
    """What will be done to one connection that says COMMIT; `first` is done before its client can know.

    `begun`: only to a transaction whose BEGIN matches this; every other COMMIT passes.
    """

    cut: Cut
    begun: re.Pattern[bytes]
    first: Callable[[], None]


@dataclass(slots=True, kw_only=True, eq=False)
class Conversation:
    """One connection; `trap` is the one that its COMMIT under way has run into, `begun` how its newest transaction began."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    begun: bytes = b""
    trap: Trap | None = None

    def reset(self) -> None:
        """Break both ends: the client reads an error, the server that its client has left."""
        self.client.transport.abort()
        self.server.transport.abort()


@dataclass(slots=True, kw_only=True)
class Proxy:
    """`url` is the database through the proxy. What was done to its connections is counted in `done`."""

    url: str
    server_socket: str
    delay_seconds: float = 0.0
    done: Counter[str] = field(default_factory=Counter)
    _traps: list[Trap] = field(default_factory=list)
    _conversations: set[Conversation] = field(default_factory=set)
    _orphans: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _flowing: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        """Let everything pass."""
        self._flowing.set()

    def arm(self, cut: Cut, count: int = 1, *, begun: re.Pattern[bytes] = ANY, first: Callable[[], None] = lambda: None) -> None:
        """Cut the next connections that say COMMIT, so many of them."""
        self._traps += [Trap(cut=cut, begun=begun, first=first)] * count

    def disarm(self) -> None:
        """Let every COMMIT through from now on, and the answers to those that are under way."""
        self._traps.clear()
        for conversation in self._conversations:
            conversation.trap = None

    def stall(self) -> None:
        """Pass nothing on in either direction, until `flow`."""
        self._flowing.clear()

    def flow(self) -> None:
        """Pass on again, what came meanwhile first."""
        self._flowing.set()

    def reset(self) -> None:
        """Break every connection at both ends."""
        self.done["reset"] += len(self._conversations)
        for conversation in self._conversations:
            conversation.reset()

    def leave(self) -> None:
        """Break every client's end alone: the server goes on with what it was told before, and its answers reach nobody."""
        for conversation in self._conversations:
            self._orphans.add(conversation.server)
            conversation.client.transport.abort()

    async def wait_for(self, what: str, count: int = 1) -> None:
        """Return once so many connections were `cut.value`; for as long as that takes."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.done[what] >= count)

    async def converse(self, client_reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        """Pass one connection on until either end leaves."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            server_reader, server = await asyncio.open_unix_connection(self.server_socket)
        except OSError:
            client.transport.abort()  # no server, as far as this client can tell
            self._tasks.discard(task)
            return
        conversation = Conversation(client=client, server=server)
        self._conversations.add(conversation)
        answers = asyncio.create_task(self._pass_answers(server_reader, conversation))
        try:
            await self._pass_requests(client_reader, conversation)
            if server in self._orphans:
                await answers
        except asyncio.CancelledError:
            return  # the proxy is closing
        finally:
            answers.cancel()
            self._tasks.discard(task)
            self._conversations.discard(conversation)
            self._orphans.discard(server)
            for end in (client, server):
                end.close()

    async def close(self) -> None:
        """End what still passes through."""
        self.flow()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pass_requests(self, reader: asyncio.StreamReader, conversation: Conversation) -> None:
        """Pass on what the client says, a message at a time where it matters."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self._send(conversation.server, await _read_first(reader))
            while True:
                message = await _read_message(reader)
                if message.startswith(b"Q") and b"BEGIN" in message[: HEAD_BYTES + len(b"BEGIN")]:
                    conversation.begun = message
                if self._traps and _is_commit(message) and self._traps[0].begun.search(conversation.begun):
                    conversation.trap = self._traps.pop(0)
                    if conversation.trap.cut is Cut.BEFORE:
                        await self._spring(conversation)
                        return
                await self._send(conversation.server, message)

    async def _pass_answers(self, reader: asyncio.StreamReader, conversation: Conversation) -> None:
        """Pass on what the server says, and that it has left; keep the answer to a COMMIT that is to be lost."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while conversation.trap is None and (answer := await reader.read(CHUNK_BYTES)):
                if conversation.trap is None:
                    await self._send(conversation.client, answer)
            # Nothing was under way when COMMIT was sent: what came is its answer, and the server has done what it says.
            await self._spring(conversation)
        conversation.reset()

    async def _spring(self, conversation: Conversation) -> None:
        trap, conversation.trap = conversation.trap, None
        if trap is not None:
            trap.first()
            conversation.reset()
            self.done[trap.cut.value] += 1
            async with self._changed:
                self._changed.notify_all()

    async def _send(self, writer: asyncio.StreamWriter, message: bytes) -> None:
        if self.delay_seconds:
            await SystemClock().sleep(self.delay_seconds)
        await self._flowing.wait()
        writer.write(message)
        await writer.drain()


@asynccontextmanager
async def open_proxy(database_url: str) -> AsyncIterator[Proxy]:
    """Listen on a loopback port for a Postgres that listens on a Unix socket."""
    parts = urlsplit(database_url)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    proxy = Proxy(url="", server_socket=str(Path(query["host"]) / f".s.PGSQL.{query['port']}"))
    async with await asyncio.start_server(proxy.converse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        proxy.url = urlunsplit(parts._replace(query=urlencode({"host": "127.0.0.1", "port": port, "sslmode": "disable"})))
        try:
            yield proxy
        finally:
            server.close()
            await proxy.close()


def _is_commit(message: bytes) -> bool:
    """Tell whether a message is the simple query COMMIT."""
    return message[:1] == b"Q" and message[HEAD_BYTES:-1].strip().upper() in COMMIT_TEXTS


async def _read_first(reader: asyncio.StreamReader) -> bytes:
    """Read the startup or cancel message, which has no type."""
    length = await reader.readexactly(4)
    return length + await reader.readexactly(struct.unpack("!i", length)[0] - 4)


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    """Read one message that has a type."""
    head = await reader.readexactly(HEAD_BYTES)
    return head + await reader.readexactly(struct.unpack("!xi", head)[0] - 4)
