"""Verdicts on recordings of real engines hang on the memory, not on which samples were taken."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import pytest

from leaklab.recording.labels import Labels, Leak
from leaklab.recording.metamorphic import (
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
MAXIMUM = "a shorter maximum of the load is not among the samples, so demand is new at another time"
CLASS = "the load falls into another class, whose base is learnt while the memory grows"
BUDGET = "healthy growth ends within a few percent of what decides"
ENGINE = "the engine grows besides: kernels for new shapes in its worker, which nothing declares"
SHORT = "it ends, or restarts, before the leak has taken a third of its budget"
LATE = "it ends before the odds suffice, which are those of a budget for an hour"
END = "it is confirmed seconds before it ends, or not"
ODDS = "its odds are near what suffices for a minute or more, so other samples decide when"
DIFFER = {
    ("cpu-plimsoll-04", "every_fifth"): CLASS,
    ("cpu-sglang-03", "every_fifth"): ODDS,
    ("cpu-sglang-04", "without_the_first"): ODDS,
    ("cpu-sglang-07", "every_second"): CLASS,
    ("cpu-sglang-07", "every_second_shifted"): CLASS,
    ("cpu-sglang-18", "every_fifth"): CLASS,
    ("cpu-sglang-20", "every_second"): ODDS,
    ("cpu-sglang-24", "every_fifth"): ODDS,
    ("cpu-sglang-30", "leak_added"): LATE,
    ("cpu-vllm-03", "every_fifth"): ODDS,
    ("cpu-vllm-03", "every_second"): MAXIMUM,
    ("cpu-vllm-03", "every_second_shifted"): ODDS,
    ("cpu-vllm-03", "played_twice"): ODDS,
    ("cpu-vllm-03", "without_each_tenth"): MAXIMUM,
    ("cpu-vllm-05", "leak_taken_away"): ENGINE,
    ("cpu-vllm-05", "without_the_first"): CLASS,
    ("cpu-vllm-06", "every_fifth"): MAXIMUM,
    ("cpu-vllm-07", "every_fifth"): CLASS,
    ("cpu-vllm-07", "every_second_shifted"): CLASS,
    ("cpu-vllm-09", "every_fifth"): CLASS,
    ("cpu-vllm-12", "without_the_first"): BUDGET,
    ("cpu-vllm-19", "every_fifth"): CLASS,
    ("cpu-vllm-19", "every_second"): CLASS,
    ("cpu-vllm-19", "every_second_shifted"): CLASS,
    ("cpu-vllm-19", "without_each_tenth"): CLASS,
    ("cpu-vllm-25", "every_fifth"): BUDGET,
    ("cpu-vllm-25", "every_second"): BUDGET,
    ("cpu-vllm-25", "every_second_shifted"): BUDGET,
    ("cpu-vllm-25", "without_each_tenth"): BUDGET,
    ("cpu-vllm-25", "without_the_first"): BUDGET,
    ("cpu-vllm-30", "leak_taken_away"): ENGINE,
    ("cpu-vllm-31", "every_second"): BUDGET,
    ("h100-plimsoll-03", "every_fifth"): MAXIMUM,
    ("h100-plimsoll-08", "leak_added"): LATE,
    ("h100-vllm-06", "every_second_shifted"): CLASS,
    ("h100-vllm-06", "without_the_first"): CLASS,
    ("h100-vllm-12", "leak_added"): SHORT,
    ("h100-vllm-14", "leak_added"): SHORT,
    ("h100-vllm-16", "leak_added"): SHORT,
    ("h100-vllm-46", "without_the_first"): ODDS,
    ("h100-vllm-50", "every_fifth"): ODDS,
    ("h100-vllm-55", "busier_at_first"): END,
    ("h100-vllm-55", "every_fifth"): END,
    ("h100-vllm-55", "every_second"): END,
    ("h100-vllm-55", "every_second_shifted"): END,
    ("h100-vllm-55", "without_each_tenth"): END,
    ("h100-vllm-55", "without_the_first"): END,
    ("h100-vllm-63", "leak_added"): LATE,
    ("h100-vllm-74", "every_fifth"): BUDGET,
    ("h100-vllm-78", "leak_added"): LATE,
}
"""What still depends on the samples, by recording and check, with the reason."""


def differing(chosen: Sequence[Recording]) -> set[tuple[str, str]]:
    return {(one.name, check) for one in chosen if one.seen for check, _, _ in failures(one)}


def test_verdicts_on_a_part_of_the_recordings_do_not_hang_on_single_samples() -> None:
    day = datetime.datetime.now(datetime.UTC).date().toordinal()
    assert differing(list(recordings())[day % PARTS :: PARTS]) <= DIFFER.keys()


@pytest.mark.long
def test_the_table_names_all_verdicts_that_hang_on_samples_and_no_other() -> None:
    assert differing(list(recordings())) == DIFFER.keys()


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
