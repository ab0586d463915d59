"""The engine's throughput over several GPUs of one host, and over one, in the same way.

    python -m bench.checkpoint --shape llama-8b /tmp/8b
    python -m bench.tensor_parallel --shape 8b --checkpoint /tmp/8b --tensor-parallel-size 1 2 4
    python -m bench.tensor_parallel --shape 8b --checkpoint /tmp/8b --vllm

Workloads, sets and checks are those of bench/engine.py. The engine is started as a worker starts
it: each rank loads its part of the checkpoint; rank 0 is this process, the others are processes of
their own. ``…_ratio`` is the throughput over that of the fewest GPUs in the result file;
``process_group_init_…_s`` is the time to connect the ranks. With ``--vllm`` the same requests go to
vLLM's offline engine, as in bench/fp8.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.engine import (
    BLOCK,
    MAX_SEQS,
    WORKLOADS,
    Bench,
    Request,
    add_measuring,
    compare,
    measure,
    workload,
)
from bench.result import earlier, publish
from plimsoll_engine.distributed.leader import Leader
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models import loader
from plimsoll_engine.worker.lifecycle import CoreLifecycle

MAX_LENGTH = 4096
EXIT_TIMEOUT_S = 60
RATE = re.compile(r"(\w+)_tp(\d+)(_vllm)?_tok_s")


class RankedBench(Bench):
    """One model over ``size`` ranks, and the engine over it."""

    def __init__(
        self,
        checkpoint: Path,
        size: int,
        device: str,
        budget: int,
        kv_cache_dtype: str = "auto",
        blocks: int = 0,
    ) -> None:
        self.size = size
        self.folder = checkpoint
        self.run_dir = tempfile.TemporaryDirectory()
        blocks = blocks or (MAX_SEQS * 2112 // BLOCK if device == "cuda" else 4096)
        self.outputs: list[tuple[list[Request], dict[str, list[int]]]] = []
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
            while self.engine.runner.capture_next_graph():
                pass
        except BaseException:
            self.close()
            raise
        self.runner = self.engine.runner
        self.device = self.runner.device
        self.config = loader.load_config(checkpoint)
        self.dtype = self.lifecycle.model.dtype

    def check(self, requests: list[Request], outputs: dict[str, list[int]]) -> dict[str, float]:
        """Keep the outputs: beside the KV pool there is no room for the reference."""
        self.outputs.append((requests, outputs))
        return {}

    def measured(self, flags: argparse.Namespace) -> dict[str, dict[str, Any]]:
        """Sets and check of each workload; the engine is closed after the sets."""
        found = {name: measure(self, flags.shape, name, flags) for name in flags.workload}
        pool = None if self.runner.kv is None else self.runner.kv.dtype
        self.close()
        if not flags.no_check:
            whole: Any = loader.load_model(self.folder, self.config, self.dtype, self.device)
            for name, given in zip(found, self.outputs, strict=True):
                found[name]["check"] = compare(self.config, whole, pool, *given)
                print(json.dumps({"workload": name, **found[name]["check"]}), flush=True)
            whole.close()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    def close(self) -> None:
        """Everything back, on every rank; SystemExit where a rank does not leave well."""
        self.engine = self.runner = None  # type: ignore[assignment]
        self.lifecycle.shut_down()
        left = self.lifecycle.get_allocated_after_shutdown()
        if self.leader is not None:
            self.leader.close()
        ends = [process.wait(EXIT_TIMEOUT_S) for process in self.others]
        self.run_dir.cleanup()
        gc.collect()
        if any(ends) or left[0] != left[1]:
            raise SystemExit(f"ranks ended with {ends}, device bytes and baseline {left}")


def vllms(
    folder: Path, size: int, kv_cache_dtype: str, flags: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Sets of each workload by vLLM, which keeps its own defaults beside the sizes."""
    # As this engine is measured: scheduler and model in the process that submits, without messages.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams  # an environment of its own has it

    llm: Any = LLM(
        model=str(folder), max_model_len=MAX_LENGTH, max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=flags.budget, kv_cache_dtype=kv_cache_dtype, seed=flags.seed,
        tensor_parallel_size=size,
    )  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    for name in flags.workload:
        work = workload(name, flags.seed, flags.scale)
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in work.requests]
        sampling = [
            SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True, detokenize=False)
            for _, out in work.requests
        ]
        sets = []
        for number in range(flags.sets + 1):  # the first one warms up and is not counted
            llm.reset_prefix_cache()
            begun = time.perf_counter()
            answers = llm.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - begun
            lengths = [len(answer.outputs[0].token_ids) for answer in answers]
            if lengths != [out for _, out in work.requests]:
                raise SystemExit(f"vLLM, {name}: a request has too few tokens")
            if number or flags.no_warm_up:
                line = {"workload": name, "seconds": seconds, "tok_s": work.tokens / seconds}
                print(json.dumps({"vllm": size, **line}), flush=True)
                sets.append(line)
        found[name] = {"sets": sets[: flags.sets]}
    del llm
    return found


def with_ratios(figures: dict[str, Any]) -> dict[str, Any]:
    """``figures`` and each throughput's ratio to that of the fewest GPUs."""
    found = dict(figures)
    rates = {
        (match[1], int(match[2]), match[3] or ""): rate
        for key, rate in figures.items()
        if (match := RATE.fullmatch(key))
    }
    for (name, size, by), rate in rates.items():
        fewest = min(
            other for other_name, other, other_by in rates if (other_name, other_by) == (name, by)
        )
        if size > fewest:
            found[f"{name}_tp{size}{by}_ratio"] = rate / rates[name, fewest, by]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shape", required=True, help="name of the shape in the figures' keys, such as 8b")
    add("--checkpoint", required=True, type=Path, help="made by bench/checkpoint.py")
    add("--tensor-parallel-size", nargs="+", type=int, default=[1, 2])
    add("--workload", nargs="+", default=list(WORKLOADS[:-1]), choices=WORKLOADS)
    add(
        "--blocks", type=int, default=0, help="of the KV pool, where it is not to fit the workloads"
    )
    add("--no-check", action="store_true", help="for a shape that no GPU holds in float32")
    add("--vllm", action="store_true", help="measure vLLM instead of this engine")
    add_measuring(parser, "tensor-parallel")
    flags = parser.parse_args()
    figures, samples = earlier(flags.out / f"{flags.name}.json")
    by = "_vllm" if flags.vllm else ""
    for size in flags.tensor_parallel_size:
        if flags.vllm:
            measured = vllms(flags.checkpoint, size, "auto", flags)
        else:
            bench = RankedBench(
                flags.checkpoint, size, flags.device, flags.budget, blocks=flags.blocks
            )
            stages = bench.lifecycle.stages_s
            print({"ranks": size, **stages}, flush=True)
            if size > 1:
                figures[f"process_group_init_tp{size}_s"] = stages["process_group"]
            measured = bench.measured(flags)
        for name, found in measured.items():
            key = f"{name}_{flags.shape}_tp{size}{by}"
            figures[f"{key}_tok_s"] = statistics.median(line["tok_s"] for line in found["sets"])
            samples[key] = found
        if flags.scale == 1.0:  # after each: a later size that fails loses nothing
            publish(flags.name, with_ratios(figures), samples, folder=flags.out)


if __name__ == "__main__":
    main()
