"""When a status recommends requests and limits, and from what."""

from __future__ import annotations

from typing import Any

from plimsoll_api.growth import ReportedGrowth
from plimsoll_api.learned import LearnedMemory
from plimsoll_api.memory_contract import MemoryNeeds
from plimsoll_api.memory_policy import MemoryPolicy, parse_growth_budget
from plimsoll_operator.fleet.supervisor_metrics import SupervisorMetrics, parse_metrics_page
from plimsoll_operator.status.recommendation import make_recommendation
from plimsoll_sidecar.record.metrics import Metrics

GIB = 1 << 30
AUTO = MemoryPolicy(host=parse_growth_budget("Auto"))
NOON, LATER, EVENING = (f"2026-11-26T{hour}:00Z" for hour in ("12:00", "12:59", "18:00"))
NEEDS = MemoryNeeds(9 * GIB, 4 * GIB, 2 * GIB, 16 * GIB)
SEEN = SupervisorMetrics(
    host_needs=NEEDS,
    host_learned=LearnedMemory(86400, (0, 0, 0), 8 * GIB, GIB),
    host_growth=ReportedGrowth(GIB, 86400, 1 << 18),
)


def said(
    before: Any = None,
    metrics: list[SupervisorMetrics] | None = None,
    now: str = NOON,
    revision: str = "r1",
) -> Any:
    return make_recommendation(before, revision, metrics or [SEEN], AUTO, 4 * GIB, now)


def test_a_status_has_a_sentence_and_the_resources_to_set() -> None:
    assert said() == {
        "message": "host memory needs 9.0 GiB at the current load; the request of 4.0 GiB is too"
        " small; it needs 11.0 GiB when its declared pools (4.0 GiB) are full; it grows by 4.0 KiB"
        " per request; it reaches the limit in 7 days at the current traffic",
        "revision": "r1",
        "time": NOON,
        "resources": {"requests": {"memory": "9Gi"}, "limits": {"memory": "12Gi"}},
    }


def test_nothing_is_said_of_a_revision_that_nobody_has_observed() -> None:
    assert said(metrics=[SupervisorMetrics()]) is None
    assert said(said(), [SupervisorMetrics()], EVENING, "r2") is None
    assert said(said(), [SupervisorMetrics()], EVENING) == said(), "its pods are being replaced"


def test_it_changes_at_most_once_an_hour_and_only_if_there_is_something_new() -> None:
    grown = [SupervisorMetrics(host_needs=MemoryNeeds(12 * GIB))]
    assert said(said(), grown, LATER) == said()
    assert said(said(), grown, EVENING)["time"] == EVENING
    assert said(said(), None, EVENING) == said()
    assert said(said(), grown, LATER, "r2")["revision"] == "r2"


def test_a_fixed_budget_counts_before_a_learned_one() -> None:
    fixed = MemoryPolicy(host=parse_growth_budget("3Gi"))
    found = make_recommendation(None, "r1", [SEEN], fixed, None, NOON)
    assert found is not None
    assert found["resources"]["limits"]["memory"] == "14Gi"


def test_device_memory_has_a_sentence_and_no_resources() -> None:
    found = said(metrics=[SupervisorMetrics(device_needs=MemoryNeeds(61 * GIB, limit=80 * GIB))])
    assert found["message"] == "device memory needs 61.0 GiB at the current load"
    assert "resources" not in found


def test_the_operator_reads_what_a_supervisor_exports() -> None:
    metrics = Metrics()
    metrics.export_learned_budgets({}, {"host": NEEDS, "device": MemoryNeeds(61 * GIB)})
    found = parse_metrics_page(metrics.render())
    assert (found.host_needs, found.device_needs) == (NEEDS, MemoryNeeds(61 * GIB))
    metrics.export_learned_budgets({}, {})
    assert parse_metrics_page(metrics.render()).host_needs is None
