"""Memory of ``/dev/shm`` that no living process of the pod holds, as part of each sample.

A file of ``/dev/shm`` outlives the process that made it, and also its container if the pod brings
the tmpfs. It then belongs to no process, and is never freed. Devices and inodes in
``/proc/PID/maps`` and ``/proc/PID/fd`` say which processes hold a file. Reading them is bounded,
and cheap enough for once a minute. If they are too large or not readable, the size is unknown, and
:class:`UnknownError` says why.

There is a scan every minute, and one more when the engine's main process has changed. If a scan
fails, the last result is used for a few minutes; after that, the size is unknown. The reason is
logged, and ``plimsoll doctor`` shows it.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from plimsoll_sidecar.signals.process_table import (
    MAX_DESCRIPTORS,
    ProcessId,
    age_s,
    first_names,
    identify,
)

PROC = Path("/proc")
MAX_FILES = 4096
MAX_FOLDER_DEPTH = 8
MAX_PROCESSES = 512
MAX_MAPS = 16 << 20
"""Bytes of one process's maps: a large engine has a tenth of it."""
BLOCK = 512
HOST_IPC = 0xEFFFFFFF
"""Inode of the machine's own IPC namespace (PROC_IPC_INIT_INO): its segments are everybody's."""
PRIVATE = 0o077

FileId = tuple[int, int]
"""Device and inode."""


class UnknownError(Exception):
    """It cannot be said who holds shared memory; the message says why."""


class SharedFile(msgspec.Struct, frozen=True):
    """One file of a tmpfs.

    ``bytes`` are its blocks, swapped ones included; ``written_at`` is Unix seconds. ``private``
    says that no other user may open it.
    """

    path: str
    id: FileId
    bytes: int
    written_at: float
    uid: int
    private: bool


class Holders(msgspec.Struct, frozen=True):
    """The files that living processes hold.

    ``strangers`` says that processes of other users, who could open what is not private, cannot be
    read.
    """

    files: frozenset[FileId]
    strangers: bool

    def may_hold(self, file: SharedFile) -> bool:
        """Whether the file is held, or cannot be shown not to be."""
        return file.id in self.files or (self.strangers and not file.private)


def files(root: Path) -> list[SharedFile]:
    """Return every file below ``root``, on its own file system.

    Raises :class:`UnknownError` if they are too many or cannot be listed.
    """
    try:
        device = os.lstat(root).st_dev
        found: list[SharedFile] = []
        for entry in _walk(str(root), device, 0):
            if len(found) >= MAX_FILES:
                raise UnknownError(f"{root} holds more than {MAX_FILES} files")
            found.append(entry)
    except OSError as error:
        raise UnknownError(f"{error.filename or root}: {error.strerror}") from None
    # Two names of one file have its blocks but once.
    return list({file.id: file for file in found}.values())


def file_at(path: str) -> SharedFile | None:
    """Return the regular file that has this name now; None where there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return _file(path, found) if stat.S_ISREG(found.st_mode) else None


def holders(listed: Iterable[SharedFile], proc: Path = PROC) -> Holders:
    """Return who holds which of these files now.

    Raises :class:`UnknownError` if a process could hold one unseen.
    """
    wanted = {file.id for file in listed}
    if not wanted:
        return Holders(frozenset(), False)
    held: set[FileId] = set()
    strangers = False
    try:
        pids = [name for name in os.listdir(proc) if name.isdigit()]
    except OSError as error:
        raise UnknownError(f"{proc}: {error.strerror}") from None
    if len(pids) > MAX_PROCESSES:
        raise UnknownError(f"the pod has more than {MAX_PROCESSES} processes")
    for pid in pids:
        folder = proc / pid
        try:
            held |= _mapped(folder, wanted) | _opened(folder, wanted)
        except PermissionError:
            owner = _stranger(folder)
            if owner == 0:  # who may open anything
                raise UnknownError(f"process {pid} of root cannot be read") from None
            strangers = strangers or owner is not None
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UnknownError(f"process {pid}: {reason}") from None
    return Holders(frozenset(held), strangers)


def segments(least_age_s: float, now: float, proc: Path = PROC) -> int:
    """Return the bytes of SysV segments that no process has attached for ``least_age_s``.

    ``now`` is Unix seconds. Raises :class:`UnknownError` if they are too many or not this pod's
    own, or the kernel does not list them. A kernel without SysV segments has none.
    """
    table = proc / "sysvipc/shm"
    try:
        if os.stat(proc / "self/ns/ipc").st_ino == HOST_IPC:
            raise UnknownError("the pod shares the IPC namespace of its node")
        with table.open() as lines:
            rows = list(itertools.islice(lines, MAX_FILES + 2))
        if len(rows) > MAX_FILES + 1:
            raise UnknownError(f"the pod has more than {MAX_FILES} SysV segments")
        names = rows[0].split()
        total = 0
        for line in rows[1:]:
            row = dict(zip(names, map(int, line.split()), strict=False))
            changed = max(row["dtime"], row["ctime"])
            if row["nattch"] == 0 and now - changed >= least_age_s:
                total += row["rss"] + row["swap"]
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UnknownError(f"{table}: {getattr(error, 'strerror', None) or error!r}") from None
    return total


def _walk(folder: str, device: int, depth: int) -> Iterator[SharedFile]:
    if depth > MAX_FOLDER_DEPTH:
        raise UnknownError(f"{folder} is more than {MAX_FOLDER_DEPTH} folders deep")
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if found.st_dev != device:
                continue
            if stat.S_ISDIR(found.st_mode):
                yield from _walk(entry.path, device, depth + 1)
            elif stat.S_ISREG(found.st_mode):
                yield _file(entry.path, found)


def _file(path: str, found: os.stat_result) -> SharedFile:
    return SharedFile(
        path=path,
        id=(found.st_dev, found.st_ino),
        bytes=found.st_blocks * BLOCK,
        written_at=found.st_ctime,  # anyone may set the other to any year
        uid=found.st_uid,
        private=not found.st_mode & PRIVATE,
    )


def _mapped(folder: Path, wanted: set[FileId]) -> set[FileId]:
    with (folder / "maps").open("rb") as maps:
        text = maps.read(MAX_MAPS + 1)
    if len(text) > MAX_MAPS:
        raise UnknownError(f"process {folder.name} has more than {MAX_MAPS >> 20} MiB of mappings")
    found: set[FileId] = set()
    for device in {device for device, _ in wanted}:
        # A path that looks like it counts as well: then one file more is held, never one less.
        name = b"%02x:%02x" % (os.major(device), os.minor(device))
        found |= {(device, int(inode)) for inode in re.findall(b" " + name + rb" (\d+) ", text)}
    return found & wanted


def _opened(folder: Path, wanted: set[FileId]) -> set[FileId]:
    inodes = {inode for _, inode in wanted}
    names = first_names(folder / "fd", MAX_DESCRIPTORS + 1)
    if len(names) > MAX_DESCRIPTORS:
        raise UnknownError(f"process {folder.name} has more than {MAX_DESCRIPTORS} open files")
    found: set[FileId] = set()
    for name in names:
        try:
            # To ask for a file of a network that hangs would hang, too: only likely ones are.
            if _inode(folder, name) not in {None, *inodes}:
                continue
            # By strings: see process_table.read.
            status = os.stat(f"{folder}/fd/{name}")
        except (FileNotFoundError, ProcessLookupError):
            continue  # closed meanwhile
        found.add((status.st_dev, status.st_ino))
    return found & wanted


def _inode(folder: Path, name: str) -> int | None:
    """Return the inode of an open file; None where the kernel, before 5.14, does not say."""
    with open(f"{folder}/fdinfo/{name}") as file:
        lines = file.read().splitlines()
    for line in lines:
        if line.startswith("ino:"):
            return int(line.split()[1])
    return None


def _stranger(folder: Path) -> int | None:
    """Return the owner of a process that may not be read.

    None for the pod's sandbox, which opens nothing, and for a process that has ended.
    """
    try:
        if folder.name == "1" and (folder / "comm").read_text().strip() == "pause":
            return None
        return folder.stat().st_uid
    except OSError:
        return None


log = logging.getLogger(__name__)

SHM = Path("/dev/shm")
SCAN_S = 60.0
KEPT_S = 300.0
MIN_AGE_S = 60.0
ENDED_AGE_S = 2.0
"""A new file belongs to no process for an instant, until it is first mapped. What was written
before the engine started is its predecessor's, which may have leaked to its end."""


class Orphaned(msgspec.Struct, frozen=True):
    """Bytes; None is unknown.

    ``earlier`` is the part that was written before the engine's main process started: the kernel
    charges it to a container that has ended, not to the engine's control group.
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
        proc: Path = PROC,
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

        Unknown until an engine was seen: before, its processes may just not be visible.
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
        listed = files(self._root)
        aged = [
            file
            for file in listed
            if now - file.written_at
            >= (ENDED_AGE_S if file.written_at < self._started_at else MIN_AGE_S)
        ]
        held = holders(aged, self._proc)
        left = [file for file in aged if file.id not in held.files]
        if any(held.may_hold(file) for file in left):
            raise UnknownError("processes of other users, which cannot be read, may hold some")
        unattached = segments(MIN_AGE_S, now, self._proc)
        return Orphaned(
            bytes=sum(file.bytes for file in left) + unattached,
            earlier=sum(file.bytes for file in left if file.written_at < self._started_at),
        )


def is_pods_own() -> bool:
    """Whether ``/dev/shm`` is a tmpfs of this pod alone."""
    if not os.environ.get("POD_NAME"):
        return False
    try:
        if os.stat("/proc/self/ns/ipc").st_ino == HOST_IPC:
            return False  # hostIPC: it may be the machine's
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    kinds = [line.partition(" - ")[2].split()[0] for line in mounts if line.split()[4] == str(SHM)]
    return bool(kinds) and kinds[-1] == "tmpfs"


def _same(root: Path, pid: int) -> bool:
    """Whether the process sees the same tmpfs at ``/dev/shm``.

    False if that cannot be read: then the files that it holds cannot be read either.
    """
    try:
        return os.stat(f"/proc/{pid}/root{SHM}").st_dev == os.stat(root).st_dev
    except OSError:
        return False
