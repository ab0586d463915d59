"""The table of the detector's constants comes from a result.

Tests ``docs/tools/sensitivity.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from docs.tools import sensitivity

LEAK = "plimsoll_sidecar.detect.leak"
FIGURES = {
    "runs_count": 91, "families_count": 91, "families_of_all_count": 175, "false_events_count": 2,
    "missed_leaks_count": 1, "false_restarts_count": 0, "false_stalls_count": 0,
    "consumed_p50_ratio": 0.48,
}  # fmt: skip


def row(constant: str, value: float, moved_to: float, **changes: Any) -> dict[str, Any]:
    return {
        "module": f"{LEAK}.trend", "constant": constant, "value": value, "moved_to": moved_to,
        "runs_changed": 0, "failed": None, "false_events": 2, "missed_leaks": 1,
        "false_restarts": 0, "false_stalls": 0, "consumed_p50": 0.48, **changes,
    }  # fmt: skip


def written(folder: Path) -> None:
    moved = [
        row("MIN_TAU", 0.8, 1.04, runs_changed=9, missed_leaks=30, consumed_p50=None),
        row("MIN_TAU", 0.8, 0.56, runs_changed=7, false_events=5, consumed_p50=0.41),
        row("FADING", 0.7, 0.91),
        row("FADING", 0.7, 0.49),
        row("POINTS", 3, 4, runs_changed=2, false_events=1),
        row("BUSIER", 0.5, 0.65, runs_changed=1),
        row("STEPS", 8, 10, failed="IndexError()"),
        row("STEPS", 8, 6),
    ]
    samples = {
        "moved": moved,
        "without_effect": [f"{LEAK}.trend.FADING"],
        "not_movable": {"plimsoll_sidecar.detect.patience.PauseHistory.add(steps)": "why"},
        "not_run": [
            f"{LEAK}.trend.BUSIER to 0.35",
            f"{LEAK}.growth.WIDTHS_S[0] to 1.3",
            f"{LEAK}.growth.WIDTHS_S[0] to 0.7",
        ],
    }
    result = {"commit": "0123456789ab", "figures": FIGURES, "samples": samples}
    (folder / "sensitivity.json").write_text(json.dumps(result))


def test_the_table_tells_differences_and_what_has_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivity, "RESULTS", tmp_path)
    assert sensitivity.table() == sensitivity.NONE
    written(tmp_path)
    lines = sensitivity.table().splitlines()
    assert lines[0].startswith(
        "Unmoved (commit 0123456), on 91 runs of 91 of 175 families: 2 false"
    )
    assert [line for line in lines if line.startswith("| `")] == [
        "| `trend.MIN_TAU` | 0.8 | 0 / +29 / 0 / 0 / – | +3 / 0 / 0 / 0 / −0.07 |",
        "| `trend.POINTS` | 3 | −1 / 0 / 0 / 0 / 0 | rounded to itself |",
        "| `trend.BUSIER` | 0.5 | 0 / 0 / 0 / 0 / 0 | not run |",
        "| `trend.STEPS` | 8 | to 10: the detector fails | no run changes |",
    ]
    assert "Without any effect on these runs: `trend.FADING`." in lines
    assert "Cannot be moved: `patience.PauseHistory.add(steps)`." in lines
    assert sensitivity._unmoved(FIGURES, None).startswith("Unmoved (commit unknown), on 91 runs")
    assert lines[-1] == "Not run: `trend.BUSIER`, `growth.WIDTHS_S[0]`."


def test_only_the_block_of_the_page_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "detection.md"
    monkeypatch.setattr(sensitivity, "RESULTS", tmp_path)
    monkeypatch.setattr(sensitivity, "PAGE", page)
    page.write_text("# A\n\n<!-- figures: sensitivity -->\nold\n<!-- /figures -->\nend\n")
    filled = f"# A\n\n<!-- figures: sensitivity -->\n{sensitivity.NONE}\n<!-- /figures -->\nend\n"
    assert sensitivity.page() == filled
    page.write_text("no place\n")
    assert sensitivity.page() == "no place\n"
