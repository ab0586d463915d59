"""What only looks like a leak. None of it may ever be acted on.

Tests ``detect/detector.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from leaklab.series import (
    GIB,
    MIB,
    Series,
    diurnal,
    flat,
    high_water,
    saturating,
    sawtooth,
    square_load,
    step,
)
from plimsoll_api.assessment import BudgetState

Judge = Callable[..., Any]
HOUR = 3600.0


def adapters(t: float) -> float:
    return sum(step(60 * MIB, at)(t) for at in (400, 900, 1000, 2500, 3100))


def full_cache(t: float) -> float:
    return min(800 * MIB, t * 0.3 * MIB)


def cache_of(size_mib: int, mib_per_s: float) -> Callable[[float], float]:
    """A sound cache that fills from the hundredth second on, and is full then."""
    return lambda t: min(size_mib * MIB, max(0.0, t - 100) * mib_per_s * MIB)


def beyond_its_bound(size_mib: int, mib_per_s: float, bound_mib: int) -> Series:
    cache = cache_of(size_mib, mib_per_s)
    return Series(duration=HOUR, other=cache, ledger=cache, ledger_bound=bound_mib * MIB)


QUIET = {
    "noise": Series(duration=4 * HOUR, interval=2, noise=40 * MIB),
    "gc sawtooth": Series(duration=HOUR, other=sawtooth(200 * MIB, 90)),
    "slow gc sawtooth": Series(duration=2 * HOUR, other=sawtooth(120 * MIB, 900)),
    "cache that saturates": Series(
        duration=HOUR,
        other=saturating(800 * MIB, 900, 60),
        ledger=saturating(800 * MIB, 900, 60),
        ledger_bound=GIB,
    ),
    "cache that fills": Series(
        duration=HOUR, other=full_cache, ledger=full_cache, ledger_bound=GIB
    ),
    "cache that fills to its bound": beyond_its_bound(64, 0.8, 64),
    "small cache that declares a quarter of its bound": beyond_its_bound(64, 0.8, 16),
    "large cache that declares most of its bound": beyond_its_bound(800, 0.3, 700),
    "pool with less in use at low load": Series(
        duration=HOUR,
        ledger=lambda t: square_load(2, 40, 600)(t) * 20 * MIB,
        ledger_bound=GIB,
        load=square_load(2, 40, 600),
    ),
    "adapters in the ledger": Series(
        duration=HOUR, other=adapters, ledger=adapters, ledger_bound=GIB
    ),
    "warm-up climb": Series(duration=HOUR, other=saturating(600 * MIB, 30)),
    "diurnal load": Series(duration=48 * HOUR, interval=30, load=diurnal(2, 60), noise=20 * MIB),
    "bursts of load": Series(duration=HOUR, load=square_load(2, 40, 600), per_request=5 * MIB),
    "one step": Series(duration=HOUR, other=step(300 * MIB, 500)),
    "idle": Series(duration=HOUR, load=flat(0)),
    "device": Series(duration=1200, device=True),
}


@pytest.mark.parametrize("name", QUIET)
def test_raises_nothing(judge: Judge, name: str) -> None:
    outcome = judge(QUIET[name])
    assert outcome.warm_t is not None
    assert outcome.first == {}


@pytest.mark.parametrize(
    "series",
    [
        Series(duration=2 * HOUR, other=sawtooth(300 * MIB, 1800)),
        Series(duration=HOUR, other=sawtooth(200 * MIB, 300)),
    ],
)
def test_the_first_tooth_of_a_large_sawtooth_clears_itself(judge: Judge, series: Series) -> None:
    """Nobody can tell a leak from garbage that was never collected yet: but nothing is done, and
    the swing is known from then on."""
    outcome = judge(series)
    assert outcome.over_t is None
    assert outcome.last.suspicions == []


def test_a_cache_that_declares_too_low_a_bound_is_given_up_once_it_is_full(judge: Judge) -> None:
    """300 MiB of it are explained by nothing: while it fills it looks like a leak, and is less than
    the budget of 512 MiB in the end."""
    outcome = judge(beyond_its_bound(400, 0.3, 100))
    assert outcome.over_t is None
    assert outcome.last.suspicions == []


def test_what_an_allocator_keeps_after_bursts_is_given_up(judge: Judge) -> None:
    series = Series(
        duration=HOUR,
        other=high_water(150 * MIB, (310, 1210, 2110, 3010), 30),
        load=lambda t: 40 if 300 <= t % 900 < 500 else 4,
    )
    outcome = judge(series)
    assert outcome.over_t is None
    assert outcome.last.suspicions == []


def test_without_a_budget_memory_is_watched_and_nothing_suspected() -> None:
    from plimsoll_api.memory_policy import MemoryPolicy
    from plimsoll_sidecar.detect.detector import Detector

    detector = Detector(MemoryPolicy(warmup_s=10), 30, 1)
    last = None
    for sample in Series(duration=300, other=step(300 * MIB, 100)).samples():
        last = detector.update(sample)
        assert last.suspicions == []
    assert last is not None
    assert isinstance(last.host, BudgetState)
    assert last.host.consumed_ratio is None
    assert last.host.unexplained == pytest.approx(300 * MIB, rel=0.15)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_quick_burst_that_stays_within_the_budget_is_not_called_spent(
    judge: Judge, seed: int
) -> None:
    """78 % of the budget in a minute, declared by nobody, and then no more."""
    burst = Series(duration=1200, other=lambda t: 400 * MIB * min(1, max(0, t - 300) / 60))
    burst.seed = seed
    outcome = judge(burst)
    assert outcome.over_t is None
    assert outcome.last.suspicions == []
