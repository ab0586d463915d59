"""Work that waits while nothing moves, and what is no stall."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from series import Series, flat

from plimsoll_sidecar.detect.assessment import Kind
from plimsoll_sidecar.detect.stall import StallWatch
from plimsoll_sidecar.trace import Host, Sample, SampleLoad

Judge = Callable[..., Any]


def busy(t: float, steps: int | None, ok: bool = True, work: int = 2) -> Sample:
    load = SampleLoad(running=work, waiting=0, inflight=work, requests_total=int(t))
    load.steps_total = steps
    return Sample(t=t, epoch=1, host=Host(processes=2), load=load, scrape_ok=ok)


def test_a_hang_is_seen_after_the_timeout(judge: Judge) -> None:
    outcome = judge(Series(duration=200, frozen_at=100))
    t, suspicion = outcome.first[Kind.STALL]
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


def test_a_frontend_that_answers_nothing_is_a_stall_after_twice_the_timeout(judge: Judge) -> None:
    outcome = judge(Series(duration=300, silent=lambda t: t > 100))
    t, suspicion = outcome.first[Kind.STALL]
    assert t == pytest.approx(160, abs=2)
    assert suspicion.process == "frontend"


def test_an_engine_that_never_answered_or_has_no_process_is_no_stall() -> None:
    watch = StallWatch(10, 1)
    assert all(watch.update(busy(t, None, ok=False)) is None for t in range(100))
    watch.update(busy(100, 1))
    gone = [Sample(t=t, epoch=1, scrape_ok=False) for t in range(101, 200)]
    assert all(watch.update(sample) is None for sample in gone)


def test_a_gap_between_samples_is_not_time_seen() -> None:
    watch = StallWatch(30, 1)
    watch.update(busy(0, 5))
    assert watch.update(busy(500, 5)) is None
