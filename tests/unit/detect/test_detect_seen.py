"""What needs no trend: kills for memory, device memory of nobody, capacity that nobody holds.

Tests ``detect/losses.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.assessment import Segment, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.trace import Device, Host, Sample, SampleLoad, Torch
from plimsoll_sidecar.detect.detector import Detector
from plimsoll_sidecar.detect.losses import DRIVER_SETTLE_S, KILL_REPORT_DURATION_S, MIN_IDLE_S

GIB = 1 << 30


def suspected(samples: Iterable[Sample], kind: IncidentKind) -> list[tuple[float, Suspicion]]:
    """When and how ``kind`` is suspected."""
    detector = Detector(MemoryPolicy(), 30.0, 1.0)
    found = []
    for sample in samples:
        for one in detector.update(sample).suspicions:
            if one.kind is kind:
                found.append((sample.t, one))
    return found


def kills(*counts: int | None, epochs: tuple[int, ...] | None = None) -> list[Sample]:
    epochs = epochs or (1,) * len(counts)
    return [
        Sample(t=float(t), epoch=epoch, host=Host(oom_kills=count, cgroup_current=6 * GIB))
        for t, (count, epoch) in enumerate(zip(counts, epochs, strict=True))
    ]


def test_a_kill_is_reported_for_a_minute_across_the_restart() -> None:
    found = suspected(
        kills(0, 0, 2, *[2] * 80, epochs=(1, 1, *[2] * 81)), IncidentKind.OUT_OF_MEMORY_KILL
    )
    assert [t for t, _ in found] == [2.0 + second for second in range(int(KILL_REPORT_DURATION_S))]
    assert found[0][1].evidence == [
        "the kernel OOM-killed 2 of the engine's processes; they held 6.0 GiB just before"
    ]


@pytest.mark.parametrize(
    "counts",
    [
        (3, 3, 3),  # kills before the supervisor began
        (None, 3, None, 3),  # unknown is not zero
        (3, 0, 0),  # another group
        (None, None),
    ],
)
def test_what_is_no_kill(counts: tuple[int | None, ...]) -> None:
    assert suspected(kills(*counts), IncidentKind.OUT_OF_MEMORY_KILL) == []


def device(
    t: float,
    used: int | None,
    epoch: int = 1,
    processes: int | None = 3,
    reserved: int | None = None,
) -> Sample:
    torch = None if reserved is None else Torch(allocated=reserved, reserved=reserved)
    return Sample(
        t=t,
        epoch=epoch,
        host=Host(processes=processes),
        device=[Device(index=0, used=used, total=141 * GIB, torch=torch)],
        scrape_ok=processes != 0,
    )


def life(used: int | None, begin: float, seconds: int = 60, **changes: Any) -> list[Sample]:
    return [device(begin + second, used, **changes) for second in range(seconds)]


def test_memory_that_outlives_every_process_is_an_orphan_after_its_grace() -> None:
    series = [*life(120 * GIB, 0), *life(90 * GIB, 60, processes=0)]
    found = suspected(series, IncidentKind.ORPHAN_DEVICE_MEMORY)
    assert found[0][0] == 60.0 + DRIVER_SETTLE_S
    suspicion = found[0][1]
    assert (suspicion.segment, suspicion.bytes) == (Segment.ORPHAN, 90 * GIB)
    assert "other pods" in suspicion.evidence[1]


def test_what_the_next_engine_holds_before_it_answers_is_its_own() -> None:
    """An engine that reports no allocator, as vLLM: it holds its weights long before it listens."""
    dead = life(90 * GIB, 60, 2 * int(DRIVER_SETTLE_S), processes=0)
    starting = life(90 * GIB, 60 + 2 * DRIVER_SETTLE_S, 200, epoch=2)
    for sample in starting:
        sample.scrape_ok = False
    found = suspected([*life(120 * GIB, 0), *dead, *starting], IncidentKind.ORPHAN_DEVICE_MEMORY)
    assert [found[0][0], found[-1][0]] == [60 + DRIVER_SETTLE_S, 59 + 2 * DRIVER_SETTLE_S]
    quick = life(90 * GIB, 60, 5, processes=0)
    found = suspected([*life(120 * GIB, 0), *quick, *starting], IncidentKind.ORPHAN_DEVICE_MEMORY)
    assert found == []


@pytest.mark.parametrize("after", [None, 700 << 20])
def test_an_engine_that_ended_cleanly_or_a_device_nobody_can_read_is_none(
    after: int | None,
) -> None:
    series = [*life(120 * GIB, 0), *life(after, 60, processes=0)]
    assert suspected(series, IncidentKind.ORPHAN_DEVICE_MEMORY) == []


def test_memory_that_the_driver_takes_back_in_time_is_none() -> None:
    dying = [device(60.0 + s, (120 - 6 * s) * GIB, processes=0) for s in range(20)]
    series = [*life(120 * GIB, 0), *dying, *life(0, 80, processes=0)]
    assert suspected(series, IncidentKind.ORPHAN_DEVICE_MEMORY) == []


def test_a_successor_that_finds_more_beside_its_own_memory() -> None:
    """By the engine's own report alone, where the supervisor has no NVML."""
    series = [
        *life(62 * GIB, 0, reserved=60 * GIB),
        *life(None, 60, 20, processes=0),
        *life(75 * GIB, 80, epoch=2, reserved=60 * GIB),
        *life(62 * GIB, 140, epoch=2, reserved=60 * GIB),  # it went away in the end
    ]
    found = suspected(series, IncidentKind.ORPHAN_DEVICE_MEMORY)
    assert found[0][0] == 80.0 + DRIVER_SETTLE_S
    assert found[0][1].bytes == 13 * GIB
    assert found[-1][0] == 139.0


def test_a_successor_that_overlaps_with_the_old_worker_is_none() -> None:
    series = [
        *life(62 * GIB, 0, reserved=60 * GIB),
        *life(80 * GIB, 60, 10, epoch=2, reserved=0),
        *life(62 * GIB, 70, epoch=2, reserved=60 * GIB),
    ]
    assert suspected(series, IncidentKind.ORPHAN_DEVICE_MEMORY) == []


def loaded(
    t: float,
    usage: float | None,
    running: int | None = 0,
    inflight: int | None = 0,
    waiting: int | None = 0,
) -> Sample:
    load = SampleLoad(running=running, waiting=waiting, inflight=inflight, kv_usage_ratio=usage)
    return Sample(t=t, epoch=1, load=load)


def test_blocks_that_nobody_holds_at_idle_are_lost_capacity() -> None:
    busy = [loaded(t, 0.9, running=4) for t in range(20)]
    idle = [loaded(20.0 + t, 0.25) for t in range(20)]
    again = [loaded(40.0 + t, 0.9, running=4) for t in range(20)]
    found = suspected([*busy, *idle, *again], IncidentKind.CAPACITY_LOSS)
    assert found[0][0] == 20.0 + MIN_IDLE_S
    assert found[-1][0] == 59.0, "what was seen at idle stands while requests hide it"
    assert (found[0][1].over_budget, found[0][1].consumed_ratio) == (True, 0.25)


def test_a_pool_that_came_back_is_whole() -> None:
    series = [loaded(t, 0.25) for t in range(20)] + [loaded(20.0 + t, 0.0) for t in range(20)]
    assert suspected(series, IncidentKind.CAPACITY_LOSS)[-1][0] < 20.0


@pytest.mark.parametrize(
    "series",
    [
        [loaded(t, 0.9, running=1) for t in range(60)],
        [loaded(t, 0.9, inflight=2) for t in range(60)],  # requests that the worker has not seen
        [loaded(t, 0.9, running=None) for t in range(60)],
        [loaded(t, 0.9, waiting=None) for t in range(60)],
        [loaded(t, None) for t in range(60)],
        [loaded(t, float("nan")) for t in range(60)],
        [loaded(t, 0.9 if t % 12 < 8 else 0.0) for t in range(60)],  # an offload still writes
        [loaded(t, 0.01) for t in range(60)],
    ],
)
def test_what_is_no_lost_capacity(series: list[Sample]) -> None:
    last = suspected(series, IncidentKind.CAPACITY_LOSS)
    assert last == []


# ---- an engine that tells what is lost


def telling(
    t: float,
    kv: float | None,
    encoder: float | None = None,
    offload: float | None = None,
    *,
    usage: float = 0.9,
) -> Sample:
    """At full load, with the shares that the engine says are lost."""
    load = SampleLoad(
        running=8, waiting=40, inflight=60, kv_usage_ratio=usage, kv_lost_ratio=kv,
        encoder_lost_ratio=encoder, offload_lost_ratio=offload,
    )  # fmt: skip
    return Sample(t=t, epoch=1, load=load)


@pytest.mark.parametrize(
    ("kv", "encoder", "offload", "words"),
    [
        (0.05, None, 0.25, "25.0% of the host's KV blocks is pinned without a transfer"),
        (0.25, None, 0.0, "25.0% of the KV cache belongs to no request that a client waits for"),
        (0.0, 0.25, None, "25.0% of the encoder cache's budget belongs to no running request"),
        (0.05, 0.25, 0.05, "25.0% of the encoder cache's budget belongs to no running request"),
    ],
)
def test_a_reported_loss_is_seen_at_full_load(
    kv: float, encoder: float | None, offload: float | None, words: str
) -> None:
    no_encoder, no_offload = (None if one is None else 0.0 for one in (encoder, offload))
    sound = [telling(t, 0.0, no_encoder, no_offload) for t in range(20)]
    found = suspected([*sound, telling(20, kv, encoder, offload)], IncidentKind.CAPACITY_LOSS)
    assert [t for t, _ in found] == [20.0]
    suspicion = found[0][1]
    assert (suspicion.over_budget, suspicion.consumed_ratio) == (True, 0.25)
    assert (suspicion.process, suspicion.evidence) == ("worker", [words])


def test_a_small_loss_is_reported_and_no_reason_to_restart() -> None:
    (found,) = suspected([telling(0, 0.03)], IncidentKind.CAPACITY_LOSS)
    assert not found[1].over_budget
    assert suspected([telling(0, 0.019)], IncidentKind.CAPACITY_LOSS) == []


def test_a_loss_stays_while_unknown_and_ends_with_the_next_report() -> None:
    unresponsive = [Sample(t=float(t), epoch=1, scrape_ok=False) for t in range(1, 5)]
    series = [telling(0, 0.2), *unresponsive, telling(5, 0.0)]
    assert [t for t, _ in suspected(series, IncidentKind.CAPACITY_LOSS)] == [
        0.0,
        1.0,
        2.0,
        3.0,
        4.0,
    ]


share = st.floats(0.0, 1.0)


@given(usages=st.lists(st.tuples(share, st.booleans(), st.none() | st.just(0.0)), max_size=60))
def test_an_engine_that_has_lost_nothing_is_not_suspected(
    usages: list[tuple[float, bool, float | None]],
) -> None:
    """Whatever its pool holds, at work or at rest: a prefix cache or an offload may fill it."""
    series = []
    for t, (usage, idle, encoder) in enumerate(usages):
        sample = telling(float(t), 0.0, encoder, usage=usage)
        if idle:
            sample.load.running = sample.load.waiting = sample.load.inflight = 0
        series.append(sample)
    assert suspected(series, IncidentKind.CAPACITY_LOSS) == []


@pytest.mark.parametrize("ratio", [float("nan"), -0.5, 1.5, float("inf")])
def test_a_share_that_cannot_be_is_unknown(ratio: float) -> None:
    assert (
        suspected([telling(t, ratio, ratio) for t in range(60)], IncidentKind.CAPACITY_LOSS) == []
    )
