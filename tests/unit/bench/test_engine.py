"""The throughput bench's KV pool fits beside what it checks the outputs with."""

from __future__ import annotations

import torch

from bench.engine import BLOCK, MAX_SEQS, pool_blocks
from bench.shapes import SHAPES
from plimsoll_engine.models.decoder import Decoder

GIB = 1 << 30


def taken(shape: str, device_bytes: int) -> tuple[int, int]:
    """Return the blocks of a pool, and the bytes of weights, pool and reference together."""
    model = Decoder(SHAPES[shape](), torch.bfloat16)
    weights = sum(2 * tensor.numel() for tensor in model.get_parameters().values())
    blocks = pool_blocks(model, torch.bfloat16, device_bytes - weights)
    pool = blocks * BLOCK * model.kv.compute_bytes_per_token(torch.bfloat16)
    return blocks, 3 * weights + pool


def test_the_8b_shape_fits_on_80_gb() -> None:
    blocks, total = taken("8b", 79 * GIB)
    assert total < 79 * GIB
    assert blocks * BLOCK > 100_000


def test_a_device_with_room_holds_all_sequences_at_their_longest() -> None:
    assert taken("8b", 140 * GIB)[0] == taken("06b", 79 * GIB)[0] == MAX_SEQS * 2112 // BLOCK
