"""Work that waits while nothing moves, and what is no stall.

Tests ``detect/stall.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leaklab.healthy_runs import Spells
from leaklab.series import Series, flat
from plimsoll_api.assessment import Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.trace import Host, Sample, SampleLoad
from plimsoll_sidecar.detect.stall import StallWatch

Judge = Callable[..., Any]


def busy(t: float, steps: int | None, ok: bool = True, work: int = 2) -> Sample:
    load = SampleLoad(running=work, waiting=0, inflight=work, requests_total=int(t))
    load.steps_total = steps
    return Sample(t=t, epoch=1, host=Host(processes=2), load=load, scrape_ok=ok)


def unresponsive(t: float, serving: bool = False) -> Sample:
    sample = busy(t, None, ok=False)
    sample.serving = serving
    return sample


def test_a_hang_is_seen_after_the_timeout(judge: Judge) -> None:
    outcome = judge(Series(duration=200, frozen_at=100))
    t, suspicion = outcome.first[IncidentKind.STALL]
    assert t == pytest.approx(130, abs=2)
    assert suspicion.process == "worker"
    assert suspicion.over_budget


def test_accepted_requests_are_no_progress() -> None:
    """``requests_total`` goes on while the worker hangs: the frontend still accepts."""
    watch = StallWatch(10, 1)
    assert watch.update(busy(0, 5)) is None
    assert [watch.update(busy(t, 5)) is not None for t in range(1, 12)].index(True) == 9


def test_an_idle_engine_does_not_stall(judge: Judge) -> None:
    assert judge(Series(duration=600, load=flat(0))).first == {}


def test_a_failed_scrape_stops_the_clock() -> None:
    watch = StallWatch(10, 1)
    watch.update(busy(0, 5))
    for t in range(1, 9):
        assert watch.update(busy(t, 5)) is None
    for t in range(9, 20):
        assert watch.update(busy(t, None, ok=False)) is None
    assert watch.update(busy(20, 5)) is None
    assert watch.update(busy(21, 5)) is not None


def test_a_worker_that_starts_does_not_stall() -> None:
    watch = StallWatch(10, 1)
    assert all(watch.update(busy(t, None)) is None for t in range(100))


def test_progress_ends_a_stall() -> None:
    watch = StallWatch(10, 1)
    for t in range(15):
        watch.update(busy(t, 5))
    assert watch.update(busy(15, 6)) is None


def test_a_frontend_that_answers_nobody_is_a_stall_after_twice_the_timeout(judge: Judge) -> None:
    outcome = judge(Series(duration=300, unresponsive=lambda t: t > 40))
    t, suspicion = outcome.first[IncidentKind.STALL]
    assert t == pytest.approx(100, abs=2)
    assert suspicion.process == "frontend"


def silent_for(watch: StallWatch, since: float, samples: int) -> tuple[float | None, Suspicion]:
    """Seconds from a hang to the suspicion and one round more; each sample waits 3 s for answers,
    the first one for one port after the other."""
    t, waits = since + 1.0, 6.0
    for _ in range(samples):
        found = watch.update(unresponsive(t))
        t, waits = t + waits, 4.0
        if found is not None:
            return t + waits - since, found
    return None, Suspicion(IncidentKind.STALL, None, 0.0, 0.0)


def test_a_loop_that_hangs_after_a_minute_of_answers_is_a_stall_within_30_s() -> None:
    watch = StallWatch(120, 1)
    assert all(watch.update(busy(t, t)) is None for t in range(62))
    seconds, suspicion = silent_for(watch, 61.0, 10)
    assert seconds is not None
    assert seconds <= 30.0
    assert suspicion.evidence[0].endswith("; none before")


def test_a_silence_like_an_earlier_one_is_no_stall() -> None:
    watch, t = StallWatch(120, 1), 0.0
    for _ in range(3):
        for _ in range(100):
            t += 1
            assert watch.update(busy(t, int(t))) is None
        assert silent_for(watch, t, 4) == (None, Suspicion(IncidentKind.STALL, None, 0.0, 0.0))
        t += 18
        watch.update(busy(t, int(t)))
    seconds, suspicion = silent_for(watch, t, 100)
    assert seconds is not None
    assert 20 < seconds < 200
    assert "the longest was" in suspicion.evidence[0]


def test_each_port_has_a_history_of_its_own() -> None:
    """The status was often silent for a minute while the serving port answered."""
    watch, t = StallWatch(120, 1), 0.0
    for _ in range(3):
        for _ in range(100):
            t += 1
            assert watch.update(busy(t, int(t))) is None
        for _ in range(15):
            t += 4
            assert watch.update(unresponsive(t, serving=True)) is None
    t += 1
    watch.update(busy(t, int(t)))
    seconds, suspicion = silent_for(watch, t, 10)
    assert seconds is not None
    assert seconds <= 30.0, "the serving port was never silent before"
    assert suspicion.evidence[0].endswith("; none before")


def beside(watch: StallWatch, t: float, seconds: int, serving: Callable[[int], bool | None]) -> Any:
    """The status answers every second, and the serving port as asked; the first stall."""
    for second in range(1, seconds + 1):
        sample = busy(t + second, int(t) + second)
        sample.serving = serving(second)
        if (found := watch.update(sample)) is not None:
            return second, found
    return None, None


def test_a_serving_port_that_is_silent_alone_is_a_stall_within_30_s() -> None:
    """It is asked every five seconds while it answers, and then each request takes three."""
    watch = StallWatch(120, 1)
    assert beside(watch, 0.0, 90, lambda t: True if t % 5 == 0 else None) == (None, None)
    seconds, found = beside(watch, 90.0, 60, lambda t: False if t >= 8 and t % 4 == 0 else None)
    assert seconds + 4 <= 30, "and a round to confirm"
    assert found.evidence == [
        "the serving port did not answer for 17 s, although the status did; none before"
    ]
    assert beside(watch, 150.0, 1, lambda _: True) == (None, None)


def test_a_silence_that_is_usual_for_the_serving_port_is_no_stall() -> None:
    """The status answers all the time. It says nothing about the other port."""
    watch, t = StallWatch(120, 1), 0.0
    for _ in range(3):
        beside(watch, t, 100, lambda t: True if t % 5 == 0 else None)
        beside(watch, t + 100, 24, lambda t: False if t % 4 == 0 else None)
        t += 124
    beside(watch, t, 5, lambda t: True)
    seconds, _ = beside(watch, t + 5, 22, lambda t: False if t % 4 == 0 else None)
    assert seconds is None
    seconds, _ = beside(watch, t + 27, 60, lambda t: False if t % 4 == 0 else None)
    assert seconds is not None


def test_a_port_that_never_answered_or_an_engine_that_starts_is_no_stall() -> None:
    watch = StallWatch(120, 1)
    assert beside(watch, 0.0, 300, lambda _: False) == (None, None)
    beside(watch, 300.0, 90, lambda _: True)
    for t in range(391, 600):
        sample = busy(t, t)
        sample.serving, sample.ready = False, False
        assert watch.update(sample) is None


def test_a_silence_that_is_usual_for_both_ports_is_no_stall() -> None:
    """Each was silent alone before, and now they are at the same time."""
    watch, t = StallWatch(120, 1), 0.0
    for _ in range(3):
        for _ in range(100):
            t += 1
            watch.update(busy(t, int(t)))
        for n in range(12):
            t += 4
            watch.update(unresponsive(t, serving=not 2 < n < 9))
    t += 1
    watch.update(busy(t, int(t)))
    seconds, _ = silent_for(watch, t, 6)
    assert seconds is None


def test_throttling_by_the_kernel_is_evidence_of_a_stall_that_it_came_with() -> None:
    watch = StallWatch(120, 1)
    for t in range(62):
        sample = busy(t, t)
        sample.host.cgroup_throttled = 5 * (t < 10) + 5
        watch.update(sample)
    sample = unresponsive(63)
    sample.host.cgroup_throttled = 5
    watch.update(sample)
    for number in range(1, 10):
        sample = unresponsive(63 + 4 * number)
        sample.host.cgroup_throttled = 5 + 100 * number
        found = watch.update(sample)
    assert found is not None
    assert found.evidence[1] == (
        "the kernel throttled the engine meanwhile: its memory exceeded memory.high 900 times"
    )


def test_a_silent_status_of_an_engine_that_serves_is_no_stall(judge: Judge) -> None:
    assert judge(Series(duration=3000, silent=lambda t: t > 100)).first == {}


def test_silence_without_a_second_witness_is_unknown() -> None:
    watch = StallWatch(10, 1)
    watch.update(busy(0, 1))
    assert all(watch.update(busy(t, None, ok=False)) is None for t in range(1, 100))


def test_a_single_answer_of_the_serving_port_ends_the_silence() -> None:
    watch = StallWatch(10, 1)
    watch.update(busy(0, 1))
    assert all(watch.update(unresponsive(t, serving=t % 15 == 0)) is None for t in range(1, 60))


def test_the_wait_for_answers_that_do_not_come_is_time_seen() -> None:
    """At both ports 3 s, however often samples are wanted."""
    watch = StallWatch(30, 0.25)
    watch.update(busy(0, 1))
    seen = [watch.update(unresponsive(6.3 * n)) is not None for n in range(1, 12)]
    assert seen.index(True) + 1 == 10


def test_an_engine_that_never_answered_or_has_no_process_is_no_stall() -> None:
    watch = StallWatch(10, 1)
    assert all(watch.update(unresponsive(t)) is None for t in range(100))
    watch.update(busy(100, 1))
    gone = [Sample(t=t, epoch=1, scrape_ok=False, serving=False) for t in range(101, 200)]
    assert all(watch.update(sample) is None for sample in gone)


def test_a_gap_between_samples_is_not_time_seen() -> None:
    watch = StallWatch(30, 1)
    watch.update(busy(0, 5))
    assert watch.update(busy(500, 5)) is None


def with_history(pause: int, cpu: float | None = None) -> tuple[StallWatch, float]:
    """A service whose steps take a second and one in a hundred ``pause`` seconds, four at work, and
    ``cpu`` of a core spent all the time."""
    watch, t = StallWatch(120, 1), 0.0
    for step in range(1500):
        for _ in range(pause if step % 100 == 50 else 1):
            assert watch.update(at_work(t, step, cpu)) is None
            t += 1
    return watch, t


def at_work(t: float, step: int, cpu: float | None) -> Sample:
    sample = busy(t, step, work=4)
    sample.host.cpu_s = None if cpu is None else cpu * t
    return sample


def test_a_service_with_long_pauses_stalls_after_21_s() -> None:
    """Pauses of the same kind differ: the next may be much longer than the longest."""
    watch, t = with_history(pause=6, cpu=0.05)
    seen = [watch.update(at_work(t + s, 1499, 0.05)) is not None for s in range(40)]
    assert seen.index(True) == pytest.approx(21, abs=1)
    suspicion = watch.update(at_work(t + 40, 1499, 0.05))
    assert suspicion is not None
    assert "the longest pause so far was 6 s" in suspicion.evidence[0]


def test_a_first_long_pause_that_nothing_witnesses_has_the_timeout() -> None:
    """Weights that a trainer replaces while requests are held: none of 1,500 steps took as long."""
    watch, t = with_history(pause=2)
    seen = [watch.update(at_work(t + s, 1499, None)) is not None for s in range(130)]
    assert seen.index(True) == pytest.approx(120, abs=1)


@pytest.mark.parametrize(("share", "found_s"), [(0.0, 8), (0.2, 8), (0.5, 58)])
def test_the_processor_time_is_a_witness_of_a_first_long_pause(share: float, found_s: int) -> None:
    watch, spent = StallWatch(120, 1), 0.0

    def found(t: float, steps: int, by: float) -> bool:
        nonlocal spent
        spent += by
        sample = busy(t, steps)
        sample.host.cpu_s = spent
        return watch.update(sample) is not None

    assert not any(found(t, 20 * t, 0.9) for t in range(300))
    seen = [found(300 + s, 20 * 299, share) for s in range(130)]
    assert seen.index(True) + 1 == pytest.approx(found_s, abs=1)


@pytest.mark.parametrize("later", [None, 5.0])
def test_processor_time_that_is_known_no_more_is_no_witness(later: float | None) -> None:
    """It had hardly any by when it was read last, and may have computed since. A process that ends
    takes its time with it."""
    watch = StallWatch(120, 1)
    for t in range(400):
        sample = busy(t, 20 * min(t, 300))
        sample.host.cpu_s = 0.9 * min(t, 300) if t < 304 else later
        assert watch.update(sample) is None, t


@pytest.mark.parametrize("seed", range(4))
def test_pauses_that_differ_do_not_make_the_next_longer_one_a_stall(
    judge: Judge, seed: int
) -> None:
    """A decoder waits for blocks of a slow peer: each time for 3 to 20 s, and at first not so
    long."""
    waits = Spells(random.Random(seed), (40, 250), (3, 20), 2400)
    outcome = judge(Series(duration=2400, paused=waits.on, seed=seed))
    assert IncidentKind.STALL not in outcome.first


def test_the_configured_timeout_is_an_upper_bound() -> None:
    watch = StallWatch(10, 1)
    for step in range(400):
        for s in range(9):
            assert watch.update(busy(step * 9 + s, step)) is None
    for step in range(400, 1600):
        watch.update(busy(3200 + step, step))
    seen = [watch.update(busy(5000 + s, 1599)) is not None for s in range(20)]
    assert seen.index(True) <= 10


def test_a_restart_forgets_the_history(judge: Judge) -> None:
    """The first steps of a new epoch compile, and take their time."""
    series = Series(duration=2400, epoch=lambda t: 1 + (t >= 2000), frozen_at=2010)
    t, _ = judge(series).first[IncidentKind.STALL]
    assert t >= 2039


def test_requests_that_wait_for_their_grammar_alone_are_no_stall() -> None:
    def compiling(t: float, count: int | None) -> Sample:
        sample = busy(t, 5, work=30)
        sample.load.compiling = count
        return sample

    watch = StallWatch(10, 1)
    assert all(watch.update(compiling(t, 30)) is None for t in range(60))
    others = StallWatch(10, 1)
    assert any(others.update(compiling(t, 29)) is not None for t in range(20))
    unknown = StallWatch(10, 1)  # the worker has not reported for a while
    assert any(unknown.update(compiling(t, None)) is not None for t in range(20))


def pauses(watch: StallWatch, lengths: list[int], rate: float | None) -> list[bool]:
    """Whether a stall was suspected in each pause, ``rate`` of a core spent and 5 s of steps
    before each."""
    t, steps, found = 0, 0, []
    for length in lengths:
        suspected = False
        for second in range(5 + length):
            t, steps = t + 1, steps + 20 * (second < 5)
            sample = busy(t, steps)
            sample.host.cpu_s = None if rate is None else rate * t
            suspected |= watch.update(sample) is not None
        found.append(suspected)
    return found


histories = st.lists(st.integers(0, 28), max_size=12)
rates = st.sampled_from([None, 0.0, 0.2, 1.0])


@given(histories, rates)
def test_a_hang_is_found_within_the_timeout_whatever_was_before(
    history: list[int], rate: float | None
) -> None:
    assert pauses(StallWatch(30, 1), [*history, 32], rate)[-1]


@given(histories.filter(bool), rates, st.data())
def test_a_pause_as_long_as_one_before_is_no_stall(
    history: list[int], rate: float | None, data: st.DataObject
) -> None:
    again = data.draw(st.integers(0, max(history)))
    assert not pauses(StallWatch(30, 1), [*history, again], rate)[-1]
