"""Measure orphaned shared memory: files in ``/dev/shm`` that no process of the pod uses.

Such a file outlives its process and its container, and is never freed. If a scan fails, the last
result stays valid for a few minutes.
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
    compute_age_s,
    identify,
    list_entry_names,
)

PROC = Path("/proc")
# The number of SysV segments has the same limit.
MAX_SHARED_FILES = 4096
MAX_FOLDER_DEPTH = 8
MAX_PROCESSES = 512
# A large engine needs a tenth of it.
MAX_MAPS_BYTES = 16 << 20
STAT_BLOCK_BYTES = 512
# PROC_IPC_INIT_INO. The segments of this namespace belong to no pod.
NODE_IPC_INODE = 0xEFFFFFFF
# A private file has none of these permission bits.
OTHER_USERS_MODE = 0o077

FileId = tuple[int, int]
"""Device and inode of a file."""


class UnknownUsersError(Exception):
    """The users of shared memory are unknown."""


class SharedFile(msgspec.Struct, frozen=True):
    """One file of a tmpfs.

    ``bytes`` includes blocks in swap. ``written_at`` is in Unix seconds. Other users cannot open a
    ``private`` file.
    """

    path: str
    id: FileId
    bytes: int
    written_at: float
    uid: int
    private: bool


class FilesInUse(msgspec.Struct, frozen=True):
    """Files that running processes use.

    If ``has_unreadable``, processes of other users may use any file that is not private.
    """

    files: frozenset[FileId]
    has_unreadable: bool

    def may_include(self, file: SharedFile) -> bool:
        """Report whether a process uses the file, or might use it."""
        return file.id in self.files or (self.has_unreadable and not file.private)


def list_files(root: Path) -> list[SharedFile]:
    """Return all files below ``root`` on its file system. Raises :class:`UnknownUsersError`."""
    try:
        device = os.lstat(root).st_dev
        files: list[SharedFile] = []
        for entry in _iterate_files(str(root), device, 0):
            if len(files) >= MAX_SHARED_FILES:
                raise UnknownUsersError(f"{root} has more than {MAX_SHARED_FILES} files")
            files.append(entry)
    except OSError as error:
        raise UnknownUsersError(f"cannot list {error.filename or root}: {error.strerror}") from None
    # Hard links share the blocks of one file.
    return list({file.id: file for file in files}.values())


def read_file(path: str) -> SharedFile | None:
    """Return the regular file at ``path``; None if there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return _make_shared_file(path, status) if stat.S_ISREG(status.st_mode) else None


def find_files_in_use(files: Iterable[SharedFile], proc: Path = PROC) -> FilesInUse:
    """Return those of ``files`` that running processes use.

    Raises :class:`UnknownUsersError` if a process that cannot be read may use any file.
    """
    file_ids = {file.id for file in files}
    if not file_ids:
        return FilesInUse(frozenset(), False)
    used_ids: set[FileId] = set()
    has_unreadable = False
    try:
        pids = [name for name in os.listdir(proc) if name.isdigit()]
    except OSError as error:
        raise UnknownUsersError(f"cannot list {proc}: {error.strerror}") from None
    if len(pids) > MAX_PROCESSES:
        raise UnknownUsersError(f"the pod has more than {MAX_PROCESSES} processes")
    for pid in pids:
        folder = proc / pid
        try:
            used_ids |= _find_mapped_files(folder, file_ids) | _find_open_files(folder, file_ids)
        except PermissionError:
            owner = _find_unreadable_owner(folder)
            if owner == 0:  # root may open any file
                raise UnknownUsersError(
                    f"cannot list the files that process {pid} uses: it runs as root"
                ) from None
            has_unreadable = has_unreadable or owner is not None
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UnknownUsersError(
                f"cannot list the files that process {pid} uses: {reason}"
            ) from None
    return FilesInUse(frozenset(used_ids), has_unreadable)


def sum_unattached_segment_bytes(min_age_s: float, now: float, proc: Path = PROC) -> int:
    """Return the bytes of SysV segments that have been unattached for at least ``min_age_s``.

    The result is 0 if the kernel has no SysV segments. Raises :class:`UnknownUsersError`.
    """
    table = proc / "sysvipc/shm"
    try:
        if os.stat(proc / "self/ns/ipc").st_ino == NODE_IPC_INODE:
            raise UnknownUsersError("the pod shares the IPC namespace of its node")
        with table.open() as lines:
            rows = list(itertools.islice(lines, MAX_SHARED_FILES + 2))
        if len(rows) > MAX_SHARED_FILES + 1:
            raise UnknownUsersError(f"the pod has more than {MAX_SHARED_FILES} SysV segments")
        names = rows[0].split()
        total = 0
        for line in rows[1:]:
            row = dict(zip(names, map(int, line.split()), strict=False))
            changed = max(row["dtime"], row["ctime"])
            if row["nattch"] == 0 and now - changed >= min_age_s:
                total += row["rss"] + row["swap"]
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, IndexError) as error:
        reason = getattr(error, "strerror", None) or repr(error)
        raise UnknownUsersError(f"cannot read {table}: {reason}") from None
    return total


def _iterate_files(folder: str, device: int, depth: int) -> Iterator[SharedFile]:
    if depth > MAX_FOLDER_DEPTH:
        raise UnknownUsersError(f"{folder} has more than {MAX_FOLDER_DEPTH} levels of folders")
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if status.st_dev != device:
                continue
            if stat.S_ISDIR(status.st_mode):
                yield from _iterate_files(entry.path, device, depth + 1)
            elif stat.S_ISREG(status.st_mode):
                yield _make_shared_file(entry.path, status)


def _make_shared_file(path: str, status: os.stat_result) -> SharedFile:
    return SharedFile(
        path=path,
        id=(status.st_dev, status.st_ino),
        bytes=status.st_blocks * STAT_BLOCK_BYTES,
        written_at=status.st_ctime,  # any process can set st_mtime to any time
        uid=status.st_uid,
        private=not status.st_mode & OTHER_USERS_MODE,
    )


def _find_mapped_files(folder: Path, wanted_files: set[FileId]) -> set[FileId]:
    with (folder / "maps").open("rb") as maps:
        text = maps.read(MAX_MAPS_BYTES + 1)
    if len(text) > MAX_MAPS_BYTES:
        raise UnknownUsersError(
            f"the maps file of process {folder.name} is larger than the maximum of "
            f"{MAX_MAPS_BYTES >> 20} MiB"
        )
    file_ids: set[FileId] = set()
    for device in {device for device, _ in wanted_files}:
        # A path with the same text matches, too. This can only add a file in use, never remove one.
        name = b"%02x:%02x" % (os.major(device), os.minor(device))
        file_ids |= {(device, int(inode)) for inode in re.findall(b" " + name + rb" (\d+) ", text)}
    return file_ids & wanted_files


def _find_open_files(folder: Path, wanted_files: set[FileId]) -> set[FileId]:
    inodes = {inode for _, inode in wanted_files}
    names = list_entry_names(folder / "fd", MAX_DESCRIPTORS + 1)
    if len(names) > MAX_DESCRIPTORS:
        raise UnknownUsersError(f"process {folder.name} has more than {MAX_DESCRIPTORS} open files")
    file_ids: set[FileId] = set()
    for name in names:
        try:
            # Check the inode first: stat of a file on a network file system may hang.
            if _read_inode(folder, name) not in {None, *inodes}:
                continue
            # A string instead of a Path: see process_table.read_proc_file.
            status = os.stat(f"{folder}/fd/{name}")
        except (FileNotFoundError, ProcessLookupError):
            continue  # the file was closed meanwhile
        file_ids.add((status.st_dev, status.st_ino))
    return file_ids & wanted_files


def _read_inode(folder: Path, name: str) -> int | None:
    # Kernels before 5.14 do not report it.
    with open(f"{folder}/fdinfo/{name}") as file:
        lines = file.read().splitlines()
    for line in lines:
        if line.startswith("ino:"):
            return int(line.split()[1])
    return None


def _find_unreadable_owner(folder: Path) -> int | None:
    # A process that has ended, or the pod's sandbox, opens no files.
    try:
        if folder.name == "1" and (folder / "comm").read_text().strip() == "pause":
            return None
        return folder.stat().st_uid
    except OSError:
        return None


log = logging.getLogger(__name__)

SHM = Path("/dev/shm")
SCAN_PERIOD_S = 60.0
# If scans fail, the last result stays valid for this time.
MAX_RESULT_AGE_S = 300.0
# The creator of a file needs a moment to map it.
MIN_FILE_AGE_S = 60.0
# A file that is older than the engine needs less time: the previous engine may have written to it
# until its end.
MIN_EARLIER_FILE_AGE_S = 2.0


class OrphanedBytes(msgspec.Struct, frozen=True):
    """Orphaned shared memory in bytes; None if unknown.

    ``earlier`` is the part from before the engine's start, which is not charged to its cgroup.
    """

    bytes: int | None = None
    earlier: int | None = None


UNKNOWN_BYTES = OrphanedBytes()


class OrphanedMemory:
    """Scans ``root``, the pod's tmpfs, for files that no process in ``proc`` uses."""

    def __init__(
        self,
        root: Path = SHM,
        clock: Callable[[], float] = time.monotonic,
        read_wall_clock: Callable[[], float] = time.time,
        proc: Path = PROC,
    ) -> None:
        self._proc = proc
        self._root, self._clock, self._now = root, clock, read_wall_clock
        self._next_at = self._known_until = 0.0
        self._engine: ProcessId | None = None
        self._started_at = 0.0
        self._newest = UNKNOWN_BYTES
        self.error: str | None = "no engine has been found yet"

    @classmethod
    def create_for_this_pod(cls) -> OrphanedMemory | None:
        """Return the scanner for this pod; None without a ``/dev/shm`` that belongs to the pod."""
        return cls() if is_shm_private() else None

    def read(self, main_pid: int | None) -> OrphanedBytes:
        """Return the orphaned memory, after a new scan if one is due.

        ``main_pid`` is the engine's main process; None if no engine is running.
        """
        now = self._clock()
        engine = identify(main_pid) if main_pid is not None else None
        renewed = engine is not None and engine != self._engine
        if engine is not None and renewed:
            self._engine, self._started_at = engine, self._now() - compute_age_s(engine)
        if self._engine is not None and (renewed or now >= self._next_at):
            self._next_at = now + SCAN_PERIOD_S
            self._scan_and_store(engine, now)
        return self._newest

    def _scan_and_store(self, engine: ProcessId | None, now: float) -> None:
        before = self.error
        try:
            self._newest, self._known_until = self._scan(engine), now + MAX_RESULT_AGE_S
            self.error = None
        except UnknownUsersError as error:
            self.error = str(error)
            if now >= self._known_until:
                self._newest = UNKNOWN_BYTES
        if self.error is not None and self.error != before:
            log.warning("cannot measure orphaned shared memory: %s", self.error)

    def _scan(self, engine: ProcessId | None) -> OrphanedBytes:
        if engine is not None and not _has_same_shm(self._root, engine.pid):
            raise UnknownUsersError(
                f"{SHM} of process {engine.pid} cannot be read, or is another volume than "
                f"{SHM} of the supervisor: mount the same volume in both containers"
            )
        now = self._now()
        listed = list_files(self._root)
        aged = [
            file
            for file in listed
            if now - file.written_at
            >= (MIN_EARLIER_FILE_AGE_S if file.written_at < self._started_at else MIN_FILE_AGE_S)
        ]
        files_in_use = find_files_in_use(aged, self._proc)
        left = [file for file in aged if file.id not in files_in_use.files]
        if any(files_in_use.may_include(file) for file in left):
            raise UnknownUsersError(
                "processes of other users may use some of the files, but the supervisor "
                "cannot read their open files"
            )
        unattached = sum_unattached_segment_bytes(MIN_FILE_AGE_S, now, self._proc)
        return OrphanedBytes(
            bytes=sum(file.bytes for file in left) + unattached,
            earlier=sum(file.bytes for file in left if file.written_at < self._started_at),
        )


def is_shm_private() -> bool:
    """Report whether ``/dev/shm`` is a tmpfs of this pod alone."""
    if not os.environ.get("POD_NAME"):
        return False
    try:
        if os.stat("/proc/self/ns/ipc").st_ino == NODE_IPC_INODE:
            return False  # hostIPC: /dev/shm may be the node's
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    kinds = [line.partition(" - ")[2].split()[0] for line in mounts if line.split()[4] == str(SHM)]
    return bool(kinds) and kinds[-1] == "tmpfs"


def _has_same_shm(root: Path, pid: int) -> bool:
    # If this cannot be read, the process's files cannot be read either.
    try:
        return os.stat(f"/proc/{pid}/root{SHM}").st_dev == os.stat(root).st_dev
    except OSError:
        return False
