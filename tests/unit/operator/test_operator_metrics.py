"""The operator's metrics: hostile names make no series of their own.

Tests ``plimsoll_operator/metrics.py``.
"""

from __future__ import annotations

from plimsoll_operator.metrics import Metrics
from plimsoll_operator.runtime.client import ApiError


def test_the_reasons_of_an_admission_webhook_make_no_series_of_their_own() -> None:
    """A webhook chooses ``status.reason`` freely; many put a sentence with names into it."""
    metrics = Metrics()
    for number in range(100):
        refused = ApiError(403, f"image of tiny-{number} is not signed", "denied the request")
        metrics.record_reconcile(0.0, 0.1, refused)
    metrics.record_reconcile(0.0, 0.1, ApiError(409, "Conflict", "out of date"))
    metrics.record_reconcile(0.0, 0.1, TimeoutError())
    name = "plimsoll_operator_reconcile_errors_total"
    shown = {
        sample.labels["reason"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    }
    assert shown == {"403": 100, "Conflict": 1, "TimeoutError": 1}
