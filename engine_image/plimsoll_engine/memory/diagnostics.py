"""Evidence of the worker's inside, as text for a person."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
import tracemalloc
from collections import Counter
from typing import Any

import torch

from plimsoll_api.admin import Diagnostic

TOP = 40
"""Lines of a ranking: enough to see a leak, few enough to read."""


def diagnose(kind: str) -> str:
    """The text of one of :class:`Diagnostic`; for an unknown kind, what there is."""
    match kind:
        case Diagnostic.STACKS:
            return stacks()
        case Diagnostic.GC:
            return collector()
        case Diagnostic.TRACEMALLOC:
            return allocations()
        case Diagnostic.TORCH:
            return device()
    return f"unknown diagnostic {kind!r}; there are {', '.join(Diagnostic)}"


def stacks() -> str:
    """The stack of each Python thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def collector() -> str:
    """The collector's state and the types with the most tracked objects; frozen ones are apart."""
    types = Counter(type(item).__qualname__ for item in gc.get_objects())
    lines = [
        f"enabled {gc.isenabled()}, thresholds {gc.get_threshold()}, counts {gc.get_count()}",
        f"frozen {gc.get_freeze_count()}, tracked {types.total()}",
        *(f"{count:>9} {name}" for name, count in types.most_common(TOP)),
    ]
    return "\n".join(lines)


def allocations() -> str:
    """Where Python memory was allocated. Never switched on by asking: tracing costs speed, and its
    own tables grow."""
    if not tracemalloc.is_tracing():
        return "tracing is off; start the engine with PYTHONTRACEMALLOC=1 to see allocations"
    top = tracemalloc.take_snapshot().statistics("lineno")[:TOP]
    return "\n".join(str(statistic) for statistic in top) or "nothing was allocated since"


def device() -> str:
    """The allocator's own summary."""
    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return "no CUDA context in this worker"
    return str(cuda.memory_summary())
