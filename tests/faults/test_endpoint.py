"""The endpoint's log tells what it did to whom, also where a client lost patience. Must not test the service."""

import asyncio
from pathlib import Path

import httpx

from tests.fakes import DEFAULT_WAIT_SECONDS
from tests.faults.endpoint import EndpointProcess


async def post(endpoint: EndpointProcess, path: str, key: str, seconds: float = DEFAULT_WAIT_SECONDS) -> int | str:
    """Send a request under a key; return the status, or what went wrong."""
    async with httpx.AsyncClient(trust_env=False, timeout=seconds) as http:
        try:
            return (await http.post(endpoint.url(path), headers={"Idempotency-Key": key})).status_code
        except httpx.TransportError as error:
            return type(error).__name__


async def test_log_says_who_left_and_what_was_done_when_an_endpoint_is_busy(tmp_path: Path) -> None:
    """The first client gives up, the second is told 409 while the work goes on, the third finds it done: one application."""
    busy = [{"delay_seconds": 4.0, "busy_status": 409}, {}]
    async with EndpointProcess(tmp_path / "log.jsonl", {"/busy": busy}) as endpoint:
        impatient = asyncio.create_task(post(endpoint, "/busy", "k", 0.5))
        assert await impatient == "ReadTimeout"
        assert await post(endpoint, "/busy", "k") == 409
        while (answered := await post(endpoint, "/busy", "k")) == 409:
            pass  # every question is a round trip
        assert answered == 200
        first, *refused, last = endpoint.received()
    assert first.left_at is not None
    assert first.ended_at is not None
    assert first.left_at < first.ended_at
    assert {(one.status, one.left_at, one.is_applied) for one in refused} == {(409, None, False)}
    assert (first.is_applied, last.is_applied) == (True, False)


async def test_script_is_replaced_when_the_endpoint_runs(tmp_path: Path) -> None:
    """What is played can be said path by path and run by run; an endpoint that forgets keys does it again; a log is read from anywhere."""
    async with EndpointProcess(tmp_path / "log.jsonl") as endpoint:
        assert await post(endpoint, "/a", "k") == 200
        offset = endpoint.log_path.stat().st_size
        await endpoint.play({"/a": [{"status": 503}, {"forgets_key": True}], "/b": [{"mode": "reset_after_reply"}]})
        assert [await post(endpoint, "/a", "k") for _ in range(2)] == [503, 200]
        assert await post(endpoint, "/b", "b") in {200, "ReadError", "RemoteProtocolError"}
        seen = endpoint.received(offset)
        assert [(one.number, one.path, one.status, one.is_applied) for one in seen] == [
            (2, "/a", 503, False),
            (3, "/a", 200, True),
            (4, "/b", 200, True),
        ]
        assert len(endpoint.received()) == 4
