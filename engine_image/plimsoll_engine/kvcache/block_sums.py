"""Compute checksums of KV blocks, which show whether a handover has overwritten blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

MAX_GATHERED_BYTES = 64 << 20


@torch.inference_mode()
def compute_block_sums(kv: torch.Tensor, block_size: int, blocks: Sequence[int]) -> list[int]:
    """Return the signed 64-bit checksum of each block in ``blocks``.

    ``kv`` [2, layers, blocks * block_size, heads, dim] is the pool. The checksums detect accidental
    writes only. Waits for the device.
    """
    two, layers, slots, heads, dim = kv.shape
    words = kv.reshape(two * layers, slots // block_size, block_size * heads * dim)
    row_bytes = words.shape[-1] * words.element_size()
    words = words.view(torch.int64 if row_bytes % 8 == 0 else torch.uint8)
    chunk_blocks = max(1, MAX_GATHERED_BYTES // (row_bytes * two * layers))
    weights = torch.arange(1, 2 * two * layers, 2, device=kv.device).view(-1, 1)
    results: list[int] = []
    for start in range(0, len(blocks), chunk_blocks):
        chosen = torch.tensor(blocks[start : start + chunk_blocks], device=kv.device)
        sums = words.index_select(1, chosen).sum(dim=2, dtype=torch.int64)
        # With odd weights, swapping layers, or keys and values, changes the checksum.
        results += (sums * weights).sum(dim=0).tolist()
    return results


def combine_block_sums(ranks: Sequence[Sequence[int]]) -> list[int]:
    """Combine the checksums of all ranks into one signed 64-bit checksum per block."""
    combined = []
    for sums in zip(*ranks, strict=True):
        total = sum((2 * rank + 1) * value for rank, value in enumerate(sums))
        combined.append((total + (1 << 63)) % (1 << 64) - (1 << 63))
    return combined
