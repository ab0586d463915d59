"""A warm-up ends by evidence: the engine is ready, requests were served, memory has settled.

Tests ``detect/baseline.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from leaklab.series import MIB, Series, saturating, steady
from plimsoll_api.incidents import IncidentKind
from plimsoll_sidecar.detect.baseline import MAX_WARMUP_BUDGET_FACTOR, Warmup
from plimsoll_sidecar.detect.growth import Point

Judge = Callable[..., Any]


def loading(rate: float, until: float) -> Callable[[float], float]:
    return lambda t: rate * min(t, until)


def test_an_engine_that_starts_slowly_does_not_leak(judge: Judge) -> None:
    """Weights and libraries come in for five minutes, the warm-up is set to five seconds."""
    outcome = judge(
        Series(duration=900, other=loading(3 * MIB, 300), ready_at=300, noise=2 * MIB), warmup=5.0
    )
    assert outcome.first == {}
    assert 300 < outcome.warm_t < 330
    assert outcome.last.host.consumed_ratio < 0.1


def test_a_climb_that_slows_is_still_warm_up(judge: Judge) -> None:
    """A slow machine takes minutes for what a warm-up of five seconds is set for."""
    series = Series(duration=900, other=saturating(400 * MIB, 40), noise=2 * MIB)
    outcome = judge(series, warmup=5.0)
    assert outcome.first == {}
    assert outcome.last.host.consumed_ratio < 0.25


def test_a_leak_from_the_first_second_on_is_no_warm_up(judge: Judge) -> None:
    outcome = judge(Series(duration=200, leak=steady(4 * MIB), noise=2 * MIB), warmup=20.0)
    t, _ = outcome.first[IncidentKind.HOST_GROWTH]
    assert t < 90
    assert outcome.last.host.unexplained > 500 * MIB


@pytest.mark.parametrize("warmup", [60.0, 300.0])
def test_a_leak_that_hides_in_a_climb_is_seen_after_twice_the_warm_up(
    judge: Judge, warmup: float
) -> None:
    """Arenas fill ever slower, and a leak at twice the budget's rate begins with the first request:
    the climb never settles, and its later half rises by less than its earlier one."""
    series = Series(
        duration=1200,
        other=saturating(600 * MIB, 2 * warmup),
        leak=steady(2 * 512 * MIB / 3600),
        noise=2 * MIB,
    )
    outcome = judge(series, warmup=warmup)
    assert outcome.warm_t <= 2 * warmup + 10
    t, _ = outcome.first[IncidentKind.HOST_GROWTH]
    assert t < 1200


def test_the_first_requests_begin_the_warm_up_again(judge: Judge) -> None:
    """Idle after its start, then an hour's work whose first requests fill arenas for good."""
    series = Series(
        duration=3600,
        load=lambda t: 8 if 600 < t < 3000 else 0,
        other=saturating(300 * MIB, 40, 600),
        noise=2 * MIB,
    )
    outcome = judge(series)
    assert outcome.warm_t < 120
    assert outcome.first == {}
    assert outcome.last.host.consumed_ratio < 0.1


@pytest.mark.parametrize("ready", [True, None])
def test_an_engine_that_tells_no_load_is_warm_some_time(ready: bool | None) -> None:
    warmup = Warmup(10.0, None, 1.0)
    ended = next(t for t in range(2000) if warmup.add(Point(t, 1 << 30), ready))
    assert ended < (30 if ready else 130)


def test_a_leak_that_is_faster_than_the_warm_up_does_not_wait_for_its_end(judge: Judge) -> None:
    """36 budgets would go within the warm-up, and the first ones after it nobody would see."""
    series = Series(duration=120, leak=steady(8 * MIB, 10), noise=2 * MIB)
    outcome = judge(series, budget=64 * MIB, warmup=300.0)
    t, suspicion = outcome.first[IncidentKind.HOST_GROWTH]
    assert suspicion.over_budget
    assert suspicion.unconfirmed is None
    spent = 8 * (t - 10) / 64
    assert spent < MAX_WARMUP_BUDGET_FACTOR + 1.5
    assert suspicion.consumed_ratio == pytest.approx(spent, rel=0.2), "counted from the begin"


@pytest.mark.parametrize("ledger", [None, loading(10 * MIB, 60)], ids=["slowing", "declared"])
def test_a_warm_up_of_many_budgets_that_slows_or_is_declared_is_none(
    judge: Judge, ledger: Callable[[float], float] | None
) -> None:
    series = Series(
        duration=400,
        other=ledger or saturating(600 * MIB, 30),
        ledger=ledger,
        ledger_bound=1 << 30,
        noise=2 * MIB,
    )
    outcome = judge(series, budget=64 * MIB, warmup=180.0)
    assert outcome.first == {}
    assert outcome.warm_t >= 180


def test_the_base_is_not_the_first_sample_of_a_warm_up_that_began_with_a_step() -> None:
    """The engine reports ready while its last weights still come in."""
    warmup = Warmup(60.0, 512 * MIB, 1.0)
    second, ended = 0, False
    while not ended:
        size = 1000 * MIB if second < 10 else 1400 * MIB
        ended = warmup.add(Point(float(second), size, load=4), ready=True)
        second += 1
    assert warmup.floor is not None
    assert warmup.floor.bytes == 1400 * MIB
