"""Memory of engines that grows and only looks like a leak: it ends by itself, or goes back.

Standard library only, like ``mechanisms.py``. It follows the clock; ``bounded_caches.py`` has what
follows the requests. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import math
import mmap
import queue
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

from leaklab.mechanisms import LARGE, MIB, PAGE, Tick, libc, touch, touched

SMALL, APART = 448, 400
"""Bytes of an object, and of so many of them one stays: more than one in each MiB."""
BYTES_HEADER, CRUMBS = 33, 8 << 10
"""Bytes of an empty ``bytes``, and the distance of the objects that are kept: one in each half of
a pool of CPython's."""
BUFFER, BUSY, SPREAD = 2 * MIB, 14.0, 5.0
"""Bytes of a buffer of a pool, and how many are in use at once: the mean and the deviation."""
PROGRAM = "import sys; held = bytearray(b'\\1') * int(sys.argv[1]); sys.stdin.read()"


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


def compile_cache(code: int = 14 * MIB, first_s: float = 4.0, most: int = 6) -> Tick:
    """Code that is compiled when a shape is first met, after ever longer times."""
    compiled: list[mmap.mmap] = []

    def tick(t: float) -> None:
        if len(compiled) < most and t >= first_s * 2 ** len(compiled):
            work = [touched(LARGE) for _ in range(code // LARGE)]
            compiled.append(mmap.mmap(-1, code, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            touch(compiled[-1])
            for block in work:
                libc.free(block)

    return tick


def resized_dict(entries: int = 800_000, fills_s: float = 110.0) -> Tick:
    """A dictionary of numbers that fills evenly, and doubles its table now and then."""
    table: dict[int, float] = {}

    def tick(t: float) -> None:
        for number in range(len(table), int(entries * min(1.0, t / fills_s))):
            table[1000 + number] = 0.1 * number

    return tick


def lazy_models(lasts_s: float = 4.0) -> Tick:
    """Two models that are loaded when somebody first asks for what they do."""
    held: list[bytearray] = []

    def loaded(t: float, at: float, size: int) -> float:
        return size * min(1.0, max(0.0, (t - at) / lasts_s))

    def tick(t: float) -> None:
        while len(held) * MIB < loaded(t, 40.0, 64 * MIB) + loaded(t, 150.0, 48 * MIB):
            held.append(bytearray(b"\1") * MIB)

    return tick


def arena_spread(work: int = 10 * MIB, period_s: float = 20.0, most: int = 8) -> Tick:
    """Threads of a pool that start one after the other. The arena of each keeps what its first
    work took: a crumb holds the top."""
    orders: list[queue.SimpleQueue[int]] = []
    turn = 0

    def run(mine: queue.SimpleQueue[int]) -> None:
        while size := mine.get():
            blocks = [touched(LARGE) for _ in range(size // LARGE)]
            touched(24)
            for block in blocks:
                libc.free(block)

    def tick(t: float) -> None:
        nonlocal turn
        if t < turn * period_s:
            return
        turn += 1
        if len(orders) < most:
            orders.append(queue.SimpleQueue())
            threading.Thread(target=run, args=orders[-1:], daemon=True).start()
        orders[turn % len(orders)].put(work)

    return tick


def weight_reload(size: int = 56 * MIB, period_s: float = 80.0, lasts_s: float = 15.0) -> Tick:
    """A small model that is loaded again from time to time, while the old one still serves."""
    serving: list[bytearray] = []
    reading: list[bytearray] = []

    def tick(t: float) -> None:
        nonlocal serving, reading
        since = t % period_s
        while since <= lasts_s and len(reading) * MIB < size * since / lasts_s:
            reading.append(bytearray(b"\1") * MIB)
        if since > lasts_s and reading:
            serving, reading = reading, []

    return tick


def flushed_log(per_s: int = MIB, period_s: float = 45.0) -> Tick:
    """A log that is gathered in memory and written out now and then."""
    gathered, written, since = bytearray(), 0.0, 0.0
    file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process

    def tick(t: float) -> None:
        nonlocal gathered, written, since
        gathered.extend(b"I" * max(0, int((t - written) * per_s)))
        written = t
        if t - since >= period_s:
            since = t
            file.seek(0)
            file.write(gathered)
            gathered = bytearray()

    return tick


def two_caches(first: int = 50 * MIB, second: int = 80 * MIB) -> Tick:
    """A cache that fills evenly, and one behind it that fills ever more slowly from then on."""

    def size(t: float) -> float:
        evenly = min(1.0, t / 40.0)
        return first * evenly + second * -math.expm1(-max(0.0, t - 40.0) / 35.0)

    return _fill(size)


def refilled_cache() -> Tick:
    """A cache that fills evenly, and fills again once its process has started again."""
    return even_cache(90 * MIB, 75.0)


def open_sessions(size: int = 400 << 10, per_s: float = 3.0, lasts_s: float = 60.0) -> Tick:
    """Sessions that open at random and end after some while, each with its buffers."""
    chance = random.Random(1)
    held: dict[int, tuple[float, bytearray]] = {}
    opened, due = 0, 0.0

    def tick(t: float) -> None:
        nonlocal opened, due
        for number in [number for number, (ends, _) in held.items() if ends <= t]:
            del held[number]
        while due <= t:
            held[opened] = (due + lasts_s * (0.5 + chance.random()), bytearray(b"\1") * size)
            opened += 1
            due += chance.expovariate(per_s)

    return tick


def pool_crumbs(work: int = 6 * MIB, period_s: float = 10.0, most: int = 14) -> Tick:
    """Work with objects of another size each time. A few of them stay, one in each pool, so that
    Python returns none of these pools."""
    kept: list[bytes] = []
    turn = 0

    def tick(t: float) -> None:
        nonlocal turn
        if turn < most and t >= turn * period_s:
            turn += 1
            size = 512 - 32 * turn
            objects = [bytes(size - BYTES_HEADER) for _ in range(work // size)]
            kept.extend(objects[:: CRUMBS // size])

    return tick


def short_programs(size: int = 40 * MIB, period_s: float = 40.0, lasts_s: float = 22.0) -> Tick:
    """A program for a piece of work now and then, with memory of its own, that ends."""
    running: subprocess.Popen[bytes] | None = None
    turn = 0

    def tick(t: float) -> None:
        nonlocal running, turn
        if t >= turn * period_s and running is None:
            turn += 1
            running = subprocess.Popen(
                [sys.executable, "-I", "-c", PROGRAM, str(size)], stdin=subprocess.PIPE
            )
        elif running is not None and t >= (turn - 1) * period_s + lasts_s:
            running.communicate()
            running = None

    return tick


def staircase(step: int = 16 * MIB, period_s: float = 20.0, most: int = 6) -> Tick:
    """A part that is loaded each time somebody first needs it, until all are there."""
    return _fill(lambda t: step * min(most, 1 + t // period_s))


def uneven_stairs() -> Tick:
    """The same with parts of different sizes, after ever longer times."""
    parts = (
        (0.0, 32 * MIB),
        (12.0, 20 * MIB),
        (33.0, 26 * MIB),
        (66.0, 12 * MIB),
        (120.0, 14 * MIB),
    )
    return _fill(lambda t: sum(size for at, size in parts if at <= t))


def object_spikes(
    height: int = 80 * MIB, period_s: float = 75.0, lasts_s: float = 25.0, most: int = 3
) -> Tick:
    """Work with many small objects. A few of them stay, in each of the arenas, so that Python
    returns none; the next work uses the arenas again."""
    work: list[bytes] = []
    kept: list[bytes] = []

    def tick(t: float) -> None:
        turn, since = divmod(t, period_s)
        if since <= lasts_s and turn < most:
            due = int(height * since / lasts_s) // SMALL
            work.extend(bytes(SMALL - BYTES_HEADER) for _ in range(due - len(work)))
        elif work:
            kept.extend(work[::APART])
            work.clear()

    return tick


def pooled_buffers(most: int = 36, draw_s: float = 1.0) -> Tick:
    """A pool of buffers that are used again. It has as many as were ever in use at once, so that a
    new one gets rare."""
    pool: list[mmap.mmap] = []
    busy, turn = random.Random(1), 0

    def tick(t: float) -> None:
        nonlocal turn
        while t >= turn * draw_s:
            turn += 1
            used = min(most, int(busy.gauss(BUSY * min(1.0, 0.2 + t / 60.0), SPREAD)))
            while len(pool) < used:
                pool.append(mmap.mmap(-1, BUFFER, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
                touch(pool[-1])

    return tick


def report_builds(
    least: int = 16 * MIB, most: int = 72 * MIB, period_s: float = 30.0, lasts_s: float = 6.0
) -> Tick:
    """Reports of any size, built now and then. The allocator keeps what the largest took: a crumb
    holds the top of the heap."""
    sizes = random.Random(1)
    work: list[int] = []
    turn, size, record = -1, 0, 0

    def tick(t: float) -> None:
        nonlocal turn, size, record
        if t >= (turn + 1) * period_s:
            turn += 1
            size = sizes.randrange(least, most)
        since = t - turn * period_s
        if since <= lasts_s:
            due = int(size * since / lasts_s) // LARGE
            work.extend(touched(LARGE) for _ in range(due - len(work)))
        elif work:
            if len(work) > record:
                record = len(work)
                touched(LARGE + PAGE)
            for block in work:
                libc.free(block)
            work.clear()

    return tick


HEALTHY: dict[str, Callable[..., Tick]] = {
    function.__name__: function
    for function in (
        prompt_cache, large_cache, even_cache, doubling_table, high_water, night_jobs,
        compile_cache, resized_dict, lazy_models, arena_spread, weight_reload, flushed_log,
        two_caches, refilled_cache, open_sessions, pool_crumbs, short_programs, staircase,
        uneven_stairs, object_spikes, pooled_buffers, report_builds,
    )
}  # fmt: skip
