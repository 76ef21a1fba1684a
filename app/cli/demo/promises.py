"""Show what became of each promise, and give up where one was not kept. Must not judge."""

from collections.abc import Sequence

from app.cli.demo.failure import DemoFailed
from app.cli.demo.screen import say_checks
from app.cli.demo.verdict import Check


def hold_to(checks: Sequence[Check]) -> None:
    """Print each promise with what became of it.

    Raises:
        DemoFailed: one of them was not kept, or several.
    """
    say_checks(checks)
    faults = [f"not kept: {check.promise}: {check.fault}" for check in checks if check.fault]
    if faults:
        raise DemoFailed("; ".join(faults))
