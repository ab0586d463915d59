"""Partition of decode attention into GPU programs. Each partition is compiled to its own kernel."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll_engine.kernels.sizes import COUNTERS, cdiv, next_power_of_2

TILE, WIDE_TILE = 64, 128
WIDE_BYTES = 256
"""Maximum size of a row of keys, in bytes, for which two wide tiles fit into shared memory."""


class Cut(NamedTuple):
    """Partition of contexts into parts, one per program.

    A context has at most ``splits`` parts of at least ``tokens`` tokens each. A program reads
    ``tile`` tokens at a time.
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
"""Pairs of a maximum number of contexts * kv heads, and the partition to use up to that number.

With more contexts, parts may be longer, because the other contexts keep the GPU busy. Programs
without a part are not free: on an H200, 6,000 of them take 2 us. Chosen on an H200 with 1 to 256
contexts. Their lengths were 320 tokens, 300 to 1,700, 300 to 4,000, or lognormal (median 600, sigma
0.9). ``bench/kernels.py`` repeats some of these measurements.
"""


def compute_row_bytes(dim: int, itemsize: int) -> int:
    """Return the size of one head's key in bytes, with ``dim`` padded as in the kernel."""
    return next_power_of_2(dim) * itemsize


def choose_cut(sequences: int, kv_heads: int, row_bytes: int, limit: int) -> Cut:
    """Return the partition for a step with ``sequences`` contexts.

    It does not depend on the current context lengths, so a captured graph can be replayed.
    ``row_bytes`` is the result of :func:`compute_row_bytes`. ``limit`` is the maximum context
    length in tokens, or 0 if unknown.

    A single program reads about 25 GB/s, which is 0.2 ms for a context of 8192 tokens, and a step
    takes as long as its longest context.
    """
    programs = sequences * kv_heads
    if programs > COUNTERS:
        return Cut(TILE, 1)
    cut = next(cut for most, cut in CUTS if programs <= most)
    splits = min(cut.splits, next_power_of_2(cdiv(limit, cut.tokens))) if limit else cut.splits
    return Cut(cut.tile if row_bytes <= WIDE_BYTES else TILE, splits, cut.tokens)
