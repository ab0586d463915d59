"""Each result names a command that exists, and the clean commit that it was measured on.

Tests ``bench/result.py``.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
RESULTS = sorted((ROOT / "research" / "bench" / "results").glob("*.json"))
PROGRAMS = ("plimsoll ", "make ", "python .venv/bin/pytest ", "python -m pytest.__main__ ")
UNCLEAN = {
    "abuse", "actions", "detection-trade-off", "gated-product-h100", "leaklab-hours",
    "leaklab-noise", "leaklab-real", "operator_cache", "rank-steps-h100", "rank-sums-h100",
}  # fmt: skip
"""Measured on a tree that no commit has. Take a name out once it is measured again."""


def found(path: Path) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(path.read_bytes())
    return whole


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_names_a_command_that_exists(path: Path) -> None:
    command = found(path).get("command", "python -m bench.leaklab_hours")
    if module := re.match(r"python -m ((?:bench|tests)\.[\w.]+)", command):
        name = module[1].replace(".", "/")
        sources = [ROOT / f"{name}.py", ROOT / "research" / f"{name}.py"]
        assert any(source.is_file() for source in sources), command
    else:
        assert command.startswith(PROGRAMS), command
    if target := re.match(r"make ([\w-]+)", command):
        assert f"\n{target[1]}:" in (ROOT / "Makefile").read_text()
    for test in re.findall(r"tests/[\w/]+\.py", command):
        assert (ROOT / test).is_file(), command


def test_a_result_has_the_clean_commit_that_it_was_measured_on() -> None:
    git = ["git", "-C", str(ROOT)]
    try:
        history = subprocess.run(
            [*git, "rev-list", "HEAD"], capture_output=True, text=True, check=True, timeout=60
        ).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this tree has no history")
    if (ROOT / ".git" / "shallow").exists():
        pytest.skip("this clone has no history")
    commits = {path.stem: str(found(path).get("commit")) for path in RESULTS}
    unclean = {
        name for name, commit in commits.items()
        if not any(known.startswith(commit) for known in history)
    }  # fmt: skip
    assert unclean <= UNCLEAN
