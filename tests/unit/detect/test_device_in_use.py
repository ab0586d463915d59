"""Growth on the device that fills what the engine's allocator already keeps reserved.

Tests ``detect/detector.py``.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest

from leaklab.series import GIB, MIB, Series, saturating, steady
from plimsoll_api.assessment import Assessment, Segment
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.supervision import Mode, Supervision
from plimsoll_api.trace import Sample, Torch
from plimsoll_sidecar.detect.detector import MAX_MISSING_SAMPLES, Detector
from plimsoll_sidecar.replay import ReplayLine, replay_samples

BUDGET = 256 * MIB
START = 200.0
LEAKING = Series(
    duration=START + 180, leak=steady(2 * MIB, START), segment="torch_allocated", device=True,
    cached=2 * GIB, fills_cache=True,
)  # fmt: skip


def policy(shared: bool = False) -> MemoryPolicy:
    return MemoryPolicy(device=MemoryBudget(BUDGET, 3600.0), shared_device=shared, warmup_s=60.0)


def working(series: Series) -> Iterator[Sample]:
    """Samples that meet a step with its activations more often than not, as a busy engine's do."""
    rng = random.Random(series.seed)
    for sample in series.samples():
        torch = sample.device[0].torch
        assert torch is not None
        assert torch.allocated is not None
        assert torch.reserved is not None
        scratch = rng.choice((0, rng.randrange(60 * MIB)))
        torch.allocated = min(torch.reserved, torch.allocated + scratch)
        yield sample


def assessments(series: Series, shared: bool = False) -> list[Assessment]:
    detector = Detector(policy(shared), 60.0, series.interval)
    return [detector.update(sample) for sample in working(series)]


def confirmed(series: Series, shared: bool = False) -> list[ReplayLine]:
    supervision = Supervision(mode=Mode.RECOVER)
    lines = replay_samples(working(series), policy(shared), supervision, series.interval, "run")
    return [line for line in lines if isinstance(line, ReplayLine) and line.event == "confirmed"]


@pytest.mark.parametrize("shared", [False, True])
def test_a_leak_inside_what_the_allocator_reserved_is_confirmed(shared: bool) -> None:
    found = confirmed(LEAKING, shared)
    assert [line.segment for line in found] == [Segment.TORCH_ALLOCATED]
    assert found[0].t - START <= 130


def test_its_growth_is_that_of_memory_in_use_while_the_device_shows_none() -> None:
    last = assessments(LEAKING)[-1]
    assert last.device is not None
    assert last.device.unexplained == pytest.approx(360 * MIB, abs=20 * MIB)
    assert last.reserved is not None
    assert last.reserved.unexplained == 0


def test_what_stays_within_the_reserve_and_ends_is_no_leak() -> None:
    warm_up = dataclasses.replace(LEAKING, duration=3600.0, leak=saturating(80 * MIB, 200.0, START))
    assert confirmed(warm_up) == []


def test_growth_that_is_reserved_and_not_in_use_keeps_its_name_and_its_own_figures() -> None:
    scattered = dataclasses.replace(
        LEAKING, duration=1500.0, segment="torch_reserved_unused", fills_cache=False
    )
    found = confirmed(scattered)
    assert [line.segment for line in found] == [Segment.TORCH_RESERVED_UNUSED]
    last = assessments(scattered)[-1]
    assert last.reserved is not None
    assert last.reserved.unexplained == pytest.approx(2 * MIB * 1300, rel=0.05)
    assert last.device is not None
    assert (last.device.unexplained or 0) < 8 * MIB


def test_without_the_allocators_account_the_whole_device_is_judged() -> None:
    detector = Detector(policy(), 60.0, 1.0)
    for sample in working(dataclasses.replace(LEAKING, fills_cache=False)):
        sample.device[0].torch = None
        last = detector.update(sample)
    assert last.reserved is None
    assert [one.segment for one in last.suspicions] == [None]


def test_an_account_that_ends_leaves_the_judgement_to_the_whole_device() -> None:
    detector = Detector(policy(), 60.0, 1.0)
    for number, sample in enumerate(working(LEAKING)):
        if number > START:
            sample.device[0].torch = Torch()
        last = detector.update(sample)
        if number == START + MAX_MISSING_SAMPLES:
            assert last.reserved is not None
    assert last.reserved is None
    assert last.device is not None
    assert last.device.unexplained == 0
