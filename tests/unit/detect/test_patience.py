"""What a silence may last, by the service's history and the processor time.

Tests ``detect/patience.py``.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plimsoll_sidecar.detect.patience import (
    LONG_PAUSE_S,
    LONG_SERVICE_LIMIT_S,
    PAUSE_MARGIN_S,
    SHORT_SERVICE_LIMIT_S,
    Pause,
    PauseHistory,
    find_pause_limit,
)

TIMEOUT_S = 60.0
long_pauses = st.lists(st.floats(LONG_PAUSE_S, TIMEOUT_S), max_size=12)
processor_time = st.none() | st.floats(0.0, 100.0)


def served(pauses: list[float], steps: int = 20) -> PauseHistory:
    """Ten minutes of ``steps`` a second, and ``pauses`` between them, measured to the second."""
    history = PauseHistory()
    for _ in range(600):
        history.add(0.0, steps, interval_s=1.0)
    for silent_s in pauses:
        history.add(silent_s, steps, interval_s=1.0)
    return history


def limit(pauses: list[float], cpu_s: float | None, seconds: float = 20.0) -> float:
    return find_pause_limit(Pause(seconds, cpu_s), served(pauses), TIMEOUT_S)[0]


@given(long_pauses, processor_time, st.floats(0.0, 200.0))
def test_it_is_never_longer_than_the_timeout_nor_shorter_than_a_pause_before(
    pauses: list[float], cpu_s: float | None, seconds: float
) -> None:
    found = limit(pauses, cpu_s, seconds)
    assert found <= TIMEOUT_S
    assert found >= min(TIMEOUT_S, max([*pauses, 0.0]) + PAUSE_MARGIN_S)


@given(long_pauses)
def test_without_its_processor_time_the_timeout_rules(pauses: list[float]) -> None:
    assert find_pause_limit(Pause(20.0), served(pauses), TIMEOUT_S) == (TIMEOUT_S, "")


@given(st.lists(st.floats(LONG_PAUSE_S, 50.0), max_size=12), st.floats(0.0, 3.0))
def test_an_engine_that_computes_is_given_more_time_than_one_that_rests(
    pauses: list[float], little: float
) -> None:
    assert limit(pauses, little) <= limit(pauses, 20.0)


def test_an_engine_that_rests_stalls_by_its_steps_and_by_its_pauses() -> None:
    assert limit([], 0.0) == LONG_SERVICE_LIMIT_S
    assert limit([5.0], 0.0) == 5 + 1 + PAUSE_MARGIN_S
    assert limit([5.0, 12.0], 0.0) == limit([5.0] * 9, 0.0) == SHORT_SERVICE_LIMIT_S
    assert limit([5.0, 25.0], 0.0) == 25 + 1 + PAUSE_MARGIN_S


def test_pauses_in_which_the_engine_computed_are_of_another_kind() -> None:
    history = served([])
    for silent_s in (30.0, 40.0, 35.0):
        history.add(silent_s, computed=True, interval_s=1.0)
    assert find_pause_limit(Pause(9.0, 0.0), history, TIMEOUT_S)[0] == LONG_SERVICE_LIMIT_S


def test_the_reason_names_the_longest_pause_and_the_processor_time() -> None:
    history = served([5.0])
    reason = find_pause_limit(Pause(20.0, 19.0), history, 120.0)[1]
    assert "the longest pause so far was 6 s" in reason
    assert "used the CPU throughout" in reason
