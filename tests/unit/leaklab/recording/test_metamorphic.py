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
DIFFER = {
    "busier_at_first": """
        h200-vllm-140
    """,
    "every_fifth": """
        cpu-plimsoll-04 cpu-sglang-03 cpu-sglang-18 cpu-sglang-24 cpu-vllm-01 cpu-vllm-03
        cpu-vllm-06 cpu-vllm-07 cpu-vllm-09 cpu-vllm-25 cpu-vllm-26 h100-plimsoll-03
        h100-vllm-17 h100-vllm-50 h100-vllm-55 h100-vllm-79 h200-vllm-113 h200-vllm-125
        h200-vllm-152 h200-vllm-154
    """,
    "every_second": """
        cpu-plimsoll-04 cpu-sglang-20 cpu-vllm-03 cpu-vllm-19 cpu-vllm-25 h100-vllm-06
        h100-vllm-55 h200-vllm-109 h200-vllm-111 h200-vllm-140
    """,
    "every_second_shifted": """
        cpu-vllm-01 cpu-vllm-03 cpu-vllm-19 cpu-vllm-25 h100-vllm-17 h100-vllm-55
        h100-vllm-79 h200-vllm-109 h200-vllm-111 h200-vllm-126
    """,
    "leak_added": """
        cpu-sglang-14 cpu-sglang-30 h100-plimsoll-08 h100-vllm-12 h100-vllm-14 h100-vllm-16
        h100-vllm-62 h100-vllm-63 h100-vllm-76 h100-vllm-77 h100-vllm-78 h200-vllm-103
        h200-vllm-104 h200-vllm-114 h200-vllm-133 h200-vllm-136 h200-vllm-141 h200-vllm-142
        h200-vllm-165 h200-vllm-166 h200-vllm-167
    """,
    "leak_taken_away": """
        cpu-vllm-05 cpu-vllm-30 h200-vllm-162
    """,
    "played_twice": """
        cpu-vllm-03
    """,
    "without_each_tenth": """
        cpu-vllm-03 cpu-vllm-19 cpu-vllm-25 h100-vllm-79 h200-vllm-104
    """,
    "without_the_first": """
        cpu-plimsoll-04 cpu-sglang-07 cpu-vllm-01 cpu-vllm-05 cpu-vllm-12 cpu-vllm-25
        h100-plimsoll-03 h100-vllm-55 h100-vllm-69 h100-vllm-70 h200-vllm-104 h200-vllm-109
        h200-vllm-129 h200-vllm-156
    """,
}
"""Recordings whose verdict still depends on the samples, by check.

Their load falls into another class, whose base is learnt while the memory grows. Or a shorter
maximum of the load is not among the samples, so demand is new at another time. Or the odds are near
what suffices for a minute or more. A leak that is added to a healthy run is not confirmed if the
run ends, restarts or meets new demand too early for that; what is left of cpu-vllm-05 and -30
without their leaks is growth of the engine that nothing declares.
"""


def differing(chosen: Sequence[Recording]) -> set[tuple[str, str]]:
    return {(one.name, check) for one in chosen if one.seen for check, _, _ in failures(one)}


def table() -> set[tuple[str, str]]:
    return {(name, check) for check, names in DIFFER.items() for name in names.split()}


def test_verdicts_on_a_part_of_the_recordings_do_not_hang_on_single_samples() -> None:
    day = datetime.datetime.now(datetime.UTC).date().toordinal()
    assert differing(list(recordings())[day % PARTS :: PARTS]) <= table()


@pytest.mark.long
def test_the_table_names_all_verdicts_that_hang_on_samples_and_no_other() -> None:
    assert differing(list(recordings())) == table()


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
