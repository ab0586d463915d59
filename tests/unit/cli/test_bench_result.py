"""A benchmark's result is printed and written, the same object both times.

Tests ``bench/result.py``.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "research" / "bench" / "result.py"


def test_a_result_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish = runpy.run_path(str(BENCH))["publish"]

    whole = publish("restart", {"pause_p50_s": 0.5, "device_bytes": None}, [1, 2], tmp_path)

    assert json.loads(capsys.readouterr().out) == whole
    assert json.loads((tmp_path / "restart.json").read_text()) == whole
    assert whole["figures"] == {"pause_p50_s": 0.5}
    assert whole["samples"] == [1, 2]


def test_figures_are_added_to_those_of_another_benchmark(tmp_path: Path) -> None:
    bench = runpy.run_path(str(BENCH))
    first = bench["publish"]("hostile", {"rest_s": 1.0}, {"create": 2}, tmp_path)
    bench["add"]("hostile", "take_over", {"takeover_s": 2.0, "rest_s": 3.0}, tmp_path)
    whole = json.loads((tmp_path / "hostile.json").read_text())
    assert whole["figures"] == {"rest_s": 3.0, "takeover_s": 2.0}
    assert (whole["commit"], whole["date"]) == (first["commit"], first["date"])
    assert whole["samples"]["create"] == 2
    assert set(whole["samples"]["take_over"]) == {"commit", "date", "command"}
