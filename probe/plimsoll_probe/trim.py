"""Gives back what can be given back without disturbing a request."""

import gc
from typing import Any, Dict, List

from plimsoll_probe.memory import cuda, malloc_trim, status_bytes


def trim(idle: bool) -> Dict[str, Any]:
    """PyTorch's cached blocks only in an idle engine: emptying them waits for the device.

    ``before`` and ``after`` are anonymous memory, ``device_before`` and ``device_after`` what torch
    reserves, in bytes.
    """
    steps: List[str] = []
    told: Dict[str, Any] = {"before": status_bytes("RssAnon"), "steps": steps}
    told["collected"] = gc.collect()
    steps.append("gc.collect")
    module = cuda() if idle else None
    if module is not None:
        told["device_before"] = _reserved(module)
        module.empty_cache()
        steps.append("empty_cache")
        told["device_after"] = _reserved(module)
    if malloc_trim():
        steps.append("malloc_trim")
    told["after"] = status_bytes("RssAnon")
    return told


def _reserved(module: Any) -> int:
    return sum(int(module.memory_reserved(index)) for index in range(module.device_count()))
