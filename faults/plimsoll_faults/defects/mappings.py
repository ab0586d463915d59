"""Faults of mappings: anonymous or swapped mappings, and shared memory."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from pathlib import Path

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.process import host_memory
from plimsoll_faults import kinds
from plimsoll_faults.defects.base import Defect, make_inject_error

SHARED_MEMORY_FOLDER = Path("/dev/shm")
# From mman.h. Python defines it since 3.13, and Linux supports it since 5.4.
MADV_PAGEOUT = 21
# Paged out to check whether memory can be swapped.
SWAP_PROBE_BYTES = 1 << 20
IPC_PRIVATE, IPC_CREAT = 0, 0o1000
SHMAT_FAILED = ctypes.c_void_p(-1).value


def write_pages(mapping: mmap.mmap) -> None:
    """Write to each page of ``mapping``, so that it is resident."""
    for offset in range(0, len(mapping), mmap.PAGESIZE):
        mapping[offset] = 1


class Mappings:
    """Memory mappings that are resident and are never closed."""

    def __init__(self) -> None:
        self.kept: list[mmap.mmap] = []

    def add(self, size_bytes: int, is_shared: bool) -> None:
        """Map ``size_bytes`` bytes and write to each page. Ignore a size below 1."""
        if size_bytes < 1:
            return
        if is_shared:
            file = os.memfd_create("plimsoll-fault")
            os.ftruncate(file, size_bytes)
            mapping = mmap.mmap(file, size_bytes, flags=mmap.MAP_SHARED)
            os.close(file)
        else:
            mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        write_pages(mapping)
        self.kept.append(mapping)


class MmapGrowthDefect(Defect[kinds.MmapGrowth]):
    """Map private memory and never unmap it."""

    def __init__(self, fault: kinds.MmapGrowth, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        self.mappings = Mappings()

    def after_requests(self, num_requests: int) -> None:
        """Map ``bytes_per_request`` bytes for each request."""
        self.mappings.add(self.fault.bytes_per_request * num_requests, is_shared=False)

    def tick(self, elapsed_s: float) -> None:
        """Map ``bytes_per_s`` bytes for each second that has passed."""
        self.mappings.add(int(self.fault.bytes_per_s * elapsed_s), is_shared=False)


class SwappedGrowthDefect(Defect[kinds.SwappedGrowth]):
    """Map memory and swap it out at once, as the kernel does under memory pressure."""

    def __init__(self, fault: kinds.SwappedGrowth, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        self.mappings = Mappings()
        if not host_memory.read_machine_swap_bytes():
            raise make_inject_error(
                fault, "needs swap, but this machine has none: SwapTotal in /proc/meminfo is 0"
            )
        before = host_memory.read_swapped_bytes() or 0
        try:
            self._map_and_swap_out(SWAP_PROBE_BYTES)
        except OSError as error:
            raise make_inject_error(
                fault, f"needs a kernel whose madvise supports MADV_PAGEOUT: {error}"
            ) from None
        if (host_memory.read_swapped_bytes() or 0) <= before:
            raise make_inject_error(
                fault,
                "cannot swap memory out, because the swap is full or memory.swap.max of the "
                "container is 0: set memorySwap.swapBehavior of the kubelet to LimitedSwap",
            )

    def after_requests(self, num_requests: int) -> None:
        """Map ``bytes_per_request`` bytes for each request, and swap them out."""
        for _ in range(num_requests):
            self._map_and_swap_out(self.fault.bytes_per_request)

    def _map_and_swap_out(self, size_bytes: int) -> None:
        self.mappings.add(size_bytes, is_shared=False)
        self.mappings.kept[-1].madvise(MADV_PAGEOUT)


class SharedGrowthDefect(Defect[kinds.SharedGrowth]):
    """Map shared memory and never unmap it."""

    def __init__(self, fault: kinds.SharedGrowth, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        self.mappings = Mappings()

    def after_requests(self, num_requests: int) -> None:
        """Map ``bytes_per_request`` bytes of shared memory for each request."""
        self.mappings.add(self.fault.bytes_per_request * num_requests, is_shared=True)


class SharedOrphanDefect(Defect[kinds.SharedOrphan]):
    """Create shared segments that no receiver ever removes."""

    def __init__(self, fault: kinds.SharedOrphan, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        self.orphans: list[Path | int] = []
        "Paths of files, or IDs of SysV segments, that no process uses."
        self._names = (
            SHARED_MEMORY_FOLDER / f"plimsoll-fault-{os.getpid()}-{n}" for n in itertools.count()
        )

    def after_requests(self, num_requests: int) -> None:
        """Create a shared segment or file for each request, which outlives the worker."""
        create = self._create_posix_segment if self.fault.family == "posix" else create_sysv_segment
        self.orphans += [create(self.fault.bytes_per_request) for _ in range(num_requests)]

    def _create_posix_segment(self, size_bytes: int) -> Path:
        # Raises OSError if the tmpfs is full.
        path = next(self._names)
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(
                file, 0, size_bytes
            )  # a write beyond what is there would be a SIGBUS
            with mmap.mmap(file, size_bytes) as mapping:
                write_pages(mapping)
        finally:
            os.close(file)
        return path


def create_sysv_segment(size_bytes: int) -> int:
    """Create, fill and detach a SysV segment, and return its ID. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
    libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    libc.shmat.restype = ctypes.c_void_p
    libc.shmdt.argtypes = [ctypes.c_void_p]
    number: int = libc.shmget(IPC_PRIVATE, size_bytes, IPC_CREAT | 0o600)
    if number < 0:
        raise _make_os_error("shmget")
    address = libc.shmat(number, None, 0)
    if address == SHMAT_FAILED:
        raise _make_os_error("shmat")
    ctypes.memset(address, 1, size_bytes)
    libc.shmdt(address)
    return number


def _make_os_error(function_name: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{function_name}: {os.strerror(number)}")
