"""The parsers of each kind of input are fuzzed for ten minutes together.

``PLIMSOLL_FUZZ_SECONDS`` makes it shorter or longer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import targets

SECONDS = int(os.environ.get("PLIMSOLL_FUZZ_SECONDS", "600"))
START_S = 300


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    targets.make_models(folder)
    return folder


def test_every_target_is_of_one_kind() -> None:
    assert sorted(name for kind in targets.KINDS for name in kind) == sorted(targets.NAMES)


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 2 * START_S)
@pytest.mark.parametrize(
    ("name", "seconds"),
    [(name, SECONDS // len(kind)) for kind in targets.KINDS for name in kind],
)
def test_fuzzing_finds_nothing(name: str, seconds: int, models: Path) -> None:
    pytest.importorskip("atheris", reason="Atheris has wheels for Linux on x86-64 alone")
    command = [sys.executable, "-m", "tests.fuzz", name, "--seconds", str(seconds), "--models"]
    done = subprocess.run(
        [*command, models], capture_output=True, text=True, errors="replace",
        timeout=seconds + START_S, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, f"see fuzz-findings/{name}:\n{done.stderr[-4000:]}"
    assert "stat::number_of_executed_units" in done.stderr
