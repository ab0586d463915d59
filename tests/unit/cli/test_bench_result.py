"""A benchmark's result is printed and written, the same object both times.

Tests ``bench/result.py``.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench" / "result.py"


def test_a_result_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish = runpy.run_path(str(BENCH))["publish"]

    whole = publish("restart", {"pause_p50_s": 0.5, "device_bytes": None}, [1, 2], tmp_path)

    assert json.loads(capsys.readouterr().out) == whole
    assert json.loads((tmp_path / "restart.json").read_text()) == whole
    assert whole["figures"] == {"pause_p50_s": 0.5}
    assert whole["samples"] == [1, 2]
