"""Measure the host memory of the current process, and return free memory to the system."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from plimsoll_api.admin import ProcessMemory, Role
from plimsoll_engine.process.collector import FullCollectionCounter

_SAMPLE_OBJECTS = 20_000
_PROBE_BYTES = 16 << 20
_MAX_PROBES = 3
_M_MMAP_THRESHOLD = -3  # malloc.h
# Larger blocks are allocated with mmap. Pillow allocates blocks of 16 MiB.
_MMAP_THRESHOLD_BYTES = 4 << 20


class _Mallinfo2(ctypes.Structure):
    # struct mallinfo2 of malloc.h (glibc 2.33 and later), in bytes.
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _load_libc_function(name: str, restype: Any, *argtypes: Any) -> Callable[..., Any] | None:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):  # another libc
        return None
    function.restype = restype
    function.argtypes = list(argtypes)
    return function  # type: ignore[no-any-return]


_mallinfo2 = _load_libc_function("mallinfo2", _Mallinfo2)
_malloc_trim = _load_libc_function("malloc_trim", ctypes.c_int, ctypes.c_size_t)
_mallopt = _load_libc_function("mallopt", ctypes.c_int, ctypes.c_int, ctypes.c_int)


@cache
def _is_glibc_malloc_used() -> bool:
    # jemalloc or tcmalloc may be preloaded instead.
    return _mallinfo2 is not None and any(_is_probe_counted(_mallinfo2) for _ in range(_MAX_PROBES))


def _is_probe_counted(read_mallinfo2: Callable[[], Any]) -> bool:
    # With another allocator, glibc's count does not change. Half of the allocation suffices,
    # because other threads may free memory meanwhile.
    before = read_mallinfo2()
    probe = bytearray(_PROBE_BYTES)
    after = read_mallinfo2()
    grown: int = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd
    return grown >= len(probe) // 2


def read_malloc_bytes() -> tuple[int | None, int | None]:
    """Return malloc's bytes in use and its retained free bytes; both None if unknown."""
    if _mallinfo2 is None or not _is_glibc_malloc_used():
        return None, None
    info = _mallinfo2()
    return info.uordblks + info.hblkhd, info.fordblks


def trim_malloc() -> bool:
    """Return malloc's free pages to the kernel. Return False if libc does not support it."""
    if _malloc_trim is None:
        return False
    _malloc_trim(0)
    return True


def set_mmap_threshold() -> bool:
    """Make freed large blocks return to the kernel at once. Return False if not supported.

    By default, glibc kept 230 MiB after two images of 40 million pixels were decoded.
    """
    return _mallopt is not None and _mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES) == 1


class PythonMemoryEstimator:
    """Estimator of the memory of small Python objects, from the number of pymalloc's blocks."""

    def __init__(self) -> None:
        # A sample, because measuring all objects would take too long.
        objects = gc.get_objects()
        step = max(1, len(objects) // _SAMPLE_OBJECTS)
        sizes = (sys.getsizeof(item, 64) for item in objects[::step])
        # Objects above pymalloc's limit of 512 bytes are part of malloc's count.
        small = [size for size in sizes if size <= 512]
        self._bytes_per_block = sum(small) / len(small) if small else 64.0

    def measure(self) -> tuple[int, int]:
        """Return the number of blocks that pymalloc has allocated, and their estimated bytes."""
        blocks = sys.getallocatedblocks()
        return blocks, int(blocks * self._bytes_per_block)


def measure_process_memory(
    role: Role,
    python_memory: PythonMemoryEstimator,
    collection_counter: FullCollectionCounter | None = None,
    excluded_shared_bytes: int = 0,
) -> ProcessMemory:
    """Return the host memory of this process by segment, without ``excluded_shared_bytes``."""
    in_use, retained = read_malloc_bytes()
    blocks, size = python_memory.measure()
    shared = _read_status_bytes("RssShmem")
    return ProcessMemory(
        role=role,
        pid=os.getpid(),
        malloc_in_use=in_use,
        malloc_retained=retained,
        python_objects=size,
        py_blocks=blocks,
        shared=None if shared is None else max(0, shared - excluded_shared_bytes),
        full_collections=None if collection_counter is None else collection_counter.runs,
        full_collected=None if collection_counter is None else collection_counter.collected,
    )


def read_rss_anon_bytes() -> int | None:
    """Return this process's anonymous resident memory in bytes; None if unknown."""
    return _read_status_bytes("RssAnon")


def read_swapped_bytes() -> int | None:
    """Return the swapped-out memory of this process in bytes; None if unknown."""
    return _read_status_bytes("VmSwap")


def read_machine_swap_bytes() -> int | None:
    """Return the machine's total swap space in bytes; 0 without swap, None if unknown."""
    return read_byte_count("/proc/meminfo", "SwapTotal")


def _read_status_bytes(key: str) -> int | None:
    return read_byte_count("/proc/self/status", key)


def read_private_dirty_bytes(pid: int | None = None) -> int | None:
    """Return the private dirty memory of a process with its swap, in bytes; None if unknown.

    Pages that a forked process still shares with its parent do not count.
    """
    # Read the file once: the kernel walks all pages for each read.
    found = _read_byte_counts(f"/proc/{'self' if pid is None else pid}/smaps_rollup")
    dirty = found.get("Private_Dirty")
    return None if dirty is None else dirty + found.get("Swap", 0)


def read_byte_count(path: str, key: str) -> int | None:
    """Return the bytes in the line ``key: number kB`` of the file ``path``; None if absent."""
    return _read_byte_counts(path).get(key)


def _read_byte_counts(path: str) -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError), open(path) as status:
        for line in status:
            key, _, value = line.partition(":")
            words = value.split()
            if words[1:] == ["kB"]:
                found[key] = int(words[0]) * 1024
    return found
