"""The yardstick: pgbench, with what a bare service would at least have to write per intercept and per commit. Must not be tuned.

`yardstick-schema.sql` and `yardstick-pair.sql` are given, and stay as they are: one transaction of pgbench is a pair, so two requests.
"""

import os
import re
import subprocess
from pathlib import Path

from bench import cpu
from bench.figures import Reading
from bench.lines import Fault
from bench.stage import Stage

SCHEMA = Path(__file__).with_name("yardstick-schema.sql")
PAIR = Path(__file__).with_name("yardstick-pair.sql")
HIDES = "the yardstick does not batch: each of its writes is a transaction of its own, and no HTTP, key, check or answer is in it"
TRANSACTIONS = re.compile(r"number of transactions actually processed: (\d+)")
TPS = re.compile(r"tps = ([\d.]+)")
FAILED = re.compile(r"number of failed transactions: ([1-9]\d*)")


class Yardstick:
    """The yardstick's database, and how it is run."""

    def __init__(self, stage: Stage) -> None:
        """Make its database."""
        self._stage = stage
        self._url = stage.database()
        stage.execute(self._url, SCHEMA.read_text(encoding="utf-8"))

    def read(self, clients: int, seconds: float) -> Reading:
        """Run it with so many clients for whole seconds, at least one; `units` are requests of ours.

        Raises:
            Fault: pgbench failed, or some of its transactions did.
        """
        options = ["-n", "-M", "prepared", "-c", str(clients), "-j", "1", "-T", str(max(1, round(seconds)))]
        meters = self._stage.meters()
        before = cpu.used(meters)
        command = [str(self._stage.program("pgbench")), *options, "-f", str(PAIR), *self._stage.libpq(self._url)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            told = process.stdout.read().decode()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        return reading_of(told, process.returncode, {**cpu.since(meters, before), "client": usage.ru_utime + usage.ru_stime})


def reading_of(told: str, exit_code: int, cpu_seconds: dict[str, float]) -> Reading:
    """Read what pgbench printed; without its connecting, which a service does once.

    Raises:
        Fault: as `Yardstick.read`.
    """
    done, tps = TRANSACTIONS.search(told), TPS.search(told)
    if exit_code != 0 or done is None or tps is None or FAILED.search(told):
        raise Fault(f"pgbench failed with exit code {exit_code}: {told[-2_000:]}")
    known = cpu_seconds if "postgres" in cpu_seconds else {}
    return Reading(units=2 * int(done[1]), seconds=int(done[1]) / float(tps[1]), cpu_seconds=known)
