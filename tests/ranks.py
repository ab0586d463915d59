"""An engine of several ranks without a zygote: rank 0 here, each other in a process of its own."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from plimsoll_engine.distributed.leader import Leader
from plimsoll_engine.memory.core_lifecycle import CoreLifecycle
from plimsoll_engine.messages.zygote_ipc import WorkerConfig

LEAVE_TIMEOUT_S = 60
IMPORT_TIMEOUT_S = 240
"""An interpreter with torch takes its time on a busy machine."""


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
        lifecycle.shutdown()
        if leader is not None:
            leader.close()
        for process in processes:
            try:
                process.wait(LEAVE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
