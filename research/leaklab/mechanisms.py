"""What the plain engine does with its memory: real leaks, and real things that only look like one.

Standard library only. Each leak takes memory in pieces when it is told to, and never gives it back.
Each healthy mechanism is moved by the clock alone and stays below a bound. Sizes in bytes, times in
seconds; every page that is taken is written, so that it is resident.
"""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import os
import signal
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable

MIB = 1 << 20
PAGE = mmap.PAGESIZE
SMALL, BUFFER, LARGE = 400, 8 << 10, 64 << 10
"""Below 512 bytes pymalloc serves a request, below 128 KiB glibc's heap, above it mmap."""

Take = Callable[[int], None]
Tick = Callable[[float], None]

libc = ctypes.CDLL(None, use_errno=True)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.realloc.restype = ctypes.c_void_p
libc.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


# ---- leaks


def small_objects() -> Take:
    """Python objects of pymalloc, in a list that nobody empties."""
    kept: list[bytes] = []

    def take(size: int) -> None:
        kept.extend(bytes(SMALL) for _ in range(size // SMALL))

    return take


def heap_blocks() -> Take:
    """Blocks of glibc's heap, kept by their address alone: no Python object shows them."""

    def take(size: int) -> None:
        for _ in range(max(1, size // LARGE)):
            touched(LARGE)

    return take


def fragmentation() -> Take:
    """Buffers that are shrunk to the crumb that is needed of them. Each hole is smaller than the
    next buffer, so that the heap grows although hardly anything is in use."""

    def take(size: int) -> None:
        for block in [touched(BUFFER) for _ in range(max(1, size // BUFFER))]:
            libc.realloc(block, 24)

    return take


def cycles() -> Take:
    """Cyclic garbage of a program that switched its collector off."""
    gc.disable()

    def take(size: int) -> None:
        for _ in range(max(1, size // LARGE)):
            _cycle(LARGE)

    return take


def mappings() -> Take:
    """Anonymous mappings outside of malloc."""
    kept: list[mmap.mmap] = []

    def take(size: int) -> None:
        mapping = mmap.mmap(-1, pages(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        touch(mapping)
        kept.append(mapping)

    return take


def shared() -> Take:
    """Shared memory files, as processes use them that pass tensors."""
    kept: list[mmap.mmap] = []

    def take(size: int) -> None:
        file = os.memfd_create("plain-engine")
        os.ftruncate(file, pages(size))
        mapping = mmap.mmap(file, pages(size), flags=mmap.MAP_SHARED)
        os.close(file)
        touch(mapping)
        kept.append(mapping)

    return take


def locked() -> Take:
    """Memory that is locked, as pinned buffers are. OSError where that is not permitted."""

    def take(size: int) -> None:
        address = touched(pages(size))
        if libc.mlock(address, pages(size)) != 0:
            raise OSError(ctypes.get_errno(), "mlock: raise the limit of locked memory (ulimit -l)")

    return take


def growing_helper() -> Take:
    """The memory is in a forked helper: the engine's own process stays as it is."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(writing)
        take_here = mappings()
        while message := os.read(reading, 8):
            take_here(int.from_bytes(message, "little"))
        os._exit(0)
    os.close(reading)

    def take(size: int) -> None:
        os.write(writing, size.to_bytes(8, "little"))

    return take


def helpers_left() -> Take:
    """Each piece of work leaves a forked helper behind that never ends."""

    def take(size: int) -> None:
        if os.fork() == 0:
            touched(size)
            time.sleep(3600)
            os._exit(0)

    return take


# ---- healthy


def idle() -> Tick:
    return lambda t: None


def sawtooth(height: int = 40 * MIB, period_s: float = 60.0) -> Tick:
    """Cyclic garbage that a rare full collection takes back."""
    gc.disable()
    made, since = 0, 0.0

    def tick(t: float) -> None:
        nonlocal made, since
        if t - since >= period_s:
            gc.collect()
            made, since = 0, t
        while made < height * (t - since) / period_s:
            _cycle(LARGE)
            made += LARGE

    return tick


def bursts(height: int = 48 * MIB, period_s: float = 120.0, share: float = 0.25) -> Tick:
    """Requests that hold memory for a part of each period, in large blocks that go back."""
    held: list[bytearray] = []

    def tick(t: float) -> None:
        if t % period_s >= share * period_s:
            held.clear()
        elif not held:
            held.extend(bytearray(b"\1") * MIB for _ in range(height // MIB))

    return tick


def cache_fill(bound: int = 96 * MIB, fills_s: float = 900.0) -> Tick:
    """A cache that its owner bounded and nobody was told of: it fills, then it churns."""
    entries: OrderedDict[int, bytearray] = OrderedDict()
    number = 0

    def tick(t: float) -> None:
        nonlocal number
        while number * LARGE < bound * t / fills_s:
            entries[number] = bytearray(b"\1") * LARGE
            number += 1
            while len(entries) * LARGE > bound:
                entries.popitem(last=False)

    return tick


def tide(height: int = 60 * MIB, period_s: float = 720.0) -> Tick:
    """Load that comes and goes as a sine, with memory in proportion."""
    held: list[bytearray] = []

    def tick(t: float) -> None:
        wanted = int(height * (0.5 - 0.5 * math.cos(2 * math.pi * t / period_s))) // MIB
        del held[wanted:]
        held.extend(bytearray(b"\1") * MIB for _ in range(wanted - len(held)))

    return tick


def file_cache(size: int = 256 * MIB, period_s: float = 300.0) -> Tick:
    """A file that is written, mapped and read over and over: the page cache and the resident file
    pages grow, and the kernel may take them back at any time."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
    file.write(b"\1" * MIB * (size // MIB))
    file.flush()
    mapping = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)

    def tick(t: float) -> None:
        upto = int(size * (t % period_s) / period_s)
        sum(mapping[offset] for offset in range(max(0, upto - 4 * MIB), upto, PAGE))
        if t % period_s < 1.0:
            mapping.madvise(mmap.MADV_DONTNEED)

    return tick


def retention(height: int = 64 * MIB, period_s: float = 240.0) -> Tick:
    """Work now and then whose memory the allocator keeps: a crumb above it holds the heap's top.
    The next work of the same size uses it again."""
    since = -period_s

    def tick(t: float) -> None:
        nonlocal since
        if t - since < period_s:
            return
        since = t
        blocks = [touched(LARGE) for _ in range(height // LARGE)]
        touched(24)
        for block in blocks:
            libc.free(block)

    return tick


def short_helpers(size: int = 24 * MIB, period_s: float = 45.0, life_s: float = 12.0) -> Tick:
    """A helper now and then, forked with all of the parent's memory, that ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    since = 0.0

    def tick(t: float) -> None:
        nonlocal since
        if t - since < period_s:
            return
        since = t
        if os.fork() == 0:
            touched(size)
            time.sleep(life_s)
            os._exit(0)

    return tick


LEAKS: dict[str, Callable[[], Take]] = {
    function.__name__: function
    for function in (
        small_objects, heap_blocks, fragmentation, cycles, mappings, shared, locked,
        growing_helper, helpers_left,
    )
}  # fmt: skip
HEALTHY: dict[str, Callable[[], Tick]] = {
    function.__name__: function
    for function in (
        idle, sawtooth, bursts, cache_fill, tide, file_cache, retention, short_helpers,
    )
}  # fmt: skip


def leaking(take: Take, rate: float, piece: int) -> Tick:
    """``rate`` bytes a second in pieces of ``piece`` bytes."""
    taken = 0

    def tick(t: float) -> None:
        nonlocal taken
        while taken + piece <= rate * t:
            take(piece)
            taken += piece

    return tick


# ---- parts


def touched(size: int) -> int:
    """The address of a new block of the C heap, written."""
    address = libc.malloc(size)
    if not address:
        raise MemoryError(f"malloc({size})")
    libc.memset(address, 1, size)
    return int(address)


def touch(mapping: mmap.mmap, start: int = 0) -> None:
    """Write to each page of a mapping from ``start`` on."""
    for offset in range(start, len(mapping), PAGE):
        mapping[offset] = 1


def mapped(size: int) -> mmap.mmap:
    """Return a private mapping of its own, written: its memory goes back when it is closed."""
    mapping = mmap.mmap(-1, pages(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    touch(mapping)
    return mapping


def pages(size: int) -> int:
    """Round a size in bytes up to whole pages."""
    return -(-size // PAGE) * PAGE


def _cycle(size: int) -> None:
    held: list[object] = [bytearray(b"\1") * size]
    held.append(held)
