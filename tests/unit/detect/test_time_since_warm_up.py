"""A budget says what the engine has met since its warm-up, also after a resumption.

Tests ``detect/leak.py``.
"""

from __future__ import annotations

from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.trace import Host, Sample, SampleLoad
from plimsoll_sidecar.detect.detector import Detector

MIB = 1 << 20
POLICY = MemoryPolicy(host=MemoryBudget(512 * MIB, 3600.0), warmup_s=60.0)


def sample(t: float, requests: int | None) -> Sample:
    load = SampleLoad(running=1, requests_total=requests)
    return Sample(t=t, epoch=1, host=Host(rss_anon=300 * MIB, rss_shmem=0), load=load)


def test_requests_and_time_count_from_the_base_on() -> None:
    detector = Detector(POLICY, 30.0, 1.0)
    first = detector.update(sample(0.0, 100)).host
    assert first is not None
    assert (first.age_s, first.requests) == (None, None), "not warm yet"
    for t in range(1, 200):
        state = detector.update(sample(float(t), 100 + 3 * t)).host
    assert state is not None
    assert state.age_s is not None
    assert 100 <= state.age_s <= 199
    assert state.requests == 3 * state.age_s

    later = Detector(POLICY, 30.0, 1.0)
    later.update(sample(200.0, 700))
    later.resume(detector.make_checkpoint())
    resumed = later.update(sample(201.0, 703)).host
    assert resumed is not None
    assert resumed.age_s == state.age_s + 2
    assert resumed.requests == state.requests + 6


def test_a_count_that_is_unknown_or_went_back_is_unknown() -> None:
    detector = Detector(POLICY, 30.0, 1.0)
    for t in range(200):
        detector.update(sample(float(t), 1000 + t))
    for count in (None, 5):
        state = detector.update(sample(200.0 + (count or 0), count)).host
        assert state is not None
        assert state.requests is None
        assert state.age_s is not None
