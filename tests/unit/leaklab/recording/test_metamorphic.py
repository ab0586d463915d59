"""Verdicts on recordings of real engines hang on the memory, not on which samples were taken."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import pytest

from leaklab.recording.labels import Labels, Leak
from leaklab.recording.metamorphic import (
    SAMPLED,
    Outcome,
    Played,
    busier_at_first,
    every_second,
    failures,
    leak_added,
    leak_taken_away,
    played_twice,
    same,
)
from leaklab.recording.published import Recording, recordings
from leaklab.series import GIB, MIB, Series, steady
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.trace import EngineInfo, Header

PARTS = 6
"""One part of the recordings is judged a day; all of them among the long tests."""
MOST_RATIO = 0.15
"""Of the verdicts of a part. They differ where a load falls into another class, where demand is new
at another time, and where odds are near what suffices for a minute or more."""


def differing_ratio(chosen: Sequence[Recording]) -> float:
    seen = [one for one in chosen if one.seen]
    return sum(1 for one in seen for _ in failures(one)) / (len(seen) * (len(SAMPLED) + 1))


def test_most_verdicts_on_a_part_of_the_recordings_do_not_hang_on_single_samples() -> None:
    day = datetime.datetime.now(datetime.UTC).date().toordinal()
    assert differing_ratio(list(recordings())[day % PARTS :: PARTS]) <= MOST_RATIO


@pytest.mark.long
def test_most_verdicts_on_all_recordings_do_not_hang_on_single_samples() -> None:
    assert differing_ratio(list(recordings())) <= MOST_RATIO


def played(series: Series, labels: Labels) -> Played:
    header = Header(
        trace=1, name="a", engine=EngineInfo("vllm"), started_at="2026-01-01T00:00:00Z",
        interval_s=series.interval,
    )  # fmt: skip
    memory = MemoryPolicy(host=MemoryBudget(256 * MIB, 3600.0, 6 * GIB), warmup_s=60.0)
    return Played(header, memory, tuple(series.samples()), labels)


def leaking(rate: float = MIB) -> Played:
    series = Series(duration=600, leak=steady(rate, 200.0), noise=2 * MIB)
    leak = Leak(200.0, 599.0, "HostGrowth", "malloc_in_use", rate, "heap_blocks", int(399 * rate))
    return played(
        series, Labels([leak], False, "heap_blocks in the core: a byte per second, steady")
    )


def test_a_steady_leak_passes_every_check() -> None:
    run = leaking()
    plain = run.plain()
    assert plain.confirm_s is not None
    assert plain[1:] == (0, 0)
    for check in (every_second, busier_at_first, played_twice):
        assert same(plain, check(run)), check.__name__
    assert leak_taken_away(run) == Outcome(None, 0, 0)


def test_a_healthy_run_leaks_once_a_leak_is_added() -> None:
    run = played(Series(duration=600, noise=2 * MIB), Labels([], True, "healthy"))
    assert run.plain() == Outcome(None, 0, 0)
    found = leak_added(run)
    assert found.confirm_s is not None
    assert found.wrong == 0


def test_another_verdict_or_a_much_later_one_differs() -> None:
    assert same(Outcome(None, 1, 0), Outcome(None, 1, 0))
    assert same(Outcome(60.0, 0, 0), Outcome(105.0, 0, 0))
    assert not same(Outcome(60.0, 0, 0), Outcome(106.0, 0, 0))
    assert not same(Outcome(60.0, 0, 0), Outcome(None, 0, 0))
    assert not same(Outcome(None, 1, 0), Outcome(None, 1, 1))
