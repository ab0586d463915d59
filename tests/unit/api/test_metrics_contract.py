"""The operator reads what the supervisor really exposes, by the same names.

Tests ``status/figures.py`` and ``record/metrics.py``.
"""

from __future__ import annotations

from prometheus_client import generate_latest

from plimsoll_api.assessment import Assessment, BudgetState
from plimsoll_operator.status.figures import Figures, parse
from plimsoll_sidecar.record.metrics import Metrics


def test_the_operator_understands_the_supervisors_metrics() -> None:
    metrics = Metrics()
    assessment = Assessment(t=1.0, epoch=1, warm=True, host=BudgetState(consumed_ratio=0.42))
    metrics.observe(assessment, {"engine": True}, 0.001)
    metrics.standing(1, 2, 0)
    assert parse(generate_latest(metrics.registry)) == Figures(0.42, None, 2)
