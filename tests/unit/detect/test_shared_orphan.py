"""Shared memory that no process holds: a part of the total, and measured over epochs.

Tests ``detect/segments.py`` and ``detect/losses.py``.
"""

from __future__ import annotations

from leaklab.series import GIB, MIB
from plimsoll_api.assessment import Segment
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.trace import Host, Sample
from plimsoll_sidecar.detect.detector import Detector
from plimsoll_sidecar.detect.losses import LeftBehindWatch
from plimsoll_sidecar.detect.segments import HostMemoryFields, compute_host_segments

POLICY = MemoryPolicy(host=MemoryBudget(512 * MIB, 3600.0, 6 * GIB), warmup_s=10.0)


def sample(host: Host, t: float = 0.0, epoch: int = 1) -> Sample:
    return Sample(t=t, epoch=epoch, host=host)


def test_a_group_counts_what_its_own_container_left_and_not_what_an_earlier_one_did() -> None:
    host = Host(
        cgroup_anon=1000,
        cgroup_shmem=300,
        rss_anon=900,
        rss_shmem=100,
        shm_orphan=250,
        shm_orphan_earlier=50,
    )
    source = HostMemoryFields.choose(host)
    assert source is not None
    assert source.sum_bytes(host) == 1000 + 300 + 50
    sizes = compute_host_segments(sample(host), source)
    assert sizes[Segment.SHARED] == 100
    assert sizes[Segment.SHARED_ORPHAN] == 250


def test_resident_sums_hold_no_orphan() -> None:
    host = Host(rss_anon=900, rss_shmem=100, shm_orphan=250, shm_orphan_earlier=50)
    source = HostMemoryFields.choose(host)
    assert source is not None
    assert source.sum_bytes(host) == 900 + 100 + 250
    assert compute_host_segments(sample(host), source)[Segment.SHARED] == 100


def test_unknown_is_no_part_of_the_total() -> None:
    host = Host(rss_anon=900, rss_shmem=100)
    source = HostMemoryFields.choose(host)
    assert source is not None
    assert source.sum_bytes(host) == 1000
    assert Segment.SHARED_ORPHAN not in compute_host_segments(sample(host), source)


def test_what_each_epoch_leaves_adds_up() -> None:
    watch = LeftBehindWatch(POLICY.host)
    there_before = 2 * GIB  # weights that an init container copied
    for epoch in range(1, 6):
        left = (epoch - 1) * 128 * MIB
        host = Host(shm_orphan=there_before + left, shm_orphan_earlier=there_before + left)
        found = watch.update(sample(host, float(epoch), epoch))
        assert (found is not None) == (left >= 128 * MIB)
        assert watch.update(sample(Host(), epoch + 0.5, epoch)) is found
    assert found is not None
    assert found.kind is IncidentKind.HOST_GROWTH
    assert found.segment is Segment.SHARED_ORPHAN
    assert found.bytes == 512 * MIB
    assert found.over_budget


def test_a_growth_of_orphans_is_named_so_and_is_no_processs() -> None:
    detector = Detector(POLICY, 30.0, 1.0)
    for second in range(240):
        left = max(0, second - 60) * 3 * MIB
        host = Host(
            rss_anon=GIB, rss_shmem=32 * MIB, processes=1, shm_orphan=left, shm_orphan_earlier=0
        )
        seen = detector.update(sample(host, float(second)))
    (suspicion,) = seen.suspicions
    assert suspicion.segment is Segment.SHARED_ORPHAN
    assert suspicion.process is None
