"""What was stated of suspicions beside what was true.

Tests ``bench/calibration.py`` and ``sidecar/plimsoll_sidecar/replay.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import calibration
from bench.calibration import Claim, Listener, Stated, bins, expected_error
from bench.calibration_plot import NAME, draw
from leaklab.cases import Case
from leaklab.series import MIB, Series, saturating, steady
from leaklab.splits import Split
from plimsoll_api.incident_record import Attribution
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.supervision import Mode, Supervision
from plimsoll_sidecar.govern.command import Event, EventType
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.replay import ReplayLine, make_line, replay_samples


def case(starts: float | None = 100.0) -> Case:
    return Case("a", "leak a", Split.DEVELOPMENT, Series(duration=1), "HostGrowth", starts)


def line(event: str, t: float, confidence: float, kind: str = "HostGrowth") -> ReplayLine:
    return ReplayLine(event=event, t=t, id="i", kind=kind, confidence=confidence)


def heard(about: Case, *lines: ReplayLine) -> list[Stated]:
    listener = Listener(about)
    for one in lines:
        listener.hear(one)
    return list(listener.stated.values())


def test_a_suspicion_counts_when_it_opens_and_when_it_is_decided() -> None:
    (one,) = heard(case(), line("incident", 50.0, 0.4), line("confirmed", 150.0, 0.9))
    assert (one.opened, one.last, one.end) == (Claim(0.4, False), Claim(0.9, True), "confirmed")
    later = [line("confirmed", 160.0, 0.7), line("cleared", 200.0, 0.8)]
    (one,) = heard(case(), line("incident", 150.0, 0.5), *later)
    assert (one.last, one.end) == (Claim(0.7, True), "confirmed"), "the first decision counts"


def test_what_is_of_no_leak_was_not_true() -> None:
    (one,) = heard(case(None), line("incident", 150.0, 0.4), line("cleared", 200.0, 0.6))
    assert (one.opened.true, one.last) == (False, Claim(0.6, False))
    (one,) = heard(case(), line("incident", 150.0, 0.4, "DeviceGrowth"))
    assert (one.opened.true, one.last, one.end) == (False, None, None)
    assert heard(case(), line("incident", 150.0, 1.0, "Stall")) == []


def test_the_error_is_the_distance_of_stated_and_true_weighed_by_counts() -> None:
    """Values worked out by hand: .75 stated and .5 true of four, .25 stated and 1 true of one."""
    claims = [Claim(0.75, index < 2) for index in range(4)] + [Claim(0.25, True)]
    assert expected_error(claims) == pytest.approx((4 * 0.25 + 0.75) / 5)
    low, high = bins(claims)
    assert (low.low, low.count, low.true, high.low, high.count, high.true) == (0.2, 1, 1, 0.7, 4, 2)
    assert high.interval == pytest.approx((0.15, 0.85), abs=0.01)
    assert [one.low for one in bins([Claim(1.0, True), Claim(0.0, False)])] == [0.0, 0.9]
    assert expected_error([]) is None


def test_the_figures_tell_what_is_confirmed_apart() -> None:
    stated = [
        Stated("a", "HostGrowth", Claim(0.6, True), Claim(0.9, True), "confirmed"),
        Stated("b", "HostGrowth", Claim(0.6, False), Claim(0.6, False), "cleared"),
        Stated("c", "HostGrowth", Claim(0.6, False)),
    ]
    told = calibration.figures(stated)
    assert told["calibration_suspicions_count"] == 2
    assert told["calibration_opened_suspicions_count"] == 3
    assert told["calibration_confirmed_ece_ratio"] == pytest.approx(0.1)
    assert told["calibration_ece_ratio"] == pytest.approx((0.1 + 0.6) / 2)
    assert calibration.figures([])["calibration_ece_ratio"] is None
    table = calibration.table(stated)
    assert [(row["count"], row["true"]) for row in table["last"]] == [(1, 0), (1, 1)]


def test_the_plot_is_drawn_also_of_nothing(tmp_path: Path) -> None:
    for stated in ([], [Stated("a", "HostGrowth", Claim(0.6, True), Claim(0.9, True), "cleared")]):
        draw(stated, tmp_path)
        assert (tmp_path / NAME).read_bytes().startswith(b"\x89PNG")


def burst(t: float) -> float:
    """Memory that grows for 80 s, and is given back."""
    return 2 * MIB * max(0.0, t - 120) if t < 200 else 0.0


@pytest.mark.parametrize(
    ("series", "end"),
    [
        (Series(duration=300, leak=steady(400e6 / 60, 120)), "confirmed"),
        (Series(duration=600, other=burst), "ended"),
        (Series(duration=7200, other=saturating(200 * MIB, 900)), "still-open"),
    ],
)
def test_a_replay_states_its_confidence_to_the_end(series: Series, end: str) -> None:
    memory = MemoryPolicy(host=MemoryBudget(512 * MIB, 86400.0), warmup_s=60.0)
    run = Case("a", "leak a", Split.DEVELOPMENT, series, "HostGrowth", 120.0)
    lines = replay_samples(series.samples(), memory, Supervision(mode=Mode.RECOVER), 1.0, "a")
    stated = heard(run, *(one for one in lines if isinstance(one, ReplayLine)))
    assert stated[0].end == end
    assert stated[0].last is not None
    assert all(0 < one.confidence <= 1 for one in (stated[0].opened, stated[0].last))


@pytest.mark.parametrize(("confirmed_at", "told"), [(None, "ended"), (150.0, None)])
def test_an_end_is_told_of_what_was_not_confirmed(
    confirmed_at: float | None, told: str | None
) -> None:
    """As after a trim that happened to be followed by less memory."""
    incident = Incident(
        name="i", kind=IncidentKind.HOST_GROWTH, epoch="e", opened_at=100.0, phase_since=100.0,
        phase=IncidentPhase.RESOLVED, confirmed_at=confirmed_at, message="the trim returned 5 MiB",
        attribution=Attribution(confidence=0.7),
    )  # fmt: skip
    ended = make_line(Event(type=EventType.ENDED, at=200.0, incident=incident), 200.0)
    assert (ended.event if ended else None) == told
    if ended is not None:
        assert ended.reason == "the trim returned 5 MiB"
        (one,) = heard(case(), line("incident", 150.0, 0.4), ended)
        assert (one.last, one.end) == (Claim(0.7, True), "ended")
