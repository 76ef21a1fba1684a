"""Bearer keys are made, read and compared. Must not test where they are kept."""

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.keys import KEY_ID_BYTES, SECRET_BYTES, PresentedKey, is_genuine, make_key, read_key

ID = bytes.fromhex("0123456789ab")
SECRET = bytes(range(32))
TEXT = f"cm_0123456789ab_{SECRET.hex()}"


@given(st.binary(min_size=KEY_ID_BYTES, max_size=KEY_ID_BYTES), st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES))
def test_read_key_knows_what_make_key_made(key_id: bytes, secret: bytes) -> None:
    """The text shown once is enough, and what is kept is the digest alone."""
    text, kept = make_key(key_id, secret)
    presented = read_key(text)
    assert presented == kept == PresentedKey(key_id.hex(), sha256(secret).digest())
    assert is_genuine(kept, sha256(secret).digest())
    assert secret.hex() not in repr(kept)


@pytest.mark.parametrize(("key_id", "secret"), [(b"", SECRET), (ID[:-1], SECRET), (ID + b"x", SECRET), (ID, SECRET[:-1]), (ID, b"")])
def test_make_key_refuses_when_there_are_too_few_or_too_many_bytes(key_id: bytes, secret: bytes) -> None:
    """A short secret is never made by mistake."""
    with pytest.raises(ValueError, match="expected 6 and 32 bytes"):
        make_key(key_id, secret)


@pytest.mark.parametrize(
    "text",
    [
        "", "cm_", "cm__", TEXT[:-1], TEXT + "0", TEXT + "\n", " " + TEXT, TEXT.upper(), TEXT.replace("cm_", "ck_"),
        TEXT.replace("_0", "-0"), TEXT.replace("a", "\u0430"), TEXT.replace("0", "\u0660"), TEXT[:-1] + "g", "x" * 100_000,
    ],
)  # fmt: skip
def test_read_key_finds_none_when_the_text_is_not_shaped_like_one(text: str) -> None:
    """One spelling per key: no case, no spaces, no look-alikes, no line end."""
    assert read_key(text) is None


def test_is_genuine_refuses_when_the_secret_differs_or_nobody_has_the_key() -> None:
    """The zeros that an unknown key is compared with are nobody's secret."""
    kept = PresentedKey("0123456789ab", sha256(SECRET).digest())
    assert not is_genuine(kept, sha256(b"other").digest())
    assert not is_genuine(kept, None)
    assert not is_genuine(PresentedKey("0123456789ab", bytes(32)), None)
