"""What a replay's events mean beside the labels."""

from __future__ import annotations

from leaklab.recording.labels import Labels, Leak
from leaklab.recording.verdicts import judge
from plimsoll_sidecar.replay import ReplayLine

LEAK = Leak(100.0, 400.0, "HostGrowth", "malloc_in_use", 1e6, "heap_blocks", 300_000_000)
LEAKING, HEALTHY = Labels([LEAK], False, "n"), Labels([], True, "n")


def line(event: str, t: float, kind: str = "HostGrowth", name: str = "a") -> ReplayLine:
    return ReplayLine(event=event, t=t, id=name, kind=kind, segment="shared")


def test_a_confirmation_counts_from_the_start_of_the_leak() -> None:
    found = judge(LEAKING, [line("incident", 150.0), line("confirmed", 190.0)])
    assert (found.confirm_s, found.segment, found.wrong, found.suspected) == (
        90.0,
        "shared",
        (),
        (),
    )
    assert found.told(LEAKING) == "confirmed: `shared`"


def test_a_confirmation_of_another_kind_or_before_the_leak_is_wrong() -> None:
    for event in (line("confirmed", 190.0, "DeviceGrowth"), line("confirmed", 90.0)):
        found = judge(LEAKING, [event])
        assert (found.confirm_s, found.wrong) == (None, ("shared",))


def test_a_suspicion_alone_is_told_as_such() -> None:
    found = judge(HEALTHY, [line("incident", 150.0)])
    assert found.told(HEALTHY) == "suspected only: `shared`"


def test_silence_is_right_of_a_healthy_run_and_a_miss_of_a_leak() -> None:
    crash = [line("incident", 150.0, "EngineCrash")]
    assert judge(HEALTHY, crash).told(HEALTHY) == "nothing"
    assert judge(LEAKING, []).told(LEAKING) == "**missed**"
