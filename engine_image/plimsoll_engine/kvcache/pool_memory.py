"""Tensors of the KV pool, in memory of their own or in a mapped buffer.

An FP8 pool has a scale for each token, head and layer, for keys and for values. The scales follow
all keys and values, so that these have the same alignment as in other pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from plimsoll_engine.kernels.quantized import FP8
from plimsoll_engine.kernels.step_plan import KVShape
from plimsoll_engine.kvcache.block_sums import add_sums, block_sums


class PoolTensors(NamedTuple):
    """Tensors of a KV pool.

    ``pairs`` [2, layers, slots, heads, dim] holds keys and values. ``scales`` float32 [2, layers,
    slots, heads] is None unless the pool is FP8. The scales of a block are contiguous, in the order
    of :class:`plimsoll_engine.kernels.step_plan.Pages`.
    """

    pairs: torch.Tensor
    scales: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.pairs.nbytes + (0 if self.scales is None else self.scales.nbytes)


def pool_tensors(
    kv: KVShape,
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
    memory: torch.Tensor | None = None,
) -> PoolTensors:
    """Return a pool of ``slots`` tokens, in ``memory`` uint8 [bytes] if that is given.

    The contents of ``memory`` are preserved. Otherwise zeros are written, because a pool that
    touches its pages only in use would look like growth.
    """
    layers, heads, dim = kv
    shape = (2, layers, slots, heads, dim)
    if memory is None:
        pairs = torch.empty(shape, dtype=dtype, device=device).zero_()
        if dtype != FP8:
            return PoolTensors(pairs, None)
        return PoolTensors(pairs, torch.zeros(shape[:-1], dtype=torch.float32, device=device))
    if dtype != FP8:
        return PoolTensors(memory.view(dtype).view(shape), None)
    size = 2 * layers * slots * heads * dim
    scales = memory[size:].view(torch.float32).view(shape[:-1])
    return PoolTensors(memory[:size].view(dtype).view(shape), scales)


def pool_sums(pool: PoolTensors, block_size: int, blocks: Sequence[int]) -> list[int]:
    """Return a checksum of each of ``blocks``, including its scales."""
    sums = block_sums(pool.pairs, block_size, blocks)
    if pool.scales is None:
        return sums
    return add_sums([sums, block_sums(pool.scales.unsqueeze(-1), block_size, blocks)])
