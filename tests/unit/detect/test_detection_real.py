"""What is published of recordings of real engines.

Tests ``bench/detection_real.py`` and ``bench/detection_real_rules.py``.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.baselines import BASELINES
from bench.detection_real import (
    compared,
    judged,
    judged_by,
    kept,
    median_interval,
    summary,
    told,
    tuned,
)
from bench.detection_real_rules import blank, curves, device_bytes, host_bytes, ruled
from leaklab.recording.labels import Labels, Leak
from leaklab.recording.published import Recording
from leaklab.recording.verdicts import false_actions
from leaklab.series import GIB, MIB, Series, steady
from plimsoll_api.trace import (
    Budgets,
    Device,
    EngineInfo,
    Header,
    Host,
    Limits,
    Sample,
    Torch,
    TraceBudget,
)
from plimsoll_cli.figures import make_result
from plimsoll_sidecar.replay import ReplayLine, TraceWriter

STARTS = 200.0
RATE = 1.0 * MIB


def recorded(folder: Path, series: Series, *leaks: Leak, shared: bool = False) -> Recording:
    budget = TraceBudget(256 * MIB, 3600.0)
    header = Header(
        trace=1, name="a", engine=EngineInfo("vllm"), started_at="2026-01-01T00:00:00Z",
        interval_s=1.0, limits=Limits(6 * GIB), budget=Budgets(host=budget, device=budget),
        warmup_s=60.0, shared_device=shared,
    )  # fmt: skip
    with closing(TraceWriter(folder / "a.jsonl.gz", header)) as writer:
        for sample in series.samples():
            writer.write(sample)
    about: dict[str, Any] = {
        "engine": "vllm", "version": "0.1", "mechanism": "heap_blocks", "part": "seen",
        "recorded_s": series.duration, "budget_bytes": 256 * MIB,
        "machine": {"memory_bytes": 16 * GIB}, "date": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    return Recording(
        "a", folder / "a.jsonl.gz", Labels(list(leaks), not leaks, "a recording"), about
    )


def leak(kind: str = "HostGrowth", segment: str = "malloc_in_use", rate: float = RATE) -> Leak:
    return Leak(STARTS, 600.0, kind, segment, rate, "heap_blocks", int(400 * rate))


LEAKING = Series(duration=600, leak=steady(RATE, STARTS), noise=2 * MIB)


def test_a_leak_that_is_found_counts_with_its_delay_and_segment(tmp_path: Path) -> None:
    row = judged(recorded(tmp_path, LEAKING, leak()))
    assert row.spent_s == 256
    assert row.verdict.delay_s is not None
    assert 30 < row.verdict.delay_s < 256
    assert (row.verdict.segment_right, row.verdict.false, row.verdict.actions) == (True, 0, 0)
    figures = summary([row])
    assert figures["precision_ratio"] == figures["recall_ratio"] == 1.0
    assert figures["confirm_p50_s"] == row.verdict.delay_s
    assert (figures["confirm_leaks_count"], figures["healthy_recordings_count"]) == (1, 0)


def test_the_same_without_a_label_is_a_false_event_and_a_false_restart(tmp_path: Path) -> None:
    row = judged(recorded(tmp_path, LEAKING))
    assert (row.verdict.leak, row.verdict.delay_s, row.verdict.false) == (False, None, 1)
    assert row.verdict.actions == 1
    figures = summary([row])
    assert figures["precision_ratio"] == 0.0
    assert figures["recall_ratio"] is figures["confirm_p50_s"] is None
    assert told(row)["wrong"] == ("malloc_in_use",)


def test_a_restart_for_another_kind_is_false_although_something_leaks() -> None:
    def line(event: str, t: float, name: str, kind: str | None, action: str | None) -> ReplayLine:
        return ReplayLine(event=event, t=t, id=name, kind=kind, action=action)

    lines = [
        line("incident", 210.0, "host", "HostGrowth", None),
        line("remediation", 215.0, "host", None, "Trim"),
        line("remediation", 220.0, "host", None, "WorkerRestart"),
        line("incident", 230.0, "device", "DeviceGrowth", None),
        line("remediation", 240.0, "device", None, "WorkerRestart"),
        line("remediation", 150.0, "host", None, "WorkerRestart"),
    ]
    assert false_actions(Labels([leak()], False, ""), lines) == 2


def test_leaks_that_take_longer_than_ten_minutes_count_apart(tmp_path: Path) -> None:
    slow = judged(recorded(tmp_path, LEAKING, leak(rate=0.1 * MIB)))
    fast = judged(recorded(tmp_path, LEAKING, leak()))
    figures = summary([slow, fast])
    assert (figures["confirm_leaks_count"], figures["confirm_every_leaks_count"]) == (1, 2)


def test_rules_see_each_life_of_the_engine_and_both_memories(tmp_path: Path) -> None:
    series = Series(
        duration=600, leak=steady(RATE, STARTS), segment="torch_allocated", device=True,
        epoch=lambda t: 1 + int(t >= 300), noise=0.0,
    )  # fmt: skip
    found = curves(recorded(tmp_path, series, leak("DeviceGrowth")))
    assert [one.kind for one in found] == ["HostGrowth", "DeviceGrowth"] * 2
    assert [one.t[0] for one in found] == [0.0, 0.0, 300.0, 300.0]
    assert {one.limit for one in found if one.kind == "HostGrowth"} == {16.0 * GIB}
    grown = found[1].sizes[-1] - found[1].sizes[150]
    assert grown == pytest.approx(100 * MIB, rel=0.05)


def test_a_rule_is_right_after_the_leak_began_and_wrong_elsewhere(tmp_path: Path) -> None:
    recording = recorded(tmp_path, LEAKING, leak())
    seen = curves(recording)
    steep = BASELINES["slope_10mb_h"]
    verdict = ruled(recording, seen, steep, 300.0)
    assert verdict.delay_s is not None
    assert 0 <= verdict.delay_s <= 400
    assert ruled(recording, seen, BASELINES["never"], None) == blank(recording)
    always = ruled(recording, seen, BASELINES["always"], None)
    assert (always.delay_s, always.false, always.actions) == (None, 1, 1)
    row = judged(recording)
    row.others = {name: ruled(recording, seen, BASELINES["always"], None) for name in BASELINES}
    assert summary([row])["adwin_false_events_count"] == 1
    assert told(row)["others"]["adwin"] == {"delay_s": None, "false": 1}


def test_parameters_are_kept_by_what_was_published_of_them() -> None:
    steep = BASELINES["slope_10mb_h"].choices
    published = {"slope_10mb_h": repr(steep[1]), "slope_10mb_h_seen": repr(steep[2])}
    choices = kept({"baselines": published})
    assert choices == {"": {"slope_10mb_h": 1}, "_seen": {"slope_10mb_h": 2}}


def test_a_median_has_the_interval_of_its_order_statistics() -> None:
    assert median_interval(range(5)) is None
    assert median_interval(range(6)) == (0, 5)
    assert median_interval(range(20)) == (5, 14)


def test_another_tree_judges_a_recording_in_a_process_of_its_own(tmp_path: Path) -> None:
    recording = recorded(tmp_path, LEAKING, leak())
    row = judged(recording)
    row.others = {"at_3808e1c": judged_by(Path(__file__).parents[3], recording)}
    assert row.others["at_3808e1c"] == row.verdict
    figures = summary([row])
    assert figures["at_3808e1c_confirm_p50_s"] == figures["confirm_p50_s"]
    assert figures["at_3808e1c_false_actions_count"] == 0
    assert make_result("detection-real", figures, [], None)["figures"], "each key carries its unit"


def test_rules_are_tuned_on_recordings_too(tmp_path: Path) -> None:
    """Only a window of minutes can find a leak of minutes."""
    recording = recorded(tmp_path, LEAKING, leak())
    choice = tuned([recording])
    assert set(choice) == set(BASELINES)
    assert BASELINES["slope_10mb_h"].choices[choice["slope_10mb_h"]] == 300.0
    verdicts = compared(recording, {"": {"slope_10mb_h": 3}, "_seen": choice})
    assert verdicts["slope_10mb_h"].delay_s is None
    assert verdicts["slope_10mb_h_seen"].delay_s is not None


def test_what_is_unknown_is_no_point_of_a_curve(tmp_path: Path) -> None:
    assert host_bytes(Sample(t=1.0, epoch=1)) is None
    assert host_bytes(Sample(t=1.0, epoch=1, host=Host(rss_anon=0))) == 0
    assert host_bytes(Sample(t=1.0, epoch=1, host=Host(rss_anon=9, rss_shmem=2))) == 11
    assert host_bytes(Sample(t=1.0, epoch=1, host=Host(rss_anon=9, cgroup_anon=7))) == 7
    device = [Device(0, used=100, torch=Torch(reserved=10)), Device(1, used=50)]
    assert device_bytes(Sample(t=1.0, epoch=1, device=device), shared=False) == 150
    assert device_bytes(Sample(t=1.0, epoch=1, device=device), shared=True) is None
    assert device_bytes(Sample(t=1.0, epoch=1), shared=False) is None
    (host,) = curves(recorded(tmp_path, Series(duration=300, interval=1.0)))
    assert host.kind == "HostGrowth"
    assert np.diff(host.t) == pytest.approx(1.0)
