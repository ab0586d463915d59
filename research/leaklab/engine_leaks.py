"""What engines keep that no earlier recording has: leaks by other means, and memory that only
looks like one.

Standard library only, like ``mechanisms.py``: each leak takes memory in pieces and never gives it
back, and each healthy mechanism is moved by the clock and stays below a bound.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import math
import mmap
import sqlite3
import ssl
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable

from leaklab.mechanisms import LARGE, MIB, PAGE, Take, Tick, libc, pages, touch, touched

LABELS, OWNED, ROW = 512, 1024, 4096
"""Bytes that an entry of a table of labels takes, an object with its finalizer, and a row."""
HELPER = (
    "import sys\n"
    "kept = []\n"
    "for line in sys.stdin:\n"
    "    kept.append(bytearray(b'\\1') * int(line))\n"
)
IPC_PRIVATE, IPC_RMID, OWNER_ONLY = 0, 0, 0o600
SIGNAL_SET, THREAD_ATTRIBUTES = 128, 64
"""Bytes of glibc's ``sigset_t`` and ``pthread_attr_t``."""

libc.shmat.restype = ctypes.c_void_p
libc.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
libc.shmctl.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
libc.pthread_attr_setstack.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


# ---- leaks


def thread_stacks() -> Take:
    """Native threads that wait forever, each with a stack that it has used."""
    kept: list[object] = []
    everything = ctypes.create_string_buffer(SIGNAL_SET)
    libc.sigfillset(everything)
    waits = ctypes.cast(libc.pause, ctypes.c_void_p)

    def take(size: int) -> None:
        stack = mmap.mmap(-1, pages(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        touch(stack)
        attributes = ctypes.create_string_buffer(THREAD_ATTRIBUTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(stack))
        libc.pthread_attr_init(attributes)
        libc.pthread_attr_setstack(attributes, address, pages(size))
        # A signal that it took would not reach the engine's own threads.
        libc.pthread_attr_setsigmask_np(attributes, everything)
        thread = ctypes.c_ulong()
        if libc.pthread_create(ctypes.byref(thread), attributes, waits, None) != 0:
            raise OSError("pthread_create: no thread could be made")
        kept.append((stack, thread))

    return take


def written_snapshots() -> Take:
    """Private mappings of files that are written to, so that each page becomes a copy."""
    kept: list[mmap.mmap] = []

    def take(size: int) -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(pages(size))
            mapping = mmap.mmap(file.fileno(), pages(size), flags=mmap.MAP_PRIVATE)
        touch(mapping)
        kept.append(mapping)

    return take


def grown_mapping() -> Take:
    """One mapping that grows in place, as an arena does that is never reset."""
    arena = mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def take(size: int) -> None:
        before = len(arena)
        arena.resize(before + pages(size))
        touch(arena, before)

    return take


def sysv_segments() -> Take:
    """Segments of System V shared memory that stay attached."""

    def take(size: int) -> None:
        segment = libc.shmget(IPC_PRIVATE, pages(size), OWNER_ONLY)
        address = libc.shmat(segment, None, 0) if segment >= 0 else None
        if address is None:
            raise OSError(ctypes.get_errno(), "shmget: no segment of shared memory could be made")
        libc.shmctl(segment, IPC_RMID, None)
        libc.memset(address, 1, pages(size))

    return take


def label_sets() -> Take:
    """A table of metrics with a set of labels for each user that ever came."""
    table: dict[tuple[str, ...], list[float]] = {}

    def take(size: int) -> None:
        for _ in range(size // LABELS):
            user = f"user-{len(table)}".ljust(LABELS // 2, ".")
            table[(user,)] = [0.0, 1.0]

    return take


def user_vectors() -> Take:
    """A vector of each user, by a number that no other user has."""
    table: dict[int, array.array[float]] = {}

    def take(size: int) -> None:
        for _ in range(max(1, size // LARGE)):
            table[len(table)] = array.array("f", bytes(b"\1" * LARGE))

    return take


def abandoned_results() -> Take:
    """Token IDs of abandoned requests, kept in case a client asks for them again."""
    kept: list[list[int]] = []

    def take(size: int) -> None:
        first = 1000 * (len(kept) + 1)
        kept.append(list(range(first, first + size // 40)))

    return take


def memory_database() -> Take:
    """A database in memory that logs each request."""
    database = sqlite3.connect(":memory:", check_same_thread=False)
    database.execute("create table log (number integer primary key, said blob)")

    def take(size: int) -> None:
        rows = [(b"\1" * (ROW - 64),)] * (size // ROW)
        database.executemany("insert into log (said) values (?)", rows)
        database.commit()

    return take


def memory_bios() -> Take:
    """OpenSSL buffers of connections that were never shut down."""
    kept: list[ssl.MemoryBIO] = []

    def take(size: int) -> None:
        for _ in range(max(1, size // LARGE)):
            buffer = ssl.MemoryBIO()
            buffer.write(b"\1" * (LARGE - PAGE))
            kept.append(buffer)

    return take


def tasks_left() -> Take:
    """Tasks of an event loop that wait for what never comes, each with its buffer."""
    loop, kept = asyncio.new_event_loop(), set[asyncio.Task[None]]()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def wait(buffer: bytearray) -> None:
        await asyncio.Event().wait()
        buffer.clear()

    async def start(count: int) -> None:
        for _ in range(count):
            kept.add(asyncio.create_task(wait(bytearray(b"\1") * LARGE)))

    def take(size: int) -> None:
        asyncio.run_coroutine_threadsafe(start(max(1, size // LARGE)), loop).result()

    return take


def finalizers() -> Take:
    """Objects whose finalizer holds the object itself, so that it never runs."""

    class Session:
        def __init__(self) -> None:
            self.state = bytes(400)

        def close(self) -> None:
            self.state = b""

    def take(size: int) -> None:
        for _ in range(size // OWNED):
            session = Session()
            weakref.finalize(session, session.close).atexit = False

    return take


def helper_heap() -> Take:
    """A program that the engine has started and sends its work to keeps all of it."""
    helper = subprocess.Popen(
        [sys.executable, "-c", HELPER], stdin=subprocess.PIPE, text=True, bufsize=1
    )
    assert helper.stdin is not None
    orders = helper.stdin

    def take(size: int) -> None:
        orders.write(f"{size}\n")

    return take


# ---- healthy


def _fill(size: Callable[[float], float]) -> Tick:
    """Hold as many bytes of the C heap as ``size`` says at a time."""
    held = 0

    def tick(t: float) -> None:
        nonlocal held
        while held + LARGE <= size(t):
            touched(LARGE)
            held += LARGE

    return tick


def prompt_cache(bound: int = 170 * MIB, fills_s: float = 50.0) -> Tick:
    """An undeclared cache on the C heap that fills ever more slowly, because it misses less."""
    return _fill(lambda t: bound * -math.expm1(-t / fills_s))


def large_cache() -> Tick:
    """The same, larger than the budget."""
    return prompt_cache(300 * MIB, 40.0)


def even_cache(bound: int = 110 * MIB, fills_s: float = 100.0) -> Tick:
    """A cache that fills evenly and then stops at once."""
    return _fill(lambda t: bound * min(1.0, t / fills_s))


def doubling_table(first: int = 8 * MIB, most: int = 128 * MIB, period_s: float = 18.0) -> Tick:
    """A table that doubles when it is full, each time after twice as long."""
    table = bytearray(b"\1") * first

    def tick(t: float) -> None:
        nonlocal table
        if len(table) < most and t > period_s * len(table) / first:
            table = bytearray(b"\1") * (2 * len(table))

    return tick


def high_water(most: int = 96 * MIB, period_s: float = 25.0) -> Tick:
    """Work of rising size whose memory the allocator keeps: a crumb holds the top of the heap."""
    turn = 0

    def tick(t: float) -> None:
        nonlocal turn
        if t < turn * period_s:
            return
        turn += 1
        blocks = [touched(LARGE) for _ in range(min(most, turn * 12 * MIB) // LARGE)]
        touched(LARGE + PAGE)
        for block in blocks:
            libc.free(block)

    return tick


def night_jobs(height: int = 90 * MIB, period_s: float = 140.0, lasts_s: float = 60.0) -> Tick:
    """Work that holds memory, ever more of it, until it ends."""
    held: list[bytearray] = []

    def tick(t: float) -> None:
        since = t % period_s
        if since > lasts_s:
            held.clear()
        while since <= lasts_s and len(held) * MIB < height * since / lasts_s:
            held.append(bytearray(b"\1") * MIB)

    return tick


LEAKS: dict[str, Callable[[], Take]] = {
    function.__name__: function
    for function in (
        thread_stacks, written_snapshots, grown_mapping, sysv_segments, label_sets, user_vectors,
        abandoned_results, memory_database, memory_bios, tasks_left, finalizers, helper_heap,
    )
}  # fmt: skip
HEALTHY: dict[str, Callable[..., Tick]] = {
    function.__name__: function
    for function in (
        prompt_cache, large_cache, even_cache, doubling_table, high_water, night_jobs,
    )
}  # fmt: skip
