"""A swap file for as long as a test runs."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

AREA_MIB = 64


@contextmanager
def swap_file(folder: Path) -> Iterator[None]:
    """64 MiB of swap in ``folder``; skips the test where this machine refuses it."""
    if os.geteuid() != 0:
        pytest.skip("a swap file needs root")
    area, libc = folder / "swap", ctypes.CDLL(None, use_errno=True)
    with area.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        for _ in range(AREA_MIB):
            file.write(bytes(1 << 20))
    subprocess.run(["mkswap", str(area)], check=True, capture_output=True, timeout=20)
    if libc.swapon(os.fsencode(area), 0) != 0:
        pytest.skip(f"this machine refuses a swap file: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        assert libc.swapoff(os.fsencode(area)) == 0
