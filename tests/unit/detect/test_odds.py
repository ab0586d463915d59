"""What a growth may be, and how likely each of it is.

Tests ``detect/leak/odds.py``, and that ``bench/odds_fit.py`` fits the same model.
"""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import odds_fit
from plimsoll_api.assessment import Segment
from plimsoll_sidecar.detect.leak.odds import WEIGHTS, Explanation, Look, odds, speed
from plimsoll_sidecar.detect.leak.trend import Point, Trend, fit

MIB = 1 << 20
STRAIGHT = Trend(
    bytes_per_s=MIB / 10, rise=100.0 * MIB, span_s=1000.0, confidence=1.0, noise=MIB / 2,
    bytes_per_request=None, busier=False, sound=True,
    fading=0.0, climb=0.0, collections=3,
)  # fmt: skip
LEAK = Look(STRAIGHT, size=0.5, speed=3.0, life=0.0, segment=Segment.MALLOC_IN_USE)
TRENDS = st.builds(
    replace,
    st.just(STRAIGHT),
    rise=st.floats(1.0, 1e12),
    noise=st.floats(0.0, 1e12),
    fading=st.floats(-3.0, 3.0),
    climb=st.floats(-1.0, 1.0),
    collections=st.none() | st.integers(0, 1000),
)
LOOKS = st.builds(
    Look,
    TRENDS,
    size=st.floats(0.0, 50.0),
    speed=st.floats(0.0, 8.0),
    life=st.floats(-4.0, 4.0),
    segment=st.none() | st.sampled_from(Segment),
)


def of(look: Look, **trend: float | None) -> float:
    return odds(replace(look, trend=replace(look.trend, **trend))).chance  # type: ignore[arg-type]


def test_a_straight_growth_of_half_the_budget_is_a_leak() -> None:
    assert odds(LEAK).chance > 0.95


@pytest.mark.parametrize(
    ("explanation", "look"),
    [
        (Explanation.FLUCTUATION, replace(LEAK, trend=replace(STRAIGHT, noise=30.0 * MIB))),
        (Explanation.FILLING, replace(LEAK, trend=replace(STRAIGHT, fading=-3.0), life=1.5)),
        (Explanation.LATER_WORK, replace(LEAK, life=-2.0)),
        (Explanation.LOAD, replace(LEAK, trend=replace(STRAIGHT, climb=0.9))),
        (Explanation.RETAINED, replace(LEAK, segment=Segment.MALLOC_RETAINED)),
        (Explanation.GARBAGE, replace(LEAK, trend=replace(STRAIGHT, collections=0))),
    ],
)
def test_each_explanation_has_its_evidence(explanation: Explanation, look: Look) -> None:
    plain, found = odds(LEAK), odds(look)
    assert found.against[explanation] < plain.against.get(explanation, math.inf)
    assert found.chance < plain.chance


def test_memory_that_fills_something_up_is_most_likely_that() -> None:
    fading = Look(replace(STRAIGHT, fading=-3.0), 0.1, 0.0, 1.5, Segment.MALLOC_IN_USE)
    assert odds(fading).otherwise[0] is Explanation.FILLING
    assert odds(fading).otherwise[1] > 0.9


@given(LOOKS)
def test_the_chances_of_everything_together_are_one(look: Look) -> None:
    found = odds(look)
    others = [found.chance * math.exp(-value) for value in found.against.values()]
    assert math.isclose(found.chance + sum(others), 1.0, rel_tol=1e-9)
    assert found.otherwise[1] == max(others)


@given(LOOKS, st.floats(0.0, 5.0))
def test_more_of_the_budget_and_more_clearness_are_never_less_of_a_leak(
    look: Look, more: float
) -> None:
    now = odds(look).log_odds
    assert odds(replace(look, size=look.size + more)).log_odds >= now
    trend = replace(look.trend, rise=look.trend.rise * (1.0 + more))
    assert odds(replace(look, trend=trend)).log_odds >= now
    busier = replace(look.trend, climb=min(1.0, look.trend.climb + more))
    assert odds(replace(look, trend=busier)).log_odds <= now


@given(st.lists(LOOKS, min_size=1, max_size=5))
def test_the_weights_are_fitted_to_the_same_model(looks: list[Look]) -> None:
    x = np.array([odds_fit.seen(look) for look in looks])
    stated = odds_fit.log_odds(np.array(astuple(WEIGHTS)), x)
    # Beyond e to the 40 both are certain, each with its own last digits.
    theirs = np.clip([odds(look).log_odds for look in looks], -40, 40)
    assert np.allclose(np.clip(stated, -40, 40), theirs)


def test_the_speed_is_what_the_window_has_of_the_time_left() -> None:
    assert speed(None, 86_400.0) == 0.0, "nothing grows"
    assert speed(100_000.0, 86_400.0) == 0.0, "it lasts for the window"
    assert speed(86_400.0 / math.e, 86_400.0) == pytest.approx(1.0)
    assert speed(0.0, 86_400.0) == speed(30.0, 86_400.0), "a restart takes as long"


def test_a_trend_says_how_it_fades_how_the_load_climbs_and_what_it_outlasted() -> None:
    heat = [
        Point(60.0 * n, int(100 * MIB * (1 - math.exp(-n / 8))), 0, 4 + n, None, n // 5)
        for n in range(20)
    ]
    trend = fit(heat, MIB)
    assert trend is not None
    assert trend.climb == 1.0
    trend = fit([replace(point, load=4 + number % 2) for number, point in enumerate(heat)], MIB)
    assert trend is not None
    assert trend.fading < -0.5
    assert abs(trend.climb) < 0.2
    assert trend.collections == 3
