"""Compute sizes of grids and blocks, several times faster than Triton's own functions."""

from __future__ import annotations

MAX_FEW_ROWS = 32
"""Maximum number of rows of a product that counts as one of a few rows (memory-bound)."""
NUM_COUNTERS = 2048
"""Number of counters for programs that share work: one per context and kv head, or per tile."""


def pad_few_rows(rows: int) -> int:
    """Return ``rows`` padded to a supported number, or 0 if more than :data:`MAX_FEW_ROWS`."""
    return next((padded for padded in (MAX_FEW_ROWS // 2, MAX_FEW_ROWS) if rows <= padded), 0)


def cdiv(total: int, size: int) -> int:
    """Return ``total`` divided by ``size``, rounded up."""
    return -(-total // size)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not less than ``number``, a positive number."""
    return 1 << (number - 1).bit_length()


def choose_rows_per_program(rows: int, block: int) -> int:
    """Return how many rows, each padded to ``block`` elements, a program of a norm processes.

    A program processes about 4096 elements. If there are few rows, it processes fewer, so that
    there are more programs.
    """
    return next_power_of_2(max(1, min(4096 // block, cdiv(rows, 528))))


def choose_warps(elements: int) -> int:
    """Return the number of warps for a program of a norm with ``elements`` elements."""
    return 8 if elements > 2048 else 4
