"""What a silence may last, by the service's history and the witnesses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plimsoll_sidecar.detect.patience import (
    LONG_PAUSE_S,
    LONG_SERVICE_LIMIT_S,
    PAUSE_MARGIN_S,
    SHORT_SERVICE_LIMIT_S,
    Pause,
    PauseDemand,
    PauseHistory,
    find_pause_limit,
)

TIMEOUT_S = 60.0
KNOWN = PauseDemand(8)
long_pauses = st.lists(st.floats(LONG_PAUSE_S, TIMEOUT_S), max_size=12)
processor_time = st.none() | st.floats(0.0, 100.0)


def served(pauses: list[float], interval_s: float = 1.0, steps: int = 20) -> PauseHistory:
    """Ten minutes of ``steps`` a second, and ``pauses`` between them."""
    gaps = PauseHistory()
    for _ in range(600):
        gaps.add(0.0, KNOWN, steps, interval_s=1.0)
    for silent_s in pauses:
        gaps.add(silent_s, KNOWN, steps, interval_s=interval_s)
    return gaps


def limit(
    pauses: list[float], cpu_s: float | None, demand: PauseDemand = KNOWN, seconds: float = 20.0
) -> float:
    return find_pause_limit(Pause(seconds, demand, cpu_s), served(pauses), TIMEOUT_S)[0]


@given(long_pauses, processor_time, st.floats(0.0, 200.0))
def test_it_is_never_longer_than_the_timeout_nor_shorter_than_a_pause_before(
    pauses: list[float], cpu_s: float | None, seconds: float
) -> None:
    found = limit(pauses, cpu_s, seconds=seconds)
    assert found <= TIMEOUT_S
    assert found >= min(TIMEOUT_S, max([*pauses, 0.0]) + PAUSE_MARGIN_S)


@given(st.lists(st.floats(LONG_PAUSE_S, 30.0), max_size=1))
def test_without_a_witness_and_pauses_to_compare_with_the_timeout_rules(
    pauses: list[float],
) -> None:
    assert limit(pauses, None) == TIMEOUT_S


@given(long_pauses)
def test_without_a_witness_more_demand_than_ever_has_the_timeout(pauses: list[float]) -> None:
    assert limit(pauses, None, PauseDemand(9)) == TIMEOUT_S


@given(st.lists(st.floats(LONG_PAUSE_S, 50.0), max_size=12), st.floats(0.0, 3.0))
def test_an_engine_that_computes_is_given_more_time_than_one_that_rests(
    pauses: list[float], little: float
) -> None:
    assert limit(pauses, little) <= limit(pauses, 20.0)


def test_an_engine_that_rests_stalls_by_its_steps_and_by_how_its_pauses_differ() -> None:
    assert limit([], 0.0) == LONG_SERVICE_LIMIT_S
    assert limit([5.0], 0.0) == 5 + 1 + PAUSE_MARGIN_S
    assert limit([5.0, 12.0], 0.0) == SHORT_SERVICE_LIMIT_S
    assert limit([5.0] * 9, 0.0) == 5 + 1 + PAUSE_MARGIN_S


def test_pauses_in_which_the_engine_computed_are_of_another_kind() -> None:
    gaps = served([])
    for silent_s in (30.0, 40.0, 35.0):
        gaps.add(silent_s, KNOWN, 1, computed=True, interval_s=1.0)
    assert not gaps.usual.is_known
    assert find_pause_limit(Pause(9.0, KNOWN, 0.0), gaps, TIMEOUT_S)[0] == LONG_SERVICE_LIMIT_S


def test_the_reason_names_the_longest_pause_and_the_witness() -> None:
    gaps = served([5.0] * 9)
    assert (
        "longest pause at comparable load was 6 s"
        in find_pause_limit(Pause(20.0, KNOWN), gaps, TIMEOUT_S)[1]
    )
    assert "used the CPU throughout" in find_pause_limit(Pause(20.0, KNOWN, 19.0), gaps, 120.0)[1]
    assert find_pause_limit(Pause(20.0, PauseDemand(9)), gaps, TIMEOUT_S) == (TIMEOUT_S, "")
