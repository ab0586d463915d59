"""Memory that is swapped out has moved: it has neither grown nor come back.

Tests ``detect/detector.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from leaklab.series import GIB, MIB, Series, steady
from plimsoll_api.assessment import Assessment, Segment
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.trace import Sample
from plimsoll_sidecar.detect.detector import Detector

LEAK = 2.0 * MIB
SWAPS_AT = 300.0


@dataclass
class Swapping(Series):
    """From ``SWAPS_AT`` on the kernel swaps out 8 MiB a second, four times what leaks. Without
    ``group`` only the processes themselves are seen."""

    group: bool = True

    def samples(self) -> Iterator[Sample]:
        for sample in super().samples():
            host = sample.host
            assert host.rss_anon is not None
            assert host.cgroup_anon is not None
            out = int(min(max(0.0, sample.t - SWAPS_AT) * 8 * MIB, GIB))
            host.rss_anon, host.swap = host.rss_anon - out, out
            host.cgroup_anon, host.cgroup_swap = host.cgroup_anon - out, out
            if not self.group:
                host.cgroup_anon = host.cgroup_swap = host.cgroup_shmem = None
            for process in host.by_process or []:
                moved = out if process.role == "worker" else 0
                assert process.rss_anon is not None
                process.rss_anon, process.swap = process.rss_anon - moved, moved
            yield sample


def judged(series: Series) -> list[Assessment]:
    policy = MemoryPolicy(host=MemoryBudget(512 * MIB, 3600.0, 6 * GIB), warmup_s=60.0)
    detector = Detector(policy, 30.0, series.interval)
    return [detector.update(sample) for sample in series.samples()]


@pytest.mark.parametrize("group", [True, False])
def test_growth_goes_on_while_resident_memory_falls(group: bool) -> None:
    series = Swapping(
        duration=420, leak=steady(LEAK, 120), noise=4 * MIB, malloc=False, group=group
    )
    seen = judged(series)
    before = next(one for one in seen if one.t == SWAPS_AT - 10)
    last = seen[-1]
    assert before.host is not None
    assert before.host.unexplained is not None
    assert last.host is not None
    assert last.host.unexplained is not None
    assert last.host.unexplained == pytest.approx(LEAK * (420 - 120), rel=0.15)
    assert last.host.unexplained > before.host.unexplained + 0.7 * LEAK * 120
    # Once suspected it stays suspected, in the segment and the process that it came from.
    since = next(n for n, one in enumerate(seen) if one.suspicions)
    assert seen[since].t < SWAPS_AT
    for one in seen[since:]:
        (suspicion,) = one.suspicions
        assert suspicion.kind is IncidentKind.HOST_GROWTH
        assert suspicion.segment is Segment.ANONYMOUS_OTHER
        assert suspicion.process == "worker"


def test_swapping_out_alone_is_no_growth_and_swapping_in_neither() -> None:
    assert not any(one.suspicions for one in judged(Swapping(duration=420)))
