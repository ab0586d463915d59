"""``leaklab/views.py``: runs of both kinds are watched alike."""

from __future__ import annotations

from statistics import mean

from leaklab.series import HOUR, MIB, Series
from leaklab.views import HOURS, INTERVALS, MOMENTS, begins, habits, interval_of, viewed

SAMPLES = 9000
"""The most of a run: more would make the split slow to judge."""


def test_each_view_has_its_turn() -> None:
    engine = Series(duration=48 * HOUR, interval=30.0, base=3e9)
    seen = [viewed(engine, number) for number in range(len(HOURS))]
    assert [(one.duration, one.interval) for one in seen] == list(HOURS)
    assert all(one.base == engine.base for one in seen)
    brief = Series(duration=HOUR)
    assert [(one.duration, one.interval) for one in (viewed(brief, 1), viewed(brief, 7))] == [
        MOMENTS[1],
        MOMENTS[1],
    ]


def test_no_view_has_more_samples_than_can_be_judged() -> None:
    assert max(duration / interval for duration, interval in (*HOURS, *MOMENTS)) <= SAMPLES


def test_six_runs_of_a_family_have_hours_enough() -> None:
    turns = len(HOURS)
    least = min(sum(HOURS[(at + n) % turns][0] for n in range(6)) for at in range(turns))
    assert least >= 200 * HOUR


def test_a_rate_has_its_own_intervals() -> None:
    for rate, intervals in INTERVALS.items():
        assert {interval_of(rate, seed) for seed in range(60)} == set(intervals)


def test_habits_differ_between_engines_and_not_between_looks() -> None:
    engines = [habits(seed) for seed in range(400)]
    assert engines[3].keys() == habits(3).keys()
    assert engines[3]["wander_s"] == habits(3)["wander_s"]
    assert 0.2 < mean("read_every" in one for one in engines) < 0.3
    assert 0.42 < mean("cpu_s" in one for one in engines) < 0.58
    assert 0.26 < mean("file" in one for one in engines) < 0.4
    for one in engines:
        assert 0.8 * MIB <= one["per_request"] <= 3.5 * MIB
        assert 8 <= one["wander_s"] <= 240
        assert 8 * MIB <= one["noise"] <= 42 * MIB
        assert "file" not in one or one["file"](1e9) <= 300 * MIB
        if "cpu_s" in one:
            used = [one["cpu_s"](float(t)) for t in range(0, 9000, 90)]
            assert used == sorted(used)


def test_a_leak_begins_after_the_warm_up_and_a_late_one_after_a_healthy_run() -> None:
    for seed in range(50):
        soon, late = begins(seed, 3000, late=False), begins(seed, 3000, late=True)
        assert 180 <= soon <= 900 + 0.25 * 3000
        assert late - soon >= 1.2 * 3000
        assert begins(seed, 100, late=True) >= 180 + 1.2 * 600
    assert len({begins(seed, 3000, late=False) for seed in range(50)}) == 50
