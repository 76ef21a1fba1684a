"""`python -m bench`: measure the service side by side with what it is compared with, and print a table. Must not measure by itself."""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import NoReturn

from bench import environment, machine
from bench.figures import Findings, as_json, table
from bench.lines import Fault
from bench.scenarios import first_undo, growth, latency, memory, pair, recovery, sagas, undos, workers
from bench.stage import Options, Stage, open_stage

ROUNDS, QUICK_ROUNDS = 5, 3
SECONDS, QUICK_SECONDS = 8.0, 2.0
QUICK_SHARE = 0.1
EXIT_MISSED, EXIT_FAULT, EXIT_STOPPED = 1, 2, 130

SCENARIOS: Mapping[str, Callable[[Stage, Findings], None]] = {
    "pair": pair.measure,
    "latency": latency.measure,
    "sagas": sagas.measure,
    "undos": undos.measure,
    "first-undo": first_undo.measure,
    "recovery": recovery.measure,
    "memory": memory.measure,
    "growth": growth.measure,
    "workers": workers.measure,
}
COMPARING = frozenset({"sagas", "undos"})  # the others need nothing of what is installed for that


def main() -> int:
    """Run what was asked for; the exit code is 1 where a target was missed, 2 where something did not work."""
    asked = _arguments()
    signal.signal(signal.SIGTERM, _leave)  # as Ctrl-C: what was started is ended
    options = Options(
        rounds=asked.rounds or (QUICK_ROUNDS if asked.quick else ROUNDS),
        seconds=asked.seconds or (QUICK_SECONDS if asked.quick else SECONDS),
        share=QUICK_SHARE if asked.quick else 1.0,
    )
    environment.FOLDER.mkdir(exist_ok=True)
    # Beside the sources, since the system's own folder for temporary things may be in memory.
    try:
        with tempfile.TemporaryDirectory(prefix="run-", dir=environment.FOLDER) as directory:
            findings = _run(options, Path(directory), asked.only or list(SCENARIOS))
    except KeyboardInterrupt:
        _say("stopped")
        return EXIT_STOPPED
    findings.machine = {**findings.machine, "load_average_after": round(os.getloadavg()[0], 2)}
    print(_head(findings), table(findings), sep="\n\n", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(as_json(findings), indent=2) + "\n", encoding="utf-8")
    if findings.faults:
        return EXIT_FAULT
    return 0 if findings.is_on_target else EXIT_MISSED


def _run(options: Options, directory: Path, names: Sequence[str]) -> Findings:
    comparison = comparison_for(names)
    findings = Findings(
        machine={**machine.describe(directory), "comparison": comparison.versions},
        options={"rounds": options.rounds, "seconds": options.seconds, "share_of_data": options.share, "scenarios": list(names)},
        left_out=list(comparison.missing),
    )
    with open_stage(options, directory, comparison) as stage:
        for name in names:
            began_at = monotonic()
            _say(f"{name} ...")
            try:
                with stage.part():
                    SCENARIOS[name](stage, findings)
            except Fault as fault:  # the figures of the other scenarios are worth having
                findings.faults.append(f"{name}: {fault}")
            _say(f"{name} took {monotonic() - began_at:.0f} s")
    return findings


def comparison_for(names: Sequence[str]) -> environment.Comparison:
    """Make what these scenarios compare with, if any of them does."""
    return environment.none() if COMPARING.isdisjoint(names) else environment.prepare()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure the service side by side with what it is compared with.")
    parser.add_argument("--only", action="append", choices=list(SCENARIOS), metavar="NAME", help=f"one of {', '.join(SCENARIOS)}")
    parser.add_argument("--quick", action="store_true", help="shorter rounds, fewer of them, less data: to see where one stands")
    parser.add_argument("--rounds", type=_positive(int), help=f"how often each side is measured: {ROUNDS}, or {QUICK_ROUNDS} if quick")
    parser.add_argument("--seconds", type=_positive(float), help=f"how long each time: {SECONDS:g}, or {QUICK_SECONDS:g} if quick")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write everything, round by round, to this file")
    return parser.parse_args()


def _positive(kind: type[float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = kind(text)
        if value <= 0:
            raise ValueError(text)
        return value

    return read


def _head(findings: Findings) -> str:
    told = {**findings.machine, **findings.options}
    return "\n".join(f"- {name.replace('_', ' ')}: {_text(value)}" for name, value in told.items())


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items()) or "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
