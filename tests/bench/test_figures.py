"""What the bench makes of its measurements. Must not measure anything."""

import json

import pytest

from bench.figures import Cost, Findings, Reading, Row, Target, as_json, costs_of, percentile, rates, table
from bench.lines import Fault
from bench.yardstick import reading_of

PGBENCH = """
number of transactions actually processed: 1200
number of failed transactions: {failed} (0.000%)
latency average = 0.5 ms
initial connection time = 12.3 ms
tps = 400.000000 (without initial connection time)
"""


def row(values: list[float], against: list[float], target: Target | None = None) -> Row:
    """Make a row."""
    return Row(name="pairs", unit="requests/s", values=values, versus="pgbench", against=against, target=target, hides="it does not batch")


def findings(*rows: Row) -> Findings:
    """Make the findings of a run."""
    cost = Cost(name="pairs", side="service", unit="request", microseconds={"service": 410.4, "postgres": 120.0})
    return Findings(machine={"cores": 2}, options={"rounds": 3}, rows=list(rows), costs=[cost], left_out=["Restate: no npm"])


def test_ratio_is_the_median_of_the_rounds_ratios_when_a_round_was_disturbed() -> None:
    """A round in which the machine was busy slows both sides; a ratio of medians would pair a good round with a bad one."""
    assert row([100, 10, 90], [200, 20, 100]).ratio == 0.5


def test_ratio_is_refused_when_a_side_lacks_a_round() -> None:
    """Rounds that do not belong together make no ratio."""
    with pytest.raises(ValueError, match="shorter"):
        _ = row([1, 2], [1]).ratio


@pytest.mark.parametrize(
    ("target", "values", "against", "verdict"),
    [
        (None, [1.0], [2.0], "-"),
        (Target(value=0.5), [1.0], [2.0], "pass"),
        (Target(value=0.51), [1.0], [2.0], "fail"),
        (Target(value=1.0, is_ceiling=True), [0.2, 0.9, 5.0], [], "pass"),
        (Target(value=1.0, is_ceiling=True), [1.0], [], "fail"),
    ],
)
def test_verdict_is_about_the_ratio_when_there_is_one(
    target: Target | None, values: list[float], against: list[float], verdict: str
) -> None:
    """At least means at least; less than means less; without another side the figure itself is judged by its median."""
    assert row(values, against, target).verdict == verdict
    assert findings(row(values, against, target)).is_on_target == (verdict != "fail")


def test_percentile_is_one_of_the_values_when_they_are_few() -> None:
    """By nearest rank: nothing is made up between two measurements, and the last percentile of few is the worst."""
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [percentile(values, share) for share in (0.0, 0.2, 0.5, 0.99, 1.0)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_reading_has_rate_and_cost_of_a_unit_when_it_is_asked() -> None:
    """Units per second, and CPU microseconds of each part per unit; costs are medians over rounds, and absent where unknown."""
    readings = [Reading(units=100, seconds=2.0, cpu_seconds={"service": seconds}) for seconds in (0.01, 0.02, 0.09)]
    assert rates(readings) == [50.0, 50.0, 50.0]
    costs = costs_of("pairs", "request", {"service": readings, "unknown": [Reading(units=1, seconds=1.0)]})
    assert [cost.side for cost in costs] == ["service"]
    assert costs[0].microseconds["service"] == pytest.approx(200.0)


def test_table_has_figure_target_verdict_and_what_is_hidden_when_it_is_printed() -> None:
    """Whoever reads a ratio finds beside it what it does not show."""
    printed = table(findings(row([100, 120, 110], [200, 200, 200], Target(value=0.6))))
    assert "| pairs | 110 requests/s | pgbench: 200 | 0.55 | >= 0.6 | fail |" in printed
    assert "- what is over pgbench hides: it does not batch" in printed
    assert "| pairs | service | request | service 410, postgres 120 |" in printed
    assert "- left out: Restate: no npm" in printed


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("memory per 1,000 sessions awaiting approval", "memory per 1,000 sessions awaiting approval"),
        ("intercept at 1,000 requests/s, p99", "intercept at 1,000 requests/s"),
        ("pairs", "pairs"),
    ],
)
def test_what_a_figure_hides_is_told_by_its_name_when_it_has_no_other_side(name: str, told: str) -> None:
    """A number keeps its commas; which percentile it is makes no difference to what is hidden."""
    printed = table(findings(Row(name=name, unit="ms", values=[1.0], hides="the rest")))
    assert f"\n- {told} hides: the rest\n" in printed


def test_json_has_every_round_when_it_is_written() -> None:
    """What was measured can be judged again by other arithmetic."""
    written = json.loads(json.dumps(as_json(findings(row([100, 120, 110], [200, 200, 200], Target(value=0.6))))))
    figure = written["figures"][0]
    assert (figure["ours"], figure["theirs"], figure["ratio"], figure["verdict"]) == ([100, 120, 110], [200, 200, 200], 0.55, "fail")
    assert written["cpu_microseconds"][0]["parts"] == {"service": 410.4, "postgres": 120.0}
    assert (written["machine"], written["options"], written["is_on_target"]) == ({"cores": 2}, {"rounds": 3}, False)


def test_pgbench_counts_two_requests_a_transaction_when_it_is_read() -> None:
    """The yardstick's transaction is a pair, measured without its connecting."""
    reading = reading_of(PGBENCH.format(failed=0), 0, {"postgres": 0.6, "client": 0.1})
    assert reading.rate == 800.0
    assert reading.cost("postgres") == pytest.approx(250.0)


@pytest.mark.parametrize(("told", "exit_code"), [(PGBENCH.format(failed=3), 0), (PGBENCH.format(failed=0), 2), ("", 0)])
def test_pgbench_is_a_fault_when_it_did_not_do_all(told: str, exit_code: int) -> None:
    """A yardstick that was cut short makes every ratio look good or bad for no reason."""
    with pytest.raises(Fault, match="pgbench failed"):
        reading_of(told, exit_code, {})
