"""The opaque texts by which lists are read on: the place after which the next page begins. Must not know what is listed."""

import base64
import re
from datetime import datetime
from typing import Final

from app.domain.errors import Malformed

MOMENT: Final = r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z)"
SESSION: Final = r"([A-Za-z0-9._:-]{1,200})"

# Clients must not build on what is inside; another version may look otherwise.
_VERSION: Final = "1 "


def shape(*parts: str) -> re.Pattern[str]:
    """Return what a cursor of these parts, each a group, has to match."""
    return re.compile(_VERSION + " ".join(parts), re.ASCII)


def write_cursor(*parts: str) -> str:
    """Return a cursor that names the last item of a page."""
    return base64.urlsafe_b64encode((_VERSION + " ".join(parts)).encode()).decode()


def read_cursor(cursor: str, expected: re.Pattern[str]) -> re.Match[str]:
    """Return the parts of a cursor.

    Raises:
        Malformed: it is none that this list has given.
    """
    try:
        found = expected.fullmatch(base64.b64decode(cursor.encode(), altchars=b"-_", validate=True).decode())
    except ValueError:  # not base64, or not UTF-8
        found = None
    if found is None:
        raise bad_cursor()
    return found


def moment_of(text: str) -> datetime:
    """Return the moment of a part that matched `MOMENT`.

    Raises:
        Malformed: there is no such day.
    """
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise bad_cursor() from error


def bad_cursor() -> Malformed:
    """Return the answer to a cursor that no list has given."""
    return Malformed("bad_cursor", "expected a cursor as `next_cursor` gave it")
