"""The log's format: JSON lines on stderr. Must not hold business words: what happened is named where it happens."""

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

# What could end a line, move a terminal's cursor or turn text around; everything else is JSON's business.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")

MAX_VALUE_CHARACTERS = 4_096  # no single value may flood the log
HEAD_CHARACTERS = 512  # of those, what is kept from the beginning


def configure(*, level: str = "INFO") -> None:
    """Send our events and the libraries' records to stderr as one JSON object a line."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _make_safe,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(ensure_ascii=False),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [stream]
    root.setLevel(level)
    for chatty in ("httpx", "httpcore", "alembic", "uvicorn.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _make_safe(_logger: object, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = _cut(_UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", value))
    return event


def _cut(text: str) -> str:
    """Shorten a long value in the middle: a traceback says where it began first and what went wrong last."""
    if len(text) <= MAX_VALUE_CHARACTERS:
        return text
    return f"{text[:HEAD_CHARACTERS]} [...] {text[HEAD_CHARACTERS - MAX_VALUE_CHARACTERS :]}"
