"""``tests/durations.py``: what a run writes of its files, and what two runs differ by."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import durations

SAMPLE = """
import subprocess, sys
from pathlib import Path

BURN = "import time\\nend = time.process_time() + 0.4\\nwhile time.process_time() < end: pass"

def test_a_child_costs():
    subprocess.run([sys.executable, "-c", BURN], check=True)

def test_the_second_time():
    once = Path(__file__).with_suffix(".once")
    if not once.exists():
        once.touch()
        raise AssertionError("nobody was there yet")
"""


def test_a_run_writes_what_its_files_cost_and_what_ran_twice(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "conftest.py").write_text(
        "from pathlib import Path\nfrom tests.durations import Durations\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(Durations(Path('durations.json').absolute()))\n"
    )
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {durations.ROOT}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--reruns=1"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    run = json.loads((tmp_path / "durations.json").read_text())
    assert run["files"]["test_sample.py"]["tests"] == 2
    assert 0.4 <= run["files"]["test_sample.py"]["cpu_s"] < 5.0
    why = run["reruns"]["test_sample.py::test_the_second_time"]
    assert why == "AssertionError: nobody was there yet"


def test_the_difference_names_what_became_dearer_and_sums_the_tiers() -> None:
    record = {
        "files": {
            "tests/unit/a/test_a.py": {"tests": 1, "cpu_s": 10.0, "wall_s": 1.0},
            "tests/unit/a/test_b.py": {"tests": 1, "cpu_s": 10.0, "wall_s": 1.0},
            "tests/node/test_not_run.py": {"tests": 1, "cpu_s": 99.0, "wall_s": 1.0},
        },
        "reruns": {},
    }
    run = {
        "files": {
            "tests/unit/a/test_a.py": {"tests": 2, "cpu_s": 14.0, "wall_s": 1.0},
            "tests/unit/a/test_b.py": {"tests": 1, "cpu_s": 10.5, "wall_s": 1.0},
        },
        "reruns": {"tests/unit/a/test_a.py::test": "TimeoutError"},
    }
    text = durations.diff(run, record)
    assert "+4.0    10.0 ->   14.0 CPU s    1 ->   2 tests  tests/unit/a/test_a.py" in text
    assert "test_b.py" not in text
    assert "in all                    20 ->      24 CPU s" in text
    assert "passed only when run again: tests/unit/a/test_a.py::test: TimeoutError" in text


def test_a_part_of_the_run_leaves_the_rest_of_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = {"tests": 1, "cpu_s": 9.0, "wall_s": 9.0}
    here, other = "tests/unit/test_durations.py", "tests/unit/test_layout.py"
    record, run = tmp_path / "record.json", tmp_path / "run.json"
    dear = {f"{here}::old": 9.0, f"{other}::test": 9.0}
    record.write_text(json.dumps({"files": {here: cost, other: cost}, "dear": dear, "reruns": {}}))
    run.write_text(json.dumps({"files": {here: cost | {"cpu_s": 2.0}}, "dear": {}, "reruns": {}}))
    monkeypatch.setattr(durations, "RECORD", record)
    assert durations.main(["keep", str(run)]) == 0
    kept = json.loads(record.read_text())
    assert kept["files"] == {here: cost | {"cpu_s": 2.0}, other: cost}
    assert kept["dear"] == {f"{other}::test": 9.0}
