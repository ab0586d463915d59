"""What two processes on a CPU compute together, and what a process alone does in their place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from plimsoll_engine.distributed.group import SINGLE_RANK_GROUP
from plimsoll_engine.kernels.reference import ReferenceOps

OPS = ReferenceOps()
EPS = 1e-5
TIMEOUT_S = 300
RANK = """
import sys
from pathlib import Path
import torch
from plimsoll_engine.distributed.group import ProcessGroup, Shard, AllReduceShape
from plimsoll_engine.kernels.reference import ReferenceOps
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
sums = AllReduceShape(64, 32, torch.float32)
group = ProcessGroup(Shard(rank, 2), torch.device("cpu"), folder / "store", sums)
given = torch.load(folder / "given")
residual = given["residual"].clone()
norm = group.add_norm(
    ReferenceOps(), given["parts"][rank].clone(), residual, given["weight"], 1e-5
)
best = group.compute_argmax(ReferenceOps(), given["scores"].chunk(2, dim=1)[rank].contiguous())
assert group.nbytes == 0
group.close()
torch.save({"norm": norm, "residual": residual, "best": best}, folder / f"found{rank}")
"""


def test_two_processes_are_one(tmp_path: Path) -> None:
    torch.manual_seed(3)
    given = {
        "parts": torch.randn(2, 5, 32), "residual": torch.randn(5, 32),
        "weight": torch.randn(32), "scores": torch.randn(5, 96).round(),
    }  # fmt: skip
    torch.save(given, tmp_path / "given")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(TIMEOUT_S) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    residual = given["residual"].clone()
    norm = SINGLE_RANK_GROUP.add_norm(OPS, given["parts"].sum(0), residual, given["weight"], EPS)
    for rank in range(2):
        found = torch.load(tmp_path / f"found{rank}")
        torch.testing.assert_close(found["norm"], norm)
        torch.testing.assert_close(found["residual"], residual)
        assert torch.equal(found["best"], SINGLE_RANK_GROUP.compute_argmax(OPS, given["scores"]))
