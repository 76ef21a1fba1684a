"""Break one promise at a time in a copy of the tree and see that its test goes red. Must not touch the tree it is started from.

`python -m tests.mutants [NAME...]` prints `mutant | killed by | seconds` and exits with 1 if a mutant survives, dies of something else
than the promise it breaks, or does not apply. The named tests are run on the unbroken copy first.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
COPIED = ("app", "migrations", "tests", "pyproject.toml")
TESTS = "tests/faults/test_promises.py"
# For the named tests of one mutant, in seconds; a mutant that hangs is no better than one that survives.
RUN_SECONDS = 180
TESTS_FAILED = 1  # pytest's exit code; the others say that it could not run them


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One broken promise.

    `before` stands exactly once in `file` and becomes `after`. `test` must fail then, with `reason` in pytest's account of it.
    """

    name: str
    file: str
    before: str
    after: str
    test: str
    reason: str


MUTANTS = (
    Mutant(
        name="start at the oldest undo",
        file="app/domain/outcomes.py",
        before="return max(pending, key",
        after="return min(pending, key",
        test="test_undos_run_newest_first_when_a_session_fails",
        reason="AssertionError",
    ),
    Mutant(
        name="go on with the oldest undo",
        file="app/storage/calls.py",
        before="called.step_index\n  ORDER BY stack_position DESC\n  LIMIT 1\n",
        after="called.step_index\n  ORDER BY stack_position\n  LIMIT 1\n",
        test="test_undos_run_newest_first_when_a_session_fails",
        reason="AssertionError",
    ),
    Mutant(
        name="drop the epoch predicate",
        file="app/storage/changes.py",
        before="\n  WHERE o.epoch = EXCLUDED.epoch",
        after="",
        test="test_an_answer_is_void_when_a_newer_epoch_owns_the_call",
        reason="an older epoch may not write",
    ),
    Mutant(
        name="claim what another worker holds",
        file="app/storage/claims.py",
        before="    AND (leased_until IS NULL OR leased_until <= statement_timestamp())\n  ORDER BY due_at\n  LIMIT allotted",
        after="  ORDER BY due_at\n  LIMIT allotted",
        test="test_an_answer_is_void_when_a_newer_epoch_owns_the_call",
        reason="one live sender at a time",
    ),
    Mutant(
        name="answer before the commit",
        file="app/storage/database.py",
        before='    await connection.execute("COMMIT")\n\n\n@contextmanager',
        after='    asyncio.get_running_loop().create_task(connection.execute("COMMIT"))\n\n\n@contextmanager',
        test="test_nothing_is_answered_when_the_commit_has_not_ended[intercept]",
        reason="answered before the commit",
    ),
    Mutant(
        name="renew the key on retry",
        file="app/engine/unwind.py",
        before='"Idempotency-Key": call.idempotency_key,',
        after='"Idempotency-Key": f"{call.idempotency_key}-{call.attempts}",',
        test="test_one_key_and_one_body_are_sent_when_an_undo_is_retried",
        reason="one key for all attempts",
    ),
    Mutant(
        name="treat 202 as done",
        file="app/domain/retry.py",
        before="if status == 202:",
        after="if status == 299:",
        test="test_lower_entries_wait_when_an_undo_is_only_accepted",
        reason="202 is not done",
    ),
    Mutant(
        name="bind the body at each send",
        file="app/domain/unwinding.py",
        before="    return Send(call=sending.count(draft, call),",
        after="    call = replace(call, body=bindings.body_to_send(item.entry.compensation.args, item.effect) or call.body)\n"
        "    return Send(call=sending.count(draft, call),",
        test="test_the_frozen_bytes_are_sent_when_the_result_comes_after_the_first_attempt",
        reason="frozen at the first send",
    ),
    Mutant(
        name="take every 409 for final",
        file="app/domain/retry.py",
        before="if attempt.status == 409 and (may_be_processing or ",
        after="if attempt.status == 409 and (",
        test="test_a_conflict_is_waited_out_when_an_earlier_attempt_may_still_run",
        reason="409 while it may still run is no refusal",
    ),
    Mutant(
        name="leave the chain unlinked",
        file="app/domain/journal.py",
        before="        prev_hash = digest\n    return tuple(sealed)\n",
        after="    return tuple(sealed)\n",
        test="test_undos_run_newest_first_when_a_session_fails",
        reason="the journal verifies",
    ),
    Mutant(
        name="skip the hash compare",
        file="app/domain/approval.py",
        before='    return payload == effect.payload and journal.has_content(evidence.entry, "payload", payload)\n',
        after="    return True\n",
        test="test_nothing_is_released_when_other_bytes_are_presented",
        reason="only the approved bytes go ahead",
    ),
    Mutant(
        name="release without the journal check",
        file="app/domain/approval.py",
        before="""\
    if evidence is None or not _stands(draft.session, seen.effect, evidence):
        return _not_approved(seen.effect, asked)
""",
        after="""\
    if evidence is None:
        draft.move_session(SessionState.ACTIVE)
        return Released(reported=replace(seen, effect=draft.move_effect(seen.effect, EffectState.EXECUTING)), is_action=False)
""",
        test="test_nothing_is_released_when_the_journal_has_no_approval",
        reason="no APPROVED entry, no release",
    ),
    Mutant(
        name="approve from any state",
        file="app/domain/approval.py",
        before="""\
    if asked.state is not ApprovalState.PENDING:
        return _already_decided(asked)
    if draft.now >= asked.expires_at:
        return _already_decided(_expire(draft, seen, asked, known))
    approved = draft.change_approval(
        asked,
        ApprovalState.APPROVED,
        decided_at=draft.now,
        decided_by=decision.by,
        claimed_approver=decision.claimed_approver,
        reason=decision.reason,
    )
    effect = draft.move_effect(seen.effect, EffectState.APPROVED)
""",
        after="""\
    approved = draft.change_approval(
        asked,
        ApprovalState.APPROVED,
        decided_at=draft.now,
        decided_by=decision.by,
        claimed_approver=decision.claimed_approver,
        reason=decision.reason,
    )
    effect = draft.change_effect(seen.effect, state=EffectState.APPROVED)
""",
        test="test_nothing_is_approved_when_it_is_not_pending",
        reason="only a pending question can be answered",
    ),
    Mutant(
        name="expiry by transaction time",
        file="app/storage/sessions.py",
        before="  clock_timestamp() AS now, seen.revision AS seen_revision,\n",
        after="  now() AS now, seen.revision AS seen_revision,\n",
        test="test_nothing_is_released_when_its_turn_comes_after_the_expiry",
        reason="the moment of the turn counts",
    ),
    Mutant(
        name="let every org see the sessions",
        file="migrations/versions/0001_spine.py",
        before="ON sessions TO countermand_runtime USING (org = current_setting('app.org')::org_name);",
        after="ON sessions TO countermand_runtime USING (true);",
        test="test_rows_are_out_of_sight_when_they_are_another_orgs",
        reason="'globex': {'sessions'}",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How the named tests ended, and pytest's account of it."""

    exit_code: int | None
    output: str
    seconds: float


def main(names: Sequence[str]) -> int:
    """Run the mutants of these names, or all; return the exit code."""
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        _say(f"no such mutant: {', '.join(sorted(unknown))}; there are: {', '.join(mutant.name for mutant in MUTANTS)}")
        return 1
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    with tempfile.TemporaryDirectory(prefix="countermand-mutants-") as scratch:
        unbroken = _run(_copy(Path(scratch) / "unbroken"), sorted({mutant.test for mutant in chosen}))
        if unbroken.exit_code != 0:
            _say(unbroken.output, "without any mutant these tests have to pass, and they do not")
            return 1
        _say(f"{'mutant':<34} | {'killed by':<80} | seconds")
        survivors = [mutant.name for number, mutant in enumerate(chosen) if not _is_killed(mutant, Path(scratch) / str(number))]
    _say(f"{len(chosen) - len(survivors)} of {len(chosen)} killed" + (f"; NOT: {', '.join(survivors)}" if survivors else ""))
    return 1 if survivors else 0


def _is_killed(mutant: Mutant, tree: Path) -> bool:
    fault = _break(_copy(tree) / mutant.file, mutant)
    if fault is not None:
        _say(f"{mutant.name:<34} | {'DOES NOT APPLY: ' + fault:<80} | -")
        return False
    run = _run(tree, [mutant.test])
    shutil.rmtree(tree)
    verdict = _verdict(mutant, run)
    _say(f"{mutant.name:<34} | {verdict or mutant.test:<80} | {run.seconds:.1f}")
    if verdict is not None:
        _say(run.output)
    return verdict is None


def _break(file: Path, mutant: Mutant) -> str | None:
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.before) != 1:
        return f"its text stands {text.count(mutant.before)} times in {mutant.file}"
    file.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
    return None


def _verdict(mutant: Mutant, run: Run) -> str | None:
    """Say why a mutant does not count as killed; None if it does."""
    if run.exit_code == 0:
        return "SURVIVED"
    if run.exit_code != TESTS_FAILED:
        return f"NOT RUN: pytest ended with {run.exit_code}"
    return None if mutant.reason in run.output else f"DIED OF SOMETHING ELSE than {mutant.reason!r}"


def _copy(tree: Path) -> Path:
    tree.mkdir()
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    return tree


def _run(tree: Path, tests: Sequence[str]) -> Run:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *(f"{TESTS}::{test}" for test in tests)]
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, check=False, cwd=tree, env=_environment(tree), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=RUN_SECONDS
        )
    except subprocess.TimeoutExpired as late:
        return Run(exit_code=None, output=(late.output or b"").decode("utf-8", "replace"), seconds=time.monotonic() - started)
    return Run(exit_code=done.returncode, output=done.stdout.decode("utf-8", "replace"), seconds=time.monotonic() - started)


def _environment(tree: Path) -> Mapping[str, str]:
    """Keep the variables, but import from `tree`; bytecode goes to the side, once for all trees, since their paths differ."""
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}}
    kept.setdefault("PYTHONPYCACHEPREFIX", str(tree.parent / "bytecode"))
    return kept


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # So that a run that is told to stop takes its pytest and its trees along.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))
    sys.exit(main(sys.argv[1:]))
