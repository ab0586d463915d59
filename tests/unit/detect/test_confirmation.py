"""What is suspected is not yet confirmed: what else it may be gets the time to show.

Tests ``detect/odds.py`` and the course of ``detect/growth.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from leaklab.series import MIB, Series, high_water, saturating, sawtooth, steady
from plimsoll_api.incidents import WaitReason
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.supervision import Mode, Supervision
from plimsoll_sidecar.detect.detector import Detector
from plimsoll_sidecar.detect.growth import MIN_GROWTH_DURATION_S, GrowthHistory
from plimsoll_sidecar.govern.command import Result
from plimsoll_sidecar.govern.governor import Governor
from plimsoll_sidecar.replay import (
    ReplayLine,
    make_engine_view,
    make_unknown_results,
    replay_samples,
)

HOUR = 3600.0
POLICY = MemoryPolicy(host=MemoryBudget(512 * MIB, 24 * HOUR, 6 << 30), warmup_s=60.0)
LEAK = Series(duration=2 * HOUR, interval=10, leak=steady(512 * MIB / (2 * HOUR), 600.0))


def confirmed(series: Series) -> list[ReplayLine]:
    supervision = Supervision(mode=Mode.RECOVER)
    lines = replay_samples(series.samples(), POLICY, supervision, series.interval, "case")
    return [line for line in lines if isinstance(line, ReplayLine) and line.event == "confirmed"]


@pytest.mark.parametrize("period", [1200.0, HOUR])
def test_old_garbage_is_not_believed_before_it_outlasts_two_collections(period: float) -> None:
    garbage = sawtooth(120 * MIB, period)
    series = Series(duration=3 * HOUR, interval=10, other=garbage, collects=period)
    assert confirmed(series) == []


def test_what_an_allocator_keeps_after_bursts_is_not_believed() -> None:
    kept = high_water(180 * MIB, (1000.0, 4000.0, 7000.0), 300.0)
    series = Series(duration=3 * HOUR, interval=10, other=kept)
    assert confirmed(series) == []


def test_a_leak_that_keeps_its_pace_leaves_a_fifth_of_its_budget() -> None:
    (line,) = confirmed(LEAK)[:1]
    assert line.consumed_ratio is not None
    assert line.consumed_ratio < 4 / 5


@pytest.mark.parametrize("tau", [600.0, 2400.0])
def test_heat_that_ends_is_not_believed_however_smooth_it_is(tau: float) -> None:
    heat = saturating(215 * MIB, tau, 900.0)
    series = Series(duration=5 * HOUR, interval=10, other=heat, noise=0.0, per_request=0.0)
    assert confirmed(series) == []


def test_a_slow_trend_is_not_confirmed_for_being_straight() -> None:
    """A cache that fills at an even pace looks the same for hours: only the odds decide."""
    leak = steady(48 * MIB / HOUR, 600.0)
    series = Series(duration=2 * HOUR, interval=5, leak=leak, noise=1 * MIB, per_request=0.0)
    assert confirmed(series) == []


def test_work_that_begins_late_and_ends_is_not_believed_however_straight_it_is() -> None:
    """A batch job whose results are kept until they are fetched: .7 of the budget in two hours."""
    kept = steady(180 * MIB / HOUR, 6 * HOUR)
    series = Series(
        duration=12 * HOUR, interval=10, noise=1 * MIB, per_request=0.0,
        other=lambda t: kept(t) if t < 8 * HOUR else 0.0,
    )  # fmt: skip
    assert confirmed(series) == []


def test_a_leak_that_begins_late_is_believed_before_its_budget_is_spent() -> None:
    series = Series(duration=12 * HOUR, interval=10, leak=steady(180 * MIB / HOUR, 6 * HOUR))
    (line,) = confirmed(series)[:1]
    assert line.consumed_ratio is not None
    assert 0.7 < line.consumed_ratio < 0.9


@pytest.mark.parametrize("noise", [0.0, 1.0 * MIB])
def test_a_staircase_that_was_confirmed_subsides_within_a_minute_of_its_end(noise: float) -> None:
    """Four steps of 16 s at 2 MiB/s, each with a landing of 24 s: half of the budget."""

    def staircase(t: float) -> float:
        steps, into = divmod(max(0.0, t - 200.0), 40.0)
        return 2 * MIB * (16 * min(steps, 4.0) + (min(16.0, into) if steps < 4 else 0.0))

    memory = MemoryPolicy(host=MemoryBudget(256 * MIB, HOUR, 6 << 30), warmup_s=60.0)
    series = Series(duration=600.0, leak=staircase, noise=noise, per_request=0.0)
    governor = Governor(Supervision(mode=Mode.RECOVER), memory, replica="staircase")
    detector = Detector(memory, 120.0, 1.0)
    results: list[Result] = []
    waits: dict[WaitReason | None, float] = {}
    for sample in series.samples():
        assessment = detector.update(sample)
        turn = governor.advance(assessment, make_engine_view(sample), sample.t, results)
        results = make_unknown_results(turn)
        for incident in governor.state.incidents:
            if incident.confirmed_at is not None:
                waits.setdefault(incident.waits, sample.t)
    ended_at = 200.0 + 3 * 40.0 + 16.0
    assert list(waits) == [None, WaitReason.SUBSIDED], "confirmed in the last step"
    assert ended_at < waits[WaitReason.SUBSIDED] < ended_at + 60.0
    assert incident.waits is WaitReason.SUBSIDED, "noise is no further growth"


@pytest.mark.parametrize("kept_in", ["malloc_retained", "torch_reserved_unused"])
def test_what_an_allocator_holds_unused_is_believed_later(kept_in: str) -> None:
    """A pool that fragments until its engine moves the blocks together."""
    teeth = sawtooth(350 * MIB, 4 * HOUR)
    device = kept_in == "torch_reserved_unused"
    series = Series(
        duration=8 * HOUR, interval=10, noise=1 * MIB, per_request=0.0, device=device,
        **({"device_other": teeth} if device else {"other": teeth, "other_in": "retained"}),
    )  # fmt: skip
    assert confirmed(series) == []


def test_a_climb_that_has_stopped_is_not_believed_for_a_step() -> None:
    climb = steady(400 * MIB / HOUR, 900.0)
    series = Series(
        duration=6 * HOUR, interval=10, noise=0.0, per_request=0.0,
        other=lambda t: climb(min(t, 900.0 + HOUR / 2)) + (60 * MIB if t > 1.4 * HOUR else 0.0),
    )  # fmt: skip
    assert confirmed(series) == []


def test_what_fills_up_is_believed_later_than_what_goes_on_at_its_pace() -> None:
    """Pages of a snapshot that come when they are touched: ever fewer, to .6 of the budget."""
    pages = saturating(310 * MIB, 3000.0, 60.0)
    series = Series(duration=5 * HOUR, interval=10, other=pages, per_request=0.0)
    assert confirmed(series) == []
    steady_one = Series(duration=3 * HOUR, interval=10, leak=steady(310 * MIB / 3000, 60.0))
    assert confirmed(steady_one)


def test_growth_with_a_load_that_climbs_slowly_is_not_believed() -> None:
    """A controller raises the batch by a little each minute, and the workspace with it."""

    def climb(t: float) -> float:
        return min(1.0, t / (1.5 * HOUR))

    series = Series(
        duration=4 * HOUR, interval=10, noise=1 * MIB, per_request=0.0,
        other=lambda t: 330 * MIB * climb(t), load=lambda t: 5 + 20 * climb(t),
    )  # fmt: skip
    assert confirmed(series) == []


@pytest.mark.parametrize("long_step", [True, False])
def test_what_a_long_step_needs_for_itself_is_no_leak(long_step: bool) -> None:
    """A compiler takes 400 MiB within 40 s; the same growth while steps go on is a fast leak."""
    begins, lasts = 600.0, 40.0

    def compiles(t: float) -> bool:
        return begins <= t < begins + lasts

    series = Series(
        duration=900.0,
        other=lambda t: 400 * MIB * (t - begins) / lasts if compiles(t) else 0.0,
        paused=compiles if long_step else lambda t: False,
    )
    found = [line for line in confirmed(series) if line.kind == "HostGrowth"]
    assert (found == []) is long_step


def test_a_budget_that_is_spent_in_seconds_is_not_waited_for() -> None:
    leak = steady(64 * MIB, 200.0)
    (line,) = confirmed(Series(duration=250.0, interval=0.25, leak=leak))[:1]
    assert line.t - 200.0 <= 25.0


def test_a_burst_of_seconds_is_not_urgent() -> None:
    def burst(t: float) -> float:
        return 260 * MIB * (t % 300) / 22 if t > 200 and t % 300 < 22 else 0.0

    assert confirmed(Series(duration=1800.0, other=burst)) == []


BUDGET = 256 * MIB
GROWN: dict[str, tuple[Callable[[float], float], bool]] = {
    "steady": (lambda t: t, True),
    "by steps of 20 s": (lambda t: 20 * (t // 20), True),
    "ever faster": (lambda t: t * t / 200, True),
    "ever more slowly": (lambda t: -200 * math.expm1(-t / 40), False),
    "to half of the budget, in minutes": (lambda t: -128 * math.expm1(-t / 130), False),
    "beyond its budget, in minutes": (lambda t: -300 * math.expm1(-t / 160), True),
    "evenly, until it is full": (lambda t: min(t, 95.0), False),
    "a table that doubles": (lambda t: 8 * 2 ** int(math.log2(t / 9 + 1)), False),
    "a job": (lambda t: t if t < 60 else 0.0, False),
}
"""Growth in MiB as a function of the seconds since it began, and whether it is sustained."""


@pytest.mark.parametrize("name", GROWN)
@pytest.mark.parametrize("interval_s", [1.0, 2.0, 5.0])
def test_growth_is_sustained_that_lasts_and_neither_fades_nor_is_a_step(
    name: str, interval_s: float
) -> None:
    size, expected = GROWN[name]
    course, found = GrowthHistory(interval_s), []
    for number in range(int(300 / interval_s)):
        t = number * interval_s
        course.add(t, int(size(max(0.0, t - 60)) * MIB), None)
        if course.is_sustained(BUDGET):
            found.append(t - 60)
    assert bool(found) is expected
    assert min(found, default=130.0) >= MIN_GROWTH_DURATION_S


def test_growth_that_follows_requests_is_sustained_though_the_load_falls() -> None:
    course = GrowthHistory(1.0)
    for second in range(300):
        served = 10 * min(second, 100) + max(0, second - 100)
        course.add(float(second), served * MIB // 10, served)
    assert course.is_sustained(BUDGET) is False, "the last seconds bring too little"
    for second in range(300, 700):
        served += 4
        course.add(float(second), served * MIB // 10, served)
    assert course.is_sustained(BUDGET)


@pytest.mark.parametrize(("tau", "expected"), [(1e6, True), (40.0, False)])
def test_growth_that_spends_its_budget_before_it_lasts_must_keep_its_pace(
    tau: float, expected: bool
) -> None:
    """A leak, and a cache of 1.2 budgets that fills ever more slowly."""
    course, found = GrowthHistory(1.0), []
    for second in range(80):
        filled = -math.expm1(-second / tau) * (tau / 40.0) * 1.2
        course.add(float(second), int(filled * BUDGET), None)
        if second >= 40:
            found.append(course.is_sustained(BUDGET))
    assert all(found) if expected else not any(found)


def test_the_course_of_a_long_life_takes_little_memory() -> None:
    course = GrowthHistory(1.0)
    for second in range(100_000):
        course.add(float(second), second, second)
    assert len(course) < 500
