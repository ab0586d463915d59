"""Host memory of the current process, with or without torch.

Values that cannot be read are None, never zero.
"""

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
from plimsoll_engine.process.collector import FullCollections

_SAMPLE_OBJECTS = 20_000
_PROBE_BYTES = 16 << 20
_PROBES = 3
_M_MMAP_THRESHOLD = -3  # malloc.h
_LARGE_BYTES = 4 << 20
"""Minimum size of blocks that malloc maps with mmap. Pillow allocates pixels in 16 MiB blocks."""


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h (glibc 2.33 and later): ten size_t fields, in bytes."""

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
def _is_malloc_counted() -> bool:
    """Report whether glibc's counts include this process's allocations.

    They do not if jemalloc or tcmalloc is loaded.
    """
    return _mallinfo2 is not None and any(_probe_counts(_mallinfo2) for _ in range(_PROBES))


def _probe_counts(mallinfo2: Callable[[], Any]) -> bool:
    """Report whether a test allocation changes glibc's counts.

    A change by half of its size suffices, because other threads may free memory meanwhile. With
    another allocator, glibc's counts do not change at all.
    """
    before = mallinfo2()
    probe = bytearray(_PROBE_BYTES)
    after = mallinfo2()
    grown: int = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd
    return grown >= len(probe) // 2


def read_malloc() -> tuple[int | None, int | None]:
    """Return the bytes that malloc has in use, and the free bytes that it retains.

    Both are None if unknown.
    """
    if _mallinfo2 is None or not _is_malloc_counted():
        return None, None
    info = _mallinfo2()
    return info.uordblks + info.hblkhd, info.fordblks


def trim_malloc() -> bool:
    """Return malloc's free pages to the kernel. Return False if the libc does not support it."""
    if _malloc_trim is None:
        return False
    _malloc_trim(0)
    return True


def return_large_blocks() -> bool:
    """Make malloc return each large block to the kernel when it is freed.

    Return False if the libc does not support it. By default, glibc keeps freed blocks of up to 32
    MiB in its arenas once one was freed: two decoded images of 40 million pixels left 230 MiB. A
    later trim would hold the arenas' locks and block the event loop.
    """
    return _mallopt is not None and _mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES) == 1


class PythonObjects:
    """Estimator of the bytes of Python objects from their number.

    ``sys.getallocatedblocks()`` takes microseconds, but measuring every object takes long. The mean
    size of a block is therefore measured once, from a sample of tracked objects.
    """

    def __init__(self) -> None:
        objects = gc.get_objects()
        step = max(1, len(objects) // _SAMPLE_OBJECTS)
        sizes = (sys.getsizeof(item, 64) for item in objects[::step])
        # Objects above pymalloc's limit of 512 bytes are in malloc and counted there.
        small = [size for size in sizes if size <= 512]
        self._bytes_per_block = sum(small) / len(small) if small else 64.0

    def measure(self) -> tuple[int, int]:
        """Return the number of allocated blocks and an estimate of their bytes."""
        blocks = sys.getallocatedblocks()
        return blocks, int(blocks * self._bytes_per_block)


def process_memory(
    role: Role,
    python: PythonObjects,
    collections: FullCollections | None = None,
    mapped: int = 0,
) -> ProcessMemory:
    """Return the host memory of this process by segment.

    ``mapped`` is the number of bytes of its shared memory that belong to another process. All of
    these bytes are resident.
    """
    in_use, retained = read_malloc()
    blocks, size = python.measure()
    shared = _read_status_bytes("RssShmem")
    return ProcessMemory(
        role=role,
        pid=os.getpid(),
        malloc_in_use=in_use,
        malloc_retained=retained,
        python_objects=size,
        py_blocks=blocks,
        shared=None if shared is None else max(0, shared - mapped),
        full_collections=None if collections is None else collections.runs,
        full_collected=None if collections is None else collections.collected,
    )


def read_rss_anon() -> int | None:
    """Return the anonymous resident memory of this process in bytes (``RssAnon``).

    Return None if unknown.
    """
    return _read_status_bytes("RssAnon")


def read_swapped() -> int | None:
    """Return the swapped-out memory of this process in bytes; None if unknown."""
    return _read_status_bytes("VmSwap")


def read_machine_swap() -> int | None:
    """Return the machine's swap space in bytes (``SwapTotal``); 0 without swap, None if unknown."""
    return read_bytes("/proc/meminfo", "SwapTotal")


def _read_status_bytes(key: str) -> int | None:
    return read_bytes("/proc/self/status", key)


def read_private_anon(pid: int | None = None) -> int | None:
    """Return the private anonymous memory of a process in bytes; None if unknown.

    The default is this process. Pages still shared with its parent since the fork do not count.
    Files and shared memory count if no other process maps the same pages.
    """
    # Read the file once: the kernel walks all pages for each read.
    found = _read_all_bytes(f"/proc/{'self' if pid is None else pid}/smaps_rollup")
    dirty = found.get("Private_Dirty")
    return None if dirty is None else dirty + found.get("Swap", 0)


def read_bytes(path: str, key: str) -> int | None:
    """Return the bytes in the line ``key:`` of a file in ``/proc``; None if absent."""
    return _read_all_bytes(path).get(key)


def _read_all_bytes(path: str) -> dict[str, int]:
    """Return the bytes of each line ``key: number kB``; empty if the file cannot be read."""
    found = {}
    with contextlib.suppress(OSError), open(path) as status:
        for line in status:
            key, _, value = line.partition(":")
            words = value.split()
            if words[1:] == ["kB"]:
                found[key] = int(words[0]) * 1024
    return found
