"""Load patterns that no other family has, with and without a leak."""

from __future__ import annotations

from leaklab.budgets import WINDOWS_S
from leaklab.bursts import BUDGET, KINDS, LEAKS_AT_S, bursts
from leaklab.series import MIB
from leaklab.splits import Split

CASES = bursts(Split.TEST)


def test_each_kind_comes_with_each_window_with_a_leak_and_without() -> None:
    for kind in KINDS:
        for name in (kind, f"leak beside {kind}"):
            windows = [case.window_s for case in CASES if case.family == name]
            assert sorted(windows) == sorted([*WINDOWS_S, *WINDOWS_S])


def test_a_leak_spends_its_budget_and_no_sample_exceeds_the_limit() -> None:
    for case in CASES[::3]:
        samples = list(case.series.samples())
        anon = [sample.host.cgroup_anon or 0 for sample in samples]
        assert max(anon) < case.limit, case.name
        leaked = case.series.leaked
        assert (leaked >= BUDGET) is (case.starts is not None), case.name
        assert case.starts in (None, LEAKS_AT_S)


def test_memory_is_given_back_or_kept() -> None:
    for case in CASES:
        held = [case.series.other(float(t)) for t in range(0, 2400, 5)]
        if case.family.endswith(("kept", "start")):
            assert held == sorted(held), case.name
        else:
            assert held[-1] < max(held), case.name
        assert 2 * MIB < max(held) < 400 * MIB, case.name
