"""Partition of decode attention into programs. Each partition has a kernel of its own."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll_engine.kernels.sizes import cdiv, next_power_of_2

TILE, WIDE_TILE = 64, 128
WIDE_BYTES = 256
"""Largest row of keys, in bytes, for which two wide tiles fit into shared memory."""
MAX_SPLITS = 32
SHORT = 8192
"""Context length in tokens that one program may process alone after the others have ended.

It is 4 MiB, which takes 0.2 ms at the 25 GB/s or so that one program reads.
"""
FEW, SOME, MANY = 32, 256, 1024
PROGRAMS = 1536
"""Minimum number of programs otherwise, as far as the contexts allow it."""


class Cut(NamedTuple):
    """Partition of the work: tokens that a program reads at a time, and parts of each context."""

    tile: int
    splits: int


def row_bytes_of(dim: int, itemsize: int) -> int:
    """Return the bytes of one head's key of ``dim`` elements, padded as the kernel reads it."""
    return next_power_of_2(dim) * itemsize


def cut_for(sequences: int, kv_heads: int, row_bytes: int, limit: int) -> Cut:
    """Return the partition of ``sequences`` contexts, the same for all steps of a captured size.

    ``row_bytes`` comes from :func:`row_bytes_of`. ``limit`` is the maximum number of tokens of a
    context, 0 if unknown.

    Measured on an H200 with contexts of 300 to 1,700 tokens and 8 kv heads. From 128 sequences on,
    one program each reaches 99 to 102 % of the copy bandwidth, and splitting costs 7 %. Fewer
    programs all run at once and end with the longest. Wider tiles, with two programs a
    multiprocessor instead of four, reduce that: 64 sequences take 62 µs, with narrow split tiles
    70.

    Measured on an H100 by whole layers with contexts of 300 to 4,000 tokens. From 24 sequences on,
    splitting costs 1 to 2 %. Below, more programs than run at once cost as well (8 sequences: 3 %).
    Splitting pays for one or two sequences, where latency counts. It also pays if one context may
    be a hundred times as long as the others.
    """
    programs = sequences * kv_heads
    short = 0 < limit <= SHORT
    if short and programs >= MANY:
        return Cut(TILE, 1)
    if short and programs >= FEW and row_bytes <= WIDE_BYTES:
        return Cut(WIDE_TILE, next_power_of_2(max(1, SOME // programs)))
    wanted = next_power_of_2(cdiv(PROGRAMS, programs))
    return Cut(TILE, min(MAX_SPLITS, wanted))
