"""Budgets that healthy engines spend, with windows and limits of all kinds."""

from __future__ import annotations

import pytest

from leaklab.budgets import FAR, KEPT_SHARE, LEAST, MOST, WINDOWS_S, spending, window_of
from leaklab.series import MIB, Series, saturating
from tests.leak_cases import RUNS, healthy_cases, leaking_cases

BUDGET = 512 * MIB


def held(series: Series) -> list[float]:
    return [series.other(series.duration * part / 1000) for part in range(1001)]


def test_one_healthy_engine_in_ten_spends_its_budget_and_half_of_these_give_it_back() -> None:
    plain = [Series(3600, other=saturating(100 * MIB, 600), seed=seed) for seed in range(1000)]
    runs = [run for one in plain if (run := spending(one, BUDGET)) is not one]
    assert 70 <= len(runs) <= 130
    points = [held(run) for run in runs]
    for each in points:
        assert LEAST * 0.5 < max(each) / BUDGET <= MOST
        assert each[-1] == max(each) or each[-1] <= 1.01 * KEPT_SHARE * MOST * BUDGET
    given_back = sum(each[-1] < max(each) / 2 for each in points)
    assert 0.3 <= given_back / len(points) <= 0.7


def test_memory_that_is_all_declared_stays_as_it_is() -> None:
    curve = saturating(100 * MIB, 600)
    for seed in range(100):
        series = Series(other=curve, ledger=curve, ledger_bound=100 * MIB, seed=seed)
        assert spending(series, BUDGET) is series
        assert spending(Series(seed=seed), BUDGET).other(60.0) == 0.0


def test_each_family_has_all_windows_and_limits_near_and_far() -> None:
    cases = healthy_cases()
    for first in range(0, len(cases), RUNS):
        family = cases[first : first + RUNS]
        assert {case.window_s for case in family} == set(WINDOWS_S)
        assert {case.limit == FAR for case in family} == {True, False}
    assert {case.window_s for case in leaking_cases()} == set(WINDOWS_S)


@pytest.mark.parametrize("spent_s", [90.0, 3400.0, 15 * 3600.0])
def test_a_leak_spends_its_budget_within_its_window(spent_s: float) -> None:
    assert all(window_of(turn, spent_s) >= spent_s for turn in range(8))
