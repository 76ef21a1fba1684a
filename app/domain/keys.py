"""What a bearer key looks like and how it is checked. Must not know where keys are kept."""

import hmac
import re
from dataclasses import dataclass
from hashlib import sha256

SECRET_BYTES = 32
KEY_ID_BYTES = 6  # twelve hex digits: public, and found by an index

_KEY = re.compile(r"cm_([0-9a-f]{12})_([0-9a-f]{64})")

# What an unknown key is compared with, so that it costs the caller the same time as a wrong secret.
_NOBODYS_DIGEST = bytes(32)


@dataclass(frozen=True, slots=True)
class PresentedKey:
    """A well-formed key as a caller presents it; `secret_digest` is the SHA-256 of its secret bytes."""

    key_id: str
    secret_digest: bytes


def make_key(key_id: bytes, secret: bytes) -> tuple[str, PresentedKey]:
    """Return the key's text, to be shown once, and what is kept of it.

    Raises:
        ValueError: not 6 bytes of id or not 32 of secret.
    """
    if len(key_id) != KEY_ID_BYTES or len(secret) != SECRET_BYTES:
        message = f"expected {KEY_ID_BYTES} and {SECRET_BYTES} bytes, found {len(key_id)} and {len(secret)}"
        raise ValueError(message)
    return f"cm_{key_id.hex()}_{secret.hex()}", PresentedKey(key_id.hex(), sha256(secret).digest())


def read_key(text: str) -> PresentedKey | None:
    """Read a key as presented; None where it is not even shaped like one."""
    found = _KEY.fullmatch(text)
    if found is None:
        return None
    return PresentedKey(found[1], sha256(bytes.fromhex(found[2])).digest())


def is_genuine(presented: PresentedKey, kept_digest: bytes | None) -> bool:
    """Compare in constant time; `kept_digest` None: nobody has such a key, and the comparison is made all the same."""
    is_equal = hmac.compare_digest(presented.secret_digest, _NOBODYS_DIGEST if kept_digest is None else kept_digest)
    return is_equal and kept_digest is not None
