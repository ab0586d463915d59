"""The rig makes recordings of real engines: here of ours, two at once on the CPU.

Tests ``research/leaklab/recording/__main__.py``, ``recorded_run.py`` and ``loads.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from leaklab.recording.split import part
from plimsoll_api import trace

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 15


@pytest.mark.long
def test_two_engines_are_recorded_at_once_with_labels_and_how_it_was_made(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "leaklab.recording", f"--out={tmp_path}", "--prefix=cpu"]
    command += ["--runs", "plimsoll-02", "plimsoll-08", f"--seconds={SECONDS}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    for name, leaks in (("plimsoll-02", True), ("plimsoll-08", False)):
        header, samples = trace.read(tmp_path / f"cpu-{name}.jsonl.gz")
        every = list(samples)
        assert header.name == name
        assert len(every) >= SECONDS // 2
        labels = json.loads((tmp_path / f"cpu-{name}.labels.json").read_bytes())
        about = json.loads((tmp_path / f"cpu-{name}.run.json").read_bytes())
        assert labels["negative"] is not leaks
        assert about["part"] == part(about["mechanism"])
        assert about["clients"]["answered"] > 0
        assert "failed" not in about["clients"], about["last_error"]
        assert str(tmp_path) not in about["command"]
        if leaks:
            (leak,) = labels["leaks"]
            requests = every[-1].load.requests_total, every[0].load.requests_total
            assert requests[0] is not None
            assert requests[1] is not None
            assert leak["counted_bytes"] == 192 * 1024 * (requests[0] - requests[1])
