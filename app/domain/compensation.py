"""The text form in which a compensation is kept on the undo stack. Must not bind references or judge the URL."""

from functools import lru_cache
from typing import Final

from app.domain.json_text import Json, NumberLiteral, dump, parse
from app.domain.model import Compensation, OnUnknown, RetryPolicy, UnknownVariant

KEPT: Final = 64
"""Descriptors whose two forms are remembered: a tool's is the same for each of its calls. They may be large, so not many are."""

UNREADABLE = Compensation(
    url="http://unreadable.invalid/",  # a name that never leads anywhere (RFC 6761, section 6.4)
    args=b"{}",
    description="unreadable: what is kept of this undo is not what the service wrote",
    is_readable=False,
)
"""Stands for a descriptor that cannot be read: its session is a person's, and can still be looked at."""


@lru_cache(KEPT)
def write(compensation: Compensation) -> bytes:
    """Return the descriptor as compact JSON text; `args` keep every literal."""
    unknown: Json = None
    if compensation.unknown is not None:
        unknown = {"args": parse(compensation.unknown.args), "url": compensation.unknown.url}
    return dump(
        {
            "url": compensation.url,
            "args": parse(compensation.args),
            "description": compensation.description,
            "unknown": unknown,
            "on_unknown": compensation.on_unknown.value,
            "independent": compensation.independent,
            "settle_ms": compensation.settle_ms,
            **write_retry(compensation.retry),
        }
    )


def write_retry(retry: RetryPolicy) -> dict[str, Json]:
    """Return a retry policy's members."""
    return {
        "max_retries": retry.max_retries,
        "initial_interval_ms": retry.initial_interval_ms,
        "multiplier": _number(retry.multiplier),
        "max_interval_ms": retry.max_interval_ms,
        "timeout_ms": retry.timeout_ms,
        "deadline_ms": retry.deadline_ms,
        "retry_on": _statuses(retry.retry_on),
        "compensated_on": _statuses(retry.compensated_on),
    }


def read(text: bytes) -> Compensation:
    """Read back what `write` wrote.

    Raises:
        KeyError, TypeError, ValueError: the text is not one of ours.
    """
    members = parse(text)
    if not isinstance(members, dict):
        raise TypeError("expected a JSON object")
    unknown = members["unknown"]
    return Compensation(
        url=str(members["url"]),
        args=dump(members["args"]),
        description=str(members["description"]),
        unknown=_read_unknown(unknown) if isinstance(unknown, dict) else None,
        on_unknown=OnUnknown(str(members["on_unknown"])),
        independent=members["independent"] is True,
        settle_ms=_int(members.get("settle_ms", 0)),  # descriptors kept before there was such a thing have no such member
        retry=read_retry(members),
    )


@lru_cache(KEPT)
def read_kept(text: bytes) -> Compensation:
    """Read back what `write` wrote, or say that it is unreadable: that concerns this undo alone, not what is read along with it."""
    try:
        return read(text)
    except (KeyError, TypeError, ValueError):
        return UNREADABLE


def read_retry(members: dict[str, Json]) -> RetryPolicy:
    """Read back what `write_retry` wrote.

    Raises:
        KeyError, TypeError, ValueError: the members are not ours.
    """
    return RetryPolicy(
        max_retries=_int(members["max_retries"]),
        initial_interval_ms=_int(members["initial_interval_ms"]),
        multiplier=_float(members["multiplier"]),
        max_interval_ms=_int(members["max_interval_ms"]),
        timeout_ms=_int(members["timeout_ms"]),
        deadline_ms=_int(members["deadline_ms"]),
        retry_on=_read_statuses(members["retry_on"]),
        compensated_on=_read_statuses(members["compensated_on"]),
    )


def _read_unknown(members: dict[str, Json]) -> UnknownVariant:
    url = members["url"]
    return UnknownVariant(args=dump(members["args"]), url=url if isinstance(url, str) else None)


def _number(value: float) -> Json:
    return int(value) if value.is_integer() else NumberLiteral(repr(value))


def _statuses(statuses: frozenset[int]) -> list[Json]:
    return [*sorted(statuses)]


def _read_statuses(value: Json) -> frozenset[int]:
    if not isinstance(value, list):
        raise TypeError("expected a JSON array of statuses")
    return frozenset(_int(item) for item in value)


def _int(value: Json) -> int:
    if not isinstance(value, int):
        raise TypeError("expected a JSON integer")
    return value


def _float(value: Json) -> float:
    if not isinstance(value, int | NumberLiteral):
        raise TypeError("expected a JSON number")
    return float(value)
