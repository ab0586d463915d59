"""What Python's runtime, its libraries and the kernel keep for a program: leaks by such means.

Standard library and ``mechanisms.py`` only; :func:`shared_tensors` needs the torch of its process.
Each leak takes a piece of memory at each call, and never frees it. Sizes are in bytes. Every page
that is taken is written, so that it is resident.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import logging.handlers
import mmap
import multiprocessing
import multiprocessing.sharedctypes
import os
import queue
import random
import ssl
import sys
import threading
from collections.abc import Callable
from typing import Any

from leaklab.mechanisms import LARGE, MIB, PAGE, Take, libc, pages, touch

NAME, RECORD, CLASS, WRAPPER = 256, 770, 1760, 466
"""Bytes that an interned name takes with its share of the table, a record of a log, a class with
one method and its attributes, and a wrapped function with what it remembers: as measured in
CPython 3.11 and 3.12."""
LOGGER, CONTEXT = 560, 560
"""The same of a logger with its places in two tables, and of a context with one variable."""
CLIENT, CLIENT_BUFFER = 45 << 10, 32 << 10
"""Bytes of a client with its TLS context, as measured with OpenSSL 3.0, and of its buffer."""
VALUE, VALUE_NAME = 4064, b"REQUEST_STATE"
"""Bytes that a value of a variable takes in the C heap, as measured in glibc 2.36."""
WORKERS = 4
FAR_S = 86_400.0
MESSAGE = 16 << 10
RESERVED = 8 << 30
"""Bytes of a table that is reserved at once and filled page by page."""


def interned_strings() -> Take:
    """Names of users, interned: what is interned by C code is kept for good."""
    count = 0
    kept: list[str] = []

    def take(size: int) -> None:
        nonlocal count
        for _ in range(size // NAME):
            count += 1
            kept.append(sys.intern(f"user-{count}".ljust(NAME - 96, ".")))

    return take


def distant_timers() -> Take:
    """Timers of an event loop that end in a day, each with the buffer of a request that has ended
    long before."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def start(count: int, done: threading.Event) -> None:
        for _ in range(count):
            loop.call_later(FAR_S, len, bytearray(b"\1") * LARGE)
        done.set()

    def take(size: int) -> None:
        done = threading.Event()
        loop.call_soon_threadsafe(start, max(1, size // LARGE), done)
        done.wait()

    return take


def log_records() -> Take:
    """Records of a log that are gathered for a handler which is never full."""
    target = logging.NullHandler()
    handler = logging.handlers.MemoryHandler(sys.maxsize, logging.CRITICAL + 1, target)

    def take(size: int) -> None:
        for number in range(size // RECORD):
            handler.handle(
                logging.LogRecord(
                    "engine", logging.INFO, __file__, 1000 + number, "%s ended after %s",
                    (f"request-{number}", 0.1 * number), None,
                )
            )  # fmt: skip

    return take


def dynamic_classes() -> Take:
    """A class that is made for the schema of each request, and stays in the list of its kind."""
    kinds: list[type] = []

    def take(size: int) -> None:
        for _ in range(size // CLASS):
            number = len(kinds)
            fields = {f"field_{number}": number, "check": lambda self: self, "__slots__": ()}
            kinds.append(type(f"Answer{number}", (), fields))

    return take


def wrapped_handlers() -> Take:
    """A handler that is wrapped once more for each request: a chain of functions without end."""
    chain: list[Callable[..., Any]] = [len]

    def wrap(handler: Callable[..., Any], about: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            return handler(*given), about

        return call

    def take(size: int) -> None:
        for number in range(size // WRAPPER):
            chain[0] = wrap(chain[0], f"request-{number:080}")

    return take


def kept_uploads() -> Take:
    """Images as they were uploaded, of some hundred KiB each: malloc maps each for itself."""
    kept: list[bytes] = []

    def take(size: int) -> None:
        while size > 0:
            length = min(size, MIB // 2)
            kept.append(b"\1" * length)
            size -= length

    return take


def unsent_messages() -> Take:
    """A queue to another process, which does not read it: the messages wait in this one."""
    unread: multiprocessing.Queue[bytes] = multiprocessing.get_context("spawn").Queue()
    unread.cancel_join_thread()

    def take(size: int) -> None:
        for _ in range(max(1, size // MESSAGE)):
            unread.put(os.urandom(8) * (MESSAGE // 8))

    return take


def shared_tensors() -> Take:
    """Tensors that were moved to shared memory to pass them on, and are kept."""
    torch: Any = sys.modules["torch"]
    kept: list[Any] = []

    def take(size: int) -> None:
        kept.append(torch.ones(size, dtype=torch.uint8).share_memory_())

    return take


def growing_channel() -> Take:
    """A channel to another process that grows in place: one file in memory."""
    file = os.memfd_create("channel")
    os.ftruncate(file, PAGE)
    channel = mmap.mmap(file, PAGE, flags=mmap.MAP_SHARED)

    def take(size: int) -> None:
        before = len(channel)
        channel.resize(before + pages(size))
        touch(channel, before)

    return take


def sparse_table() -> Take:
    """A table that is reserved at once, and whose pages are filled in the order of a hash."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    table = mmap.mmap(-1, RESERVED, flags=flags)
    # A huge page would be resident as a whole.
    table.madvise(mmap.MADV_NOHUGEPAGE)
    filled, hashes = set[int](), random.Random(1)

    def take(size: int) -> None:
        upto = len(filled) + size // PAGE
        while len(filled) < upto:
            place = hashes.randrange(RESERVED // PAGE)
            table[place * PAGE] = 1
            filled.add(place)

    return take


def named_loggers() -> Take:
    """A logger with the name of each request: the logging module keeps every one of them."""
    count = 0

    def take(size: int) -> None:
        nonlocal count
        for _ in range(size // LOGGER):
            count += 1
            logging.getLogger(f"engine.request.{count}")

    return take


def context_variables() -> Take:
    """The contexts of requests that were left, each with its own value of a variable."""
    about: contextvars.ContextVar[str] = contextvars.ContextVar("about")
    kept: list[contextvars.Context] = []

    def take(size: int) -> None:
        for _ in range(size // CONTEXT):
            context = contextvars.copy_context()
            context.run(about.set, f"request-{len(kept):0300}")
            kept.append(context)

    return take


def client_contexts() -> Take:
    """A client with a TLS context of its own for each request, which nobody closes."""
    kept: list[tuple[ssl.SSLContext, bytes]] = []

    def take(size: int) -> None:
        for _ in range(max(1, size // CLIENT)):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            kept.append((context, b"\1" * CLIENT_BUFFER))

    return take


def thread_locals() -> Take:
    """What the threads of a pool keep of each request in variables of their own."""
    mine = threading.local()
    orders: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[None] = queue.SimpleQueue()

    def work() -> None:
        mine.buffers = []
        while True:
            count = orders.get()
            mine.buffers.extend(bytearray(b"\1") * LARGE for _ in range(count))
            done.put(None)

    for _ in range(WORKERS):
        threading.Thread(target=work, daemon=True).start()

    def take(size: int) -> None:
        orders.put(max(1, size // LARGE))
        done.get()

    return take


def environment_values() -> Take:
    """A variable of the environment that is set for each request: the C library keeps every value
    that one ever had."""
    count = 0

    def take(size: int) -> None:
        nonlocal count
        for _ in range(size // VALUE):
            count += 1
            libc.setenv(VALUE_NAME, f"{count} ".encode().ljust(VALUE - 64, b"."), 1)

    return take


def huge_pages() -> Take:
    """Arenas that ask for huge pages, and are never reset."""
    kept: list[mmap.mmap] = []

    def take(size: int) -> None:
        arena = mmap.mmap(-1, pages(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            arena.madvise(mmap.MADV_HUGEPAGE)
        touch(arena)
        kept.append(arena)

    return take


def raw_arrays() -> Take:
    """Arrays on the shared heap of the multiprocessing module, for readers that have ended."""
    kept: list[Any] = []

    def take(size: int) -> None:
        kept.append(multiprocessing.sharedctypes.RawArray("b", size))

    return take


LEAKS: dict[str, Callable[[], Take]] = {
    function.__name__: function
    for function in (
        interned_strings, distant_timers, log_records, dynamic_classes, wrapped_handlers,
        kept_uploads, unsent_messages, shared_tensors, growing_channel, sparse_table, named_loggers,
        context_variables, client_contexts, thread_locals, environment_values, huge_pages,
        raw_arrays,
    )
}  # fmt: skip
