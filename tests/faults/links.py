"""A Postgres socket in front of the real one whose clients can be cut off unheard by the server. Must not read what passes through."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

CHUNK_BYTES = 65_536


@dataclass(slots=True, kw_only=True)
class Link:
    """`url` is the database through the link. What the server was told before `cut` it goes on with; its answer reaches nobody."""

    url: str
    server_socket: str
    _clients: set[asyncio.StreamWriter] = field(default_factory=set)
    _cut_off: set[asyncio.StreamWriter] = field(default_factory=set)
    _conversations: set[asyncio.Task[None]] = field(default_factory=set)

    def cut(self) -> None:
        """Break every client's connection; the server's ends stay open, and new connections are passed on."""
        self._cut_off |= self._clients
        for client in self._clients:
            client.transport.abort()

    async def converse(self, client_reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        """Pass one connection on until either end closes it, or for good once its client was cut off."""
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        self._clients.add(client)
        server_reader, server = await asyncio.open_unix_connection(self.server_socket)
        answers = asyncio.create_task(_answer(server_reader, client))
        try:
            await _pass_on(client_reader, server)
            if client not in self._cut_off:
                server.close()
            await answers
        except asyncio.CancelledError:
            return  # the link is closing
        finally:
            answers.cancel()
            self._conversations.discard(task)
            self._clients.discard(client)
            for end in (client, server):
                end.close()

    async def close(self) -> None:
        """End what still passes through."""
        for conversation in self._conversations:
            conversation.cancel()
        await asyncio.gather(*self._conversations, return_exceptions=True)


@asynccontextmanager
async def open_link(database_url: str) -> AsyncIterator[Link]:
    """Listen beside a Postgres that listens on a Unix socket."""
    parts = urlsplit(database_url)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    name = f".s.PGSQL.{query['port']}"
    with TemporaryDirectory(prefix="link-") as directory:  # a socket's path may have no more than 107 bytes
        url = urlunsplit(parts._replace(query=urlencode(query | {"host": directory})))
        link = Link(url=url, server_socket=str(Path(query["host"]) / name))
        async with await asyncio.start_unix_server(link.converse, Path(directory) / name) as server:
            try:
                yield link
            finally:
                server.close()
                await link.close()


async def _answer(server_reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
    """Pass on what the server says, and that it has left."""
    await _pass_on(server_reader, client)
    client.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what comes until there is no more, or nobody takes it."""
    with suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
