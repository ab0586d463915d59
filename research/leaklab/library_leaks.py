"""What libraries that engines are built from keep for a program: more leaks, by other means.

Standard library and ``mechanisms.py`` only; :func:`unread_socket` needs the pyzmq of its process.
Each leak takes a piece of memory at each call, and never frees it. Sizes are in bytes. Every page
that is taken is written, so that it is resident.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import linecache
import os
import re
from collections import deque
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from typing import Any
from weakref import WeakKeyDictionary

from leaklab.mechanisms import LARGE, PAGE, Take, libc, pages, touched

LOST, LOST_TEXT = 448, 400
"""Bytes of pymalloc that an object takes, and of its contents."""
SPAN, SOURCE, SOURCE_LINES = 1004, 1588, 12
"""Bytes of a span with its attributes, and of the source of a class with its entry: as measured in
CPython 3.11. ``SOURCE_LINES`` are the lines of one."""
PATTERN, CHOICES = 4554, 24
"""Bytes of a compiled pattern, as measured in CPython 3.11, and its alternatives."""
MASK, STATES = 151_936 // 8, 3
"""Bytes of a mask with a bit for each token, and how many a pattern has."""
MESSAGE = 16 << 10
ALIGNED, ALIGNMENT, WORK = PAGE, 64 << 10, 68 << 10
"""``WORK`` is more than the hole below an aligned buffer, so that it lies above all of them."""
RESERVED = 8 << 30
PROT_NONE, READ_WRITE = 0, 3
MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE = 0x2, 0x20, 0x4000

libc.aligned_alloc.restype = ctypes.c_void_p
libc.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def lost_references() -> Take:
    """Objects whose reference an extension in C never gives back. Nothing refers to them."""
    take_reference = ctypes.pythonapi.Py_IncRef
    take_reference.argtypes = [ctypes.py_object]

    def take(size: int) -> None:
        for _ in range(size // LOST):
            take_reference(bytes(LOST_TEXT))

    return take


class _Span:
    """A span of a trace, as tracing libraries have it."""

    __slots__ = ("attributes", "ended", "events", "name", "span", "started", "trace")

    def __init__(self, number: int) -> None:
        self.name = f"llm_request {number}"
        self.trace, self.span = (number + 1) << 100, (number + 1) << 40
        self.started, self.ended = 0.1 * number, 0.2 * number
        self.attributes: dict[str, object] = {
            "gen_ai.request.id": f"cmpl-{number:032x}",
            "gen_ai.usage.completion_tokens": 1000 + number,
            "gen_ai.latency.time_to_first_token": 0.3 * number,
            "gen_ai.latency.e2e": 0.4 * number,
        }
        self.events = [("first_token", 0.5 * number), ("finished", 0.6 * number)]


def trace_spans() -> Take:
    """Spans that wait for an exporter whose collector cannot be reached, in a queue without a
    bound."""
    waiting: deque[_Span] = deque()

    def take(size: int) -> None:
        waiting.extend(_Span(len(waiting) + number) for number in range(size // SPAN))

    return take


def source_lines() -> Take:
    """The source of a class that is generated for each schema: ``linecache`` keeps it so that
    tracebacks can show it."""
    count = 0

    def take(size: int) -> None:
        nonlocal count
        for _ in range(size // SOURCE):
            count += 1
            name = f"<generated answer {count}>"
            lines = [f"    self.field_{count}_{i} = check(given)\n" for i in range(SOURCE_LINES)]
            linecache.cache[name] = (64 * SOURCE_LINES, None, lines, name)

    return take


def compiled_patterns() -> Take:
    """Patterns that are compiled for the choices that a request allows, with the tokens that each
    of their states allows, in a cache without a bound."""
    count = 0

    @functools.cache
    def compiled(choices: str) -> tuple[re.Pattern[str], list[bytes]]:
        return re.compile(choices), [b"\1" * MASK for _ in range(STATES)]

    def take(size: int) -> None:
        nonlocal count
        for _ in range(max(1, size // (PATTERN + STATES * MASK))):
            count += 1
            compiled("|".join(f"{number}: the answer {count}" for number in range(CHOICES)))

    return take


class _Request:
    """What a weak table has as its key."""


def weak_table() -> Take:
    """A table with weak keys, whose values refer to their own keys: no entry is ever removed."""
    table: WeakKeyDictionary[_Request, tuple[_Request, bytearray]] = WeakKeyDictionary()

    def take(size: int) -> None:
        for _ in range(max(1, size // LARGE)):
            request = _Request()
            table[request] = request, bytearray(b"\1") * LARGE

    return take


def unread_socket() -> Take:
    """Messages of a ZeroMQ socket without a high-water mark, to a process that is gone."""
    zmq: Any = importlib.import_module("zmq")
    socket = zmq.Context().socket(zmq.PUSH)
    # Else the process would wait for its messages when it ends.
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(f"ipc://@unread-{os.getpid()}")

    def take(size: int) -> None:
        for _ in range(max(1, size // MESSAGE)):
            socket.send(b"\1" * MESSAGE)

    return take


def aligned_buffers() -> Take:
    """Small buffers on a large alignment. Work has used the memory below each, and no later work
    is small enough for it."""

    def take(size: int) -> None:
        for _ in range(max(1, size // ALIGNMENT)):
            libc.free(touched(WORK))
            address = libc.aligned_alloc(ALIGNMENT, ALIGNED)
            if not address:
                raise MemoryError(f"aligned_alloc({ALIGNED})")
            libc.memset(address, 1, ALIGNED)

    return take


def committed_slabs() -> Take:
    """Slabs of an allocator of a native library, which reserves addresses at once, makes them
    usable in turn, and returns none."""
    flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE
    start = libc.mmap(None, RESERVED, PROT_NONE, flags, -1, 0)
    used = 0

    def take(size: int) -> None:
        nonlocal used
        slab = start + used
        if libc.mprotect(slab, pages(size), READ_WRITE) != 0:
            raise OSError(ctypes.get_errno(), "mprotect: the slab could not be made usable")
        libc.memset(slab, 1, pages(size))
        used += pages(size)

    return take


def attached_blocks() -> Take:
    """Blocks of shared memory that carry images to another process. It has removed their names,
    and this one never closes them."""
    kept: list[SharedMemory] = []

    def take(size: int) -> None:
        block = SharedMemory(create=True, size=size)
        block.unlink()
        contents = block.buf
        assert contents is not None
        for offset in range(0, size, PAGE):
            contents[offset] = 1
        kept.append(block)

    return take


LEAKS: dict[str, Callable[[], Take]] = {
    function.__name__: function
    for function in (
        lost_references, trace_spans, source_lines, compiled_patterns, weak_table, unread_socket,
        aligned_buffers, committed_slabs, attached_blocks,
    )
}  # fmt: skip
