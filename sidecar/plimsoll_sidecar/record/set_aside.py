"""What of the stored state could not be read: kept for diagnosis, in one bounded folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

FOLDER = "set-aside"
KEPT = 12
KEPT_BYTES = 32 << 20
MAX_PART_BYTES = 1 << 20
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class SetAside:
    """Files ``NNNN-NAME``, numbered as they come: a clock that is set changes no order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, name: str, body: bytes) -> Path:
        """Write a part of a file, at most 1 MiB of it. Raises OSError."""
        path = self._next(name)
        path.write_bytes(body[:MAX_PART_BYTES])
        self._bound()
        return path

    def move(self, source: Path, beside: tuple[str, ...] = ()) -> Path:
        """Move a whole file, and those that belong to it by these suffixes. Raises OSError."""
        path = self._next(source.name)
        os.replace(source, path)
        for suffix in beside:
            companion = source.with_name(source.name + suffix)
            if companion.exists():
                os.replace(companion, path.with_name(path.name + suffix))
        self._bound()
        return path

    def names(self) -> list[str]:
        """Oldest first; empty where there is no folder, or none that can be read."""
        try:
            return sorted(os.listdir(self.folder))
        except OSError:
            return []

    def _next(self, name: str) -> Path:
        self.folder.mkdir(exist_ok=True)
        numbers = [int(known[:4]) for known in self.names() if known[:4].isdigit()]
        number = max(numbers, default=0) + 1
        return self.folder / f"{number % 10_000:04d}-{_UNSAFE.sub('_', name)[:120]}"

    def _bound(self) -> None:
        names = self.names()
        sizes = [(self.folder / name).stat().st_size for name in names]
        while len(names) > KEPT or (len(names) > 1 and sum(sizes) > KEPT_BYTES):
            (self.folder / names.pop(0)).unlink()
            sizes.pop(0)
