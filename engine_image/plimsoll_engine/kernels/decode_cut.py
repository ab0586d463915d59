"""Partition of decode attention into programs. Each partition has its own kernel."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll_engine.kernels.sizes import cdiv, next_power_of_2

TILE, WIDE_TILE = 64, 128
WIDE_BYTES = 256
"""Maximum size of a row of keys, in bytes, for which two wide tiles fit into shared memory."""
MAX_SPLITS = 32
SHORT = 8192
"""Context length in tokens that one program may process alone after the others have ended.

Its keys and values take 4 MiB, which one program reads in 0.2 ms (about 25 GB/s).
"""
FEW, SOME, MANY = 32, 256, 1024
PROGRAMS = 1536
"""Minimum number of programs in other cases, if the contexts are long enough."""


class Cut(NamedTuple):
    """Partition of the work: tokens that a program reads at a time, and parts per context."""

    tile: int
    splits: int


def compute_row_bytes(dim: int, itemsize: int) -> int:
    """Return the bytes of one head's key with ``dim`` elements, padded as the kernel reads it."""
    return next_power_of_2(dim) * itemsize


def choose_cut(sequences: int, kv_heads: int, row_bytes: int, limit: int) -> Cut:
    """Return the partition of ``sequences`` contexts, equal for all steps of a captured size.

    ``row_bytes`` is the result of :func:`compute_row_bytes`. ``limit`` is the maximum number of
    tokens in a context; 0 if unknown.

    Measured on an H200 with contexts of 300 to 1,700 tokens and 8 kv heads. From 128 sequences on,
    one program per context reaches 99 to 102 % of the copy bandwidth, and splitting costs 7 %. With
    fewer sequences, all programs run at once and end with the longest context. Wider tiles, with
    two programs per multiprocessor instead of four, reduce that effect: 64 sequences take 62 µs,
    and 70 µs with narrow split tiles.

    Measured on an H100 with whole layers and contexts of 300 to 4,000 tokens. From 24 sequences on,
    splitting costs 1 to 2 %. With fewer sequences, starting more programs than can run at once also
    costs time (8 sequences: 3 %). Splitting pays for one or two sequences, where latency counts. It
    also pays if one context may be a hundred times as long as the others.
    """
    programs = sequences * kv_heads
    short = 0 < limit <= SHORT
    if short and programs >= MANY:
        return Cut(TILE, 1)
    if short and programs >= FEW and row_bytes <= WIDE_BYTES:
        return Cut(WIDE_TILE, next_power_of_2(max(1, SOME // programs)))
    wanted = next_power_of_2(cdiv(PROGRAMS, programs))
    return Cut(TILE, min(MAX_SPLITS, wanted))
