"""Whatever samples come, the detector answers, in order, within its memory.

Tests ``detect/detector.py``.
"""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from leaklab.series import MIB, Series, steady
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.trace import Device, Host, LedgerLine, Malloc, Sample, SampleLoad, Torch
from plimsoll_sidecar.detect.detector import Detector

size = st.none() | st.integers(-5, 2**50)
count = st.none() | st.integers(-3, 10**9)
policy = MemoryPolicy(
    host=MemoryBudget(64 * MIB, 600, 2**33), device=MemoryBudget(64 * MIB, 600), warmup_s=5
)

host = st.builds(
    Host, rss_anon=size, rss_shmem=size, processes=count, cgroup_anon=size, cgroup_shmem=size
)
device = st.builds(
    Device,
    index=st.integers(0, 3),
    used=size,
    total=size,
    torch=st.none() | st.builds(Torch, allocated=size, reserved=size),
)
ledger = st.builds(
    LedgerLine,
    owner=st.sampled_from(["a", "b"]),
    kind=st.sampled_from(["host", "device", "?"]),
    bytes=st.integers(-5, 2**50),
    bound=size,
)
sample = st.builds(
    Sample,
    t=st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1e5),
    epoch=st.integers(0, 3),
    host=host,
    malloc=st.none() | st.builds(Malloc, in_use=size, retained=size, python_objects=size),
    device=st.lists(device, max_size=2),
    load=st.builds(
        SampleLoad,
        running=count,
        waiting=count,
        inflight=count,
        requests_total=count,
        steps_total=count,
    ),
    ledger=st.none() | st.lists(ledger, max_size=2),
    scrape_ok=st.booleans(),
)


def check(detector: Detector, item: Sample) -> None:
    assessment = detector.update(item)
    for suspicion in assessment.suspicions:
        assert 0 <= suspicion.confidence <= 1
        assert suspicion.consumed_ratio >= 0
        assert suspicion.bytes >= 0
    for state in (assessment.host, assessment.device):
        if state is not None and state.unexplained is not None:
            assert state.unexplained >= 0
            assert state.exhaustion_s is None or state.exhaustion_s >= 0
    assert all(value >= 0 for value in assessment.segments.values())


@given(st.lists(sample, max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_samples_are_survived(samples: list[Sample]) -> None:
    detector = Detector(policy, 30, 1)
    for item in samples:
        check(detector, item)


@given(st.lists(st.tuples(st.floats(0.01, 40_000), sample), max_size=60), st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_a_real_series_with_garbage_between_is_survived(
    steps: list[tuple[float, Sample]], seed: int
) -> None:
    """Time goes on, with gaps of up to half a day."""
    detector, t = Detector(policy, 30, 1), 0.0
    series = Series(duration=120, leak=steady(2 * MIB), seed=seed).samples()
    for item in series:
        t = item.t
        check(detector, item)
    for gap, item in steps:
        t += gap
        item.t = t
        check(detector, item)


def test_the_same_samples_give_the_same_answers() -> None:
    series = Series(duration=300, leak=steady(2 * MIB, 100))
    first, second = Detector(policy, 30, 1), Detector(policy, 30, 1)
    for one, two in zip(series.samples(), Series(**_settings(series)).samples(), strict=True):
        assert first.update(one) == second.update(two)


def test_time_that_goes_back_changes_nothing() -> None:
    detector = Detector(policy, 30, 1)
    for item in Series(duration=100).samples():
        last = detector.update(item)
    for t in (50.0, math.nan, -1.0):
        late = Sample(t=t, epoch=7, host=Host(rss_anon=1))
        again = detector.update(late)
        assert (again.epoch, again.host) == (last.epoch, last.host)


def test_a_new_epoch_starts_anew() -> None:
    detector = Detector(policy, 30, 1)
    series = Series(duration=200, epoch=lambda t: 1 if t < 100 else 2)
    warm = [detector.update(item).warm for item in series.samples()]
    assert warm[99]
    assert not warm[100]
    assert warm[199]


def test_a_failed_read_is_unknown_and_not_a_fall() -> None:
    detector = Detector(policy, 30, 1)
    for item in Series(duration=200).samples():
        if item.t % 3 == 1:
            item.host = Host()
        assessment = detector.update(item)
    assert assessment.suspicions == []
    assert assessment.host is not None
    assert (assessment.host.current or 0) > 1 << 30


def _settings(series: Series) -> dict[str, Any]:
    return {"duration": series.duration, "leak": series.leak}


def test_growth_is_measured_against_the_baseline_from_the_first_second_on() -> None:
    """Whatever the window: a plateau after growth keeps its share of the budget."""
    memory = MemoryPolicy(host=MemoryBudget(512 * MIB, 86_400), warmup_s=30)
    detector = Detector(memory, 30, 1)
    series = Series(duration=400, leak=lambda t: min(256 * MIB, max(0, t - 60) * 4 * MIB), noise=0)
    for item in series.samples():
        assessment = detector.update(item)
        if item.t > 140:
            assert assessment.host is not None
            assert assessment.host.consumed_ratio is not None
            assert 0.4 < assessment.host.consumed_ratio < 0.6
