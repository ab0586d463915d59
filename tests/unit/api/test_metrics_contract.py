"""The operator reads what the supervisor really exposes, by the same names.

Tests ``fleet/supervisor_metrics.py`` and ``record/metrics.py``.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from plimsoll_api.assessment import Assessment, BudgetState
from plimsoll_api.growth import ReportedGrowth
from plimsoll_api.state import Signal, SignalReason
from plimsoll_operator.fleet.supervisor_metrics import SupervisorMetrics, parse_metrics_page
from plimsoll_sidecar.record.collectors import CgroupCollector
from plimsoll_sidecar.record.metrics import Metrics
from plimsoll_sidecar.signals.cgroup import CgroupMemory


def test_the_operator_understands_the_supervisors_metrics() -> None:
    metrics = Metrics()
    assessment = Assessment(t=1.0, epoch=1, warm=True, host=BudgetState(consumed_ratio=0.42))
    metrics.observe(assessment, {"engine": True}, 0.001)
    metrics.export_status(1, 2, 0)
    assert parse_metrics_page(generate_latest(metrics.registry)) == SupervisorMetrics(
        0.42, None, 2, drained=False, missing_signals=()
    )


def test_the_operator_learns_the_reason_of_a_missing_signal_and_the_share_of_the_limit() -> None:
    metrics = Metrics()
    for reason in (SignalReason.METRICS_SILENT, SignalReason.METRICS_INCONSISTENT):
        metrics.export_missing_signals(
            {"engine": Signal(), "metrics": Signal(False, reason, "why")}
        )
    page = metrics.render().decode()
    assert page.count("plimsoll_supervisor_signal_missing{") == 1, "the earlier reason is gone"
    page += 'plimsoll_signal_age_seconds{signal="engine"} 0\n'
    page += 'plimsoll_signal_age_seconds{signal="metrics"} 130\n'
    assert parse_metrics_page(page.encode()).missing_signals == (
        ("metrics", "MetricsInconsistent"),
    )
    group = CollectorRegistry()
    read = CgroupMemory(current=970, reclaimable=0, limit=1000)
    group.register(CgroupCollector(lambda: read))
    assert parse_metrics_page(generate_latest(group)).limit == 0.97
    metrics.export_missing_signals({"metrics": Signal()})
    assert "signal_missing{" not in metrics.render().decode()


def test_the_operator_learns_the_growth_of_each_memory() -> None:
    host = BudgetState(unexplained=1 << 30, age_s=86_400.5, requests=1_234_567)
    in_use = BudgetState(unexplained=0, age_s=60.0, requests=0)
    reserved = BudgetState(unexplained=5 << 20, age_s=60.0, requests=0)
    metrics = Metrics()
    assessment = Assessment(1.0, 1, True, host=host, device=in_use, reserved=reserved)
    metrics.observe(assessment, {}, 0.001)
    found = parse_metrics_page(metrics.render())
    assert found.host_growth == ReportedGrowth(1 << 30, 86_400, 1_234_567)
    assert found.device_growth == ReportedGrowth(5 << 20, 60, 0)

    # An engine without a count of its requests, and one that is not warm yet.
    host = BudgetState(unexplained=1 << 30, age_s=86_400.5)
    metrics.observe(Assessment(2.0, 1, False, host=host), {}, 0.001)
    assert parse_metrics_page(metrics.render()) == SupervisorMetrics(restarts_left=0, drained=False)
