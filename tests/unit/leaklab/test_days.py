"""``leaklab/days.py``: the days of a service."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from leaklab.days import MINUTE, MOST_ASKED, RHYTHMS, Days, Rhythm, worked_off
from leaklab.series import DAY
from leaklab.views import LONGEST


@pytest.mark.parametrize("rhythm", RHYTHMS, ids=lambda one: one.__name__.strip("_"))
def test_a_rhythm_is_a_share_of_the_traffic_and_goes_on_at_midnight(rhythm: Rhythm) -> None:
    shares = [rhythm(minute / 60) for minute in range(24 * 60)]
    assert min(shares) >= 0
    assert 0.4 < max(shares) < 1.2
    assert abs(shares[0] - shares[-1]) < 0.8


def test_there_is_traffic_at_each_minute() -> None:
    days = Days("one", LONGEST)
    asked = days.usual_traffic(random.Random(1))
    assert len(asked) == len(days.minutes) == LONGEST / MINUTE + 1
    assert 0 < min(asked) < max(asked) <= MOST_ASKED


def test_days_are_drawn_from_their_seed() -> None:
    def asked(seed: str) -> list[float]:
        return Days(seed, DAY).usual_traffic(random.Random(1))

    assert asked("one") == asked("one") != asked("other")


def test_later_days_have_more_traffic_on_average_and_some_have_less() -> None:
    def level(seed: int, later: bool) -> float:
        return mean(Days(f"{seed}", LONGEST, later).traffic(RHYTHMS[-1], 0, 10))

    grown = [level(seed, True) / level(seed, False) for seed in range(30)]
    assert mean(grown) > 1.05
    assert min(grown) < 0.95


def test_times_come_as_often_as_they_should() -> None:
    counts = [len(Days(f"{seed}", DAY).times(1800.0)) for seed in range(40)]
    assert mean(counts) == pytest.approx(48, rel=0.1)


def test_what_was_worked_off_is_the_sum_of_what_was_asked_before() -> None:
    assert worked_off([2.0, 3.0, 4.0]) == [0.0, 2.0, 5.0]
