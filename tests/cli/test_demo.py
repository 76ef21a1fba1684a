"""The demo: it succeeds, it survives the kill, and it says so when anything is not as promised. Must not know how it is drawn."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from app.cli.demo import run_demo
from app.cli.demo.agent import Done
from app.cli.demo.listeners import World, WorldState
from app.cli.demo.systems import CREDITS_PATH, REVERSALS_PATH, Answer, CallLog, JsonObject, Ledger, LedgerLine, LoggedCall, Mail, Request
from app.cli.demo.verdict import Findings, judge
from app.domain.model import Reversibility
from app.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_WIDTH = 110
UNDO_ROW = re.compile(r"^ +(\d) +(\w+) .*(undo-\.\.\w{8}) +(\d) +(\w{8}) +\d+ +\d+ +(\w+) +(\w+)$", re.MULTILINE)
"""Step, endpoint, key, try, fingerprint of the body, answer and effect of one line of a table of undos."""
SECOND_HALF = "The mail service is back"
CHAPTERS = {
    "A. ": ("[AWAITING_APPROVAL] Tool 'send_reply' requires human approval", "409 payload_changed", "compensated"),
    "B. ": ("mail_1 sent", "409 already_released", "halted (failed_after_pivot)"),
    "C. ": ("cannot be undone  step 4 send_reply", "curl -sS -X POST 'http://127.0.0.1:", "/unwind"),
    "D. ": ("halted (compensation_failed) at step 2", "retries", "compensated, not clean"),
}
"""What each chapter of the second half tells, in this order."""


def halves(out: str) -> tuple[str, str]:
    """Split what was told into both halves."""
    first, found, second = out.partition(SECOND_HALF)
    assert found
    return first, second


def test_demo_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    """What fails before the reply is undone by itself, what fails after it by a person, on a Postgres that the demo starts itself."""
    named = os.environ.get("COUNTERMAND_TEST_POSTGRES_BIN_DIR")
    settings = Settings(_env_file=None, database_url=None, postgres_bin_dir=Path(named) if named else None)

    code = run_demo(settings, crash=False)

    told = capsys.readouterr()
    assert (code, told.err) == (0, "")
    first, second = halves(told.out)
    rows = UNDO_ROW.findall(first)
    assert [(step, endpoint, attempt, answer, effect) for step, endpoint, _, attempt, _, answer, effect in rows] == [
        ("4", "shop", "1", "200", "undone"),
        ("3", "tickets", "1", "200", "undone"),
        ("2", "ledger", "1", "200", "undone"),
    ]
    rows = UNDO_ROW.findall(second)
    assert [(step, endpoint, attempt, answer, effect) for step, endpoint, _, attempt, _, answer, effect in rows] == [
        ("3", "shop", "1", "200", "undone"),
        ("2", "tickets", "1", "423", "none"),
        ("2", "tickets", "2", "200", "undone"),
    ]
    (_, _, key, _, body, _, _), (_, _, key_again, _, body_again, _, _) = rows[1:]
    assert (key_again, body_again) == (key, body)
    assert_told(second)
    assert told.out.splitlines()[-1].startswith("demo ok")
    assert "\n  FAILED" not in told.out
    assert "\x1b" not in told.out
    assert max(map(len, told.out.splitlines())) <= MAX_WIDTH


def assert_told(second: str) -> None:
    """Expect each chapter to tell what belongs to it, in its order."""
    chapters = re.split(r"^(?=[A-D]\. )", second, flags=re.MULTILINE)[1:]
    assert [chapter[:3] for chapter in chapters] == list(CHAPTERS)
    for chapter in chapters:
        told = " ".join(chapter.split())
        places = [told.find(" ".join(text.split())) for text in CHAPTERS[chapter[:3]]]
        assert -1 not in places, chapter
        assert places == sorted(places), chapter


def test_demo_with_crash_succeeds(database_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The undo in doubt comes again under its key with its bytes, changes nothing the second time, and the rest follows."""
    code = run_demo(Settings(_env_file=None, database_url=database_url), crash=True)

    told = capsys.readouterr()
    assert (code, told.err) == (0, "")
    first, second = halves(told.out)
    rows = UNDO_ROW.findall(first)
    assert [(step, attempt, answer, effect) for step, _, _, attempt, _, answer, effect in rows] == [
        ("4", "1", "200", "undone"),
        ("3", "1", "lost", "undone"),
        ("3", "2", "200", "none"),
        ("2", "1", "200", "undone"),
    ]
    (_, _, key, _, body, _, _), (_, _, key_again, _, body_again, _, _) = rows[1:3]
    assert (key_again, body_again) == (key, body)
    assert_told(second)
    assert told.out.splitlines()[-1].startswith("demo ok")
    assert max(map(len, told.out.splitlines())) <= MAX_WIDTH


class LyingLedger(Ledger):
    """Answers that it reversed the credit, and does not."""

    def reverse(self, members: JsonObject) -> Answer:
        """Say that it is done."""
        return Answer(status=200, members={"reversed": members["credit_id"]})


def test_demo_fails_when_a_system_lies(database_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What counts is the world, not what the endpoints answered: a credit that is still there is said in one sentence."""
    code = run_demo(Settings(_env_file=None, database_url=database_url), crash=False, world=World.create(ledger=LyingLedger))

    told = capsys.readouterr()
    assert code == 1
    assert "countermand demo: FAILED: not kept: the world is as it was: credits $0 -> $2,500" in told.err
    assert "demo ok" not in told.out


class StutteringMail(Mail):
    """Sends each mail twice."""

    def act(self, request: Request, members: JsonObject) -> Answer:
        """Send it, and once more."""
        super().act(request, members)
        return super().act(request, members)


def test_demo_fails_when_the_second_half_is_not_as_promised(database_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The reply that came twice is told in one sentence, and what would have come after it is not told at all."""
    code = run_demo(Settings(_env_file=None, database_url=database_url), crash=False, world=World.create(mail=StutteringMail))

    told = capsys.readouterr()
    assert code == 1
    assert "countermand demo: FAILED: not kept: the approved bytes went out once, under the forward key" in told.err
    assert "sent 2 mails" in told.err
    assert "demo ok" not in told.out
    assert "\nC. " not in told.out


def test_demo_leaves_nothing_running_when_it_is_interrupted(database_url: str, tmp_path: Path) -> None:
    """Ctrl-C while the service is being started again ends everything, and takes the files away."""
    mark = f"DEMO_MARK={uuid4()}"
    name, value = mark.split("=")
    program = "import sys; from app.cli.demo import run_demo; from app.settings import Settings; sys.exit(run_demo(Settings(), crash=True))"
    environment = {**os.environ, name: value, "TMPDIR": str(tmp_path), "COUNTERMAND_DATABASE_URL": database_url}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        assert demo.stdout is not None
        while "SIGKILL" not in (line := demo.stdout.readline()):
            assert line, "the demo ended before it killed the service"
        demo.send_signal(signal.SIGINT)
        _, err = demo.communicate(timeout=60)

    assert demo.returncode == 128 + signal.SIGINT
    assert err == "countermand demo: stopped, and nothing was left running\n"
    assert list(tmp_path.iterdir()) == []
    assert [path for path in Path("/proc").glob("[0-9]*/environ") if mark in _environment_of(path)] == []


def _environment_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # ended meanwhile, or somebody else's


STEPS = (2, 3, 4)
NOTHING_DONE = WorldState(ledger=(), ticket_status="open", notes=(), mails=0)


def done(step: int) -> Done:
    """Return what the agent did at a step."""
    return Done(
        step_index=step,
        tool=f"tool_{step}",
        reversibility=Reversibility.REVERSIBLE,
        story="",
        undo_story="",
        forward_key=f"effect-{step}",
        undo_id=str(step),
    )


def seen(step: int, *, at: float, attempt: int = 1, **changes: Any) -> LoggedCall:
    """Return an undo that an endpoint saw at a moment and answered a second later."""
    request = Request(method="POST", path="/", key=f"undo-{step}", attempt=attempt, body=changes.pop("body", b"{}"))
    filled = {"ended_at": at + 1, "status": 200, "is_applied": attempt == 1, **changes}
    return LoggedCall(number=int(at), system="shop", request=request, arrived_at=at, **filled)


AS_PROMISED = Findings(
    done=[done(step) for step in STEPS],
    undone=[seen(4, at=10), seen(3, at=20), seen(2, at=30)],
    before=NOTHING_DONE,
    now=replace(NOTHING_DONE, ledger=(LedgerLine(line_id="cr", amount=5), LedgerLine(line_id="rv", amount=-5, reverses="cr"))),
    session_state="compensated",
    halt_reason=None,
    is_clean=True,
    is_journal_valid=True,
    journal_message="",
    journal_entries=17,
    killed_step=None,
)
KILLED = replace(
    AS_PROMISED, killed_step=3, undone=[seen(4, at=10), seen(3, at=20, status=None), seen(3, at=25, attempt=2), seen(2, at=30)]
)


@pytest.mark.parametrize("findings", [AS_PROMISED, KILLED])
def test_judge_finds_no_fault_when_all_is_as_promised(findings: Findings) -> None:
    """A ledger with two more lines that come to nothing is as it was, and an answer that got lost is no fault."""
    assert [check.fault for check in judge(findings) if check.fault] == []


@pytest.mark.parametrize(
    ("findings", "promise"),
    [
        (replace(AS_PROMISED, now=replace(NOTHING_DONE, ticket_status="refunded")), "the world"),
        (replace(AS_PROMISED, now=replace(NOTHING_DONE, notes=("left",))), "the world"),
        (replace(AS_PROMISED, now=replace(NOTHING_DONE, mails=1)), "the world"),
        (replace(AS_PROMISED, undone=[seen(2, at=10), seen(3, at=20), seen(4, at=30)]), "the order"),
        (replace(AS_PROMISED, undone=[seen(4, at=10), seen(3, at=20), seen(2, at=20.5)]), "the order"),
        (replace(AS_PROMISED, undone=[seen(4, at=10, ended_at=None), seen(3, at=20), seen(2, at=30)]), "the order"),
        (replace(AS_PROMISED, undone=[seen(4, at=10), seen(3, at=20), seen(4, at=25, attempt=2), seen(2, at=30)]), "the order"),
        (replace(AS_PROMISED, undone=[seen(4, at=10), seen(3, at=20), seen(2, at=30), seen(2, at=40)]), "each undo"),
        (replace(AS_PROMISED, undone=[seen(4, at=10, is_applied=False), seen(3, at=20), seen(2, at=30)]), "each undo"),
        (replace(AS_PROMISED, session_state="halted", halt_reason="egress_denied"), "the session"),
        (replace(AS_PROMISED, is_clean=False), "the session"),
        (replace(AS_PROMISED, is_journal_valid=False, journal_message="entry 3 was changed"), "the journal"),
        (replace(KILLED, undone=AS_PROMISED.undone), "the undo in doubt"),
        (
            replace(KILLED, undone=[seen(4, at=10), seen(3, at=20), seen(3, at=25, attempt=2, body=b"{ }"), seen(2, at=30)]),
            "the undo in doubt",
        ),
    ],
)
def test_judge_names_the_promise_when_it_is_not_kept(findings: Findings, promise: str) -> None:
    """Each promise has its own check, and only that one fails."""
    failed = [check.promise for check in judge(findings) if check.fault]

    assert len(failed) == 1
    assert failed[0].startswith(promise)


@pytest.mark.parametrize(
    "undone",
    [
        [seen(4, at=10), seen(3, at=20)],
        [seen(4, at=10), seen(3, at=20), seen(2, at=30), seen(9, at=40)],
    ],
)
def test_judge_names_the_keys_when_one_is_missing_or_surplus(undone: list[LoggedCall]) -> None:
    """A key that never came, and one that nobody handed out, are told as such."""
    failed = [check.promise for check in judge(replace(AS_PROMISED, undone=undone)) if check.fault]

    assert any(promise.startswith("the keys") for promise in failed)


def request(path: str, key: str, body: bytes) -> Request:
    """Return a POST."""
    return Request(method="POST", path=path, key=key, attempt=0, body=body)


def test_ledger_changes_nothing_when_a_key_comes_again() -> None:
    """A repeat gets the first answer; the same key with another body is refused."""
    ledger = Ledger(CallLog())
    first = ledger.receive(request(CREDITS_PATH, "effect-1", b'{"amount": 5}'))
    again = ledger.receive(request(CREDITS_PATH, "effect-1", b'{"amount": 5}'))
    other = ledger.receive(request(CREDITS_PATH, "effect-1", b'{"amount": 6}'))

    assert first is not None
    assert again == first
    assert other is not None
    assert (first.status, other.status) == (201, 422)
    assert [line.amount for line in ledger.lines] == [5]


def test_ledger_reverses_by_forward_key_when_the_result_is_not_known() -> None:
    """The credit is found by the key it came under, and reversed once however often and by whichever name it is asked for."""
    ledger = Ledger(CallLog())
    ledger.receive(request(CREDITS_PATH, "effect-1", b'{"amount": 5}'))
    ledger.receive(request(REVERSALS_PATH, "undo-1", b'{"forward_key": "effect-1"}'))
    ledger.receive(request(REVERSALS_PATH, "undo-2", b'{"credit_id": "cr_9104_1"}'))

    assert [line.amount for line in ledger.lines] == [5, -5]


def test_ledger_refuses_a_credit_when_its_undo_came_first() -> None:
    """An undo of a key that was never seen is remembered, so that the late call does no harm."""
    ledger = Ledger(CallLog())
    undone = ledger.receive(request(REVERSALS_PATH, "undo-1", b'{"forward_key": "effect-1"}'))
    late = ledger.receive(request(CREDITS_PATH, "effect-1", b'{"amount": 5}'))

    assert undone is not None
    assert late is not None
    assert (undone.status, late.status) == (200, 409)
    assert ledger.lines == []
