"""Remove files that an engine left behind in ``/dev/shm``, if the configuration allows it.

A file is removed only if it belongs to this user, an engine of this pod has written it, and no
running process has mapped or opened it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from plimsoll_api.units import format_bytes
from plimsoll_sidecar.signals import shared_memory
from plimsoll_sidecar.signals.process_table import ProcessId, compute_age_s, is_running
from plimsoll_sidecar.signals.shared_memory import (
    SHM,
    SharedFile,
    UnknownUsersError,
    is_shm_private,
)

log = logging.getLogger(__name__)

# After the end of the main process, helper processes may still use files for this time.
HELPER_EXIT_TIMEOUT_S = 15.0


class SharedMemorySweep:
    """Removes files that an ended engine left behind in ``root``, the pod's ``/dev/shm``."""

    def __init__(
        self,
        root: Path = SHM,
        clock: Callable[[], float] = time.time,
        proc: Path = shared_memory.PROC,
    ) -> None:
        self._root, self._clock, self._proc = root, clock, proc
        self._main: ProcessId | None = None
        self._first_started_at: float | None = None
        self._last_alive_at = self._sweep_until = 0.0
        self._ended_at: float | None = None

    @classmethod
    def create_for_this_pod(cls) -> SharedMemorySweep | None:
        """Return the sweep for this pod; None if ``/dev/shm`` belongs to the node."""
        return cls() if is_shm_private() else None

    def remove_leftovers_after_end(self, main: ProcessId | None, is_enabled: bool) -> int:
        """Remove leftover files after the main process has ended, and return the removed bytes.

        ``main`` is the engine's last known main process; None if unknown.
        """
        now = self._clock()
        alive = main is not None and is_running(main)
        if self._main is not None and (not alive or main != self._main):
            # Files written after the last update may belong to the next engine.
            self._ended_at, self._sweep_until = self._last_alive_at, now + HELPER_EXIT_TIMEOUT_S
            self._main = None
        if main is not None and alive:
            if self._first_started_at is None:
                self._first_started_at = now - compute_age_s(main)
            self._main, self._last_alive_at = main, now
        if not is_enabled or self._ended_at is None or now >= self._sweep_until:
            return 0
        return self._remove_leftover_files(self._ended_at)

    def _remove_leftover_files(self, ended_at: float) -> int:
        try:
            listed = shared_memory.list_files(self._root)
            left = [file for file in listed if self._was_left_by_engine(file, ended_at)]
            holders = shared_memory.find_files_in_use(left, self._proc)
        except UnknownUsersError as error:
            log.warning(
                "cannot remove the files that an earlier engine left behind in %s: %s",
                self._root,
                error,
            )
            return 0
        removed = 0
        for file in left:
            if holders.may_include(file) or shared_memory.read_file(file.path) != file:
                continue
            with contextlib.suppress(OSError):
                os.unlink(file.path)
                removed += file.bytes
        if removed:
            log.warning(
                "removed %s of files that an earlier engine left behind in %s",
                format_bytes(removed),
                self._root,
            )
        return removed

    def _was_left_by_engine(self, file: SharedFile, ended_at: float) -> bool:
        began = self._first_started_at
        return (
            began is not None and began <= file.written_at <= ended_at and file.uid == os.geteuid()
        )
