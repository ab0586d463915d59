"""Memory of this process by its own account. Sizes are bytes; what is not known is absent."""

import ctypes
import gc
import os
import sys
from typing import Any, Callable, Dict, List, Optional

BLOCK_BYTES = 92
"""A block's mean size. By ``sys._debugmallocstats`` it is 92.3 bytes with vLLM 0.32's model runner
loaded, 92.3 with its API server and 91.6 with transformers alone. A sample of the collector's
objects says 111 to 120, because strings and numbers are not among them."""
CHECK_BYTES, CHECKS = 16 << 20, 8
MAX_DEVICES = 64
STATUS_BYTES = 1 << 14
_uuids: Dict[int, str] = {}


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later: ten sizes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _libc(name: str, result: Any, *arguments: Any) -> Optional[Callable[..., Any]]:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    function.restype, function.argtypes = result, list(arguments)
    return function  # type: ignore[no-any-return]


_mallinfo2 = _libc("mallinfo2", _Mallinfo2)
_malloc_trim = _libc("malloc_trim", ctypes.c_int, ctypes.c_size_t)


def _held(info: Any) -> int:
    return int(info.uordblks + info.hblkhd)


def _counts_us() -> bool:
    """Whether glibc's malloc is the one in use: not with jemalloc or tcmalloc preloaded."""
    return any(_counts_once() for _ in range(CHECKS))


def _counts_once() -> bool:
    """Return whether the account moves with a block of our own.

    Half of the block is enough: other threads free memory meanwhile, in a process that starts most
    of all. Another allocator's block does not move glibc's account at all.
    """
    if _mallinfo2 is None:
        return False
    before = _held(_mallinfo2())
    block = bytearray(CHECK_BYTES)
    return _held(_mallinfo2()) - before >= len(block) // 2


class Allocators:
    """What the allocators of this process say.

    ``malloc`` is ``mallinfo2``; Python's objects are estimated from the number of its blocks, which
    costs microseconds; pymalloc has no cheap account in bytes.
    """

    def __init__(self) -> None:
        self._glibc = _counts_us()

    def read(self) -> Dict[str, int]:
        """Return the sizes in bytes, and ``py_blocks``, a count; what is unknown is absent."""
        blocks = sys.getallocatedblocks()
        found = {"py_blocks": blocks, "python_objects": blocks * BLOCK_BYTES}
        if self._glibc and _mallinfo2 is not None:
            info = _mallinfo2()
            found["malloc_in_use"], found["malloc_retained"] = _held(info), int(info.fordblks)
        shared = status_bytes("RssShmem")
        if shared is not None:
            found["shared"] = shared
        return found


def collections() -> Dict[str, List[int]]:
    """Return the counts of each generation of the collector since the process started."""
    stats = gc.get_stats()
    return {key: [int(one[key]) for one in stats] for key in ("collections", "collected")}


def cuda() -> Any:
    """Return ``torch.cuda`` where this process has initialised it already.

    Importing torch or creating a context is not for us.
    """
    found = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        return found if found is not None and found.is_initialized() else None
    except Exception:  # noqa: BLE001 - torch may be half imported
        return None


def devices() -> List[Dict[str, Any]]:
    """PyTorch's allocator on each device that it was used on."""
    module = cuda()
    found: List[Dict[str, Any]] = []
    if module is None:
        return found
    for index in range(min(int(module.device_count()), MAX_DEVICES)):
        # As PyTorch has them: flattening and sorting all of them takes longer than all the rest.
        stats = module.memory_stats_as_nested_dict(index)
        of_reserved = stats["reserved_bytes"]["all"]
        if not of_reserved["current"] and not of_reserved["peak"]:
            continue
        device: Dict[str, Any] = {
            "index": index,
            "allocated": int(stats["allocated_bytes"]["all"]["current"]),
            "reserved": int(of_reserved["current"]),
        }
        uuid = _uuid(module, index)
        if uuid is not None:
            device["uuid"] = uuid
        found.append(device)
    return found


def _uuid(module: Any, index: int) -> Optional[str]:
    """Return the device's name for everybody, looked up once."""
    if index not in _uuids:
        uuid = getattr(module.get_device_properties(index), "uuid", None)
        if uuid is None:
            return None
        text = str(uuid)
        _uuids[index] = text if text.startswith(("GPU-", "MIG-")) else "GPU-" + text
    return _uuids[index]


def host_pinned() -> Optional[int]:
    """Return what torch's caching allocator of pinned host memory holds."""
    stats = getattr(cuda(), "host_memory_stats_as_nested_dict", None)
    if stats is None:
        return None
    size = stats().get("allocated_bytes", {}).get("current")
    return None if size is None else int(size)


def malloc_trim() -> bool:
    """Give malloc's free pages back; False where the libc cannot."""
    if _malloc_trim is None:
        return False
    _malloc_trim(0)
    return True


def status_bytes(key: str) -> Optional[int]:
    """Return a line of ``/proc/self/status``.

    Read with few calls: at each of them this thread and the engine's pass Python's lock on.
    """
    try:
        status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(status, STATUS_BYTES)
        finally:
            os.close(status)
        _, _, rest = text.partition(b"\n" + key.encode() + b":")
        return int(rest.split(None, 1)[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None
