"""How often a process makes a new report.

Tests ``plimsoll_probe/answers.py``.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from plimsoll_probe.answers import MAX_CPU_SHARE, ReportCache


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def costing(monkeypatch: pytest.MonkeyPatch, costs: list[float]) -> list[float]:
    """ReportCache that take so many seconds each; the costs that are left."""

    def make(_: ReportCache) -> dict[str, Any]:
        return {"pid": os.getpid(), "cost_s": costs.pop(0)}

    monkeypatch.setattr(ReportCache, "_create_report", make)
    return costs


def test_the_first_report_does_not_delay_the_next(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    left = costing(monkeypatch, [0.3, 0.004, 0.004])
    reports = ReportCache()
    reports.get_report()
    clock[0] += 1.0
    assert reports.get_report()["cost_s"] == 0.004
    clock[0] += 0.004 / MAX_CPU_SHARE - 0.1
    assert reports.get_report()["age_s"] == pytest.approx(0.004 / MAX_CPU_SHARE - 0.1)
    assert len(left) == 1
    clock[0] += 0.2
    assert reports.get_report()["age_s"] == 0.0
    assert left == []


def test_reports_that_are_always_dear_keep_to_their_share(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    left = costing(monkeypatch, [0.02] * 1000)
    reports = ReportCache()
    for _ in range(600):
        reports.get_report()
        clock[0] += 1.0
    assert (1000 - len(left)) * 0.02 <= 600 * MAX_CPU_SHARE + 2 * 0.02


def test_one_dear_report_among_cheap_ones_sets_no_pause(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    costing(monkeypatch, [0.001, 0.001, 0.5, 0.001])
    reports = ReportCache()
    costs = []
    for _ in range(4):
        costs.append(reports.get_report()["cost_s"])
        clock[0] += 1.0
    assert costs == [0.001, 0.001, 0.5, 0.001]
