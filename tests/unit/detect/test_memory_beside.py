"""Memory that is in no anonymous figure: of the kernel, of sockets, of huge pages.

Tests ``detect/segments.py``.
"""

from __future__ import annotations

import pytest

from plimsoll_api.assessment import Segment, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.trace import Host, Sample, SampleLoad
from plimsoll_sidecar.detect.detector import Detector

MIB = 1 << 20
POLICY = MemoryPolicy(host=MemoryBudget(256 * MIB, 3600.0, 2560 * MIB), warmup_s=60.0)


def judged(host: Host, field: str, bytes_per_s: int, seconds: int = 600) -> list[Suspicion]:
    """A group of which one figure grows, and its whole with it."""
    detector, found = Detector(POLICY, 60.0, 1.0), []
    for t in range(seconds):
        grown = Host(
            rss_anon=200 * MIB, rss_file=0, rss_shmem=0, processes=2, cgroup_anon=200 * MIB,
            cgroup_shmem=0, cgroup_file=MIB, cgroup_current=300 * MIB + bytes_per_s * t,
        )  # fmt: skip
        for name in Host.__struct_fields__:
            if (value := getattr(host, name)) is not None:
                setattr(grown, name, value)
        if field:
            setattr(grown, field, (getattr(grown, field) or 0) + bytes_per_s * t)
        load = SampleLoad(running=2, waiting=0, steps_total=20 * t)
        sample = Sample(t=float(t), epoch=1, host=grown, load=load, load_age_s=0.1, ready=True)
        found += detector.update(sample).suspicions
    return found


KNOWN = Host(cgroup_kernel=0, cgroup_sock=0, cgroup_other=0, cgroup_reclaimable=0)


@pytest.mark.parametrize(
    ("field", "segment"),
    [
        ("cgroup_kernel", Segment.KERNEL),
        ("cgroup_sock", Segment.SOCKETS),
        ("cgroup_other", Segment.CHARGED_OTHER),
    ],
)
def test_growth_of_each_is_a_leak_with_a_segment_of_its_own(field: str, segment: Segment) -> None:
    found = judged(KNOWN, field, 2 * MIB)
    assert {one.kind for one in found} == {IncidentKind.HOST_GROWTH}
    assert (found[-1].segment, found[-1].process) == (segment, None)
    assert found[-1].over_budget


def test_huge_pages_of_a_pool_are_the_engines_memory() -> None:
    """They are in no figure of the group, and their end is a SIGBUS."""
    found = judged(Host(hugetlb=0, cgroup_reclaimable=0, cgroup_other=0), "hugetlb", 2 * MIB)
    assert found[-1].segment is Segment.HUGETLB


def test_what_the_kernel_can_reclaim_is_no_growth() -> None:
    assert judged(KNOWN, "cgroup_reclaimable", 4 * MIB) == []


def test_a_group_that_does_not_grow_is_not_suspected() -> None:
    assert judged(KNOWN, "", 0) == []
