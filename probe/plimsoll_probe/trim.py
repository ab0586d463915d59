"""Free memory without affecting requests."""

import gc
from typing import Any, Dict, List

from plimsoll_probe.memory import (
    get_torch_cuda,
    is_full_gc_fast,
    is_young_gc_fast,
    read_status_bytes,
    trim_malloc,
)


def trim_memory(idle: bool) -> Dict[str, Any]:
    """Free memory, and return the steps and the memory before and after them.

    A garbage collection stops the engine's threads, so only the young generations are collected in
    a process with many objects. PyTorch's cached blocks are freed only if the engine is ``idle``,
    because freeing them waits for the device.

    ``before`` and ``after`` are anonymous memory; ``device_before`` and ``device_after`` are what
    PyTorch has reserved. All are in bytes.
    """
    steps: List[str] = []
    result: Dict[str, Any] = {"before": read_status_bytes("RssAnon"), "steps": steps}
    if is_full_gc_fast():
        result["collected"] = gc.collect()
        steps.append("gc.collect")
    elif is_young_gc_fast():
        result["collected"] = gc.collect(1)
        steps.append("gc.collect(1): too many objects to collect all generations")
    else:
        steps.append("gc.collect skipped: too many objects")
    module = get_torch_cuda() if idle else None
    if module is not None:
        result["device_before"] = _sum_reserved_bytes(module)
        module.empty_cache()
        steps.append("empty_cache")
        result["device_after"] = _sum_reserved_bytes(module)
    if trim_malloc():
        steps.append("malloc_trim")
    result["after"] = read_status_bytes("RssAnon")
    return result


def _sum_reserved_bytes(module: Any) -> int:
    return sum(int(module.memory_reserved(index)) for index in range(module.device_count()))
