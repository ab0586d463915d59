"""Leaks of the test split, as ``leaklab/cases.py`` makes them."""

from __future__ import annotations

import math

from leaklab.cases import REACHED, named
from leaklab.series import MIB
from leaklab.splits import Split
from tests.leak_cases import sizes, strata, thinned, within_the_limit


def test_a_leak_begins_when_it_says_and_spends_its_budget() -> None:
    for case in [*strata(), *named(Split.TEST)]:
        series, leaked = thinned(case), []
        assert case.starts is not None
        assert case.origin is None
        assert case.segment == series.segment
        assert case.kind == ("DeviceGrowth" if series.device else "HostGrowth")
        for sample in series.samples():
            assert min(sizes(sample)) >= 0, case.name
            assert within_the_limit(sample), case.name
            leaked.append(series.leaked)
            if sample.t < case.starts:
                assert series.leaked == 0.0, case.name
        assert leaked == sorted(leaked), case.name
        spent = 48 * 4 * MIB if case.family == "leak named slow" else case.budget
        assert leaked[-1] >= 0.97 * spent, case.name


def test_a_leak_goes_on_until_it_is_a_quarter_above_its_budget() -> None:
    for case in strata():
        series, starts = case.series, case.starts or 0.0
        quarters = 4 * [0.0]
        for sample in series.samples():
            assert math.isfinite(series.leaked)
            done = (sample.t - starts) / (series.duration - starts)
            quarters[min(3, max(0, int(4 * done)))] = series.leaked
        assert series.leaked >= REACHED * case.budget * (1 - 1e-9), case.name
        assert quarters == sorted(set(quarters)), case.name
