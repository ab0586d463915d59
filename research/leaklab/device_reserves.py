"""More memory of a GPU that leaks, and growth of it that ends: by other means than before.

It needs the torch of its process, and is imported where there is none as well. Sizes are in bytes,
times in seconds.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from typing import Any

from leaklab.device_growth import allocate_on_device, get_torch
from leaklab.mechanisms import MIB, Take, Tick

STATE = 2 * MIB
"""Bytes of what a stream keeps. Torch's allocator takes tensors of more than 1 MiB out of the large
block that the stream's work has left."""
REGROWN = ((0.0, 12 * MIB), (15.0, 20 * MIB), (40.0, 28 * MIB), (75.0, 36 * MIB), (120.0, 44 * MIB))
"""When a workspace is too small, and the bytes of the next one. Torch's allocator takes as much for
each, because each is larger than all before."""


# ---- leaks


def failed_batches() -> Take:
    """Errors of requests that were given up. Each has its traceback, whose frames hold the tensors
    of their batch."""
    errors: list[RuntimeError] = []

    def fail(size: int) -> None:
        batch = allocate_on_device(size)
        raise RuntimeError(f"a batch of {tuple(batch.shape)} was given up")

    def take(size: int) -> None:
        try:
            fail(size)
        except RuntimeError as error:
            errors.append(error)

    return take


def unread_outputs() -> Take:
    """Outputs for a thread that copies them to the host. It has ended, and nobody else takes them
    out of its queue."""
    outputs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    copier = threading.Thread(target=outputs.get, daemon=True)
    copier.start()
    outputs.put(None)
    copier.join()

    def take(size: int) -> None:
        outputs.put(allocate_on_device(size))

    return take


def stream_states() -> Take:
    """A stream of its own for each connection, with a small state that stays. The state lies in the
    block that the work on the stream took: torch's allocator can neither return that block, nor
    give what is left of it to another stream."""
    kept: list[tuple[Any, Any]] = []

    def take(size: int) -> None:
        made = ctypes.c_void_p()
        get_torch().cuda.cudart().cudaStreamCreate(ctypes.addressof(made))
        stream = get_torch().cuda.ExternalStream(made.value)
        with get_torch().cuda.stream(stream):
            allocate_on_device(size + STATE)
            kept.append((stream, allocate_on_device(STATE)))

    return take


# ---- growth that ends


def regrown_workspace() -> Tick:
    """A workspace that is replaced by a larger one when it is too small, up to the largest batch.
    Torch's allocator keeps those before."""
    kept: list[Any] = []
    turn = 0

    def tick(t: float) -> None:
        nonlocal turn
        while turn < len(REGROWN) and t >= REGROWN[turn][0]:
            kept[:] = [allocate_on_device(REGROWN[turn][1])]
            turn += 1

    return tick


LEAKS: dict[str, Callable[[], Take]] = {
    function.__name__: function for function in (failed_batches, unread_outputs, stream_states)
}
HEALTHY: dict[str, Callable[[], Tick]] = {regrown_workspace.__name__: regrown_workspace}
