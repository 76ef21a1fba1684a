"""The journal's bytes are those of docs/reference/journal-format.md, and no change to them goes unseen. Must not touch storage."""

import hashlib
import json
import re
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.journal import (
    GENESIS,
    Entry,
    MalformedEntry,
    Sealed,
    Verification,
    compute_digest,
    content_digest,
    entry_json,
    export_line,
    read_line,
    seal,
    time_text,
    verify,
    verify_lines,
)
from app.domain.json_text import parse
from app.domain.model import EntryKind, JournalHead, OrgName, SessionId

DOCUMENT = (Path(__file__).parents[2] / "docs" / "reference" / "journal-format.md").read_text(encoding="utf-8")
ORG = OrgName("acme")
SESSION = SessionId("refund-4921")
START = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
EMPTY = JournalHead(seq=0, digest=GENESIS, at=None)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NAMES = st.sampled_from(["payload", "result", "args"])
ENTRIES = st.builds(
    Entry,
    kind=st.sampled_from(EntryKind),
    step=st.none() | st.integers(1, 2**31 - 1),
    actor=TEXTS,
    body=st.dictionaries(TEXTS.map(lambda name: f"{name}."), TEXTS | st.integers(0, 9) | st.none() | st.booleans(), max_size=3),
    contents=st.dictionaries(NAMES, TEXTS.map(str.encode), max_size=2),
)


def salts() -> Callable[[], bytes]:
    """Deal salts that differ and are the same on every run."""
    numbers = iter(range(1 << 20))
    return lambda: hashlib.sha256(str(next(numbers)).encode()).digest()[:16]


def chain(entries: Sequence[Entry]) -> list[Sealed]:
    """Seal entries one by one, a second apart."""
    sealed: list[Sealed] = []
    head = EMPTY
    new_salt = salts()
    for number, entry in enumerate(entries):
        sealed += seal(ORG, SESSION, head, [entry], START + timedelta(seconds=number), new_salt)
        head = head_of(sealed)
    return sealed


def head_of(sealed: Sequence[Sealed]) -> JournalHead:
    """Return the head that a session with these entries has."""
    return JournalHead(seq=sealed[-1].seq, digest=sealed[-1].digest, at=datetime.fromisoformat(sealed[-1].at)) if sealed else EMPTY


def plain(kind: EntryKind = EntryKind.INTENT, *, step: int | None = 1) -> Entry:
    """Make an entry with a body and one content."""
    return Entry(kind=kind, step=step, actor="agent:mika", body={"tool": "issue_credit"}, contents={"payload": b'{"amount":25.00}'})


def resealed(sealed: Sequence[Sealed]) -> list[Sealed]:
    """Link entries anew, as somebody with write access to the journal could."""
    linked: list[Sealed] = []
    for entry in sealed:
        unsealed = replace(entry, prev_hash=linked[-1].digest if linked else GENESIS)
        linked.append(replace(unsealed, digest=compute_digest(ORG, SESSION, unsealed)))
    return linked


CHAINS = st.lists(ENTRIES, min_size=1, max_size=5).map(chain)


def first_bad(sealed: Sequence[Sealed], head: JournalHead | None) -> int | None:
    """Verify and return where the first fault is."""
    found = verify(ORG, SESSION, sealed, head)
    assert found.valid is (found.first_bad_seq is None)
    assert found.entry_count == len(sealed)
    return found.first_bad_seq


def fenced(language: str) -> str:
    """Return the one block of that language in the document."""
    (block,) = re.findall(rf"^```{language}\n(.*?)\n```$", DOCUMENT, re.DOTALL | re.MULTILINE)
    return str(block)


def second_verifier(org: str, session: str, lines: str, head: dict[str, str | int] | None) -> int | None:
    """Verify an export knowing only docs/reference/journal-format.md; return the first bad seq."""
    place, last_hash, last_at = 0, "0" * 64, ""
    for line in lines.removesuffix("\n").split("\n") if lines else []:
        place += 1
        entry = json.loads(line)
        step = "" if entry["step"] is None else str(entry["step"])
        texts = ["countermand.journal.v1", org, session, str(entry["seq"]), entry["kind"], step]
        texts += [entry["actor"], entry["at"], entry["body"], entry["prev_hash"]]
        hashed = b"".join(len(text.encode()).to_bytes(4, "big") + text.encode() for text in texts)
        if entry["seq"] != place or entry["prev_hash"] != last_hash or entry["hash"] != hashlib.sha256(hashed).hexdigest():
            return place
        if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", entry["at"]) or entry["at"] < last_at:
            return place
        for name, content in (entry["content"] or {}).items():
            salted = bytes.fromhex(content["salt"]) + content["text"].encode()
            if json.loads(entry["body"])[f"{name}_digest"] != hashlib.sha256(salted).hexdigest():
                return place
        last_hash, last_at = entry["hash"], entry["at"]
    if head is None or (head["seq"], head["hash"], head["at"]) == (place, last_hash, last_at):
        return None
    return max(1, place) if head["seq"] == place else min(place, int(head["seq"])) + 1


def vector_entries() -> list[Entry]:
    """Return what the document's test vector records."""
    contents = {"payload": b'{"order":4921,"amount":25.00}', "args": '{"note":"f\u00fcr Zo\u00eb"}'.encode()}
    body = {"tool": "issue_credit", "attempt": 1, "undo_id": None, "reversibility": "compensatable", "to": "Zo\u00eb"}
    return [
        Entry(kind=EntryKind.OPENED, step=None, actor="agent:mika", body={"agent": "refund-bot"}, contents={}),
        Entry(kind=EntryKind.INTENT, step=1, actor="agent:mika", body=body, contents=contents),
    ]


def test_seal_gives_the_documents_vector_when_salts_and_time_are_its_own() -> None:
    """Our code writes, byte for byte, what the document shows."""
    fixed = iter([bytes(range(16)), bytes(range(16, 32))])
    sealed = seal(ORG, SESSION, EMPTY, vector_entries(), START, lambda: next(fixed))
    assert b"".join(map(export_line, sealed)).decode() == fenced("jsonl") + "\n"
    assert hashlib.sha256(bytes.fromhex(fenced("hex"))).digest() == sealed[0].digest
    assert json.loads(fenced("json")) == {"seq": 2, "hash": sealed[1].digest.hex(), "at": sealed[1].at}


def test_both_verifiers_accept_when_given_the_documents_vector() -> None:
    """The document is enough to write a second verifier, and both agree."""
    lines, head = fenced("jsonl"), json.loads(fenced("json"))
    ours = JournalHead(seq=head["seq"], digest=bytes.fromhex(head["hash"]), at=datetime.fromisoformat(head["at"]))
    assert second_verifier("acme", "refund-4921", lines, head) is None
    assert verify_lines(ORG, SESSION, lines.encode().splitlines(), ours).valid


@given(CHAINS, st.data())
def test_both_verifiers_agree_when_an_export_was_edited(sealed: list[Sealed], data: st.DataObject) -> None:
    """Swapped, dropped, repeated, edited or untouched: two programs written apart find the same place."""
    edited = list(data.draw(st.lists(st.sampled_from(sealed), max_size=6) | st.just(sealed)))
    place = data.draw(st.none() | st.integers(0, len(edited) - 1)) if edited else None
    if place is not None:
        edited[place] = data.draw(changes(edited[place]))
    if data.draw(st.booleans()):
        edited = resealed(edited)
    head = head_of(sealed)
    head_json: dict[str, str | int] = {"seq": head.seq, "hash": head.digest.hex(), "at": sealed[-1].at}
    lines = b"".join(map(export_line, edited)).decode()
    assert second_verifier("acme", "refund-4921", lines, head_json) == first_bad(edited, head)
    assert second_verifier("acme", "refund-4921", lines, None) == first_bad(edited, None)


@given(CHAINS)
def test_verify_accepts_when_nothing_was_changed(sealed: list[Sealed]) -> None:
    """There are no false alarms, with the head or without."""
    assert first_bad(sealed, head_of(sealed)) is None
    assert first_bad(sealed, None) is None
    assert verify_lines(ORG, SESSION, map(export_line, sealed), head_of(sealed)).valid


@st.composite
def other_texts(draw: st.DrawFn, text: str) -> str:
    """Change, add or drop one character."""
    place = draw(st.integers(0, len(text)))
    character = draw(st.characters(exclude_categories=["Cs"]))
    tail = draw(st.sampled_from([text[place:], text[place + 1 :]]))
    return text[:place] + draw(st.sampled_from(["", character])) + tail


@st.composite
def other_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Flip one bit."""
    place = draw(st.integers(0, len(data) - 1))
    return data[:place] + bytes([data[place] ^ 1 << draw(st.integers(0, 7))]) + data[place + 1 :]


@st.composite
def changes(draw: st.DrawFn, entry: Sealed) -> Sealed:
    """Change one field that is hashed, a little."""
    field = draw(st.sampled_from(["seq", "kind", "step", "actor", "at", "prev_hash", "digest"]))
    match getattr(entry, field):
        case str(text):
            value: object = draw(other_texts(text))
        case bytes(data):
            value = draw(other_bytes(data))
        case number:
            value = draw(st.sampled_from([(number or 0) + 1, 0]) | (st.none() if field == "step" else st.nothing()))
    return replace(entry, **{field: value})  # type: ignore[arg-type]


@given(CHAINS, st.data())
def test_verify_names_the_entry_when_any_hashed_field_was_changed(sealed: list[Sealed], data: st.DataObject) -> None:
    """A change to any field of any entry is found at that entry."""
    place = data.draw(st.integers(0, len(sealed) - 1))
    edited = [*sealed]
    edited[place] = data.draw(changes(sealed[place]))
    expected = None if edited == sealed else place + 1
    assert first_bad(edited, None) == expected
    assert first_bad(edited, head_of(sealed)) == expected


@given(CHAINS, st.data())
def test_verify_names_the_entry_when_a_bit_of_its_body_was_flipped(sealed: list[Sealed], data: st.DataObject) -> None:
    """The body is hashed as bytes: also one that is no UTF-8 or no JSON any more is found, here and in an export."""
    place = data.draw(st.integers(0, len(sealed) - 1))
    edited = [*sealed]
    edited[place] = replace(sealed[place], body=data.draw(other_bytes(sealed[place].body)))
    assert first_bad(edited, None) == place + 1
    assert verify_lines(ORG, SESSION, map(export_line, edited), None).first_bad_seq == place + 1


@given(CHAINS, st.data())
def test_verify_names_the_entry_when_a_bit_of_its_content_was_flipped(sealed: list[Sealed], data: st.DataObject) -> None:
    """A content that still exists must be the one that was recorded; only another spelling of the same text passes."""
    place = data.draw(st.integers(0, len(sealed) - 1))
    content = sealed[place].content
    if content is None:
        return
    edited = [*sealed]
    edited[place] = replace(sealed[place], content=data.draw(other_bytes(content)))
    found = first_bad(edited, None)
    assert found == place + 1 or (found is None and parse(edited[place].content or b"") == parse(content))
    assert verify_lines(ORG, SESSION, map(export_line, edited), None).first_bad_seq == found


@given(CHAINS, st.data())
def test_verify_names_the_line_when_any_byte_of_an_export_was_changed(sealed: list[Sealed], data: st.DataObject) -> None:
    """An export is as safe as the table: no single byte of it can be changed in meaning, and no line can break the verifier."""
    lines = [export_line(entry) for entry in sealed]
    place = data.draw(st.integers(0, len(lines) - 1))
    edited = [*lines]
    edited[place] = data.draw(other_bytes(lines[place].rstrip(b"\n"))) + b"\n"
    found = verify_lines(ORG, SESSION, edited, head_of(sealed)).first_bad_seq
    assert found == place + 1 or (found is None and parse(edited[place]) == parse(lines[place]))


@pytest.mark.parametrize("length", [2, 3, 5])
def test_verify_names_the_place_when_entries_were_swapped_dropped_or_repeated(length: int) -> None:
    """Order and completeness are part of what is proved."""
    sealed = chain([plain(step=number) for number in range(1, length + 1)])
    head = head_of(sealed)
    for first in range(length):
        assert first_bad([*sealed[: first + 1], *sealed[first:]], head) == first + 2
        assert first_bad([*sealed[:first], *sealed[first + 1 :]], head) == first + 1
        assert first_bad(resealed([*sealed[:first], *sealed[first + 1 :]]), head) == first + 1
        for second in range(first + 1, length):
            swapped = [*sealed]
            swapped[first], swapped[second] = sealed[second], sealed[first]
            assert first_bad(swapped, head) == first + 1
            assert first_bad(resealed(swapped), head) == first + 1


def test_verify_names_the_entry_when_it_was_taken_from_another_history() -> None:
    """An entry whose own hash is right, at its own place, still has to follow from the one before it."""
    sealed = chain([plain(), plain(), plain()])
    other = chain([plain(EntryKind.OPENED), plain(), plain()])
    for place in (1, 2):
        assert first_bad([*sealed[:place], other[place], *sealed[place + 1 :]], head_of(sealed)) == place + 1


def test_verify_names_the_first_line_when_several_are_spoilt() -> None:
    """The first fault is the one reported, whatever kind the later ones have."""
    first, second = fenced("jsonl").encode().splitlines()
    assert verify_lines(ORG, SESSION, [b"", b"{", second], None).first_bad_seq == 1
    assert verify_lines(ORG, SESSION, [second, b"{", first], None).first_bad_seq == 1


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_verify_finds_the_truncation_when_it_knows_the_head(kept: int) -> None:
    """Entries cut off at the end are missed by their number; without a head nobody can tell, and the message says so."""
    sealed = chain([plain(), plain(), plain()])
    assert first_bad(sealed[:kept], head_of(sealed)) == kept + 1
    assert first_bad(sealed[:kept], None) is None
    assert "head was not given" in verify(ORG, SESSION, sealed[:kept], None).message


def test_verify_names_the_first_beyond_the_head_when_entries_were_added() -> None:
    """An entry that no transaction recorded is found, though it links well."""
    sealed = chain([plain(), plain(), plain()])
    assert first_bad(sealed, head_of(sealed[:1])) == 2
    assert first_bad(sealed, EMPTY) == 1


def test_verify_finds_the_rewriting_when_the_whole_chain_was_made_anew() -> None:
    """Consistent forgery is caught by the head alone: that is what a head kept elsewhere is for."""
    sealed = chain([plain(), plain(), plain()])
    forged = resealed([sealed[0], replace(sealed[1], actor="somebody else"), sealed[2]])
    assert first_bad(forged, head_of(sealed)) == 3
    assert first_bad(forged, None) is None


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (replace(EMPTY, digest=bytes(31) + b"\1"), 1),
        (replace(EMPTY, at=START), 1),
        (EMPTY, None),
    ],
)
def test_verify_judges_the_head_when_there_are_no_entries(head: JournalHead, expected: int | None) -> None:
    """An empty chain fits an empty head only."""
    assert first_bad([], head) == expected


def test_verify_finds_the_head_when_only_its_time_was_changed() -> None:
    """The head's time is the last entry's."""
    sealed = chain([plain(), plain()])
    head = head_of(sealed)
    assert first_bad(sealed, replace(head, at=None)) is None
    assert first_bad(sealed, replace(head, at=START + timedelta(days=1))) == 2


@pytest.mark.parametrize(("org", "session"), [("acm", "refund-4921"), ("acme", "refund-492"), ("acmer", "efund-4921")])
def test_verify_refuses_when_the_chain_is_another_sessions(org: str, session: str) -> None:
    """A chain proves nothing under another name, nor with the names' border moved."""
    found = verify(OrgName(org), SessionId(session), chain([plain()]), None)
    assert (found.valid, found.first_bad_seq) == (False, 1)


@pytest.mark.parametrize(
    "at", ["2026-01-02T03:04:05.000005Z", "2025-12-31T23:59:59.999999Z", "2026-01-02T03:04:06Z", "", "2026-01-02T03:04:06.000006z"]
)
def test_verify_names_the_entry_when_its_time_runs_backwards_or_has_no_form(at: str) -> None:
    """Even who can hash cannot put an entry before the one that it follows."""
    sealed = chain([plain(), plain()])
    assert first_bad(resealed([sealed[0], replace(sealed[1], at=at)]), None) == 2


@pytest.mark.parametrize("content", [None, b"{}", b'{"payload":{"salt":"%s","text":"{\\"amount\\":25.00}"}}' % salts()().hex().encode()])
def test_verify_accepts_when_contents_were_erased(content: bytes | None) -> None:
    """Erasing all contents or some leaves the chain valid; what is left is still checked."""
    entry = replace(plain(), contents={"payload": b'{"amount":25.00}', "args": b"{}"})
    sealed = chain([entry, entry])
    erased = [replace(sealed[0], content=content), sealed[1]]
    assert first_bad(erased, head_of(sealed)) is None
    assert verify_lines(ORG, SESSION, map(export_line, erased), head_of(sealed)).valid


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b'"payload"',
        b"\xff",
        b'{"payload":null}',
        b'{"payload":{"salt":"00","text":"x"}}',
        b'{"payload":{"salt":1,"text":"x"}}',
        b'{"payload":{"salt":"000102030405060708090A0B0C0D0E0F","text":"x"}}',
        b'{"payload":{"salt":"000102030405060708090a0b0c0d0e0f","text":"x"}}',
        b'{"payload":{"salt":"000102030405060708090a0b0c0d0e0f"}}',
        b'{"never":{"salt":"000102030405060708090a0b0c0d0e0f","text":"x"}}',
    ],
)
def test_verify_names_the_entry_when_a_content_was_planted(content: bytes) -> None:
    """Nothing can stand beside an entry that its body does not vouch for."""
    sealed = chain([plain(), plain()])
    assert first_bad([sealed[0], replace(sealed[1], content=content)], None) == 2


def test_verify_stays_flat_when_the_journal_is_long() -> None:
    """Memory does not grow with the number of entries: they are read one by one."""

    def long_journal() -> Iterator[Sealed]:
        head = EMPTY
        for _ in range(300):
            (entry,) = seal(ORG, SESSION, head, [replace(plain(), contents={"payload": b"x" * 50_000})], START, salts())
            head = head_of([entry])
            yield entry

    tracemalloc.start()
    try:
        found = verify(ORG, SESSION, long_journal(), None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == Verification(valid=True, entry_count=300, first_bad_seq=None, message=found.message)
    assert peak < 2_000_000


@given(st.lists(ENTRIES, max_size=4), st.integers(0, 4))
def test_seal_gives_one_chain_when_decisions_come_in_parts(entries: list[Entry], cut: int) -> None:
    """How many entries one transaction writes does not show in the chain."""
    new_salt = salts()
    head = seal(ORG, SESSION, EMPTY, entries[:cut], START, new_salt)
    tail = seal(ORG, SESSION, head_of(head), entries[cut:], START, new_salt)
    assert (*head, *tail) == seal(ORG, SESSION, EMPTY, entries, START, salts())


def test_seal_never_runs_backwards_when_the_clock_does() -> None:
    """Journal time stands still rather than going back."""
    (first,) = seal(ORG, SESSION, EMPTY, [plain()], START, salts())
    (second,) = seal(ORG, SESSION, head_of([first]), [plain()], START - timedelta(hours=1), salts())
    assert second.at == first.at


def test_seal_keeps_contents_out_when_it_hashes() -> None:
    """The hashed bytes hold salted digests only, and equal contents have different ones."""
    entry = replace(plain(), contents={"payload": b"secret", "args": b"secret"})
    (sealed,) = seal(ORG, SESSION, EMPTY, [entry], START, salts())
    body = json.loads(sealed.body)
    salt = bytes.fromhex(json.loads(sealed.content or b"")["args"]["salt"])
    assert b"secret" not in sealed.body
    assert body.keys() == {"tool", "payload_digest", "args_digest"}
    assert body["args_digest"] == content_digest(salt, b"secret") != body["payload_digest"]


@pytest.mark.parametrize(
    ("entry", "head", "at", "salt", "error"),
    [
        (plain(), replace(EMPTY, digest=b""), START, bytes(16), ValueError),
        (plain(), replace(EMPTY, digest=b"\1" * 32), START, bytes(16), ValueError),
        (plain(), replace(EMPTY, seq=1, digest=b"\1" * 31), START, bytes(16), ValueError),
        (plain(), EMPTY, START.replace(tzinfo=None), bytes(16), ValueError),
        (plain(), EMPTY, START, bytes(15), ValueError),
        (replace(plain(), contents={"payload": b"\xff"}), EMPTY, START, bytes(16), ValueError),
        (replace(plain(), body={"payload_digest": "mine"}), EMPTY, START, bytes(16), ValueError),
        (replace(plain(), body={"amount": 1.5}), EMPTY, START, bytes(16), TypeError),
        (replace(plain(), body={"when": START}), EMPTY, START, bytes(16), TypeError),
    ],
)
def test_seal_refuses_when_its_input_would_spoil_the_chain(
    entry: Entry, head: JournalHead, at: datetime, salt: bytes, error: type[Exception]
) -> None:
    """A mistake of ours stops the transaction instead of being recorded for good."""
    with pytest.raises(error):
        seal(ORG, SESSION, head, [entry], at, lambda: salt)


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02T03:04:05.000000Z"),
        (datetime(2026, 1, 2, 3, 4, 5, 999_999, tzinfo=UTC), "2026-01-02T03:04:05.999999Z"),
        (datetime(2026, 1, 2, 0, 30, tzinfo=timezone(timedelta(hours=1))), "2026-01-01T23:30:00.000000Z"),
    ],
)
def test_time_text_has_one_form_when_zones_and_digits_differ(at: datetime, text: str) -> None:
    """One moment has one text, and texts sort as moments do."""
    assert time_text(at) == text


@given(CHAINS)
def test_read_line_gives_the_entry_back_when_it_was_exported(sealed: list[Sealed]) -> None:
    """An export loses nothing, and each entry is one line."""
    for entry in sealed:
        line = export_line(entry)
        assert line.count(b"\n") == 1
        assert line.endswith(b"\n")
        assert read_line(line) == entry
        assert json.loads(line) == json.loads(json.dumps(entry_json(entry)))


def spoilt(**members: object) -> bytes:
    """Write the vector's second line with some members replaced."""
    return json.dumps({**json.loads(fenced("jsonl").splitlines()[1]), **members}).encode()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"", "expected a JSON object on one line"),
        (b"\xff", "not UTF-8"),
        (b"[]", "expected an object with the members"),
        (b"{}", "expected an object with the members"),
        (spoilt(more=1), "expected an object with the members"),
        (spoilt(seq="2"), "expected an integer as seq"),
        (spoilt(seq=True), "expected an integer as seq"),
        (spoilt(seq=2.0), "expected an integer as seq"),
        (spoilt(step="1"), "expected an integer as step"),
        (spoilt(kind=None), "expected a string as kind"),
        (spoilt(actor=1), "expected a string as actor"),
        (spoilt(at=1), "expected a string as at"),
        (spoilt(body={}), "expected a string as body"),
        (spoilt(hash="ab"), "expected 64 lower-case hex digits as hash"),
        (spoilt(hash="AB" * 32), "expected 64 lower-case hex digits as hash"),
        (spoilt(prev_hash="g" * 64), "expected 64 lower-case hex digits as prev_hash"),
        (spoilt(prev_hash=None), "expected a string as prev_hash"),
        (spoilt(actor="\ud800"), "half a surrogate pair"),
    ],
)
def test_read_line_says_what_is_wrong_when_a_line_is_no_entry(line: bytes, expected: str) -> None:
    """A spoilt file is a clear error, and to the verifier a bad entry at its place."""
    with pytest.raises(MalformedEntry, match=expected):
        read_line(line)
    first, second = fenced("jsonl").encode().splitlines()
    found = verify_lines(ORG, SESSION, [first, line, second], None)
    assert (found.entry_count, found.first_bad_seq) == (3, 2)
    assert expected in found.message


def test_verify_takes_a_kind_when_it_does_not_know_it() -> None:
    """A newer service may record what this verifier has no word for."""
    (entry,) = chain([plain()])
    assert first_bad(resealed([replace(entry, kind="SOMETHING_NEWER")]), None) is None
