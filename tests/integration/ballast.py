"""Fills a volume to its last byte."""

from __future__ import annotations

from pathlib import Path


def fill(folder: Path) -> Path:
    """The file that takes the room; only for a small volume of the test's own."""
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as out:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while out.tell() < 64 << 20:
                    out.write(b"x" * size)
            except OSError:
                continue
    return ballast
