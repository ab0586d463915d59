"""Sizes of grids and blocks, for the host: Triton's own functions take several times as long."""

from __future__ import annotations


def cdiv(total: int, size: int) -> int:
    """Return how many parts of ``size`` cover ``total``."""
    return -(-total // size)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is not below ``number``, which is at least 1."""
    return 1 << (number - 1).bit_length()
