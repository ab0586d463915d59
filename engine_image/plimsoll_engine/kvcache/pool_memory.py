"""The tensors of the KV pool, over memory of their own or over a buffer that is mapped.

An FP8 pool has a scale for each token, head and layer, of keys and of values. The scales lie behind
all keys and values, so that these are as aligned as those of any other pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from plimsoll_engine.kernels.quantized import FP8
from plimsoll_engine.kernels.step_plan import KVShape
from plimsoll_engine.kvcache.block_sums import add_sums, block_sums


class PoolTensors(NamedTuple):
    """``pairs`` [2, layers, slots, heads, dim], and ``scales`` float32 [2, layers, slots, heads].

    ``scales`` are None where the pool is not FP8. Those of a block lie together, in the order of
    :class:`plimsoll_engine.kernels.step_plan.Pages`.
    """

    pairs: torch.Tensor
    scales: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.pairs.nbytes + (0 if self.scales is None else self.scales.nbytes)


def pool_tensors(
    kv: KVShape,
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
    memory: torch.Tensor | None = None,
) -> PoolTensors:
    """Return a pool of ``slots`` tokens, over ``memory`` uint8 [bytes] where that is given.

    What is in that memory stays. Otherwise zeros are written, not only reserved: a pool that filled
    its pages while it serves would look like growth.
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
    """Return a sum of what each of ``blocks`` holds, its scales included."""
    sums = block_sums(pool.pairs, block_size, blocks)
    if pool.scales is None:
        return sums
    return add_sums([sums, block_sums(pool.scales.unsqueeze(-1), block_size, blocks)])
