"""What agents hand over comes back letter for letter everywhere: answers, GETs, journal, the undo's body. Must not judge meanings."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.factories import Service
from tests.fakes import FakeEndpoint
from tests.probes import rest, row_counts

# JSON texts as an agent might write them, already compact: each would be another text after a careless parse and dump.
COMPACT = (
    '{"z":1,"a":2,"10":3,"9":4,"\u00e9":5,"e\u0301":6}',
    "[9007199254740993,123456789012345678901234567890,-0,0,-1]",
    "[1.10,1.0,100.00,0.1e-7,-0.0,3.141592653589793238462643383279]",
    "[1E+2,1e2,1E2,1e+02,-1.5E-300,1e400,1E-400]",
    '["\\u0000","\\u001f","\\"","\\\\","\\n\\t\\r\\b\\f"]',
    '["\U0001f600","\U0001f468\u200d\U0001f469\u200d\U0001f467","e\u0301","\u00e9","\u202eabc\u202c","\u2028\u2029","\ufeff","\uffff"]',
    '{"":"","\U0001f600":"\U0001f600","\\u0000":null,"__proto__":{},"constructor":[]}',
    '{"$ref":"payload#/x","more":1}',
    "null",
    "true",
    '""',
    "0",
    "[[[[[[[[]]]]]]]]",
)
# Opaque texts, which need not be JSON at all; a payload is one whatever it holds.
OPAQUE = (
    *COMPACT,
    ' { "b" : 1.10 ,\r\n\t"a":[ 1E+2 ] } ',
    '{"same":1,"same":2}',
    '"\\u00e9\\/\\ud83d\\ude00"',
    "\0\x01\x7f\u0080",
    "",
    " ",
    "caf\u00e9 or cafe\u0301, \U0001f600 \u202e",
    "Infinity",
    "<xml>&amp;</xml>",
)
# What cannot be seen stands in an answer as an escape, which means the same: see test_visible_text.py.
UNSEEN = str.maketrans({character: f"\\u{ord(character):04x}" for character in "\u200d\u202c\u202e\u2028\u2029\ufeff"})


def quoted(text: str, *, is_ascii: bool = False) -> str:
    """Write a JSON string that stands for `text`."""
    return json.dumps(text, ensure_ascii=is_ascii)


async def post(service: Service, path: str, body: str) -> httpx.Response:
    """POST these very characters as the agent."""
    return await service.agent.request("POST", f"/v1/sessions/{path}", content=body.encode(), headers={"Content-Type": "application/json"})


def undo_text(endpoint: FakeEndpoint, args: str) -> str:
    """Write a compensation whose args are these very characters."""
    return f'{{"url":{quoted(endpoint.url("/undo"))},"args":{args}}}'


async def content(service: Service, session_id: str, kind: str) -> list[dict[str, Any]]:
    """Return the contents of a session's journal entries of one kind, oldest first."""
    return [entry["content"] for entry in await service.operator.journal(session_id) if entry["kind"] == kind]


@pytest.mark.parametrize("is_ascii", [False, True])
async def test_payload_is_kept_when_it_is_any_text(*, is_ascii: bool, service: Service, endpoint: FakeEndpoint) -> None:
    """However its string was escaped on the way, what it stood for is stored, hashed, shown and journaled as those bytes."""
    for step, text in enumerate(OPAQUE, start=1):
        body = f'{{"tool":"t","payload":{quoted(text, is_ascii=is_ascii)},"step_index":{step},"compensation":{undo_text(endpoint, "{}")}}}'
        answer = (await post(service, "s/intercept", body)).raise_for_status().json()
        digest = hashlib.sha256(text.encode()).hexdigest()
        assert (answer["payload"], answer["payload_sha256"]) == (text, digest)
        shown = (await service.agent.get(f"/sessions/s/effects/{step}")).json()
        assert (shown["payload"], shown["payload_sha256"]) == (text, digest)
        # A repeat is known by these bytes, and by no others, however alike they look.
        again = await post(service, "s/intercept", body.replace(f',"compensation":{undo_text(endpoint, "{}")}', ""))
        assert (again.status_code, again.json()["decision"]) == (200, "in_flight")
        other = f'{{"tool":"t","payload":{quoted(text + " ")},"step_index":{step}}}'
        assert (await post(service, "s/intercept", other)).json()["code"] == "step_reused"
    assert [effect["payload"] for effect in (await service.agent.session("s"))["effects"]] == list(OPAQUE)
    assert [found["payload"]["text"] for found in await content(service, "s", "INTENT")] == list(OPAQUE)
    assert (await service.operator.get("/sessions/s/journal/verify")).json()["valid"] is True


async def test_args_keep_every_literal_when_they_stand_for_a_payload(service: Service) -> None:
    """Key order and number literals stay, blanks go: the answer gives the text that was stored and hashed."""
    for step, text in enumerate(COMPACT, start=1):
        spaced = spread_out(text)
        body = f'{{"tool":"t","args":{spaced},"step_index":{step},"reversibility":"read_only"}}'
        answer = (await post(service, "s/intercept", body)).raise_for_status().json()
        assert (answer["payload"], answer["payload_sha256"]) == (text, hashlib.sha256(text.encode()).hexdigest())
        as_payload = f'{{"tool":"t","payload":{quoted(text)},"step_index":{step},"reversibility":"read_only"}}'
        assert (await post(service, "s/intercept", as_payload)).json()["decision"] == "in_flight"


def spread_out(text: str) -> str:
    """Put blanks around a JSON text, and inside its outermost brackets."""
    if text[0] in "[{":
        return f" {text[0]}\r\n\t{text[1:-1]} {text[-1]}\n"
    return f" {text} "


async def test_result_keeps_every_literal_wherever_it_is_shown(service: Service) -> None:
    """The commit's answer, the replay of the call, both GETs and the journal show the result as it was reported."""
    for step, text in enumerate(COMPACT, start=1):
        intercept = f'{{"tool":"t","payload":"{{}}","step_index":{step},"reversibility":"read_only"}}'
        (await post(service, "s/intercept", intercept)).raise_for_status()
        answers = [
            await post(service, f"s/effects/{step}/commit", f'{{"result":{spread_out(text)}}}'),
            await post(service, f"s/effects/{step}/commit", f'{{"result":{text}}}'),
            await post(service, "s/intercept", intercept),
            await service.agent.get(f"/sessions/s/effects/{step}"),
            await service.operator.get("/sessions/s"),
        ]
        assert [answer.status_code for answer in answers] == [200] * len(answers)
        assert [f'"result":{text.translate(UNSEEN)}' in answer.content.decode() for answer in answers] == [True] * len(answers), text
    assert [found["result"]["text"] for found in await content(service, "s", "EXECUTED")] == list(COMPACT)
    differing = await post(service, "s/effects/3/commit", '{"result":[1.1,1.0,100.00,0.1e-7,-0.0,3.141592653589793238462643383279]}')
    assert differing.json()["code"] == "result_differs"  # 1.1 is not what was reported: 1.10 was


async def test_undo_arrives_letter_for_letter_when_its_args_are_any_json(service: Service, endpoint: FakeEndpoint) -> None:
    """Args that stand alone, and those bound to payload and result, reach the endpoint as the text they were, and the journal has it."""
    expected = []
    for step, text in enumerate(COMPACT, start=1):
        args = text if step % 2 else '{"k":1E+2,"p":{"$ref":"payload#/deep/0"},"r":{"$ref":"result#/deep"},"é":1.10}'
        payload = quoted(f' {{ "deep" : [ {text} ] }} ')
        body = f'{{"tool":"t","payload":{payload},"step_index":{step},"compensation":{undo_text(endpoint, args)}}}'
        (await post(service, "s/intercept", body)).raise_for_status()
        (await post(service, f"s/effects/{step}/commit", f'{{"result":{{"deep":{text}}}}}')).raise_for_status()
        expected.append(text if step % 2 else f'{{"k":1E+2,"p":{text},"r":{text},"é":1.10}}')
    assert (await rest(service.agent, "s"))["state"] == "compensated"
    assert [request.body.decode() for request in reversed(endpoint.received)] == expected
    assert [found["args"]["text"] for found in reversed(await content(service, "s", "COMPENSATING"))] == expected


LONE: Sequence[str] = ('"\\ud800"', '"a\\udc00b"', '"\\ude00\\ud83d"', '{"\\ud83d":1}')


async def test_half_a_character_is_refused_wherever_it_stands(service: Service, endpoint: FakeEndpoint) -> None:
    """A lone surrogate has no UTF-8: no field takes one, the problem points there, and nothing is stored."""
    intercept = f'{{"tool":"t","payload":"{{}}","step_index":1,"compensation":{undo_text(endpoint, "{}")}}}'
    (await post(service, "s/intercept", intercept)).raise_for_status()
    before = await row_counts(service.database_url)
    for lone in LONE:
        places = {
            ("s/intercept", "/payload"): f'{{"tool":"t","payload":{lone},"step_index":2}}',
            ("s/intercept", "/args"): f'{{"tool":"t","args":{lone},"step_index":2}}',
            ("s/intercept", "/compensation/args"): f'{{"tool":"t","args":1,"step_index":2,"compensation":{undo_text(endpoint, lone)}}}',
            ("s/effects/1/commit", "/result"): f'{{"result":{lone}}}',
            ("s/effects/1/fail", "/error"): f'{{"error":{lone}}}',
            ("s/fail", "/error"): f'{{"error":{lone}}}',
        }
        for (path, pointer), body in places.items():
            problem = (await post(service, path, body)).json()
            assert (problem["status"], problem["code"]) == (400, "malformed_json"), (path, lone)
            assert problem["errors"][0]["pointer"].startswith(pointer), (pointer, problem)
    assert await row_counts(service.database_url) == before
