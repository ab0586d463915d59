"""A real small volume for tests of full and read-only disks: a tmpfs in a mount namespace of its
own, which ends with the process that holds it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.ballast import fill
from tests.missing import lacks

VOLUME_KIB = 512


class Volume:
    """A tmpfs at ``path`` that only the programs started with :meth:`inside` see there."""

    def __init__(self, path: Path, size_kib: int = VOLUME_KIB) -> None:
        self.path = path
        missing = [tool for tool in ("unshare", "nsenter", "mount") if shutil.which(tool) is None]
        if missing or os.geteuid() != 0:
            lacks(f"{', '.join(missing)} missing" if missing else "mounts need root")
        script = f"mount -t tmpfs -o size={size_kib}k tmpfs {path} && echo mounted && cat"
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "mounted\n":
            lacks("this machine allows no mounts")
        self.seen = Path(f"/proc/{self._holder.pid}/root") / path.relative_to("/")
        """The same folder from outside."""

    def inside(self, *command: str) -> list[str]:
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", *command]

    def mount(self, options: str, at: Path | None = None) -> None:
        command = ["mount", "-o", options, str(at or self.path)]
        subprocess.run(self.inside(*command), check=True, timeout=30)

    def fill(self) -> Path:
        """Takes the last byte."""
        return fill(self.seen)

    def close(self) -> None:
        self._holder.communicate(timeout=30)


@contextmanager
def volume(path: Path, size_kib: int = VOLUME_KIB) -> Iterator[Volume]:
    mounted = Volume(path, size_kib)
    try:
        yield mounted
    finally:
        mounted.close()
