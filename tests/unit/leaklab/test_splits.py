"""The splits of ``leaklab/cases.py``, ``leaklab/healthy.py`` and ``leaklab/triggered.py``: none
shares a family with another, and what the test split says of its cases holds."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from leaklab import healthy, unseen_moments, unseen_steps
from leaklab.cases import (
    HANGS,
    HOUR,
    LEAKS,
    LIMIT,
    REACHED,
    Case,
    Split,
    leaks,
    named,
    negatives,
    stalls,
)
from leaklab.healthy_runs import levels
from leaklab.series import MIB
from leaklab.shapes import SHARES
from leaklab.triggered import VARYING, triggers
from plimsoll_api.trace import Sample

ALL_HEALTHY = negatives(Split.TEST, 6, healthy.FAMILIES)
HEALTHY = [case for case in ALL_HEALTHY if case.name.endswith(("-0", "-3"))]
LEAKING = [*leaks(Split.TEST, 1), *triggers(Split.TEST)]
GROWING = [*LEAKING, *named(Split.TEST)]
SAMPLES = 300
STILL_S = 30.0
INTERVALS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)


def name(case: Case) -> str:
    return case.name


def thinned(case: Case) -> Iterator[Sample]:
    """The case in few samples, over all of its time."""
    series = case.series
    return replace(series, interval=series.duration / SAMPLES).samples()


def sizes(sample: Sample) -> Iterator[int]:
    host = sample.host
    known = [
        host.rss_anon, host.rss_shmem, host.rss_file, host.cgroup_anon, host.cgroup_shmem,
        host.cgroup_file, host.cgroup_current, *(role.rss_anon for role in host.by_process or ()),
    ]  # fmt: skip
    if sample.malloc:
        known += [sample.malloc.in_use, sample.malloc.retained, sample.malloc.python_objects]
    for device in sample.device or ():
        known.append(device.used)
        if device.torch:
            known += [device.torch.allocated, device.torch.reserved]
    known += [line.bytes for line in sample.ledger or ()]
    return (size for size in known if size is not None)


def within_the_limit(sample: Sample) -> bool:
    host = sample.host
    assert host.cgroup_anon is not None
    assert host.cgroup_shmem is not None
    return host.cgroup_anon + host.cgroup_shmem + (host.cgroup_file or 0) <= LIMIT


FROZEN = "6c041ba2d412e0bc"
"""Of the ninth split. What is judged once must not change: write another split instead."""


def fingerprint(cases: list[Case]) -> str:
    """Of how each is watched and what it holds, in whole MiB, at a few times."""
    told = hashlib.sha256()
    for case in cases:
        series = case.series
        told.update(f"{case.name} {case.starts} {series.duration} {series.interval}".encode())
        for sample in replace(series, interval=series.duration / 12).samples():
            load, device = sample.load, sum(one.used or 0 for one in sample.device)
            held = ((sample.host.cgroup_anon or 0) + device) // MIB
            told.update(f" {held} {load.running} {load.waiting} {load.steps_total}".encode())
    return told.hexdigest()[:16]


def test_the_test_split_is_frozen() -> None:
    assert fingerprint([*ALL_HEALTHY, *LEAKING, *stalls(Split.TEST)]) == FROZEN


def test_no_family_is_in_two_splits() -> None:
    for one, other in itertools.combinations(Split, 2):
        assert not healthy.FAMILIES[one].keys() & healthy.FAMILIES[other].keys()
    mechanisms = [mechanism.name for split in Split for mechanism in LEAKS[split]]
    assert len(mechanisms) == len(set(mechanisms))


def test_the_test_split_is_as_large_as_its_figures_need() -> None:
    assert len(healthy.FAMILIES[Split.TEST]) >= 34
    assert sum(case.series.duration for case in ALL_HEALTHY) >= 8000 * HOUR
    assert len(LEAKS[Split.TEST]) >= 12
    assert len(leaks(Split.TEST, 1)) >= 230
    assert len(triggers(Split.TEST)) >= 40
    assert len(stalls(Split.TEST)) >= 30
    assert len(HANGS[Split.TEST].keys() - HANGS[Split.SEEN].keys()) >= 5


def test_the_interval_of_a_run_does_not_tell_whether_it_leaks() -> None:
    """Each is about as frequent among the healthy runs as among those that leak."""
    healthy_runs = [case.series.interval for case in ALL_HEALTHY]
    leaking = [case.series.interval for case in LEAKING]
    for interval in INTERVALS:
        one = healthy_runs.count(interval) / len(healthy_runs)
        other = leaking.count(interval) / len(leaking)
        assert min(one, other) > 0.08
        assert max(one, other) < 2 * min(one, other)


def test_what_an_engine_uses_at_first_does_not_tell_whether_it_leaks() -> None:
    heights = [{case.series.base for case in cases} for cases in (ALL_HEALTHY, LEAKING)]
    assert heights[0] == heights[1]
    assert len(heights[0]) == 3


def test_no_two_cases_have_one_name() -> None:
    cases = [*HEALTHY, *GROWING, *stalls(Split.TEST)]
    assert len({case.name for case in cases}) == len(cases)


@pytest.mark.parametrize("case", HEALTHY, ids=name)
def test_a_healthy_run_holds_no_more_than_its_budget(case: Case) -> None:
    """Above its start and its ledger, and what its requests hold aside."""
    series, times = case.series, []
    host, device = [], []
    for sample in thinned(case):
        t = sample.t
        times.append(t)
        assert min(sizes(sample)) >= 0
        assert within_the_limit(sample)
        assert all(line.bytes <= (line.bound or 0) for line in sample.ledger or ())
        counted = {series.ledger_kind: series.ledger(t) if series.ledger else 0.0}
        host.append(series.other(t) - counted.get("host", 0.0))
        device.append(series.device_other(t) - counted.get("device", 0.0))
    assert times == sorted(set(times))
    assert len(times) >= SAMPLES - 1
    assert series.leaked == 0.0
    assert (case.kind, case.starts, case.segment) == (None, None, None)
    assert max(host) - host[0] < case.budget
    assert max(device) - device[0] < case.budget


@pytest.mark.parametrize("case", GROWING, ids=name)
def test_a_leak_begins_when_it_says_and_spends_its_budget(case: Case) -> None:
    series, leaked = case.series, []
    assert case.starts is not None
    assert case.segment == series.segment
    assert case.kind == ("DeviceGrowth" if series.device else "HostGrowth")
    thin = replace(series, interval=series.duration / SAMPLES)
    for sample in thin.samples():
        assert min(sizes(sample)) >= 0
        assert within_the_limit(sample)
        leaked.append(thin.leaked)
        if sample.t < case.starts:
            assert thin.leaked == 0.0
    assert leaked == sorted(leaked)
    spent = 48 * 4 * MIB if case.family == "leak named slow" else case.budget
    assert leaked[-1] >= 0.97 * spent


@pytest.mark.parametrize("case", LEAKING, ids=name)
def test_a_leak_goes_on_until_it_is_a_quarter_above_its_budget(case: Case) -> None:
    series = case.series
    quarters = 4 * [0.0]
    for sample in series.samples():
        assert math.isfinite(series.leaked)
        done = (sample.t - (case.starts or 0.0)) / (series.duration - (case.starts or 0.0))
        quarters[min(3, max(0, int(4 * done)))] = series.leaked
    assert series.leaked >= REACHED * case.budget * (1 - 1e-9)
    assert quarters == sorted(set(quarters))


def test_a_case_is_the_same_each_time_it_is_made() -> None:
    again = [
        *negatives(Split.TEST, 1, healthy.FAMILIES),
        *leaks(Split.TEST, 1),
        *triggers(Split.TEST),
        *stalls(Split.TEST),
    ]
    made = {case.name: case for case in [*ALL_HEALTHY, *LEAKING, *stalls(Split.TEST)]}
    for other in again:
        one = made[other.name]
        first = list(itertools.islice(one.series.samples(), 40))
        assert first == list(itertools.islice(other.series.samples(), 40))
        assert first == list(itertools.islice(one.series.samples(), 40))


@pytest.mark.parametrize(
    "case",
    [case for case in HEALTHY if case.family in unseen_moments.FAMILIES | unseen_steps.FAMILIES],
    ids=name,
)
def test_what_only_looks_like_a_hang_is_not_still_for_half_a_minute(case: Case) -> None:
    """With requests that run or wait, but for those that wait for their grammar alone."""
    moved, before = 0.0, -1
    for sample in case.series.samples():
        load = sample.load
        steps = load.steps_total or 0
        work = (load.running or 0) + (load.waiting or 0) - (load.compiling or 0)
        if steps > before or not work:
            moved, before = sample.t, steps
        assert sample.t - moved < STILL_S
        assert sample.scrape_ok


@pytest.mark.parametrize("case", stalls(Split.TEST), ids=name)
def test_a_hang_has_work_that_nobody_does(case: Case) -> None:
    assert case.starts is not None
    known = case.starts + max(case.series.read_every, 0.0) + case.series.interval
    after = [sample for sample in case.series.samples() if sample.t > known]
    if case.family == "stall frontend":
        assert not any(sample.scrape_ok or sample.serving for sample in after)
        return
    assert len({sample.load.steps_total for sample in after}) == 1
    inside = (sample.load.running or sample.load.waiting for sample in after)
    assert sum(map(bool, inside)) > 0.98 * len(after)


@pytest.mark.parametrize(
    "shape", ["uneven", "regimes", "adopted", "jittered", "crowds", "escalating"]
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_shape_grows_from_nought_to_one_and_on(shape: str, seed: int) -> None:
    share = SHARES[shape](seed)
    path = [share(x / 200) for x in range(251)]
    assert path[0] == 0.0
    assert path[200] == pytest.approx(1.0)
    assert path == sorted(path)
    assert path[250] > 1.0


def test_each_way_to_vary_keeps_its_rate_about() -> None:
    """Of many totals: one alone may be twice as much, or half."""
    length = 5000.0
    for varying in [one for split in Split for one in VARYING[split]]:
        totals = [varying(0.4, length, random.Random(seed)) for seed in range(60)]
        mean = sum(total(length) for total in totals) / len(totals)
        assert 0.75 < mean / (0.4 * length) < 1.33
        for total in totals:
            path = [total(length * part / 50) for part in range(51)]
            assert path[0] == 0.0
            assert path == sorted(path)


def test_levels_are_the_sum_of_the_changes_so_far() -> None:
    level = levels([(5.0, -2.0), (1.0, 3.0), (5.0, 4.0)])
    assert [level(t) for t in (0.0, 1.0, 4.9, 5.0, 9.0)] == [0.0, 3.0, 3.0, 5.0, 5.0]
