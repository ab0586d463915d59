"""Memory of a GPU, and memory of the host that is pinned for one: leaks, and growth that ends.

It needs the torch of its process, and is imported where there is none as well. Callers
say how many bytes leaks and bounded growth take; the other healthy kinds follow the clock. Sizes
are in bytes, times in seconds.
"""

from __future__ import annotations

import gc
import mmap
import random
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from leaklab.mechanisms import MIB, Take, Tick, pages, touch

SLICE = 4096
CACHED_PIECE, CACHED_PIECES, CACHED_S = 4 << 20, 40, 100.0
WORK_S = 12.0
PINNED_SIZES, PINNED_S = 5, 8.0
SHAPES, SHAPE_S = 24, 5.0
STREAMS, STREAM_S = 8, 14.0
STAIR, STAIRS, STAIR_S = 20 * MIB, 5, 24.0
SPLITS, SPLIT_S, RESULT = 5, 20.0, 12 * MIB
"""``RESULT`` is more than what is left of a block that one was split from, so that each needs a
block of its own."""
BATCHES, BATCH_S = (10 * MIB, 12 * MIB, 14 * MIB, 16 * MIB, 18 * MIB, 20 * MIB), 8.0
"""Bytes of the buffers of each size of a batch. Torch's allocator takes as much for each."""


# ---- leaks


def retained_tensors() -> Take:
    """Tensors on the device that are never freed."""
    kept: list[Any] = []

    def take(size: int) -> None:
        kept.append(get_torch().empty(size, dtype=get_torch().uint8, device="cuda"))

    return take


def retained_slices() -> Take:
    """A few rows that are kept of a large tensor hold all of its storage."""
    kept: list[Any] = []

    def take(size: int) -> None:
        whole = get_torch().ones(size // SLICE, SLICE, dtype=get_torch().uint8, device="cuda")
        kept.append(whole[-1:])

    return take


def pinned_buffers() -> Take:
    """Pinned staging buffers; torch takes them in powers of two."""
    kept: list[Any] = []

    def take(size: int) -> None:
        kept.append(get_torch().ones(size, dtype=get_torch().uint8).pin_memory())

    return take


def autograd_history() -> Take:
    """A sum of losses that was never detached holds what each was computed of."""
    total: list[Any] = [0.0]

    def take(size: int) -> None:
        with get_torch().inference_mode(False), get_torch().enable_grad():
            weights = get_torch().ones(size // 4, device="cuda", requires_grad=True)
            total[0] = total[0] + weights.square().sum()

    return take


def registered_buffers() -> Take:
    """Buffers of the heap that are registered with the device and never unregistered."""
    kept: list[Any] = []

    def take(size: int) -> None:
        buffer = get_torch().ones(size, dtype=get_torch().uint8)
        get_torch().cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0)
        kept.append(buffer)

    return take


def device_workspaces() -> Take:
    """Workspaces that are kept in a table by the shape that they were made for."""
    table: dict[tuple[int, int], Any] = {}

    def take(size: int) -> None:
        shape = (len(table), size)
        table[shape] = get_torch().zeros(size // 2, dtype=get_torch().bfloat16, device="cuda")

    return take


def captured_tensors() -> Take:
    """Callbacks that wait for an event that never comes, with the tensors that they would read."""
    waiting: list[Callable[[], Any]] = []

    def take(size: int) -> None:
        tensor = allocate_on_device(size)
        waiting.append(lambda: tensor[0])

    return take


def kv_copies() -> Take:
    """Copies of the keys and values of requests that might have come back."""
    kept: list[Any] = []

    def take(size: int) -> None:
        kept.append(get_torch().ones(size // 2, dtype=get_torch().bfloat16, device="cuda").clone())

    return take


def pinned_outputs() -> Take:
    """Outputs that were copied into pinned memory of the host, and are kept there."""
    kept: list[Any] = []

    def take(size: int) -> None:
        made = allocate_on_device(size)
        kept.append(get_torch().empty(size, dtype=get_torch().uint8, pin_memory=True))
        kept[-1].copy_(made, non_blocking=True)

    return take


def frozen_cycles() -> Take:
    """Tensors in cyclic garbage that was frozen, where the collector no longer looks."""

    def take(size: int) -> None:
        holder: dict[str, Any] = {"tensor": allocate_on_device(size)}
        holder["self"] = holder
        gc.freeze()

    return take


def dlpack_capsules() -> Take:
    """Capsules that hand tensors to another library, which never takes them."""
    kept: list[Any] = []

    def take(size: int) -> None:
        kept.append(get_torch().utils.dlpack.to_dlpack(allocate_on_device(size)))

    return take


def adapter_copies() -> Take:
    """Weights of each adapter that ever answered, by its number: unloading it leaves them."""
    table: dict[int, tuple[Any, Any]] = {}

    def take(size: int) -> None:
        weights = [
            get_torch().ones(size // 4, dtype=get_torch().bfloat16, device="cuda") for _ in "AB"
        ]
        table[len(table)] = weights[0], weights[1]

    return take


def private_pools() -> Take:
    """Pools of torch's allocator, one for each piece of work. The work's tensor is freed, but no
    other pool can use its memory, and a pool that is kept returns nothing."""
    pools: list[Any] = []

    def take(size: int) -> None:
        pools.append(get_torch().cuda.MemPool())
        with get_torch().cuda.use_mem_pool(pools[-1]):
            allocate_on_device(size)

    return take


def hooked_outputs() -> Take:
    """Outputs of a layer, gathered by a hook of a debugger that nobody has removed."""
    gathered: list[Any] = []
    layer = get_torch().nn.Identity()
    layer.register_forward_hook(lambda _layer, _given, made: gathered.append(made))

    def take(size: int) -> None:
        layer(get_torch().ones(size // 2, dtype=get_torch().bfloat16, device="cuda"))

    return take


def transfer_regions() -> Take:
    """Shared memory that carries keys and values to other machines. Each connection registers
    regions of its own with the device, and leaves them when it ends."""
    kept: list[Any] = []

    def take(size: int) -> None:
        region = mmap.mmap(-1, pages(size), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        touch(region)
        kept.append(get_torch().frombuffer(region, dtype=get_torch().uint8))
        get_torch().cuda.cudart().cudaHostRegister(kept[-1].data_ptr(), pages(size), 0)

    return take


# ---- growth that ends


def pinned_pool() -> Tick:
    """Pinned buffers of twice the size each time one is too small; there are few sizes."""
    kept: list[Any] = []

    def tick(t: float) -> None:
        if len(kept) < PINNED_SIZES and t >= PINNED_S * 2 ** len(kept):
            size = CACHED_PIECE << len(kept)
            kept.append(get_torch().ones(size, dtype=get_torch().uint8).pin_memory())

    return tick


def shape_workspaces() -> Tick:
    """Workspaces of the shapes that were met last: the oldest goes where there are enough."""
    kept: list[Any] = []
    turn = 0

    def tick(t: float) -> None:
        nonlocal turn
        if t >= turn * SHAPE_S:
            turn += 1
            kept.append(allocate_on_device(CACHED_PIECE))
            del kept[:-SHAPES]

    return tick


def device_cache() -> Tick:
    """An undeclared cache on the device that fills within 100 s."""
    kept: list[Any] = []

    def tick(t: float) -> None:
        while len(kept) < CACHED_PIECES * min(1.0, t / CACHED_S):
            kept.append(allocate_on_device(CACHED_PIECE))

    return tick


def device_high_water() -> Tick:
    """Work of rising size on the device, whose memory torch's allocator keeps."""
    turn = 0

    def tick(t: float) -> None:
        nonlocal turn
        if t >= turn * WORK_S:
            turn += 1
            size = min(turn, CACHED_PIECES) * CACHED_PIECE
            allocate_on_device(size)

    return tick


def stream_reserves(work: int = 15 * MIB) -> Tick:
    """Streams that start one after the other. Torch's allocator keeps what the work on each took,
    for that stream alone."""
    streams: list[Any] = []
    turn = 0

    def tick(t: float) -> None:
        nonlocal turn
        if t < turn * STREAM_S:
            return
        turn += 1
        if len(streams) < STREAMS:
            streams.append(get_torch().cuda.Stream())
        with get_torch().cuda.stream(streams[turn % len(streams)]):
            allocate_on_device(work)

    return tick


def device_stairs() -> Tick:
    """Parts of a model that are loaded when somebody first needs them, until all are there."""
    kept: list[Any] = []

    def tick(t: float) -> None:
        if len(kept) < STAIRS and t >= STAIR_S * len(kept):
            kept.append(allocate_on_device(STAIR))

    return tick


def split_blocks() -> Tick:
    """Results that stay in the block that their work had taken, a few times. The next work needs
    a block of its own, and torch's allocator keeps what is left of the others."""
    kept: list[Any] = []

    def tick(t: float) -> None:
        if len(kept) < SPLITS and t >= SPLIT_S * len(kept):
            allocate_on_device(STAIR)
            kept.append(allocate_on_device(RESULT))

    return tick


def batch_buffers() -> Tick:
    """Buffers for each size of a batch, made when the first such batch comes: larger ones are
    rarer."""
    kept: dict[int, Any] = {}
    chance, turn = random.Random(1), 0

    def tick(t: float) -> None:
        nonlocal turn
        while t >= turn * BATCH_S:
            turn += 1
            size = min(int(chance.expovariate(0.6)), len(BATCHES) - 1)
            if size not in kept:
                kept[size] = allocate_on_device(BATCHES[size])

    return tick


def vision_cache(bound: int = 96 * MIB) -> Take:
    """What an encoder made of the newest images: the oldest goes where there is no room."""
    kept: deque[tuple[int, Any]] = deque()
    held = 0

    def take(size: int) -> None:
        nonlocal held
        kept.append((size, allocate_on_device(size)))
        held += size
        while held > bound:
            held -= kept.popleft()[0]

    return take


def get_torch() -> Any:
    """Return the torch module that the process has imported."""
    return sys.modules["torch"]


def allocate_on_device(size: int) -> Any:
    """Return a tensor of ``size`` bytes on the current CUDA device, all written."""
    return get_torch().ones(size, dtype=get_torch().uint8, device="cuda")


LEAKS: dict[str, Callable[[], Take]] = {
    function.__name__: function
    for function in (
        retained_tensors, retained_slices, pinned_buffers, autograd_history, registered_buffers,
        device_workspaces, captured_tensors, kv_copies, pinned_outputs, frozen_cycles,
        dlpack_capsules, adapter_copies, private_pools, hooked_outputs, transfer_regions,
    )
}  # fmt: skip
HEALTHY: dict[str, Callable[[], Tick]] = {
    function.__name__: function
    for function in (
        device_cache, device_high_water, pinned_pool, shape_workspaces, stream_reserves,
        device_stairs, split_blocks, batch_buffers,
    )
}  # fmt: skip
BOUNDED: dict[str, Callable[[], Take]] = {vision_cache.__name__: vision_cache}
