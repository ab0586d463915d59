"""Partition of decode attention into programs. Each partition has its own kernel."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll_engine.kernels.sizes import COUNTERS, cdiv, next_power_of_2

TILE, WIDE_TILE = 64, 128
WIDE_BYTES = 256
"""Maximum size of a row of keys, in bytes, for which two wide tiles fit into shared memory."""


class Cut(NamedTuple):
    """Partition of the work: a program reads ``tile`` tokens at a time.

    A context has at most ``splits`` parts, of at least ``tokens`` tokens each.
    """

    tile: int
    splits: int
    tokens: int = 0


CUTS = (
    (32, Cut(WIDE_TILE, 32, 128)),
    (64, Cut(WIDE_TILE, 32, 256)),
    (511, Cut(WIDE_TILE, 32, 512)),
    (1023, Cut(WIDE_TILE, 16, 1024)),
    (COUNTERS, Cut(TILE, 4, 1024)),
)
"""Partitions by the maximum number of contexts, times key heads.

The more there are, the longer a part may be: other contexts keep the GPU busy. Programs without a
part are not free: on an H200, 6,000 of them take 2 us. Chosen on an H200 with 1 to 256 contexts of
320 tokens, of 300 to 1,700, and of 300 to 4,000. Others had lognormal lengths (median 600, sigma
0.9). ``bench/kernels.py`` measures some of them.
"""


def compute_row_bytes(dim: int, itemsize: int) -> int:
    """Return the bytes of one head's key with ``dim`` elements, padded as the kernel reads it."""
    return next_power_of_2(dim) * itemsize


def choose_cut(sequences: int, kv_heads: int, row_bytes: int, limit: int) -> Cut:
    """Return the partition of ``sequences`` contexts, equal for all steps of a captured size.

    ``row_bytes`` is the result of :func:`compute_row_bytes`. ``limit`` is the maximum number of
    tokens in a context; 0 if unknown.

    One program reads about 25 GB/s, so that a context of 8192 tokens takes 0.2 ms, and a step ends
    with its longest context.
    """
    programs = sequences * kv_heads
    if programs > COUNTERS:
        return Cut(TILE, 1)
    cut = next(cut for most, cut in CUTS if programs <= most)
    splits = min(cut.splits, next_power_of_2(cdiv(limit, cut.tokens))) if limit else cut.splits
    return Cut(cut.tile if row_bytes <= WIDE_BYTES else TILE, splits, cut.tokens)
