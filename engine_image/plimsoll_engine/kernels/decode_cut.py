"""How the attention of decoding rows is cut into programs: each way has a kernel of its own."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll_engine.kernels.sizes import cdiv, next_power_of_2

TILE, WIDE_TILE = 64, 128
WIDE_BYTES = 256
"""Of a row of keys: with longer ones two wide tiles do not fit into the memory of a processor."""
MAX_SPLITS = 32
SHORT = 8192
"""Tokens that one program may walk alone while the others have ended: 4 MiB of them, at the some
25 GB/s that one program reads, are .2 ms."""
FEW, SOME, MANY = 32, 256, 1024
PROGRAMS = 1536
"""Otherwise so many are started at least, as far as the contexts allow it."""


class Cut(NamedTuple):
    """How the work is cut: tokens that a program reads at once, and parts of each context."""

    tile: int
    splits: int


def row_bytes_of(dim: int, itemsize: int) -> int:
    """Return the bytes of one head's key of ``dim`` elements, as the kernel reads it: padded."""
    return next_power_of_2(dim) * itemsize


def cut_for(sequences: int, kv_heads: int, row_bytes: int, limit: int) -> Cut:
    """Return how to cut the contexts of ``sequences``, the same for all steps of a captured size.

    ``row_bytes`` are :func:`row_bytes_of` a key, ``limit`` is the most tokens of a context, 0 if
    unknown. By times on an H200, contexts of 300 to 1,700 tokens: from 128 sequences of 8 kv heads
    on, one program each is at 99 to 102 % of the copy bandwidth, and parts cost 7 %. Fewer programs
    run all at once and end with the longest: wider tiles, two programs a processor instead of four,
    even that out (64 sequences: 62 µs, with parts of narrow ones 70). By times of whole layers on
    an H100, contexts of 300 to 4,000 tokens: from 24 sequences on parts cost 1 to 2 %, and with
    fewer, more programs than run all at once (8 sequences: 3 %). With one or two sequences latency
    counts, and where one context may be a hundred times as long as the others, what it takes
    alone: parts.
    """
    programs = sequences * kv_heads
    short = 0 < limit <= SHORT
    if short and programs >= MANY:
        return Cut(TILE, 1)
    if short and programs >= FEW and row_bytes <= WIDE_BYTES:
        return Cut(WIDE_TILE, next_power_of_2(max(1, SOME // programs)))
    wanted = next_power_of_2(cdiv(PROGRAMS, programs))
    return Cut(TILE, min(MAX_SPLITS, wanted))
