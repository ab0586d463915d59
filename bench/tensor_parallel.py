"""The engine's throughput over several GPUs of one host, and over one, in the same way.

    python -m bench.checkpoint --shape llama-8b /tmp/8b
    python -m bench.tensor_parallel --shape 8b --checkpoint /tmp/8b --tensor-parallel-size 1 2

Workloads, sets and checks are those of bench/engine.py. The engine is started as a worker starts
it: each rank loads its part of the checkpoint; rank 0 is this process, the others are processes of
their own. ``…_ratio`` is the throughput over that of one GPU in the same run, where that is part of
it; ``process_group_init_…_s`` is NCCL's initialisation alone.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from bench.engine import (
    BLOCK,
    MAX_SEQS,
    WORKLOADS,
    Bench,
    Request,
    add_measuring,
    measure,
)
from bench.result import earlier, publish
from plimsoll_engine.distributed.leader import Leader
from plimsoll_engine.memory.core_lifecycle import CoreLifecycle
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models import loader

MAX_LENGTH = 4096
EXIT_TIMEOUT_S = 60


class RankedBench(Bench):
    """One model over ``size`` ranks, and the engine over it."""

    def __init__(
        self, checkpoint: Path, size: int, device: str, budget: int, kv_cache_dtype: str = "auto"
    ) -> None:
        self.size = size
        self.folder = checkpoint
        self.run_dir = tempfile.TemporaryDirectory()
        blocks = MAX_SEQS * 2112 // BLOCK if device == "cuda" else 4096
        config = WorkerConfig(
            str(checkpoint), self.run_dir.name, "unused", device=device, max_num_seqs=MAX_SEQS,
            max_model_len=MAX_LENGTH, max_num_batched_tokens=budget, block_size=BLOCK,
            num_blocks=blocks, tensor_parallel_size=size, kv_cache_dtype=kv_cache_dtype,
        )  # fmt: skip
        self.leader = Leader(self.run_dir.name, 1, size) if size > 1 else None
        text = msgspec.json.encode(config).decode()
        self.others = [
            subprocess.Popen(
                [sys.executable, "-m", "plimsoll_engine.worker.follower", "--config", text,
                 "--rank", str(rank)],
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
            for rank in range(1, size)
        ]  # fmt: skip
        self.lifecycle = CoreLifecycle(config, ranks=self.leader)
        try:
            self.engine = self.lifecycle.start()
            while self.engine.runner.capture_more():
                pass
        except BaseException:
            self.close()
            raise
        self.runner = self.engine.runner
        self.device = self.runner.device
        self.config = loader.load_config(checkpoint)
        self.model: Any = self.runner.model if size == 1 else None
        self.dtype = self.lifecycle.model.dtype

    def check(self, requests: list[Request], outputs: dict[str, list[int]]) -> dict[str, float]:
        if self.model is None:  # whole, beside rank 0's part of it
            self.model = loader.load_model(self.folder, self.config, self.dtype, self.device)
        return super().check(requests, outputs)

    def close(self) -> None:
        """Everything back, on every rank; SystemExit where a rank does not leave well."""
        self.engine = self.runner = self.model = None  # type: ignore[assignment]
        self.lifecycle.shutdown()
        left = self.lifecycle.left()
        if self.leader is not None:
            self.leader.close()
        ends = [process.wait(EXIT_TIMEOUT_S) for process in self.others]
        self.run_dir.cleanup()
        gc.collect()
        if any(ends) or left[0] != left[1]:
            raise SystemExit(f"ranks ended with {ends}, device bytes and baseline {left}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shape", required=True, help="name of the shape in the figures' keys, such as 8b")
    add("--checkpoint", required=True, type=Path, help="made by bench/checkpoint.py")
    add("--tensor-parallel-size", nargs="+", type=int, default=[1, 2])
    add("--workload", nargs="+", default=list(WORKLOADS[:-1]), choices=WORKLOADS)
    add_measuring(parser, "tensor-parallel")
    flags = parser.parse_args()
    figures, samples = earlier(flags.out / f"{flags.name}.json")
    alone: dict[str, float] = {}
    for size in flags.tensor_parallel_size:
        bench = RankedBench(flags.checkpoint, size, flags.device, flags.budget)
        stages = bench.lifecycle.stages_s
        print({"ranks": size, **stages}, flush=True)
        if size > 1:
            figures[f"process_group_init_tp{size}_s"] = stages["process_group"]
        for name in flags.workload:
            key = f"{name}_{flags.shape}_tp{size}"
            found = measure(bench, flags.shape, name, flags)
            rate = statistics.median(line["tok_s"] for line in found["sets"])
            figures[f"{key}_tok_s"] = rate
            if size == 1:
                alone[name] = rate
            elif name in alone:
                figures[f"{key}_ratio"] = rate / alone[name]
            samples[key] = found
        if flags.scale == 1.0:  # after each: a later size that fails loses nothing
            publish(flags.name, figures, samples, folder=flags.out)
        bench.close()


if __name__ == "__main__":
    main()
