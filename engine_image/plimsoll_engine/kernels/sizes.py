"""Sizes of grids and blocks, for the host: Triton's own functions take several times as long."""

from __future__ import annotations

FEW_ROWS = 32
"""Up to so many rows have products of their own, which are bound by the matrix that they read."""


def few_padded(rows: int) -> int:
    """Return how many rows the kernel of such products has for ``rows``; 0 if they are too many."""
    return next((padded for padded in (FEW_ROWS // 2, FEW_ROWS) if rows <= padded), 0)


def cdiv(total: int, size: int) -> int:
    """Return how many parts of ``size`` cover ``total``."""
    return -(-total // size)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is not below ``number``, which is at least 1."""
    return 1 << (number - 1).bit_length()


def rows_at_once(rows: int, block: int) -> int:
    """Return how many of ``rows``, padded to ``block`` elements, a program of a norm takes.

    Some 4096 elements; with few rows one, so that there are many programs.
    """
    return next_power_of_2(max(1, min(4096 // block, cdiv(rows, 528))))


def warps_of(elements: int) -> int:
    """Return how many warps such a program with so many elements has."""
    return 8 if elements > 2048 else 4
