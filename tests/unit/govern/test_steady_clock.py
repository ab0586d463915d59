"""A wall clock that is set neither ends a wait nor makes one endless, nor gives restarts back.

Tests ``plimsoll_sidecar/clock.py`` and ``govern/state.py``.
"""

import pytest

from plimsoll_api.incidents import IncidentKind
from plimsoll_api.supervision import RestartBudget
from plimsoll_sidecar.clock import ClockReading, SteadyClock
from plimsoll_sidecar.govern import restart_budget
from plimsoll_sidecar.govern.restart_budget import Restart
from plimsoll_sidecar.govern.state import Cooldown, GovernorState, shift_times

HOURS = 3600.0


class Clocks:
    def __init__(self) -> None:
        self.wall, self.boottime, self.boot = 1_000_000.0, 50.0, "boot-1"

    def go(self, seconds: float, step: float = 0.0) -> None:
        self.boottime += seconds
        self.wall += seconds + step

    def steady(self, then: ClockReading | None = None) -> SteadyClock:
        return SteadyClock(then, lambda: self.wall, lambda: self.boottime, lambda: self.boot)


def test_steps_are_taken_over_only_on_request() -> None:
    clocks = Clocks()
    clock = clocks.steady()
    assert clock.now() == 1_000_000.0
    for step in (3600.0, -7200.0):
        before = clock.now()
        clocks.go(10.0, step)
        assert clock.now() == before + 10.0
    assert clock.apply_step() == -3600.0
    assert clock.now() == clocks.wall
    assert clock.apply_step() == 0.0


def test_slewing_is_no_step() -> None:
    clocks = Clocks()
    clock = clocks.steady()
    clocks.go(10.0, 0.1)
    assert clock.apply_step() == 0.0
    assert clock.now() == 1_000_010.0


@pytest.mark.parametrize("step", [5 * HOURS, -5 * HOURS])
def test_a_new_supervisor_goes_on_with_the_old_ones_time(step: float) -> None:
    clocks = Clocks()
    then = clocks.steady().read()
    clocks.go(30.0, step)
    clock = clocks.steady(then)
    assert clock.now() == 1_000_030.0, "an incident that is open waits on as before"
    assert clock.apply_step() == step
    assert clock.now() == clocks.wall


def test_after_a_reboot_the_wall_clock_is_all_there_is() -> None:
    clocks = Clocks()
    then = clocks.steady().read()
    clocks.boot, clocks.boottime, clocks.wall = "boot-2", 5.0, 1_003_600.0
    assert clocks.steady(then).now() == 1_003_600.0
    clocks.boot = ""
    assert clocks.steady(ClockReading(1.0, 1.0, "")).now() == 1_003_600.0


@pytest.mark.parametrize("step", [5 * HOURS, -5 * HOURS])
def test_a_step_changes_no_window_and_no_back_off(step: float) -> None:
    now, policy = 1_000_000.0, RestartBudget(count=1, window_s=HOURS)
    state = GovernorState(
        restarts=[Restart(at=now - 10.0, epoch="ab:0")],
        cooldowns={IncidentKind.STALL: Cooldown(until=now + 60.0)},
    )
    assert restart_budget.count_remaining_restarts(state.restarts, policy, now) == 0
    shift_times(state, step)
    assert restart_budget.count_remaining_restarts(state.restarts, policy, now + step) == 0
    assert restart_budget.count_remaining_restarts(state.restarts, policy, now + step + HOURS) == 1
    assert state.cooldowns[IncidentKind.STALL].until == now + step + 60.0
