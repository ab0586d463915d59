"""A wall clock that is set neither ends a wait nor makes one endless."""

from plimsoll_sidecar.clock import SteadyClock


class Clocks:
    def __init__(self) -> None:
        self.wall, self.monotonic = 1_000_000.0, 50.0

    def go(self, seconds: float, step: float = 0.0) -> None:
        self.monotonic += seconds
        self.wall += seconds + step


def test_steps_are_taken_over_only_while_nothing_waits() -> None:
    clocks = Clocks()
    clock = SteadyClock(lambda: clocks.wall, lambda: clocks.monotonic)
    assert clock.now(follow=True) == 1_000_000.0
    for step in (3600.0, -7200.0):
        before = clock.now(follow=False)
        clocks.go(10.0, step)
        assert clock.now(follow=False) == before + 10.0
    assert clock.now(follow=True) == clocks.wall


def test_slewing_is_no_step() -> None:
    clocks = Clocks()
    clock = SteadyClock(lambda: clocks.wall, lambda: clocks.monotonic)
    clocks.go(10.0, 0.1)
    assert clock.now(follow=True) == 1_000_010.0
