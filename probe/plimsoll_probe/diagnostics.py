"""Describe this process as text of limited size: stacks, objects and PyTorch's memory."""

import collections
import gc
import sys
import threading
import time
from typing import Any, List

from plimsoll_probe.memory import get_torch_cuda, get_young_objects, is_full_gc_fast

MAX_THREADS = 256
MAX_FRAMES = 64
MAX_TEXT_CHARS = 1 << 20
MAX_TABLE_ROWS = 40
OBJECTS_PER_BATCH = 10_000
BATCH_PAUSE_S = 0.05
"""Pause between two batches, each of which takes the GIL for a millisecond or less."""
MAX_DIAGNOSTICS_BYTES = 8 << 20
"""Maximum memory that lists of objects and tables of a trace may take together."""
_object_list_bytes = 0


def get_object_list_bytes() -> int:
    """Return the current size of the list that :func:`format_gc_objects` counts."""
    return _object_list_bytes


def format_stacks() -> str:
    """Return the stacks of all threads, innermost call first, in the format of ``faulthandler``."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines: List[str] = []
    for ident, top in list(sys._current_frames().items())[:MAX_THREADS]:
        lines.append(f"Thread {ident} [{names.get(ident, '?')}] (most recent call first):")
        frame, depth = top, 0
        while frame is not None and depth < MAX_FRAMES:
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
            frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
        if frame is not None:
            lines.append("  ...")
        lines.append("")
    return "\n".join(lines)[:MAX_TEXT_CHARS]


def format_gc_objects() -> str:
    """Return the garbage collector's statistics and the most frequent types of tracked objects.

    If the process has too many objects, only the young generations are counted.
    """
    lines = [f"-- collections {gc.get_stats()}"]
    counted: "collections.Counter[type]" = collections.Counter()
    if is_full_gc_fast():
        lines.append(f"-- {_count_types(gc.get_objects(), counted)} tracked objects")
    elif (found := get_young_objects()) is None:
        lines.append(
            "-- too many objects to list: the garbage collector is disabled or rarely runs"
        )
    else:
        recent, blocks = _count_types(found, counted), sys.getallocatedblocks()
        lines.append(
            f"-- {recent} tracked objects were created recently; the process has about "
            f"{blocks} objects"
        )
    for kind, count in counted.most_common(MAX_TABLE_ROWS):
        lines.append(f"{count:>10} {kind.__module__}.{kind.__qualname__}")
    return "\n".join(lines)[:MAX_TEXT_CHARS]


def _count_types(objects: List[Any], counted: "collections.Counter[type]") -> int:
    global _object_list_bytes
    size = len(objects)
    while objects:
        _object_list_bytes = sys.getsizeof(objects)
        counted.update(map(type, objects[-OBJECTS_PER_BATCH:]))
        del objects[-OBJECTS_PER_BATCH:]
        time.sleep(BATCH_PAUSE_S)
    _object_list_bytes = 0
    return size


def format_torch_memory() -> str:
    """Return PyTorch's memory summary of each device."""
    module = get_torch_cuda()
    if module is None:
        return "CUDA is not initialized in this process"
    return "\n".join(module.memory_summary(i) for i in range(module.device_count()))[
        :MAX_TEXT_CHARS
    ]
