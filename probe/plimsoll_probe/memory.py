"""Measure the memory of this process in bytes; unknown values are absent."""

import ctypes
import gc
import os
import sys
from typing import Any, Callable, Dict, List, Optional

MEAN_BLOCK_BYTES = 92
"""Mean size of a pymalloc block. ``sys._debugmallocstats`` reports 92.3 bytes in a model runner
and in an API server of vLLM 0.32, and 91.6 bytes if only transformers is loaded."""
TEST_ALLOCATION_BYTES, NUM_TEST_ALLOCATIONS = 16 << 20, 8
"""Size and number of the test allocations that show which malloc is in use."""
MAX_DEVICES = 64
MAX_FAST_GC_OBJECTS, MAX_FAST_GC_BLOCKS = 100_000, 300_000
"""Maximum number of objects, and of their pymalloc blocks, for a fast garbage collection:
100,000 objects take 8 ms (Python 3.11) and have about three blocks each."""
YOUNG_GENERATIONS = (0,) if sys.version_info >= (3, 14) else (0, 1)
"""Generations of the garbage collector that usually have at most a few thousand objects."""
MAX_STATUS_BYTES = 1 << 14
_uuid_by_index: Dict[int, str] = {}
_blocks_at_freeze = 0


# ``struct mallinfo2`` of glibc 2.33 and later: ten sizes.
class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _load_libc_function(name: str, result: Any, *arguments: Any) -> Optional[Callable[..., Any]]:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    function.restype, function.argtypes = result, list(arguments)
    return function  # type: ignore[no-any-return]


_mallinfo2 = _load_libc_function("mallinfo2", _Mallinfo2)
_malloc_trim = _load_libc_function("malloc_trim", ctypes.c_int, ctypes.c_size_t)


def _get_bytes_in_use(info: Any) -> int:
    return int(info.uordblks + info.hblkhd)


# Another malloc may be in use, such as jemalloc.
def _uses_glibc_malloc() -> bool:
    return any(_mallinfo_counts_allocation() for _ in range(NUM_TEST_ALLOCATIONS))


# Half of the test allocation suffices, because other threads may free memory at the same time.
def _mallinfo_counts_allocation() -> bool:
    if _mallinfo2 is None:
        return False
    before = _get_bytes_in_use(_mallinfo2())
    block = bytearray(TEST_ALLOCATION_BYTES)
    return _get_bytes_in_use(_mallinfo2()) - before >= len(block) // 2


class AllocatorReader:
    """Reader of the memory use of glibc's malloc and of pymalloc.

    pymalloc counts only blocks, so each block counts as :data:`MEAN_BLOCK_BYTES`.
    """

    def __init__(self) -> None:
        self._glibc = _uses_glibc_malloc()

    def read(self) -> Dict[str, int]:
        """Return the sizes in bytes and the number of blocks; unknown values are absent."""
        blocks = sys.getallocatedblocks()
        found = {"py_blocks": blocks, "python_objects": blocks * MEAN_BLOCK_BYTES}
        if self._glibc and _mallinfo2 is not None:
            info = _mallinfo2()
            found["malloc_in_use"], found["malloc_retained"] = (
                _get_bytes_in_use(info),
                int(info.fordblks),
            )
        shared = read_status_bytes("RssShmem")
        if shared is not None:
            found["shared"] = shared
        return found


def watch_freezes() -> None:
    """Wrap ``gc.freeze`` and ``gc.unfreeze`` to record the number of blocks at the last freeze.

    ``gc.get_freeze_count`` holds the GIL for 80 ms with 700,000 objects, as in an API server of
    vLLM 0.32.
    """
    freeze, unfreeze = gc.freeze, gc.unfreeze

    def note_freeze() -> None:
        global _blocks_at_freeze
        freeze()
        _blocks_at_freeze = sys.getallocatedblocks()

    def note_unfreeze() -> None:
        global _blocks_at_freeze
        unfreeze()
        _blocks_at_freeze = 0

    gc.freeze, gc.unfreeze = note_freeze, note_unfreeze


def is_full_gc_fast() -> bool:
    """Report whether a full garbage collection takes only milliseconds; it skips frozen objects."""
    # Counting the objects holds the GIL, so it must not be tried if they may be many.
    if sys.getallocatedblocks() - _blocks_at_freeze > MAX_FAST_GC_BLOCKS:
        return False
    return len(gc.get_objects()) <= MAX_FAST_GC_OBJECTS


def is_young_gc_fast() -> bool:
    """Report whether a collection of the young generations takes only milliseconds."""
    first, second, _ = gc.get_count()
    return first + second * gc.get_threshold()[0] <= MAX_FAST_GC_OBJECTS


def get_young_objects() -> Optional[List[Any]]:
    """Return the objects of the young generations; None if there are too many of them."""
    if not is_young_gc_fast():
        return None
    return [item for one in YOUNG_GENERATIONS for item in gc.get_objects(generation=one)]


def read_gc_statistics() -> Dict[str, List[int]]:
    """Return the counts of ``collections`` and ``collected`` objects, one per generation."""
    stats = gc.get_stats()
    return {key: [int(one[key]) for one in stats] for key in ("collections", "collected")}


def get_torch_cuda() -> Any:
    """Return the module ``torch.cuda``; None if the engine has not initialized it.

    The probe never imports torch itself, and never creates a CUDA context.
    """
    found = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        return found if found is not None and found.is_initialized() else None
    except Exception:  # noqa: BLE001 - torch may be half imported
        return None


def read_devices() -> List[Dict[str, Any]]:
    """Return the memory that PyTorch's allocator holds on each device, one dict per device."""
    module = get_torch_cuda()
    found: List[Dict[str, Any]] = []
    if module is None:
        return found
    for index in range(min(int(module.device_count()), MAX_DEVICES)):
        # The flat form takes longer than everything else: PyTorch sorts its keys.
        stats = module.memory_stats_as_nested_dict(index)
        of_reserved = stats["reserved_bytes"]["all"]
        if not of_reserved["current"] and not of_reserved["peak"]:
            continue
        device: Dict[str, Any] = {
            "index": index,
            "allocated": int(stats["allocated_bytes"]["all"]["current"]),
            "reserved": int(of_reserved["current"]),
        }
        uuid = _get_device_uuid(module, index)
        if uuid is not None:
            device["uuid"] = uuid
        found.append(device)
    return found


def _get_device_uuid(module: Any, index: int) -> Optional[str]:
    if index not in _uuid_by_index:
        uuid = getattr(module.get_device_properties(index), "uuid", None)
        if uuid is None:
            return None
        text = str(uuid)
        _uuid_by_index[index] = text if text.startswith(("GPU-", "MIG-")) else "GPU-" + text
    return _uuid_by_index[index]


def read_pinned_bytes() -> Optional[int]:
    """Return the pinned host memory that PyTorch's allocator holds; None if unknown."""
    stats = getattr(get_torch_cuda(), "host_memory_stats_as_nested_dict", None)
    if stats is None:
        return None
    size = stats().get("allocated_bytes", {}).get("current")
    return None if size is None else int(size)


def trim_malloc() -> bool:
    """Release malloc's free pages to the kernel; return False if libc cannot do that."""
    if _malloc_trim is None:
        return False
    _malloc_trim(0)
    return True


def read_status_bytes(key: str) -> Optional[int]:
    """Return the size ``key`` in ``/proc/self/status`` in bytes; None if unknown."""
    # Each system call releases the GIL and then waits for it: make only three.
    try:
        status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(status, MAX_STATUS_BYTES)
        finally:
            os.close(status)
        _, _, rest = text.partition(b"\n" + key.encode() + b":")
        return int(rest.split(None, 1)[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None
