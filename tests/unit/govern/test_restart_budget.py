"""The restart budget as arithmetic on a list.

Tests ``govern/restart_budget.py``.
"""

from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.supervision import RestartBudget
from plimsoll_sidecar.govern.restart_budget import (
    MAX_STORED_RESTARTS,
    Restart,
    count_remaining_restarts,
    record_restart,
    withdraw_restart,
)

POLICY = RestartBudget(count=2, window_s=100.0)


def test_a_restart_leaves_the_window() -> None:
    restarts: list[Restart] = []
    record_restart(restarts, Restart(at=0.0, epoch="a:1"), POLICY)
    record_restart(restarts, Restart(at=50.0, epoch="a:2"), POLICY)
    assert count_remaining_restarts(restarts, POLICY, 60.0) == 0
    assert count_remaining_restarts(restarts, POLICY, 100.0) == 1
    assert count_remaining_restarts(restarts, POLICY, 150.0) == 2


def test_one_epoch_ends_once() -> None:
    restarts: list[Restart] = []
    record_restart(restarts, Restart(at=0.0, epoch="a:1", operation_id="x"), POLICY)
    record_restart(restarts, Restart(at=1.0, epoch="a:1"), POLICY)
    assert [restart.operation_id for restart in restarts] == ["x"]


def test_a_refused_restart_is_given_back() -> None:
    restarts: list[Restart] = []
    record_restart(restarts, Restart(at=0.0, epoch="a:1", operation_id="x"), POLICY)
    withdraw_restart(restarts, "a:1")
    assert count_remaining_restarts(restarts, POLICY, 0.0) == 2


def test_a_clock_that_is_set_back_gives_nothing_away() -> None:
    restarts = [Restart(at=1_000.0, epoch="a:1"), Restart(at=1_001.0, epoch="a:2")]
    assert count_remaining_restarts(restarts, POLICY, 5.0) == 0


@given(st.lists(st.floats(0, 1e6), max_size=50), st.integers(0, 5), st.floats(1, 1e5))
def test_never_more_than_the_count_is_allowed_in_any_window(
    times: list[float], count: int, window_s: float
) -> None:
    policy = RestartBudget(count=count, window_s=window_s)
    restarts: list[Restart] = []
    begun: list[float] = []
    for number, now in enumerate(sorted(times)):
        if count_remaining_restarts(restarts, policy, now) > 0:
            record_restart(restarts, Restart(at=now, epoch=f"b:{number}"), policy)
            begun.append(now)
    for start in begun:
        assert sum(1 for at in begun if start <= at and at - start < window_s) <= count


def test_a_crash_loop_does_not_grow_without_bound() -> None:
    policy = RestartBudget(count=3, window_s=1e9)
    restarts: list[Restart] = []
    for number in range(2 * MAX_STORED_RESTARTS):
        record_restart(restarts, Restart(at=float(number), epoch=f"c:{number}"), policy)
    assert len(restarts) == MAX_STORED_RESTARTS
