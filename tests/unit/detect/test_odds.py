"""What a growth may be, how likely each of it is, and which odds suffice.

Tests ``detect/odds.py``, and that ``bench/odds_fit.py`` fits the same model.
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
from plimsoll_sidecar.detect.growth import Point, fit_trend
from plimsoll_sidecar.detect.odds import (
    WEIGHTS,
    Evidence,
    Explanation,
    Odds,
    compute_odds,
    compute_required_log_odds,
    is_confirmed,
)

MIB = 1 << 20
HOUR = 3600.0
LEAK = Evidence(
    share=0.5, left_s=HOUR, window_s=24 * HOUR, life=1.0, fading=0.0, climb=0.0,
    segment=Segment.MALLOC_IN_USE,
)  # fmt: skip
EVIDENCE = st.builds(
    Evidence,
    share=st.floats(0.0, 50.0),
    left_s=st.none() | st.floats(0.0, 1e9),
    window_s=st.floats(60.0, 1e7),
    life=st.floats(0.0, 1e6),
    fading=st.floats(-3.0, 0.0),
    climb=st.floats(-1.0, 1.0),
    segment=st.none() | st.sampled_from(Segment),
)


def test_a_straight_growth_of_half_the_budget_is_most_likely_a_leak() -> None:
    assert compute_odds(LEAK).probability > 0.9


@pytest.mark.parametrize(
    ("explanation", "evidence"),
    [
        (Explanation.FILLING, replace(LEAK, fading=-2.0)),
        (Explanation.LATER_WORK, replace(LEAK, life=0.2)),
        (Explanation.LOAD, replace(LEAK, climb=0.9)),
        (Explanation.RETAINED, replace(LEAK, segment=Segment.MALLOC_RETAINED)),
    ],
)
def test_each_explanation_has_its_evidence(explanation: Explanation, evidence: Evidence) -> None:
    plain, found = compute_odds(LEAK), compute_odds(evidence)
    assert found.against[explanation] < plain.against.get(explanation, math.inf)
    assert found.probability < plain.probability


def test_memory_that_fills_something_up_is_most_likely_that() -> None:
    likeliest, chance = compute_odds(
        replace(LEAK, share=0.1, left_s=None, fading=-3.0)
    ).likeliest_alternative
    assert likeliest is Explanation.FILLING
    assert chance > 0.9


@given(EVIDENCE)
def test_the_chances_of_everything_together_are_one(evidence: Evidence) -> None:
    found = compute_odds(evidence)
    others = [found.probability * math.exp(-value) for value in found.against.values()]
    assert math.isclose(found.probability + sum(others), 1.0, rel_tol=1e-9)
    assert found.likeliest_alternative[1] == max(others)


@given(EVIDENCE, st.floats(0.0, 5.0))
def test_more_of_the_budget_and_less_time_are_never_less_of_a_leak(
    evidence: Evidence, more: float
) -> None:
    now = compute_odds(evidence).log_odds
    assert compute_odds(replace(evidence, share=evidence.share + more)).log_odds >= now
    if evidence.left_s is not None:
        assert (
            compute_odds(replace(evidence, left_s=evidence.left_s / (1.0 + more))).log_odds >= now
        )
    assert compute_odds(replace(evidence, climb=min(1.0, evidence.climb + more))).log_odds <= now


@given(st.lists(EVIDENCE, min_size=1, max_size=5))
def test_the_weights_are_fitted_to_the_same_model(observations: list[Evidence]) -> None:
    x = np.array([odds_fit.seen(evidence) for evidence in observations])
    stated = odds_fit.log_odds(np.array(astuple(WEIGHTS)), x)
    # Beyond e to the 40 both are certain, each with its own last digits.
    theirs = np.clip([compute_odds(evidence).log_odds for evidence in observations], -40, 40)
    assert np.allclose(np.clip(stated, -40, 40), theirs)


def test_growth_that_ends_anywhere_in_its_budget_loses_as_the_rest_shrinks() -> None:
    assert replace(LEAK, share=0.5).size_evidence == pytest.approx(math.log(2))
    assert replace(LEAK, share=0.9).size_evidence == pytest.approx(math.log(10))
    assert replace(LEAK, share=7.0).size_evidence == replace(LEAK, share=1.0).size_evidence, (
        "it is bounded"
    )


@pytest.mark.parametrize("window_s", [600.0, HOUR, 24 * HOUR, 168 * HOUR])
def test_the_speed_is_what_the_window_has_of_the_time_left(window_s: float) -> None:
    within = replace(LEAK, window_s=window_s)
    assert replace(within, left_s=None).speed_evidence == 0.0, "nothing grows"
    assert replace(within, left_s=1.1 * window_s).speed_evidence == 0.0, "it lasts for the window"
    assert replace(within, left_s=window_s / math.e).speed_evidence == pytest.approx(1.0)
    assert replace(within, left_s=0.0).speed_evidence == replace(within, left_s=30.0).speed_evidence


def test_the_odds_that_suffice_rise_with_the_time_that_is_left() -> None:
    day = 24 * HOUR
    assert math.exp(compute_required_log_odds(HOUR / 2, day)) == pytest.approx(99.0)
    assert math.exp(compute_required_log_odds(60.0, day)) == pytest.approx(99.0 / 30.0**0.75)
    assert math.exp(compute_required_log_odds(day, day)) == pytest.approx(99.0 * 48.0**0.75)
    assert compute_required_log_odds(0.0, day) == 0.0, "a leak as likely as not"
    assert compute_required_log_odds(2 * day, day) == compute_required_log_odds(day, day)


def test_a_shorter_window_leaves_less_time_to_wait() -> None:
    needed = [
        compute_required_log_odds(300.0, window) for window in (600.0, HOUR, 24 * HOUR, 168 * HOUR)
    ]
    assert needed == sorted(set(needed))


def test_a_spent_budget_alone_confirms_no_leak() -> None:
    """What counts are the odds, which must be even at least, and that memory grows."""
    assert not is_confirmed(replace(LEAK, share=2.0, left_s=None), compute_odds(LEAK))
    spent = replace(LEAK, share=2.0, left_s=0.0)
    assert is_confirmed(spent, compute_odds(spent))
    assert not is_confirmed(spent, Odds(-0.1, compute_odds(spent).against))


def test_a_trend_says_how_it_fades_and_how_the_load_climbs() -> None:
    heat = [
        Point(60.0 * n, int(100 * MIB * (1 - math.exp(-n / 8))), 0, 4 + n, None) for n in range(20)
    ]
    trend = fit_trend(heat, MIB)
    assert trend is not None
    assert trend.climb == 1.0
    trend = fit_trend(
        [replace(point, load=4 + number % 2) for number, point in enumerate(heat)], MIB
    )
    assert trend is not None
    assert trend.fading < -0.5
    assert abs(trend.climb) < 0.2
