"""``leaklab/demand.py``: how many requests are in flight."""

from __future__ import annotations

from statistics import mean

import pytest

from leaklab.demand import beating, between_steps, drifting, rushes, two_humps
from leaklab.series import DAY, HOUR, Curve
from leaklab.views import LONGEST

PATTERNS: dict[str, Curve] = {
    "two humps": two_humps(3, 15, 4 * HOUR),
    "rushes": rushes(1, 3, 15, (HOUR, 3 * HOUR), (600, HOUR)),
    "drifting": drifting(2, 9, HOUR),
    "beating": beating(3, 15, 2500, 4100),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_varies_and_is_never_negative(name: str) -> None:
    load = PATTERNS[name]
    values = [load(t) for t in range(0, int(LONGEST), 300)]
    assert min(values) >= 0
    assert max(values) - min(values) > 5
    assert max(values) < 60


def test_a_day_has_two_humps_and_a_night() -> None:
    load = two_humps(2, 20)
    assert load(3 * HOUR) < 3
    assert load(10 * HOUR) > 17 < load(15 * HOUR) + 2
    assert load(12.5 * HOUR) < min(load(10 * HOUR), load(15 * HOUR))
    assert load(DAY + 10 * HOUR) == pytest.approx(load(10 * HOUR))


@pytest.mark.parametrize("pattern", ["rushes", "drifting"])
def test_a_seed_makes_one_pattern(pattern: str) -> None:
    def made(seed: int) -> list[float]:
        if pattern == "rushes":
            load = rushes(seed, 3, 15, (HOUR, 3 * HOUR), (600, HOUR))
        else:
            load = drifting(seed, 9, HOUR)
        return [load(t) for t in range(0, int(DAY), 600)]

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_what_drifts_keeps_its_mean_about() -> None:
    means = [
        mean(load(t) for t in range(0, int(DAY), 900))
        for load in (drifting(seed, 10, HOUR) for seed in range(30))
    ]
    assert mean(means) == pytest.approx(10, rel=0.1)


def test_points_are_joined_by_lines_and_level_outside() -> None:
    line = between_steps([1.0, 3.0, 2.0], 10)
    assert [line(t) for t in (-5, 0, 5, 10, 15, 20, 99)] == [1.0, 1.0, 2.0, 3.0, 2.5, 2.0, 2.0]
