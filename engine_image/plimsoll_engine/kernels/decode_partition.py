"""Partition decode attention into GPU programs. Each partition has its own compiled kernel."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll_engine.kernels.sizes import NUM_COUNTERS, cdiv, next_power_of_2

TILE_TOKENS, WIDE_TILE_TOKENS = 64, 128
"""Number of tokens that a program reads at a time: in a normal tile, and in a wide tile."""
MAX_WIDE_ROW_BYTES = 256
"""Maximum size in bytes of one head's key with which two wide tiles fit into shared memory."""


class Partition(NamedTuple):
    """Partition of each context into parts. One program computes each part.

    A context has up to ``splits`` parts, each of at least ``tokens`` tokens. A program reads
    ``tile`` tokens at a time.
    """

    tile: int
    splits: int
    tokens: int = 0


PARTITIONS = (
    (32, Partition(WIDE_TILE_TOKENS, 32, 128)),
    (64, Partition(WIDE_TILE_TOKENS, 32, 256)),
    (511, Partition(WIDE_TILE_TOKENS, 32, 512)),
    (1023, Partition(WIDE_TILE_TOKENS, 16, 1024)),
    (NUM_COUNTERS, Partition(TILE_TOKENS, 4, 1024)),
)
"""Pairs (maximum number of contexts * kv heads, partition up to that number).

With more contexts, parts may be longer, because other contexts keep the GPU busy. Programs without
a part also take time: 6,000 of them take 2 us on an H200.

The values were chosen on an H200 with 1 to 256 contexts. Their lengths were 320 tokens, 300 to
1,700, 300 to 4,000, or lognormal (median 600, sigma 0.9). ``bench/kernels.py`` repeats some of
these measurements.
"""


def compute_row_bytes(dim: int, itemsize: int) -> int:
    """Return the size of one head's key in bytes, with the padding of the kernel."""
    return next_power_of_2(dim) * itemsize


def choose_partition(
    num_sequences: int, num_kv_heads: int, row_bytes: int, max_context: int
) -> Partition:
    """Return the partition for a step with ``num_sequences`` contexts.

    It does not depend on the current context lengths, so a captured graph can be replayed.
    ``row_bytes`` is the result of :func:`compute_row_bytes`. ``max_context`` is the maximum context
    length in tokens; 0 if unknown.

    A step takes as long as its longest context. One program reads about 25 GB/s, so it would need
    0.2 ms for a context of 8192 tokens.
    """
    programs = num_sequences * num_kv_heads
    if programs > NUM_COUNTERS:
        return Partition(TILE_TOKENS, 1)
    partition = next(
        partition for max_programs, partition in PARTITIONS if programs <= max_programs
    )
    splits = (
        min(partition.splits, next_power_of_2(cdiv(max_context, partition.tokens)))
        if max_context
        else partition.splits
    )
    return Partition(
        partition.tile if row_bytes <= MAX_WIDE_ROW_BYTES else TILE_TOKENS, splits, partition.tokens
    )
