"""Create diagnostic reports of the worker, as text."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections import Counter
from typing import Any

import torch

from plimsoll_api.admin import Diagnostic
from plimsoll_engine.process.allocations import MAX_RANKED_LINES, AllocationReporter


def run_diagnostic(kind: str, allocations: AllocationReporter) -> str:
    """Return the report for the :class:`Diagnostic` ``kind``."""
    match kind:
        case Diagnostic.STACKS:
            return format_stacks()
        case Diagnostic.GC:
            return format_collector()
        case Diagnostic.TRACEMALLOC:
            return allocations.report()
        case Diagnostic.TORCH:
            return format_device()
    return f"unknown diagnostic {kind!r}; use one of {', '.join(Diagnostic)}"


def format_stacks() -> str:
    """Return the stacks of all Python threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def format_collector() -> str:
    """Return the garbage collector's state and the most frequent types of tracked objects."""
    types = Counter(type(item).__qualname__ for item in gc.get_objects())
    lines = [
        f"enabled {gc.isenabled()}, thresholds {gc.get_threshold()}, counts {gc.get_count()}",
        f"frozen {gc.get_freeze_count()}, tracked {types.total()}",
        *(f"{count:>9} {name}" for name, count in types.most_common(MAX_RANKED_LINES)),
    ]
    return "\n".join(lines)


def format_device() -> str:
    """Return torch's summary of the device memory and the largest blocks in use."""
    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return "no CUDA context in this worker"
    segments = cuda.memory_snapshot()
    blocks = [block for segment in segments for block in segment["blocks"]]
    used = [block for block in blocks if block["state"] == "active_allocated"]
    used.sort(key=lambda block: -block["size"])
    lines = [
        str(cuda.memory_summary()),
        f"{len(segments)} segments, {len(used)} blocks in use; the largest:",
        *(f"{block['size']:>14} bytes{_find_origin(block)}" for block in used[:MAX_RANKED_LINES]),
    ]
    return "\n".join(lines)


def _find_origin(block: dict[str, Any]) -> str:
    frames = block.get("frames") or []
    return "".join(f" < {frame['filename']}:{frame['line']}" for frame in frames[:4])
