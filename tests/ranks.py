"""An engine of several ranks without a zygote: rank 0 here, each other in a process of its own."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from plimsoll_engine.distributed.leader import Leader
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.worker.lifecycle import CoreLifecycle
from plimsoll_faults.models import tiny, tiny_moe

DEVICES = torch.cuda.device_count()
GROUPS = [
    pytest.param(
        size,
        marks=pytest.mark.skipif(
            size > DEVICES, reason=f"{DEVICES} CUDA devices: a group of {size} ranks needs as many"
        ),
    )
    for size in (2, 4)
]
"""Of groups, for ``pytest.mark.parametrize``."""
LEAVE_SERVICES_TIMEOUT_S = 60
IMPORT_TIMEOUT_S = 240
"""An interpreter with torch takes its time on a busy machine."""


def write_for_four(folder: Path, experts: bool = False) -> None:
    """Write the tiny checkpoint with the same text, but a key and value head for each query's."""
    each = tiny.NUM_HEADS // tiny.NUM_KV_HEADS

    def change(tensors: dict[str, torch.Tensor], modulus: int) -> dict[str, torch.Tensor]:
        found = tiny_moe.add_experts(tensors, modulus) if experts else dict(tensors)
        for name in [name for name in found if "k_proj" in name or "v_proj" in name]:
            heads = found[name].view(tiny.NUM_KV_HEADS, tiny.HEAD_DIM, -1)
            found[name] = heads.repeat_interleave(each, 0).flatten(0, 1).contiguous()
        return found

    fields = tiny_moe.CONFIG_FIELDS if experts else {}
    tiny.write_checkpoint(folder, fields | {"num_key_value_heads": tiny.NUM_HEADS}, change)


@contextmanager
def started(config: WorkerConfig, quick: bool = False) -> Iterator[tuple[CoreLifecycle, list[Any]]]:
    """A warm engine of ``config.tensor_parallel_size`` ranks and the other ranks' processes. They
    end with the block, each by itself. ``quick`` as in :meth:`CoreLifecycle.take_over`."""
    size = config.tensor_parallel_size
    leader = Leader(config.run_dir, 1, size) if size > 1 else None
    text = msgspec.json.encode(config).decode()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "plimsoll_engine.worker.follower", "--config", text,
             "--rank", str(rank)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(1, size)
    ]  # fmt: skip
    lifecycle = CoreLifecycle(config, ranks=leader)
    try:
        if leader is not None:
            assert select.select([leader._listener], [], [], IMPORT_TIMEOUT_S)[0], "no other rank"
        lifecycle.prepare()
        lifecycle.take_over(quick)
        yield lifecycle, processes
    finally:
        lifecycle.shut_down()
        if leader is not None:
            leader.close()
        for process in processes:
            try:
                process.wait(LEAVE_SERVICES_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
