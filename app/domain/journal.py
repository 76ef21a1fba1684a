"""A session's journal: an entry's bytes, the hash chain over them, its check. Must not read or write storage, or decide what is recorded.

`docs/reference/journal-format.md` describes every byte for those who write a second verifier; keep the two together.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from json.encoder import encode_basestring
from typing import Final

from app.domain.json_text import Json, JsonFault, canonical, dump, parse
from app.domain.model import EntryKind, JournalHead, OrgName, SessionId

FORMAT = "countermand.journal.v1"  # first in every hashed text, so that no other record's hash can pass for an entry's
SALT_BYTES = 16  # 128 random bits: a short payload cannot be guessed from its digest once the salt is erased (contract, "The journal")
DIGEST_BYTES = 32  # SHA-256
GENESIS: Final = bytes(DIGEST_BYTES)
"""The `prev_hash` of a session's first entry; shown as 64 zeros."""

_AT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z")
_HEX = re.compile(r"[0-9a-f]*")
_MEMBERS = frozenset({"seq", "kind", "step", "actor", "at", "body", "content", "prev_hash", "hash"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a decision records.

    `body` holds JSON values without fractions and is hashed for good; `contents` (UTF-8 text by name: payload, result, args) stand beside
    it, erasable, and only their salted digests enter the body, as `<name>_digest`.
    """

    kind: EntryKind
    step: int | None
    actor: str
    body: Mapping[str, object]
    contents: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """One link of the chain, as it is stored.

    `at` is text, UTC with six digits of microseconds; `body` canonical JSON, kept verbatim; `content` JSON text
    `{"<name>": {"salt": "<hex>", "text": "..."}}`, or None where there is none or it was erased. `kind` is text, since a spoilt or a
    newer one must reach the verifier.
    """

    seq: int
    kind: str
    step: int | None
    actor: str
    at: str
    body: bytes
    content: bytes | None
    prev_hash: bytes
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What a check of one session's chain found: `entry_count` entries were read; `first_bad_seq` may be one that is missing."""

    valid: bool
    entry_count: int
    first_bad_seq: int | None
    message: str


class MalformedEntry(ValueError):
    """A line of an export is no journal entry; the text says what was expected."""


def seal(  # noqa: PLR0913, PLR0917 - whose chain, where it stands, what is new and how it is marked: a class would be unpacked at once
    org: OrgName,
    session_id: SessionId,
    head: JournalHead,
    entries: Sequence[Entry],
    at: datetime,
    new_salt: Callable[[], bytes],
) -> tuple[Sealed, ...]:
    """Chain `entries` to `head`, in order, all at one time: `at`, or the head's where that is later.

    `at` is aware; `new_salt` returns 16 fresh random bytes, once for each content.

    Raises:
        ValueError: a head that cannot be one, a naive `at`, a salt of another length, a content that is not UTF-8 or whose digest finds
            its name taken.
        TypeError: a body that holds something else than str, int, bool, None, list and dict.
    """
    if len(head.digest) != DIGEST_BYTES or (head.seq == 0 and head.digest != GENESIS):
        raise ValueError(f"the head of {org}/{session_id} at {head.seq} has a digest that no entry can have")
    moment = time_text(at if head.at is None else max(at, head.at))
    sealed: list[Sealed] = []
    prev_hash = head.digest
    for seq, entry in enumerate(entries, head.seq + 1):
        body, content = _body_and_content(entry, new_salt)
        digest = _hash_of(org, session_id, seq, entry.kind.value, entry.step, entry.actor, moment, body, prev_hash)
        sealed.append(
            Sealed(
                seq=seq,
                kind=entry.kind.value,
                step=entry.step,
                actor=entry.actor,
                at=moment,
                body=body,
                content=content,
                prev_hash=prev_hash,
                digest=digest,
            )
        )
        prev_hash = digest
    return tuple(sealed)


def compute_digest(org: OrgName, session_id: SessionId, entry: Sealed) -> bytes:
    """Return the SHA-256 that `entry` must have: over its parts as UTF-8, each with its length before it in four bytes, big-endian.

    `content` and the entry's own `digest` have no part in it; an absent step is an empty part (contract, "The journal").
    """
    return _hash_of(org, session_id, entry.seq, entry.kind, entry.step, entry.actor, entry.at, entry.body, entry.prev_hash)


def _hash_of(  # noqa: PLR0913, PLR0917 - the parts of the hashed text, in their order
    org: OrgName, session_id: SessionId, seq: int, kind: str, step: int | None, actor: str, at: str, body: bytes, prev_hash: bytes
) -> bytes:
    parts = (
        FORMAT.encode(),
        org.encode(),
        session_id.encode(),
        str(seq).encode(),
        kind.encode(),
        b"" if step is None else str(step).encode(),
        actor.encode(),
        at.encode(),
        body,
        prev_hash.hex().encode(),
    )
    return hashlib.sha256(b"".join(len(part).to_bytes(4, "big") + part for part in parts)).digest()


def content_digest(salt: bytes, content: bytes) -> str:
    """Return, in hex, the salted SHA-256 that stands in a body for `content`."""
    return hashlib.sha256(salt + content).hexdigest()


def has_content(entry: Sealed, name: str, data: bytes) -> bool:
    """Tell whether `data` is the content that `entry`'s body holds the digest of; False where its salt was erased: nothing shows it."""
    if entry.content is None:
        return False
    try:
        body, contents = parse(entry.body), parse(entry.content)
    except JsonFault:
        return False
    if not isinstance(body, dict) or not isinstance(contents, dict):
        return False
    salted = _salted(contents.get(name))
    return salted is not None and body.get(f"{name}_digest") == content_digest(salted[0], data)


def time_text(at: datetime) -> str:
    """Return the text of an aware time as entries hold it, e.g. `2026-01-02T03:04:05.000006Z`; texts sort as their times do."""
    if at.tzinfo is None:
        raise ValueError(f"expected an aware time, found {at}")
    return at.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


class Verifier:
    """Check one session's chain entry by entry, in flat memory; feed it from any source, a cursor or a file, in the order of `seq`."""

    def __init__(self, org: OrgName, session_id: SessionId) -> None:
        """Begin before the first entry."""
        self._org = org
        self._session_id = session_id
        self._entry_count = 0
        self._last_hash = GENESIS
        self._last_at = ""
        self._fault: tuple[int, str] | None = None

    def read(self, entry: Sealed) -> None:
        """Check the next entry; after the first fault the rest is only counted."""
        if self._fault is not None:
            self._entry_count += 1
            return
        fault = self._fault_of(entry)
        if fault is not None:
            self.refuse(fault)
            return
        self._entry_count += 1
        self._last_hash = entry.digest
        self._last_at = entry.at

    def refuse(self, fault: str) -> None:
        """Count an entry that could not even be read; `fault` says why."""
        self._entry_count += 1
        self._fault = self._fault or (self._entry_count, fault)

    def finish(self, head: JournalHead | None) -> Verification:
        """Return what was found; without a head the loss of the newest entries cannot be seen."""
        fault = self._fault or (None if head is None else self._fault_of_head(head))
        if fault is not None:
            return Verification(valid=False, entry_count=self._entry_count, first_bad_seq=fault[0], message=fault[1])
        end = "its head was not given" if head is None else "they end at its head"
        message = f"{self._entry_count} entries are linked and unchanged; {end}"
        return Verification(valid=True, entry_count=self._entry_count, first_bad_seq=None, message=message)

    def _fault_of(self, entry: Sealed) -> str | None:
        expected_seq = self._entry_count + 1
        if entry.seq != expected_seq:
            return f"expected entry {expected_seq}, found {entry.seq}: entries are missing, repeated or out of order"
        if entry.prev_hash != self._last_hash:
            return f"entry {entry.seq} does not link to the entry before it"
        if entry.digest != compute_digest(self._org, self._session_id, entry):
            return f"entry {entry.seq} was changed: its hash is not the hash of its bytes"
        if _AT.fullmatch(entry.at) is None:
            return f"entry {entry.seq} has a time of another form than 2026-01-02T03:04:05.000006Z"
        if entry.at < self._last_at:
            return f"entry {entry.seq} is earlier than the entry before it"
        return _fault_of_content(entry)

    def _fault_of_head(self, head: JournalHead) -> tuple[int, str] | None:
        if head.seq > self._entry_count:
            first = self._entry_count + 1
            return first, f"the newest entries are missing: the head is at {head.seq}, the last entry is {self._entry_count}"
        if head.seq < self._entry_count:
            return head.seq + 1, f"there are {self._entry_count} entries, but the head is at {head.seq}"
        # The head of an empty chain has no entry to blame; the first would be the one that does not fit.
        last = max(self._entry_count, 1)
        if head.digest != self._last_hash:
            return last, f"the chain does not end in the hash that the head holds for entry {head.seq}"
        if head.at is not None and time_text(head.at) != self._last_at:
            return last, f"the chain does not end at the time that the head holds for entry {head.seq}"
        return None


def verify(org: OrgName, session_id: SessionId, entries: Iterable[Sealed], head: JournalHead | None) -> Verification:
    """Check a whole chain: numbers dense from 1, links, hashes, times not backwards, contents against their digests, and the head.

    An erased content is no fault. `head` None: not known, so entries missing at the end are not found.
    """
    verifier = Verifier(org, session_id)
    for entry in entries:
        verifier.read(entry)
    return verifier.finish(head)


def verify_lines(org: OrgName, session_id: SessionId, lines: Iterable[bytes], head: JournalHead | None) -> Verification:
    """Check an export as `verify` does; a line that is no entry counts as a bad one at its place."""
    verifier = Verifier(org, session_id)
    for line in lines:
        try:
            verifier.read(read_line(line))
        except MalformedEntry as error:
            verifier.refuse(str(error))
    return verifier.finish(head)


def entry_json(entry: Sealed) -> dict[str, Json]:
    """Return an entry in the contract's shape; what storage may have spoilt is shown as it can be, for a verifier to refuse."""
    return {
        "seq": entry.seq,
        "kind": entry.kind,
        "step": entry.step,
        "actor": entry.actor,
        "at": entry.at,
        "body": entry.body.decode(errors="replace"),
        "content": None if entry.content is None else _content_json(entry.content),
        "prev_hash": entry.prev_hash.hex(),
        "hash": entry.digest.hex(),
    }


def export_line(entry: Sealed) -> bytes:
    r"""Return an entry as one line of JSON Lines, ending in `\n`."""
    return dump(entry_json(entry)) + b"\n"


def read_line(line: bytes) -> Sealed:
    """Read one line of an export; whether it belongs to a chain is for `verify` to say.

    Raises:
        MalformedEntry: not JSON, or not the shape that `export_line` gives.
    """
    try:
        members = parse(line)
    except JsonFault as fault:
        raise MalformedEntry(f"expected a JSON object on one line: {fault.detail}") from fault
    if not isinstance(members, dict) or members.keys() != _MEMBERS:
        raise MalformedEntry(f"expected an object with the members {', '.join(sorted(_MEMBERS))}")
    content = members["content"]
    return Sealed(
        seq=_number(members, "seq"),
        kind=_text(members, "kind"),
        step=None if members["step"] is None else _number(members, "step"),
        actor=_text(members, "actor"),
        at=_text(members, "at"),
        body=_text(members, "body").encode(),
        content=None if content is None else dump(content),
        prev_hash=_digest(members, "prev_hash"),
        digest=_digest(members, "hash"),
    )


def _body_and_content(entry: Entry, new_salt: Callable[[], bytes]) -> tuple[bytes, bytes | None]:
    body: dict[str, object] = dict(entry.body)
    content: dict[str, str] = {}
    for name, data in entry.contents.items():
        salt = new_salt()
        if len(salt) != SALT_BYTES:
            raise ValueError(f"expected a salt of {SALT_BYTES} bytes, found {len(salt)}")
        if f"{name}_digest" in body:
            raise ValueError(f"the body of {entry.kind} already has a member {name}_digest")
        body[f"{name}_digest"] = content_digest(salt, data)
        content[name] = f"{encode_basestring(name)}:{canonical({'salt': salt.hex(), 'text': data.decode()}).decode()}"
    return canonical(body), f"{{{','.join(content[name] for name in sorted(content))}}}".encode() if content else None


def _fault_of_content(entry: Sealed) -> str | None:
    """Compare the contents that still exist with their digests; names without a content were erased."""
    if entry.content is None:
        return None
    try:
        body, contents = parse(entry.body), parse(entry.content)
    except JsonFault as fault:
        return f"entry {entry.seq} has a body or a content that is not JSON: {fault.detail}"
    if not isinstance(body, dict) or not isinstance(contents, dict):
        return f"entry {entry.seq} has a body or a content that is not a JSON object"
    for name, content in contents.items():
        salted = _salted(content)
        if salted is None:
            return f"entry {entry.seq} has a content that is not a salt of {SALT_BYTES} bytes in hex and a text"
        if body.get(f"{name}_digest") != content_digest(*salted):
            return f"entry {entry.seq} has a content that was changed: its digest is not the one in the body"
    return None


def _salted(content: Json) -> tuple[bytes, bytes] | None:
    if not isinstance(content, dict) or content.keys() != {"salt", "text"}:
        return None
    salt, text = content["salt"], content["text"]
    if not isinstance(salt, str) or not isinstance(text, str) or not _is_hex(salt, SALT_BYTES):
        return None
    return bytes.fromhex(salt), text.encode()


def _content_json(content: bytes) -> Json:
    try:
        return parse(content)
    except JsonFault:
        return content.decode(errors="replace")


def _is_hex(text: str, byte_count: int) -> bool:
    return len(text) == 2 * byte_count and _HEX.fullmatch(text) is not None


def _number(members: Mapping[str, Json], name: str) -> int:
    value = members[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise MalformedEntry(f"expected an integer as {name}")
    return value


def _text(members: Mapping[str, Json], name: str) -> str:
    value = members[name]
    if not isinstance(value, str):
        raise MalformedEntry(f"expected a string as {name}")
    return value


def _digest(members: Mapping[str, Json], name: str) -> bytes:
    text = _text(members, name)
    if not _is_hex(text, DIGEST_BYTES):
        raise MalformedEntry(f"expected {2 * DIGEST_BYTES} lower-case hex digits as {name}")
    return bytes.fromhex(text)
