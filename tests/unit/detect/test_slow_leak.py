"""Growth that does not stop is seen within a day or so, and nothing that ends is.

Tests ``detect/slow_leak.py``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leaklab.series import GIB, HOUR, MIB
from plimsoll_api.assessment import Segment
from plimsoll_api.memory_policy import MemoryBudget
from plimsoll_api.trace import Device, Host, Sample
from plimsoll_sidecar.detect.slow_leak import (
    CLEAR_QUANTILE,
    MAX_STEPS,
    MIN_STEPS,
    NUM_SCALES,
    Level,
    SlowLeakWatch,
    SlowState,
    estimate_drift,
    find_memory_limit,
)

CELL_S = 300.0
ROOM = 4 * GIB
PROPERTY = settings(max_examples=12, deadline=None)


def watched(
    growth: Callable[[float], float],
    hours: float,
    limit: int | None = ROOM,
    watch: SlowLeakWatch | None = None,
    since_h: float = 0.0,
) -> tuple[SlowLeakWatch, list[float]]:
    """The watch after ``hours``, and the hours at which growth was raised."""
    watch = watch or SlowLeakWatch()
    raised, before = [], watch.drift is not None
    for cell in range(int(since_h * HOUR / CELL_S), int((since_h + hours) * HOUR / CELL_S)):
        t = cell * CELL_S
        size = int(growth(t))
        watch.add(t, size, max(0, size), limit)
        now = watch.drift is not None
        if now and not before:
            raised.append(t / HOUR)
        before = now
    return watch, raised


def noisy(curve: Callable[[float], float], seed: int, noise: float) -> Callable[[float], float]:
    rng = random.Random(seed)
    return lambda t: curve(t) + rng.gauss(0, noise)


def walk(seed: int, per_cell: float) -> Callable[[float], float]:
    rng, level = random.Random(seed), [0.0]

    def curve(t: float) -> float:
        level[0] += rng.gauss(0, per_cell)
        return level[0]

    return curve


def test_random_walks_raise_nothing_more_often_than_once_in_a_thousand_hours() -> None:
    raised = sum(len(watched(walk(seed, 5 * MIB), 400, None)[1]) for seed in range(25))
    assert raised <= 5, f"{raised} in 10,000 hours"


def test_the_test_of_steps_holds_its_level_for_a_random_walk() -> None:
    """One chance in 20: averages over an hour correlate from one step to the next."""
    rng, hits, tried = random.Random(7), 0, 2000
    for _ in range(tried):
        level, levels = 0.0, []
        for hour in range(MIN_STEPS + 1):
            lows = []
            for _ in range(12):
                level += rng.gauss(0, 1)
                lows.append(level)
            levels.append(Level(hour * HOUR, sum(lows) / 12))
        seen = estimate_drift(levels)
        assert seen is not None
        hits += seen.is_significant(CLEAR_QUANTILE)
    assert hits <= 0.06 * tried


@PROPERTY
@given(
    seed=st.integers(0, 10**6),
    height=st.floats(20, 1500),
    tau_h=st.floats(0.2, 24),
    noise=st.floats(0, 10),
)
def test_what_fills_up_is_no_leak(seed: int, height: float, tau_h: float, noise: float) -> None:
    def curve(t: float) -> float:
        return height * MIB * (1 - math.exp(-t / (tau_h * HOUR)))

    assert watched(noisy(curve, seed, noise * MIB), 120)[1] == []


@PROPERTY
@given(height=st.floats(20, 800), hours=st.floats(1, 18), start_h=st.floats(0, 30))
def test_a_pool_that_fills_within_eighteen_hours_is_no_leak(
    height: float, hours: float, start_h: float
) -> None:
    """Five sixths of a day are needed: from 19 hours on, an even pace is taken for a leak."""

    def curve(t: float) -> float:
        return height * MIB * min(1.0, max(0.0, t / HOUR - start_h) / hours)

    assert watched(curve, 72)[1] == []


@PROPERTY
@given(seed=st.integers(0, 10**6), height=st.floats(5, 300), noise=st.floats(0, 10))
def test_the_rhythm_of_a_day_is_no_leak(seed: int, height: float, noise: float) -> None:
    def curve(t: float) -> float:
        return height * MIB * (0.5 - 0.5 * math.cos(2 * math.pi * t / (24 * HOUR)))

    assert watched(noisy(curve, seed, noise * MIB), 240)[1] == []


@PROPERTY
@given(seed=st.integers(0, 10**6), count=st.integers(1, 6), height=st.floats(10, 300))
def test_steps_are_no_leak(seed: int, count: int, height: float) -> None:
    rng = random.Random(seed)
    at = [rng.uniform(0, 100 * HOUR) for _ in range(count)]
    assert watched(lambda t: height * MIB * sum(t >= one for one in at), 120)[1] == []


@pytest.mark.parametrize(
    ("rate", "noise", "within_h"), [(48, 20, 27), (12, 20, 28), (2, 10, 40), (1, 5, 48)]
)
def test_a_leak_is_found(rate: int, noise: int, within_h: int) -> None:
    curve = noisy(lambda t: rate * MIB * t / HOUR, 3, noise * MIB)
    watch, raised = watched(curve, 72, 6 * GIB)
    assert len(raised) == 1
    assert raised[0] <= within_h
    assert watch.drift is not None
    rate_s = rate * MIB / HOUR
    error = CLEAR_QUANTILE * watch.drift.error
    assert watch.drift.bytes_per_s - error <= 1.1 * rate_s
    assert watch.drift.bytes_per_s + error >= 0.9 * rate_s
    assert watch.drift.bytes_per_s == pytest.approx(rate_s, rel=0.25)


def test_growth_that_leaves_little_time_is_believed_sooner() -> None:
    def leak(t: float) -> float:
        return 100 * MIB * t / HOUR

    assert watched(leak, 48, 3 * GIB)[1][0] < 10
    assert 24 <= watched(leak, 48, None)[1][0] < 27
    assert 24 <= watched(leak, 48, 64 * GIB)[1][0] < 27


def test_it_clears_when_the_growth_stops() -> None:
    def leak(t: float) -> float:
        return 12 * MIB * min(t, 40 * HOUR) / HOUR

    curve = noisy(leak, 5, 4 * MIB)
    watch, raised = watched(curve, 40, 6 * GIB)
    assert len(raised) == 1
    watch, again = watched(curve, 16, 6 * GIB, watch, since_h=40)
    assert watch.drift is None
    assert again == []


def test_growth_that_slows_down_clears_it_and_raises_it_no_more() -> None:
    """As the square root of the time: nothing shows an end, but each day brings less."""
    watch, raised = watched(lambda t: 12 * MIB * min(t, 30 * HOUR) / HOUR, 30, 6 * GIB)
    assert len(raised) == 1

    def slower(t: float) -> float:
        return 360 * MIB * math.sqrt(t / (30 * HOUR))

    watch, again = watched(slower, 130, 6 * GIB, watch, since_h=30)
    assert watch.drift is None
    assert again == []


def test_too_short_a_time_is_unknown() -> None:
    watch, _ = watched(lambda t: t * 1e4, MIN_STEPS)
    assert watch.make_report(ROOM, None) is None
    watch, _ = watched(lambda t: t * 1e4, 2, watch=watch, since_h=MIN_STEPS)
    assert watch.make_report(ROOM, None) is not None


def test_memory_is_bounded() -> None:
    watch, _ = watched(noisy(lambda t: t * 100, 1, MIB), 1500)
    state = watch.state
    assert sum(map(len, state.levels)) <= NUM_SCALES * (MAX_STEPS + 1)
    assert len(state.peaks) == 24
    assert len(msgspec.json.encode(state)) < 4096


def test_it_goes_on_after_a_restart() -> None:
    def leak(t: float) -> float:
        return 12 * MIB * t / HOUR

    watch, _ = watched(leak, 30)
    assert watch.drift is not None
    kept = msgspec.json.decode(msgspec.json.encode(watch.state), type=SlowState)
    other = SlowLeakWatch()
    other.resume(kept, 5.0, ROOM)
    assert other.drift is not None
    assert other.drift.bytes_per_s == pytest.approx(watch.drift.bytes_per_s, rel=0.01)
    assert other.peak == watch.peak
    other, raised = watched(lambda t: leak(t + 30 * HOUR), 20, ROOM, other)
    assert raised == []
    assert other.drift is not None
    assert other.drift.bytes_per_s == pytest.approx(12 * MIB / HOUR, rel=0.15)


@given(
    st.lists(
        st.tuples(st.floats(0, 1e9, allow_nan=False), st.integers(-(1 << 50), 1 << 50)),
        max_size=200,
    )
)
def test_any_series_is_taken(points: list[tuple[float, int]]) -> None:
    watch = SlowLeakWatch()
    for t, size in sorted(points):
        watch.add(t, size, abs(size), ROOM)
    SlowLeakWatch().resume(watch.state, 0.0, ROOM)


def test_an_empty_state_starts_anew() -> None:
    watch = SlowLeakWatch()
    watch.resume(SlowState(levels=[[]], raised=True), 1.0, None)
    assert watch.drift is None
    assert watch.peak is None


def test_the_time_until_the_limit_is_counted_from_the_highest_level() -> None:
    watch, _ = watched(lambda t: 12 * MIB * t / HOUR, 48, 6 * GIB)
    assert watch.drift is not None
    assert watch.peak is not None
    pace = watch.drift.bytes_per_s
    said = watch.make_report(watch.peak + 1000 * MIB, Segment.SHARED)
    assert said is not None
    assert (said.slow_leak, said.segment) == (True, Segment.SHARED)
    assert said.limit_s == pytest.approx(1000 * MIB / pace, abs=0.1)
    unknown, reached = watch.make_report(None, None), watch.make_report(watch.peak - 1, None)
    assert unknown is not None
    assert unknown.limit_s is None
    assert reached is not None
    assert reached.limit_s == 0


def test_whose_limit_it_is() -> None:
    two = Sample(t=0, epoch=1, host=Host(), device=[Device(0, total=100), Device(1, total=50)])
    half = Sample(t=0, epoch=1, host=Host(), device=[Device(0, total=100), Device(1)])
    declared = MemoryBudget(growth_bytes=10, limit_bytes=90)
    assert find_memory_limit("device", None, two, shared=False) == 150
    assert find_memory_limit("device", None, two, shared=True) is None
    assert find_memory_limit("device", None, half, shared=False) is None
    assert find_memory_limit("device", declared, half, shared=True) == 90
    assert find_memory_limit("host", None, two, shared=False) is None
    assert find_memory_limit("host", declared, two, shared=False) == 90
