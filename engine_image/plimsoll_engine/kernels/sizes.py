"""Sizes of grids and blocks on the host. Triton's own functions take several times as long."""

from __future__ import annotations

FEW_ROWS = 32
"""Maximum number of rows for the memory-bound products of decode steps."""
COUNTERS = 2048
"""Maximum number of contexts, times key heads, or of tiles of a product that programs may share."""


def pad_few_rows(rows: int) -> int:
    """Return the padded number of rows of a product for few rows; 0 above :data:`FEW_ROWS`."""
    return next((padded for padded in (FEW_ROWS // 2, FEW_ROWS) if rows <= padded), 0)


def cdiv(total: int, size: int) -> int:
    """Return ``total`` divided by ``size``, rounded up."""
    return -(-total // size)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below ``number``, which is at least 1."""
    return 1 << (number - 1).bit_length()


def rows_at_once(rows: int, block: int) -> int:
    """Return how many rows, padded to ``block`` elements, one program of a norm processes.

    A program processes about 4096 elements, but only one row if there are few rows, so that there
    are more programs.
    """
    return next_power_of_2(max(1, min(4096 // block, cdiv(rows, 528))))


def choose_warps(elements: int) -> int:
    """Return the number of warps of a norm's program with ``elements`` elements."""
    return 8 if elements > 2048 else 4
