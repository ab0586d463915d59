"""Compute sizes of grids and blocks, faster than Triton's own functions."""

from __future__ import annotations

# Maximum number of rows of a memory-bound product, which has kernels of its own.
MAX_FEW_ROWS = 32
# For programs that share work: one per context and kv head, or per tile.
NUM_COUNTERS = 2048


def pad_few_rows(num_rows: int) -> int:
    """Return ``num_rows`` padded to a supported number; 0 if more than :data:`MAX_FEW_ROWS`."""
    return next((padded for padded in (MAX_FEW_ROWS // 2, MAX_FEW_ROWS) if num_rows <= padded), 0)


def cdiv(total: int, size: int) -> int:
    """Return ``total`` divided by ``size``, rounded up."""
    return -(-total // size)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least ``number``, which must be positive."""
    return 1 << (number - 1).bit_length()


def choose_rows_per_program(num_rows: int, block_size: int) -> int:
    """Return the number of rows, each padded to ``block_size`` elements, per program of a norm."""
    return next_power_of_2(max(1, min(4096 // block_size, cdiv(num_rows, 528))))


def choose_warps(num_elements: int) -> int:
    """Return the number of warps for a norm's program with ``num_elements`` elements."""
    return 8 if num_elements > 2048 else 4
