"""Where this process's memory is, by its own account. What cannot be read is None, never zero."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from functools import cache
from typing import Any

import torch

from plimsoll_api.admin import DeviceMemory, ProcessMemory, Role

_SAMPLE_OBJECTS = 20_000


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later (malloc.h); bytes in size_t."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def libc_function(name: str) -> Any:
    """A function of the C library by name, None where it has none (musl has no mallinfo2)."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None


_mallinfo2 = libc_function("mallinfo2")
if _mallinfo2 is not None:
    _mallinfo2.restype = _Mallinfo2
_PROBE_BYTES = 16 << 20


@cache
def _counts_our_malloc() -> bool:
    """Whether glibc sees what this process allocates: not with jemalloc or tcmalloc preloaded."""
    if _mallinfo2 is None:
        return False
    before = _mallinfo2()
    probe = bytearray(_PROBE_BYTES)
    after = _mallinfo2()
    grown: int = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd
    return grown >= len(probe)


def malloc() -> tuple[int | None, int | None]:
    """(in use, retained) bytes of malloc: blocks in arenas and mapped ones; free but kept."""
    if not _counts_our_malloc():
        return None, None
    info = _mallinfo2()
    return info.uordblks + info.hblkhd, info.fordblks


class PythonObjects:
    """Bytes of Python objects, estimated from their count.

    ``sys.getallocatedblocks()`` costs microseconds, the size of every object does not; so the mean
    size of a block is measured once, from a sample of the collector's objects.
    """

    def __init__(self) -> None:
        objects = gc.get_objects()
        step = max(1, len(objects) // _SAMPLE_OBJECTS)
        sizes = [sys.getsizeof(item, 64) for item in objects[::step]]
        # Larger objects than pymalloc's 512 bytes live in malloc and are counted there.
        small = [size for size in sizes if size <= 512]
        self.bytes_per_block = sum(small) / len(small) if small else 64.0

    def measure(self) -> tuple[int, int]:
        """(blocks, bytes)."""
        blocks = sys.getallocatedblocks()
        return blocks, int(blocks * self.bytes_per_block)


def process_memory(python: PythonObjects) -> ProcessMemory:
    """The worker's host memory by segment."""
    in_use, retained = malloc()
    blocks, size = python.measure()
    return ProcessMemory(
        role=Role.WORKER,
        pid=os.getpid(),
        malloc_in_use=in_use,
        malloc_retained=retained,
        python_objects=size,
        py_blocks=blocks,
        shared=_status_bytes("RssShmem:"),
    )


def resident_anonymous() -> int | None:
    """Bytes of anonymous memory of this process that are resident."""
    return _status_bytes("RssAnon:")


def _status_bytes(key: str) -> int | None:
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith(key):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def device_memory(device: torch.device) -> list[DeviceMemory]:
    """The worker's accelerator, or nothing on a CPU."""
    if device.type != "cuda":
        return []
    index = device.index or 0
    free, total = torch.cuda.mem_get_info(device)
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return [
        DeviceMemory(
            index=index,
            uuid=None if uuid is None else f"GPU-{uuid}",
            used=total - free,
            total=total,
            torch_allocated=torch.cuda.memory_allocated(device),
            torch_reserved=torch.cuda.memory_reserved(device),
        )
    ]
