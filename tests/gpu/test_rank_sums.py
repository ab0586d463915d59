"""Sums through memory that devices map, one process each (``tests/devices_summing.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import GROUPS

pytestmark = pytest.mark.parametrize("size", GROUPS)
TIMEOUT_S = 180


def run(check: str, size: int, folder: Path, **env: str) -> list[str]:
    """The output of all ranks, which ended well."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.devices_summing", check, str(rank), str(size),
             str(folder / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | env,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        texts = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * size, "\n".join(texts)
    return texts


def test_right_the_same_on_all_in_graphs_and_given_back(tmp_path: Path, size: int) -> None:
    run("all", size, tmp_path)


def test_nccl_sums_where_one_device_cannot_reach_another(tmp_path: Path, size: int) -> None:
    texts = run("no_access", size, tmp_path)
    assert "cannot access the memory of device 0" in texts[1]


@pytest.mark.parametrize("kernel", ["words", "signals"])
def test_a_rank_that_is_gone_is_not_waited_for_for_ever(
    tmp_path: Path, size: int, kernel: str
) -> None:
    texts = run("lost", size, tmp_path, LOST_IN=kernel)
    assert all("ended: " in text for text in [*texts[:1], *texts[2:]])
