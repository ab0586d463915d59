"""What the bookkeeping around requests keeps: more leaks, by means that no recording has yet.

Standard library and ``mechanisms.py`` only. Each leak takes a piece of memory at each call, and
never frees it. Sizes are in bytes. Every page that is taken is written, so that it is resident.
"""

from __future__ import annotations

import ctypes
import heapq
import mmap
import os
from collections import deque
from collections.abc import Callable
from fcntl import fcntl
from http.cookiejar import Cookie, CookieJar
from typing import Any

from leaklab.library_leaks import MAP_ANONYMOUS, MAP_PRIVATE, READ_WRITE
from leaklab.mechanisms import MIB, PAGE, Take, libc, pages

EVENT, COOKIE, ERROR, TYPES = 930, 640, 384, 5910
"""Bytes that an event of the prefix cache takes with its tokens, a cookie with its table, an error
with its text, and the types of an array and of a pointer to it: as measured in CPython 3.11 and
3.12. Some five eighths of such types are in the C heap, and the rest in pymalloc's memory."""
BLOCK_TOKENS = 16
STREAM, WRITTEN = 63 << 10, 64_000
"""Bytes of a stream in memory with its buffer, as measured in glibc 2.36, and of its contents."""
CHATS, TURN = 16, 2 << 10
"""Number of concurrent chats, and bytes that each turn adds to one."""
JOB, LOW_PRIORITY = 16 << 10, 9
SPARE = MIB // 2
"""Bytes of a mapping that are unmapped at the end of a request."""
ADD_SEALS, SEAL_SHRINK, SEAL_GROW = 1033, 0x2, 0x4

libc.open_memstream.restype = ctypes.c_void_p
libc.open_memstream.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
libc.fwrite.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
libc.fwrite.restype = ctypes.c_size_t
libc.fflush.argtypes = [ctypes.c_void_p]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Stored:
    """An event of the prefix cache: a block was stored."""

    __slots__ = ("block", "parent", "tokens")

    def __init__(self, number: int) -> None:
        self.block, self.parent = number.to_bytes(32, "big"), (number - 1).to_bytes(32, "big")
        self.tokens = [1000 + number + i for i in range(BLOCK_TOKENS)]


def unacknowledged_events() -> Take:
    """Events of the prefix cache, kept until the router acknowledges them. It never does."""
    kept: deque[_Stored] = deque()
    count = 0

    def take(size: int) -> None:
        nonlocal count
        for _ in range(size // EVENT):
            count += 1
            kept.append(_Stored(count))

    return take


def session_cookies() -> Take:
    """A client that is shared by all requests, and keeps the cookie of each in its jar."""
    jar = CookieJar()
    count = 0

    def take(size: int) -> None:
        nonlocal count
        for _ in range(size // COOKIE):
            count += 1
            jar.set_cookie(
                Cookie(
                    version=0, name=f"session-{count}", value=f"{count:0128}", port=None,
                    port_specified=False, domain="tools.local", domain_specified=True,
                    domain_initial_dot=False, path="/", path_specified=True, secure=True,
                    expires=None, discard=True, comment=None, comment_url=None, rest={},
                )
            )  # fmt: skip

    return take


def memory_streams() -> Take:
    """Streams in memory of the C library, into which a formatter writes and which it never
    closes."""
    text = b"\1" * WRITTEN

    def take(size: int) -> None:
        for _ in range(max(1, size // STREAM)):
            # The library writes to both places whenever the stream is flushed.
            places = libc.malloc(2 * ctypes.sizeof(ctypes.c_void_p))
            stream = libc.open_memstream(places, places + ctypes.sizeof(ctypes.c_void_p))
            if not stream or libc.fwrite(text, 1, WRITTEN, stream) != WRITTEN:
                raise MemoryError("open_memstream: the stream could not be written")
            libc.fflush(stream)

    return take


def turn_copies() -> Take:
    """A copy of the whole chat for each of its turns, kept so that it could be resumed there. Each
    copy is longer than the one before."""
    copies: list[str] = []

    def take(size: int) -> None:
        while size > 0:
            length = min(size, TURN * (1 + len(copies) // CHATS))
            copies.append("x" * length)
            size -= length

    return take


class _ClientLeft(Exception):
    """A client left before its answer was complete."""


def chained_errors() -> Take:
    """The error of each client that left. Each was raised while the one before was handled, and
    has that as its context."""
    last: list[BaseException | None] = [None]
    count = 0

    def take(size: int) -> None:
        nonlocal count
        for _ in range(size // ERROR):
            count += 1
            error = _ClientLeft(f"client {count:0160} left")
            error.__context__ = last[0]
            last[0] = error

    return take


def untrimmed_mappings() -> Take:
    """Buffers on a large alignment, mapped with room to spare. The end of a request unmaps the
    buffer alone: what lies before it stays."""
    flags = MAP_PRIVATE | MAP_ANONYMOUS

    def take(size: int) -> None:
        address = libc.mmap(None, pages(size) + SPARE, READ_WRITE, flags, -1, 0)
        libc.memset(address, 1, pages(size) + SPARE)
        if libc.munmap(address + pages(size), SPARE) != 0:
            raise OSError(ctypes.get_errno(), "munmap: the buffer could not be unmapped")

    return take


def starved_jobs() -> Take:
    """Jobs of low priority. There is always one that comes first, so that they wait forever."""
    waiting: list[tuple[int, int, bytearray]] = []

    def take(size: int) -> None:
        for _ in range(max(1, size // JOB)):
            heapq.heappush(waiting, (LOW_PRIORITY, len(waiting), bytearray(b"\1") * JOB))

    return take


def pointer_types() -> Take:
    """The type of a pointer to an array for each length that a native library was given: ``ctypes``
    keeps every type that it ever made of one."""
    count = 0
    kept: list[Any] = []

    def take(size: int) -> None:
        nonlocal count
        for _ in range(size // TYPES):
            count += 1
            kept.append(ctypes.POINTER(ctypes.c_char * count))

    return take


def sealed_messages() -> Take:
    """Messages from other processes in sealed files in memory. Each is mapped to be read, and
    never unmapped."""
    kept: list[mmap.mmap] = []

    def take(size: int) -> None:
        file = os.memfd_create("message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(file, b"\1" * pages(size))
        fcntl(file, ADD_SEALS, SEAL_SHRINK | SEAL_GROW)
        message = mmap.mmap(file, pages(size), flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        os.close(file)
        sum(message[offset] for offset in range(0, len(message), PAGE))
        kept.append(message)

    return take


LEAKS: dict[str, Callable[[], Take]] = {
    function.__name__: function
    for function in (
        unacknowledged_events, session_cookies, memory_streams, turn_copies, chained_errors,
        untrimmed_mappings, starved_jobs, pointer_types, sealed_messages,
    )
}  # fmt: skip
