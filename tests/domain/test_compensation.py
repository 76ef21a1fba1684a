"""A descriptor survives being written and read. Must not test how it is used."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import compensation
from app.domain.json_text import NumberLiteral, dump
from app.domain.model import Compensation, OnUnknown, RetryPolicy, UnknownVariant

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ARGS: st.SearchStrategy[bytes] = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | TEXTS | st.sampled_from(["1.50", "1e400", "-0"]).map(NumberLiteral),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
).map(dump)
STATUSES = st.frozensets(st.integers(100, 599), max_size=4)
POLICIES = st.builds(
    RetryPolicy,
    max_retries=st.integers(0, 100),
    initial_interval_ms=st.integers(0, 86_400_000),
    multiplier=st.floats(1, 100),
    max_interval_ms=st.integers(0, 86_400_000),
    timeout_ms=st.integers(1, 600_000),
    deadline_ms=st.integers(1, 10**10),
    retry_on=STATUSES,
    compensated_on=STATUSES,
)
COMPENSATIONS = st.builds(
    Compensation,
    url=TEXTS,
    args=ARGS,
    description=TEXTS,
    unknown=st.none() | st.builds(UnknownVariant, args=ARGS, url=st.none() | TEXTS),
    on_unknown=st.sampled_from(OnUnknown),
    independent=st.booleans(),
    settle_ms=st.integers(0, 86_400_000),
    retry=POLICIES,
)
WHOLE = compensation.write(Compensation(url="https://a.example/", args=b"{}"))


@given(COMPENSATIONS)
def test_read_gives_back_what_write_was_given(descriptor: Compensation) -> None:
    """Every field and every literal of the args comes back as it was, for years."""
    text = compensation.write(descriptor)
    assert compensation.read(text) == descriptor
    assert compensation.write(compensation.read(text)) == text


def test_write_is_stable_when_written_again_by_a_later_version() -> None:
    """Rows written today are read by every later version: a change of this text needs a reader for the old one."""
    descriptor = Compensation(
        url="https://a.example/u",
        args=b'{"b":1.50,"a":{"$ref":"result#/id"}}',
        unknown=UnknownVariant(args=b"[]"),
        retry=RetryPolicy(multiplier=1.5, retry_on=frozenset({409, 404})),
    )
    assert compensation.write(descriptor) == (
        b'{"url":"https://a.example/u","args":{"b":1.50,"a":{"$ref":"result#/id"}},"description":"",'
        b'"unknown":{"args":[],"url":null},"on_unknown":"compensate","independent":false,"settle_ms":0,"max_retries":3,'
        b'"initial_interval_ms":100,"multiplier":1.5,"max_interval_ms":5000,"timeout_ms":10000,"deadline_ms":86400000,'
        b'"retry_on":[404,409],"compensated_on":[]}'
    )


# Members that came later: rows that were kept before have none.
LATER = {"settle_ms": 0}


@pytest.mark.parametrize("name", LATER)
def test_read_takes_the_default_when_the_row_is_older_than_the_member(name: str) -> None:
    """What was registered before an upgrade is undone after it, as it was meant then."""
    members: dict[str, Any] = json.loads(WHOLE)
    del members[name]
    assert getattr(compensation.read(json.dumps(members).encode()), name) == LATER[name]


@pytest.mark.parametrize("name", [name for name in json.loads(WHOLE) if name not in LATER])
def test_read_refuses_when_a_member_is_missing(name: str) -> None:
    """A spoilt row is found when it is read, not when half of it has been sent."""
    members: dict[str, Any] = json.loads(WHOLE)
    del members[name]
    with pytest.raises(KeyError):
        compensation.read(json.dumps(members).encode())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_retries", "3"),
        ("multiplier", "2"),
        ("deadline_ms", None),
        ("retry_on", 404),
        ("retry_on", ["404"]),
        ("on_unknown", "hope"),
        ("settle_ms", None),
    ],
)
def test_read_refuses_when_a_member_is_no_such_thing(name: str, value: object) -> None:
    """A wrong type is never read as a default."""
    members: dict[str, Any] = json.loads(WHOLE)
    members[name] = value
    with pytest.raises((TypeError, ValueError)):
        compensation.read(json.dumps(members).encode())


@pytest.mark.parametrize("text", [b"[]", b"null", b"", b"{", b'{"url":1,"url":2}', b"\xff"])
def test_read_refuses_when_the_text_is_no_object(text: bytes) -> None:
    """Whatever else stands in the column is an error of one row."""
    with pytest.raises((TypeError, ValueError)):
        compensation.read(text)


@pytest.mark.parametrize("text", [b"[]", b"", b"\xff", b"{}", WHOLE.replace(b'"max_retries":3', b'"max_retries":"3"')])
def test_kept_text_is_said_to_be_unreadable_when_it_is_not_ours(text: bytes) -> None:
    """One spoilt descriptor must not spoil what is read along with it; nothing could ever be sent for it."""
    found = compensation.read_kept(text)
    assert not found.is_readable
    assert found.url.startswith("http://unreadable.invalid/")
    assert compensation.read_kept(WHOLE) == compensation.read(WHOLE)
