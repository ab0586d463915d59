"""A device that other pods use, too: their growth is not ours to act on.

Tests ``detect/leak.py``.
"""

from __future__ import annotations

import pytest

from leaklab.series import MIB, Series, steady
from plimsoll_api.assessment import Segment, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.trace import Device, Host, Sample
from plimsoll_sidecar.detect.detector import Detector
from plimsoll_sidecar.detect.leak import SHARED_DEVICE

BUDGET = MemoryBudget(512 * MIB, 3600.0)


def suspected(segment: str, shared: bool) -> list[Suspicion]:
    leak = steady(512 * MIB / 900, 120.0)
    series = Series(duration=1500, leak=leak, segment=segment, device=True)
    detector = Detector(MemoryPolicy(device=BUDGET, shared_device=shared), 60.0, 1.0)
    return [one for sample in series.samples() for one in detector.update(sample).suspicions]


@pytest.mark.parametrize("segment", ["non_torch", "torch_allocated"])
def test_on_a_device_of_our_own_all_of_it_is_judged(segment: str) -> None:
    found = suspected(segment, shared=False)
    assert {one.kind for one in found} == {IncidentKind.DEVICE_GROWTH}
    assert found[-1].segment == Segment(segment)
    assert found[-1].over_budget


def test_growth_beside_the_engines_allocator_is_not_ours_where_others_share_the_device() -> None:
    assert suspected("non_torch", shared=True) == []


def test_growth_of_the_engines_allocator_still_is_and_the_incident_says_what_was_judged() -> None:
    found = suspected("torch_allocated", shared=True)
    assert found[-1].kind is IncidentKind.DEVICE_GROWTH
    assert found[-1].over_budget
    assert SHARED_DEVICE in found[-1].evidence


def test_an_engine_that_does_not_tell_its_own_share_is_unknown() -> None:
    detector = Detector(MemoryPolicy(device=BUDGET, shared_device=True), 60.0, 1.0)
    for t in range(600):
        device = Device(index=0, used=(10 + t) << 30, total=1 << 50)
        seen = detector.update(Sample(t=float(t), epoch=1, host=Host(processes=1), device=[device]))
    assert seen.device is None
    assert seen.suspicions == []
