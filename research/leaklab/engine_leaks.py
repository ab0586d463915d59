"""What engines keep that the first recordings do not have: leaks by other means.

Standard library only, like ``mechanisms.py``: each takes memory in pieces and never gives it back.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import functools
import mmap
import os
import resource
import sqlite3
import ssl
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import BinaryIO
from xml.etree import ElementTree

from leaklab.mechanisms import LARGE, PAGE, Take, libc, pages, touch

LABELS, OWNED, ROW = 512, 1024, 4096
"""Bytes that an entry of a table of labels takes, an object with its finalizer, and a row."""
RECORD, CALLBACK, ELEMENT = 168, 600, 230
"""The same of three floats and ints in a tuple, a bound callback, and an element with its text: as
measured in CPython 3.11 and 3.12."""
FILE_BUFFER = 2 * LARGE - PAGE
"""Below the size from which malloc maps a block of its own."""
SESSIONS, NO_ACCESS = 32, 0
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
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
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


def token_records() -> Take:
    """A record of each token that was ever made: its number, its probability and its time."""
    records: list[tuple[int, float, float]] = []

    def take(size: int) -> None:
        for _ in range(size // RECORD):
            number = 1000 + len(records)
            records.append((number, -0.1 * number, 0.2 * number))

    return take


def registered_callbacks() -> Take:
    """Callbacks that are registered for each request and never removed, with what they are bound
    to."""
    callbacks: list[Callable[[], int]] = []

    def take(size: int) -> None:
        for _ in range(size // CALLBACK):
            callbacks.append(functools.partial(len, bytes(400)))

    return take


def kept_tracebacks() -> Take:
    """Errors of clients that left. Each has its traceback, whose frames hold their buffers."""
    errors: list[ConnectionError] = []

    def fail() -> None:
        buffer = bytearray(b"\1") * LARGE
        raise ConnectionError(len(buffer))

    def take(size: int) -> None:
        for _ in range(max(1, size // LARGE)):
            try:
                fail()
            except ConnectionError as error:
                errors.append(error)

    return take


def unflushed_files() -> Take:
    """Files that are open with a buffer that is never flushed."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    files: list[BinaryIO] = []

    def take(size: int) -> None:
        for _ in range(max(1, size // FILE_BUFFER)):
            file = open(os.devnull, "wb", buffering=FILE_BUFFER)  # noqa: SIM115 - never closed
            file.write(b"\1" * (FILE_BUFFER - 1))
            files.append(file)

    return take


def parsed_documents() -> Take:
    """The trees of documents that were read once."""
    trees: list[ElementTree.Element] = []

    def take(size: int) -> None:
        tree = ElementTree.Element("document")
        for number in range(size // ELEMENT):
            ElementTree.SubElement(tree, "p").text = f"{number:0100}"
        trees.append(tree)

    return take


def guarded_stacks() -> Take:
    """Stacks of coroutines in C, each behind a page that must not be touched."""
    kept: list[mmap.mmap] = []

    def take(size: int) -> None:
        stack = mmap.mmap(-1, PAGE + pages(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        touch(stack, PAGE)
        if libc.mprotect(ctypes.addressof(ctypes.c_char.from_buffer(stack)), PAGE, NO_ACCESS) != 0:
            raise OSError(ctypes.get_errno(), "mprotect: the guard page could not be made")
        kept.append(stack)

    return take


def code_pages() -> Take:
    """Pages of compiled code that are never unloaded."""
    kept: list[mmap.mmap] = []
    prot = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC

    def take(size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        kept.append(mmap.mmap(-1, pages(size), flags=flags, prot=prot))
        touch(kept[-1])

    return take


def shared_arenas() -> Take:
    """Anonymous shared memory, as it is mapped before a fork."""
    kept: list[mmap.mmap] = []

    def take(size: int) -> None:
        arena = mmap.mmap(-1, pages(size), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        touch(arena)
        kept.append(arena)

    return take


def transcripts() -> Take:
    """What each session has said, in blocks of the C heap that grow in turn and never end."""
    blocks: list[tuple[int, int]] = [(0, 0)] * SESSIONS
    turn = 0

    def take(size: int) -> None:
        nonlocal turn
        address, before = blocks[turn % SESSIONS]
        address = libc.realloc(address or None, before + size)
        if not address:
            raise MemoryError(f"realloc({before + size})")
        libc.memset(address + before, 1, size)
        blocks[turn % SESSIONS] = (address, before + size)
        turn += 1

    return take


LEAKS: dict[str, Callable[[], Take]] = {
    function.__name__: function
    for function in (
        thread_stacks, written_snapshots, grown_mapping, sysv_segments, label_sets, user_vectors,
        abandoned_results, memory_database, memory_bios, tasks_left, finalizers, helper_heap,
        token_records, registered_callbacks, kept_tracebacks, unflushed_files, parsed_documents,
        guarded_stacks, code_pages, shared_arenas, transcripts,
    )
}  # fmt: skip
