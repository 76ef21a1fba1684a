"""What the how-to says of an undo request and its answers is what is sent and judged. Must not test the endpoint: it is played."""

import re

import pytest

from app.domain.model import RetryPolicy
from app.domain.retry import Attempt, Failure, judge
from tests.docs.documents import read
from tests.factories import Service, do_step
from tests.fakes import FakeEndpoint
from tests.golden import REPOSITORY
from tests.probes import rest

DOCUMENT = read(REPOSITORY / "docs/how-to/write-an-undo-endpoint.md")


def rows(first_column: str) -> list[list[str]]:
    """Return the rows of the table whose first column has this title, by column."""
    _, _, after = DOCUMENT.prose.partition(f"\n| {first_column} |")
    table = after.split("\n\n")[0].splitlines()[2:]
    return [[column.strip() for column in line.strip("|").split(" | ")] for line in table]


async def test_headers_are_those_that_arrive(service: Service, endpoint: FakeEndpoint) -> None:
    """Whoever writes an endpoint by the table waits for no header that never comes, and is surprised by none."""
    await do_step(service.agent, "run-1", 1, endpoint.url("/undo"))
    await rest(service.agent, "run-1")
    (request,) = endpoint.received
    shown = {name.lower() for row in rows("header") for name in re.findall(r"`([A-Za-z-]+)`", row[0])}
    assert {name.decode().lower() for name, _ in request.headers} == shown
    assert (request.method, request.header("Content-Type")) == ("POST", "application/json")
    assert re.fullmatch(r"undo-[0-9a-f-]{36}", request.key or "")


def verdict_of(attempt: Attempt, *, may_be_processing: bool = False) -> str:
    """Name what an attempt means."""
    return type(judge(attempt, RetryPolicy(), may_be_processing=may_be_processing)).__name__


def answered(status: int, retry_after: str | None = None) -> Attempt:
    """Make an attempt that was answered."""
    return Attempt(status=status, failure=None, was_sent=True, retry_after=retry_after, location=None, detail="", duration_ms=1)


BEGINNINGS = {"Done": "done", "Accepted": "not done", "Retry": "try again", "Permanent": "given up"}


@pytest.mark.parametrize("row", rows("answer"), ids=lambda row: row[0])
def test_answers_mean_what_is_said(row: list[str]) -> None:
    """Each status that is named is judged as its row begins; a row that ends in "any other" has that sort."""
    statuses = [int(status) for status in re.findall(r"`(\d{3})`", row[0])]
    assert statuses
    for status in statuses:
        assert row[1].startswith(BEGINNINGS[verdict_of(answered(status))]), status


@pytest.mark.parametrize("failure", sorted(set(Failure) - {Failure.EGRESS_DENIED}))
def test_no_answer_means_what_is_said(failure: Failure) -> None:
    """Whatever kept an answer away; an address that may not be reached is no endpoint's doing."""
    (row,) = (row for row in rows("answer") if row[0].endswith(", no answer"))
    silent = Attempt(status=None, failure=failure, was_sent=True, retry_after=None, location=None, detail="", duration_ms=1)
    assert row[1].startswith(BEGINNINGS[verdict_of(silent)])


def test_answers_have_a_row_for_each_status() -> None:
    """Named, or under `any other` of its hundred: what an endpoint may answer is foretold."""
    named = {int(status) for row in rows("answer") for status in re.findall(r"`(\d{3})`", row[0])}
    others = {found[1]: row[1] for row in rows("answer") for found in re.finditer(r"any other (\d)xx", row[0])}
    assert others.keys() == {"2", "4", "5"}
    for status in set(range(200, 600)) - named - set(range(300, 400)):
        assert others[str(status)[0]].startswith(BEGINNINGS[verdict_of(answered(status))]), status
    assert {verdict_of(answered(status)) for status in range(300, 400)} == {"Permanent"}


def test_conflict_is_tried_again_where_it_is_said() -> None:
    """409 alone depends on what was before: the exceptions that its row names are all there are."""
    assert verdict_of(answered(409)) == "Permanent"
    assert verdict_of(answered(409, retry_after="1")) == "Retry"
    assert verdict_of(answered(409), may_be_processing=True) == "Retry"
    (row,) = (row for row in rows("answer") if row[0] == "`409`")
    left_open = {
        status
        for status in range(400, 600)
        if getattr(judge(answered(status), RetryPolicy(), may_be_processing=False), "is_outcome_unknown", False)
    }
    assert left_open == {408, *range(500, 600)} - {503}
    assert "answered 202, 408, a 5xx but 503, or not at all" in row[1]
