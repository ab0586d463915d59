"""The live view: what a frame says, at every width, with much, little and nothing known.

Tests ``local/view.py``.
"""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from plimsoll_api.admin import EngineState, Load, Status
from plimsoll_api.assessment import Assessment, BudgetState, Segment, SlowGrowth
from plimsoll_api.incident_record import Attribution, Reason, StepOutcome, StepRecord
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.state import View
from plimsoll_cli.local.status import Snapshot
from plimsoll_cli.local.view import Screen, SegmentGrowth, TrafficTotals, render_screen
from plimsoll_sidecar.govern.incident import Incident

MIB = 1 << 20
WIDTHS = (60, 100, 160)
POLICY = MemoryPolicy(
    host=MemoryBudget(growth_bytes=256 * MIB, window_s=3600.0),
    device=MemoryBudget(growth_bytes=64 * MIB, window_s=3600.0),
)
ASSESSMENT = Assessment(
    t=90.0,
    epoch=1,
    warm=True,
    segments={Segment.PYTHON_OBJECTS: 90 * MIB, Segment.ANONYMOUS_OTHER: 700 * MIB},
    host=BudgetState(
        current=900 * MIB, baseline=708 * MIB, explained=0, unexplained=192 * MIB,
        consumed_ratio=0.75, bytes_per_s=6.0 * MIB, exhaustion_s=11.0,
    ),
)  # fmt: skip
INCIDENT = Incident(
    name="leaky-1a2b3c4d",
    kind=IncidentKind.HOST_GROWTH,
    epoch="3f9c21d0:1",
    opened_at=1_700_000_000.0,
    phase=IncidentPhase.RESOLVED,
    reason=Reason.WORKER_RESTART,
    attribution=Attribution(segment="python_objects", bytes=200 * MIB, bytes_per_s=6.0 * MIB),
    timeline=[
        StepRecord(time=1_700_000_001.0, step="Trim", outcome=StepOutcome.SUCCEEDED),
        StepRecord(
            time=1_700_000_009.0,
            step="WorkerRestart",
            outcome=StepOutcome.SUCCEEDED,
            before_bytes=910 * MIB,
            after_bytes=705 * MIB,
            message="8 requests carried over; this goes on for much longer than any terminal is",
        ),
    ],
)


def view(**changes: object) -> View:
    whole = View(
        time=1_700_000_010.0,
        service="leaky",
        mode="Recover",
        engine_state="serving",
        epoch="3f9c21d0:2",
        assessment=ASSESSMENT,
        budgets=msgspec.Raw(b"{}"),
        open=[],
        recent=[INCIDENT],
        restarts_left=2,
        restart_budget_exhausted=False,
        journal_error=None,
        config_error=None,
    )
    return msgspec.structs.replace(whole, **changes)


STATUS = Status(
    state=EngineState.SERVING,
    epoch="3f9c21d0:2",
    version="0.1.0",
    model="leaky",
    uptime_s=100.0,
    load=Load(running=8, waiting=0),
    injections=["request_cycle"],
)


def screen(**changes: object) -> Screen:
    snapshot = Snapshot(view(**changes), STATUS, tokens_per_s=123.4)
    traffic = TrafficTotals(streams=8, answered=40, longest_gap_s=1.26)
    return Screen("leaky", POLICY, snapshot, {Segment.PYTHON_OBJECTS: 64 * MIB}, traffic)


def draw(shown: Screen, width: int, ascii_only: bool = False) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), color_system=None)
    console.print(render_screen(shown, width, ascii_only))
    return console.export_text()


def test_a_replica_that_is_out_of_service_says_so() -> None:
    assert "out of service" not in draw(screen(), 120)
    assert "out of service: manual" in draw(screen(out_of_service={"manual": 1.7e9}), 120)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_frame_fits_and_says_what_matters(width: int) -> None:
    text = draw(screen(), width)

    assert all(len(line) <= width for line in text.splitlines())
    for wanted in ("serving", "3f9c21d0:2", "Recover", "75%", "python_objects", "123 tokens/s"):
        assert wanted in text
    assert "8 concurrent streams: 40 answered" in text.replace("\n", " ")
    assert "WorkerRestart Succeeded" in text
    assert "Resolved (WorkerRestart)" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_the_bar_is_filled_to_the_share_of_the_budget(width: int) -> None:
    line = next(li for li in draw(screen(), width, ascii_only=True).splitlines() if "75%" in li)

    filled, empty = line.count("#"), line.count(".")
    assert filled / (filled + empty) == pytest.approx(0.75, abs=0.07)


def test_a_wide_terminal_shows_the_growth_rate() -> None:
    assert "6.0 MiB/s" in draw(screen(), 160)


def test_plain_text_is_ascii_only() -> None:
    assert draw(screen(), 100, ascii_only=True).isascii()


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_known_is_a_frame_too(width: int) -> None:
    text = draw(Screen("leaky", POLICY), width)

    assert "waiting for the first answer of the supervisor" in text
    assert "the engine does not answer" not in text, "nobody has asked it"


def test_unknown_is_shown_as_unknown_and_not_as_zero() -> None:
    cold = Assessment(t=1.0, epoch=1, warm=False, host=BudgetState(current=700 * MIB))
    text = draw(screen(assessment=cold, recent=[]), 100)

    assert "warming up / 256 MiB" in text
    assert "0%" not in text
    assert "no incidents" in text


def test_troubles_of_the_supervisor_are_shown() -> None:
    text = draw(screen(journal_error="journal /x: disk is full"), 100)

    assert "journal /x: disk is full" in text


def test_growth_counts_from_the_end_of_each_epochs_warm_up() -> None:
    growth = SegmentGrowth()
    cold = msgspec.structs.replace(ASSESSMENT, warm=False)
    grown = msgspec.structs.replace(
        ASSESSMENT, segments={Segment.PYTHON_OBJECTS: 95 * MIB, Segment.SHARED: MIB}
    )
    renewed = msgspec.structs.replace(grown, epoch=2)

    assert growth.update(cold) == {}
    assert growth.update(ASSESSMENT)[Segment.PYTHON_OBJECTS] == 0
    assert growth.update(grown) == {Segment.PYTHON_OBJECTS: 5 * MIB, Segment.SHARED: 0}
    assert growth.update(renewed)[Segment.PYTHON_OBJECTS] == 0


def test_a_slow_leak_has_its_line() -> None:
    leak = SlowGrowth(slow_leak=True, bytes_per_s=4000.0)
    seen = msgspec.structs.replace(ASSESSMENT, slow={"device": leak, "host": SlowGrowth()})
    lines = [line for line in draw(screen(assessment=seen), 160).splitlines() if "slow" in line]
    assert [line.strip() for line in lines] == [
        "slow leak: device memory grows by 14.0 MiB an hour, and no memory limit is known"
    ]
