"""What the how-to says of outages and pauses is what the code does. Must not test circuits: see tests/engine. It is played, too."""

import re

from app.cli.pausing import EVERYTHING
from app.domain.circuits import AWAY_FAILURES, AWAY_STATUSES, FIRST_PROBE_SECONDS, MAX_PROBE_SECONDS
from app.domain.retry import Failure
from app.settings import Settings
from app.storage.pauses import Scope
from tests.docs.documents import read
from tests.golden import REPOSITORY

DOCUMENT = read(REPOSITORY / "docs/how-to/ride-out-an-outage.md")
TEXT = " ".join(DOCUMENT.prose.split())


def test_numbers_are_the_codes_when_a_circuit_is_explained() -> None:
    """Whoever waits for a probe, or wonders why a circuit is not open, counts with these."""
    assert Settings.model_fields["circuit_calls"].default == 5
    assert "Five calls of an org in a row" in TEXT
    assert "the first four of each replica may have halted" in TEXT
    assert (FIRST_PROBE_SECONDS, MAX_PROBE_SECONDS) == (1.0, 60.0)
    assert "after a second at first, then ever more rarely, but once a minute at least" in TEXT


def test_outages_are_the_codes_when_they_are_listed() -> None:
    """A 500 is none: who waits for a circuit there has to pause."""
    assert frozenset(map(int, re.findall(r"\b50\d\b", TEXT.partition("no answer in time,")[2].partition(".")[0]))) == AWAY_STATUSES
    assert set(Failure) - AWAY_FAILURES == {Failure.EGRESS_DENIED, Failure.PROTOCOL, Failure.INTERRUPTED}


def test_every_scope_of_a_pause_has_its_row_when_they_are_compared() -> None:
    """The widest has no route: it is for who has the database."""
    rows = re.findall(r"^\| [^|]+ \| (`POST [^|]+`|-) \| `(pause [^|]+)` \|$", DOCUMENT.prose, re.MULTILINE)
    assert len(rows) == len(Scope)
    assert [command for route, command in rows if route == "-"] == ["pause --reason R"]
    assert str(Scope.EVERYTHING) == EVERYTHING
