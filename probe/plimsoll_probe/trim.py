"""Frees memory that can be freed without affecting requests."""

import gc
from typing import Any, Dict, List

from plimsoll_probe.memory import (
    cuda,
    has_few_objects,
    has_few_young_objects,
    malloc_trim,
    status_bytes,
)


def trim(idle: bool) -> Dict[str, Any]:
    """Free memory; return what was done, with sizes in bytes.

    A collection stops the engine's threads. So all generations are collected only in a process with
    few objects, or else the young ones; the engine's own collector does the rest. The cached blocks
    of PyTorch are freed only in an idle engine, because that waits for the device. ``before`` and
    ``after`` are anonymous memory; ``device_before`` and ``device_after`` are what torch has
    reserved.
    """
    steps: List[str] = []
    result: Dict[str, Any] = {"before": status_bytes("RssAnon"), "steps": steps}
    if has_few_objects():
        result["collected"] = gc.collect()
        steps.append("gc.collect")
    elif has_few_young_objects():
        result["collected"] = gc.collect(1)
        steps.append("gc.collect(1): too many objects for all generations")
    else:
        steps.append("no gc.collect: too many objects")
    module = cuda() if idle else None
    if module is not None:
        result["device_before"] = _reserved(module)
        module.empty_cache()
        steps.append("empty_cache")
        result["device_after"] = _reserved(module)
    if malloc_trim():
        steps.append("malloc_trim")
    result["after"] = status_bytes("RssAnon")
    return result


def _reserved(module: Any) -> int:
    return sum(int(module.memory_reserved(index)) for index in range(module.device_count()))
