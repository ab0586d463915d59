"""Sums over the GPUs of one host, by NCCL and through memory that they map, with norm and residual.

    python -m bench.rank_sums --name rank-sums-h200

What a decoder layer does twice: sum [rows, columns] over all ranks, add that to the residual stream
and normalise it. NCCL needs a kernel for the sum and one for the rest; ``words``, ``whole`` and
``shared`` are the kernels of ``kernels/all_reduce_kernels.py``. A graph holds several in a row.
The samples have the median seconds of one, on the slowest rank. ``…_ratio`` is NCCL's time over the
other one, ``link_…_ratio`` the least time in which a plain kernel writes the bytes of a sum to the
next device, over the time of the fastest way.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.result import arguments_of, publish
from plimsoll_engine.distributed.group import ProcessGroup, Shard
from plimsoll_engine.distributed.peer_memory import PeerMemory
from plimsoll_engine.kernels.all_reduce import AllReduce
from plimsoll_engine.kernels.collective_buffer import BufferLayout
from plimsoll_engine.kernels.fused import FusedOps

ROWS = (1, 16, 64, 128, 256, 512, 2048, 8192)
COLUMNS = 4096
WORD_LIMIT = 512
CHAIN = 16
REPLAYS = 30
EPS = 1e-5
COPY_BYTES = 256 << 20
EXIT_TIMEOUT_S = 60

Sum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def captured(work: Callable[[], Any]) -> float:
    """Seconds that ``work`` takes, captured once and replayed."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    took = seconds(graph.replay)
    graph.reset()
    return took


def seconds(work: Callable[[], Any], times: int = REPLAYS) -> float:
    """The median time of ``work``."""
    for _ in range(3):
        work()
    marks: list[Any] = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(times + 1)
    ]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return float(
        statistics.median(before.elapsed_time(after) / 1e3 for before, after in pairwise(marks))
    )


def ways(group: ProcessGroup, rows: int) -> dict[str, tuple[Sum, PeerMemory | None]]:
    """The ways to sum so many rows, with the memory that each needs."""
    ops, shard = FusedOps(), group.shard
    found: dict[str, tuple[Sum, PeerMemory | None]] = {
        "nccl": (lambda x, r, w: ops.add_rms_norm(group.all_reduce(x), r, w, EPS), None)
    }
    limits = {
        "words": (rows, rows),
        "shared_words": (rows, 0),
        "whole": (0, rows),
        "shared": (0, 0),
    }
    for name, (word_rows, whole_rows) in limits.items():
        if word_rows > WORD_LIMIT:
            continue
        layout = BufferLayout(shard.size, rows, COLUMNS, 2, word_rows, whole_rows)
        memory = PeerMemory.connect(shard.rank, shard.size, layout.nbytes, group._exchange_bytes)
        if memory is None:
            raise SystemExit("the devices share no memory: nothing to compare")
        sums = AllReduce(memory.as_tensor(), memory.addresses, shard.rank, layout, torch.bfloat16)

        def one(
            x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, sums: AllReduce = sums
        ) -> torch.Tensor:
            return sums.add_norm(x, r, w, EPS)

        found[name] = one, memory
    return found


def measure(group: ProcessGroup, rows: int) -> dict[str, float]:
    """Seconds of one sum by each way, of the slowest rank."""
    weight = torch.ones(COLUMNS, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, COLUMNS, device="cuda").bfloat16()
    residual = torch.randn(rows, COLUMNS, device="cuda").bfloat16()
    found = {}
    for name, (one, memory) in ways(group, rows).items():

        def chain(one: Sum = one) -> None:
            for _ in range(CHAIN):
                one(x, residual, weight)

        took = torch.tensor([captured(chain) / CHAIN])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        found[name] = float(took)
        if memory is not None:
            torch.cuda.synchronize()
            memory.close(group._exchange_bytes)
    return found


def link_rate(group: ProcessGroup) -> float:
    """Bytes a second that each device writes to the next, all at once.

    By a kernel, as sums do: a copy of the library's reached a third of that between four H100s.
    """
    rank, size = group.shard
    memory = PeerMemory.connect(rank, size, COPY_BYTES, group._exchange_bytes)
    assert memory is not None
    own = torch.ones(COPY_BYTES // 8, dtype=torch.int64, device="cuda")
    there = memory._other_buffers[(rank + 1) % size].as_tensor().view(torch.int64)
    group._exchange_bytes(b"\0")
    took = seconds(lambda: torch.neg(own, out=there))
    memory.close(group._exchange_bytes)
    rate = torch.tensor([COPY_BYTES / took])
    dist.all_reduce(rate, dist.ReduceOp.MIN)
    return float(rate)


def run(shard: Shard, store: Path, arguments: argparse.Namespace) -> None:
    torch.cuda.set_device(shard.rank)
    group = ProcessGroup(shard, torch.device("cuda", shard.rank), store)
    figures: dict[str, Any] = {"ranks_count": shard.size}
    samples: dict[str, Any] = {}
    for rows in arguments.rows:
        found = samples[str(rows)] = measure(group, rows)
        for name, took in found.items():
            if name != "nccl":
                figures[f"{name}_{rows}_ratio"] = found["nccl"] / took
        if shard.rank == 0:
            told = "  ".join(f"{name} {1e6 * took:7.1f}" for name, took in found.items())
            print(f"{rows:5} rows, µs: {told}", flush=True)
    samples["link_bytes_per_s"] = rate = link_rate(group)
    for rows in arguments.rows:
        best = min(took for name, took in samples[str(rows)].items() if name != "nccl")
        least = rows * COLUMNS * 2 * 2 * (shard.size - 1) / shard.size / rate
        figures[f"link_{rows}_ratio"] = least / best
    group.close()
    if shard.rank == 0:
        publish(arguments.name, figures, samples, folder=arguments.out)


def flags(text: str | None, name: str) -> argparse.ArgumentParser:
    """The flags of a benchmark that every rank runs; ``name`` is its result's."""
    parser = arguments_of(text, name)
    add = parser.add_argument
    add("--size", type=int, default=2, help="how many GPUs")
    add("--rank", type=int, help="of this process; all ranks are started without it")
    add("--store", type=Path, help="where the ranks meet")
    return parser


def on_all_ranks(
    module: str,
    arguments: argparse.Namespace,
    run: Callable[[Shard, Path, argparse.Namespace], None],
) -> None:
    """``run`` here as rank 0, and in a process of ``module`` for each other rank."""
    if arguments.rank is not None:
        run(Shard(arguments.rank, arguments.size), arguments.store, arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        others = [
            subprocess.Popen(
                [sys.executable, "-m", module, "--rank", str(rank), "--store", str(store),
                 *sys.argv[1:]],
            )
            for rank in range(1, arguments.size)
        ]  # fmt: skip
        try:
            run(Shard(0, arguments.size), store, arguments)
            ends = [process.wait(EXIT_TIMEOUT_S) for process in others]
        finally:
            for process in others:
                process.kill()
    if any(ends):
        raise SystemExit(f"ranks ended with {ends}")


def main() -> None:
    parser = flags(__doc__, "rank-sums")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    on_all_ranks("bench.rank_sums", parser.parse_args(), run)


if __name__ == "__main__":
    main()
