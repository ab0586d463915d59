"""One rank of several that sum on devices, a process each: ``tests/gpu/test_rank_sums.py``.

python -m tests.devices_summing CHECK RANK SIZE STORE
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from plimsoll_engine.distributed.group import AllReduceShape, Group, ProcessGroup, Shard
from plimsoll_engine.distributed.peer_memory import PeerMemory
from plimsoll_engine.kernels import all_reduce
from plimsoll_engine.kernels.fused import FusedOps

COLUMNS, MOST = 4096, 2048
ROWS = (1, 7, 24, 25, 64, 65, 128, 129, 256, 512, 513, 2000, 2048, 2049)
"""The last is more than the buffers take."""
NOISE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-5
OPS = FusedOps()


@contextmanager
def formed(
    shard: Shard, store: Path, dtype: torch.dtype, columns: int = COLUMNS
) -> Iterator[ProcessGroup]:
    device = torch.device("cuda", shard.rank)
    group = ProcessGroup(shard, device, store, AllReduceShape(MOST, columns, dtype))
    try:
        yield group
    finally:
        group.close()
        assert group.nbytes == 0


def drawn(rank: int, rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1000 * seed + rank)
    return torch.randn(rows, columns, device="cuda", generator=generator).to(dtype)


def sum_on_host(x: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks by gloo, which shares nothing with the sums under test."""
    on_host = x.cpu()
    dist.all_reduce(on_host)
    return on_host.to(x.device)


def wanted(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum in float64, rounded once, and its norm."""
    total = sum_on_host(x.double())
    wide = (total + residual.double()).to(residual.dtype).double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double(), wide


def same_on_all(x: torch.Tensor) -> bool:
    own = x.contiguous().view(torch.uint8).cpu()
    first = own.clone()
    dist.broadcast(first, 0)
    return torch.equal(own, first)


def check_sums(group: ProcessGroup, shard: Shard, dtype: torch.dtype, columns: int) -> None:
    weight = drawn(0, 1, columns, dtype, 1)[0]
    for seed, rows in enumerate(ROWS):
        x = drawn(1 + shard.rank, rows, columns, dtype, seed)
        residual = drawn(0, rows, columns, dtype, 100 + seed)
        norm, total = wanted(x, residual, weight)
        parts = sum_on_host(x.double().abs()) + residual.double().abs()
        found = group.add_norm(OPS, x, residual, weight, EPS)
        index = torch.arange(rows, device="cuda", dtype=torch.int32)
        stream = group.get_residual_rows(OPS, residual, index)
        assert same_on_all(stream), (rows, dtype, "other streams")
        error = float((found.double() - norm).norm() / norm.norm())
        assert error < NOISE[dtype], (rows, dtype, error)
        assert same_on_all(found), (rows, dtype, "other bits")
        off = (stream.double() - total).abs()
        bound = NOISE[dtype] * (1 + total.abs())
        if not group.nbytes or rows > MOST:
            # Each partial sum is rounded, the residual stream's too, and so is what is expected.
            bound = (shard.size + 1) * torch.finfo(dtype).eps / 2 * parts
        assert bool((off <= bound).all()), (rows, dtype, "another stream")


def check_collectives(group: ProcessGroup, shard: Shard) -> None:
    """Those between the sums, from a few bytes to several times the buffers, in any order."""
    order = torch.Generator().manual_seed(9)
    for turn in range(40):
        rows = int(torch.randint(1, 300, (1,), generator=order))
        columns = (32_064, 37_985, 64)[turn % 3]
        logits = drawn(1 + shard.rank, rows, columns, torch.bfloat16, turn)
        everybody = [
            drawn(1 + rank, rows, columns, torch.bfloat16, turn) for rank in range(shard.size)
        ]
        assert torch.equal(group.all_gather(logits), torch.cat(everybody, 1))
        best = group.compute_argmax(OPS, logits)
        assert torch.equal(best, torch.cat(everybody, 1).argmax(1))
        tokens = torch.full((rows,), turn + shard.rank, dtype=torch.int64, device="cuda")
        assert torch.equal(group.broadcast(tokens), torch.full_like(tokens, turn))
        total = group.all_reduce(logits.float())
        wide = torch.stack(everybody).double().sum(0)
        torch.testing.assert_close(total.double(), wide, rtol=1e-5, atol=1e-5)
        assert same_on_all(total), (rows, columns, "other bits")


def check_graphs(group: ProcessGroup, shard: Shard) -> None:
    """Graphs of several sizes and eager sums in turn, with ranks that come late at random."""
    dtype = torch.bfloat16
    weight = drawn(0, 1, COLUMNS, dtype, 1)[0]
    captured = []
    for rows in (1, 64, 256, 1024):
        x = torch.empty(rows, COLUMNS, device="cuda", dtype=dtype)
        residual = torch.empty_like(x)

        def chain(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            norm = group.add_norm(OPS, x, residual, weight, EPS)
            for _ in range(2):
                norm = group.add_norm(OPS, norm * 0.5, residual, weight, EPS)
            best = group.compute_argmax(OPS, norm)
            return torch.cat([norm, group.all_gather(norm[:, :64].contiguous())], 1) + best[:, None]

        x.zero_()
        residual.zero_()
        chain(x, residual)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = chain(x, residual)
        captured.append((graph, x, residual, out, chain))
    late = torch.Generator().manual_seed(shard.rank)
    for turn in range(60):
        graph, x, residual, out, chain = captured[turn % len(captured)]
        x.copy_(drawn(1 + shard.rank, len(x), COLUMNS, dtype, turn))
        before = drawn(0, len(x), COLUMNS, dtype, 500 + turn)
        eager = chain(x, before.clone())
        residual.copy_(before)
        cycles = int(torch.randint(0, 200_000, (1,), generator=late))
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        graph.replay()
        assert torch.equal(out, eager), (turn, len(x))
        assert same_on_all(out), (turn, len(x), "other bits")
    for graph, *_ in captured:
        graph.reset()


def check_all(shard: Shard, store: Path) -> None:
    """Sums of all dtypes, graphs, and that every byte and descriptor comes back."""
    for number, (dtype, columns) in enumerate(
        [(torch.bfloat16, COLUMNS), (torch.float16, 5120), (torch.float32, 1024)]
    ):
        with formed(shard, store.with_suffix(f".{number}"), dtype, columns) as group:
            assert group.nbytes > 0, "the devices share no memory"
            check_sums(group, shard, dtype, columns)
            if number == 0:
                check_collectives(group, shard)
                check_graphs(group, shard)
                check_release(group, shard)


def check_release(group: ProcessGroup, shard: Shard) -> None:
    def held() -> tuple[int, int, int]:
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        return torch.cuda.memory_allocated(), free, len(os.listdir("/proc/self/fd"))

    found = []
    for _ in range(4):
        memory = PeerMemory.connect(shard.rank, shard.size, 256 << 20, group._exchange_bytes)
        assert memory is not None
        assert memory.nbytes == 256 << 20
        full = held()
        memory.close(group._exchange_bytes)
        assert memory.nbytes == 0
        memory.close(group._exchange_bytes)
        found.append(held())
        assert found[-1][1] - full[1] >= 256 << 20
        group._exchange_bytes(b"\0")  # nobody maps again what another has not yet given back
    assert found[1:] == [found[1]] * 3, found


def check_no_access(shard: Shard, store: Path) -> None:
    """One rank cannot reach the other: NCCL performs all collectives."""
    if shard.rank == 1:
        torch.cuda.can_device_access_peer = lambda *_: False
    with formed(shard, store, torch.bfloat16) as group:
        assert group.nbytes == 0
        check_sums(group, shard, torch.bfloat16, COLUMNS)
        check_collectives(group, shard)


def check_lost(shard: Shard, store: Path) -> None:
    """A rank that never comes: the kernel of the other ends with an error, within its bound."""
    all_reduce.TIMEOUT_NS = 2_000_000_000
    group = ProcessGroup(
        shard,
        torch.device("cuda", shard.rank),
        store,
        AllReduceShape(MOST, COLUMNS, torch.bfloat16),
    )
    weight = torch.ones(COLUMNS, device="cuda", dtype=torch.bfloat16)
    rows = 4 if os.environ["LOST_IN"] == "words" else 200
    x = torch.ones(rows, COLUMNS, device="cuda", dtype=torch.bfloat16)
    group.add_norm(OPS, x, x.clone(), weight, EPS)
    torch.cuda.synchronize()
    if shard.rank == 1:
        os._exit(0)
    try:
        group.add_norm(OPS, x, x.clone(), weight, EPS)
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"ended: {error}", flush=True)
        os._exit(0)
    os._exit(3)


CHECKS: dict[str, Callable[[Shard, Path], None]] = {
    "all": check_all, "no_access": check_no_access, "lost": check_lost,
}  # fmt: skip


def main() -> None:
    check, rank, size, store = sys.argv[1:]
    shard = Shard(int(rank), int(size))
    torch.cuda.set_device(shard.rank)
    CHECKS[check](shard, Path(store))
    assert Group().nbytes == 0


if __name__ == "__main__":
    main()
