"""A device that other pods use, too: their growth is not ours to act on.

Tests ``detect/leak.py``.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from leaklab.series import MIB, Series, steady
from plimsoll_api.assessment import Segment, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.trace import Device, Host, Sample, Torch
from plimsoll_sidecar.detect.detector import Detector
from plimsoll_sidecar.detect.leak import SHARED_DEVICE_MESSAGE

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
    assert SHARED_DEVICE_MESSAGE in found[-1].evidence


def test_devices_that_the_engine_sees_and_never_uses_hide_no_leak_on_its_own() -> None:
    """Four recorded engines on one of four visible GPUs: no memory of the device was judged."""
    leak = steady(512 * MIB / 900, 120.0)
    series = Series(duration=900, leak=leak, segment="torch_allocated", device=True)
    detector = Detector(MemoryPolicy(device=BUDGET, shared_device=True), 60.0, 1.0)
    found: list[Suspicion] = []
    for sample in series.samples():
        other = Device(index=1, used=60 << 30, total=80 << 30)
        seen = detector.update(replace(sample, device=[*sample.device, other]))
        found += seen.suspicions
    assert seen.device is not None
    assert {(one.kind, one.segment) for one in found} == {
        (IncidentKind.DEVICE_GROWTH, Segment.TORCH_ALLOCATED)
    }


def test_an_engine_that_does_not_tell_its_own_share_is_unknown() -> None:
    detector = Detector(MemoryPolicy(device=BUDGET, shared_device=True), 60.0, 1.0)
    for t in range(600):
        device = Device(index=0, used=(10 + t) << 30, total=1 << 50)
        seen = detector.update(Sample(t=float(t), epoch=1, host=Host(processes=1), device=[device]))
    assert seen.device is None
    assert seen.suspicions == []


def test_a_neighbour_that_shows_while_the_engine_runs_is_not_the_engines_growth() -> None:
    """Seen: a flat engine ended after 138 s, because a pod on the same GPU loaded its model."""
    detector = Detector(MemoryPolicy(device=BUDGET), 60.0, 1.0)
    suspicions, own = [], Torch(allocated=8 << 30, reserved=10 << 30)
    for t in range(1200):
        used = (12 << 30) + max(0, t - 300) * (60 << 20)
        how = "dcgm says that team-b/x has it, too" if t >= 310 else None
        device = Device(index=0, used=used, total=1 << 50, torch=own, shared=how)
        seen = detector.update(Sample(t=float(t), epoch=1, host=Host(processes=1), device=[device]))
        suspicions += seen.suspicions
    assert suspicions == []
    assert seen.shared_device == how
    assert seen.device is not None
    assert (seen.device.current, seen.device.unexplained) == (8 << 30, 0)


def test_after_a_restart_of_the_supervisor_it_goes_on_from_the_engines_own() -> None:
    """Also where the new one sees the neighbour only after its first sample, or sees it first."""

    def sample(t: int, shared: bool) -> Sample:
        own = Torch(allocated=(8 << 30) + t * MIB, reserved=(8 << 30) + t * MIB)
        device = Device(
            0, (60 << 30) + t * MIB, 1 << 50, own, "two pods have it" if shared else None
        )
        return Sample(t=float(t), epoch=1, host=Host(processes=1), device=[device])

    def run(first_shared: bool, then_shared: bool) -> list[Suspicion]:
        before = Detector(MemoryPolicy(device=BUDGET), 60.0, 1.0)
        for t in range(200):
            before.update(sample(t, first_shared))
        after, found = Detector(MemoryPolicy(device=BUDGET), 60.0, 1.0), []
        after.update(sample(200, then_shared))
        after.resume(before.make_checkpoint())
        for t in range(201, 320):
            found += after.update(sample(t, then_shared)).suspicions
        return found

    assert all(one.bytes < 1 << 30 for one in run(True, False))
    assert all(one.bytes < 1 << 30 for one in run(False, True))
