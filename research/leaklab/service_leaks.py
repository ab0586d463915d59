"""How services of models come to hold memory: a table, a queue or a file that nobody empties.

Standard library and ``mechanisms.py`` only; :func:`kept_logits` needs the torch of its process.
Each leak takes a piece of memory at each call, and never frees it. Sizes are in bytes. Every page
that is taken is written, so that it is resident.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import pickle
import queue
import random
import resource
import socket
import sqlite3
import sys
import tempfile
import threading
import zlib
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import Any

from leaklab.mechanisms import BUFFER, Take, fragmentation

KIB, MIB = 1 << 10, 1 << 20
BLOCK, CHUNK, LINE = 64 * KIB, 4 * KIB, 200
CHUNKS = 16
"""That nobody reads, of each answer."""
ENTRY, NUMBERS = 500, 8
"""Of a table by request: the key, a tuple of floats, and its share of the table, in Python 3.12."""
TOKEN, SESSIONS = 41, 64
"""A token of a history: an int in pymalloc's memory, and its place in a list with some room."""
ARENAS = 4
"""Threads that work beside each other, each in an arena of malloc's of its own."""
ROW, ROW_TEXT = 4 * KIB // 4, 980
"""Four rows with that much text fill a page of SQLite's."""
COMPRESSOR = 256 * KIB
"""zconf.h: (1 << (windowBits + 2)) + (1 << (memLevel + 9)) with the defaults, 15 and 8."""
LOGITS = 4 * KIB
HEADER, REPLY = 40, 16 * KIB
CALL, NODE = 1024, 257
"""What a call to another process takes beside its reply, and a node of a tree with its token: as
measured in CPython 3.11 and 3.12."""


def request_table() -> Take:
    """A table by request id, whose entries nobody removes."""
    table: dict[str, tuple[float, ...]] = {}

    def take(size: int) -> None:
        for _ in range(size // ENTRY):
            number = len(table)
            table[f"cmpl-{number:032x}"] = tuple(number + 0.1 * i for i in range(NUMBERS))

    return take


def unread_queues() -> Take:
    """The queues of answers whose clients left: the pieces are still in them."""
    kept: list[asyncio.Queue[bytes]] = []

    def take(size: int) -> None:
        for _ in range(size // (CHUNK * CHUNKS)):
            unread: asyncio.Queue[bytes] = asyncio.Queue()
            for _ in range(CHUNKS):
                unread.put_nowait(b"\1" * CHUNK)
            kept.append(unread)

    return take


def log_buffer() -> Take:
    """A log that is gathered in memory and never written out: one block that grows."""
    gathered = bytearray()

    def take(size: int) -> None:
        for _ in range(size // LINE):
            gathered.extend(b"I" * LINE)

    return take


def kept_bodies() -> Take:
    """Bodies of answers, from some KiB to more than a hundred."""
    kept: list[bytes] = []
    sizes = random.Random(1)

    def take(size: int) -> None:
        while size > 0:
            length = min(size, int(2 * KIB * 60 ** sizes.random()))
            kept.append(b"{" * length)
            size -= length

    return take


def open_connections() -> Take:
    """Connections whose other end is gone, with the buffer to read into."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    kept: list[tuple[socket.socket, bytearray]] = []

    def take(size: int) -> None:
        for _ in range(size // BLOCK):
            mine, theirs = socket.socketpair()
            theirs.close()
            kept.append((mine, bytearray(b"\1") * BLOCK))

    return take


def private_copies() -> Take:
    """A file that is mapped again and again, to be changed in memory alone."""
    kept: list[mmap.mmap] = []
    file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
    file.write(bytes(MIB))
    file.flush()

    def take(size: int) -> None:
        while size > 0:
            mapping = mmap.mmap(file.fileno(), min(size, MIB), access=mmap.ACCESS_COPY)
            for offset in range(0, len(mapping), mmap.PAGESIZE):
                mapping[offset] = 1
            kept.append(mapping)
            size -= len(mapping)

    return take


def thread_arenas() -> Take:
    """Buffers that are shrunk to a crumb, in the arenas of several threads."""
    orders: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[None] = queue.SimpleQueue()

    def work() -> None:
        take_here = fragmentation()
        while True:
            take_here(orders.get())
            done.put(None)

    for _ in range(ARENAS):
        threading.Thread(target=work, daemon=True).start()

    def take(size: int) -> None:
        for _ in range(ARENAS):
            orders.put(size // ARENAS)
        for _ in range(ARENAS):
            done.get()

    return take


def kept_logits() -> Take:
    """The last row of each step's logits: it holds all of the others."""
    torch: Any = sys.modules["torch"]
    kept: list[Any] = []

    def take(size: int) -> None:
        logits = torch.ones(size // LOGITS, LOGITS // 4, dtype=torch.float32)
        kept.append(logits[-1])

    return take


def open_compressors() -> Take:
    """Compressed streams that are never finished, each with zlib's window and tables."""
    kept: list[Any] = []
    fill = os.urandom(4 * BLOCK)

    def take(size: int) -> None:
        for _ in range(size // COMPRESSOR):
            stream = zlib.compressobj()
            stream.compress(fill)
            kept.append(stream)

    return take


def streams_left() -> Take:
    """Generators of answers that wait at their first piece, with all that their frames hold."""
    kept: list[AsyncGenerator[int, None]] = []

    async def answer(size: int) -> AsyncGenerator[int, None]:
        pieces = [b"\1" * (2 * BUFFER) for _ in range(size // (2 * BUFFER))]
        for piece in pieces:
            yield len(piece)

    def take(size: int) -> None:
        stream = answer(size)
        with contextlib.suppress(StopIteration):
            stream.asend(None).send(None)
        kept.append(stream)

    return take


def histories() -> Take:
    """Chats that never end: each turn's tokens are added to the list of their session."""
    sessions: list[list[int]] = [[] for _ in range(SESSIONS)]
    turn = 0

    def take(size: int) -> None:
        nonlocal turn
        turn += 1
        first = 1000 * turn
        sessions[turn % SESSIONS].extend(first + i for i in range(size // TOKEN))

    return take


def ledger() -> Take:
    """A database in memory with a row for each thing that happened."""
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.execute("CREATE TABLE happened (what BLOB)")

    def take(size: int) -> None:
        rows = ((b"\1" * ROW_TEXT,) for _ in range(size // ROW))
        database.execute("BEGIN")
        database.executemany("INSERT INTO happened VALUES (?)", rows)
        database.execute("COMMIT")

    return take


def threads_left() -> Take:
    """Threads that never end, each with the buffers of its work."""

    def work(size: int) -> None:
        buffers = [bytearray(b"\1") * BLOCK for _ in range(size // BLOCK)]
        threading.Event().wait()
        buffers.clear()

    def take(size: int) -> None:
        threading.Thread(target=work, args=(size,), daemon=True).start()

    return take


def memory_files() -> Take:
    """Files in /dev/shm that are mapped and written, as queues between processes are."""
    kept: list[mmap.mmap] = []

    def take(size: int) -> None:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.truncate(size)
            mapping = mmap.mmap(file.fileno(), size)
        mapping.write(b"\1" * size)
        kept.append(mapping)

    return take


def receive_buffers() -> Take:
    """Headers of messages, as views: each holds the whole buffer that its message came in."""
    kept: list[memoryview] = []

    def take(size: int) -> None:
        for _ in range(max(1, size // BLOCK)):
            kept.append(memoryview(bytearray(b"\1") * BLOCK)[:HEADER])

    return take


def pending_calls() -> Take:
    """Pending calls to another process, in a table by number. Their callers have left, so nobody
    takes the replies out."""
    calls: dict[int, Future[bytes]] = {}

    def take(size: int) -> None:
        for _ in range(max(1, size // REPLY)):
            call: Future[bytes] = Future()
            calls[len(calls)] = call
            call.set_result(pickle.dumps(b"\1" * (REPLY - CALL)))

    return take


def prefix_tree() -> Take:
    """A tree of all prompts and answers that ever were: a node for each token, never pruned."""
    root: dict[int, Any] = {}
    count = 1000

    def take(size: int) -> None:
        nonlocal count
        node = root
        for _ in range(size // NODE):
            count += 1
            node[count] = {}
            node = node[count]

    return take


LEAKS: dict[str, Callable[[], Take]] = {
    function.__name__: function
    for function in (
        request_table, unread_queues, log_buffer, kept_bodies, open_connections, private_copies,
        thread_arenas, kept_logits, open_compressors, streams_left, histories, ledger,
        threads_left, memory_files, receive_buffers, pending_calls, prefix_tree,
    )
}  # fmt: skip
