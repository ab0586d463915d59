"""Which counter a growth follows, and when that cannot be told.

Tests ``detect/attribution.py``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leaklab.series import MIB, Series
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.trace import Host, RoleRss, Sample, SampleLoad
from plimsoll_sidecar.detect.attribution import (
    COUNTER_FIELDS,
    MAX_ROLES,
    TIME_TRIGGER,
    ProcessTriggers,
    TriggerFinder,
    describe_trigger,
    find_trigger,
)
from plimsoll_sidecar.detect.detector import Detector

EACH = 1900.0
HOUR = 3600.0


def walk(rng: random.Random, mean: float) -> list[float]:
    """A counter whose rate changes every minute, over an hour, a value each second."""
    total, rate, values = 0.0, mean, []
    for second in range(3600):
        if second % 60 == 0:
            rate = mean * rng.lognormvariate(0, 0.8)
        total += rate
        values.append(total)
    return values


def history(driver: str, unknown: tuple[str, ...] = (), together: bool = False) -> TriggerFinder:
    """An hour in which memory grows by EACH for each event of ``driver``, under noise."""
    rng, footprints = random.Random(7), TriggerFinder()
    totals = {name: walk(rng, 40.0) for name in COUNTER_FIELDS}
    if together:
        totals = dict.fromkeys(COUNTER_FIELDS, totals["requests"])
    for second in range(3600):
        events = 40.0 * second if driver == TIME_TRIGGER else totals[driver][second]
        in_flight = rng.randrange(20)
        load = SampleLoad()
        for name, field in COUNTER_FIELDS.items():
            if name not in unknown:
                setattr(load, field, int(totals[name][second]))
        size = (2 << 30) + EACH * events + in_flight * 2 * MIB + rng.gauss(0, 8 * MIB)
        footprints.add(float(second), int(size), load)
    return footprints


@pytest.mark.parametrize("driver", [*COUNTER_FIELDS, TIME_TRIGGER])
def test_the_counter_that_the_growth_follows_is_named(driver: str) -> None:
    found = find_trigger(history(driver).list_rows_since(0.0))
    assert found is not None
    assert found.counter == driver
    each = EACH * 40 * HOUR if driver == TIME_TRIGGER else EACH
    assert found.bytes_each == pytest.approx(each, rel=0.1)
    assert found.confidence > 0.9


def test_counters_that_move_together_are_indistinguishable() -> None:
    found = find_trigger(history("requests", together=True).list_rows_since(0.0))
    assert found is not None
    assert found.confidence <= 0.5
    assert found.confidence == pytest.approx(1 / len(COUNTER_FIELDS), rel=0.3)


def test_a_counter_that_is_unknown_is_no_candidate() -> None:
    found = find_trigger(history("aborts", unknown=("aborts",)).list_rows_since(0.0))
    assert found is None or found.counter != "aborts"


def test_too_short_a_window_and_one_without_growth_have_none() -> None:
    assert find_trigger(history("aborts").list_rows_since(3590.0)) is None
    flat = TriggerFinder()
    for second in range(200):
        flat.add(float(second), 1 << 30, SampleLoad(requests_total=second))
    assert find_trigger(flat.list_rows_since(0.0)) is None


def test_it_is_computed_again_when_the_window_has_grown() -> None:
    watch = TriggerFinder()
    for second in range(400):
        watch.add(float(second), second * 1000, SampleLoad(requests_total=second * second))
    first = watch.find_trigger(0.0, 400.0)
    assert watch.find_trigger(0.0, 410.0) is first
    assert watch.find_trigger(0.0, 440.0) is not first


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=400))
def test_averages_lose_no_sample(sizes: list[int]) -> None:
    footprints = TriggerFinder()
    for second, size in enumerate(sizes):
        footprints.add(float(second), size, SampleLoad(requests_total=second))
    points = footprints.list_rows_since(0.0)
    assert sum(p.weight for p in points) == pytest.approx(len(sizes))
    assert sum(p.weight * p.size for p in points) == pytest.approx(sum(sizes), rel=1e-9)
    assert [p.t for p in points] == sorted(p.t for p in points)


def test_a_month_takes_a_few_hundred_points() -> None:
    footprints = TriggerFinder()
    for minute in range(43_200):
        footprints.add(minute * 60.0, 1, SampleLoad())
    points = footprints.list_rows_since(0.0)
    assert len(points) < 600
    assert points[-1].weight == 1


def test_an_incident_tells_its_trigger_in_words() -> None:
    """A leak of 1 MiB an aborted request; requests go on at a rate of their own."""
    rng = random.Random(3)
    aborted = [value / 20 for value in walk(rng, 4.0)]
    series = Series(
        duration=2400,
        leak=lambda t: MIB * max(0.0, aborted[int(t)] - aborted[300]),
        counters={"aborted_total": lambda t: aborted[int(t)]},
    )
    policy = MemoryPolicy(host=MemoryBudget(1024 * MIB, 24 * HOUR), warmup_s=60.0)
    detector = Detector(policy, 60.0, 1.0)
    last = [detector.update(sample) for sample in series.samples()][-1]
    (suspicion,) = last.suspicions
    assert suspicion.trigger is not None
    assert suspicion.trigger.counter == "aborts"
    assert suspicion.trigger.bytes_each == pytest.approx(MIB, rel=0.15)
    told = describe_trigger(suspicion.trigger)
    assert told in suspicion.evidence
    assert "per aborted request (hypothesis," in (told or "")


def test_a_year_of_history_takes_the_memory_of_its_first_sample() -> None:
    footprints = TriggerFinder()
    footprints.add(0.0, 1, SampleLoad())
    taken = len(footprints._rows)
    for second in range(1, 20_000):
        footprints.add(float(second), second, SampleLoad())
    for minute in range(1, 20_000):
        footprints.add(20_000.0 + minute * 1_500.0, minute, SampleLoad())
    assert len(footprints._rows) == taken


def frontend_and_core(accounted: bool = True, retains: bool = False) -> Iterator[Sample]:
    """Two processes: the list in the API server gets 4 KiB longer by each request, the other one
    has a cache that grows by time until it is full. Both are as large at the end."""
    rng = random.Random(3)
    requests = walk(rng, 40.0)
    for second in range(1800):
        listed = int(4096 * requests[second])
        timed = int(listed and 4096 * 40.0 * second)
        server = RoleRss("APIServer", 200 * MIB + listed)
        core = RoleRss("EngineCore", 900 * MIB + timed // 8)
        if accounted:
            for one, size in ((server, listed), (core, timed // 8)):
                one.in_use, one.retained = size, 3 * size if retains else 0
                one.rss_anon = (one.rss_anon or 0) + one.retained
        total = sum(one.rss_anon or 0 for one in (server, core))
        host = Host(rss_anon=total, processes=2, by_process=[server, core])
        load = SampleLoad(running=0, waiting=0, requests_total=int(requests[second]))
        yield Sample(t=float(second), epoch=1, host=host, load=load, ready=True)


@pytest.mark.parametrize("accounted", [True, False])
def test_the_trigger_is_that_of_the_process_that_grew(accounted: bool) -> None:
    policy = MemoryPolicy(host=MemoryBudget(growth_bytes=100 * MIB, window_s=1800.0), warmup_s=60.0)
    detector = Detector(policy, 30.0, 1.0)
    found = [
        one for sample in frontend_and_core(accounted) for one in detector.update(sample).suspicions
    ]
    last = found[-1]
    assert (last.process, last.trigger and last.trigger.counter) == ("APIServer", "requests")
    assert last.trigger is not None
    assert last.trigger.bytes_each == pytest.approx(4096, rel=0.05)
    told = [one for one in last.evidence if one.startswith("the allocators of APIServer have")]
    assert len(told) == accounted


def test_an_allocator_that_keeps_less_than_before_has_nothing_for_a_trim() -> None:
    policy = MemoryPolicy(host=MemoryBudget(growth_bytes=100 * MIB, window_s=1800.0), warmup_s=60.0)
    detector = Detector(policy, 30.0, 1.0)
    told = []
    for sample in frontend_and_core():
        for one in sample.host.by_process or []:
            one.retained = 2 * MIB if sample.t < 600 else MIB
        told += [line for one in detector.update(sample).suspicions for line in one.evidence]
    (last,) = [one for one in told if one.startswith("the allocators of APIServer have")][-1:]
    assert last.endswith(" MiB more in use than at its base, and keep 1.0 MiB less")


def test_memory_that_an_allocator_keeps_is_no_growth_of_its_process() -> None:
    triggers = ProcessTriggers()
    for sample in frontend_and_core(retains=True):
        triggers.add(sample.t, sample.host.by_process or [], sample.load)
    watch = triggers.find("APIServer")
    assert watch is not None
    found = watch.find_trigger(0.0, 1800.0)
    assert found is not None
    assert found.bytes_each == pytest.approx(4096, rel=0.05), "not four times as much"
    assert triggers.find("worker") is None
    assert triggers.find(None) is None


def test_processes_without_end_are_not_all_kept() -> None:
    triggers = ProcessTriggers()
    for number in range(10 * MAX_ROLES):
        triggers.add(float(number), [RoleRss(f"job-{number}", 1)], SampleLoad())
    assert triggers.find("job-0") is not None
    assert triggers.find(f"job-{MAX_ROLES}") is None
