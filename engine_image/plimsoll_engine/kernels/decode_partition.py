"""Partition decode attention into GPU programs."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll_engine.kernels.sizes import NUM_COUNTERS, cdiv, next_power_of_2

# Number of tokens that a program reads at a time.
TILE_TOKENS, WIDE_TILE_TOKENS = 64, 128
# Maximum size of one head's key with which two wide tiles fit into shared memory.
MAX_WIDE_ROW_BYTES = 256


class Partition(NamedTuple):
    """Partition of each context into parts, each for one program."""

    tile: int  # tokens that a program reads at a time
    splits: int  # maximum number of parts
    tokens: int = 0  # minimum number of tokens in a part


# Pairs (maximum number of contexts * kv heads, partition up to that number). With more contexts,
# parts may be longer, because other contexts keep the GPU busy. Programs without a part also take
# time: 6,000 of them take 2 us on an H200. The values were chosen on an H200 with 1 to 256 contexts
# of 320 tokens, 300 to 1,700, 300 to 4,000, or lognormal (median 600, sigma 0.9). bench/kernels.py
# repeats some of these measurements.
PARTITIONS = (
    (32, Partition(WIDE_TILE_TOKENS, 32, 128)),
    (64, Partition(WIDE_TILE_TOKENS, 32, 256)),
    (511, Partition(WIDE_TILE_TOKENS, 32, 512)),
    (1023, Partition(WIDE_TILE_TOKENS, 16, 1024)),
    (NUM_COUNTERS, Partition(TILE_TOKENS, 4, 1024)),
)


def compute_row_bytes(dim: int, itemsize: int) -> int:
    """Return the size of one head's key in bytes, with the padding of the kernel."""
    return next_power_of_2(dim) * itemsize


def choose_partition(
    num_sequences: int, num_kv_heads: int, row_bytes: int, max_context: int
) -> Partition:
    """Return the partition for a step with ``num_sequences`` contexts.

    It does not depend on the current context lengths, so a captured graph can be replayed.
    ``max_context`` is in tokens; 0 if unknown.
    """
    # A step takes as long as its longest context. One program reads about 25 GB/s, so it would need
    # 0.2 ms for a context of 8192 tokens.
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
