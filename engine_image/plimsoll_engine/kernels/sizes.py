"""Sizes of grids and blocks, computed several times faster than by Triton's own functions."""

from __future__ import annotations

FEW_ROWS = 32
"""Maximum number of rows for the memory-bound products of decode steps."""
COUNTERS = 2048
"""Number of counters for programs that share work: one per kv head of a context, or per tile."""


def pad_few_rows(rows: int) -> int:
    """Return ``rows`` padded for a product of few rows, or 0 if above :data:`FEW_ROWS`."""
    return next((padded for padded in (FEW_ROWS // 2, FEW_ROWS) if rows <= padded), 0)


def cdiv(total: int, size: int) -> int:
    """Return ``total`` divided by ``size``, rounded up."""
    return -(-total // size)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least ``number``, which must be positive."""
    return 1 << (number - 1).bit_length()


def choose_rows_per_program(rows: int, block: int) -> int:
    """Return the number of rows, padded to ``block`` elements each, per program of a norm.

    A program processes about 4096 elements. If there are few rows, it processes fewer, so that
    there are more programs.
    """
    return next_power_of_2(max(1, min(4096 // block, cdiv(rows, 528))))


def choose_warps(elements: int) -> int:
    """Return the number of warps for a program of a norm that processes ``elements`` elements."""
    return 8 if elements > 2048 else 4
