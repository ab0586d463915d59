"""How fast a growth is, and how soon it spends its budget.

Tests ``detect/growth.py`` and ``detect/leak.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from leaklab.series import MIB, Series, steady
from plimsoll_sidecar.detect.growth import GrowthHistory, Trend, Trends

Judge = Callable[..., Any]

SPENT_S = 1200.0
"""A leak spends the budget of 512 MiB in 20 minutes."""


def trend(bytes_per_s: float, span_s: float) -> Trend:
    return Trend(bytes_per_s, bytes_per_s * span_s, span_s, 0.0, None, 0.0, 0.0)


def test_a_short_trend_that_is_steeper_does_not_hide_one_that_is_large_enough() -> None:
    trends = Trends(1.0, 0.0)
    short, long = trend(1.2 * MIB, 19.0), trend(1.0 * MIB, 95.0)
    trends.horizons[0].trend, trends.horizons[1].trend = short, long
    assert trends.find_steepest() is short
    assert trends.find_steepest(64 * MIB) is long
    assert trends.find_steepest(128 * MIB) is None


def test_the_pace_is_that_of_the_growth_since_it_was_a_tenth_of_what_it_is() -> None:
    course = GrowthHistory(1.0)
    assert course.measure_pace() == 0.0
    for t in range(1000):
        course.add(float(t), max(0, t - 500) * MIB, None)
    assert course.measure_pace() == pytest.approx(MIB, rel=0.05)
    for t in range(1000, 1010):
        course.add(float(t), (t - 500 + 3 * (t - 999)) * MIB, None)
    assert course.measure_pace() == pytest.approx(MIB, rel=0.1), "the last ten seconds are a step"


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_the_time_until_a_budget_is_spent_is_not_that_of_the_steepest_noise(
    judge: Judge, seed: int
) -> None:
    leak = steady(512 * MIB / SPENT_S, 200.0)
    series = Series(duration=800.0, leak=leak, noise=20 * MIB, per_request=0.0, seed=seed)
    host = judge(series).last.host
    left_s = SPENT_S - 600.0
    assert host.exhaustion_s == pytest.approx(left_s, rel=0.2)
