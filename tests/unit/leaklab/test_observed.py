"""``leaklab/observed.py`` and ``leaklab/origins.py``: where the height of a healthy run comes
from."""

from __future__ import annotations

import random

import pytest

from leaklab.days import Days
from leaklab.heights import BUDGET
from leaklab.observed import (
    MOST,
    Shown,
    at_height,
    by_change,
    by_minute,
    daily_height,
    family,
    observed_range,
)
from leaklab.origins import TIMES_LEVEL, Origin, origin_of
from leaklab.series import DAY
from leaklab.views import LONGEST

OBSERVED = [seed for seed in range(60) if origin_of(seed) is Origin.OBSERVED]
UNOBSERVED = [seed for seed in range(60) if origin_of(seed) is Origin.UNOBSERVED]


def fills(engine: random.Random, days: Days) -> Shown:
    """In one day and a half, at an even rate."""
    bound = engine.uniform(1, 9)
    held = [min(bound, bound * t / (1.5 * DAY)) for t in days.minutes]
    return Shown(by_minute(held), days.usual_traffic(engine))


def never_ends(engine: random.Random, days: Days) -> Shown:
    return Shown(by_minute(list(days.minutes)), days.usual_traffic(engine))


def test_a_budget_is_three_times_what_the_observed_day_showed() -> None:
    """What takes half as long again as the day is then at half of the budget."""
    for seed in OBSERVED[:8]:
        shown, unit = at_height(fills, seed)
        assert unit * observed_range(fills, f"{seed}/0") == pytest.approx(BUDGET / TIMES_LEVEL)
        assert unit * shown.held.range == pytest.approx(BUDGET / 2)
        run = family(fills, "python_objects")(seed)
        assert run.other(0.0) == 0.0
        assert run.other(LONGEST) == pytest.approx(BUDGET / 2)


def test_a_budget_that_was_set_without_a_look_is_any() -> None:
    shares = [unit * shown.held.range / BUDGET for shown, unit in (
        at_height(fills, seed) for seed in UNOBSERVED
    )]  # fmt: skip
    assert min(shares) < 0.2
    assert max(shares) > 0.7
    assert max(shares) <= MOST


def test_an_engine_that_spends_its_budget_is_kept() -> None:
    """In three days it holds three times as much as in the observed one."""
    shown, unit = at_height(never_ends, OBSERVED[0])
    assert unit * shown.held.range == pytest.approx(BUDGET, rel=0.01)


def test_memory_of_the_device_is_there() -> None:
    run = family(fills, "non_torch")(OBSERVED[0])
    assert run.device
    assert run.device_other_in == "non_torch"
    assert run.device_other(LONGEST) == pytest.approx(BUDGET / 2)
    assert run.other(LONGEST) == 0.0


def test_what_happens_before_or_after_the_days_does_not_count() -> None:
    days = Days("one", DAY)
    held = by_change(days, [(-5.0, 2.0), (0.0, 1.0), (60.0, 4.0), (2 * DAY, 99.0)])
    assert (held.least, held.most, held.range) == (3.0, 7.0, 4.0)
    assert [held.curve(t) for t in (0.0, 59.0, 60.0, DAY)] == [3.0, 3.0, 7.0, 7.0]


def test_what_comes_each_day_is_about_a_third_of_an_observed_budget() -> None:
    shares = [daily_height(seed) / BUDGET for seed in OBSERVED]
    assert 0.15 < min(shares) < max(shares) < 0.45
    assert max(daily_height(seed) for seed in UNOBSERVED) > 0.6 * BUDGET
