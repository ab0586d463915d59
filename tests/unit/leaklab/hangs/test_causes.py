"""``leaklab/hangs/causes.py``: how engines hang by what stops them."""

from __future__ import annotations

from leaklab.hangs.causes import TIMES
from tests.leak_cases import hanging_cases


def test_each_kind_comes_five_times() -> None:
    kinds = [case.family.removeprefix("stall ") for case in hanging_cases()]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(TIMES, 5)


def test_a_hang_has_work_that_nobody_does() -> None:
    """And the engine has worked until then, but for one that nobody had asked for a while."""
    for case in hanging_cases():
        assert case.starts is not None
        samples, age = list(case.series.samples()), case.series.read_every
        until = [sample.load for sample in samples if sample.t < case.starts]
        before = [load.steps_total or 0 for load in until if load.running]
        assert len(before) > 0.4 * len(until), case.name
        assert before == sorted(before), case.name
        assert len(set(before)) > 0.5 * len(before) / max(1.0, age), case.name
        after = [one for one in samples if one.t > case.starts + age + case.series.interval]
        assert len({sample.load.steps_total for sample in after}) == 1, case.name
        inside = (sample.load.running or sample.load.waiting for sample in after)
        assert sum(map(bool, inside)) > 0.98 * len(after), case.name
