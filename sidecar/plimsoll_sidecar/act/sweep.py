"""Removes what an engine that ended has left in the pod's ``/dev/shm``, where that is asked for.

Only files that were written while engines of this pod lived, the last of them before its end; that
belong to this user; and that no living process maps or has open. A process that holds a file all
the same loses its name alone: its memory stays mapped.
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
from plimsoll_sidecar.signals.process_table import ProcessId, age_s, lives
from plimsoll_sidecar.signals.shared_memory import SHM, SharedFile, UnknownError, is_pods_own

log = logging.getLogger(__name__)

FOLLOW_S = 15.0
"""Helpers may outlive the main process for so long, and hold what they will leave."""


class Sweep:
    """``root`` is the pod's tmpfs as this container sees it, ``proc`` the pod's processes."""

    def __init__(
        self,
        root: Path = SHM,
        now: Callable[[], float] = time.time,
        proc: Path = shared_memory.PROC,
    ) -> None:
        self._root, self._now, self._proc = root, now, proc
        self._main: ProcessId | None = None
        self._began: float | None = None
        self._alive_at = self._until = 0.0
        self._ended_at: float | None = None

    @classmethod
    def of_pod(cls) -> Sweep | None:
        """Return the sweep of this process's pod; None if ``/dev/shm`` is not the pod's own."""
        return cls() if is_pods_own() else None

    def follow(self, main: ProcessId | None, enabled: bool) -> int:
        """Note the engine's last known main process; return the bytes removed.

        If ``enabled``, it sweeps for a while after the end of that process.
        """
        now = self._now()
        alive = main is not None and lives(main)
        if self._main is not None and (not alive or main != self._main):
            # What was written in the last moments of its life may be the next engine's already.
            self._ended_at, self._until = self._alive_at, now + FOLLOW_S
            self._main = None
        if main is not None and alive:
            if self._began is None:
                self._began = now - age_s(main)
            self._main, self._alive_at = main, now
        if not enabled or self._ended_at is None or now >= self._until:
            return 0
        return self._sweep(self._ended_at)

    def _sweep(self, ended_at: float) -> int:
        try:
            listed = shared_memory.files(self._root)
            left = [file for file in listed if self._is_theirs(file, ended_at)]
            holders = shared_memory.holders(left, self._proc)
        except UnknownError as error:
            log.warning("cannot clean up %s: %s", self._root, error)
            return 0
        removed = 0
        for file in left:
            if holders.may_hold(file) or shared_memory.file_at(file.path) != file:
                continue
            with contextlib.suppress(OSError):
                os.unlink(file.path)
                removed += file.bytes
        if removed:
            log.warning("removed %s that an engine left in %s", format_bytes(removed), self._root)
        return removed

    def _is_theirs(self, file: SharedFile, ended_at: float) -> bool:
        began = self._began
        return (
            began is not None and began <= file.written_at <= ended_at and file.uid == os.geteuid()
        )
