"""Sums through memory that two devices map, one process each (``tests/devices_summing.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

DEVICES = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(
    DEVICES < 2, reason=f"{DEVICES} CUDA devices: sums over ranks need two"
)
TIMEOUT_S = 180


def run(check: str, folder: Path, **env: str) -> list[str]:
    """The output of both ranks, which ended well."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.devices_summing", check, str(rank), "2",
             str(folder / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | env,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        texts = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)
    return texts


def test_right_the_same_on_both_in_graphs_and_given_back(tmp_path: Path) -> None:
    run("all", tmp_path)


def test_nccl_sums_where_one_device_cannot_reach_the_other(tmp_path: Path) -> None:
    texts = run("no_access", tmp_path)
    assert "cannot access the memory of device 0" in texts[1]


@pytest.mark.parametrize("kernel", ["words", "signals"])
def test_a_rank_that_is_gone_is_not_waited_for_for_ever(tmp_path: Path, kernel: str) -> None:
    texts = run("lost", tmp_path, LOST_IN=kernel)
    assert "ended: " in texts[0]
