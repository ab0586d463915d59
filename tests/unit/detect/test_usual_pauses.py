"""How long the next pause may be, by those before it.

Tests ``detect/patience.py``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from plimsoll_sidecar.detect.patience import (
    MAX_ERROR_CHANCE,
    UsualPauses,
    compute_student_t_quantile,
    compute_student_t_tail,
)

lengths = st.lists(st.floats(3.0, 600.0), min_size=2, max_size=30)


def bound(pauses: list[float], resolution_s: float = 1.0) -> float:
    usual = UsualPauses()
    for seconds in pauses:
        usual.add(seconds, resolution_s)
    return usual.bound_s


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 19, 52, 99, 100])
def test_the_distribution_is_students(freedom: int) -> None:
    for t in (0.0, 0.3, 1.0, 2.5, 6.0, 40.0):
        assert compute_student_t_tail(t, freedom) == pytest.approx(
            student.sf(t, freedom), abs=1e-14
        )
    for chance in (0.5, 0.1, 1e-3, 1e-6, 1e-9):
        exact = student.isf(chance, freedom)
        assert compute_student_t_quantile(chance, freedom) == pytest.approx(
            exact, rel=1e-4, abs=1e-9
        )


def test_nothing_is_said_after_a_single_pause() -> None:
    assert UsualPauses().bound_s == math.inf
    usual = UsualPauses()
    usual.add(8.0, 1.0)
    assert not usual.is_known
    assert usual.bound_s == math.inf


def test_pauses_that_are_alike_allow_little_more_and_others_much() -> None:
    assert 8 < bound([6, 7, 7, 7, 7]) < 11
    assert 8 < bound([7.0] * 40) < 10
    assert bound([7.0] * 7 + [19]) > 30, "one of a new kind: others may follow"
    assert bound([10, 20, 9, 7, 4, 12]) > 30


@pytest.mark.parametrize(
    "law",
    [
        lambda rng: 7.0,
        lambda rng: rng.uniform(3, 20),
        lambda rng: rng.lognormvariate(2, 0.4),
        lambda rng: 3 + rng.expovariate(1 / 4),
    ],
    ids=["alike", "uniform", "log-normal", "exponential"],
)
def test_the_error_holds_for_all_pauses_of_a_life(law: Callable[[random.Random], float]) -> None:
    """Of 80 engines, each with 60 pauses measured to the second."""

    def mistaken(seed: int) -> bool:
        rng, usual = random.Random(seed), UsualPauses()
        for _ in range(60):
            seconds = max(1.0, float(round(law(rng) + rng.uniform(-0.5, 0.5))))
            if seconds > usual.bound_s:
                return True
            usual.add(seconds, 1.0)
        return False

    # Binomial: more than 9 of 80 come once in a hundred times by a chance of MAX_ERROR_CHANCE.
    assert sum(mistaken(seed) for seed in range(80)) <= 80 * MAX_ERROR_CHANCE + 5


@given(lengths)
def test_the_bound_is_above_the_typical_pause_and_a_number(pauses: list[float]) -> None:
    typical = math.exp(sum(map(math.log, pauses)) / len(pauses))
    assert typical < bound(pauses) < math.inf


@given(lengths, st.floats(0.1, 10.0))
def test_the_unit_of_time_does_not_matter(pauses: list[float], factor: float) -> None:
    scaled = bound([factor * seconds for seconds in pauses], factor)
    assert math.log(scaled) == pytest.approx(math.log(factor * bound(pauses)), rel=1e-6, abs=1e-6)


@given(lengths, st.randoms(use_true_random=False))
def test_the_order_of_the_pauses_does_not_matter(pauses: list[float], rng: random.Random) -> None:
    shuffled = list(pauses)
    rng.shuffle(shuffled)
    assert math.log(bound(shuffled)) == pytest.approx(math.log(bound(pauses)), rel=1e-6)
