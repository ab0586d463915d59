"""Store compiled Triton kernels even if the cache's volume is full or read-only.

New kernels are then stored in a private folder in the temporary directory, because Triton loads
each kernel from a file.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager

log = logging.getLogger(__name__)

_reported_folders: set[str] = set()


class DiskCache(FileCacheManager):  # type: ignore[misc]
    """Cache entry of one kernel, with the interface that Triton expects."""

    key: str
    cache_dir: str
    lock_path: str | None

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        try:
            super().__init__(key, override, dump)
        except OSError as error:
            self._use_fallback_folder(key, error)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of a compiled kernel's files by name; None if it is not cached."""
        files: dict[str, str] | None = super().get_group(filename)
        if files is None and (_get_fallback_path() / self.key).is_dir():
            cache_dir, self.cache_dir = self.cache_dir, str(_prepare_fallback_folder() / self.key)
            files = super().get_group(filename)
            if files is None:
                self.cache_dir = cache_dir
        return files

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        """Store a file of a compiled kernel, and return its path.

        Raises OSError if neither the cache nor the fallback folder is writable.
        """
        try:
            return str(super().put(data, filename, binary))
        except OSError as error:
            if Path(self.cache_dir).is_relative_to(_get_fallback_path()):
                raise
            for partial in Path(self.cache_dir).glob(f"tmp.pid_{os.getpid()}_*"):
                shutil.rmtree(partial, ignore_errors=True)
            self._use_fallback_folder(self.key, error)
            return str(super().put(data, filename, binary))

    def _use_fallback_folder(self, key: str, error: OSError) -> None:
        folder = _prepare_fallback_folder()
        where = knobs.cache.dir
        if where not in _reported_folders:
            _reported_folders.add(where)
            log.warning(
                "cannot write to TRITON_CACHE_DIR %s: %s; storing compiled kernels in %s instead:"
                " free space, or set TRITON_CACHE_DIR to a writable directory",
                where, error.strerror, folder,
            )  # fmt: skip
        self.key = key
        self.cache_dir = str(folder / key)
        self.lock_path = str(folder / key / "lock")
        os.makedirs(self.cache_dir, exist_ok=True)


def _get_fallback_path() -> Path:
    return Path(tempfile.gettempdir()) / f"plimsoll-triton-{os.geteuid()}"


def _prepare_fallback_folder() -> Path:
    # Raises OSError if the folder is not writable, or if other users can access it.
    folder = _get_fallback_path()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot store compiled kernels in TRITON_CACHE_DIR ({knobs.cache.dir}) or in"
            f" {folder}: {error.strerror}",
        ) from None
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(
            f"{folder} is accessible to other users: remove the folder, or set TMPDIR to "
            "another directory"
        )
    return folder
