"""What cannot be seen on a terminal is shown as an escape, and means the same. Must not test what a terminal does."""

import unicodedata

import pytest

from tests.factories import Service

HIDDEN = "\u202e\u200b\ufeff\u2028\u00ad\u061c\u2066\u009b\U000e0041"


@pytest.mark.parametrize("path", ["/approvals?state=pending", "/sessions/run-1", "/sessions/run-1/effects/1"])
async def test_answer_shows_hidden_characters_when_a_payload_holds_them(service: Service, path: str) -> None:
    """A person approves what the terminal shows: nothing in a payload may turn text round or stay unseen, and nothing of it is lost."""
    payload = f'{{"to":"alice{HIDDEN}","city":"Z\u00fcrich"}}'
    parked = await service.agent.intercept("run-1", tool="send_wire", step_index=1, payload=payload, reversibility="irreversible")
    assert parked.json()["payload"] == payload
    answer = await service.operator.get(path)
    assert {unicodedata.category(character) for character in answer.text} & {"Cc", "Cf", "Zl", "Zp"} == set()
    assert "\u00fc" in answer.text, "what can be seen stays as it is"
    found = answer.json()
    effect = found["items"][0] if "items" in found else found["effects"][0] if "effects" in found else found
    assert effect["payload"] == payload
