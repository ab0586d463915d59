"""The drawn runs of vLLM: the injector and the clients know all that they name, and each starts.

Tests ``leaklab/recording/vllm_drawn_runs.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from leaklab import clients
from leaklab.recording import engines, loads
from leaklab.recording.engines import Place
from leaklab.recording.run import Injection, Run
from leaklab.recording.vllm_drawn_runs import RUNS
from tests.conformance.peers import ON_DEVICE

PEER = ON_DEVICE["vllm-0.26.0-cuda"]
KNOWN = """
import sys
from plimsoll_injector import DRIVERS, HEALTHY, TAKES
mechanism, driver, beside, ticks = sys.argv[1:]
assert beside in HEALTHY
assert mechanism in HEALTHY if ticks else mechanism in TAKES and driver in DRIVERS
"""


@pytest.mark.parametrize("run", RUNS, ids=[run.name for run in RUNS])
def test_a_run_has_its_command_line_and_shapes_that_clients_know(run: Run, tmp_path: Path) -> None:
    assert {phase.shape for phase in run.load} <= (clients.SHAPES | loads.SHAPES).keys()
    place = Place(tmp_path / run.name, "cuda", True, tmp_path / "inside", tmp_path / "models")
    launched = engines.launch(run, place, PEER)
    line = engines.told(launched.command, place)
    assert line.startswith("vllm serve CHECKPOINT --served-model-name=tiny")
    assert set(run.flags) <= set(launched.command.argv)
    assert launched.command.env[engines.FOLDER_ENV] == str(place.folder)


def test_the_injector_knows_what_each_run_names(tmp_path: Path) -> None:
    engines.install(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for run in RUNS:
        if isinstance(run.cause, Injection):
            ticks = "" if run.cause.bytes else "ticks"
            given = (run.mechanism, run.cause.driver, run.cause.beside or "idle", ticks)
            done = subprocess.run(
                [sys.executable, "-c", KNOWN, *given], env=environment, capture_output=True,
                text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, (run.name, done.stderr)
