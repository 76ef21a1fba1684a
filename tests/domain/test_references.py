"""References in a compensation's args are found, bound, left open or missed. Must not test when the engine binds."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.json_text import Json, NumberLiteral, dump, parse, pointer_text
from app.domain.references import UNREADABLE, BadReference, Bound, Document, Reference, Source, bind

# The document of RFC 6901, section 5, and what each of its pointers leads to.
RFC_6901: Json = {"foo": ["bar", "baz"], "": 0, "a/b": 1, "c%d": 2, "e^f": 3, "g|h": 4, "i\\j": 5, 'k"l': 6, " ": 7, "m~n": 8}
RFC_6901_ANSWERS: list[tuple[str, Json]] = [
    ("", RFC_6901),
    ("/foo", ["bar", "baz"]),
    ("/foo/0", "bar"),
    ("/", 0),
    ("/a~1b", 1),
    ("/c%d", 2),
    ("/e^f", 3),
    ("/g|h", 4),
    ("/i\\j", 5),
    ('/k"l', 6),
    ("/ ", 7),
    ("/m~0n", 8),
]

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
VALUES: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS | st.just(NumberLiteral("1.50")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.just("$ref"), inner, max_size=3),
    max_leaves=12,
)


def reference_to(source: Source, pointer: str) -> Json:
    """Write a reference as a descriptor does."""
    return {"$ref": f"{source}#{pointer}"}


@pytest.mark.parametrize(("pointer", "expected"), RFC_6901_ANSWERS)
def test_bind_follows_when_the_pointer_is_the_rfcs(pointer: str, expected: Json) -> None:
    """Every example of RFC 6901 leads where it says."""
    bound = bind({"x": reference_to(Source.RESULT, pointer)}, {Source.RESULT: RFC_6901})
    assert bound == Bound(args={"x": expected}, open=(), missing=())


@pytest.mark.parametrize(
    "pointer",
    ["/nope", "/foo/2", "/foo/-", "/foo/00", "/foo/01", "/foo/-1", "/foo/+1", "/foo/1.0", "/foo/1e0", "/foo/\u0661", "/foo/0/0", "/foo/",
     "/a~1b/0", "//x", "/foo/" + "9" * 5000, "/c%25d", "/foo/length"],
)  # fmt: skip
def test_bind_reports_missing_when_the_pointer_leads_nowhere(pointer: str) -> None:
    """A pointer that finds nothing is named, and its reference stays as it was."""
    args: Json = {"x": [reference_to(Source.RESULT, pointer)]}
    bound = bind(args, {Source.RESULT: RFC_6901})
    assert bound == Bound(args=args, open=(), missing=(Reference(source=Source.RESULT, pointer=pointer, where="/x/0"),))


@pytest.mark.parametrize(
    ("document", "pointer", "expected"),
    [
        ({"~1": "right", "/": "wrong"}, "/~01", "right"),
        ({"~0": "right", "~": "wrong"}, "/~00", "right"),
        ({"a": {"": {"": "right"}}}, "/a//", "right"),
        (["x"] * 120 + ["right"], "/120", "right"),
        ({"11": "right"}, "/11", "right"),
        ({"-": "right", "01": "wrong"}, "/-", "right"),
    ],
)
def test_bind_follows_when_the_pointer_is_tricky(document: Json, pointer: str, expected: Json) -> None:
    """Escapes are undone once and in order, and what is an index of an array is a plain key of an object."""
    assert bind(reference_to(Source.RESULT, pointer), {Source.RESULT: document}).args == expected


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_bind_finds_a_value_when_it_is_empty(value: Json) -> None:
    """Null and its kin are values, not absences."""
    assert bind(reference_to(Source.RESULT, "/x"), {Source.RESULT: {"x": value}}) == Bound(args=value, open=(), missing=())
    assert bind(reference_to(Source.RESULT, ""), {Source.RESULT: value}) == Bound(args=value, open=(), missing=())


def test_bind_keeps_literals_when_numbers_are_bound() -> None:
    """An amount of 25.00 stays 25.00, and an id of twenty digits keeps them all."""
    result = parse(b'{"amount":25.00,"id":12345678901234567890,"zero":-0}')
    args = parse(b'{"a":{"$ref":"result#/amount"},"b":{"$ref":"result#/id"},"c":{"$ref":"result#/zero"},"d":1.0}')
    assert dump(bind(args, {Source.RESULT: result}).args) == b'{"a":25.00,"b":12345678901234567890,"c":-0,"d":1.0}'


def test_bind_leaves_open_when_the_document_is_not_known_yet() -> None:
    """What only the result can say waits, in the order of the text, and the rest is bound."""
    args: dict[str, Json] = {
        "key": reference_to(Source.EFFECT, "/forward_key"),
        "ids": [reference_to(Source.RESULT, "/a~1b"), 1, reference_to(Source.RESULT, "")],
        "order": reference_to(Source.PAYLOAD, "/order"),
        "gone": reference_to(Source.PAYLOAD, "/gone"),
    }
    bound = bind(args, {Source.EFFECT: {"forward_key": "effect-1"}, Source.PAYLOAD: {"order": 4921}})
    assert bound.args == {**args, "key": "effect-1", "order": 4921}
    assert [str(reference) for reference in bound.open] == ["result#/a~1b", "result#"]
    assert [reference.where for reference in bound.open] == ["/ids/0", "/ids/2"]
    assert [reference.where for reference in bound.missing] == ["/gone"]


@pytest.mark.parametrize("pointer", ["", "/x"])
def test_bind_reports_missing_when_the_document_is_not_json(pointer: str) -> None:
    """A payload of plain text has nothing that could be pointed at, not even as a whole."""
    bound = bind(reference_to(Source.PAYLOAD, pointer), {Source.PAYLOAD: UNREADABLE})
    assert [reference.pointer for reference in bound.missing] == [pointer]


@pytest.mark.parametrize(
    "text",
    ["", "#", "#/a", "result", "result/a", "result#a", "result#/~", "result#/~2", "result#/a~", "Result#/a", " result#/a", "results#/a",
     "result##/a", "result#/a\ud800~", "https://schemas.example/credit.json", "effect_#", "x" * 10_000, "result#" + "/a" * 9 + "~3"],
)  # fmt: skip
def test_bind_refuses_when_a_ref_is_no_reference(text: str) -> None:
    """A misspelt reference is found when it is registered, not sent as data."""
    with pytest.raises(BadReference) as caught:
        bind({"a/b": [{"$ref": text}]}, {})
    assert caught.value.pointer == "/a~1b/0"
    assert len(caught.value.detail) < 400


@pytest.mark.parametrize(
    "args",
    [
        {"$ref": "#/a", "note": "a schema's own reference is data"},
        {"$ref": 1},
        {"$ref": None},
        {"$ref": ["result#/a"]},
        {"ref": "result#/a"},
        {"$REF": "result#/a"},
        "result#/a",
        ["$ref", "result#/a"],
        {},
    ],
)
def test_bind_changes_nothing_when_an_object_is_no_reference(args: Json) -> None:
    """Only an object with that single key and a string is a reference."""
    assert bind(args, {Source.RESULT: {"a": 1}}) == Bound(args=args, open=(), missing=())


def test_bind_refuses_when_a_reference_is_not_alone_in_its_object() -> None:
    """What was meant to be bound would be sent as it stands."""
    with pytest.raises(BadReference, match=r"found beside it: note") as caught:
        bind({"x": [{"note": "two members", "$ref": "result#/a"}]}, {})
    assert caught.value.pointer == "/x/0"


def test_bind_looks_deeper_when_a_ref_holds_an_object() -> None:
    """A `$ref` that is no reference itself is data like any other, and searched like it."""
    args: Json = {"$ref": {"$ref": "result#/a"}}
    assert bind(args, {Source.RESULT: {"a": 1}}).args == {"$ref": 1}


@pytest.mark.parametrize("injected", ["effect#/forward_key", "result#/secret", "payload#/injected", "not a reference at all", "result#/~9"])
def test_bind_does_not_search_again_when_a_bound_value_looks_like_a_reference(injected: str) -> None:
    """An agent's payload cannot pull in other documents, nor break the undo with a schema of its own."""
    documents: dict[Source, Document] = {
        Source.PAYLOAD: {"injected": {"deep": [{"$ref": injected}]}},
        Source.EFFECT: {"forward_key": "effect-1"},
        Source.RESULT: {"secret": "s"},
    }
    bound = bind({"x": reference_to(Source.PAYLOAD, "/injected")}, documents)
    assert bound == Bound(args={"x": {"deep": [{"$ref": injected}]}}, open=(), missing=())


@given(VALUES, VALUES)
def test_bind_leaves_its_inputs_alone_when_it_binds(inner: Json, result: Json) -> None:
    """Args and documents are only read, and the bound value is the document's, whatever it looks like."""
    args: Json = {"x": [reference_to(Source.RESULT, "")], "y": 1}
    documents = {Source.RESULT: result, Source.PAYLOAD: inner}
    before = copy.deepcopy((args, documents))
    assert bind(args, documents) == Bound(args={"x": [result], "y": 1}, open=(), missing=())
    assert (args, documents) == before


@given(VALUES, st.lists(TEXTS | st.integers(0, 3), max_size=4))
def test_bind_agrees_with_a_plain_walk_when_the_pointer_is_any(document: Json, path: list[str | int]) -> None:
    """Following a pointer is following its tokens, one member or item at a time."""
    place: Json = document
    is_found = True
    for token in path:
        if isinstance(place, dict) and str(token) in place:
            place = place[str(token)]
        elif isinstance(place, list) and str(token) in {str(index) for index in range(len(place))}:
            place = place[int(token)]
        else:
            is_found = False
            break
    bound = bind(reference_to(Source.PAYLOAD, pointer_text(path)), {Source.PAYLOAD: document})
    assert bool(bound.missing) is not is_found
    assert bound.args == (place if is_found else reference_to(Source.PAYLOAD, pointer_text(path)))


def test_bind_stays_small_when_many_references_share_one_payload() -> None:
    """Binding copies nothing, so hostile args cost memory only once they are written, which the caller bounds."""
    payload: Json = ["x" * 1000] * 1000
    bound = bind([reference_to(Source.PAYLOAD, "")] * 10_000, {Source.PAYLOAD: payload})
    assert isinstance(bound.args, list)
    assert all(item is payload for item in bound.args)
