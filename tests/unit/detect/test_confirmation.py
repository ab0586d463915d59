"""What is suspected is not yet confirmed: what else it may be gets the time to show.

Tests ``detect/odds.py``.
"""

from __future__ import annotations

import pytest

from leaklab.series import MIB, Series, high_water, saturating, sawtooth, steady
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.supervision import Mode, Supervision
from plimsoll_sidecar.replay import ReplayLine, replay_samples

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
    assert line.t - 200.0 <= 20.0


def test_a_burst_of_seconds_is_not_urgent() -> None:
    def burst(t: float) -> float:
        return 260 * MIB * (t % 300) / 22 if t > 200 and t % 300 < 22 else 0.0

    assert confirmed(Series(duration=1800.0, other=burst)) == []
