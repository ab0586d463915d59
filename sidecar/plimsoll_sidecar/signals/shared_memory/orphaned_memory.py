"""Memory of ``/dev/shm`` that no living process of the pod holds, as part of each sample.

A scan a minute, and one more when the engine's main process has changed. What was found last stands
for a few minutes when a scan cannot tell; then it is unknown. Why it could not is logged, and
``plimsoll doctor`` shows it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from plimsoll_sidecar.signals.process.process_table import ProcessId, age_s, identify
from plimsoll_sidecar.signals.shared_memory import shared_files
from plimsoll_sidecar.signals.shared_memory.shared_files import UnknownError

log = logging.getLogger(__name__)

SHM = Path("/dev/shm")
SCAN_S = 60.0
KEPT_S = 300.0
MIN_AGE_S = 60.0
"""Between its making and its first mapping a file is nobody's for an instant."""


class Orphaned(msgspec.Struct, frozen=True):
    """Bytes; None is unknown.

    ``earlier`` is the part that was written before the engine's main process started: it is charged
    to a container that has ended, not to the engine's own group.
    """

    bytes: int | None = None
    earlier: int | None = None


UNKNOWN = Orphaned()


class OrphanedMemory:
    """``root`` is the pod's tmpfs as this container sees it, ``proc`` the pod's processes.

    ``trouble`` says why the newest scan could not tell; None if it could.
    """

    def __init__(
        self,
        root: Path = SHM,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        proc: Path = shared_files.PROC,
    ) -> None:
        self._proc = proc
        self._root, self._clock, self._now = root, clock, now
        self._next = self._known_until = 0.0
        self._engine: ProcessId | None = None
        self._started_at = 0.0
        self._newest = UNKNOWN
        self.trouble: str | None = "no engine has been seen"

    @classmethod
    def of_pod(cls) -> OrphanedMemory | None:
        """Return that of the pod that this process runs in.

        None outside of one, or where ``/dev/shm`` is the machine's.
        """
        return cls() if is_pods_own() else None

    def read(self, pid: int | None) -> Orphaned:
        """``pid`` is the engine's main process, None where none lives.

        Unknown until an engine was seen: its processes must be visible for anything to be said of
        what they hold.
        """
        now = self._clock()
        engine = identify(pid) if pid is not None else None
        renewed = engine is not None and engine != self._engine
        if engine is not None and renewed:
            self._engine, self._started_at = engine, self._now() - age_s(engine)
        if self._engine is not None and (renewed or now >= self._next):
            self._next = now + SCAN_S
            self._look(engine, now)
        return self._newest

    def _look(self, engine: ProcessId | None, now: float) -> None:
        before = self.trouble
        try:
            self._newest, self._known_until = self._scan(engine), now + KEPT_S
            self.trouble = None
        except UnknownError as error:
            self.trouble = str(error)
            if now >= self._known_until:
                self._newest = UNKNOWN
        if self.trouble is not None and self.trouble != before:
            log.warning("shared memory that no process holds is unknown: %s", self.trouble)

    def _scan(self, engine: ProcessId | None) -> Orphaned:
        if engine is not None and not _same(self._root, engine.pid):
            raise UnknownError(f"process {engine.pid} has another {SHM}, or cannot be asked")
        now = self._now()
        listed = shared_files.files(self._root)
        aged = [file for file in listed if now - file.written_at >= MIN_AGE_S]
        holders = shared_files.holders(aged, self._proc)
        left = [file for file in aged if file.id not in holders.files]
        if any(holders.may_hold(file) for file in left):
            raise UnknownError("processes of other users, which cannot be read, may hold some")
        segments = shared_files.segments(MIN_AGE_S, now, self._proc)
        return Orphaned(
            bytes=sum(file.bytes for file in left) + segments,
            earlier=sum(file.bytes for file in left if file.written_at < self._started_at),
        )


def is_pods_own() -> bool:
    """Whether ``/dev/shm`` is a tmpfs that this pod shares with nobody."""
    if not os.environ.get("POD_NAME"):
        return False
    try:
        if os.stat("/proc/self/ns/ipc").st_ino == shared_files.HOST_IPC:
            return False  # hostIPC: it may be the machine's
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    kinds = [line.partition(" - ")[2].split()[0] for line in mounts if line.split()[4] == str(SHM)]
    return bool(kinds) and kinds[-1] == "tmpfs"


def _same(root: Path, pid: int) -> bool:
    """Whether the process sees the same tmpfs at ``/dev/shm``.

    One that may not be asked does not: what it holds could not be read either.
    """
    try:
        return os.stat(f"/proc/{pid}/root{SHM}").st_dev == os.stat(root).st_dev
    except OSError:
        return False
