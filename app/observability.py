"""The log's format: JSON lines on stderr. Must not hold business words: what happened is named where it happens."""

import json
import logging
import re
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any, BinaryIO

import structlog

# What could end a line, move a terminal's cursor or turn text around; everything else is JSON's business.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")

MAX_VALUE_CHARACTERS = 4_096  # no single value may flood the log
HEAD_CHARACTERS = 512  # of those, what is kept from the beginning

_encode = json.JSONEncoder(ensure_ascii=False, default=repr).encode


class Lines:
    """Where our own events go: a line each, in one write. One that cannot be written is lost; what it tells of stands."""

    def __init__(self, stream: BinaryIO) -> None:
        """Write to a stream of bytes."""
        self._stream = stream

    def msg(self, line: str) -> None:
        """Write one line."""
        with suppress(OSError, ValueError):  # nobody reads any more, or the stream is closed
            self._stream.write(f"{line}\n".encode(errors="backslashreplace"))
            self._stream.flush()

    debug = info = warning = error = critical = msg


def configure() -> None:
    """Send our events, and the libraries' records, to stderr as one JSON object a line; from INFO on.

    Our events do not pass through `logging`, which would cost several times what is left: there is one for each journal entry.
    """
    shared: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _make_safe,
    ]
    lines = Lines(sys.stderr.buffer)
    structlog.configure(
        processors=[*shared, _render],
        logger_factory=lambda *_: lines,
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=True,
    )
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _render],
        )
    )
    root = logging.getLogger()
    root.handlers = [stream]
    root.setLevel(logging.INFO)
    for chatty in ("httpx", "httpcore", "alembic", "uvicorn.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _make_safe(_logger: object, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in event.items():
        # Whatever is unsafe is not printable, and to ask that costs little.
        if isinstance(value, str) and not (value.isprintable() and len(value) <= MAX_VALUE_CHARACTERS):
            event[key] = _cut(_UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", value))
    return event


def _render(_logger: object, _name: str, event: MutableMapping[str, Any]) -> str:
    return _encode(event)


def _cut(text: str) -> str:
    """Shorten a long value in the middle: a traceback says where it began first and what went wrong last."""
    if len(text) <= MAX_VALUE_CHARACTERS:
        return text
    return f"{text[:HEAD_CHARACTERS]} [...] {text[HEAD_CHARACTERS - MAX_VALUE_CHARACTERS :]}"
