"""Create the tensors of the KV pool, in new memory or in a mapped buffer.

In a mapped buffer, the scales of an FP8 pool follow all keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from plimsoll_engine.kernels.quantized import FP8
from plimsoll_engine.kernels.step_plan import KVShape
from plimsoll_engine.kvcache.block_sums import combine_block_sums, compute_block_sums


class PoolTensors(NamedTuple):
    """Tensors of a KV pool."""

    pairs: torch.Tensor  # [2, layers, slots, heads, dim], the keys and the values
    # For FP8: float32 [2, layers, slots, heads], but each block's scales are in the order of Pages.
    scales: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Size of both tensors in bytes."""
        return self.pairs.nbytes + (0 if self.scales is None else self.scales.nbytes)


def make_pool_tensors(
    kv: KVShape,
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device,
    memory: torch.Tensor | None = None,
) -> PoolTensors:
    """Return the tensors of a pool for ``num_slots`` tokens, as views of ``memory`` if given.

    ``memory`` uint8 [bytes] keeps its contents. New tensors are filled with zeros, because pages
    that become resident later would look like growth.
    """
    layers, heads, dim = kv
    shape = (2, layers, num_slots, heads, dim)
    if memory is None:
        pairs = torch.empty(shape, dtype=dtype, device=device).zero_()
        if dtype != FP8:
            return PoolTensors(pairs, None)
        return PoolTensors(pairs, torch.zeros(shape[:-1], dtype=torch.float32, device=device))
    if dtype != FP8:
        return PoolTensors(memory.view(dtype).view(shape), None)
    size = 2 * layers * num_slots * heads * dim
    scales = memory[size:].view(torch.float32).view(shape[:-1])
    return PoolTensors(memory[:size].view(dtype).view(shape), scales)


def compute_pool_sums(pool: PoolTensors, block_size: int, blocks: Sequence[int]) -> list[int]:
    """Return a checksum of each block in ``blocks``, including its scales."""
    sums = compute_block_sums(pool.pairs, block_size, blocks)
    if pool.scales is None:
        return sums
    return combine_block_sums(
        [sums, compute_block_sums(pool.scales.unsqueeze(-1), block_size, blocks)]
    )
