"""Throughput with FP8 weights and an FP8 pool beside bfloat16, and beside vLLM's FP8.

    python -m bench.checkpoint --shape llama-8b /tmp/8b
    python -m plimsoll_faults.models.write_fp8 /tmp/8b /tmp/8b-fp8
    python -m bench.fp8 --shape 8b --checkpoint /tmp/8b --fp8 /tmp/8b-fp8
    python -m bench.fp8 --shape 8b --checkpoint /tmp/8b --fp8 /tmp/8b-fp8 --vllm

Workloads, sets and checks are those of bench/engine.py, on the two checkpoints of one model. Each
format is measured by itself: ``bf16``, ``fp8`` (weights) and ``fp8_kv`` (weights and pool).
``…_fp8_ratio`` and ``…_fp8_kv_ratio`` are over bfloat16. With ``--vllm`` the same requests go to
vLLM's offline engine, which must be importable, in the same formats; it is given the tokens and
makes no text. ``…_over_vllm_ratio`` is over its figure, where the result file has both.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from pathlib import Path
from typing import Any

import torch

from bench.engine import WORKLOADS, add_measuring
from bench.result import earlier, publish
from bench.tensor_parallel import RankedBench, vllms

FORMATS = {"bf16": "auto", "fp8": "auto", "fp8_kv": "fp8"}
"""Each with its ``--kv-cache-dtype``, by a name that vLLM has as well."""
DEFAULT = ("decode1", "decode256", "mixed256", "prefill")


def folder_of(kind: str, flags: argparse.Namespace) -> Path:
    """The checkpoint that ``kind`` of :data:`FORMATS` is measured on."""
    found: Path = flags.checkpoint if kind == "bf16" else flags.fp8
    return found


def ours(kind: str, flags: argparse.Namespace) -> dict[str, Any]:
    """Sets and check of each workload."""
    folder = folder_of(kind, flags)
    return RankedBench(folder, 1, flags.device, flags.budget, FORMATS[kind]).measured(flags)


def theirs(kind: str, flags: argparse.Namespace) -> dict[str, Any]:
    """Sets of each workload by vLLM."""
    return vllms(folder_of(kind, flags), 1, FORMATS[kind], flags)


def with_ratios(figures: dict[str, Any], shape: str) -> dict[str, Any]:
    """``figures`` and the ratios that they allow."""
    found = dict(figures)
    for name in WORKLOADS:
        exact = figures.get(f"{name}_{shape}_bf16_tok_s")
        for kind in FORMATS:
            rate = figures.get(f"{name}_{shape}_{kind}_tok_s")
            peer = figures.get(f"{name}_{shape}_{kind}_vllm_tok_s")
            if rate and exact and kind != "bf16":
                found[f"{name}_{shape}_{kind}_ratio"] = rate / exact
            if rate and peer:
                found[f"{name}_{shape}_{kind}_over_vllm_ratio"] = rate / peer
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shape", required=True, help="name of the shape in the figures' keys, such as 8b")
    add("--checkpoint", required=True, type=Path, help="made by bench/checkpoint.py")
    add("--fp8", required=True, type=Path, help="made from it by plimsoll_faults.models.write_fp8")
    add("--format", nargs="+", default=list(FORMATS), choices=FORMATS)
    add("--workload", nargs="+", default=list(DEFAULT), choices=WORKLOADS)
    add("--no-check", action="store_true", help="for a shape that no GPU holds in float32")
    add("--vllm", action="store_true", help="measure vLLM instead of this engine")
    add_measuring(parser, "fp8")
    flags = parser.parse_args()
    figures, samples = earlier(flags.out / f"{flags.name}.json")
    for kind in flags.format:
        by = "_vllm" if flags.vllm else ""
        for name, found in (theirs if flags.vllm else ours)(kind, flags).items():
            key = f"{name}_{flags.shape}_{kind}{by}"
            figures[f"{key}_tok_s"] = statistics.median(line["tok_s"] for line in found["sets"])
            samples[key] = found
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if flags.scale == 1.0:  # after each: a later format that fails loses nothing
            publish(flags.name, with_ratios(figures, flags.shape), samples, folder=flags.out)
    for key, value in with_ratios(figures, flags.shape).items():
        print(f"{key:45} {value:12.3f}")


if __name__ == "__main__":
    main()
