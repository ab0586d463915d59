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

from leaklab.mechanisms import LARGE, MIB, PAGE, Take, mapped

USER, LINE = 512, 200
"""Bytes of what is known of a user, and of a line of a log."""
SEGMENT = 176 << 10
"""Bytes of an entry that glibc maps by itself, so that memory goes back when it is freed. From the
heap it would go back only if nothing newer lay above it."""
WORD = 448
"""Bytes of what is known of a word, with its place in the table."""
PREFIX = 568
"""Bytes of what is known of a prefix, with its place in the table: as measured in CPython 3.11."""
KEY, PROBES = 512, 4
"""Bytes of a filter for each of its keys, and the places that it sets for one."""
LEAST_MESSAGE = 64 << 10
RUN, PARTS = 4 * MIB, 32
"""Bytes of a run of pages before it is merged, and the parts that runs are merged into."""


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


def segmented_cache(bound: int = 144 * MIB, every: int = 2400) -> Take:
    """A cache of two segments: what is used a second time is protected from what is used once. It
    fills ever more slowly, because it misses less."""
    once: OrderedDict[int, mmap.mmap] = OrderedDict()
    protected: OrderedDict[int, mmap.mmap] = OrderedDict()
    uses = random.Random(1)

    def take(size: int) -> None:
        for _ in range(max(1, size // SEGMENT)):
            key = int(every * uses.random() ** 2)
            entry = once.pop(key, None) or protected.pop(key, None)
            if entry is None:
                once[key] = mapped(SEGMENT)
            else:
                protected[key] = entry
            if len(protected) * SEGMENT > bound // 5 * 4:
                again, entry = protected.popitem(last=False)
                once[again] = entry
            if (len(once) + len(protected)) * SEGMENT > bound:
                once.popitem(last=False)[1].close()

    return take


def clock_frames(bound: int = 112 * MIB, every: int = 200 * MIB // LARGE) -> Take:
    """Frames of a fixed number for pages, each made when it is first needed. After that, a hand
    that goes around takes the next frame whose page nobody has used since it last came by."""
    frames: list[bytearray] = []
    page_in: list[int] = []
    used: dict[int, bool] = {}
    uses, hand = random.Random(1), 0

    def take(size: int) -> None:
        nonlocal hand
        for _ in range(max(1, size // LARGE)):
            page = uses.randrange(every)
            if page in used:
                used[page] = True
                continue
            used[page] = False
            if len(frames) * LARGE < bound:
                frames.append(bytearray(b"\1") * LARGE)
                page_in.append(page)
                continue
            while used[page_in[hand]]:
                used[page_in[hand]] = False
                hand = (hand + 1) % len(frames)
            del used[page_in[hand]]
            page_in[hand] = page
            frames[hand][:] = b"\2" * LARGE
            hand = (hand + 1) % len(frames)

    return take


def filter_layers(first: int = 8 * MIB, most: int = 4) -> Take:
    """A filter of all users that ever came, which gets one more layer of twice the size when the
    last is full. There are as many users as its layers have room for, and then it is complete."""
    layers: list[mmap.mmap] = []
    rooms = [(first << i) // KEY for i in range(most)]
    count, hashes = 0, random.Random(1)

    def take(size: int) -> None:
        nonlocal count
        for _ in range(min(size // KEY, sum(rooms) - count)):
            if count == sum(rooms[: len(layers)]):
                room = rooms[len(layers)] * KEY
                layer = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                layer.madvise(mmap.MADV_NOHUGEPAGE)
                layers.append(layer)
            count += 1
            for _ in range(PROBES):
                layers[-1][hashes.randrange(len(layers[-1]))] = 1

    return take


def message_buffers(most: int = 4 * MIB, connections: int = 40) -> Take:
    """A buffer for each connection, as large as the largest message that came on it. Larger ones
    get rare, and none is larger than the protocol allows."""
    buffers = [mapped(PAGE) for _ in range(connections)]
    messages = random.Random(1)

    def take(size: int) -> None:
        for _ in range(max(1, size // LEAST_MESSAGE)):
            place = messages.randrange(connections)
            length = int(LEAST_MESSAGE * (most / LEAST_MESSAGE) ** messages.random())
            if length > len(buffers[place]):
                buffers[place].close()
                buffers[place] = mapped(length)

    return take


def merged_runs(every: int = 96 * MIB // PAGE, runs: int = 4) -> Take:
    """Runs of pages that were written last, merged now and then into parts that hold each page
    once. New pages get rare, because there are only so many."""
    unmerged: list[tuple[set[int], mmap.mmap]] = []
    merged = [(set[int](), mapped(PAGE)) for _ in range(PARTS)]
    writes, due = random.Random(1), 0

    def take(size: int) -> None:
        nonlocal due
        due += size
        while due >= RUN:
            due -= RUN
            written = {writes.randrange(every) for _ in range(RUN // PAGE)}
            unmerged.append((written, mapped(RUN)))
            if len(unmerged) < runs:
                continue
            new = set[int]().union(*(one for one, _ in unmerged))
            for part in range(PARTS):
                held, before = merged[part]
                held |= {page for page in new if page % PARTS == part}
                merged[part] = held, mapped(max(1, len(held)) * PAGE)
                before.close()
            for _, run in unmerged:
                run.close()
            unmerged.clear()

    return take


def shared_ring(bound: int = 120 * MIB) -> Take:
    """A ring in shared memory for another process: its pages are there once they are first
    written, and then it turns."""
    ring = mmap.mmap(-1, bound, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    written = 0

    def take(size: int) -> None:
        nonlocal written
        for _ in range(size // PAGE):
            ring[written % bound] = 1
            written += PAGE

    return take


BOUNDED: dict[str, Callable[..., Take]] = {
    function.__name__: function
    for function in (
        answer_cache, known_users, audit_ring, touched_table, generational_cache, seen_words,
        expiring_entries, recent_prefixes, segmented_cache, clock_frames, filter_layers,
        message_buffers, merged_runs, shared_ring,
    )
}  # fmt: skip
