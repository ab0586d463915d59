"""All-gather, broadcast, and all-reduce without a norm, through the buffers of the all-reduce.

A start thus needs no NCCL communicator. On two busy H200s, NCCL takes 1.3 s to create one and 0.5 s
to destroy it, and it holds 0.5 GB of each device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plimsoll_engine.kernels.all_reduce import AllReduce
from plimsoll_engine.kernels.all_reduce_kernels import (
    begin_sum,
    get_own_buffer,
    get_peer_buffers,
    load_buffers,
    set_signals,
    wait_for_signals,
)
from plimsoll_engine.kernels.overlap import (
    allow_next_kernel,
    get_launch_options,
    wait_for_previous_kernel,
)
from plimsoll_engine.kernels.sizes import cdiv, next_power_of_2

# Number of bytes that a program exchanges.
BLOCK_BYTES = 8192
NUM_WARPS = 8
# Number of elements that a thread loads and stores at once. Rows must consist of whole vectors. The
# compiler needs this hint, because it cannot know that no mask ends within a vector.
VECTOR_ELEMENTS = 8


@triton.jit(do_not_specialize=["rank", "count", "stride"])
def exchange(
    x, out, header, rank, count, stride,
    ARRIVED: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    RANKS: tl.constexpr, PAD: tl.constexpr, KIND: tl.constexpr, TOTAL: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR_ELEMENTS: tl.constexpr, TIMEOUT_NS: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Send ``x`` [count] to all ranks, and combine the received elements into ``out``."""
    # KIND is "gather" (store the elements of rank r from r * stride on), "sum" (add in dtype
    # TOTAL), "max" (keep the largest), or "first" (keep those of rank 0). count is a multiple of
    # VECTOR_ELEMENTS. ARRIVED and PARTS are offsets in bytes. A part has PART elements. A kernel
    # that waits TIMEOUT_NS traps; 0 means no limit.
    block = tl.program_id(0)
    count = tl.multiple_of(count, VECTOR_ELEMENTS)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    others = get_peer_buffers(header, rank, RANKS, x.dtype.element_ty)
    ranks, signalled = load_buffers(header, RANKS, PAD)
    mask = (ranks < RANKS) & (ranks != rank)
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    own = tl.load(x + at, mask=inside, other=0)
    number, turn = begin_sum(header)
    short = (number >> 32).to(tl.int32)
    half = PARTS // (x.dtype.element_ty.primitive_bitwidth // 8) + turn * (RANKS - 1) * PART
    sent = inside
    if KIND == "first":
        sent = inside & (rank == 0)
    for step in tl.static_range(0, RANKS - 1):
        # For the rank that is step + 1 ahead, this rank is source number RANKS - 2 - step.
        tl.store(others[step] + half + (RANKS - 2 - step) * PART + at, own, mask=sent)
    signals = ARRIVED // 4 + turn * RANKS * MAX_BLOCKS + block
    set_signals(signalled + signals + rank * MAX_BLOCKS, short, mask)
    own_signals = get_own_buffer(header, tl.int32) + signals + ranks * MAX_BLOCKS
    wait_for_signals(own_signals, short, mask, TIMEOUT_NS)
    parts = get_own_buffer(header, x.dtype.element_ty) + half + at
    if KIND == "first":
        first = (RANKS - rank - 1) % RANKS * PART
        part = tl.load(parts + first, mask=inside & (rank != 0), other=0)
        tl.store(out + at, tl.where(rank == 0, own, part), mask=inside)
    elif KIND == "gather":
        for source in tl.static_range(0, RANKS):
            first = (source - rank - 1 + RANKS) % RANKS * PART
            part = tl.load(parts + first, mask=inside & (source != rank), other=0)
            kept = tl.where(source == rank, own, part)
            tl.store(out + source * stride.to(tl.int64) + at, kept, mask=inside)
    else:
        total = own.to(TOTAL)
        for source in tl.static_range(0, RANKS):
            first = (source - rank - 1 + RANKS) % RANKS * PART
            loaded = tl.load(parts + first, mask=inside & (source != rank), other=0)
            part = tl.where(source == rank, own, loaded).to(TOTAL)
            if source == 0:
                total = part
            elif KIND == "sum":
                total = total + part
            else:
                total = tl.maximum(total, part)
        tl.store(out + at, total.to(x.dtype.element_ty), mask=inside)


class Collectives:
    """Collectives of one rank, through the same buffers as its ``sums``.

    All ranks must compute the same collectives and sums in the same order. Tensors must be
    contiguous.
    """

    def __init__(self, sums: AllReduce) -> None:
        self._sums = sums
        largest_power_of_2 = 1 << (sums.layout.part_nbytes.bit_length() - 1)
        self._block_nbytes = min(BLOCK_BYTES, largest_power_of_2)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` of all ranks, as [ranks, *shape of x]."""
        out = x.new_empty(self._sums.layout.ranks, *x.shape)
        self._exchange(x, out, "gather")
        return out

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Replace ``x`` by its sum over all ranks, and return it.

        All ranks get identical results.
        """
        self._exchange(x, x, "sum")
        return x

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """Replace each element of ``x`` by its maximum over all ranks, and return ``x``."""
        self._exchange(x, x, "max")
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Replace ``x`` by the ``x`` of rank 0, and return it."""
        self._exchange(x, x, "first")
        return x

    def _exchange(self, x: torch.Tensor, out: torch.Tensor, kind: str) -> None:
        sums, layout, flat, results = self._sums, self._sums.layout, x.view(-1), out.view(-1)
        block = self._block_nbytes // x.itemsize
        # The model alone determines the size of a row. The other tensors have an element per row:
        # with vectors, some numbers of rows would need another kernel.
        rows_are_vectors = kind in ("gather", "sum") and x.shape[-1] % VECTOR_ELEMENTS == 0
        vector = VECTOR_ELEMENTS if rows_are_vectors else 1
        most = block * min(layout.rows, layout.part_nbytes // self._block_nbytes)
        for begin in range(0, len(flat), most):
            part = flat[begin : begin + most]
            exchange[(cdiv(len(part), block),)](
                part, results[begin:], sums.header, sums.rank, len(part), len(flat),
                ARRIVED=layout.part_signals_offset, PARTS=layout.parts_offset,
                PART=layout.part_nbytes // x.itemsize,
                MAX_BLOCKS=layout.rows, RANKS=layout.ranks, PAD=next_power_of_2(layout.ranks),
                KIND=kind, TOTAL=_choose_accumulator(x.dtype), BLOCK=block, VECTOR_ELEMENTS=vector,
                TIMEOUT_NS=sums.wait_ns, num_warps=NUM_WARPS, **get_launch_options(x.device),
            )  # fmt: skip


def _choose_accumulator(dtype: torch.dtype) -> tl.dtype:
    if not dtype.is_floating_point:
        return tl.int64
    return tl.float64 if dtype == torch.float64 else tl.float32
