"""More memory of engines that grows and only looks like a leak: it ends by itself, or goes back.

Standard library and ``mechanisms.py`` only. It follows the clock, like ``bounded_growth.py``. Sizes
are in bytes, times in seconds.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable

from leaklab.mechanisms import LARGE, MIB, PAGE, Tick, libc, mapped, touched

SEGMENT = 256 << 10
"""Bytes of a buffer that has a mapping of its own."""


def first_fill(bound: int = 64 * MIB, fills_s: float = 50.0) -> Tick:
    """Tables that fill evenly while an engine is new, and never again."""
    held = 0

    def tick(t: float) -> None:
        nonlocal held
        while held + LARGE <= bound * min(1.0, t / fills_s):
            touched(LARGE)
            held += LARGE

    return tick


def drained_backlog(
    most: int = 108 * MIB, rises_s: float = 90.0, drains_s: float = 50.0, period_s: float = 200.0
) -> Tick:
    """Results for a sink that is too slow for a while. Then it is fast again, and takes all that
    has piled up."""
    waiting: deque[mmap.mmap] = deque()

    def tick(t: float) -> None:
        since = t % period_s
        share = min(since / rises_s, max(0.0, 1.0 - (since - rises_s) / drains_s))
        while (len(waiting) + 1) * SEGMENT <= most * share:
            waiting.append(mapped(SEGMENT))
        while len(waiting) * SEGMENT > most * share:
            waiting.popleft().close()

    return tick


def late_burst(
    most: int = 140 * MIB, starts_s: float = 35.0, rises_s: float = 50.0, ends_s: float = 105.0
) -> Tick:
    """One great piece of work. The allocator keeps what it took: a crumb holds the top of the
    heap."""
    work: list[int] = []

    def tick(t: float) -> None:
        if starts_s <= t < ends_s:
            due = int(most * min(1.0, (t - starts_s) / rises_s)) // LARGE
            work.extend(touched(LARGE) for _ in range(due - len(work)))
        elif work:
            touched(LARGE + PAGE)
            for block in work:
                libc.free(block)
            work.clear()

    return tick


def deferred_frees(per_s: int = 1100 << 10, period_s: float = 95.0) -> Tick:
    """Buffers that are no longer used, and are freed together when the epoch ends in which somebody
    could still read them."""
    retired: list[mmap.mmap] = []

    def tick(t: float) -> None:
        due = int(per_s * (t % period_s)) // SEGMENT
        if due < len(retired):
            for buffer in retired:
                buffer.close()
            retired.clear()
        retired.extend(mapped(SEGMENT) for _ in range(due - len(retired)))

    return tick


HEALTHY: dict[str, Callable[..., Tick]] = {
    function.__name__: function
    for function in (first_fill, drained_backlog, late_burst, deferred_frees)
}
