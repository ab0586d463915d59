"""Segments of an engine whose allocators' account is missing now and then.

Tests ``detect/detector.py``.
"""

from __future__ import annotations

import pytest

from leaklab.series import MIB, Series, steady
from plimsoll_api.assessment import Segment
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_sidecar.detect.detector import Detector

POLICY = MemoryPolicy(host=MemoryBudget(256 * MIB, 3600.0), warmup_s=60.0)


@pytest.mark.parametrize(("since", "until"), [(140.0, 165.0), (175.0, 200.0)])
def test_a_leak_keeps_its_segment_while_its_account_is_missing(since: float, until: float) -> None:
    """Whatever the missing account had covered seemed to be somewhere else then."""
    detector = Detector(POLICY, 60.0, 1.0)
    segments = set()
    for sample in Series(duration=200, leak=steady(2 * MIB, 120)).samples():
        if since <= sample.t < until:
            sample.malloc = None
        segments |= {one.segment for one in detector.update(sample).suspicions}
    assert segments == {Segment.MALLOC_IN_USE}
