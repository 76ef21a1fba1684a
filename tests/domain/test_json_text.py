"""JSON text is read strictly, kept without loss, and refused with its place. Must not test what the API makes of a fault."""

import json
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.domain.json_text import (
    MAX_POINTER_CHARACTERS,
    Json,
    JsonFault,
    JsonFaultReason,
    NumberLiteral,
    canonical,
    dump,
    fits,
    parse,
    pointer_text,
)

MEBIBYTE = 1 << 20

PLAIN_INTS = st.integers(min_value=-(10**18) + 1, max_value=10**18 - 1)
BIG_INTS = st.integers(min_value=10**18).map(str) | st.integers(max_value=-(10**18)).map(str)
FRACTIONS = st.from_regex(r"-?(0|[1-9][0-9]{0,5})(\.[0-9]{1,6})([eE][+-]?[0-9]{1,3})?", fullmatch=True)
EXPONENTS = st.from_regex(r"-?(0|[1-9][0-9]{0,5})[eE][+-]?[0-9]{1,3}", fullmatch=True)
LITERAL_TEXTS = BIG_INTS | FRACTIONS | EXPONENTS | st.just("-0")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN_SCALARS: st.SearchStrategy[Json] = st.none() | st.booleans() | PLAIN_INTS | TEXTS
SCALARS: st.SearchStrategy[Json] = PLAIN_SCALARS | LITERAL_TEXTS.map(NumberLiteral)


def trees(leaves: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    """Build JSON values over the given leaves."""
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=20)


HOSTILE = [
    pytest.param(b"", "", "syntax", id="empty"),
    pytest.param(b" \t\r\n", "", "syntax", id="only-spaces"),
    pytest.param(b"\xef\xbb\xbf{}", "", "byte_order_mark", id="utf8-bom"),
    pytest.param(b"\xff\xfe{\x00}\x00", "", "not_utf8", id="utf16-bom"),
    pytest.param(b'{"a":"\xff"}', "", "not_utf8", id="stray-byte"),
    pytest.param(b'"\xc0\xaf"', "", "not_utf8", id="overlong-slash"),
    pytest.param(b'"\xed\xa0\x80"', "", "not_utf8", id="surrogate-in-utf8"),
    pytest.param(b'"\xf4\x90\x80\x80"', "", "not_utf8", id="beyond-unicode"),
    pytest.param(b'"\xe2\x82"', "", "not_utf8", id="cut-in-a-character"),
    pytest.param(b"{\x00}", "", "syntax", id="raw-nul"),
    pytest.param(b'"a\nb"', "", "syntax", id="raw-newline-in-string"),
    pytest.param(b'"\x1f"', "", "syntax", id="raw-control-in-string"),
    pytest.param("{}\u00a0".encode(), "", "syntax", id="no-break-space"),
    pytest.param("\ufeff{}".encode()[1:], "", "not_utf8", id="half-a-bom"),
    pytest.param(b"{}{}", "", "syntax", id="two-values"),
    pytest.param(b"{} x", "", "syntax", id="trailing-word"),
    pytest.param(b"[1,]", "", "syntax", id="trailing-comma"),
    pytest.param(b'{"a":1,}', "", "syntax", id="trailing-comma-in-object"),
    pytest.param(b"{'a':1}", "", "syntax", id="single-quotes"),
    pytest.param(b"{a:1}", "", "syntax", id="bare-key"),
    pytest.param(b"{1:2}", "", "syntax", id="number-as-key"),
    pytest.param(b"[1 2]", "", "syntax", id="no-comma"),
    pytest.param(b"// c\n{}", "", "syntax", id="comment"),
    pytest.param(b"True", "", "syntax", id="python-true"),
    pytest.param(b"undefined", "", "syntax", id="undefined"),
    pytest.param(b"01", "", "syntax", id="leading-zero"),
    pytest.param(b"-01", "", "syntax", id="minus-leading-zero"),
    pytest.param(b"+1", "", "syntax", id="plus"),
    pytest.param(b"1.", "", "syntax", id="no-digits-after-the-point"),
    pytest.param(b".5", "", "syntax", id="no-digits-before-the-point"),
    pytest.param(b"1e", "", "syntax", id="no-exponent"),
    pytest.param(b"0x10", "", "syntax", id="hexadecimal"),
    pytest.param(b"1_000", "", "syntax", id="underscore"),
    pytest.param("\u0661".encode(), "", "syntax", id="arabic-digit"),
    pytest.param(b'"\\x41"', "", "syntax", id="unknown-escape"),
    pytest.param(b'"\\u12"', "", "syntax", id="short-escape"),
    pytest.param(b'"\\u+123"', "", "syntax", id="signed-escape"),
    pytest.param(b'"open', "", "syntax", id="unterminated-string"),
    pytest.param(b"[" * 64, "", "syntax", id="unclosed-at-the-limit"),
    pytest.param(b"[" * 65, "", "too_deep", id="unclosed-above-the-limit"),
    pytest.param(b"]" * 100, "", "syntax", id="only-closing"),
    pytest.param(b"[}" * 100, "", "syntax", id="mismatched"),
    pytest.param(b"NaN", "", "not_a_number", id="nan"),
    pytest.param(b"[" + b"1" * 5000 + b",NaN]", "/1", "not_a_number", id="nan-beside-a-long-int"),
    pytest.param(b'{"a":[0,-Infinity]}', "/a/1", "not_a_number", id="minus-infinity"),
    pytest.param(b'{"a":Infinity,"a":1}', "/a", "duplicate_key", id="infinity-hidden-by-its-twin"),
    pytest.param(b'{"a":1,"a":1}', "/a", "duplicate_key", id="same-key-same-value"),
    pytest.param(b'{"a":1,"\\u0061":2}', "/a", "duplicate_key", id="same-key-escaped"),
    pytest.param(b'{"x":[{},{"a/b~":{"":1,"":2}}]}', "/x/1/a~1b~0/", "duplicate_key", id="nested-duplicate"),
    pytest.param(b'["\\ud800"]', "/0", "lone_surrogate", id="high-surrogate"),
    pytest.param(b'{"a":"x\\uDFFFy"}', "/a", "lone_surrogate", id="low-surrogate"),
    pytest.param(b'{"a":"\\ude00\\ud83d"}', "/a", "lone_surrogate", id="pair-reversed"),
    pytest.param(b'{"a":{"\\ud800":1}}', "/a", "lone_surrogate", id="surrogate-in-key"),
    pytest.param(b'{"\\ud800":1,"\\ud800":2}', "", "lone_surrogate", id="surrogate-in-duplicate-key"),
    pytest.param(b"[" * 65 + b"]" * 65, "", "too_deep", id="one-level-too-deep"),
    pytest.param(b'{"a":' * 65 + b"1" + b"}" * 65, "", "too_deep", id="objects-too-deep"),
    pytest.param(b'["\\"]",' + b"[" * 64 + b"]" * 65, "", "too_deep", id="bracket-in-string-hides-nothing"),
    pytest.param(b"[" * MEBIBYTE, "", "too_deep", id="megabyte-of-brackets"),
    pytest.param(b'{"a":' * (MEBIBYTE // 5), "", "too_deep", id="megabyte-of-objects"),
]


@pytest.mark.parametrize(("body", "pointer", "reason"), HOSTILE)
def test_parse_refuses_with_the_place_when_the_body_is_hostile(body: bytes, pointer: str, reason: str) -> None:
    """No body with no meaning, or two, gets through, and the caller learns where the fault is."""
    with pytest.raises(JsonFault) as caught:
        parse(body)
    assert (caught.value.pointer, caught.value.reason) == (pointer, JsonFaultReason(reason))
    assert caught.value.detail


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b" \t\r\n{} ", {}),
        (b'"\\u0000"', "\0"),
        (b'"\\ud83d\\ude00"', "\U0001f600"),
        (b'"\\\\ud800"', "\\ud800"),
        ('"\u2028\ufeff"'.encode(), "\u2028\ufeff"),
        (b"[" * 64 + b"]" * 64, None),
        (b'["' + b"[" * 1000 + b'"]', ["[" * 1000]),
        (b"[" + b"[]," * 1000 + b"[]]", [[]] * 1001),
        (b'{"a":1,"A":2,"\\u00e4":3,"a\\u0308":4}', {"a": 1, "A": 2, "\u00e4": 3, "a\u0308": 4}),
    ],
)
def test_parse_accepts_when_the_body_is_unusual_and_right(body: bytes, value: Json) -> None:
    """Strictness refuses nothing that RFC 8259 and the depth limit allow."""
    found = parse(body)
    assert value is None or found == value


def test_parse_names_line_and_column_when_the_syntax_is_wrong() -> None:
    """A person finds the fault in their own file."""
    with pytest.raises(JsonFault, match="line 3 column 7"):
        parse(b'{\n "a": 1,\n "b": x\n}')


def test_parse_points_to_an_ancestor_when_the_pointer_would_be_too_long() -> None:
    """Hostile keys do not blow up problems and logs."""
    key = "k" * MAX_POINTER_CHARACTERS
    with pytest.raises(JsonFault) as caught:
        parse(f'{{"a":{{"{key}":1,"{key}":2}}}}'.encode())
    assert caught.value.pointer == "/a"


def test_parse_says_too_deep_when_the_limit_is_beyond_the_interpreter() -> None:
    """A limit set too high ends in a fault all the same, not in a crash."""
    with pytest.raises(JsonFault) as caught:
        parse(b"[" * 100_000 + b"]" * 100_000, max_depth=200_000)
    assert caught.value.reason is JsonFaultReason.TOO_DEEP


@pytest.mark.parametrize("depth", [0, 1, 2, 7])
def test_parse_counts_levels_when_another_limit_is_given(depth: int) -> None:
    """The limit is the number of arrays and objects around the innermost value."""
    parse(b"[" * depth + b"1" + b"]" * depth, max_depth=depth)
    with pytest.raises(JsonFault):
        parse(b"[" * (depth + 1) + b"]" * (depth + 1), max_depth=depth)


@given(st.binary(max_size=60) | TEXTS.map(str.encode) | st.text('[]{}",:\\ueE0123456789aDd-+.tfn \n', max_size=40).map(str.encode))
def test_parse_never_raises_anything_else_when_fed_noise(data: bytes) -> None:
    """Whatever arrives is either a value that can be written again or a JsonFault."""
    try:
        value = parse(data)
    except JsonFault:
        return
    assert parse(dump(value)) == value


@given(trees(SCALARS))
@example({"\u2028": ["\x7f", "\0", "\U0001f600", NumberLiteral("-0"), NumberLiteral("1E+2")]})
def test_parse_gives_the_same_value_back_when_it_was_dumped(value: Json) -> None:
    """Writing and reading lose nothing, key order included."""
    text = dump(value)
    assert parse(text) == value
    assert dump(parse(text)) == text


@given(st.lists(LITERAL_TEXTS | PLAIN_INTS.map(str)))
def test_dump_keeps_every_literal_when_numbers_were_parsed(literals: list[str]) -> None:
    """A number goes out letter for letter as it came in."""
    text = f"[{','.join(literals)}]".encode()
    assert dump(parse(text)) == text


@given(trees(PLAIN_SCALARS))
def test_dump_means_the_same_to_another_parser_when_read_by_it(value: Json) -> None:
    """What we write is what the standard library reads."""
    assert json.loads(dump(value)) == value


def test_dump_keeps_the_order_when_keys_are_not_sorted() -> None:
    """Members go out in the order in which they came in."""
    assert dump(parse(b'{"b":1,"a":{"d":[],"c":{}}}')) == b'{"b":1,"a":{"d":[],"c":{}}}'


def test_dump_escapes_only_what_it_must_when_given_odd_characters() -> None:
    """Control characters, quotes and backslashes are escaped; everything else stands as it is."""
    assert dump({"\u00e9\n": '\0\x1f"\\/\x7f\u2028'}) == '{"\u00e9\\n":"\\u0000\\u001f\\"\\\\/\x7f\u2028"}'.encode()


@pytest.mark.parametrize("value", [1.5, float("nan"), {1: "a"}, {"a": (1,)}, [b"a"], {"a": {2}}])
def test_dump_refuses_when_the_type_is_not_json(value: Json) -> None:
    """Nothing is rounded, renamed or guessed on the way out."""
    with pytest.raises(TypeError):
        dump(value)


@pytest.mark.parametrize("write", [dump, canonical])
def test_writing_refuses_when_a_string_has_half_a_pair(write: Callable[[Json], bytes]) -> None:
    """A text that is not UTF-8 is never made."""
    with pytest.raises(ValueError, match="surrogate"):
        write("\ud800")


@given(st.dictionaries(TEXTS, trees(PLAIN_SCALARS)), st.randoms())
def test_canonical_is_one_text_when_keys_come_in_any_order(members: dict[str, Json], random: Random) -> None:
    """The same body always gives the same bytes, sorted by code point."""
    keys = list(members)
    random.shuffle(keys)
    text = canonical({key: members[key] for key in keys})
    assert text == canonical(members)
    assert parse(text) == members
    assert list(json.loads(text)) == sorted(members)


def test_canonical_sorts_by_code_point_when_utf16_would_differ() -> None:
    """U+1F600 comes after U+FFFD, though its first UTF-16 unit is smaller."""
    assert canonical({"\U0001f600": 1, "\ufffd": 2}) == '{"\ufffd":2,"\U0001f600":1}'.encode()


@pytest.mark.parametrize("value", [NumberLiteral("1.0"), {"a": [NumberLiteral("-0")]}, 0.5])
def test_canonical_refuses_when_a_number_is_no_int(value: object) -> None:
    """Equal numbers with different texts cannot enter a hashed body."""
    with pytest.raises(TypeError):
        canonical(value)


@pytest.mark.parametrize("text", ["1.0", "1.00", "1e0", "1E0", "-0", "-0.0", "1234567890123456789", "-1234567890123456789", "1e999"])
def test_number_literal_keeps_its_text_when_an_int_would_not(text: str) -> None:
    """Literals are equal by text and still usable as numbers."""
    literal = NumberLiteral(text)
    assert parse(text.encode()) == literal
    assert {literal: 1}[NumberLiteral(text)] == 1
    assert float(literal) == float(text)


@pytest.mark.parametrize(
    "text", ["", "1", "0", "-7", "999999999999999999", "01", "1.", ".5", "+1", "NaN", "1e", "1.0 ", "\u0661.5", "1,2", "--1"]
)
def test_number_literal_refuses_when_the_text_is_plain_or_no_number(text: str) -> None:
    """No text can be smuggled into a document as a number, and no int has two forms."""
    with pytest.raises(ValueError, match="expected"):
        NumberLiteral(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("999999999999999999", int),
        ("-999999999999999999", int),
        ("1000000000000000000", NumberLiteral),
        ("-1000000000000000000", NumberLiteral),
        ("9" * 5000, NumberLiteral),
    ],
)
def test_parse_gives_an_int_when_it_has_up_to_18_digits(text: str, expected: type) -> None:
    """Long ints stay text, so none is too long to be read."""
    assert type(parse(text.encode())) is expected


@pytest.mark.parametrize(("tokens", "pointer"), [((), ""), (("",), "/"), (("a/b", "~", 0), "/a~1b/~0/0"), (("~1",), "/~01")])
def test_pointer_text_escapes_when_tokens_hold_its_own_signs(tokens: tuple[str | int, ...], pointer: str) -> None:
    """Pointers follow RFC 6901."""
    assert pointer_text(tokens) == pointer


@given(trees(SCALARS))
def test_fits_agrees_with_dump_when_the_limit_is_its_length(value: Json) -> None:
    """The size is counted without making the text, to the byte."""
    length = len(dump(value))
    assert fits(value, max_bytes=length)
    assert not fits(value, max_bytes=length - 1)


def test_fits_says_no_early_when_a_small_value_stands_for_terabytes() -> None:
    """Shared parts are counted as often as they would be written, and counting stops at the limit."""
    value: Json = "x" * 1024
    for _ in range(30):
        value = [value, value]
    assert not fits(value, max_bytes=MEBIBYTE)


@pytest.mark.parametrize(("depth", "is_fitting"), [(64, True), (65, False)])
def test_fits_judges_depth_as_parse_does_when_arrays_nest(depth: int, *, is_fitting: bool) -> None:
    """What fits can be read again."""
    value: Json = 1
    for _ in range(depth):
        value = [value]
    assert fits(value, max_bytes=1000) is is_fitting
