"""The KV pool that the weight server keeps: one worker after the other maps it, nobody else."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from plimsoll_engine.weights.mapping import WeightMapping
from plimsoll_faults.models.tiny import write_checkpoint

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: these tests need one GPU"
)
GIB = 1 << 30
SERVER = """
import sys
from plimsoll_engine.weights import weight_server
from plimsoll_engine.messages.zygote_ipc import WorkerConfig, listen
model, folder = sys.argv[1:]
config = WorkerConfig(model, folder, "unused", "bfloat16", "cuda", weights=folder + "/weights.sock")
sys.exit(weight_server.run_weight_server(config, listen(config.weights)))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    write_checkpoint(tmp_path / "model")
    (tmp_path / "stacks").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path / "model"), str(tmp_path)]
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "weights.sock").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield process
    process.kill()
    process.wait(10)


def test_the_pool_outlives_its_workers_and_ends_with_the_weight_server(
    server: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    path = str(tmp_path / "weights.sock")
    first = WeightMapping(path)
    assert first.map_weights()
    assert first.map_pool() is None
    pool = first.map_pool(8 * GIB)
    assert pool is not None
    assert pool.nbytes == 8 * GIB
    pool[-1] = 7
    torch.cuda.synchronize()
    del pool
    free = torch.cuda.mem_get_info()[0]

    second = WeightMapping(path)  # beside the first, as a successor is
    assert second.map_weights()
    begun = time.monotonic()
    pool = second.map_pool()
    print(f"mapped in {1e3 * (time.monotonic() - begun):.1f} ms")
    assert pool is not None
    assert pool.nbytes == 8 * GIB
    assert int(pool[-1]) == 7
    assert free - torch.cuda.mem_get_info()[0] < GIB // 8, "the pool is there once"
    del pool
    assert first.claim_pool()
    assert not second.claim_pool(), "the first may still write"
    assert first.unmap()
    assert second.claim_pool()
    assert second.unmap()
    server.terminate()
    assert server.wait(30) == 0
    assert torch.cuda.mem_get_info()[0] - free > 8 * GIB
