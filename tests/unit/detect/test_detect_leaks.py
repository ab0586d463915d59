"""Leaks of every rate and shape are suspected in time, and named right.

Tests ``detect/detector.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from leaklab.series import GIB, MIB, Series, bursty, sawtooth, square_load, steady
from plimsoll_api.assessment import Segment
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.trace import Host, Sample
from plimsoll_sidecar.detect.detector import Detector

Judge = Callable[..., Any]
HOUR = 3600.0
FAST = 400e6 / 60


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("noise", "within"), [(8 * MIB, 18), (40 * MIB, 40)])
def test_400_mb_a_minute_is_suspected_in_seconds(
    judge: Judge, seed: int, noise: float, within: float
) -> None:
    """The governor confirms 14 samples later. Noise of 40 MiB is a twelfth of the budget."""
    outcome = judge(Series(duration=260, leak=steady(FAST, 120), noise=noise, seed=seed))
    t, suspicion = outcome.first[IncidentKind.HOST_GROWTH]
    assert 120 < t <= 120 + within
    assert suspicion.segment is Segment.MALLOC_IN_USE
    assert suspicion.bytes_per_s == pytest.approx(FAST, rel=0.4)
    assert outcome.over_t is not None
    assert outcome.over_t - 120 < (512 * MIB + noise) / FAST + 6, "a floor of 5 s has spent it"


def test_a_leak_that_has_stopped_is_suspected_but_does_not_grow() -> None:
    """A trend stands for a while after the memory rose last: what it says is of the past."""
    stops, budget = 220.0, 512 * MIB
    series = Series(duration=260, leak=lambda t: FAST * max(0.0, min(t, stops) - 120))
    detector = Detector(MemoryPolicy(host=MemoryBudget(budget, HOUR, 6 * GIB)), 30, series.interval)
    found = {sample.t: detector.update(sample).suspicions for sample in series.samples()}
    (before,), (after,) = found[stops], found[stops + 25]
    assert (before.over_budget, before.growing) == (True, True)
    assert (after.over_budget, after.growing) == (True, False)


def test_growth_of_processes_that_have_ended_is_suspected_no_more() -> None:
    """The engine never comes back: its last figures stand, and nothing grows."""
    series = Series(duration=200, leak=steady(FAST, 120))
    detector = Detector(MemoryPolicy(host=MemoryBudget(512 * MIB, HOUR)), 30, series.interval)
    for sample in series.samples():
        last = detector.update(sample).suspicions
    assert [one.kind for one in last] == [IncidentKind.HOST_GROWTH]
    ended = Host(processes=0, frontend_lives=False)
    for t in range(201, 1500):
        found = detector.update(Sample(t=t, epoch=1, host=ended, scrape_ok=False)).suspicions
        assert found == []


def test_a_fast_leak_that_begins_with_the_engine(judge: Judge) -> None:
    outcome = judge(Series(duration=200, leak=steady(FAST)))
    assert outcome.first[IncidentKind.HOST_GROWTH][0] <= 90


def test_a_fast_leak_under_a_collectors_sawtooth(judge: Judge) -> None:
    series = Series(duration=800, leak=steady(FAST, 600), other=sawtooth(150 * MIB, 90))
    assert 600 < judge(series).first[IncidentKind.HOST_GROWTH][0] <= 640


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_48_mib_an_hour_is_suspected_within_an_hour(judge: Judge, seed: int) -> None:
    series = Series(duration=1.3 * HOUR, leak=steady(48 * MIB / HOUR, 600), seed=seed)
    t, suspicion = judge(series, window=24 * HOUR).first[IncidentKind.HOST_GROWTH]
    assert 600 < t < 600 + HOUR
    assert suspicion.bytes_per_s == pytest.approx(48 * MIB / HOUR, rel=0.3)
    assert not suspicion.over_budget


def test_90_bytes_a_request_over_hours(judge: Judge) -> None:
    series = Series(
        duration=10 * HOUR,
        interval=10,
        leak=steady(90 * 50),
        requests_per_s=50,
        noise=20 * MIB,
        segment="python_objects",
    )
    _, suspicion = judge(series, budget=256 * MIB, window=168 * HOUR).first[
        IncidentKind.HOST_GROWTH
    ]
    assert suspicion.segment is Segment.PYTHON_OBJECTS
    assert suspicion.bytes_per_request == pytest.approx(90, rel=0.3)
    assert not suspicion.over_budget


@pytest.mark.parametrize(
    ("series", "kind", "segment", "process"),
    [
        (
            Series(duration=900, leak=steady(1 * MIB, 100), role="frontend", malloc=False),
            IncidentKind.HOST_GROWTH,
            Segment.ANONYMOUS_OTHER,
            "frontend",
        ),
        (
            Series(duration=900, leak=steady(1 * MIB, 100), segment="anonymous_other"),
            IncidentKind.HOST_GROWTH,
            Segment.ANONYMOUS_OTHER,
            "worker",
        ),
        (
            Series(duration=900, leak=steady(1 * MIB, 100), segment="shared"),
            IncidentKind.HOST_GROWTH,
            Segment.SHARED,
            None,
        ),
        (
            Series(duration=900, leak=steady(2 * MIB, 100), device=True, segment="non_torch"),
            IncidentKind.DEVICE_GROWTH,
            Segment.NON_TORCH,
            "worker",
        ),
        (
            Series(duration=900, leak=steady(2 * MIB, 100), device=True, segment="torch_allocated"),
            IncidentKind.DEVICE_GROWTH,
            Segment.TORCH_ALLOCATED,
            "worker",
        ),
    ],
)
def test_the_segment_and_the_process_are_named(
    judge: Judge, series: Series, kind: IncidentKind, segment: Segment, process: str | None
) -> None:
    outcome = judge(series)
    assert set(outcome.first) == {kind}
    suspicion = outcome.first[kind][1]
    assert suspicion.segment is segment
    if process is not None:
        assert suspicion.process == process


@pytest.mark.parametrize(
    ("growing", "process"), [(("worker",), "worker"), (("worker", "frontend"), None), ((), None)]
)
def test_shared_memory_is_the_process_s_that_alone_maps_more(
    judge: Judge, growing: tuple[str, ...], process: str | None
) -> None:
    class Mapped(Series):
        def samples(self) -> Iterator[Sample]:
            for sample in super().samples():
                for one in sample.host.by_process or []:
                    one.rss_shmem = sample.host.rss_shmem if one.role in growing else 32 * MIB
                yield sample

    outcome = judge(Mapped(duration=900, leak=steady(2 * MIB, 100), segment="shared"))
    suspicion = outcome.first[IncidentKind.HOST_GROWTH][1]
    assert (suspicion.segment, suspicion.process) == (Segment.SHARED, process)


def test_a_leak_under_load_that_comes_and_goes(judge: Judge) -> None:
    series = Series(
        duration=1.5 * HOUR, leak=steady(300 * MIB / HOUR), load=square_load(0, 16, 240)
    )
    assert IncidentKind.HOST_GROWTH in judge(series).first


def test_a_leak_in_bursts(judge: Judge) -> None:
    series = Series(
        duration=4 * HOUR,
        interval=2,
        leak=bursty(100 * MIB / HOUR, 600, 0.2),
        load=square_load(0, 8, 600),
    )
    assert IncidentKind.HOST_GROWTH in judge(series, window=12 * HOUR).first


def test_growth_of_a_ledger_owner_beyond_its_bound_is_not_explained(judge: Judge) -> None:
    growth = steady(1 * MIB, 100)
    series = Series(duration=1500, other=growth, ledger=growth, ledger_bound=100 * MIB)
    t, suspicion = judge(series).first[IncidentKind.HOST_GROWTH]
    assert t > 200
    assert any("owner cache" in line for line in suspicion.evidence)


def test_the_limit_counts_where_it_comes_before_the_budget(judge: Judge) -> None:
    """Growth that the window's budget allows for ever still ends in an out-of-memory kill."""
    series = Series(duration=4 * HOUR, interval=5, leak=steady(1 * GIB / HOUR), noise=20 * MIB)
    outcome = judge(series, budget=2 * GIB, window=HOUR)
    assert outcome.over_t is not None
    assert outcome.over_t < 4 * HOUR
