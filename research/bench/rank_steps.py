"""A step of the model on one GPU, and shared out over several with each way to sum.

    python -m bench.rank_steps --name rank-steps-h200
    python -m bench.rank_steps --size 4 --shape 32b --way mapped --no-alone --profile

The Llama-3.1-8B shape with random weights, without the engine around it: decode steps are captured
graphs over contexts of 384 tokens, and a prefill step has two prompts of 4,000 tokens. ``nccl``
sums by NCCL, ``mapped`` through memory that all ranks map, as the engine does where it can.
``…_ratio`` is the time on one GPU over it; the samples have the median seconds, of rank 0. A step
ends with an exchange of all ranks. ``--profile`` prints what a step spends in each kernel on rank
0: one that waits for another rank, or for the kernel ahead of it, counts that too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.rank_sums import flags, on_all_ranks, seconds
from bench.result import publish
from bench.shapes import SHAPES
from plimsoll_engine.core.execute.forward import Forward
from plimsoll_engine.core.execute.graphs import DecodeGraphs
from plimsoll_engine.distributed.group import (
    SINGLE_RANK_GROUP,
    WHOLE_MODEL,
    AllReduceShape,
    Group,
    ProcessGroup,
    Shard,
)
from plimsoll_engine.messages.rank_ipc import Array, Inputs
from plimsoll_engine.models.decoder import Decoder

ROWS = (256, 128, 64, 16, 1)
CONTEXT, BLOCK, PROMPT, PROMPTS = 384, 16, 4000, 2
TABLE = 4096 // BLOCK
DTYPE = torch.bfloat16
PROFILED, SHOWN = 4, 14


def _ints(values: Any) -> Array:
    return np.ascontiguousarray(values, dtype=np.int32)


def decoding(rows: int) -> Inputs:
    """A step of one row for each of ``rows`` contexts."""
    blocks = CONTEXT // BLOCK
    tables = np.arange(rows * blocks).reshape(rows, blocks)
    last = CONTEXT - 1
    return Inputs(
        ids=_ints(np.arange(rows)), sources=_ints(np.full(rows, -1)),
        positions=_ints(np.full(rows, last)),
        slots=_ints(tables[:, last // BLOCK] * BLOCK + last % BLOCK),
        contexts=_ints(np.full(rows, CONTEXT)), starts=_ints(np.arange(rows + 1)),
        tables=_ints(tables), last=_ints(np.arange(rows)), decodes=rows, longest=0, fresh=(),
        greedy=True,
    )  # fmt: skip


def prefilling() -> Inputs:
    """A step of whole prompts."""
    rows, blocks = PROMPTS * PROMPT, PROMPT // BLOCK
    starts = np.arange(PROMPTS + 1) * PROMPT
    return Inputs(
        ids=_ints(np.arange(rows)), sources=_ints(np.full(rows, -1)),
        positions=_ints(np.arange(rows) % PROMPT), slots=_ints(np.arange(rows)),
        contexts=_ints(np.full(PROMPTS, PROMPT)), starts=_ints(starts),
        tables=_ints(np.arange(PROMPTS * blocks).reshape(PROMPTS, blocks)),
        last=_ints(starts[1:] - 1), decodes=0, longest=PROMPT, fresh=(PROMPT,) * PROMPTS,
        greedy=True,
    )  # fmt: skip


def model_of(config: Any, shard: Shard, group: Group) -> Decoder:
    """One rank's part, with normal weights of its own."""
    model = Decoder(config, DTYPE, shard)
    tensors = {}
    for name, meta in model.get_parameters().items():
        tensor = torch.empty_like(meta, device="cuda")
        tensors[name] = tensor.fill_(1.0) if name.endswith("norm") else tensor.normal_(std=0.02)
    model.bind(tensors)
    model.group = group
    return model


def profiled(kind: str, work: Callable[[], Any]) -> None:
    """Print where the device's time goes in a step, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            work()
        torch.cuda.synchronize()
    rows = profiler.key_averages()
    total = sum(row.self_device_time_total for row in rows) / PROFILED
    print(f"profile of {kind}: {total:.0f} us in kernels", flush=True)
    for row in sorted(rows, key=lambda row: -row.self_device_time_total)[:SHOWN]:
        took = row.self_device_time_total / PROFILED
        print(f"  {took:8.0f} us, {row.count // PROFILED:4} x  {row.key[:80]}", flush=True)


@torch.inference_mode()
def steps(model: Decoder, profile: bool) -> dict[str, float]:
    """Seconds of a step, by its kind."""
    forward = Forward(model, max(ROWS) * CONTEXT // BLOCK, BLOCK)
    assert forward.kv is not None
    forward.kv.normal_()
    inputs = prefilling()
    found = {"prefill": seconds(lambda: forward.compute(inputs), 4)}
    if profile:
        profiled("prefill", lambda: forward.compute(inputs))
    forward.graphs = DecodeGraphs(model, forward.kv, BLOCK, max(ROWS), TABLE)
    forward.graphs._missing = list(ROWS)
    while forward.graphs.capture_next():
        pass
    for rows in ROWS:
        step = decoding(rows)
        found[str(rows)] = seconds(lambda step=step: forward.compute(step))  # type: ignore[misc]
        if profile:
            profiled(f"{rows} rows", lambda step=step: forward.compute(step))  # type: ignore[misc]
    forward.close()
    return found


def run(shard: Shard, store: Path, arguments: argparse.Namespace) -> None:
    torch.cuda.set_device(shard.rank)
    torch.manual_seed(shard.rank)
    config = SHAPES[arguments.shape]()
    sums = AllReduceShape(PROMPTS * PROMPT, config.hidden_size, DTYPE)
    group = ProcessGroup(shard, torch.device("cuda", shard.rank), store, sums)
    mapped = group._sums, group._collectives
    group._open_nccl()
    nccl = None, group._collectives
    model = model_of(config, shard, group)
    found = {}
    for name in arguments.way:
        group._sums, group._collectives = nccl if name == "nccl" else mapped
        found[name] = steps(model, arguments.profile and name == "mapped")
        if shard.rank == 0:
            print(
                name, {kind: round(1e3 * took, 3) for kind, took in found[name].items()}, flush=True
            )
    model.close()
    torch.cuda.empty_cache()
    if shard.rank == 0:
        figures: dict[str, Any] = {"ranks_count": shard.size}
        if not arguments.no_alone:
            found["one"] = steps(
                model_of(config, WHOLE_MODEL, SINGLE_RANK_GROUP), arguments.profile
            )
        for name in found if "one" in found else ():
            if name != "one":
                for kind, took in found[name].items():
                    figures[f"{name}_{kind}_ratio"] = found["one"][kind] / took
        publish(arguments.name, figures, found, folder=arguments.out)
    group.close()


def main() -> None:
    parser = flags(__doc__, "rank-steps")
    add = parser.add_argument
    add("--shape", default="8b", choices=SHAPES)
    add("--way", nargs="+", default=["nccl", "mapped"], choices=["nccl", "mapped"])
    add("--no-alone", action="store_true", help="for a shape that one GPU cannot hold")
    add("--profile", action="store_true")
    on_all_ranks("bench.rank_steps", parser.parse_args(), run)


if __name__ == "__main__":
    main()
