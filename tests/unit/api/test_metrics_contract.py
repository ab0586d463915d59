"""The operator reads what the supervisor really exposes, by the same names.

Tests ``fleet/figures.py`` and ``record/metrics.py``.
"""

from __future__ import annotations

from prometheus_client import generate_latest

from plimsoll_api.assessment import Assessment, BudgetState
from plimsoll_api.peers import Grown
from plimsoll_operator.fleet.figures import Figures, parse
from plimsoll_sidecar.record.metrics import Metrics


def test_the_operator_understands_the_supervisors_metrics() -> None:
    metrics = Metrics()
    assessment = Assessment(t=1.0, epoch=1, warm=True, host=BudgetState(consumed_ratio=0.42))
    metrics.observe(assessment, {"engine": True}, 0.001)
    metrics.standing(1, 2, 0)
    assert parse(generate_latest(metrics.registry)) == Figures(
        0.42, None, 2, drained=False, blind=False
    )


def test_the_operator_learns_the_growth_of_each_memory() -> None:
    host = BudgetState(unexplained=1 << 30, age_s=86_400.5, requests=1_234_567)
    in_use = BudgetState(unexplained=0, age_s=60.0, requests=0)
    reserved = BudgetState(unexplained=5 << 20, age_s=60.0, requests=0)
    metrics = Metrics()
    assessment = Assessment(1.0, 1, True, host=host, device=in_use, reserved=reserved)
    metrics.observe(assessment, {}, 0.001)
    found = parse(metrics.text())
    assert found.host_growth == Grown(1 << 30, 86_400, 1_234_567)
    assert found.device_growth == Grown(5 << 20, 60, 0)

    # An engine without a count of its requests, and one that is not warm yet.
    host = BudgetState(unexplained=1 << 30, age_s=86_400.5)
    metrics.observe(Assessment(2.0, 1, False, host=host), {}, 0.001)
    assert parse(metrics.text()) == Figures(restarts_left=0, drained=False)
