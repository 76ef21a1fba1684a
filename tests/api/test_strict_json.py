"""What a body, a path and a query may look like. Must not test any verb of the service: the app here only tells what it received."""

import asyncio
from collections.abc import AsyncIterator, Iterator, MutableMapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple

import httpx
import pytest
import structlog
from fastapi import Depends, FastAPI, Header, Query, Response
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, Field

from app.api.errors import install
from app.api.strict_json import (
    MAX_BODY_BYTES,
    MAX_MEMBERS,
    MAX_PAYLOAD_BYTES,
    LosslessJson,
    LosslessObject,
    Payload,
    PlainInteger,
    RawText,
    Received,
    SessionIdPath,
    StepPath,
    StrictModel,
    body,
    fingerprint,
    only_query,
    within,
)
from app.domain.errors import TooLarge, Unauthenticated
from app.domain.json_text import Json, NumberLiteral, dump, parse


class Color(StrEnum):
    """A closed set of words."""

    RED = "red"
    BLUE = "blue"


class Part(StrictModel):
    """An object inside an object."""

    url: Annotated[str, Field(min_length=1, max_length=100)]
    args: LosslessJson = None
    inner: "Part | None" = None


def _even(value: int) -> int:
    if value % 2:
        raise ValueError("expected an even number")
    return value


class Order(StrictModel):
    """One field of every kind that bodies use."""

    tool: Annotated[str, Field(pattern=r"^[^ ]*$")]
    payload: Payload | None = None
    args: LosslessJson = None
    note: RawText | None = None
    step: Annotated[int, Field(ge=1)] | None = None
    even: Annotated[int, AfterValidator(_even)] = 0
    is_urgent: bool = False
    color: Color | None = None
    then: Literal["unwind", "continue"] = "unwind"
    warm: Literal[Color.RED] | None = None
    at: datetime | None = None
    multiplier: float = 2.0
    codes: frozenset[Annotated[int, Field(ge=100, le=599)]] = frozenset()
    colors: tuple[Color, ...] = ()
    part: Part | None = None
    parts: list[Part] = Field(default_factory=list)
    metadata: LosslessObject | None = None
    either: Annotated[int, Field(ge=1)] | Part | None = None


class Note(StrictModel):
    """A body of which nothing is required."""

    reason: str | None = None


async def _authenticate(authorization: Annotated[str | None, Header()] = None) -> None:
    if authorization != "Bearer let-me-in":
        raise Unauthenticated("unauthenticated", "expected a key")


@pytest.fixture
def seen() -> list[Any]:
    """Return what the endpoints were given, in order."""
    return []


@pytest.fixture
def app(seen: list[Any]) -> FastAPI:
    """Return an app whose endpoints only note what reached them."""
    app = FastAPI()
    install(app)

    @app.post("/orders")
    async def order(received: Annotated[Received[Order], Depends(body(Order))]) -> Response:
        seen.append(received)
        return Response(status_code=204)

    @app.post("/notes", dependencies=[Depends(_authenticate)])
    async def note(received: Annotated[Received[Note], Depends(body(Note, deadline_seconds=0.05))]) -> Response:
        seen.append(received)
        return Response(status_code=204)

    @app.get("/sessions/{session_id}/effects/{step}", dependencies=[Depends(only_query("wait_s"))])
    async def effect(session_id: SessionIdPath, step: StepPath, wait_s: Annotated[int, Query(ge=0, le=55), PlainInteger] = 0) -> Response:
        seen.append((session_id, step, wait_s))
        return Response(status_code=204)

    return app


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of the app in this process; a crash would come out of it as an exception."""
    headers = {"authorization": "Bearer let-me-in"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://countermand.test", headers=headers) as client:
        yield client


async def _post(client: httpx.AsyncClient, content: bytes | AsyncIterator[bytes], path: str = "/orders", **headers: str) -> httpx.Response:
    named = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return await client.post(path, content=content, headers={name: value for name, value in named.items() if value})


class Bad(NamedTuple):
    """One body, and the problem it must come to."""

    text: bytes
    status: int
    code: str
    pointer: str


def _malformed(text: bytes, pointer: str = "") -> Bad:
    return Bad(text, 400, "malformed_json", pointer)


def _invalid(members: bytes, pointer: str) -> Bad:
    return Bad(b'{"tool":"t",' + members + b"}", 422, "invalid_request", pointer)


BAD_BODIES = [
    # No JSON at all.
    _malformed(b""),
    _malformed(b" "),
    _malformed(b"\x00"),
    _malformed(b"tool=t&step=1"),
    _malformed(b"<tool/>"),
    _malformed(b"undefined"),
    # Almost JSON.
    _malformed(b'{"tool":"t"'),
    _malformed(b'{"tool":"t"}}'),
    _malformed(b'{"tool":"t"} {}'),
    _malformed(b'{"tool":"t",}'),
    _malformed(b"{'tool':'t'}"),
    _malformed(b'{tool:"t"}'),
    _malformed(b'{"tool":"t" /* c */}'),
    _malformed(b'{"tool":"t"\x00}'),
    _malformed(b'{"tool":"line\nbreak"}'),
    _malformed(b'{"tool":"\\x41"}'),
    _malformed(b'{"tool":"\\u00"}'),
    _malformed(b'{"tool":"t","step":01}'),
    _malformed(b'{"tool":"t","step":+1}'),
    _malformed(b'{"tool":"t","step":1.}'),
    _malformed(b'{"tool":"t","step":.5}'),
    _malformed(b'{"tool":"t","step":0x1}'),
    _malformed(b'{"tool":"t","is_urgent":True}'),
    # Bytes that are no text, or one too clever.
    _malformed(b'\xef\xbb\xbf{"tool":"t"}'),
    _malformed('{"tool":"t"}'.encode("utf-16")),
    _malformed(b'{"tool":"\xff"}'),
    _malformed(b'{"tool":"\xc0\x80"}'),
    _malformed(b'{"tool":"\xed\xa0\x80"}'),
    # Two meanings, or none.
    _malformed(b'{"tool":"t","tool":"u"}', "/tool"),
    _malformed(b'{"tool":"t","args":{"a":1,"a":1}}', "/args/a"),
    _malformed(b'{"tool":"t","args":[0,{"a/b":1,"a/b":2}]}', "/args/1/a~1b"),
    _malformed(b'{"tool":"t","args":NaN}', "/args"),
    _malformed(b'{"tool":"t","multiplier":Infinity}', "/multiplier"),
    _malformed(b'{"tool":"t","args":[-Infinity]}', "/args/0"),
    _malformed(b'{"tool":"\\ud800"}', "/tool"),
    _malformed(b'{"tool":"t","args":["\\udc00\\ud800"]}', "/args/0"),
    _malformed(b'{"tool":"t","args":' + b"[" * 64 + b"]" * 64 + b"}"),
    _malformed(b"[" * 1_000_000),
    _malformed(b"[" * 500_000 + b"]" * 500_000),
    _malformed(b'{"a":' * 150_000),
    # The wrong thing.
    Bad(b"null", 422, "invalid_request", ""),
    Bad(b"[]", 422, "invalid_request", ""),
    Bad(b'"tool"', 422, "invalid_request", ""),
    Bad(b"1", 422, "invalid_request", ""),
    Bad(b"1.5", 422, "invalid_request", ""),
    Bad(b"{}", 422, "invalid_request", "/tool"),
    Bad(b'{"Tool":"t"}', 422, "invalid_request", "/tool"),
    Bad(b'{"tool":null}', 422, "invalid_request", "/tool"),
    Bad(b'{"tool":1}', 422, "invalid_request", "/tool"),
    Bad(b'{"tool":1.5}', 422, "invalid_request", "/tool"),
    Bad(b'{"tool":["t"]}', 422, "invalid_request", "/tool"),
    Bad(b'{"tool":"two words"}', 422, "invalid_request", "/tool"),
    # Members nobody knows.
    _invalid(b'"undo_id":"x"', "/undo_id"),
    _invalid(b'"":0', "/"),
    _invalid(b'"a/b~c":0', "/a~1b~0c"),
    _invalid(b'"part":{"url":"u","x":0}', "/part/x"),
    _invalid(b'"parts":[{"url":"u"},{"url":"u","inner":{"url":"u","x":0}}]', "/parts/1/inner/x"),
    # Numbers and words in another dress.
    _invalid(b'"step":"1"', "/step"),
    _invalid(b'"step":1.0', "/step"),
    _invalid(b'"step":1e0', "/step"),
    _invalid(b'"step":-0', "/step"),
    _invalid(b'"step":true', "/step"),
    _invalid(b'"step":0', "/step"),
    _invalid(b'"step":' + b"9" * 19, "/step"),
    _invalid(b'"step":' + b"9" * 5000, "/step"),
    _invalid(b'"even":3', "/even"),
    _invalid(b'"is_urgent":1', "/is_urgent"),
    _invalid(b'"is_urgent":"true"', "/is_urgent"),
    _invalid(b'"is_urgent":null', "/is_urgent"),
    _invalid(b'"color":"RED"', "/color"),
    _invalid(b'"color":0', "/color"),
    _invalid(b'"color":["red"]', "/color"),
    _invalid(b'"then":"Unwind"', "/then"),
    _invalid(b'"warm":"blue"', "/warm"),
    _invalid(b'"multiplier":"2"', "/multiplier"),
    _invalid(b'"multiplier":true', "/multiplier"),
    _invalid(b'"multiplier":1e999', "/multiplier"),
    _invalid(b'"codes":404', "/codes"),
    _invalid(b'"codes":{"404":1}', "/codes"),
    _invalid(b'"codes":"404"', "/codes"),
    _invalid(b'"codes":[404,"410"]', "/codes/1"),
    _invalid(b'"codes":[404,99]', "/codes/1"),
    _invalid(b'"colors":["red","green"]', "/colors/1"),
    _invalid(b'"either":0', "/either"),
    _invalid(b'"either":{"url":""}', "/either"),
    # Times that are not RFC 3339's.
    _invalid(b'"at":1767225600', "/at"),
    _invalid(b'"at":"1767225600"', "/at"),
    _invalid(b'"at":"2026-01-01"', "/at"),
    _invalid(b'"at":"2026-01-01T00:00:00"', "/at"),
    _invalid(b'"at":"2026-01-01 00:00:00Z"', "/at"),
    _invalid(b'"at":"2026-02-29T00:00:00Z"', "/at"),
    _invalid(b'"at":"2026-01-01T24:00:00Z"', "/at"),
    _invalid(b'"at":"2026-01-01T00:00:00+24:00"', "/at"),
    _invalid(b'"at":"0001-01-01T00:00:00+01:00"', "/at"),
    _invalid('"at":"\N{ARABIC-INDIC DIGIT TWO}026-01-01T00:00:00Z"'.encode(), "/at"),
    # U+0000, which a text column cannot hold.
    Bad(b'{"tool":"a\\u0000b"}', 422, "invalid_request", "/tool"),
    _invalid(b'"part":{"url":"\\u0000"}', "/part/url"),
    # Objects that are none.
    _invalid(b'"part":[]', "/part"),
    _invalid(b'"part":{}', "/part/url"),
    _invalid(b'"parts":{}', "/parts"),
    _invalid(b'"metadata":[]', "/metadata"),
    _invalid(b'"metadata":"{}"', "/metadata"),
    _invalid(b",".join(b'"k%d":0' % number for number in range(70_000)), ""),
    _invalid(b'"codes":[' + b"true," * 200_000 + b"1]", "/codes/0"),
    # More than fits.
    Bad(b'{"tool":"t","payload":"' + b"x" * (MAX_PAYLOAD_BYTES + 1) + b'"}', 413, "payload_too_large", "/payload"),
    Bad(b'{"tool":"t","payload":"' + "ä".encode() * (MAX_PAYLOAD_BYTES // 2 + 1) + b'"}', 413, "payload_too_large", "/payload"),
    Bad(b'{"tool":"' + b"x" * MAX_BODY_BYTES + b'"}', 413, "body_too_large", ""),
]


@pytest.mark.parametrize("bad", BAD_BODIES, ids=lambda bad: f"{bad.code}-{bad.text[:50]!r}")
async def test_body_is_refused_with_its_place_when_it_is_bad(bad: Bad, client: httpx.AsyncClient, seen: list[Any]) -> None:
    """Every bad body is one problem with status, code and pointer; nothing reaches the endpoint and nothing crashes."""
    with structlog.testing.capture_logs() as logs:
        response = await _post(client, bad.text)

    problem = response.json()
    assert (response.status_code, problem["code"]) == (bad.status, bad.code)
    assert response.headers["content-type"] == "application/problem+json"
    assert problem.get("errors", [{"pointer": ""}])[0]["pointer"] == bad.pointer
    assert len(response.content) < 4096
    assert (seen, logs) == ([], [])


def test_corpus_is_large_enough_when_counted() -> None:
    """The corpus keeps the breadth that was promised for it."""
    assert len(BAD_BODIES) >= 60


async def test_all_faults_are_listed_when_a_body_has_several(client: httpx.AsyncClient) -> None:
    """One round trip tells everything that is wrong, in JSON's words."""
    response = await _post(client, b'{"step":"1","x":0,"part":[],"warm":"blue","color":"green"}')

    listed = {error["pointer"]: error["detail"] for error in response.json()["errors"]}
    assert listed == {
        "/tool": "required, but absent",
        "/step": "expected an integer in plain digits, at most 18 of them",
        "/color": "Input should be 'red' or 'blue'",
        "/warm": "Input should be 'red'",
        "/part": "expected an object",
        "/x": "unknown member",
    }


async def test_faults_are_cut_when_there_are_too_many(client: httpx.AsyncClient) -> None:
    """A list for people stays short, and says how long it would have been."""
    members = b",".join(b'"k%d":0' % number for number in range(MAX_MEMBERS - 1))
    response = await _post(client, b'{"tool":"t",' + members + b"}")

    assert len(response.json()["errors"]) == 20
    assert "255" in response.json()["detail"]


@pytest.mark.parametrize(
    "text", [b'{"tool":"s3cret"', b'{"tool":["s3cret"]}', b'{"tool":"t","color":"s3cret"}', b'{"tool":"s3cret\\u0000"}']
)
async def test_value_is_not_repeated_when_it_is_refused(text: bytes, client: httpx.AsyncClient) -> None:
    """A refusal names the place and the expectation, never what stood there."""
    response = await _post(client, text)

    assert response.is_client_error
    assert "s3cret" not in response.text


GOOD_MEMBERS: list[tuple[bytes, str, object]] = [
    (b'"step":1', "step", 1),
    (b'"color":"red"', "color", Color.RED),
    (b'"then":"continue"', "then", "continue"),
    (b'"warm":"red"', "warm", Color.RED),
    (b'"at":"2026-01-01T01:00:00.25+01:00"', "at", datetime(2026, 1, 1, 0, 0, 0, 250_000, tzinfo=UTC)),
    (b'"at":"2026-01-01t00:00:00z"', "at", datetime(2026, 1, 1, tzinfo=UTC)),
    (b'"multiplier":2', "multiplier", 2.0),
    (b'"multiplier":1.50', "multiplier", 1.5),
    (b'"multiplier":15e-1', "multiplier", 1.5),
    (b'"codes":[404,410,404]', "codes", frozenset({404, 410})),
    (b'"colors":["blue","red"]', "colors", (Color.BLUE, Color.RED)),
    (b'"part":{"url":"u","args":1.50}', "part", Part(url="u", args=NumberLiteral("1.50"))),
    (b'"part":{"url":"u","inner":{"url":"v"}}', "part", Part(url="u", inner=Part(url="v"))),
    (b'"either":7', "either", 7),
    (b'"either":{"url":"u"}', "either", Part(url="u")),
    (b'"metadata":{"a":"\\u0000"}', "metadata", {"a": "\0"}),
    (b'"payload":"\\u0000 \\ud83d\\ude00"', "payload", "\0 \N{GRINNING FACE}"),
    (b'"note":"\\u0000"', "note", "\0"),
    (b'"args":' + b"9" * 5000, "args", NumberLiteral("9" * 5000)),
    (b'"args":[-0,1.0,1e400,"\\u0000",null]', "args", [NumberLiteral("-0"), NumberLiteral("1.0"), NumberLiteral("1e400"), "\0", None]),
    (b'"args":' + b"[" * 63 + b"]" * 63, "args", parse(b"[" * 63 + b"]" * 63)),
]


@pytest.mark.parametrize(("members", "name", "expected"), GOOD_MEMBERS, ids=lambda value: repr(value)[:50])
async def test_member_arrives_as_meant_when_it_is_good(
    members: bytes, name: str, expected: object, client: httpx.AsyncClient, seen: list[Any]
) -> None:
    """Each type takes the one JSON form it has, and Json fields keep every literal."""
    response = await _post(client, b'{"tool":"t",' + members + b"}")

    assert response.status_code == 204, response.text
    value = getattr(seen[0].model, name)
    assert value == expected
    assert type(value) is type(expected)


async def test_tree_is_kept_when_a_body_is_accepted(client: httpx.AsyncClient, seen: list[Any]) -> None:
    """The lossless tree stands beside the model, to be fingerprinted."""
    text = b'{"args":{"k":' + b"9" * 5000 + b',"a":[1.0]},"tool":"t"}'

    assert (await _post(client, text)).status_code == 204
    assert dump(seen[0].tree) == text


async def test_hundred_thousand_keys_are_accepted_when_a_json_field_holds_them(client: httpx.AsyncClient, seen: list[Any]) -> None:
    """Only models are bounded in members; a Json field is bounded by the body's bytes."""
    text = b'{"tool":"t","args":{' + b",".join(b'"%x":0' % number for number in range(100_000)) + b"}}"

    assert (await _post(client, text)).status_code == 204
    assert len(seen[0].model.args) == 100_000


MEDIA_TYPES: list[tuple[str, int]] = [
    ("application/json", 204),
    ("Application/JSON; Charset=UTF-8", 204),
    ('application/json;charset="utf-8"', 204),
    ("application/json; profile=x", 204),
    ("application/json; charset=latin-1", 415),
    ("application/json; charset=utf-8; charset=latin-1", 415),
    ("application/jsonx", 415),
    ("application/problem+json", 415),
    ("application/x-www-form-urlencoded", 415),
    ("multipart/form-data; boundary=x", 415),
    ("text/plain", 415),
    ("*/*", 415),
    ("", 415),
]


@pytest.mark.parametrize(("media_type", "status"), MEDIA_TYPES)
async def test_media_type_decides_when_a_body_is_sent(media_type: str, status: int, client: httpx.AsyncClient) -> None:
    """Only JSON in UTF-8 is read: what a browser can send across origins without asking never is."""
    response = await _post(client, b'{"tool":"t"}', content_type=media_type)

    assert response.status_code == status, response.text
    if status == 415:
        assert response.json()["code"] == "unsupported_media_type"
        assert response.headers["accept"] == "application/json"


@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip", "x"])
async def test_compressed_body_is_refused_when_sent(coding: str, client: httpx.AsyncClient) -> None:
    """Nothing is inflated: 415 says that only identity is accepted."""
    response = await _post(client, b"\x1f\x8b", content_encoding=coding)

    assert (response.status_code, response.json()["code"]) == (415, "unsupported_content_coding")
    assert response.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("media_type", ["", "application/json"])
async def test_empty_body_counts_as_object_when_nothing_is_required(media_type: str, client: httpx.AsyncClient, seen: list[Any]) -> None:
    """`curl -X POST` is enough for a verb that needs no words."""
    response = await _post(client, b"", path="/notes", content_type=media_type)

    assert response.status_code == 204
    assert (seen[0].model, seen[0].tree) == (Note(), {})


async def _chunks(total: int) -> AsyncIterator[bytes]:
    yield b'{"tool":"t"}'
    for _ in range((total - 12) // 4096):
        yield b" " * 4096
    yield b" " * ((total - 12) % 4096)


async def test_chunked_body_is_accepted_when_it_is_exactly_the_limit(client: httpx.AsyncClient) -> None:
    """The limit is inclusive."""
    assert (await _post(client, _chunks(MAX_BODY_BYTES))).status_code == 204


async def test_chunked_body_is_refused_when_it_is_one_byte_over(client: httpx.AsyncClient, seen: list[Any]) -> None:
    """Without Content-Length the bytes received are counted."""
    response = await _post(client, _chunks(MAX_BODY_BYTES + 1))

    assert (response.status_code, response.json()["code"]) == (413, "body_too_large")
    assert response.json()["limit_bytes"] == MAX_BODY_BYTES
    assert seen == []


class Exchange(NamedTuple):
    """What one raw ASGI exchange came to."""

    status: int
    received: int
    logs: list[Any]


async def _exchange(app: FastAPI, path: str, headers: dict[str, str], messages: Iterator[dict[str, Any]]) -> Exchange:
    """Speak ASGI without a client: count the messages asked for; after the last one the sender stays silent."""
    sent: list[MutableMapping[str, Any]] = []
    received = 0

    async def receive() -> dict[str, Any]:
        nonlocal received
        received += 1
        for message in messages:
            return message
        await asyncio.Event().wait()
        raise AssertionError("nobody sets that event: the sender is silent")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    with structlog.testing.capture_logs() as logs:
        await asyncio.wait_for(app(scope, receive, send), timeout=5)
    return Exchange(sent[0]["status"], received, logs)


JSON = {"content-type": "application/json", "authorization": "Bearer let-me-in"}


@pytest.mark.parametrize("length", [str(MAX_BODY_BYTES + 1), "9" * 5000, "0" * 10 + "1048577"])
async def test_announced_size_is_refused_when_over_the_limit(length: str, app: FastAPI) -> None:
    """Content-Length alone is enough: not one byte of such a body is asked for."""
    exchange = await _exchange(app, "/orders", {**JSON, "content-length": length}, iter(()))

    assert exchange == Exchange(413, 0, [])


async def test_bytes_are_counted_when_content_length_lies(app: FastAPI) -> None:
    """A small announced size does not open the door for a large body."""
    flood = ({"type": "http.request", "body": b" " * 65_536, "more_body": True} for _ in range(1_000))

    exchange = await _exchange(app, "/orders", {**JSON, "content-length": "2"}, flood)

    assert exchange == Exchange(413, 17, [])


async def test_nothing_is_logged_when_the_sender_leaves_in_mid_body(app: FastAPI, seen: list[Any]) -> None:
    """A broken connection is everyday life, not an error of the service."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": b'{"tool":"t"}', "more_body": True}, {"type": "http.disconnect"}]

    exchange = await _exchange(app, "/orders", JSON, iter(messages))

    assert exchange == Exchange(400, 2, [])
    assert seen == []


async def test_body_is_refused_when_it_does_not_arrive_in_time(app: FastAPI) -> None:
    """A sender that stalls does not hold its connection for ever."""
    exchange = await _exchange(app, "/notes", JSON, iter([{"type": "http.request", "body": b"{", "more_body": True}]))

    assert exchange == Exchange(400, 2, [])


async def test_body_is_not_read_when_authentication_fails(app: FastAPI) -> None:
    """What stands earlier in the route decides first: strangers cannot make the service read."""
    exchange = await _exchange(app, "/notes", {"content-type": "application/json"}, iter(()))

    assert exchange == Exchange(401, 0, [])


BAD_URLS: list[tuple[str, str]] = [
    ("/sessions/a%20b/effects/1", "session_id"),
    ("/sessions/a%00/effects/1", "session_id"),
    ("/sessions/%C3%A4/effects/1", "session_id"),
    ("/sessions/a%0A/effects/1", "session_id"),
    (f"/sessions/{'a' * 201}/effects/1", "session_id"),
    ("/sessions/a/effects/0", "step"),
    ("/sessions/a/effects/-1", "step"),
    ("/sessions/a/effects/01", "step"),
    ("/sessions/a/effects/+1", "step"),
    ("/sessions/a/effects/1.0", "step"),
    ("/sessions/a/effects/1_0", "step"),
    ("/sessions/a/effects/%201", "step"),
    ("/sessions/a/effects/%D9%A1", "step"),
    ("/sessions/a/effects/2147483648", "step"),
    (f"/sessions/a/effects/{'9' * 5000}", "step"),
    ("/sessions/a/effects/x", "step"),
    ("/sessions/a/effects/1?wait_s=56", "wait_s"),
    ("/sessions/a/effects/1?wait_s=", "wait_s"),
    ("/sessions/a/effects/1?wait_s=1.0", "wait_s"),
    ("/sessions/a/effects/1?wait_s=true", "wait_s"),
    ("/sessions/a/effects/1?wait_s=1&wait_s=2", "wait_s"),
    ("/sessions/a/effects/1?wait_s=1&Wait_s=2", "Wait_s"),
    ("/sessions/a/effects/1?limit=1", "limit"),
    ("/sessions/a/effects/1?=1", ""),
]


@pytest.mark.parametrize(("url", "parameter"), BAD_URLS, ids=lambda value: value[:60])
async def test_parameter_is_refused_by_name_when_it_is_bad(url: str, parameter: str, client: httpx.AsyncClient, seen: list[Any]) -> None:
    """Paths and queries have one spelling per value; anything else is 422 with the parameter's name."""
    response = await client.get(url)

    assert (response.status_code, response.json()["code"]) == (422, "invalid_request")
    assert [error["parameter"] for error in response.json()["errors"]] == [parameter]
    assert seen == []


async def test_parameters_arrive_when_they_are_good(client: httpx.AsyncClient, seen: list[Any]) -> None:
    """The largest and the oddest names that are allowed pass unchanged."""
    session_id = "A.z_9:-" + "a" * 193

    assert (await client.get(f"/sessions/{session_id}/effects/2147483647?wait_s=55")).status_code == 204
    assert seen == [(session_id, 2_147_483_647, 55)]


def test_size_is_refused_with_its_place_when_over_the_limit() -> None:
    """Texts whose size is known late have the same refusal as a payload."""
    assert within(b"1234", limit_bytes=4, pointer="/metadata") == b"1234"
    with pytest.raises(TooLarge) as caught:
        within(b"12345", limit_bytes=4, pointer="/metadata")
    assert caught.value.facts["errors"] == [{"pointer": "/metadata", "detail": "more than 4 bytes of UTF-8"}]


def test_model_is_refused_at_import_when_a_field_has_no_json_form() -> None:
    """A type that no JSON value could fill is a mistake of ours, found before anything is served."""
    with pytest.raises(TypeError, match="bytes"):

        class _Unfillable(StrictModel):
            data: bytes


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | st.text() | st.sampled_from([NumberLiteral("1.0"), NumberLiteral("-0")]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def _reversed_keys(tree: Json) -> Json:
    match tree:
        case dict():
            return {key: _reversed_keys(tree[key]) for key in reversed(tree)}
        case list():
            return [_reversed_keys(item) for item in tree]
        case _:
            return tree


@given(tree=_json)
def test_fingerprint_is_the_same_when_only_key_order_differs(tree: Json) -> None:
    """A client whose serializer shuffles keys still repeats the same request."""
    assert fingerprint(tree) == fingerprint(_reversed_keys(tree))
    assert len(fingerprint(tree)) == 32


DIFFERENT: list[tuple[bytes, bytes]] = [
    (b"1", b"1.0"),
    (b"1", b"true"),
    (b"0", b"-0"),
    (b'"1"', b"1"),
    (b"[1,2]", b"[2,1]"),
    (b"{}", b"null"),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_fingerprint_differs_when_a_literal_differs(one: bytes, other: bytes) -> None:
    """Nothing that an endpoint could tell apart is taken for the same request."""
    assert fingerprint({"a": parse(one)}) != fingerprint({"a": parse(other)})
