"""The memory of this process, in bytes; unknown values are absent."""

import ctypes
import gc
import os
import sys
from typing import Any, Callable, Dict, List, Optional

BLOCK_BYTES = 92
"""Mean size of a block of pymalloc. ``sys._debugmallocstats`` reports 92.3 bytes with vLLM 0.32's
model runner loaded, 92.3 with its API server, and 91.6 with transformers alone. A sample of the
objects that the collector tracks gives 111 to 120, because it does not track strings and
numbers."""
CHECK_BYTES, CHECKS = 16 << 20, 8
"""Size and number of the allocations that check which malloc is in use."""
MAX_DEVICES = 64
FEW_OBJECTS, FEW_BLOCKS = 100_000, 300_000
"""Objects that a collection follows in 8 ms (Python 3.11), and the blocks that hold so
many: an object with its contents takes three."""
MAX_BLOCKS = 3_000_000
"""Blocks up to which objects are counted. A million frozen objects take 10 ms, others 16 ms."""
YOUNG = (0,) if sys.version_info >= (3, 14) else (0, 1)
"""Generations of the collector with some thousand objects at most."""
STATUS_BYTES = 1 << 14
"""Maximum number of bytes read of /proc/self/status."""
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


def _in_use(info: Any) -> int:
    return int(info.uordblks + info.hblkhd)


def _uses_glibc_malloc() -> bool:
    """Report whether glibc's malloc is in use, and not jemalloc or tcmalloc."""
    return any(_sees_allocation() for _ in range(CHECKS))


def _sees_allocation() -> bool:
    """Report whether an allocation changes the figures of glibc.

    Half of its size is enough, because other threads free memory at the same time, most of all
    during the start. An allocation from another malloc does not change the figures at all.
    """
    if _mallinfo2 is None:
        return False
    before = _in_use(_mallinfo2())
    block = bytearray(CHECK_BYTES)
    return _in_use(_mallinfo2()) - before >= len(block) // 2


class Allocators:
    """Figures of the allocators in this process.

    ``malloc`` is ``mallinfo2``. The size of Python objects is estimated from the number of blocks,
    which takes microseconds, because pymalloc has no cheap figure in bytes.
    """

    def __init__(self) -> None:
        self._glibc = _uses_glibc_malloc()

    def read(self) -> Dict[str, int]:
        """Return sizes in bytes, and the number ``py_blocks``; unknown values are absent."""
        blocks = sys.getallocatedblocks()
        found = {"py_blocks": blocks, "python_objects": blocks * BLOCK_BYTES}
        if self._glibc and _mallinfo2 is not None:
            info = _mallinfo2()
            found["malloc_in_use"], found["malloc_retained"] = _in_use(info), int(info.fordblks)
        shared = status_bytes("RssShmem")
        if shared is not None:
            found["shared"] = shared
        return found


def has_few_objects() -> bool:
    """Report whether all objects that the collector tracks can be followed in milliseconds.

    Frozen objects do not count. In a large process that has frozen none, nothing is counted.
    """
    blocks = sys.getallocatedblocks()
    if blocks > MAX_BLOCKS or (blocks > FEW_BLOCKS and not gc.get_freeze_count()):
        return False
    return len(gc.get_objects()) <= FEW_OBJECTS


def has_few_young_objects() -> bool:
    """Report whether the young generations can be followed in milliseconds."""
    first, second, _ = gc.get_count()
    return first + second * gc.get_threshold()[0] <= FEW_OBJECTS


def young_objects() -> Optional[List[Any]]:
    """Return the objects of the young generations; None if they are many."""
    if not has_few_young_objects():
        return None
    return [item for one in YOUNG for item in gc.get_objects(generation=one)]


def collections() -> Dict[str, List[int]]:
    """Return the counts of the collector for each generation since the process started."""
    stats = gc.get_stats()
    return {key: [int(one[key]) for one in stats] for key in ("collections", "collected")}


def cuda() -> Any:
    """Return ``torch.cuda`` if this process has initialized it; None otherwise.

    The probe must not import torch or create a context.
    """
    found = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        return found if found is not None and found.is_initialized() else None
    except Exception:  # noqa: BLE001 - torch may be half imported
        return None


def devices() -> List[Dict[str, Any]]:
    """Return the memory of torch's allocator on each device that has been used."""
    module = cuda()
    found: List[Dict[str, Any]] = []
    if module is None:
        return found
    for index in range(min(int(module.device_count()), MAX_DEVICES)):
        # In PyTorch's own form: flattening and sorting them takes longer than everything else.
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
    """Return the UUID of the device, which is read once."""
    if index not in _uuids:
        uuid = getattr(module.get_device_properties(index), "uuid", None)
        if uuid is None:
            return None
        text = str(uuid)
        _uuids[index] = text if text.startswith(("GPU-", "MIG-")) else "GPU-" + text
    return _uuids[index]


def host_pinned() -> Optional[int]:
    """Return the bytes in torch's caching allocator of pinned host memory; None if unknown."""
    stats = getattr(cuda(), "host_memory_stats_as_nested_dict", None)
    if stats is None:
        return None
    size = stats().get("allocated_bytes", {}).get("current")
    return None if size is None else int(size)


def malloc_trim() -> bool:
    """Return free pages of malloc to the kernel; return False if the libc cannot."""
    if _malloc_trim is None:
        return False
    _malloc_trim(0)
    return True


def status_bytes(key: str) -> Optional[int]:
    """Return the size in a line of ``/proc/self/status``; None if unknown.

    It is read with few calls, because each of them releases the GIL and has to get it back from the
    engine's thread.
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
