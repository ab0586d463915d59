"""The figures of ``detection.py`` from what was said of each run: pure."""

from __future__ import annotations

from typing import Any

from bench import calibration
from bench.calibration import Stated
from bench.detection_score import figures
from leaklab.cases import USUAL_PAUSE_S
from plimsoll_cli.figures import compute_percentile


def summary(results: list[Any], choice: dict[str, int]) -> dict[str, float | int | None]:
    verdicts = [told.verdict for told, _ in results]
    asked = [v for v in verdicts if v.family.startswith("trigger ")]
    growth = [v for v in verdicts if not v.family.startswith(("stall ", "trigger "))]
    told = figures(growth)
    for name, key in (
        ("fast", "fast_leak_confirm"),
        ("slow", "slow_leak_confirm"),
        ("recorded", "slow_leak_recorded_confirm"),
    ):
        found = [v for v in growth if v.family == f"leak named {name}" and v.delay_s is not None]
        told[f"{key}_s"] = compute_percentile([v.delay_s or 0.0 for v in found], 0.95)
        told[f"{key}_bytes"] = compute_percentile([v.leaked or 0.0 for v in found], 0.95)
    for key, right in (
        ("trigger_top1_ratio", [v.trigger_right for v in asked]),
        ("trigger_at_confirm_ratio", [v.trigger_at_confirm for v in asked]),
    ):
        told[key] = sum(map(bool, right)) / len(right) if right else None
    hangs = [v for v in verdicts if v.family.startswith("stall ") and v.delay_s is not None]
    for key, silent in (("stall_detect", False), ("stall_detect_frontend", True)):
        delays = [v.delay_s or 0.0 for v in hangs if (v.family == "stall frontend") is silent]
        told[f"{key}_s"] = compute_percentile(delays, 0.95)
    told["stall_usual_pause_s"] = USUAL_PAUSE_S
    told |= calibration.figures(all_stated(results))
    told["stalls_missed_count"] = sum(
        v.family.startswith("stall ") and v.delay_s is None for v in verdicts
    )
    told["stalls_false_count"] = sum(v.false_stalls for v in verdicts)
    for name, number in choice.items():
        mine = [v for _, others in results for n, c, v, _ in others if (n, c) == (name, number)]
        told |= figures(mine, f"{name}_")
    return told


def all_stated(results: list[Any]) -> list[Stated]:
    return [stated for told, _ in results for stated in told.stated]


def report(results: list[Any], choice: dict[str, int]) -> None:
    """Each run that went wrong, then the figures."""
    for told, _ in results:
        v, times = told.verdict, told.times
        wrong = v.false or v.actions or (v.leak and v.delay_s is None) or v.segment_right is False
        if (
            wrong
            or (v.consumed or 0) > 0.5
            or v.family.startswith(("leak named", "stall"))
            or v.trigger_right is False
        ):
            print(v, [round(t) for t in times])
    for key, value in summary(results, choice).items():
        print(f"{key:45} {value}")
