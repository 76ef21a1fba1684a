"""What an outgoing call goes through whatever it is for. Must not test what follows from its end, or what a status means."""

from datetime import timedelta
from typing import Any

import pytest

from app.domain import sending
from app.domain.model import CallId, CallKind, Outcome, OutgoingCall, RetryPolicy, StepIndex
from app.domain.retry import MAX_ERROR_CHARACTERS, Attempt, Failure
from app.domain.sending import Send, Wait, destination_of
from tests.domain.world import (
    START,
    UNDO_URL,
    answered,
    broken,
    new_action_call,
    new_call,
    new_draft,
    new_effect,
    new_session,
)

POLICY = RetryPolicy(max_retries=2, initial_interval_ms=1_000, multiplier=2.0, max_interval_ms=60_000, deadline_ms=600_000)
UNIT = 0.5
LOCATION = "https://ledger.example/jobs/7"


def sent(**changes: Any) -> OutgoingCall:
    """Make a call that was sent once, and whose answer is not there yet."""
    values: dict[str, Any] = {
        "url": UNDO_URL,
        "body": b"{}",
        "outcome": Outcome.COMMITTED,
        "attempts": 1,
        "is_attempt_open": True,
        "first_sent_at": START,
        "deadline_at": START + timedelta(seconds=600),
    }
    return new_call(**{**values, **changes})


@pytest.mark.parametrize("kind", CallKind)
def test_call_is_due_and_unsent_when_it_is_new(kind: CallKind) -> None:
    """It has its deadline and its destination from the start, and nothing that could be sent yet."""
    call_id = CallId(new_effect().effect_id)
    call = sending.new_call(call_id, kind, StepIndex(3), "http://ledger.example/u", START, POLICY)
    assert (call.call_id, call.kind, call.step_index, call.destination) == (call_id, kind, 3, "ledger.example:80")
    assert (call.due_at, call.deadline_at) == (START, START + timedelta(seconds=600))
    assert {call.url, call.body, call.outcome, call.first_sent_at, call.poll_url, call.last_status, call.last_error} == {None}
    assert {call.attempts, call.failures, call.interrupted, call.polls, call.epoch} == {0}
    assert not call.is_attempt_open
    assert not call.may_be_processing


def test_key_says_what_the_call_is_for_when_it_is_sent() -> None:
    """An action goes out under the forward key of its effect, an undo under the key of its entry."""
    assert new_action_call().idempotency_key == new_effect().forward_key
    assert new_call().idempotency_key == f"undo-{new_call().call_id}"


@pytest.mark.parametrize(("outcome", "call"), [(Outcome.UNKNOWN, new_call()), (None, new_action_call())])
def test_bytes_and_url_are_fixed_when_the_call_is_frozen(outcome: Outcome | None, call: OutgoingCall) -> None:
    """URL, bytes, outcome and destination are written in one, with the moment from which the key's age counts."""
    draft = new_draft(new_session(), START + timedelta(seconds=5))
    frozen = sending.freeze(draft, call, "https://ledger.example:8443/u?a=1", b'{"a":1.50}', outcome)
    assert (frozen.url, frozen.body, frozen.outcome) == ("https://ledger.example:8443/u?a=1", b'{"a":1.50}', outcome)
    assert (frozen.destination, frozen.first_sent_at, frozen.attempts) == ("ledger.example:8443", draft.now, 0)


@pytest.mark.parametrize(("poll_url", "counted"), [(None, (2, 0)), (LOCATION, (1, 1))])
def test_request_is_counted_when_it_is_about_to_leave(poll_url: str | None, counted: tuple[int, int]) -> None:
    """An attempt, or a question about an earlier one: never both, and open until its end is recorded."""
    call = sending.count(new_draft(new_session()), sent(is_attempt_open=False, poll_url=poll_url))
    assert (call.attempts, call.polls, call.is_attempt_open) == (*counted, True)
    assert Send(call=call, effect=new_effect(), policy=POLICY).is_poll is (poll_url is not None)


def test_attempt_is_taken_for_unknown_when_nobody_recorded_its_end() -> None:
    """It may have been processed; one whose end was recorded is left alone."""
    draft = new_draft(new_session())
    assert sending.close_interrupted(draft, sent(is_attempt_open=False)) == sent(is_attempt_open=False)
    assert draft.is_empty
    call = sending.close_interrupted(draft, sent(interrupted=2, failures=1, attempts=4))
    assert (call.is_attempt_open, call.interrupted, call.failures, call.may_be_processing) == (False, 3, 1, True)
    assert call.last_error == "interrupted: the end of attempt 4 was never recorded"


# An answer, whether it answers a poll -> whether the call may have been, or may still be, processed; once it may, that stays.
NOTES: list[tuple[Attempt, bool, bool]] = [
    (answered(200), False, False),
    (answered(400), False, False),
    (answered(409), False, False),
    (answered(425), False, False),
    (answered(429), False, False),
    (answered(503), False, False),
    (broken(Failure.CONNECT, was_sent=False), False, False),
    (broken(Failure.EGRESS_DENIED, was_sent=False), False, False),
    (answered(202), False, True),
    (answered(303), False, True),
    (answered(408), False, True),
    (answered(500), False, True),
    (answered(504), False, True),
    (broken(Failure.TIMEOUT, was_sent=True), False, True),
    (answered(202), True, True),
    (answered(404), True, True),
    (answered(503), True, True),
    (broken(Failure.CONNECT, was_sent=False), True, True),
]


@pytest.mark.parametrize(("attempt", "is_poll", "may_be_processing"), NOTES)
def test_doubt_is_kept_when_an_attempt_has_ended(attempt: Attempt, is_poll: bool, may_be_processing: bool) -> None:
    """What is certain is only what every attempt was certain of."""
    for was_in_doubt in (False, True):
        call = sent(poll_url=LOCATION if is_poll else None, may_be_processing=was_in_doubt)
        noted, _ = sending.note(new_draft(new_session()), call, attempt, POLICY)
        assert noted.may_be_processing is (was_in_doubt or may_be_processing)
        assert (noted.is_attempt_open, noted.last_status) == (False, attempt.status)
        assert (noted.last_error is None) is (attempt.status == 200)


# Failures so far -> the wait in seconds (half of the ceiling), or None where the budget is used up.
BUDGET = [(0, 0.5), (1, 1.0), (2, None)]


@pytest.mark.parametrize(("failures", "seconds"), BUDGET)
def test_budget_is_used_up_when_an_attempt_fails(failures: int, seconds: float | None) -> None:
    """Each failure costs one; the last leaves the call to be given up."""
    draft = new_draft(new_session())
    tried = sending.retry_later(draft, sent(failures=failures), POLICY, answered(500), UNIT, is_charged=True)
    if seconds is None:
        assert isinstance(tried, OutgoingCall)
        assert tried.failures == POLICY.max_retries + 1
        return
    assert isinstance(tried, Wait)
    assert tried.seconds == pytest.approx(seconds)
    assert tried.call.failures == failures + 1
    assert tried.call.due_at == START + timedelta(seconds=seconds)


@pytest.mark.parametrize(("failures", "seconds"), [(0, 0.5), (1, 0.5), (2, 1.0), (3, 2.0)])
def test_budget_stays_when_an_attempt_is_not_charged(failures: int, seconds: float) -> None:
    """While a destination is away its calls wait, and are given up neither by the first such attempt nor by the thousandth."""
    waiting = sending.retry_later(new_draft(new_session()), sent(failures=failures), POLICY, answered(503), UNIT, is_charged=False)
    assert isinstance(waiting, Wait)
    assert waiting.seconds == pytest.approx(seconds)
    assert waiting.call.failures == failures


@pytest.mark.parametrize(("polls", "seconds"), [(1, 0.5), (2, 1.0), (3, 2.0), (50, 30.0)])
def test_budget_stays_when_a_location_does_not_answer(polls: int, seconds: float) -> None:
    """Asking costs nothing, and is done ever more rarely."""
    call = sent(poll_url=LOCATION, polls=polls)
    for waiting in (
        sending.retry_later(new_draft(new_session()), call, POLICY, answered(500), UNIT, is_charged=True),
        sending.poll_later(new_draft(new_session()), call, POLICY, answered(202), UNIT),
    ):
        assert isinstance(waiting, Wait)
        assert waiting.seconds == pytest.approx(seconds)
        assert waiting.call.failures == 0


def test_location_is_asked_when_the_first_202_names_one() -> None:
    """Later ones do not lead elsewhere; without one the same bytes are sent again."""
    first = sending.poll_later(new_draft(new_session()), sent(), POLICY, answered(202, location="/jobs/7"), UNIT)
    assert first.call.poll_url == LOCATION
    again = sending.poll_later(new_draft(new_session()), first.call, POLICY, answered(202, location="/jobs/8"), UNIT)
    assert again.call.poll_url == LOCATION
    assert sending.poll_later(new_draft(new_session()), sent(), POLICY, answered(202), UNIT).call.poll_url is None


def test_wait_ends_at_the_deadline_when_the_endpoint_asks_for_more() -> None:
    """Nobody waits for longer than there is time."""
    draft = new_draft(new_session(), START + timedelta(seconds=590))
    waiting = sending.poll_later(draft, sent(), POLICY, answered(202, retry_after="60"), UNIT)
    assert (waiting.seconds, waiting.call.due_at) == (10.0, waiting.call.deadline_at)


# What a call has come to by its deadline -> whether its endpoint took it.
GIVEN_UP = [
    (sent(last_status=503, last_error="http 503"), False),
    (sent(last_status=None, last_error="timeout"), False),
    (sent(last_status=202, last_error="http 202"), True),
    (sent(last_status=500, last_error="asking the Location of a 202: http 500", poll_url=LOCATION), True),
]


@pytest.mark.parametrize(("call", "was_taken"), GIVEN_UP)
def test_error_says_that_the_endpoint_took_the_call_when_it_never_finished(call: OutgoingCall, was_taken: bool) -> None:
    """Whoever looks into it has to ask there."""
    given_up = sending.give_up_at_deadline(new_draft(new_session()), call)
    told = f"accepted but never finished; the last answer was: {call.last_error}"
    assert given_up.last_error == (told if was_taken else call.last_error)


def test_error_stays_short_when_the_endpoint_wrote_much() -> None:
    """What is kept for people has one limit, whatever is put before it."""
    long = Attempt(
        status=500, failure=None, was_sent=True, retry_after=None, location=None, detail="x" * MAX_ERROR_CHARACTERS, duration_ms=7
    )
    draft = new_draft(new_session())
    noted, _ = sending.note(draft, sent(poll_url=LOCATION), long, POLICY)
    assert noted.last_error is not None
    assert noted.last_error.startswith("asking the Location of a 202: http 500: xxx")
    given_up = sending.give_up_at_deadline(draft, noted)
    assert given_up.last_error is not None
    assert {len(noted.last_error), len(given_up.last_error)} == {MAX_ERROR_CHARACTERS}


@pytest.mark.parametrize("url", [None, "https://moved.example/undo"])
def test_budget_is_full_again_when_a_call_is_taken_up_anew(url: str | None) -> None:
    """Due now, with a new deadline, and asked about no more; what was sent, and what is known of it, stays."""
    used_up = sent(
        is_attempt_open=False,
        due_at=None,
        attempts=9,
        failures=3,
        interrupted=4,
        polls=2,
        may_be_processing=True,
        poll_url=LOCATION,
        last_error="http 500",
    )
    draft = new_draft(new_session(), START + timedelta(hours=48))
    call = sending.refill(draft, used_up, POLICY, url)
    assert (call.due_at, call.deadline_at) == (draft.now, draft.now + timedelta(seconds=600))
    assert (call.failures, call.interrupted, call.poll_url) == (0, 0, None)
    assert (call.attempts, call.polls, call.may_be_processing, call.last_error) == (9, 2, True, "http 500")
    assert (call.body, call.outcome, call.first_sent_at) == (used_up.body, used_up.outcome, START)
    assert (call.url, call.destination) == ((url, "moved.example:443") if url else (UNDO_URL, "ledger.example:443"))


SPELLINGS = {
    "http://127.0.0.1:9815/undo": "127.0.0.1:9815",
    "http://127.1:9815/undo": "127.0.0.1:9815",
    "http://2130706433:9815/undo": "127.0.0.1:9815",
    "http://127.0.0.1.:9815/undo": "127.0.0.1:9815",
    "http://LOCALHOST.:9815": "localhost:9815",
    "https://Ledger.example/undo?x=1": "ledger.example:443",
    "http://[2001:4860:4860:0:0:0:0:8888]:81/": "2001:4860:4860::8888:81",
    "not a url": "not a url",
}


@pytest.mark.parametrize(("url", "destination"), SPELLINGS.items())
def test_destination_is_one_when_its_url_is_spelt_otherwise(url: str, destination: str) -> None:
    """A pause, a circuit and a bound hold a host, not a way to write it."""
    assert destination_of(url) == destination
