"""What a stranger sends, before a key is read, is bounded in the service as it runs. Must not test where: see tests/cli/test_framing.py."""

import asyncio
from urllib.parse import urlsplit

import pytest

from tests.faults.conftest import StartProcess
from tests.faults.processes import END_SECONDS

PIECE = b"a" * 65_536
PIECES = 1_000  # 64 MB, far more than the buffers between here and there take in


async def test_connection_is_ended_when_a_head_does_not_end(processes: StartProcess) -> None:
    """It is closed while it is still being sent, and the others are served."""
    service = await processes()
    address = urlsplit(service.base_url)
    async with asyncio.timeout(END_SECONDS):
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        with pytest.raises(ConnectionError):
            await _send_head(writer)
        assert (await service.agent.http.get("/livez")).status_code == 200
    assert service.crashes == []


async def _send_head(writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /livez HTTP/1.1\r\nName: ")
    for _ in range(PIECES):
        writer.write(PIECE)
        await writer.drain()
