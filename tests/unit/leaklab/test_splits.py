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

from leaklab import hangs_unseen, healthy, seen_kernels, unseen_shapes, unseen_steps
from leaklab.cases import (
    EDITIONS,
    HANGS,
    HOUR,
    LEAKS,
    LIMIT,
    REACHED,
    Case,
    Split,
    Watched,
    leaks,
    named,
    negatives,
    stalls,
)
from leaklab.healthy_runs import levels
from leaklab.series import MIB, Series, flat
from leaklab.shapes import SHARES
from leaklab.triggered import VARYING, triggers
from leaklab.views import HOURS
from plimsoll_api.trace import Sample

ALL_HEALTHY = negatives(Split.TEST, 6, healthy.FAMILIES)
HEALTHY = [case for place, case in enumerate(ALL_HEALTHY) if place % 6 == place // 6 % 6]
"""Each family once, and each way to watch it in turn."""
LEAKING = [*leaks(Split.TEST, 1), *triggers(Split.TEST)]
HANGING = stalls(Split.TEST)
SAMPLES = 300
STILL_S = 30.0
INTERVALS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)


def strata() -> list[Case]:
    """Growing cases, so that each mechanism, rate, shape and counter is among them."""
    met, chosen = set[str](), []
    for case in LEAKING:
        parts = {case.family, *case.name.split("-")[1:3]}
        if parts - met:
            chosen.append(case)
        met |= parts
    return chosen


def thinned(case: Case) -> Series:
    """The case in few samples, over all of its time."""
    return replace(case.series, interval=case.series.duration / SAMPLES)


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


FROZEN = "b7c6ea59c6404def"
"""Of the tenth edition. What is judged once must not change: write another one instead."""


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
    assert fingerprint([*ALL_HEALTHY, *LEAKING, *HANGING]) == FROZEN


def test_no_family_is_in_two_splits() -> None:
    for one, other in itertools.combinations(Split, 2):
        assert not healthy.FAMILIES[one].keys() & healthy.FAMILIES[other].keys()
    mechanisms = [mechanism.name for split in Split for mechanism in LEAKS[split]]
    assert len(mechanisms) == len(set(mechanisms))


def test_the_test_split_is_as_large_as_its_figures_need() -> None:
    assert len(healthy.FAMILIES[Split.TEST]) >= 34
    assert sum(case.series.duration for case in ALL_HEALTHY) >= 9000 * HOUR
    assert len(unseen_steps.FAMILIES) >= 6
    assert len(LEAKS[Split.TEST]) >= 12
    assert len(leaks(Split.TEST, 1)) >= 230
    assert len(triggers(Split.TEST)) >= 40
    assert len(HANGING) >= 30
    assert len(HANGS[Split.TEST] - HANGS[Split.SEEN]) >= 5


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
    seen = [*triggers(Split.SEEN, 2), *stalls(Split.SEEN)]
    for cases in ([*ALL_HEALTHY, *LEAKING, *named(Split.TEST), *HANGING], seen):
        assert len({case.name for case in cases}) == len(cases)


def test_an_edition_that_moves_keeps_its_seeds() -> None:
    """They are made from its name, not from that of its split."""
    ninth, tenth = EDITIONS[Split.SEEN][-1], EDITIONS[Split.TEST][0]
    assert (ninth.name, tenth.name) == ("test", "tenth")
    assert sum(case.name == "hang-known-5" for case in stalls(Split.SEEN)) == 1
    family = next(iter(seen_kernels.FAMILIES))
    moved = healthy.FAMILIES[Split.SEEN][family]
    assert isinstance(moved, Watched)
    assert (moved.edition, moved.place) == (ninth, 0)
    one, other = moved.run(family, 1), moved.run(family, 2)
    assert one.seed != other.seed
    assert [(run.duration, run.interval) for run in (one, other)] == [*HOURS[1:3]]


def test_no_healthy_run_holds_more_than_its_budget() -> None:
    """Above its start and its ledger, and what its requests hold aside."""
    for case in ALL_HEALTHY:
        series = case.series
        times = [series.duration * part / SAMPLES for part in range(SAMPLES)]
        counted = {series.ledger_kind: series.ledger or flat(0.0)}
        host, device = counted.get("host", flat(0.0)), counted.get("device", flat(0.0))
        for held, known in ((series.other, host), (series.device_other, device)):
            above = [held(t) - known(t) for t in times]
            assert max(above) - above[0] < case.budget, case.name
        assert (case.kind, case.starts, case.segment) == (None, None, None)


def test_healthy_memory_takes_very_different_shares_of_the_budget() -> None:
    """A tenth of it is little, and there are runs beyond three quarters."""
    shares = []
    for case in ALL_HEALTHY:
        series = case.series
        held = [
            series.other(t) + series.device_other(t)
            for t in (series.duration * part / SAMPLES for part in range(SAMPLES))
        ]
        shares.append((max(held) - min(held)) / case.budget)
    assert sum(share < 0.1 for share in shares) > 0.15 * len(shares)
    assert sum(0.1 < share < 0.75 for share in shares) > 0.3 * len(shares)
    assert sum(share > 0.75 for share in shares) >= 10


def test_a_healthy_run_stays_within_its_limit_and_never_leaks() -> None:
    for case in HEALTHY:
        series, times = thinned(case), []
        for sample in series.samples():
            times.append(sample.t)
            assert min(sizes(sample)) >= 0, case.name
            assert within_the_limit(sample), case.name
            assert all(line.bytes <= (line.bound or 0) for line in sample.ledger or ()), case.name
        assert times == sorted(set(times))
        assert len(times) >= SAMPLES - 1
        assert series.leaked == 0.0


def test_a_leak_begins_when_it_says_and_spends_its_budget() -> None:
    for case in [*strata(), *named(Split.TEST)]:
        series, leaked = thinned(case), []
        assert case.starts is not None
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


def test_each_mechanism_rate_and_shape_is_among_the_strata() -> None:
    chosen = strata()
    tenth = EDITIONS[Split.TEST][0]
    assert {case.family for case in chosen} == {case.family for case in LEAKING}
    names = {part for case in chosen for part in case.name.split("-")}
    assert names >= tenth.spent_s.keys()
    assert names >= {shape for mechanism in tenth.mechanisms for shape in mechanism.shapes}


def test_a_case_is_the_same_each_time_it_is_made() -> None:
    again = [
        *negatives(Split.TEST, 1, healthy.FAMILIES),
        *leaks(Split.TEST, 1),
        *triggers(Split.TEST),
        *stalls(Split.TEST),
    ]
    made = {case.name: case for case in [*ALL_HEALTHY, *LEAKING, *HANGING]}
    for other in again[::4]:
        one = made[other.name]
        first = list(itertools.islice(one.series.samples(), 40))
        assert first == list(itertools.islice(other.series.samples(), 40))
        assert first == list(itertools.islice(one.series.samples(), 40))


def test_what_only_looks_like_a_hang_is_not_still_for_half_a_minute() -> None:
    """With requests that run or wait."""
    for case in HEALTHY:
        if case.family not in unseen_steps.FAMILIES:
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


def test_a_hang_has_work_that_nobody_does() -> None:
    """And the engine has worked until then."""
    for case in HANGING:
        assert case.starts is not None
        samples, age = list(case.series.samples()), case.series.read_every
        before = [sample.load.steps_total or 0 for sample in samples if sample.t < case.starts]
        assert before == sorted(before), case.name
        assert len(set(before)) > 0.5 * len(before) / max(1.0, age), case.name
        after = [one for one in samples if one.t > case.starts + age + case.series.interval]
        if case.family.removeprefix("stall ") in hangs_unseen.UNANSWERED:
            assert not any(sample.scrape_ok or sample.serving for sample in after)
            continue
        assert len({sample.load.steps_total for sample in after}) == 1, case.name
        inside = (sample.load.running or sample.load.waiting for sample in after)
        assert sum(map(bool, inside)) > 0.98 * len(after), case.name


@pytest.mark.parametrize("shape", ["uneven", "regimes", "adopted", *unseen_shapes.SHARES])
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
    for varying in [one for ways in VARYING.values() for one in ways]:
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
