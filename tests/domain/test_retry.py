"""What an answer means, how long to wait, and what may be shown of it. Must not send anything."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.model import RetryPolicy
from app.domain.retry import (
    MAX_ERROR_CHARACTERS,
    MAX_REASON_CHARACTERS,
    Accepted,
    Attempt,
    Done,
    Failure,
    Permanent,
    Retry,
    Verdict,
    backoff_seconds,
    judge,
    judge_poll,
    last_error,
    retry_after_seconds,
    wait_seconds,
)

POLICY = RetryPolicy()
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def answered(status: int, *, retry_after: str | None = None, location: str | None = None, detail: str = "") -> Attempt:
    """Make an attempt that was answered."""
    return Attempt(status=status, failure=None, was_sent=True, retry_after=retry_after, location=location, detail=detail, duration_ms=7)


def failed(failure: Failure, *, was_sent: bool, detail: str = "") -> Attempt:
    """Make an attempt that was not answered."""
    return Attempt(status=None, failure=failure, was_sent=was_sent, retry_after=None, location=None, detail=detail, duration_ms=7)


def kind_of(verdict: Verdict) -> str:
    """Write a verdict as the tables here do."""
    match verdict:
        case Done():
            return "done"
        case Accepted():
            return "accepted"
        case Retry():
            return "retry, unknown" if verdict.is_outcome_unknown else "retry"
        case Permanent():
            return "permanent, unknown" if verdict.is_outcome_unknown else "permanent"


# Contract, section 4, "What an answer means". The last five rows of 5xx and the 3xx are where its two lists are silent.
ANSWERS = {
    "done": [200, 201, 203, 204, 205, 206, 226, 299],
    "accepted": [202],
    "retry": [425, 429, 503],
    "retry, unknown": [408, 500, 502, 504, 501, 505, 507, 524, 599, 100, 101, 103, 199, 0, 99, 600, 999],
    "permanent": [
        400,
        401,
        402,
        403,
        404,
        405,
        406,
        407,
        409,
        410,
        411,
        412,
        413,
        415,
        417,
        418,
        421,
        422,
        423,
        424,
        426,
        428,
        431,
        451,
        499,
    ],
    "permanent, unknown": [300, 301, 302, 303, 304, 305, 307, 308, 399],
}


@pytest.mark.parametrize(("status", "expected"), [(status, kind) for kind, statuses in ANSWERS.items() for status in statuses])
def test_judge_follows_the_table_when_a_status_came(status: int, expected: str) -> None:
    """Every status has the meaning that the contract gives it."""
    assert kind_of(judge(answered(status), POLICY, may_be_processing=False)) == expected


@pytest.mark.parametrize("status", [status for statuses in ANSWERS.values() for status in statuses if status != 409])
def test_judge_heeds_earlier_attempts_when_the_status_is_409_only(status: int) -> None:
    """Whether the endpoint may still be busy changes nothing but the meaning of a 409."""
    attempt = answered(status, retry_after="5")
    assert judge(attempt, POLICY, may_be_processing=True) == judge(attempt, POLICY, may_be_processing=False)


@pytest.mark.parametrize(
    ("retry_after", "may_be_processing", "expected"),
    [
        (None, False, "permanent"),
        (None, True, "retry"),
        ("3", False, "retry"),
        ("0", False, "retry"),
        ("Fri, 02 Jan 2026 03:04:09 GMT", False, "retry"),
        ("soon", False, "permanent"),
        ("", False, "permanent"),
        ("soon", True, "retry"),
    ],
)
def test_judge_retries_a_409_when_the_endpoint_is_still_busy(retry_after: str | None, expected: str, *, may_be_processing: bool) -> None:
    """A conflict with our own earlier attempt is no refusal; rubbish in Retry-After is no promise."""
    assert kind_of(judge(answered(409, retry_after=retry_after), POLICY, may_be_processing=may_be_processing)) == expected


@pytest.mark.parametrize("was_sent", [False, True])
@pytest.mark.parametrize("failure", list(Failure))
def test_judge_retries_when_the_transport_failed(failure: Failure, *, was_sent: bool) -> None:
    """What never left was not processed, what left may have been; a forbidden destination stays forbidden."""
    is_unknown = was_sent or failure is Failure.INTERRUPTED
    expected = ("permanent" if failure is Failure.EGRESS_DENIED else "retry") + (", unknown" if is_unknown else "")
    assert kind_of(judge(failed(failure, was_sent=was_sent), POLICY, may_be_processing=False)) == expected


@pytest.mark.parametrize(
    ("status", "retry_on", "compensated_on", "expected"),
    [
        (404, [], [404, 410], "done"),
        (410, [], [404, 410], "done"),
        (409, [], [409], "done"),
        (202, [], [202], "done"),
        (303, [], [303], "done"),
        (500, [], [500], "done"),
        (404, [404], [], "retry"),
        (423, [423], [], "retry"),
        (302, [302], [], "retry, unknown"),
        (200, [200], [], "retry"),
        (409, [409], [], "retry"),
        (404, [404], [404], "retry"),
        (403, [404], [410], "permanent"),
    ],
)
def test_judge_follows_the_descriptor_when_it_lists_the_status(
    status: int, retry_on: list[int], compensated_on: list[int], expected: str
) -> None:
    """The descriptor's lists override the table, and doubt goes to the retry."""
    policy = RetryPolicy(retry_on=frozenset(retry_on), compensated_on=frozenset(compensated_on))
    assert kind_of(judge(answered(status), policy, may_be_processing=False)) == expected


@pytest.mark.parametrize("location", [None, "/jobs/7"])
@pytest.mark.parametrize("judge_it", [lambda attempt: judge(attempt, POLICY, may_be_processing=False), judge_poll])
def test_judging_keeps_the_location_when_the_answer_is_202(judge_it: object, location: str | None) -> None:
    """The caller knows where to poll, or that there is nowhere."""
    assert callable(judge_it)
    assert judge_it(answered(202, location=location)) == Accepted(location=location)


POLLS = {
    "done": [200, 201, 204, 299],
    "accepted": [202],
    "retry, unknown": [408, 425, 429, 500, 501, 502, 503, 504, 599, 101, 999],
    "permanent, unknown": [400, 401, 403, 404, 409, 410, 422, 451, 301, 302, 303, 307],
}


@pytest.mark.parametrize(("status", "expected"), [(status, kind) for kind, statuses in POLLS.items() for status in statuses])
def test_judge_poll_follows_its_table_when_a_status_came(status: int, expected: str) -> None:
    """A poll that fails says nothing about the accepted call, and a 303 is not followed."""
    assert kind_of(judge_poll(answered(status, retry_after="1"))) == expected


@pytest.mark.parametrize("failure", list(Failure))
def test_judge_poll_retries_when_the_transport_failed(failure: Failure) -> None:
    """Even a poll that never left leaves the accepted call unknown."""
    expected = "permanent, unknown" if failure is Failure.EGRESS_DENIED else "retry, unknown"
    assert kind_of(judge_poll(failed(failure, was_sent=False))) == expected


@pytest.mark.parametrize(
    ("attempt", "reason"),
    [
        (answered(503, detail="<html>down"), "http 503"),
        (answered(302, location="https://user:secret@other.example/path?token=1"), "http 302 to other.example: redirects are not followed"),
        (answered(303, location="/result"), "http 303: redirects are not followed"),
        (answered(301, location="https://[bad"), "http 301: redirects are not followed"),
        (answered(302, location="https://a\u202eb.example/"), "http 302 to a\\u202eb.example: redirects are not followed"),
        (answered(302, location=f"https://{'a' * 90}.example/"), f"http 302 to {'a' * 50} ... (cut): redirects are not followed"),
        (answered(101), "protocol: http 101 is no final answer"),
        (failed(Failure.CONNECT, was_sent=False, detail="refused"), "connect: refused"),
        (failed(Failure.TIMEOUT, was_sent=True), "timeout"),
        (failed(Failure.TLS, was_sent=False, detail="bad\r\n\x1b[31mcertificate"), "tls: bad\\r\\n\\x1b[31mcertificate"),
    ],
)
def test_judge_gives_a_reason_for_people_when_it_is_not_done(attempt: Attempt, reason: str) -> None:
    """The reason is a class and our own words, never what the endpoint wrote."""
    verdict = judge(attempt, POLICY, may_be_processing=False)
    assert isinstance(verdict, Retry | Permanent)
    assert verdict.reason == reason


@given(st.text(), st.sampled_from(Failure), st.text())
def test_reason_and_last_error_are_safe_when_the_texts_are_any(detail: str, failure: Failure, location: str) -> None:
    """Nothing in them steers a terminal, breaks a line or runs on."""
    attempts = [
        failed(failure, was_sent=True, detail=detail),
        answered(302, location=location, detail=detail),
        answered(500, detail=detail),
    ]
    for attempt in attempts:
        verdict = judge(attempt, POLICY, may_be_processing=False)
        assert isinstance(verdict, Retry | Permanent)
        assert verdict.reason.isprintable()
        assert last_error(attempt).isprintable()
        assert len(verdict.reason) <= MAX_REASON_CHARACTERS


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        (answered(500), "http 500"),
        (answered(400, detail='{"error": "Stra\u00dfe"}'), 'http 400: {"error": "Stra\u00dfe"}'),
        (answered(400, detail="a\nb\tc\x00\x7f\x1b]0;x\x07"), "http 400: a\\nb\\tc\\x00\\x7f\\x1b]0;x\\x07"),
        (answered(400, detail="\u202e\u2066\u200b\u2028\u00a0\u3000\ufeff"), "http 400: \\u202e\\u2066\\u200b\\u2028\\xa0\\u3000\\ufeff"),
        (answered(400, detail="\ud800\U000e0041"), "http 400: \\ud800\\U000e0041"),
        (failed(Failure.DNS, was_sent=False, detail="no address for billing.example"), "dns: no address for billing.example"),
        (failed(Failure.INTERRUPTED, was_sent=True), "interrupted"),
    ],
)
def test_last_error_is_one_safe_line_when_the_answer_is_hostile(attempt: Attempt, expected: str) -> None:
    """What steers terminals or reorders text is shown, not obeyed."""
    assert last_error(attempt) == expected


@pytest.mark.parametrize("detail", ["x" * 100_000, "\x1b" * 100_000, "x" * MAX_ERROR_CHARACTERS])
def test_last_error_is_cut_visibly_when_the_answer_is_long(detail: str) -> None:
    """A reader sees that there was more."""
    text = last_error(answered(500, detail=detail))
    assert len(text) == MAX_ERROR_CHARACTERS
    assert text.endswith("(cut)")


@pytest.mark.parametrize(("status", "failure"), [(None, None), (200, Failure.RESET)])
def test_attempt_refuses_when_it_has_not_exactly_one_end(status: int | None, failure: Failure | None) -> None:
    """An attempt ends with a status or with a failure."""
    with pytest.raises(ValueError, match="exactly one"):
        Attempt(status=status, failure=failure, was_sent=True, retry_after=None, location=None, detail="", duration_ms=0)


@pytest.mark.parametrize(
    ("failures", "ceiling"), [(0, 0.1), (1, 0.1), (2, 0.2), (3, 0.4), (6, 3.2), (7, 5.0), (50, 5.0), (10**6, 5.0), (10**400, 5.0)]
)
def test_backoff_doubles_to_the_cap_when_failures_grow(failures: int, ceiling: float) -> None:
    """The third seed's numbers: 100 ms, times two, at most 5 s, with full jitter below."""
    assert backoff_seconds(POLICY, failures, 0.0) == 0.0
    assert backoff_seconds(POLICY, failures, 0.5) == pytest.approx(ceiling / 2)
    assert backoff_seconds(POLICY, failures, 1 - 2**-53) == pytest.approx(ceiling)


def test_backoff_is_nothing_when_the_first_interval_is_nothing() -> None:
    """A policy without waits has none, however often it fails."""
    assert backoff_seconds(RetryPolicy(initial_interval_ms=0), 10**6, 0.5) == 0.0


@given(
    initial=st.integers(0, 10**9),
    multiplier=st.floats(0, 1e300),
    cap=st.integers(0, 10**9),
    failures=st.integers(0, 10**12),
    unit=st.floats(0, 1, exclude_max=True),
)
def test_backoff_stays_within_its_cap_when_the_numbers_are_any(
    initial: int, multiplier: float, cap: int, failures: int, unit: float
) -> None:
    """No policy makes a wait negative, endless, undefined or an overflow."""
    policy = RetryPolicy(initial_interval_ms=initial, multiplier=multiplier, max_interval_ms=cap)
    assert 0 <= backoff_seconds(policy, failures, unit) <= cap / 1000


@given(failures=st.integers(1, 100), unit=st.floats(0, 1, exclude_max=True))
def test_backoff_never_shrinks_when_one_more_failure_is_counted(failures: int, unit: float) -> None:
    """The same dice give a wait at least as long after more failures."""
    assert backoff_seconds(POLICY, failures, unit) <= backoff_seconds(POLICY, failures + 1, unit)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("0", 0),
        ("120", 120),
        (" 120\t", 120),
        ("007", 7),
        ("3600", 3600),
        ("3601", 3600),
        ("9999", 3600),
        ("86400", 3600),
        ("9" * 10_000, 3600),
        ("-5", 0),
        ("-0", 0),
        ("Fri, 02 Jan 2026 03:05:05 GMT", 60),
        ("Fri, 02 Jan 2026 03:04:05 GMT", 0),
        ("Thu, 01 Jan 2026 03:04:05 GMT", 0),
        ("Sat, 03 Jan 2026 03:04:05 GMT", 3600),
        ("Mon, 02 Jan 2026 03:05:05 GMT", 60),
        ("Fri, 02 Jan 2026 03:04:60 GMT", 54),
        ("Friday, 02-Jan-26 03:05:05 GMT", 60),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 0),
        ("Friday, 02-Jan-76 03:05:05 GMT", 3600),
        ("Friday, 02-Jan-77 03:05:05 GMT", 0),
        ("Fri Jan  2 03:05:05 2026", 60),
        ("Fri Jan 02 03:05:05 2026", 60),
        ("Sun Nov  6 08:49:37 1994", 0),
        ("", None),
        (" ", None),
        ("soon", None),
        ("1.5", None),
        ("+5", None),
        ("5s", None),
        ("5, 10", None),
        ("5\n", None),
        ("1e3", None),
        ("0x10", None),
        ("--5", None),
        ("\u0661\u0662", None),
        ("\uff15", None),
        ("\u00b2", None),
        ("2026-01-02T03:05:05Z", None),
        ("Fri, 02 Jan 2026 03:05:05 UTC", None),
        ("Fri, 02 Jan 2026 03:05:05 +0000", None),
        ("Fri, 2 Jan 2026 03:05:05 GMT", None),
        ("Fri, 30 Feb 2026 03:05:05 GMT", None),
        ("Fri, 02 Jan 2026 24:00:00 GMT", None),
        ("Fri, 02 Jan 2026 03:60:05 GMT", None),
        ("Fri, 02 Jan 2026 03:05:61 GMT", None),
        ("Fri, 02 Jan 0000 03:05:05 GMT", None),
        ("Fri, 02 Foo 2026 03:05:05 GMT", None),
        ("fri, 02 jan 2026 03:05:05 gmt", None),
        ("Fri, \u0660\u0662 Jan 2026 03:05:05 GMT", None),
    ],
)
def test_retry_after_is_read_as_rfc_9110_says_when_it_is_given(value: str | None, seconds: float | None) -> None:
    """Seconds and all three forms of date, within an hour; anything else is ignored."""
    assert retry_after_seconds(value, NOW) == seconds


@pytest.mark.parametrize(
    ("year", "last_digits", "full"), [(2026, 76, 2076), (2026, 77, 1977), (2099, 0, 2100), (2100, 99, 2099), (2000, 49, 2049)]
)
def test_retry_after_picks_the_century_when_a_year_has_two_digits(year: int, last_digits: int, full: int) -> None:
    """A date of the old form is never read as more than 50 years ahead."""
    value = f"Monday, 01-Mar-{last_digits:02} 00:00:30 GMT"
    assert retry_after_seconds(value, datetime(full, 3, 1, tzinfo=UTC)) == 30
    assert retry_after_seconds(value, datetime(year, 3, 1, tzinfo=UTC)) == (0 if full < year else 3600)


@given(st.text(max_size=40) | st.text("0123456789-:, GMTFriJan", max_size=40), st.datetimes(datetime(1970, 1, 1), datetime(2500, 1, 1)))  # noqa: DTZ001 - made aware below
def test_retry_after_is_bounded_when_the_value_is_any(value: str, moment: datetime) -> None:
    """No header can raise, or make us wait longer than an hour."""
    seconds = retry_after_seconds(value, moment.replace(tzinfo=UTC))
    assert seconds is None or 0 <= seconds <= 3600


@given(st.datetimes(datetime(1990, 1, 1), datetime(2070, 1, 1)), st.integers(0, 3600))  # noqa: DTZ001 - made aware below
def test_retry_after_forms_agree_when_they_name_one_moment(moment: datetime, seconds: int) -> None:
    """The three forms of a date, and the seconds, ask for the same wait."""
    now = moment.replace(microsecond=0, tzinfo=UTC)
    due = now + timedelta(seconds=seconds)
    forms = [
        f"{due:%a, %d %b %Y %H:%M:%S} GMT",
        f"{due:%A, %d-%b-%y %H:%M:%S} GMT",
        f"{due:%a %b} {due.day:2} {due:%H:%M:%S %Y}",
        str(seconds),
    ]
    assert {retry_after_seconds(form, now) for form in forms} == {seconds}


@pytest.mark.parametrize(
    ("retry_after", "unit", "expected"),
    [(None, 0.5, 0.2), ("rubbish", 0.5, 0.2), ("0", 0.5, 0.2), ("2", 0.5, 2.0), ("7200", 0.0, 3600.0), (None, 0.0, 0.0)],
)
def test_wait_is_the_longer_one_when_the_endpoint_asks_too(retry_after: str | None, unit: float, expected: float) -> None:
    """The endpoint may lengthen our own wait, not shorten it."""
    assert wait_seconds(POLICY, 3, unit, retry_after, NOW) == pytest.approx(expected)
