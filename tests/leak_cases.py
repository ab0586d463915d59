"""The cases of the test split, and ways to look at them in few samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from leaklab.cases import Case, leaks, negatives, stalls
from leaklab.series import LIMIT, Series
from leaklab.splits import Split
from leaklab.triggered import triggers
from plimsoll_api.trace import Sample

RUNS = 6
"""Of each healthy family."""
SAMPLES = 300


@cache
def healthy_cases(split: Split = Split.TEST) -> list[Case]:
    return negatives(split, RUNS)


def one_of_each_family() -> list[Case]:
    """With each way to watch a run in turn."""
    cases = healthy_cases()
    return [case for place, case in enumerate(cases) if place % RUNS == place // RUNS % RUNS]


@cache
def leaking_cases(split: Split = Split.TEST) -> list[Case]:
    return [*leaks(split, 1), *triggers(split)]


@cache
def hanging_cases(split: Split = Split.TEST) -> list[Case]:
    return stalls(split)


def strata() -> list[Case]:
    """Growing cases, so that each mechanism, rate, shape and counter is among them."""
    met, chosen = set[str](), []
    for case in leaking_cases():
        parts = {case.family, *case.name.split("-")[1:3]}
        if parts - met:
            chosen.append(case)
        met |= parts
    return chosen


def thinned(case: Case) -> Series:
    """The case in few samples, over all of its time."""
    return replace(case.series, interval=case.series.duration / SAMPLES)


def times_of(case: Case) -> list[float]:
    return [case.series.duration * part / SAMPLES for part in range(SAMPLES)]


def sizes(sample: Sample) -> Iterator[int]:
    """All that are known."""
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
