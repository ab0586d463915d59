"""Caches that take memory as they are used, and only look like leaks: each stops at its bound.

This module imports only the standard library and ``mechanisms.py``. As with leaks, the caller
passes the number of bytes to take. Sizes are in bytes.
"""

from __future__ import annotations

import itertools
import mmap
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from leaklab.mechanisms import LARGE, MIB, PAGE, Take

USER, LINE = 512, 200
"""Bytes of what is known of a user, and of a line of a log."""
SEGMENT = 176 << 10
"""Bytes of an entry that glibc maps by itself, so that memory goes back when it is freed. From the
heap it would go back only if nothing newer lay above it."""
WORD = 448
"""Bytes of what is known of a word, with its place in the table."""
PREFIX = 568
"""Bytes of what is known of a prefix, with its place in the table: as measured in CPython 3.11."""


def answer_cache(bound: int = 72 * MIB) -> Take:
    """Answers to the newest requests: the oldest goes where there is no room."""
    answers: OrderedDict[int, bytearray] = OrderedDict()
    number = 0

    def take(size: int) -> None:
        nonlocal number
        for _ in range(max(1, size // LARGE)):
            number += 1
            answers[number] = bytearray(b"\1") * LARGE
            if len(answers) * LARGE > bound:
                answers.popitem(last=False)

    return take


def known_users(every: int = 280 * MIB // USER) -> Take:
    """What is known of each of so many users. Who comes is any of them, so that new ones get rare.
    All together are more than the budget of a recording."""
    known: dict[int, bytes] = {}
    who = random.Random(1)

    def take(size: int) -> None:
        for _ in range(size // USER):
            user = who.randrange(every)
            if user not in known:
                known[user] = bytes(USER - 128)

    return take


def audit_ring(bound: int = 80 * MIB) -> Take:
    """The newest lines of a log, in a ring that fills evenly and then turns."""
    lines: deque[bytes] = deque(maxlen=bound // (LINE + 56))

    def take(size: int) -> None:
        lines.extend(b"I" * LINE for _ in range(size // (LINE + 56)))

    return take


def touched_table(size: int = 112 * MIB) -> Take:
    """A table of fixed size whose pages become resident when they are first written, in the order
    of a hash."""
    table = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    table.madvise(mmap.MADV_NOHUGEPAGE)
    hashes = random.Random(1)

    def take(taken: int) -> None:
        for _ in range(taken // PAGE):
            table[hashes.randrange(size // PAGE) * PAGE] = 1

    return take


def generational_cache(bound: int = 48 * MIB) -> Take:
    """A cache of two generations: when the young one has reached its bound, it replaces the old
    one as a whole. It holds from one bound to two."""
    young: list[bytearray] = []
    old: list[bytearray] = []

    def take(size: int) -> None:
        nonlocal young, old
        for _ in range(max(1, size // SEGMENT)):
            young.append(bytearray(b"\1") * SEGMENT)
            if len(young) * SEGMENT >= bound:
                young, old = [], young

    return take


def seen_words(every: int = 112 * MIB // WORD) -> Take:
    """What is known of each word of a vocabulary. The n-th is used 1/n as often as the first, so
    that new words get rare, but come for a long time."""
    shares = list(itertools.accumulate(1 / rank for rank in range(1, every + 1)))
    known: dict[int, bytes] = {}
    text = random.Random(1)

    def take(size: int) -> None:
        for word in text.choices(range(every), cum_weights=shares, k=size // WORD):
            if word not in known:
                known[word] = bytes(WORD - 128)

    return take


def expiring_entries(
    bound: int = 64 * MIB, lives_s: float = 75.0, clock: Callable[[], float] = time.monotonic
) -> Take:
    """What was computed for a user, kept for some while: what is too old goes, and the oldest
    where there is no room."""
    entries: deque[tuple[float, bytearray]] = deque()

    def take(size: int) -> None:
        now = clock()
        for _ in range(max(1, size // LARGE)):
            entries.append((now, bytearray(b"\1") * LARGE))
            while entries[0][0] < now - lives_s or len(entries) * LARGE > bound:
                entries.popleft()

    return take


def recent_prefixes(bound: int = 64 * MIB, every: int = 160 * MIB // PREFIX) -> Take:
    """What is known of the prefixes that were used last. Some are used more often than others, so
    that new ones get rarer, until the oldest go."""
    known: OrderedDict[int, bytes] = OrderedDict()
    uses = random.Random(1)

    def take(size: int) -> None:
        for _ in range(size // PREFIX):
            prefix = int(every * uses.random() ** 2)
            if prefix in known:
                known.move_to_end(prefix)
                continue
            known[prefix] = bytes(USER - 128)
            if len(known) * PREFIX > bound:
                known.popitem(last=False)

    return take


BOUNDED: dict[str, Callable[..., Take]] = {
    function.__name__: function
    for function in (
        answer_cache, known_users, audit_ring, touched_table, generational_cache, seen_words,
        expiring_entries, recent_prefixes,
    )
}  # fmt: skip
