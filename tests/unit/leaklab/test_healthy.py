"""Healthy runs of the test split, in ``leaklab/splits.py``: one in ten spends its budget, all stay
within their limit, and none stands still."""

from __future__ import annotations

from collections import Counter

from leaklab.cases import Case
from leaklab.healthy.steps import pauses, turns
from leaklab.healthy_runs import levels
from leaklab.origins import TIMES_LEVEL, Origin
from leaklab.series import flat
from leaklab.views import LONGEST
from tests.leak_cases import (
    SAMPLES,
    healthy_cases,
    one_of_each_family,
    sizes,
    thinned,
    times_of,
    within_the_limit,
)

STILL_S = 30.0
HANG_LIKE = pauses.FAMILIES | turns.FAMILIES


def share_of_budget(case: Case) -> float:
    """From the lowest to the highest, beside what the ledger counts and what requests hold."""
    series = case.series
    counted = {series.ledger_kind: series.ledger or flat(0.0)}
    host, device = counted.get("host", flat(0.0)), counted.get("device", flat(0.0))
    above = [series.other(t) - host(t) + series.device_other(t) - device(t) for t in times_of(case)]
    return (max(above) - min(above)) / case.budget


def test_one_healthy_run_in_ten_spends_its_budget_up_to_three_times() -> None:
    shares = [share_of_budget(case) for case in healthy_cases()]
    assert 0.05 < sum(share > 1.0 for share in shares) / len(shares) < 0.15
    assert 2.5 < max(shares) < 3.5
    for case in healthy_cases():
        assert (case.kind, case.starts, case.segment) == (None, None, None)


def test_two_thirds_of_the_budgets_are_three_times_what_one_day_showed() -> None:
    """So those heights are near a third of the budget, and the others are any."""
    count = Counter(case.origin for case in healthy_cases())
    assert set(count) == set(Origin)
    assert 0.6 < count[Origin.OBSERVED] / count.total() < 0.74
    for origin in Origin:
        shares = sorted(
            share_of_budget(case)
            for case in healthy_cases()
            if case.origin is origin and case.series.duration == LONGEST
        )
        middle = [share for share in shares if 0.5 / TIMES_LEVEL < share < 2 / TIMES_LEVEL]
        if origin is Origin.OBSERVED:
            assert len(middle) > 0.5 * len(shares)
        else:
            assert len(middle) < 0.75 * len(shares)


def test_healthy_memory_takes_very_different_shares_of_the_budget() -> None:
    """A tenth of it is little, and there are runs beyond three quarters."""
    shares = [share_of_budget(case) for case in healthy_cases()]
    assert sum(share < 0.1 for share in shares) > 0.12 * len(shares)
    assert sum(0.1 < share < 0.75 for share in shares) > 0.3 * len(shares)
    assert sum(share > 0.75 for share in shares) >= 10


def test_a_healthy_run_stays_within_its_limit_and_never_leaks() -> None:
    for case in one_of_each_family():
        series, times = thinned(case), []
        for sample in series.samples():
            times.append(sample.t)
            assert min(sizes(sample)) >= 0, case.name
            assert within_the_limit(sample), case.name
            assert all(line.bytes <= (line.bound or 0) for line in sample.ledger or ()), case.name
        assert times == sorted(set(times))
        assert len(times) >= SAMPLES - 1
        assert series.leaked == 0.0


def test_what_only_looks_like_a_hang_is_not_still_for_half_a_minute() -> None:
    """With requests that run or wait."""
    for case in one_of_each_family():
        if case.family not in HANG_LIKE:
            continue
        moved, before = 0.0, -1
        for sample in case.series.samples():
            load = sample.load
            steps = load.steps_total or 0
            work = (load.running or 0) + (load.waiting or 0)
            if steps > before or not work:
                moved, before = sample.t, steps
            assert sample.t - moved < STILL_S, case.name
            assert sample.scrape_ok


def test_levels_are_the_sum_of_the_changes_so_far() -> None:
    level = levels([(5.0, -2.0), (1.0, 3.0), (5.0, 4.0)])
    assert [level(t) for t in (0.0, 1.0, 4.9, 5.0, 9.0)] == [0.0, 3.0, 3.0, 5.0, 5.0]
