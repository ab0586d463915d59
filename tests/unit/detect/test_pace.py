"""How fast a growth is, and how soon it spends its budget.

Tests ``detect/growth.py`` and ``detect/leak.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from leaklab.series import GIB, MIB, Series, steady
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.trace import Sample
from plimsoll_sidecar.detect.detector import Detector
from plimsoll_sidecar.detect.growth import GrowthHistory, Trend, Trends

Judge = Callable[..., Any]

BUDGET = 512 * MIB
SPENT_S = 1200.0
"""A leak spends its budget in 20 minutes."""
LEAKS_AT, RESTARTED_AT = 8000.0, 560.0


def create_detector(window: float = 3600.0) -> Detector:
    host = MemoryBudget(BUDGET, window, 6 * GIB)
    return Detector(MemoryPolicy(host=host, device=None, warmup_s=60.0), 30.0, 1.0)


def restart(detector: Detector, sample: Sample) -> Detector:
    """A new detector that continues from ``detector`` after its own first sample."""
    new = create_detector()
    new.update(sample)
    new.resume(detector.make_checkpoint())
    return new


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
    assert course.measure_pace(0, 64 * MIB) is None
    assert course.measure_age() == 0.0
    for t in range(1000):
        course.add(float(t), max(0, t - 500) * MIB, None)
    assert course.measure_pace(0, 64 * MIB) == pytest.approx(MIB, rel=0.05)
    assert course.measure_age() == pytest.approx(500, rel=0.05)
    for t in range(1000, 1010):
        course.add(float(t), (t - 500 + 3 * (t - 999)) * MIB, None)
    assert (course.measure_pace(0, 64 * MIB) or 0.0) < 1.3 * MIB, "ten seconds may be a step"


def test_the_pace_is_that_of_the_last_part_if_growth_accelerates() -> None:
    course = GrowthHistory(1.0)
    for t in range(1200):
        course.add(float(t), (t + 9 * max(0, t - 1000)) * MIB, None)
    assert course.measure_pace(0, 64 * MIB) == pytest.approx(10 * MIB, rel=0.1)
    assert course.measure_pace(1000 * MIB, 64 * MIB) == pytest.approx(10 * MIB, rel=0.1)
    assert course.measure_age() > 600, "it began long before it accelerated"


@pytest.mark.parametrize("seed", range(1, 7))
def test_the_time_until_a_budget_is_spent_is_not_that_of_the_steepest_noise(
    judge: Judge, seed: int
) -> None:
    leak = steady(BUDGET / SPENT_S, 200.0)
    series = Series(duration=800.0, leak=leak, noise=20 * MIB, per_request=0.0, seed=seed)
    host = judge(series).last.host
    left_s = SPENT_S - 600.0
    assert host.exhaustion_s == pytest.approx(left_s, rel=0.45)


def test_noise_of_one_window_makes_no_slow_growth_urgent(judge: Judge) -> None:
    leak = steady(8 * MIB / 3600)
    series = Series(duration=16 * 3600.0, interval=60.0, leak=leak)
    assert judge(series).suspected_samples == 0


def after_earlier_growth(t: float) -> float:
    """Growth by .4 of the budget within ten minutes, and the leak two hours later."""
    return 0.4 * BUDGET / 600 * max(0, min(t, 800) - 200) + BUDGET / SPENT_S * max(0, t - LEAKS_AT)


def on_slow_growth(t: float) -> float:
    """Growth by a tenth of the budget an hour from the start, and the leak later."""
    slow = 0.1 * BUDGET / 3600 * max(0, min(t, LEAKS_AT) - 200)
    return slow + BUDGET / SPENT_S * max(0, t - LEAKS_AT)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("window", [3600.0, 86400.0])
@pytest.mark.parametrize("leak", [after_earlier_growth, on_slow_growth])
def test_growth_of_long_ago_does_not_hide_how_soon_a_budget_is_spent(
    judge: Judge, leak: Callable[[float], float], window: float, seed: int
) -> None:
    series = Series(duration=LEAKS_AT + 240.0, interval=2.0, leak=leak, seed=seed)
    host = judge(series, window=window).last.host
    left_s = (1 - host.consumed_ratio) * SPENT_S
    assert left_s / 2 < host.exhaustion_s < 2 * left_s


@pytest.mark.parametrize("window", [3600.0, 86400.0])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_leak_that_accelerates_is_confirmed_in_time(window: float, seed: int) -> None:
    """Growth by a budget in 10 hours, and from 5,000 s on by one in 20 minutes."""

    def leak(t: float) -> float:
        return BUDGET / 36000 * max(0, min(t, 5000) - 200) + BUDGET / 1200 * max(0, t - 5000)

    detector = create_detector(window)
    for sample in Series(duration=6200.0, leak=leak, seed=seed).samples():
        found = [s for s in detector.update(sample).suspicions if s.unconfirmed is None]
        if found:
            break
    assert [s.kind for s in found] == [IncidentKind.HOST_GROWTH]
    assert found[0].consumed_ratio < 0.7


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_restarted_supervisor_takes_earlier_growth_for_no_step(seed: int) -> None:
    series = Series(duration=1400.0, leak=steady(BUDGET / SPENT_S, 200.0), seed=seed)
    detector, confirmed_at = create_detector(), None
    for sample in series.samples():
        assessment = detector.update(sample)
        if sample.t == RESTARTED_AT:
            detector = restart(detector, sample)
        host, left_s = assessment.host, 200.0 + SPENT_S - sample.t
        if RESTARTED_AT < sample.t < 1200.0 and host is not None:
            assert host.exhaustion_s is None or host.exhaustion_s > left_s / 2, sample.t
        if confirmed_at is None and any(s.unconfirmed is None for s in assessment.suspicions):
            confirmed_at = sample.t
    assert confirmed_at is not None
    assert RESTARTED_AT < confirmed_at < 1200.0


@pytest.mark.parametrize("load", [0, 1, 2])
def test_a_restarted_supervisor_knows_no_growth_without_a_base_of_the_load(load: int) -> None:
    """A leak of ten minutes, which has spent its budget as the load falls."""
    at = 780.0
    series = Series(
        duration=1000.0,
        leak=steady(BUDGET / 600, 200.0),
        load=lambda t: 8 if t < at - 5 else load,
        per_request=2 * MIB,
    )
    detector, confirmed = create_detector(), False
    for sample in series.samples():
        assessment = detector.update(sample)
        if sample.t == at:
            detector = restart(detector, sample)
        if sample.t > at and assessment.host is not None:
            assert (assessment.host.exhaustion_s or 0.0) < 600, sample.t
            confirmed |= any(s.unconfirmed is None for s in assessment.suspicions)
    assert confirmed


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_new_demand_right_after_the_warm_up_hides_no_growth(seed: int) -> None:
    series = Series(
        duration=700.0,
        leak=steady(BUDGET / 300, 5.0),
        load=lambda t: 8 if t < 118 else 40,
        seed=seed,
    )
    detector = create_detector()
    for sample in series.samples():
        found = [s for s in detector.update(sample).suspicions if s.unconfirmed is None]
        if found:
            break
    assert found
    assert series.leaked < 1.1 * BUDGET
