"""Growth while more is asked of an engine than ever before is explained by that, for a while.

Tests ``detect/demand.py``, ``detect/segments.py`` and ``detect/leak.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from leaklab.series import MIB
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.supervision import Mode, Supervision
from plimsoll_api.trace import Host, Sample, SampleLoad
from plimsoll_sidecar.detect.baseline import (
    LOAD_CLASS_SETTLE_S,
    MAX_SETTLED_RISE_BYTES,
    Baseline,
)
from plimsoll_sidecar.detect.demand import (
    DEMAND_MEAN_WINDOW_S,
    MAX_NEW_DEMAND_S,
    DemandWatch,
    NewDemand,
)
from plimsoll_sidecar.detect.growth import Point
from plimsoll_sidecar.detect.segments import LastScrape
from plimsoll_sidecar.replay import ReplayLine, replay_samples

POLICY = MemoryPolicy(host=MemoryBudget(256 * MIB, 3600.0), warmup_s=60.0)
Curve = Callable[[float], float]


def page(requests: float = 4.0, prompt: float = 100.0, t: float = 0.0) -> SampleLoad:
    return SampleLoad(
        running=int(requests), waiting=0, inflight=int(requests),
        requests_total=int(5 * t), prompt_tokens_total=int(5 * t * prompt),
    )  # fmt: skip


def new_times(pages: Iterator[SampleLoad]) -> list[int]:
    demand = DemandWatch()
    return [t for t, said in enumerate(pages) if demand.update(float(t), said)]


def test_a_new_maximum_is_new_for_its_time_and_the_same_again_is_not() -> None:
    high = (30 <= t < 60 or 200 <= t < 230 for t in range(300))
    times = new_times(page(20.0 if busy else 4.0) for busy in high)
    assert 30 < times[0] <= 30 + DEMAND_MEAN_WINDOW_S
    assert times == list(range(times[0], times[-1] + 1)), "once"
    assert 60 <= times[-1] <= 60 + LOAD_CLASS_SETTLE_S


def test_one_more_request_and_a_peak_of_one_sample_are_not_new() -> None:
    assert new_times(page(5.0 if t > 30 else 4.0) for t in range(200)) == []
    assert new_times(page(12.0 if t == 60 else 4.0) for t in range(200)) == []


def test_longer_prompts_are_new() -> None:
    times = new_times(page(prompt=400.0 if t > 60 else 100.0, t=float(t)) for t in range(200))
    assert times
    assert 60 < times[0] <= 60 + DEMAND_MEAN_WINDOW_S


def test_a_load_that_rises_for_hours_is_new_for_minutes_of_each() -> None:
    times = new_times(page(4.0 + t / 10) for t in range(2 * 3600))
    assert MAX_NEW_DEMAND_S <= len(times) <= 3 * MAX_NEW_DEMAND_S + 60


def test_a_gauge_that_reads_zero_between_two_requests_is_work() -> None:
    scrape = LastScrape()
    for t in range(3):
        said = SampleLoad(running=0, waiting=0, inflight=0, requests_total=10 + min(t, 1))
        scrape.update(Sample(t=float(t), epoch=1, load=said))
        assert scrape.load == (1 if t == 1 else 0)


def test_a_lighter_load_needs_no_more_than_a_busier_one() -> None:
    """A class that is met late does not forgive what has leaked until then."""
    baseline = Baseline(Point(0.0, 1000 * MIB, load=4))
    baseline.update(Point(60.0, 1100 * MIB, load=1))
    assert baseline.growth == 100 * MIB
    baseline.update(Point(60.0 + LOAD_CLASS_SETTLE_S, 1120 * MIB, load=1))
    assert baseline.growth == 120 * MIB


def test_what_grew_before_goes_on_and_the_rest_is_explained() -> None:
    baseline = Baseline(Point(0.0, 1000 * MIB, load=4))
    baseline.update(Point(90.0, 1020 * MIB, load=4))
    demand = NewDemand(Point(90.0, 1020 * MIB, load=4), pace_bytes_per_s=MIB)
    demand.add(Point(120.0, 1200 * MIB, load=40))
    end = Point(140.0, 1200 * MIB, load=4)
    assert demand.finish(baseline, end) == 130 * MIB
    for load in (4, 40):
        baseline.update(Point(141.0, 1200 * MIB, load=load))
        assert baseline.growth == 70 * MIB


def test_demand_that_needs_nothing_leaves_the_bases_as_they_are() -> None:
    baseline = Baseline(Point(0.0, 1000 * MIB, load=4))
    baseline.update(Point(90.0, 1000 * MIB, load=4))
    demand = NewDemand(Point(90.0, 1000 * MIB, load=4), pace_bytes_per_s=0.0)
    demand.add(Point(100.0, 1000 * MIB + MAX_SETTLED_RISE_BYTES, load=40))
    assert demand.finish(baseline, Point(135.0, 1000 * MIB, load=4)) == 0
    assert [base.load for base in baseline.bases] == [4]


def confirmed(memory: Curve, requests: Curve, prompt: Curve) -> list[float]:
    def samples() -> Iterator[Sample]:
        for second in range(900):
            t = float(second)
            size = int(2000 * MIB + memory(t))
            yield Sample(
                t=t, epoch=1, host=Host(rss_anon=size, rss_shmem=0, processes=2),
                load=page(requests(t), prompt(t), t), ready=True,
            )  # fmt: skip

    lines = replay_samples(samples(), POLICY, Supervision(mode=Mode.RECOVER), 1.0, "demand")
    found = [line for line in lines if isinstance(line, ReplayLine)]
    return [line.t for line in found if line.event == "confirmed"]


def test_prompts_that_get_longer_are_no_leak_and_a_leak_beside_them_is_found() -> None:
    """Prompts get four times as long within 100 s, and a heap keeps .5 MiB for each token more."""

    def prompt(t: float) -> float:
        return 100.0 + min(300.0, max(0.0, t - 300.0) * 3.0)

    def kept(t: float) -> float:
        return 0.5 * MIB * (prompt(t - 5.0) - 100.0)

    def leaking(t: float) -> float:
        return kept(t) + 0.5 * MIB * max(0.0, t - 120.0)

    assert confirmed(kept, lambda t: 4.0, prompt) == []
    assert confirmed(leaking, lambda t: 4.0, prompt) != []
