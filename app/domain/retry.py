"""Judge what one request came to, and say how long to wait before the next. Must not send, sleep, count or draw random numbers."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TypeAlias, assert_never
from urllib.parse import urlsplit

from app.domain.model import RetryPolicy

RETRY_AFTER_CAP_SECONDS = 3_600.0  # an endpoint may ask for patience, not for a day of it (contract, section 4)
MAX_ERROR_CHARACTERS = 2_048  # what is kept of an answer for people (threat model, row B4)
MAX_REASON_CHARACTERS = 100  # a reason is a class with a word beside it, not the story
MAX_HOST_CHARACTERS = 60  # leaves room for the rest of a reason

_CUT = " ... (cut)"

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DELTA_SECONDS = re.compile(r"-?[0-9]+")
_TIME = r"(?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})"
_MONTH = f"(?P<month>{'|'.join(_MONTHS)})"
# The three forms a recipient must accept (RFC 9110, section 5.6.7). The name of the day is required and, like everywhere, not checked.
_HTTP_DATES = (
    re.compile(rf"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), (?P<day>[0-9]{{2}}) {_MONTH} (?P<year>[0-9]{{4}}) {_TIME} GMT"),
    re.compile(rf"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day, (?P<day>[0-9]{{2}})-{_MONTH}-(?P<year>[0-9]{{2}}) {_TIME} GMT"),
    re.compile(rf"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) {_MONTH} (?P<day>[0-9 ][0-9]) {_TIME} (?P<year>[0-9]{{4}})"),
)
# Any moment will do to ask whether a value is a Retry-After at all.
_SOME_TIME = datetime(2000, 1, 1, tzinfo=UTC)


class Failure(StrEnum):
    """Why there is no status."""

    DNS = "dns"
    CONNECT = "connect"
    TLS = "tls"
    TIMEOUT = "timeout"
    RESET = "reset"
    PROTOCOL = "protocol"
    EGRESS_DENIED = "egress_denied"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What one request came to: exactly one of `status` and `failure`.

    `was_sent` False: no byte of the request can have left, so it was certainly not processed. `retry_after` and `location` are the header
    values as received. `detail` is text for people and may come from the endpoint: show it only through `last_error`. `body` is the
    beginning of the answer, up to 64 KiB, as it came.
    """

    status: int | None
    failure: Failure | None
    was_sent: bool
    retry_after: str | None
    location: str | None
    detail: str
    duration_ms: int
    body: bytes = b""

    def __post_init__(self) -> None:
        if (self.status is None) == (self.failure is None):
            raise ValueError(f"expected exactly one of status and failure, found {self.status} and {self.failure}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The endpoint says that it is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The endpoint took the call and is not done: poll `location`, or send again under the same key where there is none."""

    location: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """The same bytes may be sent again. `is_outcome_unknown`: this request may have been, or may still be, processed."""

    reason: str
    is_outcome_unknown: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Permanent:
    """Sending again cannot help. `is_outcome_unknown` as in `Retry`."""

    reason: str
    is_outcome_unknown: bool


Verdict: TypeAlias = Done | Accepted | Retry | Permanent


def judge(attempt: Attempt, policy: RetryPolicy, *, may_be_processing: bool) -> Verdict:
    """Say what one attempt means for its call (contract, section 4, "What an answer means").

    `may_be_processing`: an earlier attempt of the call ended with unknown outcome, or with 202. The policy's lists override the table; a
    status in both is retried, since claiming an undo that did not happen is the worse mistake.

    What the contract's two lists leave open claims less, not more: a 5xx that it does not name, and a redirect (it often follows the
    work: 303, and 302 in practice), count as unknown.
    """
    if attempt.status is None:
        return _judge_failure(attempt)
    if attempt.status in policy.retry_on:
        return Retry(reason=_reason(attempt), is_outcome_unknown=_is_status_unknown(attempt.status))
    if attempt.status in policy.compensated_on:
        return Done()
    if attempt.status == 409 and (may_be_processing or _is_retry_after(attempt.retry_after)):
        return Retry(reason=_reason(attempt), is_outcome_unknown=False)
    return _judge_status(attempt, attempt.status)


def judge_poll(attempt: Attempt) -> Verdict:
    """Say what a GET of a 202's Location means for the call that was answered so.

    A descriptor's lists speak of the call itself and do not apply. Whatever is not final leaves the call's own outcome unknown: it was
    accepted, and may have been processed since. A 303 to a result is a redirect, and redirects are not followed.
    """
    verdict = _judge_failure(attempt) if attempt.status is None else _judge_status(attempt, attempt.status)
    match verdict:
        case Done() | Accepted():
            return verdict
        case Retry(reason=reason):
            return Retry(reason=reason, is_outcome_unknown=True)
        case Permanent(reason=reason):
            return Permanent(reason=reason, is_outcome_unknown=True)
        case _:
            assert_never(verdict)


def backoff_seconds(policy: RetryPolicy, failures: int, unit: float) -> float:
    """Return the wait after the `failures`-th failure: full jitter below `initial * multiplier ** (failures - 1)`, capped.

    `unit` is the caller's random number in [0, 1). Fewer than one failure counts as one.
    """
    cap_ms = float(policy.max_interval_ms)
    try:
        ceiling_ms = min(cap_ms, policy.initial_interval_ms * policy.multiplier ** max(failures - 1, 0))
    except OverflowError:
        ceiling_ms = cap_ms if policy.initial_interval_ms > 0 else 0.0
    return unit * ceiling_ms / 1_000


def retry_after_seconds(value: str | None, now: datetime) -> float | None:
    """Return the wait that a Retry-After header (RFC 9110, section 10.2.3) asks for, within 0 and an hour; None for none and for rubbish.

    `now` is aware. Seconds below zero and dates in the past ask for no wait.
    """
    if value is None:
        return None
    text = value.strip(" \t")
    if _DELTA_SECONDS.fullmatch(text) is not None:
        # Not `int`, which refuses the thousands of digits that a header can hold.
        return _within_cap(float(text))
    date = _http_date(text, now)
    return None if date is None else _within_cap((date - now).total_seconds())


def wait_seconds(policy: RetryPolicy, failures: int, unit: float, retry_after: str | None, now: datetime) -> float:
    """Return the longer of the own backoff and what the endpoint asked for, in seconds."""
    return max(backoff_seconds(policy, failures, unit), retry_after_seconds(retry_after, now) or 0.0)


def last_error(attempt: Attempt) -> str:
    """Return one line about an attempt that is safe to show: at most 2,048 characters, nothing that steers a terminal or turns text round.

    Everything unprintable is escaped (controls, ESC, line and bidi separators, zero-width characters, spaces but the plain one).
    """
    if not attempt.detail:
        return _class_of(attempt)
    return _cut(f"{_class_of(attempt)}: {_printable(attempt.detail, MAX_ERROR_CHARACTERS)}", MAX_ERROR_CHARACTERS)


def _judge_failure(attempt: Attempt) -> Retry | Permanent:
    is_unknown = attempt.was_sent or attempt.failure is Failure.INTERRUPTED
    if attempt.failure is Failure.EGRESS_DENIED:
        return Permanent(reason=_reason(attempt), is_outcome_unknown=is_unknown)
    return Retry(reason=_reason(attempt), is_outcome_unknown=is_unknown)


def _judge_status(attempt: Attempt, status: int) -> Verdict:
    if status == 202:
        return Accepted(location=attempt.location)
    if 200 <= status <= 299:
        return Done()
    if 300 <= status <= 399:
        return Permanent(reason=_reason(attempt), is_outcome_unknown=_is_status_unknown(status))
    if 400 <= status <= 499 and status not in {408, 425, 429}:
        return Permanent(reason=_reason(attempt), is_outcome_unknown=False)
    return Retry(reason=_reason(attempt), is_outcome_unknown=_is_status_unknown(status))


def _is_status_unknown(status: int) -> bool:
    """Say whether a status leaves open if the request was processed; 2xx do not, 4xx but 408 and 503 say that it was not."""
    if 400 <= status <= 499:
        return status == 408
    return not 200 <= status <= 299 and status != 503


def _is_final_status(status: int) -> bool:
    """Say whether a status may end an exchange: 1xx may not, and above 599 there is none (RFC 9110, section 15)."""
    return 200 <= status <= 599


def _class_of(attempt: Attempt) -> str:
    if attempt.failure is not None:
        return attempt.failure.value
    status = attempt.status or 0
    if not _is_final_status(status):
        return f"protocol: http {status} is no final answer"
    if 300 <= status <= 399:
        return f"http {status}{_redirect_host(attempt.location)}: redirects are not followed"
    return f"http {status}"


def _redirect_host(location: str | None) -> str:
    """Name the host that a redirect points to, not the whole URL, which may carry secrets (threat model, row B3)."""
    try:
        host = urlsplit(location or "").hostname
    except ValueError:
        host = None
    return f" to {_cut(_printable(host, MAX_HOST_CHARACTERS), MAX_HOST_CHARACTERS)}" if host else ""


def _reason(attempt: Attempt) -> str:
    """Return the class of an attempt, with our own word on a failure; what an endpoint wrote is no reason."""
    if attempt.failure is None or not attempt.detail:
        return _class_of(attempt)
    return _cut(f"{_class_of(attempt)}: {_printable(attempt.detail, MAX_REASON_CHARACTERS)}", MAX_REASON_CHARACTERS)


def _printable(text: str, limit: int) -> str:
    """Return `text` with everything but printable characters and the plain space escaped; reads no more than `limit` + 1 of it."""
    return "".join(character if character.isprintable() else character.encode("unicode_escape").decode() for character in text[: limit + 1])


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - len(_CUT)] + _CUT


def _is_retry_after(value: str | None) -> bool:
    return retry_after_seconds(value, _SOME_TIME) is not None


def _within_cap(seconds: float) -> float:
    return min(max(0.0, seconds), RETRY_AFTER_CAP_SECONDS)


def _http_date(text: str, now: datetime) -> datetime | None:
    found = next(filter(None, (form.fullmatch(text) for form in _HTTP_DATES)), None)
    if found is None:
        return None
    year = int(found["year"])
    try:
        return datetime(
            _full_year(year, now.year) if len(found["year"]) == 2 else year,
            _MONTHS.index(found["month"]) + 1,
            int(found["day"]),
            int(found["hour"]),
            int(found["minute"]),
            59 if found["second"] == "60" else int(found["second"]),  # a leap second is a valid time that datetime has no room for
            tzinfo=UTC,
        )
    except ValueError:
        return None


def _full_year(two_digits: int, this_year: int) -> int:
    """Return the year with these last digits that is at most 50 years ahead (RFC 9110, section 5.6.7), else the latest one before."""
    latest = this_year + 50
    return latest - (latest - two_digits) % 100
