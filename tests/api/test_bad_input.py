"""Every kind of bad input on every route: the right problem with the place of the fault, never a 500, and nothing stored."""

import base64
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from tests.conftest import StartService
from tests.factories import Client, Service, undo_at
from tests.probes import row_counts

URL = "http://127.0.0.1:9/undo"
JSON = {"Content-Type": "application/json"}
DEEP = b"[" * 65 + b"]" * 65


class Route(NamedTuple):
    """A route with a body, an acceptable one, and the member of it that takes any JSON or text."""

    method: str
    path: str
    good: dict[str, Any]
    free: str
    by: str = "agent"

    def caller(self, service: Service) -> Client:
        """Return a client that may use it."""
        client: Client = getattr(service, self.by)
        return client


BECAUSE = {"reason": "x"}
UNDO_ID = "00000000-0000-0000-0000-000000000007"
ROUTES = (
    Route("PUT", "/v1/sessions/new", {"agent": "a", "metadata": {}}, "metadata"),
    Route("POST", "/v1/sessions/s/intercept", {"tool": "t", "args": {}, "step_index": 9, "reversibility": "read_only"}, "args"),
    Route("POST", "/v1/sessions/s/effects/1/commit", {"result": {}}, "result"),
    Route("POST", "/v1/sessions/s/effects/1/fail", {"error": "x"}, "error"),
    Route("POST", "/v1/sessions/s/fail", {"error": "x"}, "error"),
    Route("POST", "/v1/sessions/s/effects/1/approve", BECAUSE, "reason", "operator"),
    Route("POST", "/v1/sessions/s/effects/1/reject", BECAUSE, "reason", "operator"),
    Route("POST", "/v1/sessions/s/effects/1/resume", {"payload": "x"}, "payload"),
    Route("POST", "/v1/sessions/s/effects/1/settle", {**BECAUSE, "outcome": "committed", "result": {}}, "result", "operator"),
    Route("POST", f"/v1/sessions/s/undo/{UNDO_ID}/retry", BECAUSE, "reason", "admin"),
    Route("POST", f"/v1/sessions/s/undo/{UNDO_ID}/skip", BECAUSE, "reason", "operator"),
    *(Route("POST", f"/v1/sessions/s/{verb}", BECAUSE, "reason", "operator") for verb in ("unwind", "halt", "resolve")),
)


class Bad(NamedTuple):
    """A faulty request and what must be said of it; `pointer` None: no place is told."""

    body: bytes
    status: int
    code: str
    pointer: str | None
    headers: dict[str, str] = JSON


def faults_of(route: Route) -> Iterator[Bad]:
    """Yield what is wrong whatever the route is for; the fault sits in, or beside, the free member."""
    free = f'"{route.free}":'.encode()
    place = f"/{route.free}"

    def holding(value: bytes) -> bytes:
        others = {name: member for name, member in route.good.items() if name != route.free}
        head = json.dumps(others).encode()[:-1] + (b"," if others else b"")
        return head + free + value + b"}"

    good = json.dumps(route.good).encode()
    yield Bad(b"{", 400, "malformed_json", None)
    yield Bad(b"\xff\xfe{}", 400, "malformed_json", None)
    yield Bad(good + b"x", 400, "malformed_json", None)
    yield Bad(b"\xef\xbb\xbf" + good, 400, "malformed_json", None)
    yield Bad(holding(b"NaN"), 400, "malformed_json", place)
    yield Bad(holding(b"Infinity"), 400, "malformed_json", place)
    yield Bad(holding(b'"\\ud800"'), 400, "malformed_json", place)
    yield Bad(holding(b'{"a":1,"a":2}'), 400, "malformed_json", f"{place}/a")
    yield Bad(holding(DEEP), 400, "malformed_json", None)
    yield Bad(holding(b"1").replace(b"}", b"," + free + b"1}"), 400, "malformed_json", place)
    yield Bad(b"[]", 422, "invalid_request", "")
    yield Bad(b"null", 422, "invalid_request", "")
    yield Bad(json.dumps(route.good | {"unknown~/member": 1}).encode(), 422, "invalid_request", "/unknown~0~1member")
    yield Bad(b" " * 1_048_577, 413, "body_too_large", None)
    yield Bad(good, 415, "unsupported_media_type", None, {"Content-Type": "text/plain"})
    yield Bad(good, 415, "unsupported_media_type", None, {"Content-Type": "application/json; charset=latin-1"})
    yield Bad(good, 415, "unsupported_media_type", None, {})
    yield Bad(good, 415, "unsupported_content_coding", None, {**JSON, "Content-Encoding": "gzip"})


NEW, INTERCEPT, _, FAIL_EFFECT, FAIL, APPROVE, REJECT, RESUME, SETTLE, RETRY, SKIP = (route.path for route in ROUTES[:11])
TEXTS = ("", "x" * 2_001, 1, ["a"], True, "a\0b")
NAMES = ("", "x" * 201, 1, ["a"], "a\0b")
WRONG_VALUES: dict[tuple[str, str], tuple[Any, ...]] = {
    (NEW, "agent"): ("", "x" * 201, 7, ["a"], "a\0b", True),
    (NEW, "metadata"): ([], "text", 1, False),
    (NEW, "idle_seconds"): (0, -1, 1.5, "60", True, 31_536_001, 10**30),
    (NEW, "deadline_at"): (
        "tomorrow",
        "2031-02-03",
        "2031-02-03T04:05:06",
        "2031-13-01T00:00:00Z",
        1_900_000_000,
        "0000-01-01T00:00:00Z",
    ),
    (INTERCEPT, "tool"): ("", "x" * 201, "a b", "\u00e9", "a\0", 1, None, {"a": 1}),
    (INTERCEPT, "step_index"): (0, -1, 2**31, "1", 1.0, True, [1]),
    (INTERCEPT, "reversibility"): ("undoable", "", 1, "IRREVERSIBLE"),
    (INTERCEPT, "payload"): (1, ["a"], {"a": 1}, True, "beside args"),
    (FAIL_EFFECT, "error"): ("", "x" * 2_001, 1, "a\0b"),
    (FAIL_EFFECT, "outcome"): ("committed", "maybe", 1),
    (FAIL, "error"): ("", "x" * 2_001, 1, "a\0b"),
    (FAIL, "effect"): (1, [], "1"),
    (APPROVE, "reason"): TEXTS,
    (APPROVE, "payload_sha256"): ("", "0" * 63, "0" * 65, "A" * 64, "g" * 64, f"{'0' * 64}\n", 1),
    (APPROVE, "approver"): NAMES,
    (REJECT, "then"): ("stop", "", "Continue", 1, None, True),
    (REJECT, "approver"): NAMES,
    (RESUME, "payload"): (1, None, ["a"], {"a": 1}, True),
    (SETTLE, "outcome"): ("unknown", "maybe", "", 1, None),
    (RETRY, "url"): ("", "x" * 2_049, 1, ["https://a.example/"], "a\0b"),
    (SKIP, "by_hand"): ("true", 1, None),
    **{(route.path, "reason"): (*TEXTS, None) for route in ROUTES if "reason" in route.good and route.path != APPROVE},
}
WRONG_PARTS: tuple[tuple[str, dict[str, Any], str], ...] = (
    (INTERCEPT, {"compensation": {"args": {}}}, "/compensation/url"),
    (INTERCEPT, {"compensation": undo_at(URL, unknown={})}, "/compensation/unknown/args"),
    (INTERCEPT, {"compensation": undo_at(URL, unknown={"args": 1, "x": 1})}, "/compensation/unknown/x"),
    (FAIL, {"effect": {}}, "/effect/step_index"),
    *((FAIL, {"effect": {"step_index": value}}, "/effect/step_index") for value in (0, "1", None, 2**31)),
    *((FAIL, {"effect": {"step_index": 1, "outcome": value}}, "/effect/outcome") for value in ("committed", "maybe", 1)),
)
COMPENSATION_FAULTS: dict[str, tuple[Any, ...]] = {
    "url": ("", "x" * 2_049, 1, None),
    "description": ("x" * 501, 1, "a\0b"),
    "on_unknown": ("halt", 1, True),
    "independent": ("true", 1, None),
    "max_retries": (-1, 101, 1.5, "3", True),
    "initial_interval_ms": (0, 86_400_001, "1"),
    "multiplier": (0.5, 101, "2", True),
    "max_interval_ms": (0, 1.5),
    "timeout_ms": (0, 600_001),
    "deadline_ms": (0, 31_536_000_001),
    "method": ("GET",),
    "headers": ({"X": "y"},),
}


def wrong_members() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield path, members that replace those of a good body, and the pointer to the fault."""
    for (path, member), values in WRONG_VALUES.items():
        for value in values:
            yield path, {member: value}, f"/{member}"
    for member, values in COMPENSATION_FAULTS.items():
        for value in values:
            yield INTERCEPT, {"compensation": {"url": URL, "args": {}, member: value}}, f"/compensation/{member}"
    yield from WRONG_PARTS


@pytest.fixture
async def busy(service: Service) -> Service:
    """Return a service with one session in which one effect is under way."""
    await service.agent.intercept("s", step_index=1, compensation=undo_at(URL))
    return service


def expect_problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Hold an answer against what RFC 9457 and the contract ask of every refusal."""
    assert (response.status_code, response.headers["content-type"]) == (status, "application/problem+json"), response.text
    problem: dict[str, Any] = response.json()
    assert problem["code"] == code, problem
    assert problem["type"] == f"urn:countermand:problem:{code}"
    assert problem["status"] == status
    assert problem["title"]
    assert problem["detail"]
    assert problem["instance"].startswith("urn:uuid:")
    return problem


async def test_body_is_refused_on_every_route_when_its_text_is_bad(busy: Service) -> None:
    """Syntax, encodings, duplicate keys, NaN, half surrogates, depth, size, media types and unknown members."""
    before = await row_counts(busy.database_url)
    for route in ROUTES:
        for bad in faults_of(route):
            response = await route.caller(busy).request(route.method, route.path, content=bad.body, headers=bad.headers)
            where = (route.path, bad.body[:60])
            problem = expect_problem(response, bad.status, bad.code)
            if bad.pointer is not None:
                assert problem["errors"][0]["pointer"] == bad.pointer, where
    assert await row_counts(busy.database_url) == before


async def test_member_is_named_when_its_type_or_range_is_wrong(busy: Service) -> None:
    """Every member of every body refuses what it cannot be, with its JSON Pointer."""
    before = await row_counts(busy.database_url)
    good = {route.path: route for route in ROUTES}
    for path, members, pointer in wrong_members():
        route = good[path]
        response = await route.caller(busy).request(route.method, path, json=route.good | members)
        problem = expect_problem(response, 422, "invalid_request")
        assert problem["errors"][0]["pointer"] == pointer, (path, members, problem)
    for status in (200, 399, 600, "404", 404.0):
        for member in ("retry_on", "compensated_on"):
            body = {"tool": "t", "args": {}, "step_index": 9, "compensation": undo_at(URL, **{member: [status]})}
            problem = expect_problem(await busy.agent.post("/sessions/s/intercept", body), 422, "invalid_request")
            assert problem["errors"][0]["pointer"].startswith(f"/compensation/{member}")
    assert await row_counts(busy.database_url) == before


async def test_member_is_named_when_it_is_missing(busy: Service) -> None:
    """Bodies that lack what they need name it; one of payload and args is needed, and only one."""
    before = await row_counts(busy.database_url)
    table: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("/sessions/s/intercept", {}, "/tool"),
        ("/sessions/s/intercept", {"tool": "t", "step_index": 9, "reversibility": "read_only"}, "/payload"),
        ("/sessions/s/intercept", {"tool": "t", "step_index": 9, "payload": None}, "/payload"),
        ("/sessions/s/effects/1/fail", {}, "/error"),
        ("/sessions/s/fail", {}, "/error"),
    )
    for path, body, pointer in table:
        problem = expect_problem(await busy.agent.post(path, body), 422, "invalid_request")
        assert problem["errors"][0]["pointer"] == pointer, (path, body)
    for route in ROUTES:
        if route.path in {INTERCEPT, NEW, APPROVE}:
            continue  # looked at above, or nothing has to be said
        needed = route.good.keys() - {"result"}
        for name in needed:
            lacking = {member: value for member, value in route.good.items() if member != name}
            problem = expect_problem(await route.caller(busy).request(route.method, route.path, json=lacking), 422, "invalid_request")
            assert problem["errors"][0]["pointer"] == f"/{name}", route
    for path in ("/v1/sessions/s/intercept", "/v1/sessions/s/fail", RESUME):
        expect_problem(await busy.agent.request("POST", path, content=b"", headers=JSON), 400, "malformed_json")
    assert await row_counts(busy.database_url) == before


async def test_content_is_refused_when_it_is_more_than_its_limit(busy: Service) -> None:
    """Payload and args end at 256 KiB of UTF-8, metadata at 16 KiB; exactly that much is accepted."""
    before = await row_counts(busy.database_url)
    undo = undo_at(URL)
    large = "\u00e9" * 131_072
    table: tuple[tuple[str, str, dict[str, Any], str], ...] = (
        ("POST", "intercept", {"tool": "t", "step_index": 9, "payload": large + "x", "compensation": undo}, "/payload"),
        ("POST", "intercept", {"tool": "t", "step_index": 9, "args": large, "compensation": undo}, "/args"),
        ("POST", "intercept", {"tool": "t", "step_index": 9, "args": 1, "compensation": undo | {"args": large}}, "/compensation/args"),
        (
            "POST",
            "intercept",
            {"tool": "t", "step_index": 9, "args": 1, "compensation": undo | {"unknown": {"args": large}}},
            "/compensation/unknown/args",
        ),
        ("POST", "effects/1/resume", {"payload": large + "x"}, "/payload"),
    )
    for method, verb, body, pointer in table:
        response = await busy.agent.request(method, f"/v1/sessions/s/{verb}", json=body)
        problem = expect_problem(response, 413, "payload_too_large")
        assert problem["errors"][0]["pointer"] == pointer
    metadata = {"m": "x" * (16_384 - len('{"m":""}'))}
    problem = expect_problem(await busy.agent.put("/sessions/new", {"metadata": {"m": metadata["m"] + "x"}}), 413, "payload_too_large")
    assert problem["errors"][0]["pointer"] == "/metadata"
    assert await row_counts(busy.database_url) == before
    assert (await busy.agent.put("/sessions/new", {"metadata": metadata})).status_code == 201
    full = await busy.agent.intercept("s", step_index=9, payload=large, compensation=undo)
    assert (full.status_code, full.json()["payload"]) == (201, large)


async def test_odd_content_is_kept_when_it_is_allowed(busy: Service) -> None:
    """U+0000, emoji, direction marks and controls are somebody's data, and come back as they were."""
    payload = '\0\x01\u202e\U0001f600\r\n\t"\\\u2028'
    answer = await busy.agent.intercept("s", step_index=2, payload=payload, compensation=undo_at(URL))
    assert (answer.status_code, answer.json()["payload"]) == (201, payload)
    result = {"\0": payload, "": [], "n": 10**30, "neg": -(10**18)}
    committed = await busy.agent.commit("s", 2, result)
    assert (committed.status_code, committed.json()["result"]) == (200, result)
    failed = await busy.agent.fail_effect("s", 1, error="\u202e\U0001f600\x1b[31m")
    assert failed.json()["error"] == "\u202e\U0001f600\x1b[31m"
    entries = [entry for entry in await busy.operator.journal("s") if entry["step"] == 2]
    assert entries[0]["content"]["payload"]["text"] == payload
    assert (await busy.operator.get("/sessions/s/journal/verify")).json()["valid"] is True


BAD_SESSION_IDS = ("a b", "a%00b", "a%2Fb", "%C3%A9", "a*", "a;b", "x" * 201, "%20", "a%0A")
BAD_STEPS = ("0", "-1", "1.0", "01", "+1", "one", "2147483648", "9" * 30, "%201", "1%00", "%D9%A1")
BAD_UNDO_IDS = ("7", "undo-" + UNDO_ID, "g" * 36, "%00", UNDO_ID + "0", "%20")


async def test_name_in_the_path_is_refused_when_it_cannot_be_one(busy: Service) -> None:
    """Session ids have their alphabet and steps one spelling; anything else is 404 or 422, never a look into the database."""
    before = await row_counts(busy.database_url)
    for session_id in BAD_SESSION_IDS:
        for method, tail in (("PUT", ""), ("GET", ""), ("POST", "/fail"), ("POST", "/intercept"), ("GET", "/effects/1")):
            response = await busy.agent.request(method, f"/v1/sessions/{session_id}{tail}", json={"error": "x", "tool": "t", "args": 1})
            assert response.status_code in {404, 422}, (session_id, method)
            assert response.headers["content-type"] == "application/problem+json"
    for step in BAD_STEPS:
        for method, tail, body in (
            ("GET", "", None),
            ("POST", "/commit", {}),
            ("POST", "/fail", {"error": "x"}),
            ("POST", "/approve", {}),
            ("POST", "/reject", BECAUSE),
            ("POST", "/resume", {"payload": "x"}),
            ("POST", "/settle", {**BECAUSE, "outcome": "committed"}),
        ):
            client = busy.agent if tail == "" else busy.operator
            response = await client.request(method, f"/v1/sessions/s/effects/{step}{tail}", json=body)
            problem = expect_problem(response, 422, "invalid_request")
            assert problem["errors"][0]["parameter"] == "step", step
    for undo_id in BAD_UNDO_IDS:
        for verb in ("retry", "skip"):
            response = await busy.operator.request("POST", f"/v1/sessions/s/undo/{undo_id}/{verb}", json=BECAUSE)
            problem = expect_problem(response, 422, "invalid_request")
            assert problem["errors"][0]["parameter"] == "undo_id", undo_id
    for odd in (".", "..", "a.b:c-d_e", "x" * 200):
        assert (await busy.agent.get(f"/sessions/{odd}")).status_code in {200, 404}
    assert await row_counts(busy.database_url) == before


def cursor_of(text: str) -> str:
    """Write a cursor as lists give them."""
    return base64.urlsafe_b64encode(text.encode()).decode()


BAD_QUERIES: tuple[tuple[str, dict[str, str], int], ...] = (
    ("/sessions", {"limit": "0"}, 422),
    ("/sessions", {"limit": "201"}, 422),
    ("/sessions", {"limit": "x"}, 422),
    ("/sessions", {"limit": ""}, 422),
    ("/sessions", {"state": "sleeping"}, 422),
    ("/sessions", {"tool": "a\0b"}, 422),
    ("/sessions", {"agent": "a\0b"}, 422),
    ("/sessions", {"agent": "x" * 201}, 422),
    ("/sessions", {"Limit": "1"}, 422),
    ("/sessions", {"offset": "1"}, 422),
    ("/sessions", {"cursor": "x" * 501}, 422),
    ("/sessions", {"cursor": ""}, 400),
    ("/sessions", {"cursor": "rubbish"}, 400),
    ("/sessions", {"cursor": "\u00e9"}, 400),
    ("/sessions", {"cursor": cursor_of("2 2026-01-01T00:00:00Z s")}, 400),
    ("/sessions", {"cursor": cursor_of("1 yesterday s")}, 400),
    ("/sessions", {"cursor": cursor_of("1 2026-01-01T00:00:00Z")}, 400),
    ("/sessions", {"cursor": cursor_of("1 2026-01-01T00:00:00 s")}, 400),
    ("/sessions", {"cursor": cursor_of("1 0001-01-01T00:00:00+14:00 s")}, 400),
    ("/sessions", {"cursor": cursor_of("1 2026-01-01T00:00:00Z a\0b")}, 400),
    ("/sessions/s/journal", {"limit": "1001"}, 422),
    ("/sessions/s/journal", {"cursor": "-1"}, 400),
    ("/sessions/s/journal", {"cursor": "1e3"}, 400),
    ("/sessions/s/journal", {"cursor": "\u0661"}, 400),
    ("/sessions/s/journal", {"cursor": "9" * 19}, 400),
    ("/sessions/s/journal", {"cursor": "9" * 21}, 422),
    ("/sessions/s/journal/verify", {"deep": "1"}, 422),
    ("/sessions/s", {"verbose": "1"}, 422),
    ("/sessions/s/effects/1", {"x": ""}, 422),
    ("/sessions/s/escalation", {"verbose": "1"}, 422),
    *(("/approvals", {name: value}, 422) for name, value in (("limit", "0"), ("limit", "201"), ("limit", "1.0"), ("limit", ""))),
    *(
        ("/approvals", {name: value}, 422)
        for name, value in (("state", ""), ("state", "open"), ("State", "pending"), ("action", "approve"))
    ),
    ("/approvals", {"cursor": "x" * 501}, 422),
    *(
        ("/approvals", {"cursor": cursor}, 400)
        for cursor in (
            "",
            "rubbish",
            cursor_of("1 2026-01-01T00:00:00.000000Z s"),
            cursor_of("1 2026-01-01T00:00:00.000000Z s -1"),
            cursor_of("1 2026-01-01T00:00:00.000000Z s \u0661"),
            cursor_of("1 2026-02-30T00:00:00.000000Z s 1"),
            cursor_of("1 0000-01-01T00:00:00.000000Z s 1"),
            cursor_of("2 2026-01-01T00:00:00.000000Z s 1"),
            cursor_of("1 2026-01-01T00:00:00.000000Z a b 1"),
            cursor_of("1 2026-01-01T00:00:00.000000Z s 12345678901"),
        )
    ),
    *(("/escalations", {name: value}, 422) for name, value in (("limit", "0"), ("limit", "201"), ("reason", ""), ("reason", "boredom"))),
    *(("/escalations", {name: value}, 422) for name, value in (("state", "halted"), ("cursor", "x" * 501))),
    *(
        ("/escalations", {"cursor": cursor}, 400)
        for cursor in (
            "",
            "rubbish",
            cursor_of("1 yesterday s"),
            cursor_of("1 2026-01-01T00:00:00.000000Z"),
            cursor_of("1 2026-13-01T00:00:00.000000Z s"),
            cursor_of("1 2026-01-01T00:00:00.000000Z s 1"),
        )
    ),
)
# Cursors that no list gave, and that could be ones.
ODD_CURSORS: tuple[tuple[str, str], ...] = (
    ("/approvals", cursor_of("1 0001-01-01T00:00:00.000000Z s 0")),
    ("/approvals", cursor_of(f"1 9999-12-31T23:59:59.999999Z {'x' * 200} 9999999999")),
    ("/escalations", cursor_of("1 0001-01-01T00:00:00.000000Z s")),
    ("/escalations", cursor_of(f"1 9999-12-31T23:59:59.999999Z {'x' * 200}")),
)
WAITING = (
    "/sessions/s/fail",
    "/sessions/s/effects/1/resume",
    f"/sessions/s/undo/{UNDO_ID}/retry",
    "/sessions/s/unwind",
    "/sessions/s/halt",
)


async def test_query_is_refused_when_a_parameter_is_unknown_or_wrong(busy: Service) -> None:
    """Unknown names, values out of range and cursors that no answer gave are problems, on reads and writes."""
    before = await row_counts(busy.database_url)
    for path, params, status in BAD_QUERIES:
        response = await busy.operator.get(path, params=params)
        expect_problem(response, status, "bad_cursor" if status == 400 else "invalid_request")
    for path, cursor in ODD_CURSORS:
        assert (await busy.operator.get(path, params={"cursor": cursor})).json()["items"] == [], cursor
    good = {route.path.removeprefix("/v1"): route for route in ROUTES}
    for path in WAITING:
        for value in ("-1", "56", "1.5", "x", ""):
            response = await good[path].caller(busy).post(path, good[path].good, params={"wait_s": value})
            problem = expect_problem(response, 422, "invalid_request")
            assert problem["errors"][0]["parameter"] == "wait_s"
        twice = await good[path].caller(busy).request("POST", f"/v1{path}?wait_s=1&wait_s=2", json=good[path].good)
        expect_problem(twice, 422, "invalid_request")
    for route in ROUTES:
        response = await route.caller(busy).request(route.method, route.path, json=route.good, params={"dry_run": "true"})
        expect_problem(response, 422, "invalid_request")
    assert await row_counts(busy.database_url) == before


async def test_idempotency_key_is_refused_when_it_is_none(busy: Service) -> None:
    """Empty, too long, not visible ASCII, or given twice: 400, and the call is not registered."""
    before = await row_counts(busy.database_url)
    body = {"tool": "t", "args": {}, "step_index": 9, "compensation": undo_at(URL)}
    values: list[list[tuple[bytes, bytes]]] = [
        [(b"Idempotency-Key", value)] for value in (b"", b'""', b"a b", b"x" * 256, b"\xc3\xa9", b"a\tb", b'"a b"')
    ]
    values.append([(b"Idempotency-Key", b"a"), (b"Idempotency-Key", b"a")])
    for headers in values:
        sent = [(b"Authorization", f"Bearer {busy.agent.key}".encode()), *headers]
        response = await busy.agent.http.post("/v1/sessions/s/intercept", json=body, headers=sent)
        expect_problem(response, 400, "bad_idempotency_key")
    assert await row_counts(busy.database_url) == before
    longest = await busy.agent.intercept("s", idempotency_key="x" * 255, step_index=9, compensation=undo_at(URL))
    assert longest.status_code == 201


async def test_invalid_trace_is_dropped_when_a_call_comes_with_one(busy: Service) -> None:
    """A traceparent that is none does not hinder the call (W3C Trace Context)."""
    values = ("", "rubbish", f"00-{'0' * 32}-{'1' * 16}-01", f"ff-{'1' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'1' * 16}", "-" * 3)
    for number, value in enumerate(values, 2):
        body = {"tool": "t", "args": {}, "step_index": number, "compensation": undo_at(URL)}
        response = await busy.agent.post("/sessions/s/intercept", body, headers={"traceparent": value})
        assert response.status_code == 201, value


async def test_routes_of_other_methods_are_problems_when_called(services: StartService) -> None:
    """Unknown paths and methods are problems as well, and store nothing."""
    service = await services(has_orchestrator=False)
    for method, path, status in (
        ("DELETE", "/v1/sessions/s", 405),
        ("PATCH", "/v1/sessions/s", 405),
        ("GET", "/v1/sessions/s/intercept", 405),
        ("POST", "/v1/sessions/s/journal", 405),
        ("POST", "/v1/approvals", 405),
        ("GET", "/v1/sessions/s/effects/1/approve", 405),
        ("GET", f"/v1/sessions/s/undo/{UNDO_ID}/retry", 405),
        ("GET", f"/v1/sessions/s/undo/{UNDO_ID}", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v2/sessions", 404),
        ("GET", "/v1/sessions/", 404),
    ):
        response = await service.agent.request(method, path)
        assert (response.status_code, response.headers["content-type"]) == (status, "application/problem+json"), path
    assert set((await row_counts(service.database_url)).values()) == {0}
